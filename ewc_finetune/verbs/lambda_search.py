"""`--lambda auto`: looking for the right strength of the penalty with a few short runs.

The procedure of De Lange et al. 2021 ("A continual learning survey: defying forgetting in classification tasks",
TPAMI): a plain run shows what plasticity is to be had, then the largest lambda is looked for whose run stays within a
tolerance of it. The new domain alone decides, on samples that are held out; the old data is not needed. Where theirs
halves lambda from a maximum that is known to be stable, this starts from the lambda at which the penalty of the plain
run's weights is as much as that run gained, and goes from there by factors and then by bisection.

Where there is more to go by, there are two other aims: the smallest lambda that keeps a share of the answers to the
anchors' probes, and the one with the best mean score over domains that the user names.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import UsageError
from ewc_finetune.probe import Retention, least_unchanged
from ewc_finetune.progress import Progress
from ewc_finetune.verbs.evaluate import Score
from ewc_finetune.verbs.selection import merit

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
        before: Score on the held-out samples of the new domain before it.
        score: The same after it.
        watched: On the domains that are evaluated.
        retention: Of the anchors' probes.
        distance: The anchors' quadratic at lambda 1, for the weights that it ended with.
        within: Whether it is good enough, or for the best mean score, better than all before it.
    """

    strength: float | None
    before: Score
    score: Score
    watched: tuple[Score, ...] = ()
    retention: tuple[Retention, ...] = ()
    distance: float = 0.0
    within: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        document = asdict(self)
        return {"lambda": document.pop("strength"), **document}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Trial:
        """Read what `to_json` gave."""
        known = dict(document)
        return cls(
            strength=known.pop("lambda"),
            before=Score(**known.pop("before")),
            score=Score(**known.pop("score")),
            watched=tuple(Score(**score) for score in known.pop("watched")),
            retention=tuple(Retention(**found) for found in known.pop("retention")),
            **known,
        )


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        strength: The lambda that won.
        met: Whether its run was good enough; else it is the nearest to it that was tried.
        aim: What was looked for, in words.
        trials: All runs, in the order in which they were made.
    """

    strength: float
    met: bool
    aim: str
    trials: tuple[Trial, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        trials = [trial.to_json() for trial in self.trials]
        return {"lambda": self.strength, "met": self.met, "aim": self.aim, "trials": trials}


class Aim(ABC):
    """What is looked for."""

    @abstractmethod
    def __str__(self) -> str:
        """Say it in words, for behind `lambda auto:`."""

    @abstractmethod
    def judge(self, trial: Trial, earlier: Sequence[Trial]) -> Trial:
        """Return the trial with `within` set, knowing those before it, of which the first is the plain run."""

    @abstractmethod
    def next(self, held: Sequence[Trial]) -> float:
        """Return the lambda to try after these held runs."""

    def verdict(self, trial: Trial) -> str:
        """Say what is to be said of a trial behind its results."""
        return "" if trial.within else ": not enough"

    @abstractmethod
    def winner(self, held: Sequence[Trial]) -> Trial:
        """Return the one that won; one that is not `within` only if none is."""


class _Threshold(Aim):
    """A share that may not be fallen below, which is so up to some lambda or from some lambda on."""

    upwards: bool  # whether larger lambdas are wanted: those that are small enough are good enough

    def next(self, held: Sequence[Trial]) -> float:
        """Go on by factors until both sides are known, then halve what is between them, in logarithms."""
        good, bad = self._edge(held, True), self._edge(held, False)
        if good is not None and bad is not None:
            return math.sqrt(good * bad)
        if good is not None:
            return good * _FACTOR if self.upwards else good / _FACTOR
        nearest = bad if bad is not None else 1.0
        return nearest / _FACTOR if self.upwards else nearest * _FACTOR

    def winner(self, held: Sequence[Trial]) -> Trial:
        """Return the one at the edge of those that are good enough, else of those that are not."""
        wanted = self._edge(held, True)
        wanted = self._edge(held, False) if wanted is None else wanted
        return next(trial for trial in held if trial.strength == wanted)

    def _edge(self, held: Sequence[Trial], within: bool) -> float | None:
        """Return the lambda of the trial that is nearest to the others' side."""
        found = [trial.strength or 0.0 for trial in held if trial.within is within]
        return (max if self.upwards is within else min)(found, default=None)


