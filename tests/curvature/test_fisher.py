"""The Fisher against a slow, obvious float64 loop over single samples."""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import Small, trained
from torch import nn

from ewc_finetune.choices import ESTIMATORS as CHOICES
from ewc_finetune.curvature.fallback import one_at_a_time, vectorised
from ewc_finetune.curvature.fisher import compute_fisher
from ewc_finetune.errors import ArchitectureError, DataError, DeviceError, NonFiniteError, UsageError
from ewc_finetune.likelihood.categorical import Categorical
from ewc_finetune.likelihood.registry import get_likelihood

pytestmark = pytest.mark.usefixtures("as_they_come")

ESTIMATORS = [name for name in CHOICES if name != "auto"]


def reference(model, inputs, targets, estimator, batch_size=4, seed=0):
    """Differentiate log p(y | x) itself, one sample and one label at a time, in float64."""
    model = model.double().eval()
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}

    inputs = inputs.double() if inputs.is_floating_point() else inputs

    def gradient(x, y):
        log_p = model(x[None]).log_softmax(dim=1)[0, y]
        found = torch.autograd.grad(log_p, list(parameters.values()), allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters.values(), strict=True)]

    def add(gradients, weight):
        for name, g in zip(parameters, gradients, strict=True):
            total[name] += weight * g**2

    if estimator == "batched":
        for start in range(0, len(inputs), batch_size):
            size = len(inputs[start : start + batch_size])
            each = [gradient(inputs[i], targets[i]) for i in range(start, start + size)]
            add([sum(gs) / size for gs in zip(*each, strict=True)], size)
    else:
        draws = torch.rand(len(inputs), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for n, x in enumerate(inputs):
            p = model(x[None]).softmax(dim=1)[0].detach()
            if estimator == "exact":
                for y in range(len(p)):
                    add(gradient(x, y), p[y])
            elif estimator == "sampled":
                add(gradient(x, int((p.cumsum(0) < draws[n]).sum())), 1)
            elif estimator == "predicted":
                add(gradient(x, int(p.argmax())), 1)
            else:
                add(gradient(x, int(targets[n])), 1)
    return {name: value / len(inputs) for name, value in total.items()}


def compute(model, inputs, targets, estimator, batch_size=4, **options):
    batches = list(zip(inputs.split(batch_size), targets.split(batch_size), strict=True))
    return compute_fisher(model, batches, Categorical(), estimator, **options)


def relative_error(found, expected):
    """Largest error of each tensor, against the largest value of that tensor."""
    return max(((found[n] - e).abs().max() / e.abs().max().clamp(min=1e-300)).item() for n, e in expected.items())


class Tied(nn.Module):
    """One weight that embeds and reads out, and a layer used twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.middle = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        h = self.embed(tokens).mean(dim=1)
        return self.out(self.middle(self.middle(h).tanh()).tanh())


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 4, 2, groups=1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(16),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        return self.layers(x)


class Recurrent(nn.Module):
    """torch.func can't vectorise an LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


CASES = {
    "small": (Small, lambda g: torch.randn(11, 4, generator=g, dtype=torch.float64)),
    "tied and reused": (Tied, lambda g: torch.randint(0, 3, (11, 5), generator=g)),
    "convolutional": (Convolutional, lambda g: torch.randn(11, 1, 6, 6, generator=g, dtype=torch.float64)),
    "recurrent": (Recurrent, lambda g: torch.randn(11, 3, 2, generator=g, dtype=torch.float64)),
}


def case(name):
    kind, draw = CASES[name]
    generator = torch.Generator().manual_seed(5)
    return trained(kind()), draw(generator), torch.randint(0, 3, (11,), generator=generator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_a_loop_over_single_samples(name, estimator):
    model, inputs, targets = case(name)
    found = compute(model, inputs, targets, estimator)
    expected = reference(model, inputs, targets, estimator)
    assert found.values.keys() == expected.keys()
    assert relative_error(found.values, expected) < 1e-10
    assert found.samples == 11


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_agrees_elementwise_to_a_millionth(estimator):
    model, inputs, targets = case("small")
    found = compute(model, inputs, targets, estimator).values
    for name, value in reference(model, inputs, targets, estimator).items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_float32_model_agrees_to_float32(estimator):
    model, inputs, targets = case("small")
    model = model.float()
    expected = reference(trained(Small()), inputs, targets, estimator)
    assert relative_error(compute(model, inputs.float(), targets, estimator).values, expected) < 1e-5


def test_half_precision_is_squared_and_summed_in_float32():
    model = trained(nn.Sequential(nn.Linear(4, 3)), torch.bfloat16)
    inputs = (1e-3 * torch.randn(40, 4, generator=torch.Generator().manual_seed(0))).bfloat16()
    targets = torch.zeros(40, dtype=torch.long)
    found = compute(model, inputs, targets, "exact")
    expected = reference(trained(nn.Sequential(nn.Linear(4, 3)), torch.bfloat16).double(), inputs, targets, "exact")
    assert relative_error(found.values, expected) < 0.02
    assert found.values["0.weight"].dtype == torch.float64


@settings(max_examples=25, deadline=None)
@given(classes=st.integers(2, 6), features=st.integers(1, 5), samples=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_exact_is_the_closed_form_of_logistic_regression(classes, features, samples, seed):
    """For logits W x + b the Fisher of W_ci is mean_n p_c (1 - p_c) x_i^2, and of b_c mean_n p_c (1 - p_c)."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(features, classes).double()
    inputs = torch.randn(samples, features, generator=generator, dtype=torch.float64)
    found = compute(model, inputs, torch.zeros(samples, dtype=torch.long), "exact").values
    p = model(inputs).softmax(dim=1).detach()
    variance = p * (1 - p)
    torch.testing.assert_close(found["weight"], variance.T @ inputs**2 / samples, rtol=1e-9, atol=1e-300)
    torch.testing.assert_close(found["bias"], variance.mean(0), rtol=1e-9, atol=1e-300)


@settings(max_examples=20, deadline=None)
@given(
    first=st.integers(1, 11),
    second=st.integers(1, 11),
    estimator=st.sampled_from(sorted(set(ESTIMATORS) - {"batched"})),
)
def test_batch_size_does_not_matter(first, second, estimator):
    model, inputs, targets = case("small")
    one, other = (compute(model, inputs, targets, estimator, batch_size=b).values for b in (first, second))
    assert relative_error(one, other) < 1e-12


def test_sampled_tends_to_exact():
    model = nn.Linear(2, 3).double()
    inputs, targets = torch.tensor([[1.0, -2.0]]).double().repeat(100_000, 1), torch.zeros(100_000, dtype=torch.long)
    sampled = compute(model, inputs, targets, "sampled", batch_size=100_000).values
    exact = compute(model, inputs[:1], targets[:1], "exact").values
    assert relative_error(sampled, exact) < 0.02


def test_vectorised_and_one_at_a_time_are_the_same():
    model, inputs, _ = case("convolutional")
    parameters = dict(model.named_parameters())
    vectors = torch.randn(2, 11, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = (engine(model, parameters, inputs, vectors) for engine in (vectorised, one_at_a_time))
    assert relative_error({n: s for n, (s, _) in one.items()}, {n: s for n, (s, _) in other.items()}) < 1e-12
    assert relative_error({n: s for n, (_, s) in one.items()}, {n: s for n, (_, s) in other.items()}) < 1e-12


def test_says_which_way_it_goes():
    model, inputs, targets = case("recurrent")
    path = compute(model, inputs, targets, "exact").path
    assert "layer rules for 2 parameters" in path
    assert "one sample at a time, for 4 parameters (lstm.weight_ih_l0" in path
    model, inputs, targets = case("small")
    assert compute(model, inputs, targets, "exact").path == "gradients: layer rules for 6 parameters"


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", ["small", "recurrent"])
def test_leaves_the_model_as_it_was(name, estimator):
    model, inputs, targets = case(name)
    model.train()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    held = list(model.parameters())[-1]
    held.grad = torch.ones_like(held)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    compute(model, inputs, targets, estimator)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not frozen.requires_grad
    assert torch.equal(held.grad, torch.ones_like(held))
    assert all(p.grad is None for p in model.parameters() if p is not held)
    assert torch.equal(torch.get_rng_state(), state)


def test_frozen_parameters_get_no_fisher():
    model, inputs, targets = case("small")
    model.first.weight.requires_grad_(False)
    assert "first.weight" not in compute(model, inputs, targets, "exact").values


def test_scores_come_from_the_same_pass():
    model, inputs, targets = case("small")
    found = compute(model, inputs, targets, "exact")
    outputs = model(inputs)
    assert found.scores["accuracy"] == pytest.approx((outputs.argmax(1) == targets).double().mean().item())
    assert found.scores["loss"] == pytest.approx(nn.functional.cross_entropy(outputs, targets).item())


def test_needs_no_labels_but_for_empirical():
    model, inputs, targets = case("small")
    with_labels = compute(model, inputs, targets, "exact")
    without = compute_fisher(model, [(inputs, None)], Categorical(), "exact")
    assert relative_error(without.values, with_labels.values) < 1e-12
    assert without.scores == {}
    with pytest.raises(DataError, match="empirical estimator needs labels"):
        compute_fisher(model, [(inputs, None)], Categorical(), "empirical")


def test_a_million_repetitions_lose_nothing():
    """A sum in float32 would stop growing; the mean of identical samples is the sample's own value."""
    model = trained(nn.Linear(1, 2, bias=False), torch.float32)
    inputs, targets = torch.ones(1_000_000, 1), torch.zeros(1_000_000, dtype=torch.long)
    many = compute(model, inputs, targets, "exact", batch_size=100_000).values["weight"]
    one = compute(model, inputs[:1], targets[:1], "exact").values["weight"]
    torch.testing.assert_close(many, one, rtol=1e-5, atol=0)


def test_bad_outputs_and_labels_are_named():
    model, inputs, targets = case("small")
    with pytest.raises(DataError, match=r"samples 0 to 3: 1 of 4 labels .* 3 classes \(0 to 2\): found 7"):
        compute(model, inputs, torch.full_like(targets, 0).index_fill(0, torch.tensor([2]), 7), "exact")
    with pytest.raises(DataError, match="not one sample"):
        compute_fisher(model, [], Categorical(), "exact")
    with pytest.raises(DataError, match=r"logits of shape \(batch, classes\)"):
        compute(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))).double(), inputs, targets, "exact")
    inputs[5, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="samples 4 to 7: .* sample number 1 "):
        compute(model, inputs, targets, "exact")


