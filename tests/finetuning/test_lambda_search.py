"""The strongest penalty within a tolerance, found on the new domain alone."""

import copy
import functools
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.domains import corners
from support.models import Small, trained
from support.notes import Notes
from torch import nn
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.data.domain import as_domain
from ewc_finetune.errors import RetentionError, UsageError
from ewc_finetune.evaluation.probe import Retention
from ewc_finetune.evaluation.score import Score
from ewc_finetune.finetuning.aims import Best, Retaining, Trial, Within
from ewc_finetune.finetuning.lambda_search import RUNS, Search, search_lambda, split
from ewc_finetune.progress import Silent


def score(accuracy, loss=1.0):
    return Score("held out", 100, loss, accuracy)


def searched(accuracy_at, cost=1.0, gain=800.0, aim=None, kept_at=None, old_at=None, progress=None):
    """Search where a run's results are functions of lambda."""
    asked = []

    def run(strength):
        asked.append(strength)
        kept = None if kept_at is None else kept_at(strength or 0.0)
        return Trial(
            strength,
            before=score(0.1, 1.0 + gain),
            score=score(0.9 if strength is None else accuracy_at(strength), 1.0),
            watched=() if old_at is None else (replace(score(old_at(strength or 0.0)), domain="old"),),
            retention=() if kept is None else (Retention("a", "old", 64, 0.1, kept),),
            distance=cost,
        )

    return search_lambda(run, aim or Within(0.02), progress or Silent()), asked


@given(st.floats(-3, 6))
def test_the_largest_within_the_tolerance(edge):
    """Whatever the edge is, near the scale that the plain run shows: 100 here."""
    found, asked = searched(lambda strength: 0.9 if strength <= 100 * 2**edge else 0.8)
    assert asked[:2] == [None, 100]
    assert len(asked) == 1 + RUNS
    assert found.met
    assert found.strength <= 100 * 2**edge
    assert found.strength == max(t.strength for t in found.trials[1:] if t.within)
    beyond = [t.strength for t in found.trials[1:] if not t.within]
    assert not beyond or 100 * 2**edge < min(beyond) <= 4 * found.strength


def test_no_lambda_is_weak_enough():
    notes = Notes()
    found, _ = searched(lambda _: 0.5, gain=8.0, old_at=lambda _: 0.7, progress=notes)
    assert not found.met
    assert found.strength == min(t.strength for t in found.trials[1:])
    assert "none that was tried is the largest within 2.0% of plain training" in notes.lines[-1]
    assert "(old 0.7000)" in notes.lines[1]


def test_where_nothing_is_right_or_wrong_the_gain_in_loss_counts():
    def run(strength):
        loss = 1.0 if strength is None else 1.0 + strength / 1000
        return Trial(strength, score(None, 3.0), score(None, loss), distance=0.02)

    found = search_lambda(run, Within(0.02), Silent())
    assert found.met
    assert 10 <= found.strength <= 40


@given(st.floats(-3, 3))
def test_the_smallest_that_retains(edge):
    """Of what may be lost, a quarter is left to the longer run."""
    limit = 100 * 2**edge
    found, asked = searched(lambda _: 0.9, aim=Retaining(0.96), kept_at=lambda s: 0.975 if s >= limit else 0.965)
    assert asked[:2] == [None, 100]
    assert found.met
    assert limit <= found.strength == min(t.strength for t in found.trials[1:] if t.within)
    below = [t.strength for t in found.trials[1:] if not t.within]
    assert not below or found.strength / 4 <= max(below) < limit


def test_nothing_retains():
    with pytest.raises(RetentionError, match=r"the best, 100, keeps 50\.0% of them in a short run"):
        searched(lambda _: 0.9, aim=Retaining(0.99), kept_at=lambda s: 0.5)
    assert searched(lambda _: 0.9, aim=Retaining(0.5), kept_at=lambda s: 1.0)[0].strength == 100 / 64


def kept(shares, otherwise):
    """The share that is kept at these lambdas, and elsewhere."""
    return lambda strength: shares.get(strength, otherwise)


def test_more_lambda_may_keep_less():
    """Where none keeps the share, the best one counts, and what is around it is looked at before it is refused."""
    asked, aim = [], Retaining(0.95, ["patience"])
    shares = {0.0: 0.4, 100.0: 0.7, 400.0: 0.8, 1600.0: 0.92, 6400.0: 0.89}

    def kept_at(strength):
        asked.append(strength)
        return shares.get(strength, 0.91)

    with pytest.raises(RetentionError) as error:
        searched(lambda _: 0.9, aim=aim, kept_at=kept_at)
    assert asked == [0.0, 100, 400, 1600, 6400, 3200, pytest.approx(1600 * math.sqrt(2))]
    assert "no lambda that was tried keeps 95.0%" in str(error.value)
    assert "the best, 1.6e+03, keeps 92.0%" in str(error.value)
    assert "a lower --retain; patience" in str(error.value)
    assert error.value.exit_code == 1


