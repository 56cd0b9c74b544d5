"""The figure of a mending: what each point keeps against what it has learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ewc_finetune.mending.point import Point
from ewc_finetune.reporting.plots import Axis, Chart, Curve


def chart(points: Sequence[Point], chosen: int) -> Chart:
    """Return the chart of what the points keep and have learned, with a ring around the one that is taken."""
    drawn = {
        n: (one, other)
        for n, point in enumerate(points)
        if (one := point.learned) is not None and (other := point.kept) is not None
    }
    polished = [n for n in drawn if points[n].steps]
    centres = [n for n in drawn if points[n].ratio is not None and n not in polished]
    plain = [n for n in drawn if points[n].ratio is None]
    ratios = [f"{points[n].ratio:g}" for n in centres]
    curves = [
        Curve("centres of the anchors, by ratio", "k0", [drawn[n] for n in centres], ratios),
        Curve("polished", "k1", [drawn[n] for n in polished], [f"{points[n].steps:,} steps" for n in polished]),
        Curve("means of the weights", "plain", [drawn[n] for n in plain], [points[n].name for n in plain]),
    ]
    curves = [curve for curve in curves if curve.points]
    x, y = (_axis("learned", [one for one, _ in drawn.values()]), _axis("kept", [other for _, other in drawn.values()]))
    return Chart("Kept against learned", curves, x, y, drawn.get(chosen))


def title_of(points: Sequence[Point]) -> str:
    """Return what stands above the figure."""
    return f"Between old and new, {'and polished' if any(point.steps for point in points) else 'without training'}"


def _axis(label: str, values: Sequence[float]) -> Axis:
    """Return the axis of some values: there is no more than all of an accuracy; what stands for a loss has no limit."""
    return Axis(label, limits=(-math.inf, 1.0) if all(value <= 1 for value in values) else None)
