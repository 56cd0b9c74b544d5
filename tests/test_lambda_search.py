"""The strongest penalty within a tolerance, found on the new domain alone."""

import json
import math

import pytest
import torch
from conftest import Small, trained
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.data.domain import as_domain
from ewc_finetune.errors import UsageError
from ewc_finetune.progress import Silent
from ewc_finetune.verbs.evaluate import Score
from ewc_finetune.verbs.lambda_search import RUNS, search_lambda, split


def score(accuracy, loss=1.0):
    return Score("held out", 100, loss, accuracy)


def searched(accuracy_at, cost=1.0, gain=800.0, tolerance=0.02):
    """Search where a run's accuracy is a function of lambda."""
    asked = []

    def run(strength):
        asked.append(strength)
        found = score(0.9 if strength is None else accuracy_at(strength), 1.0)
        return score(0.1, 1.0 + gain), found, []

    return search_lambda(run, lambda: cost, tolerance, Silent()), asked


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
    notes = []

    class Notes(Silent):
        def note(self, message):
            notes.append(message)

    found = search_lambda(
        lambda strength: (score(0.1, 9.0), score(0.9 if strength is None else 0.5), [score(0.7)]),
        lambda: 1.0,
        0.02,
        Notes(),
    )
    assert not found.met
    assert found.strength == min(t.strength for t in found.trials[1:])
    assert "no lambda that was tried stays within 2.0%" in notes[-1]
    assert "(held out 0.7000)" in notes[1]


def test_where_nothing_is_right_or_wrong_the_gain_in_loss_counts():
    def run(strength):
        loss = 1.0 if strength is None else 1.0 + strength / 1000
        return score(None, 3.0), score(None, loss), []

    found = search_lambda(run, lambda: 0.02, 0.02, Silent())
    assert found.met
    assert 10 <= found.strength <= 40


@pytest.mark.parametrize(("cost", "gain"), [(0.0, 1.0), (1.0, -1.0), (math.inf, 1.0), (1e-320, 1e300)])
def test_a_scale_that_cannot_be_told(cost, gain):
    found, asked = searched(lambda strength: 0.9, cost, gain)
    assert asked[1] in (1.0, pytest.approx(1e-300, abs=1e-2))
    assert math.isfinite(found.strength)


def blobs(seed, samples=200, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 3
    inputs = torch.randn(samples, 4, generator=generator) * 0.5
    inputs[torch.arange(samples), (labels + int(shift)) % 4] += 2
    return TensorDataset(inputs, labels)


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
    assert "auto stands for all anchors" in ewc_ft(*options, "--lambda", "auto", "--lambda", 3, expect=2).output
    assert "neither auto nor a number" in ewc_ft(*options, "--lambda", "lots", expect=2).output


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
