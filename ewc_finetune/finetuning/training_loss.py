"""Whether a run did what training is for: the loss that it trained on, at its beginning and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The first loss is that of one batch, and may be off by which batch that was: by this share of it,
_RELATIVE_SLACK = 0.1
# and by so many nats beside.
_ABSOLUTE_SLACK = 0.05


@dataclass(frozen=True)
class TrainingLoss:
    """The mean task loss of a run's own batches, in nats, without the penalty.

    Attributes:
        began: At the first step, before it was taken.
        ended: The mean training loss of the last quarter of the log.
        worse: Whether the end is worse by more than batches differ: a tenth and 0.05 nats.
    """

    began: float
    ended: float
    worse: bool


def training_loss(history: Sequence[Mapping[str, Any]]) -> TrainingLoss | None:
    """Return how the loss went by the lines of the log; None if no step was taken."""
    losses = [float(line["loss"]) for line in history if "loss" in line]
    if not losses:
        return None
    last = losses[-max(1, len(losses) // 4) :]
    began, ended = losses[0], sum(last) / len(last)
    return TrainingLoss(began, ended, ended - began > _RELATIVE_SLACK * abs(began) + _ABSOLUTE_SLACK)


def warning_of(loss: TrainingLoss, kept: int, last: int, held: bool) -> str:
    """Say that a run ended worse than it began, what became of it, and what to do.

    Args:
        loss: The training loss of the run.
        kept: The step of the state that it ends with.
        last: The last step of the run.
        held: Whether a penalty had a part in it.
    """
    best = f"What is kept is the state of step {kept:,}, the best by its score"
    this = "The model is that of the last step all the same; --keep best keeps the best state, the start among them"
    return (
        f"warning: the training loss ended worse than it began: {loss.began:.4g} at the first step, {loss.ended:.4g} "
        f"in the end. {best if kept != last else this}. Try a lower --lr{' or a lower --lambda' if held else ''}"
    )