def test_what_lies_between_may_keep_enough():
    shares = {0.0: 0.4, 100.0: 0.7, 400.0: 0.8, 1600.0: 0.92, 6400.0: 0.89}
    found, asked = searched(lambda _: 0.9, aim=Retaining(0.95), kept_at=kept(shares, 0.97))
    assert found.met
    assert found.strength == 3200
    assert asked[-1] == 3200  # nothing more is asked once it is there
    # What keeps the share itself, and leaves nothing to the longer run, is taken if there is no better.
    found, asked = searched(lambda _: 0.9, aim=Retaining(0.91), kept_at=kept(shares, 0.9))
    assert (found.met, found.strength, len(asked)) == (False, 1600, 1 + RUNS)


def test_one_that_is_found_last_is_halved_once_more():
    """Four times the lambda that is not enough may be twice of what is needed."""
    asked, aim = [], Retaining(0.95)

    def kept_at(strength):
        asked.append(strength)
        return 0.99 if strength >= 2000 else 0.5

    found, _ = searched(lambda _: 0.9, aim=aim, kept_at=kept_at)
    assert asked == [0.0, 100, 400, 1600, 6400, 3200]
    assert (found.met, found.strength) == (True, 3200)


def test_the_way_up_goes_on_beside_a_dip():
    """One that keeps less lies above one that keeps enough: smaller ones are looked for all the same."""
    shares = {100.0: 0.9, 400.0: 0.92, 1600.0: 0.91, 800.0: 0.99}
    found, asked = searched(lambda _: 0.9, aim=Retaining(0.95), kept_at=kept(shares, 0.9))
    assert asked == [None, 100, 400, 1600, 800]
    assert found.strength == 800


@given(st.floats(-2, 3))
def test_the_best_mean_score(peak):
    def old_at(strength):
        return 0.9 - 0.01 * abs(math.log2(max(strength, 1e-9) / 100) - peak)

    found, asked = searched(lambda _: 0.8, aim=Best(["old"]), old_at=old_at)
    assert asked[:3] == [None, 100, 400]
    assert found.strength == max(asked[1:], key=old_at)
    # What is left between the neighbours of the best is less than the factor that it began with.
    assert abs(math.log2(found.strength / 100) - peak) <= 2


def test_trials_in_json():
    found, _ = searched(lambda _: 0.9, kept_at=lambda _: 0.9, old_at=lambda _: 0.7)
    document = json.loads(json.dumps(found.to_json()))
    assert [Trial.read(trial) for trial in document["trials"]] == list(found.trials)
    assert document["aim"].startswith("the largest within 2.0% of plain training")


@pytest.mark.parametrize(("cost", "gain"), [(0.0, 1.0), (1.0, -1.0), (math.inf, 1.0), (1e-320, 1e300)])
def test_a_scale_that_cannot_be_told(cost, gain):
    found, asked = searched(lambda strength: 0.9, cost, gain)
    assert asked[1] in (1.0, pytest.approx(1e-300, abs=1e-2))
    assert math.isfinite(found.strength)


blobs = functools.partial(corners, samples=200)


def test_what_is_chosen_by_is_not_trained_on():
    domain = as_domain(blobs(0))
    train, held = split(domain, 0)
    rows = {row.numpy().tobytes() for row in train.samples.tensors[0]}
    assert (train.size, held.size) == (180, 20)
    assert not any(row.numpy().tobytes() in rows for row in held.samples.tensors[0])
    for data in ([(torch.ones(2, 4), torch.arange(2))], TensorDataset(torch.ones(9, 4), torch.arange(9))):
        with pytest.raises(UsageError, match="none can be held out to choose a lambda by"):
            split(as_domain(data), 0)


def test_finetune_with_the_lambda_it_finds(tmp_path):
    model = trained(Small(), torch.float32)
    ewc.finetune(model, blobs(0), epochs=20, lr=1e-2, eval_on=[])
    anchor = ewc.consolidate(model, blobs(0))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"epochs": 4, "lr": 1e-2, "batch_size": 20, "eval_on": {"old": blobs(0), "new": blobs(1, shift=1)}}
    done = ewc.finetune(model, blobs(2, shift=1), anchors=anchor, lambdas="auto", output=tmp_path / "m.pt", **options)
    assert [trial.strength for trial in done.search.trials[:1]] == [None]
    assert len(done.search.trials) == 1 + RUNS
    assert [s.domain for s in done.search.trials[1].watched] == ["old", "new"]
    recorded = json.loads((done.run / "run.json").read_text())["found"]
    assert recorded["lambda_search"]["lambda"] == done.search.strength
    assert recorded["anchors"][0]["lambda"] == done.search.strength
    # The search leaves no trace: the run is what it is with that lambda.
    model.load_state_dict(start)
    again = ewc.finetune(model, blobs(2, shift=1), anchors=anchor, lambdas=done.search.strength, **options)
    assert again.after == done.after
    assert again.search is None


