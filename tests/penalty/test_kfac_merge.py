"""Merged K-FAC anchors: what stands in for a sum of blocks, and where its centre is, against dense float64 algebra."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.domains import blobs
from support.kronecker import dense, make_anchor, psd, whole
from support.models import Small, trained
from support.notes import Notes
from torch import nn

import ewc_finetune as ewc
from ewc_finetune import Anchor, Penalty
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.curvature.kronecker_factors import DenseFactor
from ewc_finetune.errors import AnchorMismatchError, NonFiniteError, UsageError
from ewc_finetune.penalty.kronecker_sum import centre_of, distance, sum_of
from ewc_finetune.penalty.merging import centred
from ewc_finetune.penalty.quadratic import sum_quadratics
from ewc_finetune.progress import Silent

several = st.builds(
    lambda inputs, outputs, seeds, rank: [
        Block("w", None, False, *(f.truncated(rank) if rank else f for f in (psd(inputs, s), psd(outputs, s + 50))))
        for s in seeds
    ],
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.integers(0, 40), min_size=2, max_size=4),
    st.integers(0, 2),
)


def gap(block, blocks):
    return torch.linalg.matrix_norm(whole(block) - sum(whole(b) for b in blocks)).item()


@settings(max_examples=40, deadline=None)
@given(blocks=several)
def test_sums_of_factors_are_the_partial_traces_of_the_sum(blocks):
    n, m = blocks[0].output.size, blocks[0].input.size
    total = sum(whole(b) for b in blocks).view(n, m, n, m)
    found = sum_of(blocks, "factors")
    over_outputs, over_inputs = total.diagonal(dim1=0, dim2=2).sum(-1), total.diagonal(dim1=1, dim2=3).sum(-1)
    assert found.trace == pytest.approx(sum(b.trace for b in blocks))
    torch.testing.assert_close(found.input.matrix() * found.output.trace, over_outputs)
    torch.testing.assert_close(found.output.matrix() * found.input.trace, over_inputs)
    norm = torch.linalg.matrix_norm(sum(whole(b) for b in blocks)).item()
    assert distance(found, blocks) == pytest.approx(gap(found, blocks) / norm, abs=1e-6)
    # In any grouping it is the same.
    if len(blocks) > 2:
        again = sum_of([sum_of(blocks[:2], "factors"), *blocks[2:]], "factors")
        torch.testing.assert_close(whole(again), whole(found))


@settings(max_examples=40, deadline=None)
@given(blocks=several)
def test_none_is_nearer_than_the_nearest(blocks):
    """By the singular values of the rearranged sum (Van Loan and Pitsianis)."""
    n, m = blocks[0].output.size, blocks[0].input.size
    found = sum_of(blocks, "nearest")
    rearranged = sum(whole(b) for b in blocks).view(n, m, n, m).permute(0, 2, 1, 3).reshape(n * n, m * m)
    least = torch.linalg.svdvals(rearranged)[1:].square().sum().sqrt().item()
    assert gap(found, blocks) == pytest.approx(least, rel=1e-3, abs=1e-6 * found.trace)
    assert gap(found, blocks) <= gap(sum_of(blocks, "factors"), blocks) * (1 + 1e-9) + 1e-12
    for factor in (found.input, found.output):
        assert torch.linalg.eigvalsh(factor.matrix()).min() >= -1e-9 * factor.trace


@pytest.mark.parametrize("how", ["nearest", "factors"])
def test_blocks_of_one_factor_have_an_exact_sum(how):
    one = Block("w", None, False, psd(4, 0), psd(3, 1))
    blocks = [one, replace(one, output=psd(3, 2)), replace(one, output=psd(3, 3).scaled(5.0))]
    torch.testing.assert_close(whole(sum_of(blocks, how)), sum(whole(b) for b in blocks))
    nothing = replace(one, output=DenseFactor(torch.zeros(3, 3, dtype=torch.float64)))
    torch.testing.assert_close(whole(sum_of([one, nothing], how)), whole(one))
    assert sum_of([nothing, nothing], how).trace == 0
    assert sum_of([one], how) is one


@settings(max_examples=40, deadline=None)
@given(blocks=several, seed=st.integers(0, 99))
def test_the_centre_is_the_least_squares_solution_nearest_to_the_newest(blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (blocks[0].output.size, blocks[0].input.size)
    centres = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in blocks]
    # No block holds these: a dead input.
    free = torch.eye(shape[1], dtype=torch.float64)
    free[0, 0] = 0
    blocks = [replace(b, input=DenseFactor(free @ b.input.matrix() @ free)) for b in blocks]
    found, constant, left = centre_of(list(zip(blocks, centres, strict=True)))
    total = sum(whole(b) for b in blocks)
    right = sum(whole(b) @ (c - centres[-1]).flatten() for b, c in zip(blocks, centres, strict=True))

    def height(x):
        return sum(0.5 * (x - c).flatten() @ whole(b) @ (x - c).flatten() for b, c in zip(blocks, centres, strict=True))

    exact = centres[-1] + (torch.linalg.pinv(total, hermitian=True) @ right).view(shape)
    assert height(found).item() == pytest.approx(height(exact).item(), rel=1e-4, abs=1e-9)
    assert constant == pytest.approx(height(found).item(), rel=1e-9, abs=1e-12)
    assert left < 1e-2
    torch.testing.assert_close(found[:, 0], centres[-1][:, 0])


@pytest.mark.parametrize("outputs", [3, 5])
def test_what_is_rounding_does_not_move_the_centre(outputs):
    """The common part of all logits, of which a softmax knows nothing, in the float32 of a file."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(3):
        p = torch.randn(200, outputs, generator=generator, dtype=torch.float64).mul_(3).softmax(1)
        g = (torch.diag(p.mean(0)) - p.T @ p / len(p)).float()
        block = Block("w", None, False, DenseFactor(psd(6, len(parts)).values.float()), DenseFactor(g))
        parts.append((block, torch.randn(outputs, 6, generator=generator)))
    found, *_ = centre_of(parts)
    torch.testing.assert_close(found.sum(0), parts[-1][1].sum(0).double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_the_centre_of_blocks_that_are_badly_conditioned(condition):
    """Factors with spectra over many orders of magnitude, each with eigenvectors of its own."""
    generator = torch.Generator().manual_seed(0)

    def factor(size):
        vectors = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator)).Q
        return DenseFactor(
            (vectors * torch.logspace(0, -torch.log10(torch.tensor(condition)), size).double()) @ vectors.T
        )

    blocks = [Block("w", None, False, factor(12), factor(8)) for _ in range(3)]
    centres = [torch.randn(8, 12, dtype=torch.float64, generator=generator) for _ in blocks]
    _, constant, _ = centre_of(list(zip(blocks, centres, strict=True)))
    total = sum(whole(b) for b in blocks)
    right = sum(whole(b) @ c.flatten() for b, c in zip(blocks, centres, strict=True))
    exact = torch.linalg.solve(total, right).view(8, 12)
    away = [(b, (exact - c).flatten()) for b, c in zip(blocks, centres, strict=True)]
    assert constant == pytest.approx(sum(0.5 * d @ whole(b) @ d for b, d in away).item(), rel=1e-3)


