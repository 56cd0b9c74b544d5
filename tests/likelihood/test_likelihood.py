"""Every likelihood's vectors against autograd and the definition of the Fisher at the outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.likelihood.base import IGNORED
from ewc_finetune.likelihood.registry import get_likelihood


def draw(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def output_fisher(name, outputs, estimator, targets=None, draws=1, seed=0):
    return get_likelihood(name).output_fisher(outputs, targets, estimator, torch.Generator().manual_seed(seed), draws)


def outer(found, batch):
    """Sum the outer products of all vectors, shape (batch, outputs, outputs)."""
    vectors = torch.stack([found[m] for m in range(found.count)]).flatten(2)
    return torch.einsum("mbi,mbj->bij", vectors, vectors).view(batch, vectors.shape[2], vectors.shape[2])


@settings(max_examples=60, deadline=None)
@given(
    classes=st.integers(1, 8),
    batch=st.integers(1, 5),
    scale=st.sampled_from([0.01, 1, 10, 300]),
    seed=st.integers(0, 99),
)
def test_the_factors_of_a_softmax_make_up_its_covariance(classes, batch, scale, seed):
    outputs = draw(batch, classes, seed=seed, scale=scale)
    p = outputs.softmax(dim=1)
    found = output_fisher("categorical", outputs, "exact")
    assert found.count <= max(1, classes - 1)
    expected = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    torch.testing.assert_close(outer(found, batch), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(found.squares(), expected.diagonal(dim1=1, dim2=2), rtol=0, atol=1e-15)


def test_what_is_left_out_of_a_softmax_is_below_epsilon():
    outputs = draw(50, 100, scale=6).float()
    found = output_fisher("categorical", outputs, "exact")
    assert found.count < 99
    p = outputs.double().softmax(dim=1)
    trace = (p * (1 - p)).sum()
    kept = outer(found, 50).diagonal(dim1=1, dim2=2).double().sum()
    assert abs(1 - kept / trace) < 3 * torch.finfo(torch.float32).eps


def test_nothing_cancels_near_certainty():
    """`1 - p` of a float32 p that is almost 1 would be 0; its square root matters to the Fisher."""
    outputs = torch.tensor([[20.0, 0.0, -1.0]])
    p = outputs.double().softmax(dim=1)
    expected = p * (1 - p)
    torch.testing.assert_close(
        output_fisher("categorical", outputs, "exact").squares().double(), expected, rtol=1e-5, atol=0
    )
    output_gradient = get_likelihood("categorical").output_gradient(outputs, torch.tensor([0]))
    torch.testing.assert_close(output_gradient[0, 0].double(), 1 - p[0, 0], rtol=1e-5, atol=0)
    bernoulli = get_likelihood("bernoulli").output_gradient(torch.tensor([[20.0]]), torch.tensor([[1.0]]))
    torch.testing.assert_close(bernoulli[0, 0].double(), torch.tensor(20.0).double().neg().sigmoid(), rtol=1e-5, atol=0)


CASES = {
    "categorical": (draw(5, 4), torch.tensor([0, 3, 1, 1, 2])),
    "per-token": (draw(3, 2, 4), torch.tensor([[0, 3], [IGNORED, 1], [2, 2]])),
    "bernoulli": (draw(4, 3), torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])),
    "gaussian": (draw(4, 3), draw(4, 3, seed=9)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_score_is_the_gradient_of_the_loss(name):
    outputs, targets = CASES[name]
    outputs = outputs.clone().requires_grad_()
    loss = get_likelihood(name).loss(outputs, targets)
    (gradient,) = torch.autograd.grad(loss, outputs)
    found = output_fisher(name, outputs, "empirical", targets)
    torch.testing.assert_close(found[0], -gradient * len(outputs))
    torch.testing.assert_close(found.squares(), found[0].square())
    with pytest.raises(DataError, match="needs labels and this data has none"):
        output_fisher(name, outputs, "empirical")


@pytest.mark.parametrize("name", CASES)
def test_exact_is_the_expectation_of_sampled(name):
    outputs = CASES[name][0]
    exact = outer(output_fisher(name, outputs, "exact"), len(outputs))
    sampled = outer(output_fisher(name, outputs, "sampled", draws=20_000), len(outputs))
    torch.testing.assert_close(sampled, exact, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", CASES)
def test_draws_do_not_depend_on_the_batches(name):
    outputs = CASES[name][0]
    generator = torch.Generator().manual_seed(4)
    parts = [
        get_likelihood(name).output_fisher(o, None, "sampled", generator, 3).vectors(slice(None))
        for o in outputs.split(2)
    ]
    whole = output_fisher(name, outputs, "sampled", draws=3, seed=4).vectors(slice(None))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def test_predicted():
    outputs = draw(4, 3)
    expected = output_fisher("categorical", outputs, "empirical", outputs.argmax(dim=1))[0]
    assert torch.equal(output_fisher("categorical", outputs, "predicted")[0], expected)
    with pytest.raises(UsageError, match="predicted estimator is zero for the gaussian"):
        output_fisher("gaussian", outputs, "predicted")


def test_tokens_that_are_ignored_count_for_nothing():
    outputs, targets = CASES["per-token"]
    likelihood = get_likelihood("per-token")
    assert (output_fisher("per-token", outputs, "empirical", targets)[0][1, 0] == 0).all()
    right = outputs.argmax(dim=2)
    right[1, 0] = IGNORED
    assert likelihood.right(outputs, right).item() == 3
    right[0, 0] = (right[0, 0] + 1) % 4
    assert likelihood.right(outputs, right).item() == 2.5


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("categorical", (2, 3, 4), torch.float32, r"logits of shape \(batch, classes\)"),
        ("per-token", (2, 3), torch.float32, r"logits of shape \(batch, tokens, classes\)"),
        ("bernoulli", (2, 3), torch.long, "needs real numbers"),
        ("gaussian", (2, 3), torch.long, "needs real numbers"),
    ],
)
def test_outputs_that_do_not_suit(name, shape, dtype, message):
    with pytest.raises(DataError, match=message):
        get_likelihood(name).check_outputs(torch.zeros(shape, dtype=dtype), "here")


@pytest.mark.parametrize(
    ("name", "targets", "outputs", "message"),
    [
        ("per-token", torch.zeros(2, 5, dtype=torch.long), (4, 3), r"integers of shape \(batch, 4\)"),
        ("per-token", torch.full((2, 4), 7), (4, 3), "8 of 8 labels are not among the model's 3 classes"),
        ("bernoulli", torch.zeros(2), (3,), r"needs the shape of the outputs, \(batch, 3\). Class labels"),
        ("bernoulli", torch.full((2, 3), 2.0), (3,), "targets run from 2 to 2"),
        ("gaussian", torch.zeros(2, 4), (3,), "needs the shape of the outputs"),
    ],
)
def test_targets_that_do_not_suit(name, targets, outputs, message):
    with pytest.raises(DataError, match=message):
        get_likelihood(name).check_targets(targets, outputs, "here")
