"""Fine-tuning on several domains: what is drawn, scored, recorded and gone on with; which domain is the new one."""

import copy
import json

import numpy as np
import pytest
import torch
from support.domains import blobs, corners
from support.notes import Notes
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.commands.finetune import default_output
from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import UsageError
from ewc_finetune.finetuning import job, trainer

MLP = "mlp?in_features=64&hidden=16&num_classes=10&batch_norm=false"
TURNED, OLD = "digits?rotate=90", "digits?weight=0.1"
QUICK = ("--epochs", 2, "--batch-size", 50, "--lr", 1e-3)


@pytest.fixture
def trained(ewc_ft):
    ewc_ft("finetune", "--model", MLP, "--data", "digits", "--epochs", 3, "--lr", 1e-3, "-o", "m.pt")
    ewc_ft("consolidate", "m.pt", "--data", "digits", "--samples", 200)


def test_old_data_beside_the_new(trained, ewc_ft, tmp_path):
    mixed = ("--data", TURNED, "--data", OLD)
    result = ewc_ft("finetune", "--anchors", "m.anchor.safetensors", *mixed, *QUICK, "--json")
    document = json.loads(result.stdout)
    assert [score["domain"] for score in document["after"]] == [TURNED, "digits"], "both are scored, on test splits"
    assert document["steps"] == 2 * 32, "1,438 + 144 samples in batches of 50"
    assert f"each epoch has all 1,438 of {TURNED}, 144 of 1,438 of {OLD}" in result.stderr
    assert "only digits" not in result.stderr
    run = json.loads((tmp_path / document["run"] / "run.json").read_text())
    assert run["options"]["data"] == [TURNED, OLD]
    assert run["found"]["new"] == TURNED
    assert run["found"]["data"]["size"] == 1438 + 144
    assert run["found"]["data"]["parts"][1] == {"spec": OLD, "size": 1438, "drawn": 144}
    assert "--data 'digits?rotate=90' --data 'digits?weight=0.1'" in run["command"]
    page = ewc_ft("report", document["run"], "-o", "page.html")
    assert "on digits (old)" in page.stderr + page.output
    assert "144 of 1,438 of digits?weight=0.1" in (tmp_path / "page.html").read_text()
    again = ewc_ft("finetune", "--config", document["run"], "-o", "again.pt", "--json")
    assert json.loads(again.stdout)["after"] == document["after"]
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / document["checkpoint"]).read_bytes()


