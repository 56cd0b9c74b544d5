"""K-FAC blocks: their factors against slow float64 references and curvlinops, and what they pull with."""

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files import change_anchor
from support.kronecker import dense, make_anchor, psd, whole
from support.models import trained
from torch import nn

import ewc_finetune as ewc
from ewc_finetune import Anchor, Penalty, Provenance, compute_fisher
from ewc_finetune.curvature.kfac_factors import BlockSums
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.curvature.kronecker_factors import DenseFactor, EighDecomposed
from ewc_finetune.errors import (
    AnchorError,
    AnchorMismatchError,
    ArchitectureError,
    NonFiniteError,
    UsageError,
)
from ewc_finetune.likelihood.registry import get_likelihood


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 4, (1, 2), dilation=(1, 2), bias=False),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


class Sequences(nn.Module):
    """Linear maps of several vectors to a sample, averaged at the end."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x):
        return self.second(self.first(x).relu()).mean(dim=1)


CASES = {"dense": (dense, (6,)), "convolutional": (convolutional, (2, 7, 7)), "sequences": (Sequences, (4, 6))}


def case(name, n=12):
    build, shape = CASES[name]
    inputs = torch.randn(n, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return trained(build()).eval(), inputs


def layers_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))}


def positions(layer, inputs, gradient):
    """What a layer met and got back at each position of one sample: `(T, in)`, the bias's 1 in it, and `(T, out)`."""
    if isinstance(layer, nn.Linear):
        a, g = inputs.reshape(-1, inputs.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    else:
        a = nn.functional.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0].T
        g = gradient[0].flatten(1).T
    return (a if layer.bias is None else torch.cat([a, a.new_ones(len(a), 1)], dim=1)), g


def by_hand(model, inputs, form):
    """Both factors of every layer by the definition, one sample and one class after the other."""
    found = {}
    for n in range(len(inputs)):
        seen = {}
        hooks = [
            layer.register_forward_hook(lambda m, i, o, name=name, seen=seen: seen.update({name: (i[0].detach(), o)}))
            for name, layer in layers_of(model).items()
        ]
        outputs = model(inputs[n : n + 1])
        for hook in hooks:
            hook.remove()
        p = outputs.detach().softmax(1)
        for name, (a, out) in seen.items():
            for c in range(p.shape[1]):
                score = nn.functional.one_hot(torch.tensor([c]), p.shape[1]) - p
                (gradient,) = torch.autograd.grad(outputs, out, score, retain_graph=True)
                vectors, g = positions(layers_of(model)[name], a, gradient)
                if form == "reduce":
                    vectors, g = vectors.mean(0, keepdim=True), g.sum(0, keepdim=True)
                sums = found.setdefault(name, [0.0, 0.0])
                sums[1] = sums[1] + p[0, c] * g.T @ g / len(inputs)
                if c == 0:
                    sums[0] = sums[0] + vectors.T @ vectors / len(vectors) / len(inputs)
    return found


