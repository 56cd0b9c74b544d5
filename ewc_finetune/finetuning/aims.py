"""What a search for lambda looks for, and which lambda it therefore tries next."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.probe_tensors import records_of
from ewc_finetune.errors import UsageError
from ewc_finetune.evaluation.probe import Retention, least_unchanged
from ewc_finetune.evaluation.score import Score
from ewc_finetune.finetuning.best_state import merit
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.specs.options import is_number

# The first lambda is multiplied or divided by this factor until the one looked for lies between two that were tried.
_FACTOR = 4.0
# What makes a meter finer.
_MORE_INPUTS = "anchors with more inputs in the probe (consolidate --probe), of which each counts for less"


@dataclass(frozen=True)
class Trial:
    """One short run.

    Attributes:
        strength: The lambda, of which each anchor has its own multiple; None for the plain run.
        before: Score on the held-out samples of the new domain before it.
        score: The score of the held-out samples after the run.
        watched: On the domains that are evaluated.
        retention: What the run kept of the anchors' probes.
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
            retention=tuple(Retention(**kept) for kept in known.pop("retention")),
            **known,
        )


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

    def gives_hope(self, held: Sequence[Trial]) -> bool:
        """Whether runs beyond `RUNS` are worth their time: another may do where none of these does, or do better."""
        return False

    def refusal(self, winner: Trial) -> str | None:
        """Return why the run is not to be made, for it would be refused in the end, and what would help."""
        return None


class _Threshold(Aim):
    """A share that may not be fallen below, which is so up to some lambda or from some lambda on."""

    upwards: bool  # whether larger lambdas are wanted: those that are small enough are good enough

    def next(self, held: Sequence[Trial]) -> float:
        """Go on by factors until both sides are known, then halve what is between them, in logarithms."""
        good = self._edge(held, True)
        if good is None:
            return self._towards_good(held)
        # What a run keeps need not grow with lambda, so good lambdas may lie on both sides of a good one.
        beyond = [_strength(t) for t in held if not t.within and (_strength(t) > good) is self.upwards]
        if not beyond:
            return good * _FACTOR if self.upwards else good / _FACTOR
        return math.sqrt(good * (min if self.upwards else max)(beyond))

    def _towards_good(self, held: Sequence[Trial]) -> float:
        """Return the lambda to try while none is good enough."""
        nearest = self._edge(held, False) or 1.0
        return nearest / _FACTOR if self.upwards else nearest * _FACTOR

    def winner(self, held: Sequence[Trial]) -> Trial:
        """Return the one at the edge of those that are good enough, else of those that are not."""
        wanted = self._edge(held, True)
        wanted = self._edge(held, False) if wanted is None else wanted
        return next(trial for trial in held if trial.strength == wanted)

    def _edge(self, held: Sequence[Trial], within: bool) -> float | None:
        """Return the lambda of the trial that is nearest to the others' side."""
        strengths = [trial.strength or 0.0 for trial in held if trial.within is within]
        return (max if self.upwards is within else min)(strengths, default=None)


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
        advice: What else could be done where no lambda keeps it, in words.
    """

    upwards = False

    def __init__(self, share: float, advice: Sequence[str] = ()) -> None:
        self.share, self.advice = share, tuple(advice)
        # A longer run goes further than the short ones do: a quarter of what may be lost is left to it.
        self.wanted = share + 0.25 * (1 - share)

    def __str__(self) -> str:
        return f"the smallest that keeps {self.wanted:.1%} of the answers to the probes"

    def judge(self, trial: Trial, earlier: Sequence[Trial]) -> Trial:
        """See `Aim`."""
        return replace(trial, within=_kept(trial) >= self.wanted)

    def winner(self, held: Sequence[Trial]) -> Trial:
        """Return the smallest that keeps enough, else the one that keeps most: more lambda may keep less."""
        if any(trial.within for trial in held):
            return super().winner(held)
        return max(held, key=lambda trial: (_kept(trial), -_strength(trial)))

    def gives_hope(self, held: Sequence[Trial]) -> bool:
        """See `Aim`; where every lambda keeps the same, so will the next one."""
        shares = [_kept(trial) for trial in held]
        return min(shares) < max(shares) < self.share or self._is_far_off(held)

    def _is_far_off(self, held: Sequence[Trial]) -> bool:
        """Whether the smallest that keeps enough is a whole factor above the largest that does not."""
        good = self._edge(held, True) or 0.0
        below = [_strength(trial) for trial in held if not trial.within and _strength(trial) < good]
        return bool(below) and good > 1.001 * math.sqrt(_FACTOR) * max(below)

    def refusal(self, winner: Trial) -> str | None:
        """See `Aim`."""
        if _kept(winner) >= self.share:
            return None
        return (
            f"no lambda that was tried keeps {self.share:.1%} of the answers to the probes: the best, "
            f"{_strength(winner):.3g}, keeps {_kept(winner):.1%} of them in a short run. So the run was not started. "
            f"What would help: {'; '.join(['a lower --retain', *self.advice])}"
        )

    def _towards_good(self, held: Sequence[Trial]) -> float:
        return _around(max(held, key=lambda trial: (_kept(trial), _strength(trial))), held, _kept)


class Best(Aim):
    """The lambda with the best mean score over the new domain's held-out samples and the domains that are named."""

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
        return _around(self.winner(held), held, self._value)

    def winner(self, held: Sequence[Trial]) -> Trial:
        """See `Aim`."""
        return max(held, key=self._value)

    def _value(self, trial: Trial) -> float:
        return merit([trial.score, *trial.watched], {trial.score.domain, *self.domains})


