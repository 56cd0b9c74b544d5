"""The loss of training against torch's cross-entropy and against sums over single answers in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from ewc_finetune.errors import DataError, EwcError, NonFiniteError, UsageError
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.likelihood.active import Active
from ewc_finetune.likelihood.base import IGNORED
from ewc_finetune.likelihood.objective import Objective, balanced, objective_of
from ewc_finetune.likelihood.registry import get_likelihood

CATEGORICAL = get_likelihood("categorical")


def draw(*shape, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()


def slow(outputs, targets, smoothing, weights, gamma):
    """Sum over rows and classes of `q w (1 - p)^gamma (-log p)`, one after the other; targets are probabilities."""
    total = torch.zeros((), dtype=torch.float64)
    for row, label in zip(outputs, targets, strict=True):
        p = row.exp() / row.exp().sum()
        for c, one in enumerate(label):
            share = (1 - smoothing) * one + smoothing / len(label)
            total = total - share * weights[c] * (1 - p[c]) ** gamma * p[c].log()
    return total / len(outputs)


def same(found, expected, outputs):
    """Whether value and gradient are the same."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14, check_dtype=False)
    one, other = (torch.autograd.grad(loss, outputs, retain_graph=True)[0] for loss in (found, expected))
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    classes=st.integers(2, 6),
    batch=st.integers(1, 5),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    gamma=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    weighted=st.booleans(),
    soft=st.booleans(),
    seed=st.integers(0, 99),
)
def test_against_single_answers(classes, batch, smoothing, gamma, weighted, soft, seed):
    outputs, generator = draw(batch, classes, seed=seed), torch.Generator().manual_seed(seed)
    weights = [0.1 + c for c in range(classes)] if weighted else None
    labels = torch.randint(0, classes, (batch,), generator=generator)
    probabilities = torch.rand(batch, classes, generator=generator, dtype=torch.float64)
    probabilities /= probabilities.sum(dim=1, keepdim=True)
    targets = probabilities if soft else functional.one_hot(labels, classes).double()
    loss = Objective(smoothing, weights, gamma).bound(CATEGORICAL, classes)
    found = loss(outputs, probabilities if soft else labels)
    same(found, slow(outputs, targets, smoothing, weights or [1.0] * classes, gamma), outputs)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.0, 5.0]])
def test_against_torch(smoothing, weights):
    outputs, labels, soft = draw(7, 4), torch.arange(7) % 4, draw(7, 4, seed=1).detach().softmax(dim=1)
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    for targets in (labels, soft):
        expected = functional.cross_entropy(outputs, targets, weight=weight, label_smoothing=smoothing, reduction="sum")
        same(Objective(smoothing, weights).bound(CATEGORICAL, 4)(outputs, targets), expected / 7, outputs)


def test_tokens_that_do_not_count_and_outputs_that_do_not():
    outputs, targets = draw(2, 3, 4), torch.tensor([[0, 3, IGNORED], [1, IGNORED, IGNORED]])
    objective = Objective(0.2, [1.0, 2.0, 3.0, 4.0], 1.5)
    loss = objective.bound(get_likelihood("per-token"), 4)(outputs, targets)
    flat = outputs.flatten(0, 1)[[0, 1, 3]]
    same(
        loss,
        3 / 2 * slow(flat, functional.one_hot(torch.tensor([0, 3, 1]), 4).double(), 0.2, [1, 2, 3, 4], 1.5),
        outputs,
    )
    some = Active(get_likelihood("categorical"), [1, 3])
    single, labels = draw(3, 4, seed=2), torch.tensor([1, 3, 3])
    expected = slow(single[:, [1, 3]], functional.one_hot(torch.tensor([0, 1, 1]), 2).double(), 0.2, [2, 4], 1.5)
    same(objective.bound(some, 4)(single, labels), expected, single)
    soft = torch.tensor([[0, 0.25, 0, 0.75]] * 3).double()
    same(objective.bound(some, 4)(single, soft), slow(single[:, [1, 3]], soft[:, [1, 3]], 0.2, [2, 4], 1.5), single)


