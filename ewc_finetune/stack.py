"""A stack: several anchors with a lambda each, collapsed into one quadratic.

A weighted sum of diagonal quadratics is a diagonal quadratic: with `F = sum_k lambda_k F_k` and
`centre = sum_k lambda_k F_k theta*_k / F`,

    sum_k lambda_k/2 F_k (theta - theta*_k)^2  =  1/2 F (theta - centre)^2 + constant

so any number of anchors costs one anchor's memory and time, exactly. Where F = 0 the parameter is free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ewc_finetune.anchor import Anchor
from ewc_finetune.choices import LINEAGES, Lineage, check_choice
from ewc_finetune.errors import AnchorMismatchError, UsageError
from ewc_finetune.tensor_file import shapes_of


@dataclass(frozen=True)
class Quadratic:
    """`1/2 sum_i curvature_i (theta_i - centre_i)^2 + constant`.

    Attributes:
        curvature: Sum of lambda_k F_k by parameter name; float32, or float64 for float64 weights.
        centre: The minimum, by parameter name, likewise.
        constant: What the quadratic is at its centre: how much the anchors disagree.
    """

    curvature: dict[str, Tensor]
    centre: dict[str, Tensor]
    constant: float


def spread_lambdas(lambdas: float | Sequence[float], anchors: int) -> list[float]:
    """Return one lambda for each anchor; a single one serves all.

    Raises:
        UsageError: if one is negative or not a finite number, or they are neither one nor one for each anchor.
    """
    values = [lambdas] if isinstance(lambdas, (int, float)) else list(lambdas)
    for value in values:
        if not math.isfinite(value) or value < 0:
            raise UsageError(f"lambda is {value}; expected a finite number, 0 or above")
    if len(values) == 1:
        values *= anchors
    if len(values) != anchors:
        raise UsageError(f"{len(values)} lambdas for {anchors} anchors; give one for all, or one for each anchor")
    return [float(value) for value in values]


def collapse(
    anchors: Sequence[Anchor],
    lambdas: Sequence[float],
    lineage: Lineage = "all",
    *,
    without: Collection[str] = (),
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
        without: Parameters to leave out.
        growing: Parameters to which rows were added at the end: of those an anchor knows the first ones.

    Raises:
        AnchorMismatchError: if two anchors give one parameter different shapes, or have different likelihoods.
    """
    check_choice("lineage", lineage, LINEAGES)
    check_together(anchors, without, growing)
    centres = [_latest(anchors, k) if lineage == "latest" else anchor for k, anchor in enumerate(anchors)]
    stacked = [part for part in zip(anchors, centres, lambdas, strict=True) if part[2] > 0]
    curvature: dict[str, Tensor] = {}
    centre: dict[str, Tensor] = {}
    constant = math.fsum(lam * anchor.provenance.constant for anchor, _, lam in stacked)
    for name in dict.fromkeys(n for anchor, _, _ in stacked for n in anchor.fisher if n not in without):
        holding = [part for part in stacked if name in part[0].fisher]
        shape = max((shapes_of(anchor.fisher)[name] for anchor, _, _ in holding), key=torch.Size.numel)
        base = next(at for _, at, _ in reversed(stacked) if shapes_of(at.weights).get(name) == shape)
        newest = base.weights[name]
        wide = newest.dtype == torch.float64
        newest = newest.double()
        # Around the newest weights, so that one anchor alone keeps its weights to the bit:
        # total = sum lambda F, pull = sum lambda F d, spread = sum lambda F d^2, with d = theta* - newest.
        total, pull, spread = torch.zeros_like(newest), torch.zeros_like(newest), torch.zeros_like(newest)
        for anchor, at, lam in holding:
            weighted = anchor.fisher[name].double().mul_(lam)
            rows = slice(len(weighted) if weighted.ndim else None) if name in growing else ...
            total[rows] += weighted
            if at is not base:
                difference = at.weights[name].double()[rows].sub_(newest[rows])
                pull[rows].addcmul_(weighted, difference)
                spread[rows].addcmul_(weighted, difference.square_())
        offset = torch.where(total > 0, pull / total, 0.0)
        constant += 0.5 * (spread - offset * pull).clamp(min=0).sum().item()
        curvature[name] = total if wide else total.float()
        centre[name] = (newest + offset) if wide else (newest + offset).float()
    return Quadratic(curvature, centre, constant)


