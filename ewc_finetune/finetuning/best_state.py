"""Which state of a run is the best, and when to stop looking for a better one."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import UsageError
from ewc_finetune.evaluation.score import Score
from ewc_finetune.specs.query import PARTS, data_key


@dataclass
class Selection:
    """Compares evaluations by the mean score over some of the domains.

    Attributes:
        domains: Their names.
        patience: Evaluations in a row that may be no better than the best; any number unless given.
        best: The best score so far.
        step: When that was.
        stale: Evaluations since.
    """

    domains: tuple[str, ...]
    patience: int | None = None
    best: float | None = None
    step: int = 0
    stale: int = 0

    def take(self, scores: Sequence[Score], step: int) -> bool:
        """Take one evaluation, and return whether it is better than all before it."""
        value = merit(scores, self.domains)
        value = -math.inf if math.isnan(value) else value
        if self.best is not None and value <= self.best:
            self.stale += 1
            return False
        self.best, self.step, self.stale = value, step, 0
        return True

    @property
    def exhausted(self) -> bool:
        """Whether there is no patience left."""
        return self.patience is not None and self.stale >= self.patience

    def state(self) -> dict[str, Any]:
        """Return what has been found so far."""
        return {"best": self.best, "step": self.step, "stale": self.stale}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.best, self.step, self.stale = state["best"], state["step"], state["stale"]


def merit(scores: Sequence[Score], domains: Collection[str]) -> float:
    """Return the mean accuracy over these domains, or where one has none, their mean loss with its sign turned."""
    chosen = [score for score in scores if score.domain in domains]
    accuracies = [score.accuracy for score in chosen if score.accuracy is not None and score.perplexity is None]
    if len(accuracies) == len(chosen):
        return sum(accuracies) / len(chosen)
    return -sum(score.loss for score in chosen) / len(chosen)


def selecting(data: Any, watched: Sequence[Domain], specs: Sequence[str | None], select_on: Sequence[str]) -> list[str]:
    """Return the names of the domains that a choice goes by: the new one, if it is scored, and those asked for.

    Args:
        data: The new domain, as it was given.
        watched: The domains that are scored.
        specs: Of each of them the data spec, where it has one.
        select_on: Names of those asked for.

    Raises:
        UsageError: if there is none.
    """
    names = [
        domain.name
        for domain, spec in zip(watched, specs, strict=True)
        if isinstance(data, str) and spec is not None and data_key(spec, PARTS) == data_key(data, PARTS)
    ]
    names += [name for name in select_on if name not in names]
    if not names:
        raise UsageError(
            "to choose the best state, a domain must be scored: add --eval for the new one, or name those that the "
            "choice goes by with --select-on"
        )
    return names