def test_a_focal_loss_of_answers():
    outputs, targets = draw(4, 3), torch.tensor([[1, 0, 1.0], [0, 0, 0], [0.25, 1, 1], [1, 1, 0]])
    p = outputs.sigmoid()
    by_hand = -(targets * (1 - p) ** 2 * p.log() + (1 - targets) * p**2 * (1 - p).log()).sum() / 4
    bernoulli = get_likelihood("bernoulli")
    same(Objective(focal=2.0).bound(bernoulli, 3)(outputs, targets), by_hand, outputs)
    same(Objective().bound(bernoulli, 3)(outputs, targets), bernoulli.loss(outputs, targets), outputs)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_a_sure_answer_has_a_gradient(gamma):
    outputs = torch.tensor([[200.0, 0.0]], requires_grad=True)
    Objective(focal=gamma).bound(CATEGORICAL, 2)(outputs, torch.tensor([0])).backward()
    assert outputs.grad.tolist() == [[0.0, 0.0]]


def test_without_anything_it_is_the_likelihood_s():
    outputs, targets = draw(5, 3), torch.arange(5) % 3
    assert Objective().bound(CATEGORICAL, 3)(outputs, targets) == CATEGORICAL.loss(outputs, targets)
    assert str(Objective()) == ""
    said = str(Objective(0.1, "balanced", 2.0))
    assert said == "labels smoothed by 0.1, class weights balanced, focal loss of gamma 2"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_balanced_weights_have_a_mean_of_1(labels):
    from sklearn.utils.class_weight import compute_class_weight

    targets, there = torch.tensor(labels), sorted(set(labels))
    weights = balanced([targets[:7], targets[7:]], 5, "data")
    assert sum(weights[label] for label in labels) / len(labels) == pytest.approx(1)
    expected = compute_class_weight("balanced", classes=torch.tensor(there).numpy(), y=targets.numpy())
    assert [weights[c] for c in there] == pytest.approx(expected.tolist())
    assert all(weights[c] == 1 for c in range(5) if c not in there)
    assert balanced([functional.one_hot(targets, 5).float()], 5, "data") == pytest.approx(weights)
    tokens = torch.cat([targets, torch.full((3,), IGNORED)])[None]
    assert balanced([tokens], 5, "data") == weights
    with pytest.raises(DataError, match="no labels to balance by"):
        balanced([tokens[:, -3:]], 5, "data")


def test_what_does_not_go_together():
    for values, name, said in (
        ({"focal": 2.0}, "gaussian", r"focal is 2, and the gaussian likelihood has none; it is for categorical and"),
        ({"class_weights": "balanced"}, "bernoulli", "class weights are balanced, and the bernoulli likelihood has"),
        ({"label_smoothing": 0.3}, "gaussian", r"label smoothing is 0\.3, .* it is for categorical and per-token"),
        ({"focal": 2.0, "loss": min}, "categorical", "focal is 2, and --loss takes the place"),
        ({"loss": "huber"}, "gaussian", "loss is 'huber'; expected package.module:function"),
        ({"loss": "torch.nn.functional:hubris"}, "gaussian", "has no hubris"),
        ({"loss": "torch.nn:HuberLoss"}, "gaussian", "is a class; expected a function"),
        ({"loss": "nowhere.at.all:f"}, "gaussian", "cannot import nowhere.at.all"),
    ):
        with pytest.raises(UsageError, match=said):
            objective_of(Schedule(**values), name)
    with pytest.raises(UsageError, match="there are 2 class weights, and the model has 3 outputs"):
        Objective(class_weights=[1.0, 2.0]).bound(CATEGORICAL, 3)
    for values, said in (
        ({"class_weights": [1.0, -1.0]}, "class weights are"),
        ({"class_weights": [0, 0]}, "not all of them 0"),
        ({"class_weights": "even"}, "expected balanced"),
        ({"class_weights": [math.inf]}, "class weights are"),
        ({"focal": -1}, "focal is -1"),
        ({"label_smoothing": 1.5}, r"label smoothing is 1\.5; expected a share from 0 to 1"),
        ({"loss": 3}, "loss is a int"),
    ):
        with pytest.raises(UsageError, match=said):
            Schedule(**values)


