"""Weights that torchvision and timm publish are checkpoints by name; here random ones lie where the real would be."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from support.notes import Notes
from torch.utils.data import TensorDataset
from torchvision.models import get_model, get_model_weights

import ewc_finetune as ewc
from ewc_finetune.checkpoint.location import is_there, local_name
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.checkpoint.published import find_published, is_published
from ewc_finetune.commands.consolidate import default_output as anchor_of
from ewc_finetune.commands.finetune import default_output
from ewc_finetune.data.transform import IMAGENET_MEAN, Transform
from ewc_finetune.errors import ArchitectureError, CheckpointError, DataError

SHUFFLE = "torchvision:shufflenet_v2_x0_5?weights=IMAGENET1K_V1"
MOBILE = "timm:mobilenetv3_small_050?weights=lamb_in1k"
DATA = "digits?limit=20&channels=3&size=32"
QUICK = {"head": "new", "epochs": 1, "eval_on": [], "batch_size": 10}


@pytest.fixture
def of_torchvision(tmp_path, monkeypatch):
    """Random weights where torch's own downloads lie; nothing is downloaded."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    torch.manual_seed(0)
    model = get_model("shufflenet_v2_x0_5").eval()
    place = find_published(SHUFFLE).place
    assert place.name == Path(get_model_weights("shufflenet_v2_x0_5").IMAGENET1K_V1.url).name
    place.parent.mkdir(parents=True)
    torch.save(model.state_dict(), place)
    return model


@pytest.fixture
def of_timm(hub):
    torch.manual_seed(0)
    model = timm.create_model("mobilenetv3_small_050").eval()
    hub.create("timm/mobilenetv3_small_050.lamb_in1k")
    weights = safetensors.torch.save(model.state_dict())
    hub.put("timm/mobilenetv3_small_050.lamb_in1k", {"model.safetensors": weights, "config.json": b"{}"})
    return model