def test_an_overflowing_fisher_is_named():
    model = nn.Sequential(Scale(1e-200), nn.Linear(1, 2).double())
    inputs, targets = torch.full((2, 1), 1e200, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    with pytest.raises(NonFiniteError, match=r"sample 0: the squared gradient by 0\.weight holds NaN"):
        compute(model, inputs, targets, "exact")


class Scale(nn.Module):
    """Outputs stay finite; the gradient by `weight` is the input, whose square overflows."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, x):
        return self.weight * x


class Sequences(nn.Module):
    """Logits for every token: (batch, 3, 4)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens):
        return self.mix(self.embed(tokens).cumsum(1).tanh())


@pytest.mark.parametrize("name", ["bernoulli", "gaussian", "per-token"])
def test_other_likelihoods_in_closed_form(name):
    """sum_n J_n^T S_n J_n with the Jacobian of every sample written out, and S from its textbook form."""
    generator = torch.Generator().manual_seed(0)
    if name == "per-token":
        model, inputs = trained(Sequences()), torch.randint(0, 6, (5, 3), generator=generator)
    else:
        model, inputs = trained(Small()), torch.randn(5, 4, generator=generator, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    expected = {n: torch.zeros_like(p) for n, p in parameters.items()}
    for one in inputs:
        outputs = model(one[None])[0]
        if name == "gaussian":
            s = torch.eye(outputs.numel(), dtype=torch.float64)
        elif name == "bernoulli":
            s = torch.diag(outputs.sigmoid() * (1 - outputs.sigmoid()))
        else:
            p = outputs.softmax(dim=1)
            s = torch.block_diag(*(torch.diag(t) - torch.outer(t, t) for t in p))
        rows = [torch.autograd.grad(o, list(parameters.values()), retain_graph=True) for o in outputs.flatten()]
        for i, n in enumerate(parameters):
            jacobian = torch.stack([row[i].flatten() for row in rows])
            expected[n] += ((jacobian.T @ s.detach()) * jacobian.T).sum(1).view_as(expected[n]) / len(inputs)
    found = compute_fisher(model, [(inputs[:2], None), (inputs[2:], None)], get_likelihood(name), "exact")
    assert relative_error(found.values, expected) < 1e-10


def test_auto_is_exact_for_few_outputs_and_sampled_for_many():
    for outputs, expected in ((32, "exact"), (33, "sampled")):
        notes = []
        model = trained(nn.Sequential(nn.Linear(4, outputs)))
        found = compute_fisher(model, [(torch.ones(2, 4).double(), None)], Categorical(), note=notes.append)
        assert found.estimator == expected
        assert notes == [f"estimator: {expected}, for a model with {outputs} outputs"]


def test_more_draws_come_nearer_to_exact():
    model, inputs, targets = case("small")
    exact = compute(model, inputs, targets, "exact").values
    errors = [
        relative_error(compute(model, inputs, targets, "sampled", draws=draws).values, exact)
        for draws in (1, 100, 10000)
    ]
    assert errors[2] < 0.05
    assert errors[2] < errors[1] < errors[0]
    with pytest.raises(UsageError, match="draws nothing"):
        compute(model, inputs, targets, "exact", draws=2)


def test_the_standard_error_is_the_spread_of_the_samples():
    model, inputs, targets = case("small")
    found = compute(model, inputs, targets, "empirical")
    single = [compute(model, inputs[n : n + 1], targets[n : n + 1], "empirical").values for n in range(11)]
    for layer, names in (("first", ["first.weight", "first.bias"]), (None, list(single[0]))):
        traces = torch.tensor([sum(one[name].sum().item() for name in names) for one in single], dtype=torch.float64)
        expected = (traces.std() / 11**0.5 / traces.mean()).item()
        error = found.standard_error.trace if layer is None else found.standard_error.layers[layer]
        assert error == pytest.approx(expected, rel=1e-9)
    assert compute(model, inputs[:1], targets[:1], "empirical").standard_error.trace is None
    assert compute(model, inputs, targets, "batched").standard_error is None


def test_stops_when_the_error_is_small_enough():
    model = trained(Small())
    inputs = torch.randn(5000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches, notes = [(part, None) for part in inputs.split(100)], []
    found = compute_fisher(model, batches, Categorical(), "exact", rtol=0.1, note=notes.append)
    assert 200 <= found.samples < 5000
    assert found.standard_error.trace <= 0.1
    assert f"stopped after {found.samples:,} samples" in notes[-1]
    everything = compute_fisher(model, batches, Categorical(), "exact", rtol=1e-9)
    assert everything.samples == 5000
    with pytest.raises(UsageError, match="no standard error to stop at"):
        compute_fisher(model, batches, Categorical(), "batched", rtol=0.1)


def test_out_of_memory_halves_the_batch_and_loses_nothing():
    class Hungry(Small):
        def forward(self, x):
            if len(x) > 3:
                raise torch.OutOfMemoryError("out of memory, it says here")
            return super().forward(x)

    model, inputs, targets = case("small")
    hungry, notes = trained(Hungry()), []
    for estimator in ("exact", "sampled"):
        found = compute(hungry, inputs, targets, estimator, batch_size=11, note=notes.append)
        expected = compute(model, inputs, targets, estimator)
        assert relative_error(found.values, expected.values) < 1e-12
        assert found.scores == pytest.approx(expected.scores)
    assert notes[0] == "out of memory with 11 samples at once; going on with 5"
    with pytest.raises(DeviceError, match="batched takes each whole"):
        compute(hungry, inputs, targets, "batched", batch_size=11)


def test_not_even_one_sample_fits():
    class Starved(Small):
        def forward(self, x):
            if torch.is_grad_enabled() and len(x) == 1 and self.armed:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    model, inputs = trained(Starved()), case("small")[1]
    model.armed = False

    def batches():
        yield inputs[:4], None
        model.armed = True
        yield inputs[4:5], None

    with pytest.raises(DeviceError, match="not even one sample"):
        compute_fisher(model, batches(), Categorical(), "exact")


class Dropping(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.drop = drop
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.drop(self.inner(x)))


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        (lambda x: nn.functional.dropout(x, 0.3), r"drops values at random \(p = 0.3\) although .* in eval mode"),
        (nn.functional.dropout, r"p = 0.5"),
        (lambda x: x * torch.rand_like(x), "draws random numbers in eval mode"),
        (lambda x: nn.functional.batch_norm(x, None, None, training=True), "statistics of the batch"),
        (lambda x: x - x.mean(0), "change with the other samples of its batch"),
        (lambda x: x[:1].expand_as(x) + x, "change with the other samples of its batch"),
    ],
)
def test_models_without_a_gradient_for_each_sample_are_refused(drop, message):
    model, (_, inputs, targets) = trained(Dropping(drop)), case("small")
    with pytest.raises(ArchitectureError, match=message):
        compute(model, inputs, targets, "exact")


