"""Metrics batch by batch against scikit-learn on everything at once, and where they are found."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference
from support.domains import blobs
from support.models import Small, trained
from torch import nn
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.choices import LIKELIHOODS, METRICS
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.evaluation.metrics import Metrics, check_metrics
from ewc_finetune.likelihood.active import Active
from ewc_finetune.likelihood.base import IGNORED
from ewc_finetune.likelihood.registry import get_likelihood

OF_CLASSES = ["f1", "balanced-accuracy", "auc"]


def measured(names, likelihood, outputs, targets, sizes=()):
    """Take them in batches of these sizes, and the rest as one."""
    rule = get_likelihood(likelihood) if isinstance(likelihood, str) else likelihood
    metrics, start = Metrics(names, rule, "data"), 0
    for end in [*np.cumsum(sizes).tolist(), len(outputs)]:
        if start < end <= len(outputs):
            metrics.update(outputs[start:end], targets[start:end])
            start = end
    return metrics.compute()


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def area_of_each(targets, scores):
    """The mean of the areas under the curves of those classes that some samples are of, and not all."""
    areas = [
        reference.roc_auc_score(targets == c, scores[:, c])
        for c in range(scores.shape[1])
        if 0 < np.sum(targets == c) < len(targets)
    ]
    return np.mean(areas) if areas else None


@settings(max_examples=60, deadline=None)
@given(
    classes=st.integers(2, 5),
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=25),
    scale=st.sampled_from([0.1, 1, 30]),
    sizes=st.lists(st.integers(1, 9), max_size=4),
    seed=st.integers(0, 99),
)
def test_classes(classes, labels, scale, sizes, seed):
    """Some classes missing, others never answered, a single sample, batches of any sizes."""
    targets = torch.tensor(labels) % classes
    outputs = (scale * normal(len(labels), classes, seed=seed)).round(decimals=1)  # some are equal
    found = measured(OF_CLASSES, "categorical", outputs, targets, sizes)
    y, answers = targets.numpy(), outputs.argmax(dim=1).numpy()
    assert found["f1"] == pytest.approx(reference.f1_score(y, answers, average="macro"))
    recalls = [np.mean(answers[y == c] == c) for c in sorted(set(y.tolist()))]
    assert found["balanced-accuracy"] == pytest.approx(np.mean(recalls))
    if set(answers) <= set(y) and len(set(y)) > 1:  # else it warns
        assert found["balanced-accuracy"] == pytest.approx(reference.balanced_accuracy_score(y, answers))
    log_p = outputs.double().log_softmax(dim=1).float().numpy()
    assert found["auc"] == pytest.approx(area_of_each(y, log_p))


def test_all_classes_there_as_scikit_learn_has_it():
    outputs, targets = normal(60, 4), torch.arange(60) % 4
    found = measured(OF_CLASSES, "categorical", outputs, targets, [7, 20, 1])
    p = outputs.double().softmax(dim=1).numpy()
    assert found["auc"] == pytest.approx(reference.roc_auc_score(targets.numpy(), p, multi_class="ovr"))
    assert measured(["auc"], "categorical", outputs[:8], torch.zeros(8).long()) == {"auc": None}


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 4),
    n=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 9), max_size=4),
    seed=st.integers(0, 99),
)
def test_answers(outputs, n, sizes, seed):
    """A batch whose logits all lie between 0 and 1 is not taken for one of probabilities."""
    logits, yes = normal(n, outputs, seed=seed) + 0.5, (normal(n, outputs, seed=seed + 100) > 0.8).float()
    found = measured(OF_CLASSES, "bernoulli", logits, yes, sizes)
    y, answers = yes.numpy(), (logits > 0).numpy().astype(float)
    f1 = [reference.f1_score(y[:, c], answers[:, c], zero_division=np.nan) for c in range(outputs)]
    known = [value for value in f1 if not math.isnan(value)]
    assert found["f1"] == pytest.approx(np.mean(known) if known else None)
    balanced = [
        np.mean([np.mean(answers[y[:, c] == side, c] == side) for side in set(y[:, c])]) for c in range(outputs)
    ]
    assert found["balanced-accuracy"] == pytest.approx(np.mean(balanced))
    areas = [reference.roc_auc_score(y[:, c], logits[:, c].numpy()) for c in range(outputs) if len(set(y[:, c])) == 2]
    assert found["auc"] == pytest.approx(np.mean(areas) if areas else None)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(), (1,), (3,), (2, 2)]),
    n=st.integers(2, 20),
    scale=st.sampled_from([1e-5, 1.0, 1e4]),
    offset=st.sampled_from([0.0, 1e5]),
    sizes=st.lists(st.integers(1, 9), max_size=4),
)
def test_regressions(shape, n, scale, offset, sizes):
    """Targets small or far from zero: nothing is taken for zero, and nothing cancels."""
    targets = scale * (normal(n, *shape).double() + offset)
    outputs = targets + scale * normal(n, *shape, seed=1).double()
    found = measured(["mae", "rmse", "r2"], "gaussian", outputs, targets, sizes)
    y, answers = targets.reshape(n, -1).numpy(), outputs.reshape(n, -1).numpy()
    assert found["mae"] == pytest.approx(reference.mean_absolute_error(y.ravel(), answers.ravel()))
    assert found["rmse"] == pytest.approx(reference.root_mean_squared_error(y.ravel(), answers.ravel()))
    assert found["r2"] == pytest.approx(reference.r2_score(y, answers), rel=1e-6)


def test_regressions_without_spread():
    one = torch.tensor([[2.0]])
    assert measured(["mae", "rmse", "r2"], "gaussian", one + 1, one) == {"mae": 1, "rmse": 1, "r2": None}
    same = torch.full((5, 1), 0.1)
    assert measured(["r2"], "gaussian", same, same, [2]) == {"r2": 1}  # as scikit-learn has it
    assert measured(["r2"], "gaussian", same + 1, same, [2]) == {"r2": 0}


def test_only_what_counts_counts():
    outputs, targets = normal(3, 2, 4), torch.tensor([[0, IGNORED], [1, 2], [IGNORED, IGNORED]])
    rows = outputs[[0, 1, 1], [0, 0, 1]]
    found = measured(OF_CLASSES, "per-token", outputs, targets, [1, 1])
    assert found == measured(OF_CLASSES, "categorical", rows, torch.tensor([0, 1, 2]))
    assert measured(OF_CLASSES, "per-token", outputs[2:], targets[2:]) == dict.fromkeys(OF_CLASSES)
    single, labels = normal(9, 4), torch.arange(9) % 2 * 2 + 1
    found = measured(OF_CLASSES, Active(get_likelihood("categorical"), [1, 3]), single, labels, [4])
    assert found == measured(OF_CLASSES, "categorical", single[:, [1, 3]], labels // 2)
    soft = 0.9 * nn.functional.one_hot(labels, 4) + 0.025
    assert measured(OF_CLASSES, "categorical", single, soft) == measured(OF_CLASSES, "categorical", single, labels)
    for name in ("f1", "auc"):
        with pytest.raises(DataError, match=f"of up to 4,096 classes, and there are 5,000; leave {name} out"):
            measured([name], "categorical", torch.zeros(1, 5000), torch.tensor([0]))


def test_what_does_not_suit_is_refused(monkeypatch, ewc_ft):
    for likelihood in LIKELIHOODS:
        for name, suited in METRICS.items():
            if likelihood in suited:
                check_metrics([name], likelihood)
                continue
            with pytest.raises(UsageError, match=f"metric {name} does not suit the {likelihood} likelihood, which has"):
                check_metrics([name], likelihood)
    with pytest.raises(UsageError, match="metric is 'f2'. Known: auc, balanced-accuracy, f1"):
        check_metrics(["f2"], "categorical")
    with pytest.raises(UsageError, match="metrics is 'f1'; expected a list of names"):
        check_metrics("f1", "categorical")
    model = trained(Small(), torch.float32)
    with pytest.raises(UsageError, match="which has f1, balanced-accuracy, auc"):
        ewc.evaluate(model, blobs(), metrics=["r2"])
    with pytest.raises(UsageError, match="which has mae, rmse, r2"):
        ewc.finetune(model, blobs(), likelihood="gaussian", metrics=["auc"], eval_on=[])
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    said = ewc_ft(
        "finetune", "--model", "mlp?hidden=8", "--data", "digits?limit=20", "--metric", "f1", "-o", "m.pt", expect=2
    ).stderr
    assert "metric f1 takes a package that is not installed: pip install 'ewc-finetune[metrics]'" in said
    ewc.evaluate(model, blobs())


def test_they_are_shown_recorded_and_reported(tmp_path, ewc_ft):
    """In the table, the document, the run folder and the report; a run without them is reported all the same."""
    base = ("finetune", "--model", "mlp?hidden=8", "--data", "digits?limit=100", "--epochs", 1, "--eval", "digits")
    ewc_ft(*base, "-o", "old.pt")
    said = ewc_ft(*base, "-o", "m.pt", "--metric", "f1", "--metric", "auc", "--json")
    assert "f1 before" in said.stderr
    before, after = (json.loads(said.stdout)[when][0] for when in ("before", "after"))
    assert list(before["metrics"]) == ["f1", "auc"]
    document = json.loads((tmp_path / "m.run" / "run.json").read_text())
    assert (document["before"], document["after"]) == ([before], [after])
    assert document["options"]["metric"] == ["f1", "auc"]
    lines = [json.loads(line) for line in (tmp_path / "m.run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["scores"]["digits"] for line in lines if "scores" in line] == [before, after]
    scored = ewc_ft("evaluate", "m.pt", "--data", "digits", "--metric", "auc", "--json", "--batch-size", 7)
    assert json.loads(scored.stdout)["scores"][0]["metrics"]["auc"] == pytest.approx(after["metrics"]["auc"])
    assert f"{after['metrics']['auc']:.4g}" in scored.stderr
    # A run of before there were any.
    path = tmp_path / "old.run" / "run.json"
    old = json.loads(path.read_text())
    for score in (*old["before"], *old["after"]):
        assert score.pop("metrics") == {}
    del old["options"]["metric"]
    path.write_text(json.dumps(old))
    ewc_ft("report", "m.run", "old.run", "--output", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "auc after" in page
    assert f"{after['metrics']['auc']:.4g}" in page


def test_they_choose_nothing():
    data = blobs()
    options = {"eval_on": {"new": data}, "epochs": 3, "lr": 1e-2, "keep": "best", "select_on": [data]}
    plain, more = (
        ewc.finetune(trained(Small(), torch.float32), data, metrics=metrics, **options) for metrics in ((), OF_CLASSES)
    )
    assert plain.step == more.step
    assert plain.after["new"].loss == more.after["new"].loss
    assert list(more.after["new"].metrics) == OF_CLASSES


def test_a_regression_from_the_shell(tmp_path, ewc_ft):
    x = normal(40, 3)
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=(x @ torch.ones(3, 2)).numpy())
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "m.pt")
    found = ewc_ft(
        *("finetune", "--model", "m.pt", "--arch", "torch.nn:Linear?in_features=3&out_features=2"),
        *("--data", "npz:d.npz", "--eval", "npz:d.npz", "--likelihood", "gaussian", "--epochs", 20, "--lr", 0.1),
        *("--metric", "r2", "--metric", "mae", "-o", "n.pt", "--json"),
    )
    after = json.loads(found.stdout)["after"][0]
    assert after["accuracy"] is None
    assert after["metrics"]["r2"] > 0.9
    data = TensorDataset(x, x @ torch.ones(3, 2))
    arch = "torch.nn:Linear?in_features=3&out_features=2"
    scores = ewc.evaluate("n.pt", {"mine": data}, architecture=arch, metrics=["r2", "mae", "r2"])
    assert scores["mine"].metrics == pytest.approx(after["metrics"])
