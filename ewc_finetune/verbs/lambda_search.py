"""`--lambda auto`: the strongest penalty that leaves the new domain (nearly) what it could learn without any.

The procedure of De Lange et al. 2021 ("A continual learning survey: defying forgetting in classification tasks",
TPAMI): a plain run shows what plasticity is to be had, then the largest lambda is looked for whose run stays within a
tolerance of it. The new domain alone decides, on samples that are held out; the old data is not needed. Where theirs
halves lambda from a maximum that is known to be stable, this starts from the lambda at which the penalty of the plain
run's weights is as much as that run gained, and goes from there by factors and then by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import UsageError
from ewc_finetune.progress import Progress
from ewc_finetune.verbs.evaluate import Score

# How much of the plain run's accuracy may be lost.
DEFAULT_TOLERANCE = 0.02
# Held runs; with the plain one they are five.
RUNS = 4
# Of the lambda at which the plain run's weights would cost what they gained, so much is tried first, and by such a
# factor it is left.
_FIRST, _FACTOR = 1 / 8, 4.0
# Held out of the new domain to choose by: a share of the samples, and no more than so many.
_HELD_OUT, _MOST = 0.1, 5_000


@dataclass(frozen=True)
class Trial:
    """One short run.

    Attributes:
        strength: The lambda, of which each anchor has its own multiple; None for the plain run.
        score: On the held-out samples of the new domain.
        within: Whether that is within the tolerance of the plain run's.
        watched: On the domains that are evaluated, which have no say.
    """

    strength: float | None
    score: Score
    within: bool
    watched: tuple[Score, ...] = ()


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        strength: The lambda that won.
        met: Whether its run was within the tolerance; else it is the weakest that was tried.
        trials: All runs, in the order in which they were made.
    """

    strength: float
    met: bool
    trials: tuple[Trial, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        return {
            "lambda": self.strength,
            "met": self.met,
            "trials": [
                {
                    "lambda": trial.strength,
                    "within": trial.within,
                    "score": vars(trial.score),
                    "watched": [vars(score) for score in trial.watched],
                }
                for trial in self.trials
            ],
        }


def search_lambda(
    run: Callable[[float | None], tuple[Score, Score, Sequence[Score]]],
    distance: Callable[[], float],
    tolerance: float,
    progress: Progress,
) -> Search:
    """Look for the largest lambda whose run stays within the tolerance of the plain one.

    Args:
        run: Makes a short run with a lambda, or plainly for None, and returns the held-out score before and after, and
            the scores of the watched domains.
        distance: Returns the anchors' quadratic at lambda 1, for the weights of the last run.
        tolerance: Of the plain run's accuracy; of its gain in loss, where nothing is right or wrong.
        progress: Told of every run.
    """
    before, plain, watched = run(None)
    trials = [Trial(None, plain, True, tuple(watched))]
    progress.note(f"lambda auto: plainly the new domain gets to {plain.main}{_beside(watched)}")
    gained, cost = before.loss - plain.loss, distance()
    strength = _FIRST * gained / cost if gained > 0 and cost > 0 and math.isfinite(gained / cost) else 1.0
    low, high = None, None  # the largest within the tolerance, and the smallest beyond it
    for _ in range(RUNS):
        _, score, watched = run(strength)
        within = _within(score, plain, before, tolerance)
        trials.append(Trial(strength, score, within, tuple(watched)))
        progress.note(
            f"lambda auto: {strength:.3g} gets to {score.main}, {'within' if within else 'beyond'} {tolerance:.1%} of "
            f"that{_beside(watched)}"
        )
        low, high = (strength, high) if within else (low, strength)
        if low is not None and high is not None:
            strength = math.sqrt(low * high)
        else:
            strength = low * _FACTOR if low is not None else strength / _FACTOR
    if low is None:
        weakest = min(trial.strength for trial in trials if trial.strength is not None)
        progress.note(
            f"lambda auto: no lambda that was tried stays within {tolerance:.1%}; the weakest, {weakest:.3g}, is "
            "taken. Name a smaller one, or a larger --tolerance"
        )
        return Search(weakest, False, tuple(trials))
    progress.note(f"lambda auto: {low:.3g}, the largest of {RUNS} within the tolerance")
    return Search(low, True, tuple(trials))


def split(domain: Domain, seed: int) -> tuple[Domain, Domain]:
    """Hold samples out of a domain: return what is trained on, and what is chosen by.

    Raises:
        UsageError: if its samples cannot be had by number, or are too few.
    """
    size = domain.size or 0
    held = min(int(size * _HELD_OUT), _MOST)
    if not domain.indexable or held < 1:
        raise UsageError(
            f"{domain.name} has no samples by number, or fewer than 10, so none can be held out to choose a lambda by; "
            "give a number to --lambda"
        )
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return domain.subset(sorted(order[held:])), replace(domain.subset(sorted(order[:held])), name="held out")


def _within(score: Score, plain: Score, before: Score, tolerance: float) -> bool:
    if score.accuracy is not None and plain.accuracy is not None:
        return score.accuracy >= (1 - tolerance) * plain.accuracy
    return score.loss <= plain.loss + tolerance * max(before.loss - plain.loss, 0.0)


def _beside(watched: Sequence[Score]) -> str:
    return f" ({', '.join(f'{score.domain} {score.main}' for score in watched)})" if watched else ""
