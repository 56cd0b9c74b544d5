"""Sums of Kronecker-factored blocks of one layer: where their common minimum lies, and the one block that stands in.

A sum of Kronecker products is no Kronecker product. Two stand in for it: the one of the sum's partial traces, which is
a weighted sum of the factors each, and the nearest by the Frobenius norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from ewc_finetune.choices import KfacSum
from ewc_finetune.errors import AnchorMismatchError
from ewc_finetune.kronecker import EXACT_EIGEN, Block, Factor, Full, Truncated

_ITERATIONS = 200
# Of conjugate gradients: what is left of the pull where they stop. Of least squares in turn: by how much they still go.
_TOLERANCE = 1e-6
# Relative to the largest, what eigenvalues are too small to divide by: in float64, and in float32 for large factors.
_LEAST = (1e-10, 1e-6)


def sum_of(blocks: Sequence[Block], how: KfacSum) -> tuple[Block, float]:
    """Return one block for the sum of several, in float64, and how far it is from it.

    Args:
        blocks: Of one layer. Those of fewer outputs, from before a head was expanded, are of its first ones.
        how: `factors` takes the sum's partial traces for factors: `A = sum_k tr(G_k) A_k` and `G = sum_k tr(A_k) G_k`,
            divided by the root of its trace each. It keeps the trace, and gives one and the same in any grouping.
            `nearest` is the Kronecker product nearest to the sum by the Frobenius norm (Van Loan and Pitsianis 1993,
            "Approximation with Kronecker products"); of blocks that have nothing in common it is the largest alone.

    Returns:
        The block, and the Frobenius norm of what it differs by, relative to that of the sum.

    Raises:
        AnchorMismatchError: if the blocks are of other parameters.
    """
    if len(blocks) == 1:
        return blocks[0], 0.0
    first = blocks[0]
    for block in blocks:
        if (block.names, block.transposed, block.input.size) != (first.names, first.transposed, first.input.size):
            raise AnchorMismatchError(
                f"the blocks of {block.layer} are of {', '.join(first.names)} with {first.input.size} inputs in one "
                f"anchor and of {', '.join(block.names)} with {block.input.size} in another, and have no sum. Stack "
                "the anchors instead"
            )
    inputs, outputs = _terms(blocks)
    products = _products(inputs), _products(outputs)
    a, g = _partial_traces(inputs, outputs)
    if how == "nearest":
        a, g = _nearest(*products, g)
    found = replace(first, input=_weighted(a, inputs), output=_weighted(g, outputs))
    return found, _distance(*products, a, g)


def _terms(blocks: Sequence[Block]) -> tuple[list[Factor], list[Factor]]:
    """Return the factors, inputs and outputs, of the Kronecker products that the blocks are the sum of."""
    terms = [term for block in blocks for term in block.terms()]
    return [a for a, _ in terms], [g for _, g in terms]


def _weighted(weights: Tensor, factors: Sequence[Factor]) -> Full:
    size = max(factor.size for factor in factors)
    total = torch.zeros(size, size, dtype=torch.float64)
    for weight, factor in zip(weights.tolist(), factors, strict=True):
        total[: factor.size, : factor.size] += weight * factor.matrix().double()
    return Full(total)


def _partial_traces(inputs: Sequence[Factor], outputs: Sequence[Factor]) -> tuple[Tensor, Tensor]:
    """Return by how much each A, and each G, counts."""
    a, g = (torch.tensor([factor.trace for factor in factors], dtype=torch.float64) for factors in (outputs, inputs))
    root = (a * g).sum().sqrt()
    return (a / root, g / root) if root > 0 else (torch.zeros_like(a), torch.zeros_like(g))


def _nearest(of_inputs: Tensor, of_outputs: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return likewise, from where G is: in turn the best A for that G, and the best G for that A."""
    a = torch.zeros_like(g)
    for _ in range(_ITERATIONS):
        before = torch.outer(a, g)
        a = _best(of_outputs, g)
        g = _best(of_inputs, a)
        if (torch.outer(a, g) - before).abs().max() <= _TOLERANCE * before.abs().max():
            break
    # Of one size, as what a factor is by itself says nothing.
    scale = ((g @ of_outputs @ g) / (a @ of_inputs @ a).clamp(min=1e-300)).sqrt().sqrt()
    return a * scale, g / scale if scale > 0 else g


def _best(products: Tensor, weights: Tensor) -> Tensor:
    """Return the coefficients `<G_k, G> / <G, G>`, with `G = sum_k w_k G_k` and `products` those of the G_k."""
    own = products @ weights
    norm = weights @ own
    return own / norm if norm > 0 else torch.zeros_like(own)


