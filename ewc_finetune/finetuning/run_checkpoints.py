"""The states of a run that are kept: the last, the best, and the one that a caller's module goes back to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.errors import StorageError
from ewc_finetune.evaluation.score import Score
from ewc_finetune.finetuning.best_state import Selection
from ewc_finetune.modules.finite import cpu_copy
from ewc_finetune.runs.folder import RunFolder


class RunCheckpoints:
    """Keeps states of a model, in memory and in the run folder where there is one.

    Args:
        model: The model that is trained.
        metadata: What a checkpoint of it records.
        folder: The run folder.
        selection: Says which state is the best, where that is asked for.
        keep: Whether the model belongs to a caller, who gets it back as it was if the run fails.
        undo: Undoes what was changed of the module itself, until there is a state worth keeping.

    Attributes:
        dtypes: What half-precision tensors are written as while they are trained in float32.
        last: The step of the last evaluation.
        step: That of the state that the model has in the end.
        start_weights: The parameters before the first step, on the CPU, if they will be asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        metadata: ModelMetadata,
        folder: RunFolder | None,
        selection: Selection | None,
        keep: bool,
        undo: Callable[[], None],
    ) -> None:
        self.model, self.metadata, self.folder, self.selection = model, metadata, folder, selection
        self.dtypes: dict[str, torch.dtype] = {}
        self.last = self.step = 0
        self.start_weights = cpu_copy(dict(model.named_parameters())) if folder is not None else {}
        self._undo: Callable[[], None] | None = undo
        self._kept = cpu_copy(model.state_dict()) if keep else None
        self._best: dict[str, torch.Tensor] | None = None
        self._best_scores: list[Score] = []

    @property
    def exhausted(self) -> bool:
        """Whether the run was stopped early, and is not to go on."""
        return self.selection is not None and self.selection.exhausted

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from where a run was stopped.

        Raises:
            StorageError: if its best state is gone.
        """
        self._undo = None
        self.step = self.last = state["step"]
        if self.selection is None:
            return
        self.selection.load_state(state["selection"])
        self._best_scores = [Score(**values) for values in state["best_scores"]]
        if self.folder is not None and not self.folder.best(self.selection.step).exists():
            raise StorageError(
                f"{self.folder.best(self.selection.step)}, the best state of the run, is gone; put it back, or start "
                "the run again"
            )

    def reach(self, step: int, scores: Sequence[Score]) -> bool:
        """Take the state of an evaluation, which is known to be good; return whether it is worth going on from it."""
        self._undo = None
        self.step = self.last = step
        return self.select(step, scores)

    def select(self, step: int, scores: Sequence[Score]) -> bool:
        """Keep the state if it is the best so far, and return whether there is patience left."""
        if self.selection is None:
            return True
        if self.selection.take(scores, step):
            self._best_scores = list(scores)
            if self.folder is not None:
                save_state_dict(self.folder.best(step), self.model, self.metadata, self.dtypes)
            else:
                self._best = cpu_copy(self.model.state_dict())
        return not self.selection.exhausted

    def save(self, training: Callable[[], dict[str, Any]], seconds: float) -> None:
        """Write what a run goes on from, if it is stopped.

        Args:
            training: Returns the trainer's state.
            seconds: How long the run has taken.
        """
        if self.folder is None:
            return
        save_state_dict(self.folder.last, self.model, self.metadata, self.dtypes)
        journal = {
            "step": self.last,
            "seconds": seconds,
            "selection": None if self.selection is None else self.selection.state(),
            "best_scores": [asdict(score) for score in self._best_scores],
        }
        self.folder.save_state({"training": training(), "journal": journal})
        if self.selection is not None:
            self.folder.keep_best(self.selection.step)

    def hold(self) -> None:
        """Have this state be the one that a caller's module goes back to."""
        if self._kept is not None:
            self._kept = cpu_copy(self.model.state_dict())

    def choose(self) -> list[Score] | None:
        """Have the model in its best state, and return the scores of that; None if it is the last one."""
        if self.selection is None or self.selection.step == self.last:
            return None
        if self.folder is not None:
            self._best = torch.load(self.folder.best(self.selection.step), weights_only=True)
        if self._best is not None:
            self.model.load_state_dict(self._best)
        self.step = self.selection.step
        return self._best_scores

    def put_back(self) -> None:
        """Put a caller's module back to its last good state."""
        if self._kept is not None:
            self.model.load_state_dict(self._kept)
            self.model.zero_grad(set_to_none=True)
            self.model.eval()
        if self._undo is not None:
            self._undo()
