"""A stack: several anchors with a lambda each, collapsed into one quadratic.

A weighted sum of diagonal quadratics is a diagonal quadratic: with `F = sum_k lambda_k F_k` and
`centre = sum_k lambda_k F_k theta*_k / F`,

    sum_k lambda_k/2 F_k (theta - theta*_k)^2  =  1/2 F (theta - centre)^2 + constant

so any number of anchors costs one anchor's memory and time, exactly. Where F = 0 the parameter is free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ewc_finetune.anchor import Anchor, refuse_zero
from ewc_finetune.choices import LINEAGES, Lineage, check_choice
from ewc_finetune.errors import AnchorMismatchError, NonFiniteError, UsageError
from ewc_finetune.kronecker import Block
from ewc_finetune.precision import wide
from ewc_finetune.tensor_file import TensorFile, shapes_of


@dataclass(frozen=True)
class Quadratic:
    """`1/2 sum_i curvature_i (theta_i - centre_i)^2 + constant`.

    Attributes:
        curvature: Sum of lambda_k F_k by parameter name; float32, or float64 for float64 weights.
        centre: The minimum, by parameter name, likewise.
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
        raise UsageError(f"{len(values)} lambdas for {anchors} anchors; give one for all, or one for each anchor")
    return values


def collapse(
    anchors: Sequence[Anchor],
    lambdas: Sequence[float],
    lineage: Lineage = "all",
    *,
    growing: Collection[str] = (),
) -> Quadratic:
    """Collapse anchors, oldest first, into one quadratic; accumulated in float64, one parameter at a time.

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
    stacked = [part for part in zip(anchors, centres, lambdas, strict=True) if part[2] > 0]
    # Of those that are read here for the first time it is not known yet that they hold anything.
    useless = {
        id(anchor): anchor
        for anchor, _, _ in stacked
        if isinstance(anchor.fisher, TensorFile) and (anchor.fisher or anchor.blocks)
    }
    found = Quadratic({}, {}, {})
    for name in dict.fromkeys(name for anchor, _, _ in stacked for name in anchor.fisher):
        holding = [part for part in stacked if name in part[0].fisher]
        base = newest_whole([at for _, at, _ in stacked], [anchor for anchor, _, _ in holding], name)
        newest = base.weights[name]
        double = newest.dtype == torch.float64
        newest = newest.double()
        # Around the newest weights, so that one anchor alone keeps its weights to the bit:
        # total = sum lambda F, pull = sum lambda F d, spread = sum lambda F d^2, with d = theta* - newest.
        total, pull, spread = torch.zeros_like(newest), torch.zeros_like(newest), torch.zeros_like(newest)
        constant = 0.0
        for anchor, at, lam in holding:
            weighted = anchor.fisher[name].double() * lam
            if id(anchor) in useless and weighted.any():
                del useless[id(anchor)]
            rows = slice(len(weighted)) if name in growing else ...
            total[rows] += weighted
            constant += lam * anchor.provenance.constant.get(name, 0.0)
            if at is not base:
                difference = at.weights[name].double()[rows] - newest[rows]
                pull[rows].addcmul_(weighted, difference)
                spread[rows].addcmul_(weighted, difference.square_())
        offset = torch.where(total > 0, pull / total, 0.0)
        constant += 0.5 * (spread - offset * pull).clamp(min=0).sum().item()
        found.curvature[name] = total if double else total.float()
        found.centre[name] = (newest + offset) if double else (newest + offset).float()
        if constant:
            found.constant[name] = constant
        if not found.curvature[name].isfinite().all():
            raise NonFiniteError(
                f"lambda times the Fisher of {name} is too large for its numbers; use a smaller lambda"
            )
    for anchor, at, lam in stacked:
        for block in anchor.blocks.values():
            if block.trace:
                useless.pop(id(anchor), None)
            bias = None if block.bias is None else at.weights[block.bias]
            # Of a head that was expanded since, the block knows the first outputs.
            centre = wide(block.join(at.weights[block.weight], bias))[: block.output.size]
            found.blocks.append((scaled(block, lam), centre))
            constant = lam * anchor.provenance.constant.get(block.weight, 0.0)
            if constant:
                found.constant[block.weight] = found.constant.get(block.weight, 0.0) + constant
    for anchor in useless.values():
        refuse_zero(anchor)
    return found


def scaled(block: Block, lam: float) -> Block:
    """Return lambda times a block.

    Raises:
        NonFiniteError: if that is beyond the numbers.
    """
    found = replace(block, output=block.output.scaled(lam))
    if not found.trace <= torch.finfo(torch.float32).max:  # of NaN neither
        raise NonFiniteError(f"lambda times the block of {block.layer} is too large for its numbers")
    return found


def newest_whole(anchors: Sequence[Anchor], holding: Sequence[Anchor], name: str) -> Anchor:
    """Return the newest of the anchors that has all rows of a parameter that those holding it know."""
    shape = max((anchor.held_shapes()[name] for anchor in holding), key=tuple)
    return next(anchor for anchor in reversed(anchors) if shapes_of(anchor.weights).get(name) == shape)


def grown_parameters(anchors: Sequence[Anchor]) -> set[str]:
    """Return the parameters of the one layer of which some anchors know more rows than others; none without one.

    Raises:
        AnchorMismatchError: if they are of several layers, and so of no head that was expanded.
    """
    shapes: dict[str, set[torch.Size]] = {}
    for anchor in anchors:
        for name, shape in anchor.held_shapes().items():
            shapes.setdefault(name, set()).add(shape)
    found = {name for name, known in shapes.items() if len(known) > 1}
    if len({name.rpartition(".")[0] for name in found}) > 1:
        raise AnchorMismatchError(
            f"anchors of different models: {', '.join(sorted(found)[:3])} have other shapes in {anchors[0].label} than "
            f"in {anchors[-1].label}, and only one layer can have been expanded"
        )
    return found


def of_one_head(anchors: Sequence[Anchor], head: Mapping[str, Any] | None) -> list[Anchor]:
    """Return the anchors, without the last layer of those that have another one than this (`Provenance.head`).

    Two layers that were trained each from the start have nothing to do with each other, even if they are of one shape.
    """
    return [
        replace(anchor.without(other), provenance=replace(anchor.provenance, head=None if head is None else dict(head)))
        if (other := foreign_head(anchor, head))
        else anchor
        for anchor in anchors
    ]


def foreign_head(anchor: Anchor, head: Mapping[str, Any] | None) -> set[str]:
    """Return the parameters of the last layer, if the anchor's is not this one; none if it is."""
    own = anchor.provenance.head
    if (own or {}).get("id") == (head or {}).get("id"):
        return set()
    return {name for known in (own, head) if known is not None for name in known["parameters"]}


