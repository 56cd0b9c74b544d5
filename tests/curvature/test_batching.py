"""Small batches are worked on together, and nothing but the time shows it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import Small, trained
from torch import nn

from ewc_finetune.curvature.batching import gathered
from ewc_finetune.curvature.fisher import compute_fisher
from ewc_finetune.errors import DataError
from ewc_finetune.likelihood.categorical import Categorical


def sizes(batches, most):
    return [len(inputs) for inputs, _ in gathered(batches, lambda _: most)]


def split(inputs, targets, lengths):
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    return [(inputs[a : a + n], targets[a : a + n]) for a, n in zip(starts, lengths, strict=True)]


class Chunks:
    """A bar that notes how many samples were done at a time."""

    def __init__(self):
        self.done = []

    def advance(self, samples):
        self.done.append(samples)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 20))
def test_order_and_samples_are_kept(lengths, most):
    data = torch.arange(sum(lengths))
    batches = split(data[:, None], data, lengths)
    found = list(gathered(batches, lambda _: most))
    assert torch.equal(torch.cat([data[:0], *(targets for _, targets in found)]), data)
    assert all(torch.equal(inputs[:, 0], targets) for inputs, targets in found)
    assert all(len(inputs) <= max(most, *lengths) for inputs, _ in found)


def test_only_what_fits_together():
    pixels, labels = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    assert sizes([(pixels, labels)] * 5, 6) == [6, 4]
    assert sizes([(pixels, labels)] * 3, 1) == [2, 2, 2]
    assert sizes([(pixels, labels), (torch.zeros(2, 4), labels), (pixels, labels)], 100) == [2, 2, 2]
    assert sizes([(pixels, labels), (pixels.double(), labels)], 100) == [2, 2]
    assert sizes([(pixels, labels), (pixels, None), (pixels, None)], 100) == [2, 4]
    assert sizes([(pixels, labels), (pixels[:0], labels[:0]), (pixels, labels)], 100) == [4]
    with pytest.raises(DataError, match="a batch has 2 inputs and 1 labels; expected as many"):
        list(gathered([(pixels, labels[:1])], lambda _: 100))


def test_no_batch_is_kept_waiting_without_need():
    """A batch that leaves no place for another is handed on before the next one is read."""
    read = []

    def batches():
        for n in range(4):
            read.append(n)
            yield torch.zeros(3, 1), None

    together = gathered(batches(), lambda _: 6)
    next(together)
    assert read == [0, 1]


@pytest.mark.parametrize("estimator", ["exact", "sampled", "predicted", "empirical", "batched"])
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6))
def test_the_same_however_it_is_batched(estimator, lengths):
    torch.manual_seed(0)
    model = trained(Small())
    inputs, targets = torch.randn(sum(lengths), 4, dtype=torch.float64), torch.arange(sum(lengths)) % 3
    if estimator == "batched":  # which takes each batch as it is
        lengths = [sum(lengths)]
    bar = Chunks()
    found = compute_fisher(model, split(inputs, targets, lengths), Categorical(), estimator, bar=bar)
    whole = compute_fisher(model, [(inputs, targets)], Categorical(), estimator)
    assert bar.done == [sum(lengths)]
    assert found.samples == whole.samples
    assert found.scores == pytest.approx(whole.scores)
    for name, value in whole.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-11, atol=1e-15)


def test_the_batched_estimator_takes_batches_as_they_come():
    model, bar = trained(Small()), Chunks()
    inputs, targets = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    compute_fisher(model, split(inputs, targets, [2, 4]), Categorical(), "batched", bar=bar)
    assert bar.done == [2, 4]


def test_inputs_by_name():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, left, right):
            return self.linear(left - right)

    model, bar = trained(Two()), Chunks()
    left, right = torch.randn(2, 9, 4, dtype=torch.float64)
    batches = [({"left": left[n : n + 3], "right": right[n : n + 3]}, None) for n in (0, 3, 6)]
    found = compute_fisher(model, batches, Categorical(), "exact", bar=bar)
    whole = compute_fisher(model, [({"left": left, "right": right}, None)], Categorical(), "exact")
    assert bar.done == [9]
    torch.testing.assert_close(found.values["linear.weight"], whole.values["linear.weight"], rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_large_samples_and_unruled_models_are_not_put_together():
    """What a sample takes decides: memory stays what the batches asked for."""

    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.jit.script(nn.Flatten())
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.body(x))

    def chunks(model, *shape):
        bar, inputs = Chunks(), torch.randn(8, *shape)
        compute_fisher(model, [(part, None) for part in inputs.split(4)], Categorical(), "exact", bar=bar)
        return bar.done

    assert chunks(nn.Linear(4, 3), 4) == [8]
    assert chunks(Scripted(), 4) == [4, 4]
    assert chunks(nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8 * 254**2, 3)), 1, 256, 256) == [4, 4]