class Within(_Threshold):
    """The largest lambda that costs the new domain no more than a tolerance.

    Args:
        tolerance: Of the plain run's accuracy; of its gain in loss, where nothing is right or wrong.
    """

    upwards = True

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance

    def __str__(self) -> str:
        return f"the largest within {self.tolerance:.1%} of plain training on the new domain"

    def judge(self, trial: Trial, earlier: Sequence[Trial]) -> Trial:
        """See `Aim`."""
        plain, score = earlier[0].score, trial.score
        if score.accuracy is not None and plain.accuracy is not None:
            return replace(trial, within=score.accuracy >= (1 - self.tolerance) * plain.accuracy)
        gained = max(earlier[0].before.loss - plain.loss, 0.0)
        return replace(trial, within=score.loss <= plain.loss + self.tolerance * gained)


class Retaining(_Threshold):
    """The smallest lambda that keeps a share of the answers to every probe.

    Args:
        share: 0 to 1.
    """

    upwards = False

    def __init__(self, share: float) -> None:
        # A longer run goes further than the short ones do: a quarter of what may be lost is left to it.
        self.wanted = share + 0.25 * (1 - share)

    def __str__(self) -> str:
        return f"the smallest that keeps {self.wanted:.1%} of the answers to the probes"

    def judge(self, trial: Trial, earlier: Sequence[Trial]) -> Trial:
        """See `Aim`."""
        return replace(trial, within=(least_unchanged(trial.retention) or 0.0) >= self.wanted)


class Best(Aim):
    """The lambda with the best mean score over the new domain's held-out samples and the domains that are named.

    Args:
        domains: Their names.
    """

    def __init__(self, domains: Sequence[str]) -> None:
        self.domains = tuple(domains)

    def __str__(self) -> str:
        return f"the best mean score over the new domain and {', '.join(self.domains)}"

    def judge(self, trial: Trial, earlier: Sequence[Trial]) -> Trial:
        """See `Aim`."""
        return replace(trial, within=all(self._value(trial) > self._value(other) for other in earlier[1:]))

    def verdict(self, trial: Trial) -> str:
        """See `Aim`."""
        return ": the best so far" if trial.within else ""

    def next(self, held: Sequence[Trial]) -> float:
        """Go on by factors until the best is between two others, then halve its better side, in logarithms."""
        best = self.winner(held).strength or 1.0
        below = [trial for trial in held if (trial.strength or 0.0) < best]
        above = [trial for trial in held if (trial.strength or 0.0) > best]
        if not above:
            return best * _FACTOR
        if not below:
            return best / _FACTOR
        sides = max(below, key=_strength), min(above, key=_strength)
        return math.sqrt(best * _strength(max(sides, key=self._value)))

    def winner(self, held: Sequence[Trial]) -> Trial:
        """See `Aim`."""
        return max(held, key=self._value)

    def _value(self, trial: Trial) -> float:
        return merit([trial.score, *trial.watched], {trial.score.domain, *self.domains})


def search_lambda(run: Callable[[float | None], Trial], aim: Aim, progress: Progress) -> Search:
    """Look for a lambda with short runs: a plain one, and four that are held.

    Args:
        run: Makes a short run with a lambda, or plainly for None.
        aim: What is looked for.
        progress: Told of every run.
    """
    progress.note(f"lambda auto: looking for {aim}")
    plain = run(None)
    trials = [plain]
    progress.note(f"lambda auto: plainly the new domain gets to {_results(plain)}")
    gained = plain.before.loss - plain.score.loss
    at_cost = gained / plain.distance if gained > 0 and plain.distance > 0 else math.nan
    strength = _FIRST * at_cost if math.isfinite(at_cost) else 1.0
    for _ in range(RUNS):
        trial = aim.judge(run(strength), trials)
        trials.append(trial)
        progress.note(f"lambda auto: {strength:.3g} gets to {_results(trial)}{aim.verdict(trial)}")
        strength = aim.next(trials[1:])
    winner = aim.winner(trials[1:])
    chosen = _strength(winner)
    if winner.within or isinstance(aim, Best):
        progress.note(f"lambda auto: {chosen:.3g}, of {RUNS} that were tried {aim}")
    else:
        progress.note(
            f"lambda auto: none that was tried is {aim}; the nearest, {chosen:.3g}, is taken. Give a number to "
            "--lambda, or ask for less"
        )
    return Search(chosen, winner.within or isinstance(aim, Best), str(aim), tuple(trials))


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


def _strength(trial: Trial) -> float:
    return trial.strength or 0.0


def _results(trial: Trial) -> str:
    beside = [f"{score.domain} {score.main}" for score in trial.watched]
    beside += [f"probe of {found.data} {found.main}" for found in trial.retention]
    return trial.score.main + (f" ({', '.join(beside)})" if beside else "")