def test_a_domain_is_not_let_go_by_default():
    """Blocks that have nothing in common: the nearest product is the larger of them alone."""
    one, other = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0])), torch.diag(torch.tensor([0.0, 0.0, 0.9, 0.9]))
    blocks = [Block("w", None, False, DenseFactor(m), DenseFactor(m)) for m in (one, other)]
    nearest, factors = sum_of(blocks, "nearest"), sum_of(blocks, "factors")
    far, off = distance(nearest, blocks), distance(factors, blocks)
    assert nearest.diagonal()[2:, 2:].max() < 1e-6
    assert factors.diagonal()[2:, 2:].min() > 0.3
    assert 0.6 < far < off < 1


@pytest.mark.parametrize("how", ["nearest", "factors"])
@pytest.mark.parametrize("online", [False, True])
def test_a_merged_anchor_pulls_nearly_as_its_parents(tmp_path, online, how):
    """Exactly so where their blocks have a factor in common, a constant apart when the centre is the newest."""
    model = trained(dense(), torch.float32)
    first, second = make_anchor(model, 0), make_anchor(model, 1)
    blocks = {n: replace(b, output=second.blocks[n].output) for n, b in first.blocks.items()}
    second = replace(second, blocks=blocks)
    parents = [a.save(tmp_path / f"{n}.safetensors").path for n, a in enumerate((first, second))]
    merged = ewc.merge(
        parents, lambdas=[2.0, 3.0], online=online, kfac_sum=how, kfac_rank="full", output=tmp_path / "m.safetensors"
    )
    assert merged.provenance.curvature == "kfac"
    assert {layer["layer"] for layer in merged.provenance.importance} == {"0", "2", "4"}
    anchors = [replace(first, weights=second.weights), second] if online else [first, second]
    expected = Penalty(model, anchors, [4.0, 6.0])
    found = Penalty(model, Anchor.load(tmp_path / "m.safetensors"), 2.0)
    assert found.value() == pytest.approx(expected.value(), rel=1e-4)
    gradients = []
    for penalty in (found, expected):
        penalty.add_gradient()
        gradients.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4 * other.abs().max().item())
    # Merged once more, alone, it is the same, constant included.
    again = ewc.merge([tmp_path / "m.safetensors"], kfac_rank="full")
    assert Penalty(model, again, 2.0).value() == pytest.approx(found.value(), rel=1e-5)