def test_it_goes_on_to_the_same_bytes(trained, tmp_path, monkeypatch):
    def run(output, **more):
        return ewc.finetune(
            *("m.pt", [TURNED, OLD]), epochs=3, batch_size=50, eval_every=10, output=output, eval_on=[], **more
        )

    run("whole.pt")
    steps, step = [], trainer.Trainer._step

    def stopping(self, group):
        steps.append(0)
        if len(steps) == 45:  # in the middle of the second epoch
            raise KeyboardInterrupt
        step(self, group)

    monkeypatch.setattr(trainer.Trainer, "_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        run("stopped.pt")
    monkeypatch.setattr(trainer.Trainer, "_step", step)
    run("stopped.pt", resume="stopped.run")
    assert (tmp_path / "stopped.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()
    monkeypatch.setattr(trainer.Trainer, "_step", stopping)
    steps.clear()
    with pytest.raises(KeyboardInterrupt):
        run("other.pt")
    monkeypatch.setattr(trainer.Trainer, "_step", step)
    with pytest.raises(UsageError, match="data was"):
        ewc.finetune(
            "m.pt", [TURNED], epochs=3, batch_size=50, eval_every=10, output="other.pt", eval_on=[], resume="other.run"
        )


def test_one_of_several_is_one(trained, ewc_ft, tmp_path):
    ewc_ft("finetune", "--model", "m.pt", "--data", TURNED, *QUICK, "-o", "one.pt")
    run = json.loads((tmp_path / "one.run" / "run.json").read_text())
    assert run["options"]["data"] == TURNED
    assert run["found"]["data"]["parts"] == []


def test_lambda_auto_holds_samples_of_the_new_domain_out(trained):
    notes = Notes()
    done = ewc.finetune(
        *(None, [TURNED, OLD]), anchors="m.anchor.safetensors", lambdas="auto", epochs=1, lr=1e-3, progress=notes
    )
    assert len(done.search.trials) >= 5
    assert done.search.trials[0].score.samples == 143
    assert [score.domain for score in done.search.trials[0].watched] == [TURNED, "digits"]


def test_balanced_weights_count_what_is_drawn(monkeypatch):
    few = [n for n, label in enumerate(corners().tensors[1].tolist()) if label == 0]
    rest = [n for n in range(60) if n not in few]
    whole = Domain("corners", corners(), labels=corners().tensors[1])
    data = {"most": whole.subset(rest), "few": Domain(**{**vars(whole.subset(few)), "weight": 0.5})}
    counts, balanced = [], job.balanced

    def counting(labels, classes, where, times):
        counts.append(
            sum(often * part.bincount(minlength=3) for part, often in zip(labels, times, strict=True)).tolist()
        )
        return balanced(labels, classes, where, times)

    monkeypatch.setattr(job, "balanced", counting)
    ewc.finetune(nn.Linear(4, 3), data, epochs=1, eval_on=[], class_weights="balanced")
    assert counts == [[10, 20, 20]]


def test_the_new_domain_may_be_scored_on_other_data(trained, ewc_ft, tmp_path):
    torch.manual_seed(0)
    for name in ("new", "test"):
        np.savez(tmp_path / f"{name}.npz", x=torch.rand(60, 64).numpy(), y=np.arange(60) % 10)
    held = ("--anchors", "m.anchor.safetensors", "--data", "npz:new.npz")
    result = ewc_ft("sweep", *held, "--eval", "digits", "--eval", "npz:test.npz", "--lambda", 1, "-o", "s", expect=2)
    assert "Name both: --eval OLD --eval-new NEW" in result.stderr
    scored = ("--eval", "digits", "--eval-new", "npz:test.npz")
    ewc_ft("sweep", *held, *scored, "--lambda", 1, "--epochs", 1, "-o", "s", "--patience", 1)
    swept = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert swept["new"] == "npz:test.npz"
    assert swept["old"] == ["digits"]
    run = json.loads((tmp_path / "s" / "plain.run" / "run.json").read_text())
    assert run["found"]["new"] == "npz:test.npz"
    ewc_ft("finetune", *held, *scored, "--epochs", 1, "-o", "one.pt")
    told = ewc_ft("report", "one.run", "-o", "page.html")
    assert "on npz:test.npz (new)" in told.stderr + told.output


def test_what_is_named_new_alone_is_scored_in_the_place_of_the_test_split(trained, ewc_ft):
    scored = ("--data", TURNED, "--eval-new", "digits?rotate=90&limit=50")
    document = json.loads(ewc_ft("finetune", "--model", "m.pt", *scored, *QUICK, "--json").stdout)
    assert [score["domain"] for score in document["after"]] == [scored[-1]]


def test_data_from_python_is_new_by_its_name():
    chosen = {"new": blobs(shift=2.0), "old": blobs()}
    done = ewc.finetune(nn.Linear(4, 3), chosen, epochs=3, eval_on=chosen, patience=1, anchors=())
    assert [score.domain for score in done.after] == ["new", "old"]
    with pytest.raises(UsageError, match="--eval-new"):
        ewc.finetune(nn.Linear(4, 3), blobs(), epochs=3, eval_on=chosen, patience=1)


def test_a_folder_is_named_for_all_of_the_data():
    assert str(default_output(None, ["m.anchor.safetensors"], [TURNED, OLD])) == (
        "m-digits-rotate-90+digits-weight-0-1.pt"
    )


def test_lambda_auto_of_weighted_data_chooses_by_the_old_domain_too(trained):
    """Which has no name of its own."""
    old = blobs()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    ewc.finetune(model, old, epochs=5, lr=0.03, eval_on=[])
    anchor = ewc.consolidate(model, old)
    new = Domain("new", blobs(shift=2.0), labels=blobs().tensors[1], weight=0.5)
    held = {"anchors": [anchor], "lambdas": "auto", "epochs": 2, "lr": 0.03}
    chosen = [
        ewc.finetune(copy.deepcopy(model), new, eval_on=scored, select_on=[old], **held).search.strength
        for scored in (old, {"old": old})
    ]
    assert chosen[0] == chosen[1]


def test_names_that_only_tell_data_apart_make_no_domain_the_new_one():
    model = nn.Linear(4, 3)
    with pytest.raises(UsageError, match="--eval-new"):
        ewc.finetune(model, [blobs(), blobs(seed=2)], eval_on=[blobs(seed=3), blobs(seed=4)], keep="best")
    with pytest.raises(UsageError, match="--eval-new"):
        ewc.finetune(model, blobs(), eval_on=blobs(seed=3), keep="best")
    same = blobs()
    assert ewc.finetune(model, same, eval_on=[blobs(seed=3), same], keep="best", epochs=1)


def test_no_data_is_refused():
    for command in (ewc.finetune, ewc.consolidate):
        with pytest.raises(UsageError, match="there is no data"):
            command(nn.Linear(4, 3), [])


def test_runs_on_other_mixtures_are_no_seeds_of_one_another(trained, ewc_ft):
    new = ("--data", f"{TURNED}&limit=100", "--epochs", 1)
    ewc_ft("finetune", "--model", "m.pt", *new, "--eval", "digits", "--eval", TURNED, "-o", "a.pt")
    more = ("--data", "digits?limit=50", "--seed", 1, "--eval", "digits", "--eval", TURNED)
    ewc_ft("finetune", "--model", "m.pt", *new, *more, "-o", "b.pt")
    told = ewc_ft("report", "a.run", "b.run", "-o", "page.html")
    assert "seeds" not in told.stderr + told.output