def test_each_anchor_has_its_own_multiple():
    model = trained(Small(), torch.float32)
    anchors = [ewc.consolidate(model, blobs(0), curvature=curvature) for curvature in ("kfac", "diagonal")]
    done = ewc.finetune(model, blobs(1), anchors=anchors, lambdas="auto", epochs=1, eval_on=[])
    first, second = (entry["lambda"] for entry in done.lineage)
    assert (first, second) == (done.search.strength, 10 * done.search.strength)


def test_what_cannot_be_searched(ewc_ft):
    model = trained(Small(), torch.float32)
    with pytest.raises(UsageError, match="there is none without --anchors"):
        ewc.finetune(model, blobs(0), lambdas="auto")
    with pytest.raises(UsageError, match="tolerance is 2"):
        ewc.finetune(model, blobs(0), anchors=ewc.consolidate(model, blobs(0)), lambdas="auto", tolerance=2)
    options = ("finetune", "--anchors", "a", "--data", "digits")
    several = ewc_ft(*options, "--lambda", "auto", "--lambda", 3, expect=2)
    assert "auto stands for all of them; give it alone" in several.output
    assert "neither auto nor a number" in ewc_ft(*options, "--lambda", "lots", expect=2).output


def test_what_a_run_keeps_of_the_answers(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    ewc.finetune(model, blobs(0), epochs=20, lr=3e-2, eval_on=[])
    anchor = ewc.consolidate(model, blobs(0), probe=40)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = {"anchors": anchor, "lr": 3e-2, "batch_size": 20, "log_every": 1, "eval_on": []}

    def run(**more):
        model.load_state_dict(start)
        return ewc.finetune(model, blobs(1, shift=1), **{**options, **more})

    plain = run(lambdas=0, epochs=3)
    read = {line["step"]: line["retention"][0] for line in plain.history if "retention" in line}
    assert list(read) == [0, 10, 20, 30]
    assert read[0]["unchanged"] == 1.0
    assert read[30]["unchanged"] < 0.7
    assert vars(plain.retention[0]) == read[30]
    assert read[30]["divergence"] > 0.1
    # 40 inputs are measured every 14 steps of 20 samples, beside the evaluations.
    spaced = run(lambdas=0, epochs=3, eval_every=30)
    assert [line["step"] for line in spaced.history if "retention" in line] == [0, 14, 28, 30]
    with pytest.raises(
        RetentionError, match=r"after step 30 the model gives \d\d\.\d% of its old answers to the probe"
    ):
        run(lambdas=0, retain=0.9, epochs=3, output=tmp_path / "m.pt", architecture="x:Y")
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["m.run"]  # no model, but what there is of the run
    found = run(lambdas="auto", retain=0.9, epochs=4)
    assert found.search.met
    assert found.retention[0].unchanged >= 0.9
    assert found.search.trials[1].retention[0].samples == 40
    selected = run(lambdas="auto", epochs=2, select_on=[as_domain(blobs(0), "old")])
    assert selected.search.aim == "the best mean score over the new domain and old"
    assert [score.domain for score in selected.after] == ["old"]
    with pytest.raises(RetentionError, match=r"the run was not started.*--curvature kfac.*--penalty-form proximal"):
        run(lambdas="auto", retain=0.9999, epochs=1, output=tmp_path / "never.pt", architecture="x:Y", lr=1.0)
    assert not (tmp_path / "never.pt").exists()
    assert not (tmp_path / "never.run" / "metrics.jsonl").read_text()
    with pytest.raises(UsageError, match="--retain or by --select-on, not by both"):
        run(lambdas="auto", retain=0.9, select_on=[as_domain(blobs(0), "old")])
    for wrong in (0, 1.5):
        with pytest.raises(UsageError, match="retain is"):
            run(retain=wrong)
    with pytest.raises(UsageError, match="--retain goes by the answers to the probes in the anchors"):
        run(retain=0.9, anchors=anchor.without_probes())


def test_what_is_advised_was_not_done_already(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    ewc.finetune(model, blobs(0), epochs=20, lr=3e-2, eval_on=[])
    anchor = ewc.consolidate(model, blobs(0), probe=40)
    found = Search(1e-9, True, "", ())
    monkeypatch.setattr(ewc.finetuning.run, "search_by_trials", lambda *_: found)

    def advice(name, progress=None, **options):
        common = {"lambdas": 0, "retain": 0.999, "lr": 0.3, "batch_size": 20, "epochs": 2, "eval_on": []}
        where = {"output": tmp_path / f"{name}.pt", "architecture": "x:Y", "progress": progress or Silent()}
        with pytest.raises(RetentionError) as error:
            ewc.finetune(copy.deepcopy(model), blobs(1, shift=1), anchors=anchor, **{**common, **where, **options})
        return str(error.value).partition("are to be kept. ")[2]

    notes = Notes()
    assert advice("a", notes) == "Use a larger --lambda (auto looks for one), --rehearse probes, or a smaller --retain"
    go_on = f"to go on with less: ewc-ft finetune --resume {tmp_path / 'a.run'} --trust-code --retain X, of a smaller X"
    assert notes.lines[-1].endswith(go_on)
    done = ewc.finetune(
        copy.deepcopy(model), blobs(1, shift=1), anchors=anchor, lambdas=0, retain=0.001, lr=0.3, batch_size=20,
        epochs=2, eval_on=[], output=tmp_path / "a.pt", architecture="x:Y", resume=tmp_path / "a.run",
    )  # fmt: skip
    assert done.output.exists()
    rehearsing = advice("b", rehearse=["probes"])
    assert "a larger --rehearse-weight" in rehearsing
    assert "--rehearse probes" not in rehearsing
    notes = Notes()
    auto = advice("c", notes, lambdas="auto", rehearse=["probes"])
    assert "Its lambda, 1e-09, is what auto found by shorter runs" in auto
    assert "a larger number for --lambda; a larger --rehearse-weight; anchors with more inputs in the probe" in auto
    assert "auto looks" not in auto
    assert "--resume" not in str(notes)


@pytest.mark.parametrize("curvature", ["diagonal", "kfac"])
def test_with_a_head_that_grows(curvature):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    anchor = ewc.consolidate(model, blobs(0), curvature=curvature)
    inputs, labels = blobs(1).tensors
    done = ewc.finetune(
        model, TensorDataset(inputs, labels + 2), anchors=anchor, lambdas="auto", head="expand", epochs=1, eval_on=[]
    )
    assert done.search.strength > 0
    assert done.model[2].out_features == 5


def test_a_search_that_was_stopped_goes_on(tmp_path, monkeypatch):
    model = trained(Small(), torch.float32)
    anchor = ewc.consolidate(model, blobs(0)).save(tmp_path / "a.safetensors").path
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = []
    whole = ewc.finetuning.search_runs.Penalty

    def run(name, **more):
        model.load_state_dict(start)
        options = {"data": blobs(1, shift=1), "epochs": 2, **more}
        return ewc.finetune(
            model, anchors=anchor, lambdas="auto", eval_on=[], output=tmp_path / name, architecture="x:Y", **options
        )

    done = run("whole.pt")

    class Killed(BaseException):
        pass

    def counting(*arguments, **options):
        made.append(arguments)
        if len(made) == 3:
            raise Killed
        return whole(*arguments, **options)

    monkeypatch.setattr(ewc.finetuning.search_runs, "Penalty", counting)
    notes = Notes()
    with pytest.raises(Killed):
        run("m.pt", progress=notes)
    assert notes.lines[-1] == f"to go on: ewc-ft finetune --resume {tmp_path / 'm.run'} --trust-code"
    for other, message in (({"epochs": 8}, "epochs was 2, is 8"), ({"retain": 0.5}, "retain was not given, is 0.5")):
        with pytest.raises(UsageError, match=message):
            run("m.pt", resume=tmp_path / "m.run", **other)
    with pytest.raises(UsageError, match="the digest of the data was"):
        run("m.pt", resume=tmp_path / "m.run", data=blobs(2, shift=1))
    again = run("m.pt", resume=tmp_path / "m.run")
    assert len(made) == 3 + 3  # of five runs two were done
    assert again.search == done.search
    assert (tmp_path / "m.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


def test_the_command_line(ewc_ft):
    ewc_ft("finetune", "--model", "mlp?hidden=16", "--data", "digits", "-o", "m.pt", "--epochs", 3, "--lr", 1e-2)
    ewc_ft("consolidate", "m.pt", "--data", "digits")
    result = ewc_ft(
        *("finetune", "--anchors", "m.anchor.safetensors", "--data", "digits?rotate=90", "--lambda", "auto"),
        *("--lr", 1e-2, "--epochs", 2, "--json"),
    )
    document = json.loads(result.stdout)
    assert document["lambda_search"]["lambda"] > 0
    assert "lambda auto: plainly the new domain gets to 0." in result.stderr
    assert f"lambda {document['lambda_search']['lambda']:g}" in result.stderr
