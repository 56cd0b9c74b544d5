"""A model of two inputs, from arrays to an anchor, to a new domain and back, from the shell alone."""

import json

import numpy as np
import pytest

import ewc_finetune as ewc

MODULE = """
from torch import cat, nn

class Towers(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.left, self.right = nn.Linear(3, width), nn.Linear(2, width)
        self.head = nn.Linear(2 * width, 2)

    def forward(self, left, right):
        return self.head(cat([self.left(left), self.right(right)], 1).relu())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the module, and two domains in which the label follows one input or the other."""
    (tmp_path / "two_towers.py").write_text(MODULE)
    for seed, name in enumerate(("old", "new")):
        draws = np.random.default_rng(seed)
        left, right = draws.normal(size=(160, 3)), draws.normal(size=(160, 2))
        labels = (left[:, 0] > 0) if name == "old" else (right[:, 0] > 0)
        np.savez(tmp_path / f"{name}.npz", left=left, right=right, x=left, y=labels.astype(int))
    return tmp_path


def accuracies(result):
    return [score["accuracy"] for score in json.loads(result.stdout)["scores"]]


def test_two_inputs_by_name(ewc_ft, folder):
    old, new = ("npz:old.npz?inputs=left,right", "npz:new.npz?inputs=left,right")
    training = ("--epochs", 20, "--lr", 0.01)
    ewc_ft("finetune", "--model", "two_towers:Towers?width=12", "--data", old, "-o", "old.pt", *training)
    said = ewc_ft("consolidate", "old.pt", "--data", old, "--probe", 32).stderr
    assert f"{old}: samples of a dictionary of left (3), right (2)" in said
    anchor = ewc.Anchor.open(folder / "old.anchor.safetensors")
    assert anchor.provenance.input["names"] == {"left": [3], "right": [2]}
    assert set(anchor.probes[0].inputs) == {"left", "right"}
    held = ("finetune", "--anchors", "old.anchor.safetensors", "--data", new, "-o", "new.pt", "--lambda", 30)
    ewc_ft(*held, *training, "--rehearse", "probes", "--eval", old, "--eval", new)
    before, after = (
        accuracies(ewc_ft("evaluate", model, "--data", old, "--data", new, "--json")) for model in ("old.pt", "new.pt")
    )
    assert before[0] > 0.9
    assert after[0] > 0.75
    assert after[1] > before[1] + 0.1
    said = ewc_ft("evaluate", "new.pt", "--data", "npz:old.npz", expect=1).stderr
    assert "its samples are a single tensor, and the model takes left, right by name" in " ".join(said.split())
    said = ewc_ft("finetune", "--model", "mlp", "--data", old, "-o", "mlp.pt", expect=2).stderr
    assert "has several inputs (left, right), and mlp takes one" in " ".join(said.split())