def remarks(
    anchors: Sequence[Anchor], lineage: Lineage = "all", model: tuple[str, Mapping[str, Any] | None] | None = None
) -> list[str]:
    """Say what a user should know before stacking these: what counts twice, is left out, or has another scale.

    Args:
        anchors: Oldest first.
        lineage: See `collapse`.
        model: What to call the model that they pull on, and its head; the newest anchor's unless given.
    """
    if model is None:
        model = (anchors[-1].label, anchors[-1].provenance.head) if anchors else ("", None)
    found = []
    for number, anchor in enumerate(anchors):
        for other in anchors[:number]:
            if anchor.digest is not None and anchor.digest == other.digest:
                found.append(f"{anchor.label} is the same anchor as {other.label}: it counts twice. Drop one")
            elif _members(anchor) & _members(other):
                merged, part = (anchor, other) if anchor.provenance.merged else (other, anchor)
                verb = "was merged from anchors that are in" if part.provenance.merged else "was merged from"
                found.append(f"{merged.label} {verb} {part.label}, which so counts twice. Drop one of them")
        inside = [other.label for other in anchors if other is not anchor and _had_a_part(other, anchor)]
        if inside and lineage == "all":
            found.append(
                f"{anchor.label} was made from a checkpoint that {', '.join(inside)} already pulled on, so the older "
                "domain counts twice in part. --lineage latest moves the older curvature to the newer weights "
                "(leaving the older anchor out would give its domain up)"
            )
        late = [other.label for other in anchors[number + 1 :] if _had_a_part(other, anchor)]
        if late:
            found.append(f"{', '.join(late)} had a part in {anchor.label} and comes after it; expected oldest first")
        if foreign_head(anchor, model[1]):
            found.append(f"{anchor.label} has another last layer than {model[0]}, so the anchor's is left out")
    found += [text for anchor in anchors if (text := _of_another_digest(anchor, anchors)) is not None]
    for what, values in (
        ("curvature", {anchor.provenance.curvature: anchor.label for anchor in anchors}),
        ("estimator", {anchor.provenance.estimator: anchor.label for anchor in anchors}),
        ("architecture", {a.provenance.checkpoint.get("architecture") or "": a.label for a in anchors}),
    ):
        values.pop("", None)
        if len(values) > 1:
            known = ", ".join(f"{label} has {value}" for value, label in values.items())
            scale = "" if what == "architecture" else ", and so perhaps in scale"
            found.append(f"the anchors differ in {what}{scale}: {known}")
    return found


def _of_another_digest(anchor: Anchor, anchors: Sequence[Anchor]) -> str | None:
    """Say so where the lineage of others knows an anchor of this name by another digest alone."""
    parts = [entry for other in anchors for entry in other.provenance.lineage]
    known = {str(entry.get("sha256")) for entry in parts if entry.get("name") == anchor.provenance.name}
    if not known or anchor.digest is None or anchor.digest in known:
        return None
    return (
        f"{anchor.label} is not the anchor {anchor.provenance.name!r} that had a part in the weights: its SHA-256 is "
        f"{anchor.digest:.12}..., and was {min(known):.12}... It was made anew, replaced or damaged since"
    )


