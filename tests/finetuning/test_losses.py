"""Losses of training as a user asks for them: from the shell, from files, and from Python."""

import copy
import json
import sys

import numpy as np
import pytest
import torch
from support.domains import blobs
from support.models import Small, trained
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ewc_finetune as ewc
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.runs.record import read_run

BASE = ("finetune", "--model", "mlp?hidden=8", "--data", "digits?first=100", "--epochs", 1)
MINE = "def squared(outputs, targets, power=2):\n    return (outputs.mean(dim=1) - targets).abs().pow(power).mean()\n"


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine_losses.py").write_text(MINE)
    yield "mine_losses:squared?power=2"
    sys.modules.pop("mine_losses", None)


def losses(run):
    return [line["loss"] for line in read_run(run).lines if "loss" in line]


def model():
    return trained(Small(), torch.float32)


class Listed(Dataset):
    """Samples whose labels are not known before they are read."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, n):
        return self.data[n]


def test_options_change_the_training_and_nothing_else(tmp_path, ewc_ft):
    """The first step's loss is that of the options; scores before it are the same."""
    said = {
        "plain": (),
        "smooth": ("--label-smoothing", 0.2),
        "focal": ("--focal", 2),
        "weights": ("--class-weights", "1,5,1,1,1,1,1,1,1,0.5"),
        "balanced": ("--class-weights", "balanced", "--label-smoothing", 0.2),
    }
    found = {name: ewc_ft(*BASE, *more, "-o", f"{name}.pt").stderr for name, more in said.items()}
    assert "training has" not in found["plain"]
    assert (
        "training has labels smoothed by 0.2, class weights balanced; the curvature, the penalty and all scores stay "
        "those of the categorical likelihood" in found["balanced"]
    )
    assert len({losses(tmp_path / f"{name}.run")[0] for name in said}) == len(said)
    before = [read_run(tmp_path / f"{name}.run").document["before"] for name in said]
    assert all(scores == before[0] for scores in before)


def test_they_are_recorded_and_stay_on_resume(tmp_path, ewc_ft):
    ewc_ft(*BASE, "--class-weights", "1,5,1,1,1,1,1,1,1,0.5", "--focal", 1.5, "-o", "w.pt")
    document = read_run(tmp_path / "w.run").document
    assert (document["options"]["class-weights"], document["options"]["focal"]) == ("1,5,1,1,1,1,1,1,1,0.5", 1.5)
    assert "--focal 1.5 --class-weights" in document["command"] or "--class-weights 1,5,1" in document["command"]
    for config in ("w.run/run.toml", "w.run", "list.toml"):
        toml = (tmp_path / "w.run" / "run.toml").read_text()
        (tmp_path / "list.toml").write_text(toml.replace('"1,5,1,1,1,1,1,1,1,0.5"', "[1, 5, 1, 1, 1, 1, 1, 1, 1, 0.5]"))
        ewc_ft("finetune", "--config", config, "-o", "again.pt", "--overwrite")
        assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "w.pt").read_bytes()
    for more, said in (
        (("--focal", 2), "focal was 1.5, is 2.0"),
        (("--class-weights", "balanced"), 'class-weights was "1,5,1,1,1,1,1,1,1,0.5", is "balanced"'),
    ):
        assert said in ewc_ft("finetune", "--resume", "w.run", *more, expect=2).stderr


def test_a_loss_of_ones_own(tmp_path, ewc_ft, mine):
    anchored = ("finetune", "--model", "mlp?hidden=8", "--data", "digits?limit=100", "--epochs", 1)
    said = ewc_ft(*anchored, "--loss", mine, "--epochs", 2, "-o", "m.pt").stderr
    assert "training has the loss mine_losses:squared?power=2; the curvature" in said
    assert read_run(tmp_path / "m.run").document["options"]["loss"] == mine
    cubed = mine.replace("2", "3")
    assert (
        f'loss was "{mine}", is "{cubed}"' in ewc_ft("finetune", "--resume", "m.run", "--loss", cubed, expect=2).stderr
    )
    # A file's word is not enough for it.
    config = ("finetune", "--config", "m.run/run.toml", "-o", "n.pt")
    assert "m.run/run.toml names code: --loss" in ewc_ft(*config, expect=2).stderr
    ewc_ft(*config, "--trust-code")
    assert (tmp_path / "n.pt").read_bytes() == (tmp_path / "m.pt").read_bytes()
    assert "expected package.module:function" in ewc_ft(*BASE, "--loss", "huber", "-o", "h.pt", expect=2).stderr
    said = ewc_ft(*BASE, "--loss", "torch:argmax", "-o", "h.pt", expect=1).stderr
    assert "the loss torch:argmax" in said
    assert "Traceback" not in said


def test_a_function_from_python_is_a_loss_of_any_likelihood(tmp_path):
    inputs, targets = torch.randn(40, 4), torch.randn(40, 3)
    data = TensorDataset(inputs, targets)
    options = {"likelihood": "gaussian", "epochs": 1, "eval_on": [data], "batch_size": 40}
    start = nn.Linear(4, 3)
    with torch.no_grad():
        expected = functional.l1_loss(start(inputs), targets).item()
    done = ewc.finetune(start, data, loss=functional.l1_loss, output=tmp_path / "m.pt", architecture="x:Y", **options)
    assert losses(done.run)[0] == pytest.approx(expected, rel=1e-5)
    assert read_run(done.run).document["command"] is None
    with pytest.raises(UsageError, match="gave a tensor of shape"):
        ewc.finetune(model(), data, loss=lambda o, t: (o - t).abs(), **options)


