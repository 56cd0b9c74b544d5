"""The log of a run for TensorBoard."""

import sys

import pytest

from ewc_finetune.runs.record import read_run

BASE = ("finetune", "--model", "mlp?hidden=16", "--data", "digits", "--output", "m.pt")


def test_tensorboard(ewc_ft, tmp_path):
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ewc_ft(*BASE, "--epochs", 2, "--log-every", 5, "--tensorboard")
    events = reading.EventAccumulator(str(tmp_path / "m.run" / "tensorboard")).Reload()
    assert {"train/loss", "train/lr", "accuracy/digits", "loss/digits"} <= set(events.Tags()["scalars"])
    lines = [line for line in read_run(tmp_path / "m.run").lines if "loss" in line]
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(line["step"], pytest.approx(line["loss"])) for line in lines]


def test_tensorboard_that_is_not_installed(ewc_ft, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    result = ewc_ft(*BASE, "--tensorboard", expect=2)
    assert "pip install 'ewc-finetune[tensorboard]'" in result.output
