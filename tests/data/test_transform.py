"""How images are resized, cropped and normalised: said by the data, a record, or torchvision's own weights."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.notes import Notes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models, transforms

import ewc_finetune as ewc
from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.provenance import read_provenance
from ewc_finetune.checkpoint.builtin_models import CNN
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.checkpoint.published import transform_of_weights
from ewc_finetune.data.domain import as_domain
from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.data.sources import load_domain
from ewc_finetune.data.transform import IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS, Transform, is_transform
from ewc_finetune.errors import AnchorError, CheckpointError, DataError, UsageError
from ewc_finetune.evaluation.presenting import presented
from ewc_finetune.progress import Silent


class Saw(nn.Module):
    """A classifier that keeps what went into it."""

    def __init__(self, channels=3, num_classes=2):
        super().__init__()
        self.last = nn.Linear(channels, num_classes)
        self.seen = []

    def forward(self, images):
        self.seen.append(images.detach().clone())
        return self.last(images.mean(dim=(2, 3)))


@pytest.fixture
def photos(tmp_path):
    """Two classes of twenty noisy images each, 40 by 30."""
    draws = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(20):
            pixels = draws.integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i:02}.png")
    return tmp_path / "photos"


def first_seen(model, spec, **options):
    """Return the first image of the data as the model is given it by `evaluate`."""
    model.seen.clear()
    ewc.evaluate(model, spec, **options)
    return model.seen[-1][0]


def test_images_go_in_as_torchvisions_transforms_would_make_them(photos):
    """Resize, CenterCrop, ToTensor, Normalize of a folder of images, pixel by pixel."""
    first = Image.open(photos / "cats" / "00.png")
    to_tensor, normalise = transforms.ToTensor(), transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    wanted = transforms.Compose([transforms.Resize(16), transforms.CenterCrop(14), to_tensor, normalise])(first)
    found = first_seen(Saw(), f"imagefolder:{photos}?resize=16&crop=14&mean=imagenet&std=imagenet")
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    three = first_seen(Saw(), f"imagefolder:{photos}?resize=16&crop=14&mean=0.485,0.456,0.406&std=0.229,0.224,0.225")
    assert torch.equal(three, found)
    bicubic = first_seen(Saw(), f"imagefolder:{photos}?resize=16&interpolation=bicubic&crop=12x10")
    resize = transforms.Resize(16, interpolation=transforms.InterpolationMode.BICUBIC)
    assert torch.equal(bicubic, transforms.Compose([resize, transforms.CenterCrop((12, 10)), to_tensor])(first))


@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(1, 60)),
    side=st.integers(1, 60),
    interpolation=st.sampled_from(INTERPOLATIONS),
    whole=st.booleans(),
)
def test_bytes_are_resized_to_the_very_bytes_that_pillow_makes(shape, side, interpolation, whole):
    images = torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(side))
    size = {"size": (side, side + 1)} if whole else {"resize": side}
    found = Transform(interpolation=interpolation, **size).reshape(images)
    resize = transforms.Resize(
        (side, side + 1) if whole else side, interpolation=transforms.InterpolationMode(interpolation)
    )
    for plane, resized in zip(images.flatten(0, 1), found.flatten(0, 1), strict=True):
        assert np.array_equal(resize(Image.fromarray(plane.numpy())), resized)
    # Floats stay torch's to resize.
    assert Transform(interpolation=interpolation, **size).reshape(images / 255).shape == found.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("mean=imagenet", "says mean and no std"),
        ("std=0.5", "says std and no mean"),
        ("mean=imagnet&std=1", "mean=imagnet is not understood; expected imagenet, one number such as 0.5, or three"),
        ("mean=1,2&std=1", "expected imagenet, one number such as 0.5, or three"),
        ("mean=0&std=0", "expected imagenet, one number above 0"),
        ("mean=nan&std=1", "mean=nan is not understood"),
        ("resize=0", "expected pixels of the shorter side"),
        ("resize=2x3", "size=224x320 makes images of this height and width"),
        ("crop=a", "expected pixels such as 224"),
        ("size=4&resize=4", "say one of them"),
        ("interpolation=cubic&size=4", "expected bilinear, bicubic, nearest"),
        ("interpolation=bicubic", "is for size= or resize="),
    ],
)
def test_what_cannot_be_meant(options, message):
    with pytest.raises(UsageError, match=message):
        load_domain(f"digits?{options}", "train")


def test_numbers_that_images_cannot_have(tmp_path):
    (tmp_path / "t.csv").write_text("a,label\n1,0\n2,1\n")
    with pytest.raises(UsageError, match="its samples are no images, so they cannot be normalised"):
        load_domain(f"csv:{tmp_path / 't.csv'}?mean=0.5&std=0.5", "train")
    with pytest.raises(DataError, match="three numbers, and its images 1 channels"):
        ewc.evaluate(CNN(1, 8), "digits?mean=imagenet&std=imagenet")
    with pytest.raises(DataError, match=r"mean and std are of images, and a sample is torch.float32 of shape 2"):
        ewc.evaluate(nn.Linear(2, 2), "test_transform:vectors?mean=0.5&std=0.5")


def vectors():
    return [(torch.ones(3, 2), torch.tensor([0, 1, 0]))]


def test_numbers_of_a_spec_in_memory():
    plain, normalised = (first_seen(Saw(1, 10), f"digits{options}") for options in ("", "?mean=0.5&std=0.25"))
    assert torch.equal(normalised, (plain - 0.5) / 0.25)
    input_spec = InputSpec((1, 2, 2), False, True, transform=Transform(mean=(0.5,), std=(0.5,)))
    found = input_spec.present(torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1), torch.bfloat16)
    assert (found.dtype, found.flatten().tolist()) == (torch.bfloat16, [-1, 1])
    assert "normalised by mean 0.5 and std 0.5" in input_spec.describe()
    assert InputSpec.read(json.loads(json.dumps(input_spec.to_json()))) == input_spec


def test_an_anchor_keeps_what_was_said_and_later_data_are_presented_so(photos, tmp_path):
    model, said = Saw(), f"imagefolder:{photos}?resize=16&crop=14&mean=imagenet&std=imagenet"
    anchor = ewc.consolidate(model, said, output=tmp_path / "a.safetensors", probe=3)
    known = {"resize": 16, "crop": [14, 14], "mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD)}
    assert anchor.provenance.input == {"shape": [3, 14, 14], "flat": False, "bytes_to_unit": True, **known}
    assert Anchor.load(tmp_path / "a.safetensors").probes[0].layout == anchor.provenance.input
    wanted = first_seen(Saw(), said)
    notes, fresh = Notes(), Saw()
    done = ewc.finetune(
        fresh, f"imagefolder:{photos}", anchors=anchor, epochs=1, eval_on={"again": f"imagefolder:{photos}"},
        output=tmp_path / "m.pt", progress=notes,
    )  # fmt: skip
    assert {image.shape[1:] for image in fresh.seen} == {(3, 14, 14)}
    assert any(torch.equal(batch[0], wanted) for batch in fresh.seen)
    assert notes.about("the shorter side resized to 16, cropped to 14 x 14, as the model's own were")
    assert done.retention[0].samples == 3
    # The checkpoint's record has it too, and says it to `evaluate` and the next anchor, which may be told otherwise.
    class_name = "test_transform:Saw"
    again = open_model(tmp_path / "m.pt", class_name)
    assert again.metadata.input == anchor.provenance.input
    options = {"architecture": class_name}
    second = ewc.consolidate(tmp_path / "m.pt", f"imagefolder:{photos}", **options)
    assert second.provenance.input == anchor.provenance.input
    notes = Notes()
    other = ewc.consolidate(tmp_path / "m.pt", f"imagefolder:{photos}?mean=0&std=1&size=8", progress=notes, **options)
    assert other.provenance.input == {"shape": [3, 8, 8], "flat": False, "bytes_to_unit": True, "size": [8, 8]}
    assert notes.about("the model's own images were normalised by mean 0.485, 0.456, 0.406 and std")
    one, two = (ewc.evaluate(tmp_path / "m.pt", spec, **options)[0] for spec in (f"imagefolder:{photos}", said))
    assert one.loss == two.loss
    assert (
        ewc.evaluate(tmp_path / "m.pt", f"{said}&rotate=90".replace("imagenet", "0.5"), **options)[0].loss != one.loss
    )


def test_domains_that_are_scored_are_presented_as_the_new_one_where_nothing_else_is_known():
    said = "digits?mean=0.5&std=0.5"
    plain, alike = (
        ewc.finetune("cnn", said, eval_on=[other], epochs=1, seed=1).after[0].loss for other in ("digits", said)
    )
    assert plain == alike


def test_an_anchor_of_other_numbers_is_remarked_on():
    model, notes = CNN(1, 8), Notes()
    anchor = ewc.consolidate(model, "digits?first=40")
    ewc.finetune(model, "digits?first=40&mean=0.5&std=0.5", anchors=anchor, epochs=0, eval_on=[], progress=notes)
    assert notes.about("was made with images from 0 to 1, and here they are normalised by mean 0.5 and std 0.5")


def test_data_in_memory_is_resized_as_the_record_says_unless_it_is_so_already(tmp_path):
    model = CNN(1, 12)
    anchor = ewc.consolidate(model, "digits?size=12&first=40&mean=0.5&std=0.5")
    assert anchor.provenance.input["size"] == [12, 12]
    notes = Notes()
    ewc.finetune(model, "digits?rotate=90&first=40", anchors=anchor, epochs=0, eval_on=[], progress=notes)
    assert notes.about("resized to 12 x 12, as the model's own were")
    assert notes.about("1 x 12 x 12, normalised by mean 0.5 and std 0.5")
    notes = Notes()
    own = TensorDataset(torch.randint(0, 256, (9, 1, 12, 12), dtype=torch.uint8), torch.arange(9))
    ewc.finetune(model, own, anchors=anchor, epochs=0, eval_on=[], progress=notes)
    assert not notes.about("resized")
    # Pixels that are permuted are not mixed with their neighbours afterwards.
    with pytest.raises(DataError, match="samples have shape 1 x 8 x 8; the model takes 1 x 12 x 12"):
        ewc.finetune(model, "digits?permute=1", anchors=anchor, epochs=0, eval_on=[])


def test_inputs_of_the_callers_own_are_left_alone_and_the_record_is_kept(tmp_path):
    """A loader of floats is normalised by whoever made it; bytes that come later still are by us."""
    model = CNN(3, 8)
    images = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(12) % 10
    np.savez(tmp_path / "a.npz", x=images.numpy(), y=labels.numpy())
    anchor = ewc.consolidate(model, f"npz:{tmp_path / 'a.npz'}?mean=imagenet&std=imagenet")
    loader = DataLoader(TensorDataset((images / 255 - 0.45) / 0.22, labels), batch_size=4)
    notes = Notes()
    ewc.finetune(
        model, loader, anchors=anchor, epochs=0, eval_on=[], output=tmp_path / "m.pt", architecture="cnn",
        progress=notes,
    )  # fmt: skip
    assert notes.about("its images are no bytes, so they go in as they are; bytes would be normalised by mean 0.485")
    metadata = open_model(tmp_path / "m.pt", "cnn?in_channels=3&image_size=8").metadata.input
    assert (metadata["mean"], metadata["raw"], metadata["bytes_to_unit"]) == (list(IMAGENET_MEAN), False, False)
    later = ewc.consolidate(
        tmp_path / "m.pt", f"npz:{tmp_path / 'a.npz'}", architecture="cnn?in_channels=3&image_size=8"
    )
    assert later.provenance.input == anchor.provenance.input
    # Floats of a spec are taken as the model's own floats were: here they were normalised by us.
    own = ewc.consolidate(CNN(1, 8), "digits?mean=0.5&std=0.5")
    digits = load_domain("digits", "train")
    np.savez(tmp_path / "d.npz", x=digits.samples.tensors[0].numpy(), y=digits.labels.numpy())
    loaded = open_model(CNN(1, 8))
    for data, raw in ((load_domain(f"npz:{tmp_path / 'd.npz'}", "train"), True), (as_domain(digits.samples), False)):
        known = with_metadata(loaded, own)
        assert presented(data, known, Silent()).is_raw(digits.samples.tensors[0]) is raw


def with_metadata(loaded, anchor):
    return replace(loaded, metadata=replace(loaded.metadata, input=anchor.provenance.input))


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """Weights of torchvision's smallest network for 10 classes, as somebody would save them."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "squeezenet.pt"
    torch.save(models.squeezenet1_1(num_classes=10).state_dict(), path)
    return path