def test_the_running_form_fades_and_keeps_the_newest_weights():
    model = trained(dense(), torch.float32)
    first, second = make_anchor(model, 0), make_anchor(model, 1)
    merged = ewc.merge([first, second], lambdas=[2.0, 3.0], online=True, gamma=0.0, kfac_rank="full")
    for name, block in second.blocks.items():
        torch.testing.assert_close(merged.blocks[name].output.matrix(), 3 * block.output.matrix())
    for name, weight in second.weights.items():
        assert torch.equal(merged.weights[name], weight)
    faded = ewc.merge([first, second], online=True, gamma=0.5, kfac_sum="factors")
    traces = [sum(b.trace for b in a.blocks.values()) for a in (first, second, faded)]
    assert traces[2] == pytest.approx(0.5 * traces[0] + traces[1], rel=1e-5)


def test_the_distance_is_that_of_what_is_stored():
    model = trained(dense(), torch.float32)
    anchors = [make_anchor(model, 0), make_anchor(model, 1)]
    for rank in ("full", 1):
        merged = ewc.merge(anchors, kfac_rank=rank)
        for layer, off in merged.provenance.merged["kfac_distance"].items():
            blocks = [anchor.blocks[layer] for anchor in anchors]
            norm = torch.linalg.matrix_norm(sum(whole(b) for b in blocks)).item()
            assert off == pytest.approx(gap(merged.blocks[layer], blocks) / norm, rel=1e-3)


def test_the_centre_as_a_model():
    """A checkpoint at the centre: where both anchors together pull least."""
    model = trained(dense(), torch.float32)
    anchors = [make_anchor(model, 0), make_anchor(model, 1)]
    merged = ewc.merge(anchors)
    values = []
    for weights in (merged.weights, anchors[0].weights, anchors[1].weights):
        model.load_state_dict(dict(weights))
        values.append(Penalty(model, anchors, 1.0).value())
    assert values[0] < 0.9 * min(values[1:])
    assert values[0] == pytest.approx(sum(merged.provenance.constant.values()), rel=1e-3)


def test_one_centre_for_the_blocks_of_a_layer():
    """The quadratic stays the same everywhere, and no block is made; a layer may have grown in between."""

    def value(quadratic, weights):
        total = sum(quadratic.constant.values())
        for block, centre in quadratic.blocks:
            away = block.join(weights[block.weight], weights[block.bias]).double()[: len(centre)] - centre.double()
            total += 0.5 * (away * block.to(away).times(away)).sum().item()
        return total

    short, long = (trained(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, n)), torch.float32) for n in (3, 4))
    anchors = [make_anchor(short, 0), make_anchor(long, 1)]
    summed = sum_quadratics(anchors, [2.0, 1.0], growing=["2.weight", "2.bias"])
    found = centred(summed, anchors, Silent())
    assert [block for block, _ in found.blocks] == [summed.blocks[n][0] for n in (0, 2, 1, 3)]
    assert not summed.centre
    for weights in (found.centre, anchors[1].weights, {n: torch.randn_like(w) for n, w in found.centre.items()}):
        assert value(found, weights) == pytest.approx(value(summed, weights), rel=1e-3)
    assert value(found, found.centre) == pytest.approx(sum(found.constant.values()), rel=1e-3)


def test_heads_that_were_expanded():
    short, long = (trained(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, n)), torch.float32) for n in (3, 4))
    older, newer = make_anchor(short, 0), make_anchor(long, 1)
    for online in (False, True):
        with pytest.raises(AnchorMismatchError, match="--head expand"):
            ewc.merge([older, newer], online=online)
        merged = ewc.merge([older, newer], head="expand", online=online, kfac_sum="factors", kfac_rank="full")
        assert merged.blocks["2"].output.size == 4
        assert merged.weights["2.weight"].shape == (4, 5)
        assert merged.blocks["2"].trace == pytest.approx(older.blocks["2"].trace + newer.blocks["2"].trace, rel=1e-5)
        if not online:
            # The new output is the newer anchor's alone.
            model = trained(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), torch.float32)
            model.load_state_dict(dict(merged.weights))
            together = Penalty(model, [older, newer], 1.0, growing=["2.weight", "2.bias"])
            assert together.value() == pytest.approx(sum(merged.provenance.constant.values()), rel=1e-4)