def test_a_loss_of_ones_own():
    def bound(function, likelihood="gaussian"):
        return objective_of(Schedule(loss=function), likelihood).bound(get_likelihood(likelihood), 3)

    outputs, targets = draw(4, 3), draw(4, 3, seed=1).detach()
    found = bound("torch.nn.functional:huber_loss?delta=2")(outputs, targets)
    same(found, functional.huber_loss(outputs, targets, delta=2), outputs)
    for function, said in (
        (lambda o, t: (o - t).abs(), r"gave a tensor of shape \(4, 3\)"),
        (lambda o, t: 3.0, "gave a float; expected a scalar"),
        (lambda o, t: o.detach().mean(), "no gradient by the outputs"),
        (lambda o, t: torch.ones((), requires_grad=True) * 2, "no gradient by the outputs"),
    ):
        with pytest.raises(UsageError, match=said):
            bound(function)(outputs, targets)
    with pytest.raises(EwcError, match="failed with RuntimeError: .* outputs of shape"):
        bound(lambda o, t: o @ t)(outputs, targets)
    for function in (lambda o, t: o.mean() / 0, lambda o, t: (o - o).abs().sqrt().sum()):
        with pytest.raises(NonFiniteError, match="on the first batch"):
            bound(function)(outputs, targets)
    assert bound(lambda o, t: o.sum() * 0)(outputs.half(), targets).dtype == torch.float32
    some = Active(CATEGORICAL, [0, 2])
    seen = []
    objective_of(Schedule(loss=lambda o, t: seen.extend((o, t)) or o.sum()), "categorical").bound(some, 3)(
        outputs, torch.tensor([2, 0, 2, 2])
    )
    assert torch.equal(seen[0], outputs[:, [0, 2]])
    assert seen[1].tolist() == [1, 0, 1, 1]


def test_soft_labels():
    outputs = draw(2, 3)
    soft = torch.tensor([[0.5, 0.5, 0], [0, 0.25, 0.75]])
    by_hand = -(soft * outputs.log_softmax(dim=1)).sum() / 2
    same(CATEGORICAL.loss(outputs, soft), by_hand, outputs)
    assert CATEGORICAL.right(torch.tensor([[1.0, 0, 0], [1, 0, 0]]), soft) == 1
    CATEGORICAL.check_targets(soft, (3,), "here")
    CATEGORICAL.check_targets(torch.full((2, 1000), 1e-3).half().float(), (1000,), "here")
    for wrong, said in (
        (soft[:, :2], r"shape \(2, 2\), and the model has 3 classes"),
        (torch.tensor([[0.5, 0.7, 0]]), r"1 of 1 soft labels .* they sum to 1\.2"),
        (torch.tensor([[1.0, 0, 0], [1.5, -0.5, 0]]), r"1 of 2 soft labels .* -0\.5 is among them"),
        (torch.tensor([[math.nan, 1, 0]]), "they sum to nan"),
    ):
        with pytest.raises(DataError, match=said):
            CATEGORICAL.check_targets(wrong, (3,), "here")
    with pytest.raises(DataError, match="of the active outputs: 1 of 2 soft labels"):
        Active(CATEGORICAL, [0, 1]).check_targets(soft, (3,), "here")
    generator = torch.Generator()
    for estimator in ("empirical", "batched"):
        with pytest.raises(DataError, match="takes one class for each sample; use exact or sampled"):
            CATEGORICAL.output_fisher(outputs, soft, estimator, generator)
    assert CATEGORICAL.output_fisher(outputs, soft, "exact", generator).count == 2