def test_a_recognised_architecture_takes_its_weights_own_transform(resnet, photos):
    notes = Notes()
    anchor = ewc.consolidate(resnet, f"imagefolder:{photos}?limit=2", curvature="identity", progress=notes)
    assert anchor.provenance.input == {
        "shape": [3, 224, 224], "flat": False, "bytes_to_unit": True, "resize": 256, "crop": [224, 224],
        "interpolation": "bilinear", "mean": list(IMAGENET_MEAN), "std": list(IMAGENET_STD),
    }  # fmt: skip
    assert notes.about("resized to 256, cropped to 224 x 224, as torchvision's weights of squeezenet1_1 were trained")
    assert notes.about(
        "mean 0.485, 0.456, 0.406 and std 0.229, 0.224, 0.225, as torchvision's weights of squeezenet1_1"
    )
    assert notes.about("mean=0&std=1")
    arch = "torchvision:squeezenet1_1?num_classes=10"
    named = ewc.consolidate(resnet, f"imagefolder:{photos}?limit=2", curvature="identity", architecture=arch)
    assert named.provenance.input == anchor.provenance.input
    said = ewc.consolidate(resnet, f"imagefolder:{photos}?limit=2&size=64&mean=0&std=1", curvature="identity")
    assert said.provenance.input == {"shape": [3, 64, 64], "flat": False, "bytes_to_unit": True, "size": [64, 64]}