def test_the_module_that_drops_is_named():
    class Inner(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.1)

    model, (_, inputs, targets) = trained(Dropping(Inner())), case("small")
    with pytest.raises(ArchitectureError, match="module drop drops values"):
        compute(model, inputs, targets, "exact")


def test_non_finite_gradients_are_named():
    """The outputs are fine; sample 6 has an infinite slope at the weight of one layer."""

    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1, bias=False)
            self.head = nn.Linear(1, 2)

        def forward(self, x):
            return self.head(self.inner(x).abs().sqrt())

    model = trained(Slope())
    inputs = torch.ones(11, 1, dtype=torch.float64)
    inputs[6] = 0
    with pytest.raises(NonFiniteError, match=r"sample 6: the squared gradient by inner\.weight holds NaN"):
        compute(model, inputs, torch.zeros(11, dtype=torch.long), "exact")


def test_memory_does_not_grow_with_the_samples():
    """Nothing of a batch outlives it: no graph, no input, no gradient."""
    model, inputs, _ = case("convolutional")

    def alive():
        gc.collect()
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    counts = []

    def batches():
        for _ in range(6):
            yield inputs.clone(), None
            counts.append(alive())

    compute_fisher(model, batches(), Categorical(), "exact")
    assert len(set(counts[1:])) == 1


