"""Sums of Kronecker-factored blocks of one layer: where their common minimum lies, and the one block that stands in.

A sum of Kronecker products is no Kronecker product. Two come near: the one of the sum's partial traces, which is a
weighted sum of the factors each, and the nearest by the Frobenius norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ewc_finetune.choices import KfacSum
from ewc_finetune.errors import AnchorMismatchError
from ewc_finetune.kronecker import Block, Full

_ITERATIONS = 200
# Of the conjugate gradients, and of the alternating least squares: what is left is far below what a Fisher is known to.
_TOLERANCE = 1e-6


def sum_of(blocks: Sequence[Block], how: KfacSum) -> Block:
    """Return one block for the sum of several, in float64.

    Args:
        blocks: Of one layer. Those of fewer outputs, from before a head was expanded, are of its first ones.
        how: `factors` takes the sum's partial traces for factors: `A = sum_k tr(G_k) A_k` and `G = sum_k tr(A_k) G_k`,
            divided by the root of its trace each. It keeps the trace, and gives one and the same in any grouping.
            `nearest` is the Kronecker product nearest to the sum by the Frobenius norm (Van Loan and Pitsianis 1993,
            "Approximation with Kronecker products").

    Raises:
        AnchorMismatchError: if the blocks are of other parameters.
    """
    if len(blocks) == 1:
        return blocks[0]
    for block in blocks:
        if (block.names, block.transposed) != (blocks[0].names, blocks[0].transposed):
            raise AnchorMismatchError(
                f"the blocks of {block.layer} are of {', '.join(blocks[0].names)} in one anchor and of "
                f"{', '.join(block.names)} in another, and have no sum. Stack the anchors instead"
            )
    size = max(block.output.size for block in blocks)
    inputs = torch.stack([block.input.matrix().double() for block in blocks])
    outputs = torch.stack([_padded(block.output.matrix().double(), size) for block in blocks])
    a, g = _partial_traces(inputs, outputs)
    if how == "nearest":
        a, g = _nearest(inputs, outputs, g)
    return replace(blocks[0], input=Full(torch.tensordot(a, inputs, 1)), output=Full(torch.tensordot(g, outputs, 1)))


def _partial_traces(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return by how much each A, and each G, counts."""
    a, g = (matrices.diagonal(dim1=1, dim2=2).sum(1) for matrices in (outputs, inputs))
    root = (a * g).sum().sqrt()
    return (a / root, g / root) if root > 0 else (torch.zeros_like(a), torch.zeros_like(g))


def _nearest(inputs: Tensor, outputs: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return likewise, from where G is: in turn the best A for that G, and the best G for that A."""
    products = [matrices.flatten(1) @ matrices.flatten(1).T for matrices in (inputs, outputs)]
    a = torch.zeros_like(g)
    for _ in range(_ITERATIONS):
        before = torch.outer(a, g)
        a = _best(products[1], g)
        g = _best(products[0], a)
        if (torch.outer(a, g) - before).abs().max() <= _TOLERANCE * before.abs().max():
            break
    # Of one size, as what a factor is by itself says nothing.
    scale = ((g @ products[1] @ g) / (a @ products[0] @ a).clamp(min=1e-300)).sqrt().sqrt()
    return a * scale, g / scale if scale > 0 else g


def _best(products: Tensor, weights: Tensor) -> Tensor:
    """Return the coefficients `<G_k, G> / <G, G>`, with `G = sum_k w_k G_k` and `products` those of the G_k."""
    own = products @ weights
    norm = weights @ own
    return own / norm if norm > 0 else torch.zeros_like(own)


def centre_of(parts: Sequence[tuple[Block, Tensor]]) -> tuple[Tensor, float]:
    """Find where `1/2 sum_k <D_k, G_k D_k A_k>` is least, with `D_k = X - centre_k`, and what it is there.

    By conjugate gradients from the newest centre (as Tam et al. 2023, "Merging by matching models in task parameter
    subspaces"), so that what no block holds stays as it is there.

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
    direction, norm = residual, residual.square().sum()
    least = norm * _TOLERANCE**2
    for _ in range(_ITERATIONS):
        if norm <= least:
            break
        image = pull(direction)
        curvature = (direction * image).sum()
        if curvature <= 0:  # rounding: there is nothing left to gain
            break
        found = found + direction * (norm / curvature)
        residual = residual - image * (norm / curvature)
        before, norm = norm, residual.square().sum()
        direction = residual + direction * (norm / before)
    constant = sum(
        0.5 * (own_d * block.times(own_d)).sum().item() for block, own in held for own_d in [found[: len(own)] - own]
    )
    return base + found, max(0.0, constant)


def _padded(matrix: Tensor, size: int) -> Tensor:
    missing = size - len(matrix)
    return torch.nn.functional.pad(matrix, (0, missing, 0, missing)) if missing else matrix