def test_data_in_memory_is_normalised_by_it_and_not_resized(resnet):
    images = TensorDataset(torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8))
    anchor = ewc.consolidate(resnet, images, curvature="identity")
    assert anchor.provenance.input["shape"] == [3, 64, 64]
    assert anchor.provenance.input["mean"] == list(IMAGENET_MEAN)


def test_who_trained_a_torchvision_architecture_here_on_0_to_1_keeps_it(photos, tmp_path):
    """The record wins over the architecture: of a checkpoint and of an anchor, also those from before there was any."""
    folder = f"imagefolder:{photos}?limit=4&size=64"
    torch.manual_seed(0)
    notes = Notes()
    ewc.finetune("torchvision:squeezenet1_1", folder, epochs=0, eval_on=[], output=tmp_path / "m.pt", progress=notes)
    assert not notes.about("normalised")  # fresh weights take what comes
    metadata = open_model(tmp_path / "m.pt").metadata
    assert metadata.architecture == "torchvision:squeezenet1_1?num_classes=2"
    anchor = ewc.consolidate(tmp_path / "m.pt", f"imagefolder:{photos}?limit=2", curvature="identity", progress=notes)
    assert anchor.provenance.input == {"shape": [3, 64, 64], "flat": False, "bytes_to_unit": True, "size": [64, 64]}
    assert not notes.about("torchvision's weights")
    before = {"shape": [3, 64, 64], "flat": False, "bytes_to_unit": True}
    old = replace_input(anchor, before).save(tmp_path / "old.safetensors")
    ewc.finetune(
        None, f"{folder}&rotate=90", anchors=old, epochs=0, eval_on=[], output=tmp_path / "n.pt", progress=notes
    )
    assert not notes.about("normalised")
    assert open_model(tmp_path / "n.pt").metadata.input == {**before, "size": [64, 64]}


