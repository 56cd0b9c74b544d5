"""The figure of a mending: what each point keeps against what it has learned."""

from __future__ import annotations

from collections.abc import Sequence

from ewc_finetune.mending.mended import Point
from ewc_finetune.reporting.plots import Axis, Chart, Curve


def chart(points: Sequence[Point], chosen: int) -> Chart:
    """Return the chart of what the points keep and have learned, with a ring around the one that is taken."""
    drawn = {
        n: (one, other)
        for n, point in enumerate(points)
        if (one := point.learned) is not None and (other := point.kept) is not None
    }
    centres = [n for n in drawn if points[n].ratio is not None]
    plain = [n for n in drawn if points[n].ratio is None]
    ratios = [f"{points[n].ratio:g}" for n in centres]
    curves = [
        Curve("centres of the anchors, by ratio", "k0", [drawn[n] for n in centres], ratios),
        Curve("means of the weights", "plain", [drawn[n] for n in plain], [points[n].name for n in plain]),
    ]
    curves = [curve for curve in curves if curve.points]
    return Chart("Kept against learned", curves, Axis("learned"), Axis("kept"), drawn.get(chosen))
