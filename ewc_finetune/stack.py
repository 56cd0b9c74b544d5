"""A stack: several anchors with a lambda each, collapsed into one quadratic.

A weighted sum of diagonal quadratics is a diagonal quadratic: with `F = sum_k lambda_k F_k` and
`centre = sum_k lambda_k F_k theta*_k / F`,

    sum_k lambda_k/2 F_k (theta - theta*_k)^2  =  1/2 F (theta - centre)^2 + constant

so any number of anchors costs one anchor's memory and time, exactly. Where F = 0 the parameter is free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ewc_finetune.anchor import Anchor
from ewc_finetune.errors import AnchorMismatchError, UsageError


@dataclass(frozen=True)
class Quadratic:
    """`1/2 sum_i curvature_i (theta_i - centre_i)^2 + constant`.

    Attributes:
        curvature: Sum of lambda_k F_k by parameter name, float32.
        centre: The minimum, by parameter name; float32, or float64 for float64 weights.
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


def collapse(anchors: Sequence[Anchor], lambdas: Sequence[float]) -> Quadratic:
    """Collapse anchors, oldest first, into one quadratic; accumulated in float64, one parameter at a time.

    Raises:
        AnchorMismatchError: if two anchors give one parameter different shapes, or have different likelihoods.
    """
    _check_together(anchors)
    curvature: dict[str, Tensor] = {}
    centre: dict[str, Tensor] = {}
    constant = 0.0
    for name in dict.fromkeys(name for anchor in anchors for name in anchor.fisher):
        holding = [(a, lam) for a, lam in zip(anchors, lambdas, strict=True) if name in a.fisher and lam > 0]
        if not holding:
            continue
        newest = holding[-1][0].weights[name].double()
        # Around the newest weights, so that one anchor alone keeps its weights to the bit:
        # total = sum lambda F, pull = sum lambda F d, spread = sum lambda F d^2, with d = theta* - newest.
        total, pull, spread = torch.zeros_like(newest), torch.zeros_like(newest), torch.zeros_like(newest)
        for anchor, lam in holding:
            weighted = lam * anchor.fisher[name].double()
            difference = anchor.weights[name].double() - newest
            total += weighted
            pull += weighted * difference
            spread += weighted * difference.square()
        offset = torch.where(total > 0, pull / total, 0.0)
        constant += 0.5 * (spread - offset * pull).clamp(min=0).sum().item()
        wide = holding[-1][0].weights[name].dtype == torch.float64
        curvature[name] = total.float()
        centre[name] = (newest + offset) if wide else (newest + offset).float()
    return Quadratic(curvature, centre, constant)


def remarks(anchors: Sequence[Anchor]) -> list[str]:
    """Say what a user should know before stacking these: anchors given twice, or contained in one another.

    An anchor whose checkpoint was trained under another's penalty contains that penalty already (Huszar, PNAS 2018).
    """
    found = []
    seen: dict[str, str] = {}
    for anchor in anchors:
        if anchor.digest in seen:
            found.append(f"{anchor.label} is the same anchor as {seen[anchor.digest]}: it counts twice. Drop one")
        elif anchor.digest:
            seen[anchor.digest] = anchor.label
    for anchor in anchors:
        inside = [seen[p["sha256"]] for p in anchor.provenance.lineage if p.get("sha256") in seen]
        if inside:
            found.append(
                f"{anchor.label} was made from a checkpoint that {', '.join(inside)} already pulled on, so the older "
                "domain counts twice in part. If the stack is too stiff, give the older one a smaller lambda; leaving "
                "it out would give its domain up"
            )
    return found


def _check_together(anchors: Sequence[Anchor]) -> None:
    for older, newer in pairwise(anchors):
        if older.provenance.likelihood != newer.provenance.likelihood:
            raise AnchorMismatchError(
                f"{older.label} has the likelihood {older.provenance.likelihood} and {newer.label} "
                f"{newer.provenance.likelihood}; one penalty can't be made of both"
            )
    first: dict[str, Anchor] = {}
    for anchor in anchors:
        for name in anchor.fisher:
            other = first.setdefault(name, anchor)
            if other.fisher[name].shape != anchor.fisher[name].shape:
                raise AnchorMismatchError(
                    f"anchors of different models: {name} has shape {tuple(other.fisher[name].shape)} in "
                    f"{other.label} and {tuple(anchor.fisher[name].shape)} in {anchor.label}"
                )