@pytest.mark.parametrize("form", ["expand", "reduce"])
@pytest.mark.parametrize("name", CASES)
def test_factors_by_hand(name, form):
    model, inputs = case(name)
    found = compute_fisher(model, [(inputs[:5], None), (inputs[5:], None)], get_likelihood("categorical"), kfac=form)
    expected = by_hand(model, inputs, form)
    assert {block.layer for block in found.blocks} == set(expected)
    assert not found.values
    for block in found.blocks:
        torch.testing.assert_close(block.input.matrix(), expected[block.layer][0], rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(block.output.matrix(), expected[block.layer][1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("form", ["expand", "reduce"])
@pytest.mark.parametrize("name", CASES)
def test_factors_of_curvlinops(name, form):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit, on its way out, in what curvlinops imports
        from curvlinops import KFACLinearOperator

    model, inputs = case(name)
    found = compute_fisher(model, [(inputs, None)], get_likelihood("categorical"), kfac=form)
    theirs = KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        [(inputs, torch.zeros(len(inputs), dtype=torch.long))],
        fisher_type="type-2",
        kfac_approx=form,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    generator = torch.Generator().manual_seed(2)
    parameters = dict(model.named_parameters())
    vector = {n: torch.randn(p.shape, dtype=p.dtype, generator=generator) for n, p in parameters.items()}
    product = dict(zip(parameters, theirs @ list(vector.values()), strict=True))
    for block in found.blocks:
        bias = None if block.bias is None else vector[block.bias]
        mine = block.split(block.times(block.join(vector[block.weight], bias)), vector[block.weight].shape)
        torch.testing.assert_close(mine[0], product[block.weight].detach())
        if block.bias is not None:
            torch.testing.assert_close(mine[1], product[block.bias].detach())


def true_block(model, block, inputs):
    """The block of the Fisher under squared error, in the order of the matrix's rows: sum of outer products."""
    size = block.input.size * block.output.size
    total = torch.zeros(size, size, dtype=torch.float64)
    named = dict(model.named_parameters())
    for n in range(len(inputs)):
        outputs = model(inputs[n : n + 1])
        for c in range(outputs.shape[1]):
            parts = torch.autograd.grad(outputs[0, c], [named[name] for name in block.names], retain_graph=True)
            g = block.join(parts[0], parts[1] if len(parts) > 1 else None).flatten()
            total += torch.outer(g, g) / len(inputs)
    return total


@pytest.mark.parametrize(
    "model",
    [nn.Linear(5, 3), nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 3))],
    ids=["one linear layer", "a deep linear network"],
)
def test_exact_where_all_is_linear(model):
    model = trained(model).eval()
    inputs = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = compute_fisher(model, [(inputs, None)], get_likelihood("gaussian"), "exact", kfac="expand")
    for block in found.blocks:
        mine = torch.kron(block.output.matrix(), block.input.matrix())
        torch.testing.assert_close(mine, true_block(model, block, inputs), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("estimator", ["exact", "sampled", "empirical", "predicted"])
def test_the_trace_of_a_block_with_one_position_is_that_of_the_diagonal(estimator):
    """Where a and g are of one sample there is nothing to factor: N = 1 gives the diagonal itself."""
    model, inputs = case("dense", 1)
    batches = [(inputs, torch.tensor([1]))]
    options = {"generator": torch.Generator().manual_seed(3)}
    blocks = compute_fisher(model, batches, get_likelihood("categorical"), estimator, kfac="expand", **options).blocks
    options = {"generator": torch.Generator().manual_seed(3)}
    values = compute_fisher(model, batches, get_likelihood("categorical"), estimator, **options).values
    for block in blocks:
        diagonal = block.split(block.diagonal(), values[block.weight].shape)
        torch.testing.assert_close(diagonal[0], values[block.weight])
        if block.bias is not None:
            torch.testing.assert_close(diagonal[1], values[block.bias])


class Mixed(nn.Module):
    """Some of everything: a normalisation, an embedding, a tied weight, a transposed map, a group convolution."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.norm = nn.LayerNorm(4)
        self.turned = nn.Parameter(torch.randn(4, 6))
        self.offset = nn.Parameter(torch.randn(6))
        self.twice = nn.Linear(6, 6)
        self.groups = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.conv = nn.Conv1d(6, 5, 2, padding=1)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        h = torch.addmm(self.offset, self.norm(self.embed(x)).flatten(0, 1), self.turned).view(*x.shape, 6)
        h = self.twice(self.twice(h).relu())
        return self.head(self.conv(self.groups(h.mT)).relu().mean(dim=2)) / 50


def test_what_has_no_block_keeps_its_diagonal():
    model = trained(Mixed()).eval()
    inputs = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(0))
    likelihood = get_likelihood("categorical")
    found = compute_fisher(model, [(inputs, None)], likelihood, kfac="reduce")
    assert {block.layer: block.names for block in found.blocks} == {
        "turned": ("turned", "offset"),
        "conv": ("conv.weight", "conv.bias"),
        "head": ("head.weight", "head.bias"),
    }
    diagonal = compute_fisher(model, [(inputs, None)], likelihood).values
    in_blocks = {name for block in found.blocks for name in block.names}
    assert set(found.values) == set(diagonal) - in_blocks
    for name, values in found.values.items():
        torch.testing.assert_close(values, diagonal[name])
    (turned,) = [block for block in found.blocks if block.layer == "turned"]
    assert turned.transposed
    assert (turned.input.size, turned.output.size) == (5, 6)
    # Samples see each other nowhere: any batches give the same.
    again = compute_fisher(model, [(inputs[:3], None), (inputs[3:], None)], likelihood, kfac="reduce")
    for block, other in zip(found.blocks, again.blocks, strict=True):
        torch.testing.assert_close(block.output.matrix(), other.output.matrix())
        torch.testing.assert_close(block.input.matrix(), other.input.matrix())


@settings(max_examples=40, deadline=None)
@given(
    inputs=st.integers(1, 6),
    outputs=st.integers(1, 6),
    ranks=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    seed=st.integers(0, 99),
)
def test_a_block_is_the_kronecker_product_of_its_factors(inputs, outputs, ranks, seed):
    """Full or truncated, times and spectral are what the matrix of all weights does."""
    a, g = psd(inputs, seed), psd(outputs, seed + 1)
    a, g = (f if not rank else f.truncated(rank) for f, rank in zip((a, g), ranks, strict=True))
    block = Block("w", None, False, a, g)
    matrix = whole(block)
    torch.testing.assert_close(sum(torch.kron(g.matrix(), a.matrix()) for a, g in block.terms()), matrix)
    d = torch.randn(outputs, inputs, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(block.times(d).flatten(), matrix @ d.flatten())
    torch.testing.assert_close(block.spectral(d, lambda value: value), block.times(d))
    solved = torch.linalg.solve(torch.eye(len(matrix), dtype=torch.float64) + 0.3 * matrix, d.flatten())
    torch.testing.assert_close(block.spectral(d, lambda value: 1 / (1 + 0.3 * value)).flatten(), solved)
    torch.testing.assert_close(block.diagonal().flatten(), matrix.diagonal())
    assert block.trace == pytest.approx(matrix.trace().item())
    largest = torch.linalg.eigvalsh(matrix).max().item()
    assert block.largest() == pytest.approx(largest, rel=0.1)


@pytest.mark.parametrize("outputs", [2, 3, 10])
def test_the_largest_eigenvalue_of_a_softmax(outputs):
    """Of a factor of which the mean of all directions is nothing."""
    p = torch.full((outputs,), 1 / outputs, dtype=torch.float64)
    factor = DenseFactor(torch.diag(p) - torch.outer(p, p))
    assert factor.largest() == pytest.approx(1 / outputs, rel=0.01)
    assert factor.truncated(1).largest() == pytest.approx(1 / outputs)
    assert DenseFactor(torch.zeros(3, 3)).largest() == 0


def test_truncation_keeps_the_trace():
    factor = psd(12, 0)
    for rank in (1, 5, 11, 0.5, 0.7):
        cut = factor.truncated(rank)
        assert isinstance(cut, EighDecomposed)
        assert cut.trace == pytest.approx(factor.trace)
        if rank < 1:
            held = cut.eigenvalues.sum() / factor.trace
            assert held >= rank
            assert held - cut.eigenvalues[-1] / factor.trace < rank
    assert factor.truncated(12) is factor
    # As many eigenvectors as it has rows, or half of them, are no smaller than itself.
    assert factor.truncated(0.99) is factor


@pytest.mark.parametrize("rank", [0.5, 0.9, 40])
@pytest.mark.parametrize("decay", [0.5, 2.0])
def test_truncation_of_large_factors(monkeypatch, decay, rank):
    """By subspace iteration: orthonormal, of the share it says, and hardly more eigenvectors than there must be."""
    monkeypatch.setattr("ewc_finetune.curvature.kronecker_factors.EXACT_EIGEN", 100)
    monkeypatch.setattr("ewc_finetune.curvature.kronecker_factors._FIRST", 10)
    size = 300
    vectors = torch.linalg.qr(psd(size, 0).matrix()).Q
    values = torch.arange(1, size + 1).double() ** -decay
    factor = DenseFactor((vectors * values) @ vectors.T)
    share = values.cumsum(0) / values.sum()
    needed = int((share < rank).sum()) + 1 if rank < 1 else rank
    cut = factor.truncated(rank)
    if needed > 0.45 * size:
        assert cut is factor
        return
    kept = len(cut.eigenvalues)
    assert needed <= kept <= 1.05 * needed + 1
    assert cut.trace == pytest.approx(factor.trace)
    torch.testing.assert_close(cut.vectors.T @ cut.vectors, torch.eye(kept, dtype=torch.float64))
    held = (cut.vectors.T @ factor.matrix() @ cut.vectors).trace()
    assert held.item() == pytest.approx(cut.eigenvalues.sum().item())
    assert held / factor.trace >= 0.9 * share[kept - 1]
    if rank < 1:
        assert held / factor.trace >= rank


def quadratic(model, anchors, lambdas):
    """Sum over anchors and blocks of lambda/2 d^T F d, differentiable."""
    named, total = dict(model.named_parameters()), 0.0
    for anchor, lam in zip(anchors, lambdas, strict=True):
        for block in anchor.blocks.values():
            parts = [named[name] - anchor.weights[name] for name in block.names]
            d = block.join(parts[0], parts[1] if len(parts) > 1 else None).flatten().double()
            total = total + lam / 2 * d @ whole(block) @ d
    return total


@pytest.mark.parametrize("truncate", [None, 2])
@pytest.mark.parametrize("build", [dense, convolutional])
def test_value_and_gradient_of_a_stack(build, truncate):
    model = trained(build(), torch.float32)
    anchors = [make_anchor(model, 0, truncate=truncate), make_anchor(model, 1, "reduce")]
    penalty = Penalty(model, anchors, [3.0, 0.5])
    expected = quadratic(model, anchors, [3.0, 0.5])
    assert penalty.value() == pytest.approx(expected.item(), rel=1e-4)
    assert penalty.free == ()
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    penalty.add_gradient(2.0)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, 2 * gradient.float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("truncate", [None, 2])
def test_the_proximal_step_is_the_implicit_one(truncate):
    """theta' = theta - lr dP/dtheta'."""
    model = trained(dense(), torch.float32)
    anchor = make_anchor(model, 0, truncate=truncate)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Penalty(model, anchor, 50.0, "proximal").proximal_step(0.7)
    gradients = torch.autograd.grad(quadratic(model, [anchor], [50.0]), list(model.parameters()))
    for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(p.detach() + 0.7 * gradient.float(), before[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("truncate", [None, 2])
@pytest.mark.parametrize("lr", [1e-3, 0.7, 100.0])
def test_the_implicit_step_of_several_anchors_is_that_of_their_sum(lr, truncate):
    """In any order."""
    anchors = [make_anchor(trained(dense(), torch.float32), seed, truncate=truncate) for seed in range(3)]
    moved = []
    for order in ((0, 1, 2), (2, 0, 1)):
        model = trained(dense(), torch.float32)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        held = [anchors[k] for k in order]
        Penalty(model, held, 20.0, "proximal").proximal_step(lr)
        moved.append([p.detach().clone() for p in model.parameters()])
        for layer, first in held[0].blocks.items():
            own = [anchor.blocks[layer] for anchor in held]
            matrix = 20 * lr * sum(whole(block) for block in own)
            names = first.names
            start, end = (
                first.join(*(values[name] for name in names), *[None][: 2 - len(names)]).flatten().double()
                for values in (before, {name: p.detach() for name, p in model.named_parameters()})
            )
            pull = 0.0
            for anchor, block in zip(held, own, strict=True):
                centre = block.join(*(anchor.weights[name] for name in names), *[None][: 2 - len(names)])
                pull = pull + 20 * lr * whole(block) @ (start - centre.flatten().double())
            exact = torch.linalg.solve(torch.eye(len(matrix), dtype=torch.float64) + matrix, pull)
            off = torch.linalg.vector_norm(start - end - exact)
            assert off <= 0.01 * torch.linalg.vector_norm(exact)
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("lam", [1e4, 1e6, 1e8, 1e12, 1e30])
def test_the_implicit_step_of_several_anchors_is_stable_at_any_lambda(lam):
    """Where few samples leave most directions to rounding, and its negative eigenvalues."""
    model = trained(dense(), torch.float32)
    anchors = []
    for seed in range(2):
        found = make_anchor(model, seed)
        blocks = {n: replace(b, input=DenseFactor(b.input.matrix().float())) for n, b in found.blocks.items()}
        anchors.append(replace(found, blocks=blocks))
    penalty = Penalty(model, anchors, lam, "proximal")
    generator = torch.Generator().manual_seed(0)
    before = penalty.value()
    for _ in range(20):
        penalty.proximal_step(0.1)
        assert penalty.value() <= before * (1 + 1e-3)
        before = penalty.value()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1e-4 * torch.randn(p.shape, generator=generator))
        before = max(before, penalty.value())
    assert max(p.abs().max().item() for p in model.parameters()) < 100


def test_many_implicit_steps_reach_the_least_of_the_sum():
    """At a lambda at which the last one of a sequence of steps would have it all."""
    model = trained(dense(), torch.float32)
    anchors = [make_anchor(model, seed) for seed in range(2)]
    penalty = Penalty(model, anchors, 1e6, "proximal")
    for _ in range(20):
        penalty.proximal_step(0.1)
    least = sum(ewc.merge(anchors, kfac_rank="full").provenance.constant.values())
    assert Penalty(model, anchors, 1.0).value() == pytest.approx(least, rel=1e-3)


def test_overshooting_counts_the_blocks():
    model = trained(dense(), torch.float32)
    anchor = make_anchor(model, 0)
    name, largest = Penalty(model, anchor, 4.0).largest_curvature()
    tops = {
        b.weight: 4 * torch.linalg.eigvalsh(torch.kron(b.output.matrix(), b.input.matrix())).max().item()
        for b in anchor.blocks.values()
    }
    assert name == max(tops, key=tops.get)
    assert largest == pytest.approx(tops[name], rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", ["gradient", "proximal"])
def test_weights_of_other_widths(dtype, form):
    """The pull is computed in float32 or wider, whatever the weights are."""
    model = trained(dense(), dtype)
    anchor = make_anchor(trained(dense(), torch.float32), 0)
    anchor = replace(anchor, weights={name: w.to(dtype) for name, w in anchor.weights.items()})
    penalty = Penalty(model, anchor, 3.0, form)
    named = {name: p.detach().double() for name, p in model.named_parameters()}
    exact = 0.0
    for block in anchor.blocks.values():
        parts = [named[name] - anchor.weights[name].double() for name in block.names]
        d = block.join(parts[0], parts[1] if len(parts) > 1 else None)
        exact += 1.5 * (d * (block.output.matrix().double() @ d @ block.input.matrix().double())).sum().item()
    assert penalty.value() == pytest.approx(exact, rel=1e-5)
    if dtype == torch.bfloat16:
        model.float()  # as fine-tuning does
    before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
    if form == "gradient":
        penalty.add_gradient()
    else:
        penalty.proximal_step(0.1)
    here = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    total = 0.0
    for block in anchor.blocks.values():
        parts = [here[name] - anchor.weights[name].double() for name in block.names]
        d = block.join(parts[0], parts[1] if len(parts) > 1 else None)
        total = total + 1.5 * (d * (block.output.matrix().double() @ d @ block.input.matrix().double())).sum()
    gradients = torch.autograd.grad(total, list(here.values()))
    near = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
        found = p.grad.double() if form == "gradient" else (before[name] - p.detach().double()) / 0.1
        torch.testing.assert_close(found, gradient, **near)


def test_weight_and_bias_that_are_not_trained_alike():
    """The gradient form gives each what is its own; the proximal form moves them together or not at all."""
    model = trained(nn.Sequential(nn.Linear(6, 5)), torch.float32)
    anchor = make_anchor(model, 0)
    weight, bias = model.parameters()
    expected = torch.autograd.grad(quadratic(model, [anchor], [3.0]), [weight, bias])
    optimizers = [torch.optim.SGD([p], lr=0.0) for p in (weight, bias)]
    penalty = Penalty(model, anchor, 3.0)
    for optimizer in optimizers:
        penalty.attach(optimizer)
    model(torch.ones(2, 6)).sum().backward()
    own = weight.grad.clone(), bias.grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    for p, before, gradient in zip((weight, bias), own, expected, strict=True):
        torch.testing.assert_close(p.grad, before + gradient.float(), rtol=1e-4, atol=1e-5)
    moving = Penalty(model, anchor, 3.0, "proximal")
    for groups in ([{"params": [weight]}, {"params": [bias], "lr": 0.5}], [{"params": [bias]}]):
        with pytest.raises(UsageError, match="moves weight and bias of 0 together"):
            moving.attach(torch.optim.SGD(groups, lr=0.1))
    moving.attach(torch.optim.SGD([{"params": [weight], "weight_decay": 0.1}, {"params": [bias]}], lr=0.1))
    weight.requires_grad_(False)
    assert penalty.largest_curvature()[1] > 0
    with pytest.raises(UsageError, match="moves weight and bias of 0 together"):
        Penalty(model, anchor, 3.0, "proximal")
    bias.requires_grad_(False)
    before = weight.clone()
    Penalty(model, anchor, 3.0, "proximal").proximal_step(0.1)
    assert torch.equal(weight, before)


def test_a_bias_that_a_rule_gets_wrong_is_seen(monkeypatch):
    """The bias of a block is compared with autograd as its weight is; then there is no block for that layer."""
    model, inputs = case("dense")
    add = BlockSums.add

    def wrong(self, gradient):
        add(self, gradient)
        if self.layer.bias == "0.bias" and self._checked is not None:
            self.norms[1] *= 3

    monkeypatch.setattr(BlockSums, "add", wrong)
    with pytest.raises(ArchitectureError, match=r"0.weight: the model does something else with these weights"):
        compute_fisher(model, [(inputs, None)], get_likelihood("categorical"), kfac="expand")


def test_huge_lambdas_hold_still():
    """The proximal form is stable at any lambda that float32 has."""
    model = trained(dense(), torch.float32)
    anchor = make_anchor(model, 0)
    Penalty(model, anchor, 1e36, "proximal").proximal_step(0.1)
    expected = Penalty(model, anchor, 1.0)
    assert expected.value() < 1e-9
    with pytest.raises(NonFiniteError, match="times the block of"):
        Penalty(model, anchor, 1e38 * 3)


def test_a_lambda_beyond_the_numbers_of_a_block():
    model = trained(dense(), torch.float32)
    with pytest.raises(NonFiniteError, match="times the block of"):
        Penalty(model, make_anchor(model, 0), 1e39)


def test_blocks_are_enough_where_the_diagonal_is_zero(tmp_path):
    model = trained(nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), torch.float32)
    blocks = {"0": Block("0.weight", "0.bias", False, DenseFactor(torch.eye(7)), DenseFactor(torch.eye(5)))}
    weights = {name: p.detach() + 1 for name, p in model.named_parameters()}
    zero = {name: torch.zeros(5) for name in ("1.weight", "1.bias")}
    path = Anchor(weights, zero, {}, Provenance("a", curvature="kfac"), blocks=blocks).save(tmp_path / "a.st").path
    assert Penalty(model, path, 1.0).value() == pytest.approx(35 / 2)


def test_mixed_stacks():
    """A diagonal anchor and one with blocks pull together."""
    model = trained(dense(), torch.float32)
    blocks = make_anchor(model, 0)
    fisher = {name: torch.rand_like(p) for name, p in model.named_parameters()}
    diagonal = Anchor(blocks.weights, {n: f.detach() for n, f in fisher.items()}, {}, Provenance("d"))
    both, one, other = (
        Penalty(model, anchors, lambdas)
        for anchors, lambdas in (([diagonal, blocks], [2.0, 3.0]), (diagonal, 2.0), (blocks, 3.0))
    )
    assert both.value() == pytest.approx(one.value() + other.value(), rel=1e-5)


def test_attached_to_an_optimizer():
    """Both forms follow the optimizer's step, with its learning rate."""
    for form in ("gradient", "proximal"):
        model, twin = trained(dense(), torch.float32), trained(dense(), torch.float32)
        anchor = make_anchor(model, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Penalty(model, anchor, 5.0, form).attach(optimizer)
        by_hand = Penalty(twin, anchor, 5.0, form)
        for module, steps in ((model, optimizer), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))):
            module(torch.ones(2, 6)).sum().backward()
            if module is twin and form == "gradient":
                by_hand.add_gradient()
            steps.step()
        if form == "proximal":
            by_hand.proximal_step(0.1)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("truncate", [None, 0.9])
def test_saved_and_loaded(tmp_path, truncate):
    model = trained(convolutional(), torch.float32)
    anchor = make_anchor(model, 0, truncate=truncate)
    saved = anchor.save(tmp_path / "a.safetensors")
    for read in (Anchor.load(saved.path), Anchor.open(saved.path)):
        assert read.provenance == saved.provenance
        for layer, block in anchor.blocks.items():
            other = read.blocks[layer]
            assert type(other.input) is type(block.input)
            assert (other.names, other.transposed) == (block.names, block.transposed)
            torch.testing.assert_close(other.input.matrix(), block.input.matrix())
            torch.testing.assert_close(other.output.matrix(), block.output.matrix())
        penalty, expected = (Penalty(model, a, 1.0) for a in (read, anchor))
        assert penalty.value() == pytest.approx(expected.value(), rel=1e-6)
        for name in ("0.weight", "0.bias"):
            assert set(read.without([name]).blocks) == set(anchor.blocks) - {"0"}
    assert saved.path.read_bytes() == anchor.save(tmp_path / "b.safetensors").path.read_bytes()


@pytest.mark.parametrize("form", ["gradient", "proximal"])
def test_eigenvectors_in_half_precision(tmp_path, form):
    """They take half the bytes, and pull as the exact ones to three digits; what is saved is what was returned."""
    model = trained(nn.Sequential(nn.Linear(40, 30)), torch.float32)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 40, generator=generator) @ torch.randn(40, 40, generator=generator).tril(-30).add(
        0.01 * torch.eye(40)
    )
    data = torch.utils.data.TensorDataset(inputs, torch.arange(200) % 30)
    anchors = {
        dtype: ewc.consolidate(
            model, data, curvature="kfac", kfac_rank=10, kfac_dtype=dtype, output=tmp_path / f"{dtype}.safetensors"
        )
        for dtype in ("float16", "float32")
    }
    half = anchors["float16"].blocks["0"]
    assert half.input.vectors.dtype == Anchor.load(anchors["float16"].path).blocks["0"].input.vectors.dtype
    assert half.input.vectors.dtype == torch.float16
    torch.testing.assert_close(half.diagonal(), anchors["float32"].blocks["0"].diagonal(), rtol=2e-3, atol=1e-6)
    sizes = [ewc.inspect(anchor.path).blocks["0"].input.bytes for anchor in anchors.values()]
    assert sizes == [41 * 10 * 2 + 11 * 4, 41 * 10 * 4 + 11 * 4]
    pulled = []
    for anchor in (*anchors.values(), anchors["float16"].path):
        twin = trained(nn.Sequential(nn.Linear(40, 30)), torch.float32, seed=1)
        penalty = Penalty(twin, anchor, 3.0, form)
        if form == "gradient":
            penalty.add_gradient()
            pulled.append(twin[0].weight.grad)
        else:
            penalty.proximal_step(0.5)
            pulled.append(twin[0].weight.detach())
    torch.testing.assert_close(pulled[0], pulled[1], rtol=1e-2, atol=2e-3 * pulled[1].abs().max().item())
    torch.testing.assert_close(pulled[0], pulled[2], rtol=1e-6, atol=1e-7)


