"""What a mending found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ewc_finetune.evaluation.probe import Retention
from ewc_finetune.evaluation.score import Score


@dataclass(frozen=True)
class Point:
    """The model at one place between old and new.

    Attributes:
        name: Of the place.
        ratio: What the old anchors weigh beside the new one there; None of a plain mean of the weights.
        scores: On the domains that are scored.
        retention: What it keeps of the old anchors' probes.
        kept: What it keeps: the mean score on old domains, else the mean share of unchanged answers to probes (of
            regressions the negative divergence); None where nothing tells.
        learned: What it has learned: the score on the new domain; None where it has none.
        steps: For how many steps it was polished there.
    """

    name: str
    ratio: float | None
    scores: tuple[Score, ...]
    retention: tuple[Retention, ...]
    kept: float | None
    learned: float | None
    steps: int = 0


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

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        return {
            "output": None if self.output is None else str(self.output),
            "chosen": self.taken.name,
            "why": self.why,
            "points": [asdict(point) for point in self.points],
        }
