"""What happens in a run of `finetune`: its log, the scores of the watched domains, the states that are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn

from ewc_finetune.checkpoint.checkpoint import Record
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.errors import RetentionError, StorageError
from ewc_finetune.evaluation.bound_domain import BoundDomain
from ewc_finetune.evaluation.probe import Retention, least_unchanged
from ewc_finetune.evaluation.retention import Meter
from ewc_finetune.evaluation.score import Score, score
from ewc_finetune.finetuning.best_state import Selection
from ewc_finetune.modules.finite import cpu_copy
from ewc_finetune.progress import Progress
from ewc_finetune.runs.folder import RunFolder

# Measuring a probe while the model trains may take this share of the training's own time, where going through the model
# forwards takes a third of a step.
_METERING = 0.05 * 3


class Sink(Protocol):
    """Where else the log goes."""

    def log(self, line: dict[str, Any]) -> None:
        """Take one line."""


class Journal:
    """Keeps what happens in a run, in memory and in the run folder where there is one.

    Attributes:
        history: The lines of the log so far.
        before: Scores of the watched domains before the first step.
        scores: Their latest ones.
        retention: The latest of the probes.
        dtypes: What half-precision tensors are written as while they are trained in float32.
        seconds: That earlier parts of the run took.
        last: The step of the last evaluation.
        step: That of the state that the model has in the end.
        start_weights: The parameters before the first step, on the CPU, if they will be asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        watched: Sequence[BoundDomain],
        batch_size: int,
        device: torch.device,
        record: Record,
        folder: RunFolder | None,
        selection: Selection | None,
        meters: Sequence[Meter],
        retain: float | None,
        sinks: Sequence[Sink],
        keep: bool,
        progress: Progress,
        undo: Callable[[], None],
    ) -> None:
        self.model = model
        self.watched = watched
        self.batch_size = batch_size
        self.device = device
        self.record = record
        self.folder = folder
        self.selection = selection
        self.meters = meters
        self.retain = retain
        self.sinks = sinks
        self.progress = progress
        self.dtypes: dict[str, torch.dtype] = {}
        self.history: list[dict[str, Any]] = []
        self.before: list[Score] = []
        self.scores: list[Score] = []
        self.retention: list[Retention] = []
        self.seconds = 0.0
        self.step = self.last = 0
        self.start_weights = cpu_copy(dict(model.named_parameters())) if folder is not None else {}
        self._undo: Callable[[], None] | None = undo  # of what was changed of the module itself
        self._kept = cpu_copy(model.state_dict()) if keep else None  # for a module that belongs to the caller
        self._best: dict[str, torch.Tensor] | None = None
        self._best_scores: list[Score] = []
        # So many steps lie between two readings of the probes, but for those of evaluations.
        self._spacing = sum(meter.probe.samples for meter in meters) / (_METERING * batch_size / 2)
        self._started = time.perf_counter()

    def start(self) -> None:
        """Score the domains before the first step, at a state which may be the best."""
        self.before = self.score(0, 0)
        self.measure(0, 0)
        self._select(0)
        self._started = time.perf_counter()

    def load_state(self, state: dict[str, Any], history: list[dict[str, Any]]) -> None:
        """Go on from where a run was stopped."""
        self._undo = None
        self.step = self.last = state["step"]
        self.history = history
        self.seconds = state["seconds"]
        scored = [line["scores"] for line in history if "scores" in line]
        self.before, self.scores = ([Score(**found) for found in line.values()] for line in (scored[0], scored[-1]))
        measured = [line["retention"] for line in history if "retention" in line]
        self.retention = [Retention(**found) for found in measured[-1]] if measured else []
        if self.selection is not None:
            self.selection.load_state(state["selection"])
            self._best_scores = [Score(**found) for found in state["best_scores"]]
            if self.folder is not None and not self.folder.best(self.selection.step).exists():
                raise StorageError(
                    f"{self.folder.best(self.selection.step)}, the best state of the run, is gone; put it back, or "
                    "start the run again"
                )
        self._started = time.perf_counter()

    def log(self, line: dict[str, Any]) -> None:
        """Take one line of the log."""
        self.history.append(line)
        if self.folder is not None:
            self.folder.log(line)
        for sink in self.sinks:
            sink.log(line)
        if "loss" in line:
            told = ", ".join(f"{name} {line[name]:.4g}" for name in ("loss", "penalty", "lr"))
            self.progress.detail(f"step {line['step']:,}: {told}")
            if self.meters and line["step"] - self._measured() >= self._spacing:
                self.measure(line["epoch"], line["step"])

    def score(self, epoch: int, step: int) -> list[Score]:
        """Score every watched domain, and log it."""
        self._score()
        self.log({"step": step, "epoch": epoch, "scores": {s.domain: asdict(s) for s in self.scores}})
        if self.scores:
            scores = ", ".join(f"{s.domain} {s.main}" for s in self.scores)
            self.progress.note(f"step {step:,} (epoch {epoch}): {scores}")
        return self.scores

    def look_again(self) -> None:
        """Score every watched domain and measure every probe for weights that were rounded since."""
        self._score()
        self.retention = [meter.read(self.model, self.device, self.batch_size) for meter in self.meters]

    def measure(self, epoch: int, step: int) -> list[Retention]:
        """Measure what the model has kept of the answers in the probes, now."""
        if self.meters:
            self.retention = [meter.read(self.model, self.device, self.batch_size) for meter in self.meters]
            self.log({"step": step, "epoch": epoch, "retention": [asdict(found) for found in self.retention]})
            self.progress.note(
                f"step {step:,}: " + ", ".join(f"probe of {found.data} {found.main}" for found in self.retention)
            )
        return self.retention

    def evaluate(self, epoch: int, step: int, state: Callable[[], dict[str, Any]]) -> bool:
        """Score the domains and keep the state, which is known to be good; see `Observer`."""
        self.score(epoch, step)
        if self._measured() != step:
            self.measure(epoch, step)
        self._check_falling(step)
        self._undo = None
        self.step = self.last = step
        go_on = self._select(step)
        if self.folder is not None:
            save_state_dict(self.folder.last, self.model, self.record, self.dtypes)
            self.folder.save_state({"training": state(), "journal": self._state()})
            if self.selection is not None:
                self.folder.keep_best(self.selection.step)
        if self._kept is not None and not self._lost():
            self._kept = cpu_copy(self.model.state_dict())
        return go_on

    def choose(self) -> None:
        """Have the model in its best state, if that is not the last one."""
        if self.selection is None or self.selection.step == self.last:
            return
        if self.folder is not None:
            self._best = torch.load(self.folder.best(self.selection.step), weights_only=True)
        if self._best is not None:
            self.model.load_state_dict(self._best)
        self.scores, self.step = self._best_scores, self.selection.step
        self.retention = [meter.read(self.model, self.device, self.batch_size) for meter in self.meters]
        if self.step == 0:
            self.progress.note("no evaluation was better than the one before the first step: the start is kept")
        else:
            self.progress.note(f"the best state is that of step {self.step:,}, which is kept")

    @property
    def exhausted(self) -> bool:
        """Whether the run was stopped early, and is not to go on."""
        return self.selection is not None and self.selection.exhausted

    def stop(self) -> None:
        """Put a caller's module back to its last good state."""
        if self._kept is not None:
            self.model.load_state_dict(self._kept)
            self.model.zero_grad(set_to_none=True)
            self.model.eval()
        if self._undo is not None:
            self._undo()

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
                f"{lost[0].data} in {lost[0].anchor}, and {self.retain:.1%} are to be kept. Use a larger --lambda "
                "(auto looks for one), or a smaller --retain"
            )

    def _score(self) -> None:
        self.scores = [score(self.model, bound, self.batch_size, self.device) for bound in self.watched]

    def _measured(self) -> int:
        """Return the step at which the probes were last measured."""
        return next((int(line["step"]) for line in reversed(self.history) if "retention" in line), -1)

    def _check_falling(self, step: int) -> None:
        """Stop a run that has lost more than it may, and has found no more of it for three evaluations.

        What the first steps lose may come back, for the penalty only pulls once the weights have moved.
        """
        evaluated = {line["step"] for line in self.history if "scores" in line} - {0}
        readings = [line for line in self.history if "retention" in line and line["step"] in evaluated][-3:]
        shares = [least_unchanged([Retention(**found) for found in line["retention"]]) or 0.0 for line in readings]
        if len(shares) == 3 and shares == sorted(shares, reverse=True):
            self.check_retention(step)

    def _lost(self) -> list[Retention]:
        """Return the readings of the probes of which less is kept than must be."""
        wanted = self.retain or 0.0
        return [found for found in self.retention if found.unchanged is not None and found.unchanged < wanted]

    def _select(self, step: int) -> bool:
        """Keep the state if it is the best so far, and return whether to go on."""
        if self.selection is None:
            return True
        if self.selection.take(self.scores, step):
            self._best_scores = self.scores
            if self.folder is not None:
                save_state_dict(self.folder.best(step), self.model, self.record, self.dtypes)
            else:
                self._best = cpu_copy(self.model.state_dict())
        if self.selection.exhausted:
            self.progress.note(
                f"stopping early, after step {step:,}: {self.selection.patience} evaluations were no better than that "
                f"of step {self.selection.step:,}"
            )
            return False
        return True

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.last,
            "seconds": self.elapsed(),
            "selection": None if self.selection is None else self.selection.state(),
            "best_scores": [asdict(found) for found in self._best_scores],
        }