def replace_input(anchor, input_spec):
    return replace(anchor, provenance=replace(anchor.provenance, input=input_spec))


def test_numbers_of_torchvisions_weights():
    for name in models.list_models(module=models):
        preset = models.get_model_weights(name).DEFAULT.transforms()
        found = transform_of_weights(f"torchvision:{name}?num_classes=7")[1]
        assert (found.resize, found.crop) == (preset.resize_size[0], (preset.crop_size[0],) * 2)
        assert found.interpolation == preset.interpolation.value
        assert is_transform(found.to_json())
        if name not in ("googlenet", "inception_v3"):
            assert (list(found.mean), list(found.std)) == (preset.mean, preset.std)
    assert transform_of_weights("torchvision:fcn_resnet50") == ("torchvision's weights of fcn_resnet50", None)
    assert transform_of_weights("mlp?hidden=3")[1] is None


def test_what_googlenet_turns_inside_with_its_own_weights_is_done_outside_without():
    pixels = torch.rand(2, 3, 5, 5)
    inside = models.GoogLeNet._transform_input(
        type("It", (), {"transform_input": True})(), Transform(mean=IMAGENET_MEAN, std=IMAGENET_STD).normalise(pixels)
    )
    torch.testing.assert_close(transform_of_weights("torchvision:googlenet")[1].normalise(pixels), inside)
    own = transform_of_weights("torchvision:googlenet?transform_input=True")[1]
    assert own.mean == IMAGENET_MEAN


def test_a_checkpoint_of_which_nothing_is_known_says_that_images_go_in_from_0_to_1(tmp_path):
    torch.save(CNN(1, 8).state_dict(), tmp_path / "m.pt")
    for model, options in ((tmp_path / "m.pt", {"architecture": "cnn?image_size=8"}), (CNN(1, 8), {})):
        notes = Notes()
        ewc.evaluate(model, "digits?limit=20", progress=notes, **options)
        assert notes.about("images go in from 0 to 1, for nothing says what the model was trained on")
        notes = Notes()
        ewc.evaluate(model, "digits?limit=20&mean=0&std=1", progress=notes, **options)
        assert not notes.about("for nothing says")


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": [0.5]},
        {"mean": [0.5], "std": [0]},
        {"mean": [0.5, 1], "std": [1]},
        {"mean": ["a"], "std": [1]},
        {"mean": 0.5, "std": 0.5},
        {"resize": -1},
        {"resize": 10**9},
        {"crop": [3]},
        {"size": [True, 3]},
        {"interpolation": "magic"},
        {"mean": [float("nan")], "std": [1]},
    ],
)
def test_files_that_say_what_cannot_be_are_refused(wrong, tmp_path):
    document = {"name": "x", "input": {"shape": [1, 8, 8], "flat": False, "bytes_to_unit": True, **wrong}}
    with pytest.raises(AnchorError, match="in the metadata, input is"):
        read_provenance(json.dumps(document), "a.safetensors")
    with pytest.raises(CheckpointError, match="damaged"):
        ModelMetadata.read({"input": document["input"]}, "m.pt")