def _distance(of_inputs: Tensor, of_outputs: Tensor, a: Tensor, g: Tensor) -> float:
    """Return the relative distance of `sum_k a_k A_k ⊗ sum_k g_k G_k` from `sum_k A_k ⊗ G_k`."""
    whole = (of_inputs * of_outputs).sum()
    found = (a @ of_inputs @ a) * (g @ of_outputs @ g)
    both = ((of_inputs @ a) * (of_outputs @ g)).sum()
    return ((whole - 2 * both + found).clamp(min=0) / whole).sqrt().item() if whole > 0 else 0.0


def _products(factors: Sequence[Factor]) -> Tensor:
    """Return the inner products of the factors with each other."""
    found = torch.zeros(len(factors), len(factors), dtype=torch.float64)
    for i, j in combinations_with_replacement(range(len(factors)), 2):
        found[i, j] = found[j, i] = _product(factors[i], factors[j])
    return found


def _product(one: Factor, other: Factor) -> float:
    if isinstance(one, Truncated) and isinstance(other, Truncated) and one.size == other.size:
        # <V D V^T + r, W E W^T + s>, with D and E what the eigenvalues are above the rest
        d, e = one.eigenvalues.double() - one.rest, other.eigenvalues.double() - other.rest
        shared = d @ (one.vectors.double().T @ other.vectors.double()).square() @ e
        return (shared + other.rest * d.sum() + one.rest * e.sum()).item() + one.rest * other.rest * one.size
    size = min(one.size, other.size)
    left, right = (factor.matrix()[:size, :size].double() for factor in (one, other))
    return (left * right).sum().item()


def centre_of(parts: Sequence[tuple[Block, Tensor]]) -> tuple[Tensor, float]:
    """Find where `1/2 sum_k <D_k, G_k D_k A_k>` is least, with `D_k = X - centre_k`, and what it is there.

    By conjugate gradients from the newest centre (as Tam et al. 2023, "Merging by matching models in task parameter
    subspaces"), preconditioned with the block that stands in for the sum, until the pull is a millionth of what it was
    there. What no block holds stays as it is.

    Args:
        parts: Blocks of one layer with their centres, oldest first; the ones with fewer rows know the first ones.

    Returns:
        X in float64, as many rows as the largest centre has, and the constant.
    """
    rows = max(len(centre) for _, centre in parts)
    base = next(centre for _, centre in reversed(parts) if len(centre) == rows).double()
    wide = base.new_empty(0)
    held = [(block.to(wide), centre.double() - base[: len(centre)]) for block, centre in parts]

    def pull(x: Tensor) -> Tensor:
        total = torch.zeros_like(base)
        for block, own in held:
            total[: len(own)] += block.times(x[: len(own)])
        return total

    found = torch.zeros_like(base)
    residual = torch.zeros_like(base)
    for block, own in held:
        residual[: len(own)] += block.times(own)
    least = residual.square().sum() * _TOLERANCE**2
    if least > 0:
        inverse = _preconditioner([block for block, _ in held])
        towards = inverse(residual)
        direction, slope = towards, (residual * towards).sum()
        for _ in range(_ITERATIONS):
            image = pull(direction)
            curvature = (direction * image).sum()
            if curvature <= 0:  # rounding: there is nothing left to gain
                break
            found = found + direction * (slope / curvature)
            residual = residual - image * (slope / curvature)
            if residual.square().sum() <= least:
                break
            towards = inverse(residual)
            before, slope = slope, (residual * towards).sum()
            direction = towards + direction * (slope / before)
    constant = 0.0
    for block, own in held:
        away = found[: len(own)] - own
        constant += 0.5 * (away * block.times(away)).sum().item()
    return base + found, max(0.0, constant)


def _preconditioner(blocks: Sequence[Block]) -> Callable[[Tensor], Tensor]:
    """Return what nearly inverts the sum of blocks, and leaves out what it is too small for."""
    inputs, outputs = _terms(blocks)
    a, g = _partial_traces(inputs, outputs)
    large = max(factor.size for factor in (*inputs, *outputs)) > EXACT_EIGEN
    narrow, wide = (torch.empty(0, dtype=dtype) for dtype in (torch.float32 if large else torch.float64, torch.float64))
    factors = (_weighted(a, inputs), _weighted(g, outputs))
    inverted = [factor.to(narrow).eigen().to(wide) for factor in factors]
    found = replace(blocks[0], input=inverted[0], output=inverted[1])
    least = found.largest() * _LEAST[large]
    return lambda matrix: found.spectral(matrix, lambda value: torch.where(value > least, 1 / value, 0.0))