def test_torchvisions_are_a_checkpoint(of_torchvision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded, images = open_model(SHUFFLE), torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(loaded.model(images), of_torchvision(images))
    assert loaded.metadata.architecture == "torchvision:shufflenet_v2_x0_5?num_classes=1000"
    assert is_there(SHUFFLE)
    assert local_name(SHUFFLE) == Path("shufflenet_v2_x0_5")
    assert anchor_of(SHUFFLE, "digits") == Path("shufflenet_v2_x0_5.anchor.safetensors")
    assert default_output(SHUFFLE, [], "digits") == Path("shufflenet_v2_x0_5-digits.pt")
    assumed = loaded.assumption
    assert (assumed.source, assumed.transform.resize, assumed.transform.mean) == ("weights", 256, IMAGENET_MEAN)


def test_a_new_head_on_torchvisions(of_torchvision, ewc_ft, tmp_path):
    head = ("--head", "new", "--epochs", 1, "--output", "m.pt")
    result = ewc_ft("finetune", "--model", SHUFFLE, "--data", DATA, *head)
    assert "head fc: a new one, with 10 outputs in the place of 1000" in result.stderr
    assert "as torchvision's weights of shufflenet_v2_x0_5 were trained" in result.stderr
    again = open_model(tmp_path / "m.pt")
    assert again.metadata.architecture == "torchvision:shufflenet_v2_x0_5?num_classes=10"
    document = json.loads((tmp_path / "m.run" / "run.json").read_text())
    assert document["options"]["model"] == SHUFFLE
    ewc_ft("consolidate", "m.pt", "--data", DATA, "--batch-size", 10, "--samples", 10)


def test_timms_are_a_checkpoint(of_timm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notes, images = Notes(), torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(open_model(MOBILE).model(images), of_timm(images))
    ewc.finetune(MOBILE, DATA, output="m.safetensors", progress=notes, **QUICK)
    assert notes.about("as timm's weights of mobilenetv3_small_050 were trained")
    again = open_model("m.safetensors")
    assert again.metadata.architecture == "timm:mobilenetv3_small_050?num_classes=10"
    assert again.model.get_classifier().out_features == 10
    assert default_output(MOBILE, [], "digits") == Path("mobilenetv3_small_050-digits.safetensors")
    assert not is_published("timm:swinv2_cr_tiny_224?num_weights=3")
    # Fresh weights of the same architecture, as of torchvision's.
    done = ewc.finetune("timm:mobilenetv3_small_050", DATA, **{**QUICK, "head": "shared"})
    assert done.model.get_classifier().out_features == 10


def test_how_timm_wants_its_images():
    whole = find_published("timm:resnet18?weights=DEFAULT")
    assert whole.architecture == "timm:resnet18?num_classes=1000"
    assert str(whole.place) == "hf://timm/resnet18.a1_in1k/model.safetensors"
    known = {"interpolation": "bicubic", "mean": IMAGENET_MEAN, "std": (0.229, 0.224, 0.225)}
    assert whole.transform == Transform(resize=235, crop=(224, 224), **known)
    squashed = find_published("timm:convnext_base?weights=fb_in22k_ft_in1k_384").transform
    assert (squashed.size, squashed.crop, squashed.resize) == ((384, 384), (384, 384), None)
    assert find_published("timm:vit_small_patch14_dinov2?weights=DEFAULT").architecture.endswith("num_classes=0")


def test_an_encoder_of_timm_gets_a_head(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    state = timm.create_model("mobilenetv3_small_050", num_classes=0).state_dict()
    torch.save(state, "m.pt")
    name = "timm:mobilenetv3_small_050?num_classes=0"
    with pytest.raises(
        ArchitectureError, match="without classes, whose outputs are no predictions. .* --head new makes"
    ):
        ewc.consolidate("m.pt", DATA, architecture=name)
    ewc.finetune("m.pt", DATA, architecture=name, output="c.pt", **QUICK)
    again = open_model("c.pt")
    assert again.metadata.architecture == "timm:mobilenetv3_small_050?num_classes=10"
    assert again.model.get_classifier().out_features == 10


def test_an_encoder_of_timm_is_put_back(hub):
    model = timm.create_model("mobilenetv3_small_050", num_classes=0)
    with pytest.raises(DataError, match="has no labels"):
        ewc.finetune(model, TensorDataset(torch.rand(4, 3, 32, 32)), **QUICK)
    assert model.num_classes == 0
    assert not isinstance(model.get_classifier(), torch.nn.Linear)
    two = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=0, img_size=32, depth=1)
    with pytest.raises(ArchitectureError, match="is no linear layer, or several"):
        ewc.finetune(two, DATA, **QUICK)
    assert two.num_classes == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchvision:resnet81?weights=DEFAULT", "torchvision has no model 'resnet81'. Did you mean"),
        ("torchvision:resnet18?weights=V1", "torchvision has no weights 'V1' of resnet18"),
        ("torchvision:resnet18?weights=DEFAULT&num_classes=3", "have classes of their own, .* finetune --head new"),
        ("torchvision:resnet18?weights=DEFAULT&weights_backbone=x", "and not by weights_backbone"),
        ("torchvision:fcn_resnet50?weights=DEFAULT", "are of no classifier of images"),
        ("torchvision:quantized_resnet18?weights=DEFAULT", "torchvision has no model|are of no classifier of images"),
        ("timm:resnet18?weights=DEFAULT&checkpoint_path=x", "and not by checkpoint_path"),
        ("timm:resnet81?weights=DEFAULT", "timm has no model 'resnet81'. Did you mean"),
        ("timm:resnet18?weights=a9_in1k", "timm has no weights 'a9_in1k' of resnet18. Did you mean"),
    ],
)
def test_what_nobody_publishes(text, message):
    assert is_published(text)
    with pytest.raises(ArchitectureError, match=message):
        find_published(text)


def test_weights_that_cannot_be_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    known = find_published(SHUFFLE)

    def refuse(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    with pytest.raises(
        CheckpointError, match=r"cannot be downloaded from https://.* \(no route to host\). Put the file"
    ):
        known.fetch()


def test_timm_is_an_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(ArchitectureError, match=r"pip install 'ewc-finetune\[timm\]'"):
        find_published(MOBILE)
