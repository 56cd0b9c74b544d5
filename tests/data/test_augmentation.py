"""Images to train on are changed at random, each by itself, and only there."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import ewc_finetune as ewc
from ewc_finetune.data.augmentation import augmented
from ewc_finetune.data.sources import load_domain
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.runs.record import read_run

QUICK = {"epochs": 2, "eval_on": [], "batch_size": 16}


def change(images, *names, seed=0):
    torch.manual_seed(seed)
    ((changed, labels),) = augmented(iter([(images, "labels")]), names)
    assert labels == "labels"
    return changed


def test_flipped_are_about_half_and_each_by_itself():
    images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).expand(400, 1, 8, 8)
    changed = change(images, "flip")
    same = (changed == images).flatten(1).all(dim=1)
    assert (changed == images.flip(-1)).flatten(1).all(dim=1).equal(~same)
    assert 150 < same.sum() < 250


def test_cropped_are_moved_by_an_eighth_at_most():
    images = torch.zeros(200, 3, 16, 24)
    images[:, :, 8, 12] = 1
    places = change(images, "crop")[:, 0].nonzero()
    assert len(places) == 200
    for dim, middle, most in ((1, 8, 2), (2, 12, 3)):
        moved = places[:, dim] - middle
        assert moved.unique().tolist() == list(range(-most, most + 1))


@given(
    st.lists(st.sampled_from(["flip", "crop", "rand"]), min_size=1, max_size=3, unique=True),
    st.sampled_from([1, 3]),
    st.booleans(),
)
def test_shape_type_and_range_stay(names, channels, as_bytes):
    images = torch.randint(0, 256, (4, channels, 9, 12), dtype=torch.uint8)
    images = images if as_bytes else images / 255
    changed = change(images, *names)
    assert (changed.shape, changed.dtype) == (images.shape, images.dtype)
    assert changed.min() >= 0
    assert changed.max() <= (255 if as_bytes else 1)
    assert changed.equal(change(images, *names))


def test_a_run_is_the_same_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = {}
    for name, data in (("a", "&augment=flip,crop"), ("b", "&augment=flip,crop"), ("plain", "")):
        ewc.finetune("mlp?hidden=8", f"digits?limit=64{data}", output=f"{name}.pt", **QUICK)
        made[name] = torch.load(f"{name}.pt")
    assert all(value.equal(made["b"][name]) for name, value in made["a"].items())
    assert any(not value.equal(made["plain"][name]) for name, value in made["a"].items())


def test_images_from_files(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for n in range(3):
            Image.new("RGB", (20 + n, 18), (80 * n, 7, 200)).save(tmp_path / name / f"{n}.png")
    data = f"imagefolder:{tmp_path}?size=16&augment=rand,crop"
    assert load_domain(data, "train").augment == ("rand", "crop")
    assert ewc.finetune("cnn", data, **{**QUICK, "batch_size": 2}).steps == 6


def test_what_is_scored_is_not_called_augmented(ewc_ft, tmp_path):
    data = "digits?augment=flip&limit=64"
    options = ("--data", data, "--epochs", 1, "--keep", "best")
    ewc_ft("finetune", "--model", "mlp?hidden=8", *options, "-o", "m.pt")
    ewc_ft("consolidate", "m.pt", "--data", "digits?limit=64")
    old = ("--eval", "digits?rotate=90&limit=64")
    held = ("--anchors", "m.anchor.safetensors", *options, *old)
    for name, new in (("a", data), ("b", "digits?limit=64")):
        ewc_ft("finetune", *held, "--eval", new, "-o", f"{name}.pt")
    names = {name: [s["domain"] for s in read_run(tmp_path / f"{name}.run").document["after"]] for name in "mab"}
    assert names["m"] == ["digits?limit=64"]
    assert names["a"] == names["b"] == ["digits?rotate=90&limit=64", "digits?limit=64"]
    runs = json.loads(ewc_ft("report", "a.run", "b.run", "--json").stdout)["runs"]
    assert [run["new"] for run in runs] == ["digits?limit=64"] * 2
    swept = ewc_ft(
        "sweep", "--anchors", "m.anchor.safetensors", *options, *old, "--eval", data, "--lambda", 1, "--json"
    )
    assert json.loads(swept.stdout)["new"] == "digits?limit=64"


def test_only_what_is_trained_on(tmp_path):
    model = ewc.finetune("mlp?hidden=8", "digits?limit=64", epochs=1, eval_on=[]).model
    for call in (ewc.consolidate, ewc.evaluate):
        with pytest.raises(
            UsageError, match=f"augment= is for data to train on, and {call.__name__} takes it as it is"
        ):
            call(model, "digits?limit=20&augment=flip")
    with pytest.raises(UsageError, match="and rehearsal takes it as it is"):
        ewc.finetune(model, "digits?limit=20", rehearse=["digits?limit=9&augment=flip"], **QUICK)
    with pytest.raises(
        UsageError, match="augment=mirror is not understood; expected of flip, crop, rand one or several"
    ):
        load_domain("digits?augment=mirror", "train")
    with pytest.raises(UsageError, match="permute= makes of each no image any more"):
        load_domain("digits?augment=flip&permute=1", "train")
    np.savez(tmp_path / "four.npz", x=np.zeros((8, 4, 8, 8), np.uint8), y=np.arange(8) % 2)
    with pytest.raises(DataError, match="augment=rand is for images of 1 or 3 channels, and these have 4"):
        ewc.finetune("cnn", f"npz:{tmp_path / 'four.npz'}?augment=rand", **QUICK)
    (tmp_path / "t.csv").write_text("a,b,label\n" + "1,2,0\n3,4,1\n" * 5)
    with pytest.raises(DataError, match=r"augment= is for images in bytes or from 0 to 1, and a sample is \(2,\)"):
        ewc.finetune("mlp?hidden=8", f"csv:{tmp_path / 't.csv'}?augment=flip", **QUICK)