def test_inspect_says_what_blocks_take_and_save(tmp_path):
    model = trained(nn.Sequential(nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)), torch.float32)
    data = torch.utils.data.TensorDataset(torch.randn(50, 20), torch.arange(50) % 3)
    ewc.consolidate(model, data, curvature="kfac", kfac_rank=2, output=tmp_path / "a.safetensors")
    found = ewc.inspect(tmp_path / "a.safetensors")
    a, g = found.blocks["0"].input, found.blocks["0"].output
    assert (a.rows, a.kept, a.bytes) == (21, 2, 21 * 2 * 2 + 3 * 4)
    assert 0 < a.share < 1
    # Along two eigenvectors of the inputs, back, and within two of the outputs; and at least one of these beside them.
    along = 2 * 2 * 21 * 6 + 2 * 2 * 6 * 2
    assert found.blocks["0"].products in [along + 2 * 6 * n * (21 + 2) for n in (1, 2)]
    assert (g.rows, g.kept, g.bytes) == (6, 2, 6 * 2 * 2 + 3 * 4)
    assert found.in_blocks == 20 * 6 + 6 + 18
    text = dict(found.facts)
    assert text["holds"] == "144 of 144 weights, 0 of them singly"
    # Twice (6, 3) beside the two of the first layer.
    taken = 96 + 36 + (6 * 2 * 2 + 12) + (3 * 2 * 2 + 12)
    whole = 2 * (21 * 22 + 6 * 7 + 6 * 7 + 3 * 4)
    assert (
        f"{taken} bytes, {taken / (4 * 144):.2f} of their diagonal's, {taken / whole:.2f} of whole" in text["in blocks"]
    )