def test_a_head_that_was_replaced_by_a_smaller_one():
    """The older anchor's last layer is left out, and the newest one's is what is merged."""
    older, newer = (
        make_anchor(trained(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, n)), torch.float32), n)
        for n in (4, 3)
    )
    head = {"id": "new", "parameters": ["2.weight", "2.bias"]}
    newer = replace(newer, provenance=replace(newer.provenance, head=head))
    for online in (False, True):
        merged = ewc.merge([older, newer], online=online)
        assert merged.weights["2.weight"].shape == (3, 5)
        assert merged.blocks["2"].trace == pytest.approx(newer.blocks["2"].trace)


def transposed(seed):
    """An anchor of a weight of shape (inputs, outputs), in half precision, with a bias."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"w": torch.randn(4, 3, generator=generator).half(), "b": torch.randn(3, generator=generator).half()}
    block = Block("w", "b", True, psd(5, seed), psd(3, seed + 1)).stored("full")
    return Anchor(weights, {}, {}, ewc.Provenance(f"t{seed}", curvature="kfac"), blocks={"w": block})


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))


def test_transposed_weights_in_half_precision():
    anchors = [transposed(0), transposed(10)]
    model = Turned()
    for merged, expected in (
        (ewc.merge(anchors, kfac_rank="full"), anchors),
        (ewc.merge(anchors, online=True, kfac_rank="full"), [replace(a, weights=anchors[1].weights) for a in anchors]),
    ):
        model.load_state_dict({name: weight.float() for name, weight in merged.weights.items()})
        here = Penalty(model, expected, 1.0).value()
        assert here == pytest.approx(sum(merged.provenance.constant.values()), rel=1e-3, abs=1e-6)
        assert merged.blocks["w"].trace == pytest.approx(sum(a.blocks["w"].trace for a in anchors), rel=1e-5)
    assert ewc.merge(anchors, online=True).weights["w"].dtype == torch.float16
    grown = replace(anchors[1], weights={"w": torch.zeros(5, 3), "b": torch.zeros(3)})
    grown = replace(grown, blocks={"w": Block("w", "b", True, psd(6, 0), psd(3, 1))})
    with pytest.raises(AnchorMismatchError, match="have no sum"):
        ewc.merge([anchors[0], grown], head="expand")


def test_what_cannot_be_merged():
    model = trained(dense(), torch.float32)
    blocks = make_anchor(model, 0)
    diagonal = Anchor(blocks.weights, {n: torch.ones_like(w) for n, w in blocks.weights.items()}, {}, blocks.provenance)
    with pytest.raises(AnchorMismatchError, match="0.weight, 0.bias is held by a K-FAC block in one anchor and by a d"):
        ewc.merge([blocks, diagonal])
    alone = {n: replace(b, bias=None, input=DenseFactor(b.input.matrix()[:-1, :-1])) for n, b in blocks.blocks.items()}
    with pytest.raises(AnchorMismatchError, match="the blocks of 0 are of 0.weight, 0.bias with 7 inputs in one"):
        ewc.merge([blocks, replace(blocks, blocks={**alone, "2": blocks.blocks["2"]})])
    with pytest.raises(NonFiniteError, match="times the block of"):
        ewc.merge([blocks, blocks], lambdas=[1e308, 1e308])
    with pytest.raises(UsageError, match="kfac sum is 'best'"):
        ewc.merge([blocks], kfac_sum="best")
    with pytest.raises(UsageError, match=r"kfac rank is 1.0; for all of the trace say full"):
        ewc.merge([blocks], kfac_rank=1.0)
    for rank in (1.5, float("inf"), float("nan"), 0, None, "half"):
        with pytest.raises(UsageError, match=f"kfac rank is {rank!r}; expected auto"):
            ewc.merge([blocks], kfac_rank=rank)
    with pytest.raises(UsageError, match="no anchor has K-FAC blocks, which kfac sum"):
        ewc.merge([diagonal], kfac_rank=3)


def test_a_centre_that_is_not_quite_found_is_said(tmp_path, monkeypatch):
    files = [
        ewc.consolidate(trained(Small(), torch.float32, n), blobs(seed=n), curvature="kfac", kfac_rank="full").save(
            tmp_path / f"{n}.safetensors"
        )
        for n in range(3)
    ]
    notes = Notes()
    ewc.merge(files, progress=notes)
    assert not notes.about("not quite found")
    monkeypatch.setattr("ewc_finetune.penalty.kronecker_sum.ITERATIONS", 1)
    ewc.merge(files[:2], progress=notes)
    assert not notes.about("not quite found")  # the inverse of the sum of two is known
    ewc.merge(files, progress=notes)
    (first, *_) = notes.about("the centre of first is not quite found: ")
    assert "of the pull is left after" in first
