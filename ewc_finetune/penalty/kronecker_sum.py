"""Sums of Kronecker-factored blocks of one layer: where their common minimum lies, and the one block that stands in.

A sum of Kronecker products is no Kronecker product. Two stand in for it: the one of the sum's partial traces, which is
a weighted sum of the factors each, and the nearest by the Frobenius norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from ewc_finetune.choices import KfacSum
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.curvature.kronecker_factors import EXACT_EIGEN, DenseFactor, EighDecomposed, Factor
from ewc_finetune.errors import AnchorMismatchError
from ewc_finetune.penalty.conjugate_gradients import Map, solve

# Of least squares in turn: how often, and by how much they still go where they stop.
_TURNS, _STILL = 200, 1e-6
# The centre is where so little is left of the pull,
TOLERANCE = 1e-6
# or where that many steps have led.
ITERATIONS = 1000
# What eigenvalues of a factor are too small to divide by, relative to the largest: they are known in float32.
_LEAST = 1e-6


def sum_of(blocks: Sequence[Block], how: KfacSum) -> Block:
    """Return one block for the sum of several, in float64.

    Args:
        blocks: Of one layer. Those of fewer outputs, from before a head was expanded, are of its first ones.
        how: `factors` takes the sum's partial traces for factors: `A = sum_k tr(G_k) A_k` and `G = sum_k tr(A_k) G_k`,
            divided by the root of its trace each. It keeps the trace, and gives one and the same in any grouping.
            `nearest` is the Kronecker product nearest to the sum by the Frobenius norm (Van Loan and Pitsianis 1993,
            "Approximation with Kronecker products"); of blocks that have nothing in common it is the largest alone.

    Raises:
        AnchorMismatchError: if the blocks are of other parameters.
    """
    if len(blocks) == 1:
        return blocks[0]
    first = _alike(blocks)
    inputs, outputs = _terms(blocks)
    a, g = _partial_traces(inputs, outputs)
    if how == "nearest":
        a, g = _nearest(_products(inputs), _products(outputs), g)
    return replace(first, input=_weighted(a, inputs), output=_weighted(g, outputs))


def _alike(blocks: Sequence[Block]) -> Block:
    """Return the first of some blocks of one layer, if the others are of the same parameters."""
    first = blocks[0]
    for block in blocks:
        if (block.names, block.transposed, block.input.size) != (first.names, first.transposed, first.input.size):
            raise AnchorMismatchError(
                f"the blocks of {block.layer} are of {', '.join(first.names)} with {first.input.size} inputs in one "
                f"anchor and of {', '.join(block.names)} with {block.input.size} in another, and have no sum. Stack "
                "the anchors instead"
            )
    return first


def distance(block: Block, blocks: Sequence[Block]) -> float:
    """Return the Frobenius norm of what a block differs by from the sum of several, relative to that of the sum."""
    inputs, outputs = _terms([block, *blocks])
    own = len(block.terms())
    signs = torch.tensor([1.0] * own + [-1.0] * (len(inputs) - own), dtype=torch.float64)
    products = _products(inputs) * _products(outputs)
    whole = products[own:, own:].sum()
    return ((signs @ products @ signs).clamp(min=0) / whole).sqrt().item() if whole > 0 else 0.0


def stand_in(blocks: Sequence[Block]) -> Block:
    """Return the block of the sum's partial traces by its eigenvectors, in float64: it nearly inverts the sum."""
    block = sum_of(blocks, "factors")
    large = max(block.input.size, block.output.size) > EXACT_EIGEN
    narrow, wide = (torch.empty(0, dtype=dtype) for dtype in (torch.float32 if large else torch.float64, torch.float64))
    factors = [factor.to(narrow).eigen().to(wide) for factor in (block.input, block.output)]
    return replace(block, input=factors[0], output=factors[1])