@pytest.mark.parametrize(
    ("factor", "error", "message"),
    [
        (DenseFactor(torch.tensor([[1.0, 0.0], [0.5, 1.0]])), AnchorError, "input factor of 0 is not symmetric"),
        (
            DenseFactor(torch.tensor([[1.0, 2.0], [2.0, 1.0]])),
            AnchorError,
            "input factor of 0 has negative eigenvalues",
        ),
        (DenseFactor(torch.full((2, 2), float("nan"))), NonFiniteError, "input factor of 0 holds NaN"),
        (
            DenseFactor(torch.tensor([[0.0, 1.0], [1.0, 0.0]])),
            AnchorError,
            "input factor of 0 has negative eigenvalues",
        ),
        (EighDecomposed(torch.eye(2), torch.tensor([1.0, -1.0]), 0.0), AnchorError, "negative eigenvalues"),
        (EighDecomposed(torch.eye(2), torch.tensor([1.0, 2.0]), 0.0), AnchorError, "do not fall"),
        (EighDecomposed(torch.ones(2, 1), torch.tensor([1.0]), 0.0), AnchorError, "not orthonormal"),
        (DenseFactor(torch.eye(3)), AnchorError, "factors of 0 have 3 and 2 rows; with weights of shape"),
    ],
)
def test_factors_that_are_none(tmp_path, factor, error, message):
    block = Block("0.weight", None, False, factor, DenseFactor(torch.eye(2)))
    anchor = Anchor({"0.weight": torch.eye(2)}, {}, {}, Provenance("a", curvature="kfac"), blocks={"0": block})
    with pytest.raises(error, match=message):
        anchor.save(tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_records_of_blocks_that_do_not_fit(tmp_path):
    model = trained(dense(), torch.float32)
    path = make_anchor(model, 0).save(tmp_path / "a.safetensors").path

    def changed(name, change):
        return change_anchor(path, lambda record, tensors: change(record["kfac"], tensors), tmp_path / name)

    for bias in ("4.bias", "0.weight"):
        wrong = changed("b.safetensors", lambda records, _, bias=bias: records[0].update(bias=bias))
        with pytest.raises(AnchorError, match=f"kfac.0 is of 0.weight with {bias}, which is no bias of its outputs"):
            Anchor.open(wrong)
    lost = changed("c.safetensors", lambda records, _: records.pop(0))
    with pytest.raises(AnchorError, match=r"kfac.0.input belongs to no layer"):
        Anchor.open(lost)
    twice = changed("d.safetensors", lambda _, tensors: tensors.update({"kfac.0.input.values": torch.ones(3)}))
    with pytest.raises(AnchorError, match=r"kfac.0.input.values belongs to no layer"):
        Anchor.open(twice)
    empty = changed("e.safetensors", lambda _, t: t.update({k: 0 * v for k, v in t.items() if k.startswith("kfac")}))
    with pytest.raises(AnchorError, match="the Fisher is zero everywhere"):
        Penalty(model, empty, 1.0)


def test_the_largest_layers_keep_their_diagonal(monkeypatch):
    """The 1 of a bias does not count."""
    monkeypatch.setattr("ewc_finetune.curvature.fisher.LARGEST", 6)
    model, inputs = case("dense")
    found = compute_fisher(model, [(inputs, None)], get_likelihood("categorical"), kfac="expand")
    assert [block.layer for block in found.blocks] == ["0"]


def test_what_kfac_cannot_do():
    model, inputs = case("dense")
    likelihood = get_likelihood("categorical")
    with pytest.raises(UsageError, match="not with batched"):
        compute_fisher(model, [(inputs, torch.zeros(12).long())], likelihood, "batched", kfac="expand")
    with pytest.raises(UsageError, match="nor without rules"):
        compute_fisher(model, [(inputs, None)], likelihood, kfac="expand", rules=False)
    with pytest.raises(UsageError, match="kfac is 'expnad'. Did you mean 'expand'"):
        compute_fisher(model, [(inputs, None)], likelihood, kfac="expnad")
    scale = nn.Sequential(nn.LayerNorm(6)).double()
    with pytest.raises(ArchitectureError, match="there is no layer for K-FAC"):
        compute_fisher(scale, [(inputs, None)], likelihood, kfac="expand")


def test_blocks_that_do_not_fit_the_model():
    model = trained(dense(), torch.float32)
    anchor = make_anchor(model, 0)
    with pytest.raises(AnchorMismatchError, match=r"holds 0.weight \(5, 6\), which the model does not have"):
        Penalty(nn.Linear(6, 5), anchor, 1.0)
    other = dense()
    other[4] = nn.Linear(7, 9)
    with pytest.raises(AnchorMismatchError, match=r"4.weight has shape \(4, 7\) in the anchor and \(9, 7\)"):
        Penalty(other, anchor, 1.0)


def test_latest_moves_the_centre_of_a_block(tmp_path):
    """Of an expanded head too, of which the older block knows the first outputs."""
    short, long = (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, n)) for n in (3, 4))
    older = make_anchor(trained(short, torch.float32), 0).save(tmp_path / "a.safetensors")
    known = [{"name": "a", "sha256": older.digest, "lambda": 1.0}]
    newer = make_anchor(trained(long, torch.float32), 1)
    newer = replace(newer, provenance=replace(newer.provenance, lineage=known)).save(tmp_path / "b.safetensors")
    model = trained(long, torch.float32, seed=3)
    grown = ["2.weight", "2.bias"]
    penalty = Penalty(model, [older.path, newer.path], [2.0, 3.0], lineage="latest", growing=grown)
    expected = 0.0
    for anchor, lam in ((older, 2.0), (newer, 3.0)):
        for block in anchor.blocks.values():
            d = block.join(*(dict(model.named_parameters())[n].detach() - newer.weights[n] for n in block.names))
            d = d[: block.output.size].double()
            pull = block.output.matrix().double() @ d @ block.input.matrix().double()
            expected += lam / 2 * (d * pull).sum().item()
    assert penalty.value() == pytest.approx(expected, rel=1e-4)
    before = penalty.value()
    for _ in range(5):
        penalty.proximal_step(10.0)
    assert penalty.value() < 1e-2 * before  # all pull to the newest weights
    with pytest.raises(AnchorMismatchError, match=r"2.weight has shape \(3, 5\) in the anchor and \(4, 5\)"):
        Penalty(model, [older, newer], 1.0)


