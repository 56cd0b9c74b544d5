"""A stack: several anchors with a lambda each, summed to one quadratic.

A weighted sum of diagonal quadratics is a diagonal quadratic: with `F = sum_k lambda_k F_k` and
`centre = sum_k lambda_k F_k theta*_k / F`,

    sum_k lambda_k/2 F_k (theta - theta*_k)^2  =  1/2 F (theta - centre)^2 + constant

so any number of anchors costs one anchor's memory and time, exactly. Where F = 0 the parameter is free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ewc_finetune.anchor.anchor import Anchor, refuse_zero
from ewc_finetune.anchor.compatibility import check_together, is_grown
from ewc_finetune.anchor.heads import of_one_head
from ewc_finetune.anchor.lineage import had_a_part
from ewc_finetune.choices import BESIDE_REHEARSAL, DEFAULT_LAMBDA, LINEAGES, Lineage, check_choice
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.errors import NonFiniteError, UsageError, counted
from ewc_finetune.modules.precision import wide
from ewc_finetune.storage.lazy_tensors import TensorFile, shapes_of


@dataclass(frozen=True)
class Quadratic:
    """`1/2 sum_i curvature_i (theta_i - centre_i)^2 + constant`.

    Attributes:
        curvature: Sum of lambda_k F_k by parameter name; float32, or float64 for float64 weights.
        centre: The minimum by parameter name, in the dtype of its curvature.
        constant: What the quadratic is at its centre, by parameter name: how much the anchors disagree.
        blocks: Kronecker-factored blocks, which have no such sum: each anchor's own, lambda in it, with its centre.
    """

    curvature: dict[str, Tensor]
    centre: dict[str, Tensor]
    constant: dict[str, float]
    blocks: list[tuple[Block, Tensor]] = field(default_factory=list)


def spread_lambdas(lambdas: float | Sequence[float], anchors: int) -> list[float]:
    """Return one lambda for each anchor; a single one serves all.

    Raises:
        UsageError: if one is negative or not a finite number, or they are neither one nor one for each anchor.
    """
    try:
        values = [float(value) for value in (lambdas if isinstance(lambdas, Iterable) else [lambdas])]
    except OverflowError as error:
        raise UsageError("a lambda is too large for a float") from error
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise UsageError(f"lambda is {value}; expected a finite number, 0 or above")
    if len(values) == 1:
        values *= anchors
    if len(values) != anchors:
        raise UsageError(
            f"{counted(len(values), 'lambda')} for {counted(anchors, 'anchor')}; "
            "give one for all, or one for each anchor"
        )
    return values


def usual_lambdas(anchors: Sequence[Anchor], rehearses: bool) -> list[float]:
    """Return the lambda of each anchor, where none is given: by its curvature, less where old inputs are rehearsed."""
    part = BESIDE_REHEARSAL if rehearses else 1.0
    return [part * DEFAULT_LAMBDA[anchor.provenance.curvature] for anchor in anchors]


def sum_quadratics(
    anchors: Sequence[Anchor],
    lambdas: Sequence[float],
    lineage: Lineage = "all",
    *,
    growing: Collection[str] = (),
) -> Quadratic:
    """Sum anchors, oldest first, to one quadratic; accumulated in float64, one parameter at a time.

    Anchors that were opened and not loaded are read one tensor at a time too, so that there is never more in memory
    than the result and a few tensors.

    Args:
        anchors: Oldest first.
        lambdas: One for each, 0 or above.
        lineage: `all` pulls to each anchor's own weights (Kirkpatrick et al. 2017). `latest` moves the curvature of an
            anchor that had a part in a later one's weights to those weights: they are the optimum under its pull
            already, and pulling to its own once more counts its domain twice (Huszar, PNAS 2018).
        growing: Parameters to which rows were added at the end: of those an anchor knows the first ones.

    Raises:
        AnchorMismatchError: if two anchors give one parameter different shapes, or have different likelihoods.
        AnchorError: if the Fisher of a file is zero everywhere.
        NonFiniteError: if a lambda times a Fisher is beyond the numbers.
        UsageError: for `latest` with anchors that were never saved: lineages know anchors by their files' digests.
    """
    check_choice("lineage", lineage, LINEAGES)
    if lineage == "latest" and len(anchors) > 1 and any(anchor.digest is None for anchor in anchors):
        raise UsageError("lineage latest needs anchors that are saved: their digests tell who had a part in whom")
    anchors = of_one_head(anchors, anchors[-1].provenance.head) if anchors else []
    check_together(anchors, growing)
    centres = [_latest(anchors, k, growing) if lineage == "latest" else anchor for k, anchor in enumerate(anchors)]
    terms = [_Term(*term) for term in zip(anchors, centres, lambdas, strict=True) if term[2] > 0]
    # Of anchors that are read here for the first time it is not known yet that they hold anything.
    unread = [term for term in terms if isinstance(term.anchor.fisher, TensorFile)]
    empty = {id(term.anchor) for term in unread if term.anchor.fisher or term.anchor.blocks}
    total = Quadratic({}, {}, {})
    for name in dict.fromkeys(name for term in terms for name in term.anchor.fisher):
        empty -= _add_diagonals(total, terms, name, empty, rows_grow=name in growing)
    for term in terms:
        for block in term.anchor.blocks.values():
            if block.trace:
                empty.discard(id(term.anchor))
            bias = None if block.bias is None else term.at.weights[block.bias]
            # Of a head that was expanded since, the block knows the first outputs.
            centre = wide(block.join(term.at.weights[block.weight], bias))[: block.output.size]
            total.blocks.append((scaled(block, term.lam), centre))
            constant = term.lam * term.anchor.provenance.constant.get(block.weight, 0.0)
            if constant:
                total.constant[block.weight] = total.constant.get(block.weight, 0.0) + constant
    for anchor in anchors:
        if id(anchor) in empty:
            refuse_zero(anchor)
    return total


@dataclass(frozen=True)
class _Term:
    """An anchor of a stack, the one whose weights it pulls to, and its lambda."""

    anchor: Anchor
    at: Anchor
    lam: float


def _add_diagonals(
    total: Quadratic, terms: Sequence[_Term], name: str, empty: Collection[int], *, rows_grow: bool
) -> set[int]:
    """Put the sum of one parameter's diagonals into the total; return which `empty` ones are not zero there.

    Raises:
        NonFiniteError: if a lambda times a Fisher is beyond the numbers.
    """
    holding = [term for term in terms if name in term.anchor.fisher]
    base = newest_whole([term.at for term in terms], [term.anchor for term in holding], name)
    newest = base.weights[name]
    dtype = torch.float64 if newest.dtype == torch.float64 else torch.float32
    newest = newest.double()
    # Around the newest weights, so that one anchor alone keeps its weights to the bit:
    # curvature = sum lambda F, pull = sum lambda F d, spread = sum lambda F d^2, with d = theta* - newest.
    curvature, pull, spread = torch.zeros_like(newest), torch.zeros_like(newest), torch.zeros_like(newest)
    constant = 0.0
    nonzero = set()
    for term in holding:
        weighted = term.anchor.fisher[name].double() * term.lam
        if id(term.anchor) in empty and weighted.any():
            nonzero.add(id(term.anchor))
        rows = slice(len(weighted)) if rows_grow else ...
        curvature[rows] += weighted
        constant += term.lam * term.anchor.provenance.constant.get(name, 0.0)
        if term.at is not base:
            difference = term.at.weights[name].double()[rows] - newest[rows]
            pull[rows].addcmul_(weighted, difference)
            spread[rows].addcmul_(weighted, difference.square_())
    offset = torch.where(curvature > 0, pull / curvature, 0.0)
    constant += 0.5 * (spread - offset * pull).clamp(min=0).sum().item()
    total.curvature[name] = curvature.to(dtype)
    total.centre[name] = (newest + offset).to(dtype)
    if constant:
        total.constant[name] = constant
    if not total.curvature[name].isfinite().all():
        raise NonFiniteError(f"lambda times the Fisher of {name} is too large for its numbers; use a smaller lambda")
    return nonzero


def scaled(block: Block, lam: float) -> Block:
    """Return lambda times a block.

    Raises:
        NonFiniteError: if that is beyond the numbers.
    """
    times = replace(block, output=block.output.scaled(lam))
    if not times.trace <= torch.finfo(torch.float32).max:  # of NaN neither
        raise NonFiniteError(f"lambda times the block of {block.layer} is too large for its numbers")
    return times


def newest_whole(anchors: Sequence[Anchor], holding: Sequence[Anchor], name: str) -> Anchor:
    """Return the newest of the anchors that has all rows of a parameter that those holding it know."""
    shape = max((anchor.held_shapes()[name] for anchor in holding), key=tuple)
    return next(anchor for anchor in reversed(anchors) if shapes_of(anchor.weights).get(name) == shape)


def _latest(anchors: Sequence[Anchor], k: int, growing: Collection[str]) -> Anchor:
    """Return the newest anchor in whose weights anchor k had a part; itself if there is none."""

    def knows(later: Anchor) -> bool:
        theirs = shapes_of(later.weights)
        return all(
            name in theirs and (theirs[name] == shape or (name in growing and is_grown(shape, theirs[name])))
            for name, shape in anchors[k].held_shapes().items()
        )

    for later in reversed(anchors[k + 1 :]):
        if had_a_part(anchors[k], later) and knows(later):
            return later
    return anchors[k]