def test_compiled_models_are_looked_through():
    model, inputs, targets = case("small")
    expected = compute(model, inputs, targets, "exact")
    found = compute(torch.compile(model), inputs, targets, "exact")
    assert found.path == expected.path
    assert relative_error(found.values, {f"_orig_mod.{n}": v for n, v in expected.values.items()}) < 1e-12


class Recomputing(Small):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        middle = torch.utils.checkpoint.checkpoint(lambda h: self.norm(h).tanh(), self.first(x), use_reentrant=False)
        if self.reentrant:
            middle = torch.utils.checkpoint.checkpoint(lambda h: h * 1, middle, use_reentrant=True)
        return self.last(middle)


def test_checkpointed_activations():
    """What recomputes its activations is right, or refused where autograd hides it."""
    model, inputs, targets = case("small")
    found = compute(trained(Recomputing(False)), inputs, targets, "exact")
    assert relative_error(found.values, compute(model, inputs, targets, "exact").values) < 1e-12
    with pytest.raises(ArchitectureError, match="autograd cannot differentiate this model: .*[Cc]heckpoint"):
        compute(trained(Recomputing(True)), inputs, targets, "exact")

    class First(nn.Linear):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)

    with pytest.raises(ArchitectureError, match="a checkpoint that autograd does not see through"):
        compute(trained(First(4, 3)), inputs, targets, "exact")


