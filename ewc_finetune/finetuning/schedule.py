"""How a fine-tune is trained: how long, how fast, in what precision, and when it is looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from ewc_finetune.choices import (
    AMPS,
    DECAYS,
    KEEPS,
    NORM_STATS,
    OPTIMIZERS,
    Amp,
    Decay,
    Keep,
    NormStats,
    OptimizerName,
)
from ewc_finetune.errors import UsageError
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import check_declared, is_number, option

if TYPE_CHECKING:
    from torch import Tensor

# Steps between two lines of the log.
_LOG_EVERY = 50
# The lines that the log of a run has at least, where that takes smaller steps.
_LEAST_LINES = 20


def _weights(text: str) -> tuple[float, ...] | str:
    if text == "balanced":
        return text
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise UsageError(f"{text!r} is neither balanced nor numbers joined by commas, one for each class") from None


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How to train.

    Each option has its help where it is declared; `Attributes` says what there is to know beside that.

    Attributes:
        epochs: Walks through the data; 0 trains nothing.
        optimizer: `sgd` (with `momentum`), `adam` or `adamw`; otherwise torch's defaults.
        weight_decay: The optimizer's, on every trained parameter; 0 unless given, for `adamw` 0.01 as in torch.
        accumulate: Batches to a step. Every sample counts alike, so n batches are as one that is n times as large, but
            for normalisation statistics that follow the new data.
        clip: Largest norm of the gradient of a step, that of the penalty in its gradient form included.
        warmup: Steps in which the learning rate rises from 0, in a straight line; below 1 a share of all steps.
        decay: What it does after that: stay `constant`, or fall in a straight line (`linear`) or by half a cosine
            (`cosine`) that would reach 0 one step after the last.
        amp: Compute in half precision where that is safe (`torch.autocast`): `bf16`, or `fp16` with its gradients
            scaled. Weights stay in float32, and so do scores.
        label_smoothing: What share of each label is spread evenly over all classes in training (Szegedy et al. 2016,
            equation 2), 0 to 1; cross-entropy alone. Scores are of the labels as they are.
        class_weights: What the loss of each class is multiplied by in training, a list with a number for each of the
            model's outputs; or `balanced`, the inverse of how often a class is a label of the new domain, with a mean
            of 1 over its samples. A batch's loss is the sum by its number of samples, whatever their weights.
        focal: Gamma of the focal loss (Lin et al. 2017, equation 4), which multiplies the loss of an answer that the
            model gives probability p by (1 - p)^gamma.
        loss: A loss of one's own in the place of the likelihood's: `package.module:function` or the function, which
            takes outputs and targets of a batch and returns a scalar, the mean over the batch. Values behind a question
            mark are its keyword arguments. The curvature, the penalty and all scores stay those of the likelihood.
        norm_stats: Whether normalisation statistics stay as they are (`frozen`) or follow the new data (`update`);
            unless given frozen, but update for fresh weights, whose statistics nothing has filled yet.
        keep: Which state is written at the end: the `last`, or the `best` of all evaluations, that before the first
            step included; the last unless given, and the best where there is `patience`.
        log_every: Steps between two lines of the log; the first step has one too. Unless given 50, and fewer in a run
            that would have less than 20 lines.

    Raises:
        UsageError: naming the option, its value and what is expected.
    """

    GROUP: ClassVar = Group.TRAINING

    epochs: int = option(4, "Walks through the data.", least=0, main=True, setting="training")
    lr: float = option(1e-4, "Learning rate.", main=True, setting="training")
    batch_size: int = option(100, "Samples at once.", least=1, main=True, setting="training")
    optimizer: OptimizerName = option("adam", "Torch's, with its own defaults.", choices=OPTIMIZERS, setting="training")
    momentum: float = option(0.9, "Of sgd.", setting="training")
    weight_decay: float | None = option(None, "The optimizer's own.", metavar="X", unless="0; of adamw 0.01")
    accumulate: int = option(1, "Batches to a step.", least=1, metavar="N")
    clip: float | None = option(None, "Largest norm of a step's gradient, the penalty's included.", metavar="X")
    warmup: float = option(0.0, "Steps in which the learning rate rises; below 1 a share of all steps.", metavar="N")
    decay: Decay = option(
        "constant", "What the learning rate does then: it falls to 0 at the end, or not.", choices=DECAYS
    )
    amp: Amp | None = option(None, "Compute in half precision where that is safe.", choices=AMPS, unless="no")
    compile: bool = option(False, "Train through torch.compile.")
    label_smoothing: float = option(
        0.0,
        "What share of each label is spread evenly over all classes in training; cross-entropy alone.",
        metavar="X",
        setting="training",
    )
    class_weights: Sequence[float] | Literal["balanced"] | None = option(
        None,
        "What the loss of each class is multiplied by in training: a number for each, or by how rare it is (balanced).",
        read=_weights,
        joined=True,
        metavar="balanced|W,W,...",
        unless="1 for each",
        setting="training",
    )
    focal: float = option(
        0.0,
        "Gamma of the focal loss, by which sure answers count for less in training.",
        metavar="X",
        setting="training",
    )
    loss: str | Callable[[Tensor, Tensor], Tensor] | None = option(
        None,
        "A loss of your own to train with, a function of outputs and targets (package.module:function).",
        read=str,
        metavar="FUNCTION",
        unless="the likelihood's",
        code="loss",
        setting="training",
    )
    norm_stats: NormStats | None = option(
        None,
        "Keep the running statistics of normalisation layers, or let them follow the new data.",
        choices=NORM_STATS,
        unless="frozen; update for fresh weights",
        setting="training",
    )
    workers: int = option(
        0, "Processes that read samples ahead, for data that is not in memory.", least=0, metavar="N", sound=True
    )
    eval_every: int | None = option(
        None, "Steps between evaluations.", least=1, metavar="N", group=Group.SCORES, unless="an epoch"
    )
    patience: int | None = option(
        None,
        "Stop early, after so many evaluations no better than the best.",
        least=1,
        metavar="N",
        group=Group.SCORES,
        unless="never",
    )
    keep: Keep | None = option(
        None,
        "The state to write in the end; the other one stays in the run folder.",
        choices=KEEPS,
        group=Group.SCORES,
        unless="last; best with --patience",
    )
    log_every: int | None = option(
        None,
        "Steps between log lines.",
        least=1,
        metavar="N",
        group=Group.SCORES,
        unless="50; fewer where there would be less than 20 lines",
        sound=True,
    )

    def __post_init__(self) -> None:
        check_declared(self, Schedule)
        for name in ("lr", "clip"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value > 0):
                raise UsageError(f"{name} is {value}; expected a finite number above 0")
        if self.compile not in (True, False):
            raise UsageError(f"compile is {self.compile!r}; expected True or False")
        for name in ("weight_decay", "warmup"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and value >= 0):
                raise UsageError(f"{name.replace('_', ' ')} is {value}; expected a finite number, 0 or above")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise UsageError(f"warmup is {self.warmup}; expected a share below 1, or a whole number of steps")
        if not (is_number(self.label_smoothing) and 0 <= self.label_smoothing <= 1):
            raise UsageError(f"label smoothing is {self.label_smoothing}; expected a share from 0 to 1")
        if not (is_number(self.focal) and self.focal >= 0):
            raise UsageError(f"focal is {self.focal}; expected gamma, a finite number, 0 or above")
        _check_weights(self.class_weights)
        if not (self.loss is None or isinstance(self.loss, str) or callable(self.loss)):
            raise UsageError(f"loss is a {type(self.loss).__name__}; expected a function, or where one is to be found")
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            raise UsageError(f"momentum is {self.momentum}; expected 0 or above, and below 1")

    @property
    def keeps_best(self) -> bool:
        """Whether the state with the best score is written at the end."""
        return self.keep == "best" or (self.keep is None and self.patience is not None)

    @property
    def varies(self) -> bool:
        """Whether the learning rate changes from step to step."""
        return self.decay != "constant" or self.warmup > 0

    @property
    def needs_total(self) -> bool:
        """Whether the learning rate depends on how many steps there will be."""
        return self.decay != "constant" or 0 < self.warmup < 1

    def count_steps(self, batches: int | None) -> int | None:
        """Return how many steps there will be for so many batches an epoch."""
        return None if batches is None else self.epochs * -(-batches // self.accumulate)

    def logged_every(self, total: int | None) -> int:
        """Return the steps between two lines of the log, of a run of so many."""
        if self.log_every is not None:
            return self.log_every
        return _LOG_EVERY if total is None else max(1, min(_LOG_EVERY, total // _LEAST_LINES))

    def rate(self, step: int, total: int | None) -> float:
        """Return the learning rate of a step, counted from 1.

        Args:
            step: Which.
            total: How many there will be, see `needs_total`.
        """
        steps = total or 1
        warmup = round(self.warmup * steps) if self.warmup < 1 else int(self.warmup)
        if step <= warmup:
            return self.lr * step / warmup
        if self.decay == "constant":
            return self.lr
        done = min(1.0, (step - 1 - warmup) / max(1, steps - warmup))
        return self.lr * (1 - done if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def _check_weights(weights: object) -> None:
    if weights is None or weights == "balanced":
        return
    numbers = weights if isinstance(weights, (list, tuple)) else ()
    if not all(is_number(weight) and weight >= 0 for weight in numbers) or not any(numbers):
        raise UsageError(
            f"class weights are {weights!r:.80}; expected balanced, or a list with a finite number, 0 or above, for "
            "each class, not all of them 0"
        )