def lineage_of(anchors: Sequence[Anchor], lambdas: Sequence[float]) -> list[dict[str, Any]]:
    """Return every anchor with a part in weights that these anchors pulled on: theirs, their parents, and they."""
    entries = [entry for anchor in anchors for entry in anchor.provenance.lineage]
    for anchor, lam in zip(anchors, lambdas, strict=True):
        if lam > 0:
            merged = anchor.provenance.merged or {}
            for parent in merged.get("parents", ()):
                name = parent["provenance"].get("name")
                entries.append({"name": name, "sha256": parent["sha256"], "lambda": parent["lambda"] * lam})
            entries += [{"name": None, "sha256": digest, "lambda": lam} for digest in merged.get("through", ())]
            place = {} if anchor.place is None else {"hub": str(anchor.place)}
            entries.append({"name": anchor.provenance.name, "sha256": anchor.digest, "lambda": lam, **place})
    return distinct(entries)


def distinct(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries of a lineage once each, wherever the anchor was taken from."""
    first: dict[str, dict[str, Any]] = {}
    for entry in entries:
        known = [entry.get(key) for key in ("name", "sha256", "lambda")]
        # Anchors that were never saved have no digest, and may be others of the same name.
        key = repr(known) if entry.get("sha256") else repr(sorted(entry.items(), key=str))
        first[key] = first.get(key) or entry
    return list(first.values())


def check_together(anchors: Sequence[Anchor], growing: Collection[str] = ()) -> None:
    """Check that anchors can be stacked at all; no tensor is read. For `growing` see `collapse`.

    Raises:
        AnchorMismatchError: naming both anchors and what differs.
    """
    for older, newer in pairwise(anchors):
        if older.provenance.likelihood != newer.provenance.likelihood:
            raise AnchorMismatchError(
                f"{older.label} has the likelihood {older.provenance.likelihood} and {newer.label} "
                f"{newer.provenance.likelihood}; one penalty can't be made of both"
            )
    for other in anchors[1:]:
        if not set(shapes_of(other.weights)) & set(shapes_of(anchors[0].weights)):
            raise AnchorMismatchError(
                f"anchors of different models: {anchors[0].label} and {other.label} have no parameter in common"
            )
    first: dict[str, tuple[Anchor, torch.Size]] = {}
    for anchor in anchors:
        for name, shape in anchor.held_shapes().items():
            other, expected = first.setdefault(name, (anchor, shape))
            alike = _is_grown(shape, expected) or _is_grown(expected, shape)
            if shape != expected and not (name in growing and alike):
                grown = alike and not growing
                hint = ". If the head was expanded in between, add --head expand" if grown else ""
                raise AnchorMismatchError(
                    f"anchors of different models: {name} has shape {tuple(expected)} in "
                    f"{other.label} and {tuple(shape)} in {anchor.label}{hint}"
                )


def _latest(anchors: Sequence[Anchor], k: int, growing: Collection[str]) -> Anchor:
    """Return the newest anchor in whose weights anchor k had a part; itself if there is none."""

    def knows(later: Anchor) -> bool:
        theirs = shapes_of(later.weights)
        return all(
            name in theirs and (theirs[name] == shape or (name in growing and _is_grown(shape, theirs[name])))
            for name, shape in anchors[k].held_shapes().items()
        )

    for later in reversed(anchors[k + 1 :]):
        if _had_a_part(anchors[k], later) and knows(later):
            return later
    return anchors[k]


def _is_grown(shape: torch.Size, other: torch.Size) -> bool:
    """Whether the other shape is this one with rows added."""
    return len(shape) == len(other) > 0 and shape[1:] == other[1:] and shape[0] <= other[0]


def _had_a_part(anchor: Anchor, other: Anchor) -> bool:
    """Whether the other's weights were trained under this anchor's penalty; if merged, those of all parents."""
    merged = other.provenance.merged
    if merged is None:
        lineages = [other.provenance.lineage]
    else:
        parents = merged["parents"] if merged.get("form") == "offline" else merged["parents"][-1:]
        lineages = [parent["provenance"].get("lineage", []) for parent in parents]
    digests = [{entry.get("sha256") for entry in entries} for entries in lineages]
    return anchor.digest is not None and all(anchor.digest in known for known in digests)


def _members(anchor: Anchor) -> set[str]:
    """Return the digests of the anchors that this one consists of: its own, and those it was merged from."""
    merged = anchor.provenance.merged or {}
    known = [anchor.digest, *merged.get("through", ()), *(p["sha256"] for p in merged.get("parents", ()))]
    return {digest for digest in known if digest is not None}