def test_sparse_gradients_and_complex_parameters():
    class Sparse(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.embed = nn.EmbeddingBag(5, 4, sparse=sparse, mode="sum")
            self.other = nn.Embedding(5, 4, sparse=sparse)
            self.head = nn.Linear(4, 3)

        def forward(self, tokens):
            return self.head((self.embed(tokens) + self.other(tokens).sum(1)).tanh())

    tokens, targets = torch.randint(0, 5, (6, 3), generator=torch.Generator().manual_seed(0)), torch.zeros(6).long()
    found, expected = (compute(trained(Sparse(s)), tokens, targets, "exact").values for s in (True, False))
    assert relative_error(found, expected) < 1e-12
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(torch.ones(3, 4, dtype=torch.complex64))
    with pytest.raises(ArchitectureError, match="weight has type torch.complex64"):
        compute(model, torch.ones(4, 4), targets[:4], "exact")


@pytest.mark.parametrize("name", CASES)
def test_a_pass_leaves_nothing_on_the_model(name):
    model, inputs, _ = case(name)
    flags = [p.requires_grad for p in model.parameters()]
    compute(model, inputs, torch.zeros(11, dtype=torch.long), "exact")
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(module, kind) for module in model.modules() for kind in hooks)
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_half_precision_of_every_kind_of_layer():
    """A half-precision model agrees with itself in float64 as far as its own rounding lets it."""
    for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.02)):
        _, inputs, targets = case("convolutional")
        half = trained(Convolutional()).to(dtype)
        expected = compute(half.double(), inputs.to(dtype).double(), targets, "empirical").values
        found = compute(half.to(dtype), inputs.to(dtype), targets, "empirical").values
        for name, value in expected.items():
            assert ((found[name] - value).norm() / value.norm()).item() < tolerance, (dtype, name)
            assert found[name].dtype == torch.float64