def remarks(anchors: Sequence[Anchor], lineage: Lineage = "all") -> list[str]:
    """Say what a user should know before stacking these: what counts twice, and what is not on one scale."""
    found = []
    seen: dict[str, Anchor] = {}
    for anchor in anchors:
        if anchor.digest in seen:
            found.append(f"{anchor.label} is the same anchor as {seen[anchor.digest].label}: it counts twice. Drop one")
        elif anchor.digest:
            seen[anchor.digest] = anchor
    for anchor in anchors:
        parents = [seen[digest].label for digest in _parents(anchor) if digest in seen]
        if parents:
            found.append(f"{anchor.label} was merged from {', '.join(parents)}, which so count twice. Drop them")
        inside = [other.label for other in anchors if other is not anchor and _had_a_part(other, anchor)]
        if inside and lineage == "all":
            found.append(
                f"{anchor.label} was made from a checkpoint that {', '.join(inside)} already pulled on, so the older "
                "domain counts twice in part. --lineage latest moves the older curvature to the newer weights "
                "(leaving the older anchor out would give its domain up)"
            )
    estimators = {anchor.provenance.estimator: anchor.label for anchor in anchors}
    if len(estimators) > 1:
        known = ", ".join(f"{label} has {name}" for name, label in estimators.items())
        found.append(f"the anchors' curvatures differ in estimator, and so perhaps in scale: {known}")
    versions = {anchor.provenance.checkpoint.get("architecture"): anchor.label for anchor in anchors}
    versions.pop(None, None)
    if len(versions) > 1:
        known = ", ".join(f"{label} has {name}" for name, label in versions.items())
        found.append(f"the anchors differ in architecture, though their parameters fit: {known}")
    return found


def lineage_of(anchors: Sequence[Anchor], lambdas: Sequence[float]) -> list[dict[str, Any]]:
    """Return every anchor with a part in weights that these anchors pulled on: theirs, their parents, and they."""
    entries = [entry for anchor in anchors for entry in anchor.provenance.lineage]
    for anchor, lam in zip(anchors, lambdas, strict=True):
        if lam > 0:
            for parent in (anchor.provenance.merged or {}).get("parents", ()):
                name = parent["provenance"].get("name")
                entries.append({"name": name, "sha256": parent["sha256"], "lambda": parent["lambda"] * lam})
            entries.append({"name": anchor.provenance.name, "sha256": anchor.digest, "lambda": lam})
    return [entry for index, entry in enumerate(entries) if entry not in entries[:index]]


def check_together(anchors: Sequence[Anchor], without: Collection[str] = (), growing: Collection[str] = ()) -> None:
    """Check that anchors can be stacked at all; no tensor is read. For the others see `collapse`.

    Raises:
        AnchorMismatchError: naming both anchors and what differs.
    """
    for older, newer in pairwise(anchors):
        if older.provenance.likelihood != newer.provenance.likelihood:
            raise AnchorMismatchError(
                f"{older.label} has the likelihood {older.provenance.likelihood} and {newer.label} "
                f"{newer.provenance.likelihood}; one penalty can't be made of both"
            )
    first: dict[str, tuple[Anchor, torch.Size]] = {}
    for anchor in anchors:
        for name, shape in shapes_of(anchor.fisher).items():
            other, expected = first.setdefault(name, (anchor, shape))
            alike = shape == expected or (name in growing and shape[1:] == expected[1:])
            if not alike and name not in without:
                raise AnchorMismatchError(
                    f"anchors of different models: {name} has shape {tuple(expected)} in "
                    f"{other.label} and {tuple(shape)} in {anchor.label}"
                )


def _latest(anchors: Sequence[Anchor], k: int) -> Anchor:
    """Return the newest anchor in whose weights anchor k had a part; itself if there is none."""
    for later in reversed(anchors[k + 1 :]):
        if _had_a_part(anchors[k], later) and set(anchors[k].fisher) <= set(later.weights):
            return later
    return anchors[k]


def _had_a_part(anchor: Anchor, other: Anchor) -> bool:
    """Whether the other's checkpoint was trained under this anchor's penalty."""
    return anchor.digest is not None and any(entry.get("sha256") == anchor.digest for entry in other.provenance.lineage)


def _parents(anchor: Anchor) -> list[str | None]:
    return [] if anchor.provenance.merged is None else [p["sha256"] for p in anchor.provenance.merged["parents"]]
