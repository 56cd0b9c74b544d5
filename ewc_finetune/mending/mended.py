"""What a mending found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from ewc_finetune.mending.chart import chart, title_of
from ewc_finetune.mending.point import Point
from ewc_finetune.reporting.plots import figure_of
from ewc_finetune.specs.html import html_table


@dataclass(frozen=True)
class Mended:
    """What `mend` found.

    Attributes:
        model: The mended model, in eval mode.
        points: The model at every ratio, at the plain means of the weights, and where it was polished.
        chosen: Which of these was taken.
        why: How it was chosen.
        output: The checkpoint that was written.
    """

    model: nn.Module
    points: tuple[Point, ...]
    chosen: int
    why: str
    output: Path | None

    @property
    def taken(self) -> Point:
        """The point that was taken."""
        return self.points[self.chosen]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows of a table for people, a row for each point."""
        domains = [scored.domain for scored in self.points[0].scores]
        probes = [f"probe of {kept.data}" for kept in self.points[0].retention]
        rows = [
            [
                point.name,
                *(f"{s.loss:.4f}" if s.accuracy is None else f"{s.accuracy:.4f}" for s in point.scores),
                *("-" if kept.unchanged is None else f"{kept.unchanged:.1%}" for kept in point.retention),
                "taken" if n == self.chosen else "",
            ]
            for n, point in enumerate(self.points)
        ]
        return ["old to new", *domains, *probes, ""], rows

    def plot(self) -> Figure:
        """Draw what each point keeps against what it has learned."""
        return figure_of([chart(self.points, self.chosen)], title_of(self.points))

    def _repr_html_(self) -> str:
        return html_table(*self.table(), self.why)

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        return {
            "output": None if self.output is None else str(self.output),
            "chosen": self.taken.name,
            "why": self.why,
            "points": [asdict(point) for point in self.points],
        }
