"""What happens in a run: its log, the readings of its model, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ewc_finetune.errors import RetentionError, counted
from ewc_finetune.evaluation.probe import Retention, least_unchanged
from ewc_finetune.evaluation.score import Score
from ewc_finetune.finetuning.readings import Readings
from ewc_finetune.finetuning.run_checkpoints import RunCheckpoints
from ewc_finetune.progress import Progress


class Sink(Protocol):
    """Where the log goes."""

    def log(self, line: dict[str, Any]) -> None:
        """Take one line."""


class RunObserver:
    """Logs a run, and decides at each evaluation what is kept and whether it goes on; see `Observer`.

    Args:
        readings: Reads scores and retention off the model.
        checkpoints: The states that are kept.
        sinks: Where the log goes, beside `history`.
        retain: The share of the answers to the probes that must stay, if any.
        progress: Is told what happens.
        advice: What helps where less than that stays.

    Attributes:
        history: The lines of the log so far.
        before: Scores of the watched domains before the first step.
        seconds: How long the run took before it was resumed.
    """

    def __init__(
        self,
        readings: Readings,
        checkpoints: RunCheckpoints,
        sinks: Sequence[Sink],
        retain: float | None,
        progress: Progress,
        advice: str = "",
    ) -> None:
        self.readings, self.checkpoints, self.sinks = readings, checkpoints, sinks
        self.retain, self.progress, self.advice = retain, progress, advice
        self.history: list[dict[str, Any]] = []
        self.before: list[Score] = []
        self.seconds = 0.0
        self._started = time.perf_counter()

    def start(self) -> None:
        """Score the domains before the first step, at a state which may be the best."""
        self.before = self._score(0, 0)
        self._measure(0, 0)
        self.checkpoints.select(0, self.before)
        self._started = time.perf_counter()

    def load_state(self, state: dict[str, Any], history: list[dict[str, Any]]) -> None:
        """Go on from where a run was stopped."""
        self.checkpoints.load_state(state)
        self.history = history
        self.seconds = state["seconds"]
        scored = [line["scores"] for line in history if "scores" in line]
        self.before = [Score(**values) for values in scored[0].values()]
        self.readings.scores = [Score(**values) for values in scored[-1].values()]
        measured = [line["retention"] for line in history if "retention" in line]
        self.readings.retention = [Retention(**values) for values in measured[-1]] if measured else []
        self._started = time.perf_counter()

    def log(self, line: dict[str, Any]) -> None:
        """Take one line of the log."""
        self.history.append(line)
        for sink in self.sinks:
            sink.log(line)
        if "loss" in line:
            told = ", ".join(
                f"{name} {line[name]:.4g}" for name in ("loss", "penalty", "rehearsed", "lr") if name in line
            )
            self.progress.detail(f"step {line['step']:,}: {told}")
            if self.readings.meters and line["step"] - self._measured() >= self.readings.spacing:
                self._measure(line["epoch"], line["step"])

    def evaluate(self, epoch: int, step: int, state: Callable[[], dict[str, Any]]) -> bool:
        """Score the domains and keep the state, which is known to be good; see `Observer`."""
        scores = self._score(epoch, step)
        if self._measured() != step:
            self._measure(epoch, step)
        self._check_falling(step)
        go_on = self.checkpoints.reach(step, scores)
        if not go_on and (selection := self.checkpoints.selection) is not None:
            self.progress.note(
                f"stopping early, after step {step:,}: {counted(selection.patience or 0, 'evaluation')} in a row no "
                f"better than that of step {selection.step:,}"
            )
        self.checkpoints.save(state, self.elapsed())
        if not self._lost():
            self.checkpoints.hold()
        return go_on

    def look_again(self) -> None:
        """Score every watched domain and measure every probe for weights that were rounded since."""
        self.readings.score()
        self.readings.measure()

    def choose(self) -> None:
        """Have the model in its best state, if that is not the last one."""
        scores = self.checkpoints.choose()
        if scores is None:
            return
        self.readings.scores = scores
        self.readings.measure()
        if self.checkpoints.step == 0:
            self.progress.note("no evaluation was better than the one before the first step: the start is kept")
        else:
            self.progress.note(f"the best state is that of step {self.checkpoints.step:,}, which is kept")

    def elapsed(self) -> float:
        """Return the seconds that the run has taken, its evaluations included."""
        return self.seconds + time.perf_counter() - self._started

    def check_retention(self, step: int) -> None:
        """Refuse a state in which more is lost than may be.

        Raises:
            RetentionError: saying what is kept, and what was to be.
        """
        lost = self._lost()
        if lost:
            raise RetentionError(
                f"after step {step:,} the model gives {lost[0].unchanged:.1%} of its old answers to the probe of "
                f"{lost[0].data} in {lost[0].anchor}, and {self.retain:.1%} are to be kept. {self.advice}"
            )

    def _score(self, epoch: int, step: int) -> list[Score]:
        """Score every watched domain, and log it."""
        scores = self.readings.score()
        self.log({"step": step, "epoch": epoch, "scores": {s.domain: asdict(s) for s in scores}})
        if scores:
            told = ", ".join(f"{s.domain} {s.main}" for s in scores)
            self.progress.note(f"step {step:,} (epoch {epoch}): {told}")
        return scores

    def _measure(self, epoch: int, step: int) -> None:
        """Measure what the model has kept of the answers in the probes, and log it."""
        if not self.readings.meters:
            return
        retention = self.readings.measure()
        self.log({"step": step, "epoch": epoch, "retention": [asdict(kept) for kept in retention]})
        told = ", ".join(f"probe of {kept.data} {kept.main}" for kept in retention)
        self.progress.note(f"step {step:,}: {told}")

    def _measured(self) -> int:
        """Return the step at which the probes were last measured."""
        return next((int(line["step"]) for line in reversed(self.history) if "retention" in line), -1)

    def _check_falling(self, step: int) -> None:
        """Stop a run that has lost more than it may, and has found no more of it for three evaluations.

        What the first steps lose may come back, for the penalty only pulls once the weights have moved.
        """
        evaluated = {line["step"] for line in self.history if "scores" in line} - {0}
        readings = [line for line in self.history if "retention" in line and line["step"] in evaluated][-3:]
        shares = [least_unchanged([Retention(**values) for values in line["retention"]]) or 0.0 for line in readings]
        if len(shares) == 3 and shares == sorted(shares, reverse=True):
            self.check_retention(step)

    def _lost(self) -> list[Retention]:
        """Return the readings of the probes of which less is kept than must be."""
        wanted = self.retain or 0.0
        return [kept for kept in self.readings.retention if kept.unchanged is not None and kept.unchanged < wanted]
