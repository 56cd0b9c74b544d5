"""Which ratio to take, of those that were measured."""

from __future__ import annotations

from collections.abc import Sequence

from ewc_finetune.errors import RetentionError
from ewc_finetune.evaluation.probe import least_unchanged
from ewc_finetune.mending.point import Point
from ewc_finetune.reporting.frontier import knee


def choose(points: Sequence[Point], retain: float | None) -> tuple[int, str]:
    """Return which point to take, and why.

    Args:
        points: In order of their ratios; those that have none are not taken.
        retain: The share of the answers to every probe that must be kept; the knee is looked for unless given.

    Raises:
        RetentionError: if no ratio keeps what must be kept.
    """
    centres = [n for n, point in enumerate(points) if point.ratio is not None]
    if retain is not None:
        return _smallest(
            points, centres, retain
        ), f"the smallest ratio that keeps {retain:.1%} of the answers to every probe"
    if len(centres) == 1:
        return centres[0], "the only ratio"
    known = [
        (n, one, other)
        for n in centres
        if (one := points[n].learned) is not None and (other := points[n].kept) is not None
    ]
    bend = knee([(one, other) for _, one, other in known])
    if bend is not None:
        return known[bend][0], "the knee: farthest beyond the line between the ends of the frontier"
    return max(known, key=lambda of: of[1] + of[2])[0], "the best mean of what is kept and learned"


def _smallest(points: Sequence[Point], centres: Sequence[int], retain: float) -> int:
    """Return the first of the centres that keeps so much of every probe."""
    shares = {n: least_unchanged(points[n].retention) or 0.0 for n in centres}
    for n in centres:
        if shares[n] >= retain:
            return n
    found = ", ".join(f"{points[n].ratio:g} to 1 keeps {share:.1%}" for n, share in shares.items())
    raise RetentionError(
        f"no ratio keeps {retain:.1%} of the answers to the probes: {found}. Try larger ratios, or K-FAC anchors"
    )