def test_balanced_by_labels_that_must_be_read():
    """Twice the second class: the weights are those of the labels, wherever these come from."""
    data = blobs(n=60)
    options = {"class_weights": "balanced", "epochs": 1, "eval_on": [], "seed": 1}
    known, read = (ewc.finetune(model(), one, **options) for one in (data, Listed(data)))
    assert known.history[0] == read.history[0]
    counts = torch.bincount(data.tensors[1], minlength=3)
    numbers = (60 / 3 / counts.double()).tolist()
    given = ewc.finetune(model(), data, **{**options, "class_weights": numbers})
    losses = [line["loss"] for line in known.history if "loss" in line]
    assert [line["loss"] for line in given.history if "loss" in line] == pytest.approx(losses, rel=1e-6)
    with pytest.raises(UsageError, match="a stream or loader, whose labels are not known beforehand"):
        ewc.finetune(model(), DataLoader(data, 10), **options)
    with pytest.raises(UsageError, match="there are 2 class weights, and the model has 3 outputs"):
        ewc.finetune(model(), data, **{**options, "class_weights": [1.0, 2.0]})


class Tokens(nn.Module):
    """As many logits for each token as it has classes."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 3)

    def forward(self, inputs):
        return self.head(inputs[..., None])


def test_balanced_over_tokens_of_batches_with_any_number_of_them():
    lengths = (2, 5, 3)
    labels = [torch.tensor(([0, 1, 2, -100, 0] * 2)[:length]) for length in lengths]
    samples = Listed([(torch.ones(n), part) for n, part in zip(lengths, labels, strict=True)])
    options = {"likelihood": "per-token", "epochs": 1, "eval_on": [], "batch_size": 1}
    torch.manual_seed(0)
    start = Tokens()
    counted = ewc.finetune(copy.deepcopy(start), samples, class_weights="balanced", **options)
    given = ewc.finetune(start, samples, class_weights=[3 / 4, 1, 3 / 2], **options)
    for one, other in zip(counted.model.parameters(), given.model.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_accumulated_batches_are_one_batch_whatever_the_weights():
    data = blobs(n=40)
    options = {"class_weights": [1.0, 9.0, 0.1], "epochs": 1, "eval_on": [], "lr": 1e-2, "optimizer": "sgd"}
    whole = ewc.finetune(model(), data, batch_size=40, **options)
    parts = ewc.finetune(model(), data, batch_size=10, accumulate=4, **options)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_soft_labels_from_python_and_from_arrays(tmp_path, ewc_ft):
    generator = torch.Generator().manual_seed(0)
    inputs, soft = torch.rand(50, 64, generator=generator), torch.rand(50, 10, generator=generator)
    soft /= soft.sum(dim=1, keepdim=True)
    np.savez(tmp_path / "soft.npz", x=inputs.numpy(), y=soft.numpy())
    ewc_ft("finetune", "--model", "mlp?hidden=8", "--data", "npz:soft.npz", "--eval", "npz:soft.npz", "-o", "m.pt")
    found = json.loads(ewc_ft("evaluate", "m.pt", "--data", "npz:soft.npz", "--json").stdout)["scores"][0]
    loaded = ewc.finetune("m.pt", TensorDataset(inputs, soft), epochs=0, eval_on=[]).model
    with torch.no_grad():
        outputs = loaded(inputs)
    assert found["loss"] == pytest.approx(functional.cross_entropy(outputs, soft).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((outputs.argmax(1) == soft.argmax(1)).float().mean().item())
    np.savez(tmp_path / "wrong.npz", x=inputs.numpy(), y=2 * soft.numpy())
    said = ewc_ft("evaluate", "m.pt", "--data", "npz:wrong.npz", expect=1).stderr
    assert "50 of 50 soft labels are no probabilities (of the first, they sum to 2)" in said
    # The Fisher of the model's own predictions needs no labels; that of soft ones is none.
    ewc_ft("consolidate", "m.pt", "--data", "npz:soft.npz", "-o", "a.safetensors")
    said = ewc_ft("consolidate", "m.pt", "--data", "npz:soft.npz", "--estimator", "empirical", expect=1).stderr
    assert "takes one class for each sample" in said
    with pytest.raises(DataError, match="soft labels"):
        ewc.finetune(model(), [(torch.rand(5, 4), torch.rand(5, 3))], eval_on=[], epochs=1)


def test_a_sweep_passes_them_on(tmp_path, ewc_ft):
    ewc_ft(*BASE, "-o", "m.pt")
    ewc_ft("consolidate", "m.pt", "--data", "digits?limit=50", "-o", "a.safetensors")
    ewc_ft(
        *("sweep", "--anchors", "a.safetensors", "--data", "digits?limit=100", "--eval", "digits?rotate=90&limit=50"),
        *("--eval", "digits?limit=50", "--lambda", 1, "--no-plain", "--epochs", 1, "-o", "s.sweep", "--focal", 2),
        *("--class-weights", "balanced"),
    )
    (run,) = (tmp_path / "s.sweep").glob("*.run")
    options = read_run(run).document["options"]
    assert (options["focal"], options["class-weights"]) == (2, "balanced")
