"""A model at one place between old and new, as it is measured there."""

from __future__ import annotations

from dataclasses import dataclass

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