def test_from_checkpoint_to_checkpoint(tmp_path):
    """consolidate and finetune with blocks, through files; they hold what the diagonal lets go."""
    architecture = "mlp?in_features=8&hidden=16&num_classes=3&batch_norm=false"

    def data(shift):
        generator = torch.Generator().manual_seed(shift)
        labels = torch.arange(300) % 3
        inputs = torch.randn(300, 8, generator=generator) * 0.5 + 3 * nn.functional.one_hot(labels, 8)
        return torch.utils.data.TensorDataset(inputs.roll(4 * shift, 1), labels.roll(shift))

    ewc.finetune(architecture, data(0), epochs=20, lr=0.01, output=tmp_path / "m.pt", eval_on=[])
    anchor = ewc.consolidate(tmp_path / "m.pt", data(0), curvature="kfac", output=tmp_path / "a.safetensors")
    assert anchor.provenance.curvature == "kfac"
    assert anchor.fisher == {}
    options = {"epochs": 20, "lr": 0.01, "eval_on": {"old": data(0), "new": data(1)}}
    plain = ewc.finetune(tmp_path / "m.pt", data(1), **options)
    held = ewc.finetune(None, data(1), anchors=tmp_path / "a.safetensors", lambdas=10.0, **options)
    assert held.after[0].accuracy > plain.after[0].accuracy + 0.1