def test_outputs_in_a_tuple_or_a_dictionary():
    model, inputs, targets = case("small")
    expected = compute(model, inputs, targets, "exact").values
    for wrap in (lambda y: (y, None), lambda y: {"aux": y * 2, "logits": y}, lambda y: SimpleNamespace(logits=y)):
        wrapped = trained(Small())
        plain = wrapped.forward
        wrapped.forward = lambda x, plain=plain, wrap=wrap: wrap(plain(x))
        assert relative_error(compute(wrapped, inputs, targets, "exact").values, expected) < 1e-12
    wrapped.forward = lambda x: {"a": plain(x), "b": x}
    with pytest.raises(DataError, match="returned a dict with a, b; expected a tensor of outputs"):
        compute(wrapped, inputs, targets, "exact")


def test_a_confident_float16_model_does_not_underflow():
    model = trained(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    model[2].bias.data = torch.tensor([20.0, 0.0, -1.0], dtype=torch.float64)
    model.half()
    inputs = 0.1 * torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).half()
    for estimator in ("exact", "predicted"):
        for rules in (True, False):
            batches = [(inputs, None)]
            found = compute_fisher(model.half(), batches, Categorical(), estimator, rules=rules)
            expected = compute_fisher(model.double(), [(inputs.double(), None)], Categorical(), estimator)
            for name, value in expected.values.items():
                assert value.max() > 0
                assert ((found.values[name] - value).norm() / value.norm()).item() < 0.05, (estimator, rules, name)


def test_batched_leaves_the_inputs_alone():
    class Overwriting(Small):
        def forward(self, x):
            return super().forward(x.mul_(3).sub_(1))

    model, inputs, targets = case("small")
    found = compute(trained(Overwriting()), inputs.clone(), targets, "batched").values
    assert relative_error(found, compute(model, inputs * 3 - 1, targets, "batched").values) < 1e-12


def test_dependence_shows_even_if_the_first_batch_is_one_sample():
    model, (_, inputs, targets) = trained(Dropping(lambda x: x - x.mean(0))), case("small")
    with pytest.raises(ArchitectureError, match="change with the other samples"):
        compute(model, inputs, targets, "exact", batch_size=1)
    with pytest.raises(ArchitectureError, match="change with the other samples"):
        compute(model, inputs[:1].repeat(11, 1), targets, "exact")


def test_as_many_labels_as_samples():
    model, inputs, targets = case("small")
    with pytest.raises(DataError, match="a batch has 11 inputs and 2 labels; expected as many"):
        compute_fisher(model, [(inputs, targets[:2])], Categorical(), "empirical")


def test_outputs_that_depend_on_no_parameter():
    class Cut(Small):
        def forward(self, x):
            return super().forward(x).detach()

    model, inputs, targets = case("small")
    with pytest.raises(ArchitectureError, match="depend on none of the parameters"):
        compute(trained(Cut()), inputs, targets, "exact")
    with pytest.raises(UsageError, match="no parameter to compute a Fisher for"):
        compute(model.requires_grad_(False), inputs, targets, "exact")


def test_what_a_forward_pass_leaves_on_the_model_is_put_back():
    class Keeping(Small):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.kept = torch.ones(2)

        def forward(self, x):
            self.calls += 1
            self.kept = self.newly_kept = super().forward(x)
            return self.kept

    model, (_, inputs, targets) = trained(Keeping()), case("small")
    calls, kept = model.calls.clone(), model.kept
    for rules in (True, False):
        compute(model, inputs, targets, "exact", rules=rules)
        assert torch.equal(model.calls, calls)
        assert model.kept is kept
        assert not hasattr(model, "newly_kept")


def test_memory_errors_of_the_cpu_are_known():
    class Hungry(Small):
        def forward(self, x):
            if len(x) > 3:
                raise RuntimeError(
                    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"
                )
            return super().forward(x)

    model, inputs, targets = case("small")
    found = compute(trained(Hungry()), inputs, targets, "exact", batch_size=11)
    assert relative_error(found.values, compute(model, inputs, targets, "exact").values) < 1e-12