def _known(factor: Factor) -> Factor:
    """Return a factor by its eigenvectors, without the eigenvalues that are rounding."""
    eigen = factor.eigen()
    least = eigen.largest() * _LEAST
    values = torch.where(eigen.eigenvalues > least, eigen.eigenvalues, 0.0)
    return replace(eigen, eigenvalues=values, rest=eigen.rest if eigen.rest > least else 0.0)


def _inverse(block: Block) -> Map:
    """Return the inverse of a block, of what is no rounding in it."""
    known = replace(block, input=_known(block.input), output=_known(block.output))
    return lambda matrix: known.spectral(matrix, lambda value: torch.where(value > 0, 1 / value, 0.0))


def _inverse_of_two(one: Block, other: Block) -> Map:
    """Return the inverse of the sum of two Kronecker products: division, where all their factors are diagonal."""
    columns, a, b = _common_basis(one.input, other.input)
    rows, g, h = _common_basis(one.output, other.output)
    value = torch.outer(g, a) + torch.outer(h, b)
    inverted = torch.where(value > 0, 1 / value, 0.0)
    return lambda matrix: rows @ (inverted * (rows.T @ matrix @ columns)) @ columns.T


def _common_basis(one: Factor, other: Factor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a basis in which two factors are diagonal, as columns, and their diagonals, without what is rounding.

    It is that of their generalised eigenvectors (Golub and Van Loan, "Matrix computations", 8.7).
    """
    size = max(one.size, other.size)
    total = torch.zeros(size, size, dtype=torch.float64)
    # Of one size, so that the larger one's rounding is not taken for the smaller.
    sizes = [max(factor.trace, torch.finfo(torch.float64).tiny) for factor in (one, other)]
    for factor, trace in zip((one, other), sizes, strict=True):
        total[: factor.size, : factor.size] += factor.matrix().double() / trace
    values, vectors = torch.linalg.eigh(total)
    kept = values > values[-1] * _LEAST
    half = vectors[:, kept] / values[kept].sqrt()
    share, turn = torch.linalg.eigh(half[: one.size].T @ (one.matrix().double() / sizes[0]) @ half[: one.size])
    parts = [torch.where(part > _LEAST, part, 0.0) for part in (share, 1 - share)]
    return half @ turn, sizes[0] * parts[0], sizes[1] * parts[1]


def times_sum(blocks: Sequence[Block], matrix: Tensor) -> Tensor:
    """Return the sum of the blocks times a matrix, of which each knows the first rows."""
    total = torch.zeros_like(matrix)
    for block in blocks:
        rows = block.output.size
        total[:rows] += block.times(matrix[:rows])
    return total


def _terms(blocks: Sequence[Block]) -> tuple[list[Factor], list[Factor]]:
    """Return the factors, inputs and outputs, of the Kronecker products that the blocks are the sum of."""
    terms = [term for block in blocks for term in block.terms()]
    return [a for a, _ in terms], [g for _, g in terms]


def _weighted(weights: Tensor, factors: Sequence[Factor]) -> DenseFactor:
    size = max(factor.size for factor in factors)
    total = torch.zeros(size, size, dtype=torch.float64)
    for weight, factor in zip(weights.tolist(), factors, strict=True):
        total[: factor.size, : factor.size] += weight * factor.matrix().double()
    return DenseFactor(total)


def _partial_traces(inputs: Sequence[Factor], outputs: Sequence[Factor]) -> tuple[Tensor, Tensor]:
    """Return by how much each A, and each G, counts."""
    a, g = (torch.tensor([factor.trace for factor in factors], dtype=torch.float64) for factors in (outputs, inputs))
    root = (a * g).sum().sqrt()
    return (a / root, g / root) if root > 0 else (torch.zeros_like(a), torch.zeros_like(g))


def _nearest(of_inputs: Tensor, of_outputs: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return by how much each A, and each G, counts: in turn the best A for that G, and the best G for that A."""
    a = torch.zeros_like(g)
    for _ in range(_TURNS):
        before = torch.outer(a, g)
        a = _best(of_outputs, g)
        g = _best(of_inputs, a)
        if (torch.outer(a, g) - before).abs().max() <= _STILL * before.abs().max():
            break
    # Of one size, as what a factor is by itself says nothing.
    scale = ((g @ of_outputs @ g) / (a @ of_inputs @ a).clamp(min=1e-300)).sqrt().sqrt()
    return a * scale, g / scale if scale > 0 else g


def _best(products: Tensor, weights: Tensor) -> Tensor:
    """Return the coefficients `<G_k, G> / <G, G>`, with `G = sum_k w_k G_k` and `products` those of the G_k."""
    own = products @ weights
    norm = weights @ own
    return own / norm if norm > 0 else torch.zeros_like(own)


def _products(factors: Sequence[Factor]) -> Tensor:
    """Return the inner products of the factors with each other."""
    products = torch.zeros(len(factors), len(factors), dtype=torch.float64)
    for i, j in combinations_with_replacement(range(len(factors)), 2):
        products[i, j] = products[j, i] = _product(factors[i], factors[j])
    return products


def _product(one: Factor, other: Factor) -> float:
    if isinstance(one, EighDecomposed) and isinstance(other, EighDecomposed) and one.size == other.size:
        # <V D V^T + r, W E W^T + s>, with D and E what the eigenvalues are above the rest
        d, e = one.eigenvalues.double() - one.rest, other.eigenvalues.double() - other.rest
        shared = d @ (one.vectors.double().T @ other.vectors.double()).square() @ e
        return (shared + other.rest * d.sum() + one.rest * e.sum()).item() + one.rest * other.rest * one.size
    size = min(one.size, other.size)
    left, right = (factor.matrix()[:size, :size].double() for factor in (one, other))
    return (left * right).sum().item()


def centre_of(parts: Sequence[tuple[Block, Tensor]]) -> tuple[Tensor, float, float]:
    """Find where `1/2 sum_k <D_k, G_k D_k A_k>` is least, with `D_k = X - centre_k`, and what it is there.

    By conjugate gradients from the newest centre (as Tam et al. 2023, "Merging by matching models in task parameter
    subspaces"), preconditioned with the block that stands in for the sum, until the pull is a millionth of what it was
    there, or for 1,000 steps. The sum of two is inverted as it is, but for what cut ones are made of, and takes a few
    steps. What no block holds stays as it is.

    Args:
        parts: Blocks of one layer with their centres, oldest first; the ones with fewer rows know the first ones.

    Returns:
        X in float64, as many rows as the largest centre has; the constant; and what is left of the pull at X, as a part
        of that at the newest centre.

    Raises:
        AnchorMismatchError: if the blocks are of other parameters.
    """
    _alike([block for block, _ in parts])
    rows = max(len(centre) for _, centre in parts)
    base = next(centre for _, centre in reversed(parts) if len(centre) == rows).double()
    wide = base.new_empty(0)
    held = [(block.to(wide), centre.double() - base[: len(centre)]) for block, centre in parts]
    pull = torch.zeros_like(base)
    for block, own in held:
        pull[: len(own)] += block.times(own)
    offset, left = torch.zeros_like(base), 0.0
    blocks = [block for block, _ in held]
    if pull.any():
        small = max(max(block.input.size, block.output.size) for block in blocks) <= EXACT_EIGEN
        inverse = _inverse_of_two(*blocks) if small and len(blocks) == 2 else _inverse(stand_in(blocks))
        offset, left = solve(lambda matrix: times_sum(blocks, matrix), pull, inverse, TOLERANCE, ITERATIONS)
    constant = 0.0
    for block, own in held:
        away = offset[: len(own)] - own
        constant += 0.5 * (away * block.times(away)).sum().item()
    return base + offset, max(0.0, constant), left
