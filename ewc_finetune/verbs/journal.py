"""What happens in a run of `finetune`: its log, the scores of the watched domains, the last good state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ewc_finetune.anchor import cpu_copy
from ewc_finetune.checkpoint.checkpoint import Record
from ewc_finetune.checkpoint.state_dict import save_state_dict
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.layout import Layout
from ewc_finetune.likelihood import Likelihood
from ewc_finetune.progress import Progress
from ewc_finetune.runs import RunFolder
from ewc_finetune.verbs.evaluate import Score, score


class Journal:
    """Keeps what happens in a run, in memory and in the run folder where there is one.

    Attributes:
        history: The lines of the log so far.
        scores: The latest scores of the watched domains.
        dtypes: What half-precision tensors are written as while they are trained in float32.
        kept: Copy of the last good state, for a module that belongs to the caller.
        undo: Puts back what was changed of the module itself, as long as no epoch is done.
    """

    def __init__(
        self,
        model: nn.Module,
        watched: Sequence[tuple[Domain, Layout]],
        likelihood: Likelihood,
        batch_size: int,
        device: torch.device,
        record: Record,
        folder: RunFolder | None,
        keep: bool,
        progress: Progress,
        undo: Callable[[], None],
    ) -> None:
        self.model = model
        self.watched = watched
        self.likelihood = likelihood
        self.batch_size = batch_size
        self.device = device
        self.record = record
        self.folder = folder
        self.progress = progress
        self.undo: Callable[[], None] | None = undo
        self.dtypes: dict[str, torch.dtype] = {}
        self.kept = cpu_copy(model.state_dict()) if keep else None
        self.history: list[dict[str, Any]] = []
        self.scores: list[Score] = []

    def log(self, line: dict[str, Any]) -> None:
        """Take one line of the log."""
        self.history.append(line)
        if self.folder is not None:
            self.folder.log(line)

    def score(self, epoch: int, step: int) -> list[Score]:
        """Score every watched domain, now."""
        self.scores = [
            score(self.model, watch, layout, watch.likelihood(self.likelihood), self.batch_size, self.device)
            for watch, layout in self.watched
        ]
        self.log({"step": step, "epoch": epoch, "scores": {s.domain: asdict(s) for s in self.scores}})
        if self.scores:
            self.progress.note(f"epoch {epoch}: " + ", ".join(f"{s.domain} {s.main}" for s in self.scores))
        return self.scores

    def epoch_done(self, epoch: int, step: int) -> None:
        """Score the domains and keep the state, which is known to be good."""
        self.undo = None
        self.score(epoch, step)
        if self.folder is not None:
            save_state_dict(self.folder.last, self.model, self.record, self.dtypes)
        if self.kept is not None:
            self.kept = cpu_copy(self.model.state_dict())

    def stop(self, error: BaseException) -> None:
        """Close a run that ends early: put a caller's module back to its last good state, say what is left."""
        if self.kept is not None:
            self.model.load_state_dict(self.kept)
            self.model.zero_grad(set_to_none=True)
            self.model.eval()
        if self.undo is not None:
            self.undo()
        if self.folder is None:
            return
        self.folder.stop(f"failed: {error}" if isinstance(error, Exception) else "interrupted")
        if self.folder.last.exists():
            self.progress.note(f"the state after the last whole epoch is kept: {self.folder.last}")