def _strength(trial: Trial) -> float:
    return trial.strength or 0.0


def _kept(trial: Trial) -> float:
    return least_unchanged(trial.retention) or 0.0


def _around(best: Trial, held: Sequence[Trial], value: Callable[[Trial], float]) -> float:
    """Go on by factors until the best is between two others, then halve its better side, in logarithms."""
    strength = _strength(best) or 1.0
    below = [trial for trial in held if _strength(trial) < strength]
    above = [trial for trial in held if _strength(trial) > strength]
    if not above:
        return strength * _FACTOR
    if not below:
        return strength / _FACTOR
    sides = max(below, key=_strength), min(above, key=_strength)
    return math.sqrt(strength * _strength(max(sides, key=value)))


def aim_of(options: FinetuneOptions, chosen: Sequence[str], anchors: Sequence[Anchor]) -> Aim:
    """Return what a search is to look for.

    Args:
        options: The options of the fine-tune that a lambda is looked for.
        chosen: Names of the domains to select on.
        anchors: The anchors that hold it.

    Raises:
        UsageError: if two aims are asked for, or a share that is none or that no probe can tell.
    """
    tolerance, share = options.tolerance, options.retain
    if not is_number(tolerance) or not 0 < tolerance < 1:
        raise UsageError(f"tolerance is {tolerance}; expected a number, more than 0 and less than 1")
    check_retain(share, anchors)
    if share is not None and chosen and options.lambdas == "auto":
        raise UsageError("--lambda auto goes by --retain or by --select-on, not by both; leave one of them out")
    if share is not None:
        return Retaining(share, _holding_better(anchors, options))
    return Best(chosen) if chosen else Within(tolerance)


def check_retain(retain: float | None, anchors: Sequence[Anchor]) -> None:
    """Check the share of answers to keep, and that there are answers in the anchors.

    Raises:
        UsageError: saying what is wrong.
    """
    if retain is None:
        return
    if not is_number(retain) or not 0 < retain <= 1:
        raise UsageError(f"retain is {retain}; expected a share of answers, more than 0 and up to 1")
    if not any(probe.get("likelihood") != "gaussian" for anchor in anchors for probe in records_of(anchor.probes)):
        raise UsageError(
            "--retain goes by the answers to the probes in the anchors, and there is none in them (regressions have no "
            "answers to compare); ewc-ft consolidate --probe N keeps one while the old data is at hand"
        )


def what_keeps_more(options: FinetuneOptions, strength: float | None) -> str:
    """Say what helps where a run has lost more than `--retain` allows; nothing that it did already.

    Args:
        options: The options of the run.
        strength: The lambda that was found, if it was looked for.
    """
    beside = "a larger --rehearse-weight" if options.rehearses else "--rehearse probes"
    if strength is None:
        return f"Use a larger --lambda (auto looks for one), {beside}, or a smaller --retain"
    return (
        f"Its lambda, {strength:.3g}, is what auto found by shorter runs, and they kept enough. What would help: "
        f"a larger number for --lambda; {beside}; {_MORE_INPUTS}; a smaller --retain"
    )


def _holding_better(anchors: Sequence[Anchor], options: FinetuneOptions) -> list[str]:
    """Say what keeps more of what these anchors hold than any lambda does."""
    advice = [_MORE_INPUTS, "a larger --rehearse-weight" if options.rehearses else "--rehearse probes"]
    if any(anchor.provenance.curvature != "kfac" for anchor in anchors):
        advice.append("anchors of K-FAC (consolidate --curvature kfac)")
    if options.penalty_form == "gradient":
        advice.append("--penalty-form proximal, whose steps are exact at any lambda")
    return advice
