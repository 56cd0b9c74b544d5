"""The training loop: one page, read from top to bottom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ewc_finetune.anchor import check_model
from ewc_finetune.choices import NormStats, OptimizerName
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.layout import Layout, feed
from ewc_finetune.errors import DataError, NonFiniteError
from ewc_finetune.inputs import call, count
from ewc_finetune.likelihood import Likelihood
from ewc_finetune.modes import normalisation_layers, set_training
from ewc_finetune.penalty import Penalty
from ewc_finetune.progress import Bar


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    Attributes:
        epochs: Walks through the data.
        lr: Learning rate.
        batch_size: Samples a step.
        optimizer: `sgd` (with `momentum`), `adam` or `adamw`; otherwise torch's defaults.
        momentum: Of `sgd` alone.
        norm_stats: Whether normalisation statistics stay as they are or follow the new data.
        log_every: Steps between two lines of the log; the first step has one too.
    """

    epochs: int
    lr: float
    batch_size: int
    optimizer: OptimizerName
    momentum: float
    norm_stats: NormStats
    log_every: int


class Observer(Protocol):
    """Who is told what happens."""

    def log(self, line: dict[str, Any]) -> None:
        """Take one line: `step`, `epoch`, `loss` (mean task loss since the last line), `penalty` (now)."""

    def epoch_done(self, epoch: int, step: int) -> None:
        """Take note of a whole epoch, after `step` steps, whose weights are finite."""


def train(
    model: nn.Module,
    domain: Domain,
    layout: Layout,
    likelihood: Likelihood,
    penalty: Penalty | None,
    schedule: Schedule,
    shuffle: torch.Generator,
    bar: Bar,
    observer: Observer,
) -> int:
    """Train the model on one domain, pulled back by the penalty.

    Args:
        model: Trained in place, on its device.
        domain: The new domain.
        layout: How its samples go into the model.
        likelihood: Gives the task loss.
        penalty: Pulls at every step; None for plain training.
        schedule: How long and how fast.
        shuffle: Draws the order of the samples.
        bar: Told of every step, with task loss and penalty apart.
        observer: Told of losses every `log_every` steps, and of every epoch whose weights are finite.

    Returns:
        The number of optimizer steps.

    Raises:
        NonFiniteError: if the loss or a weight becomes NaN or infinite, naming the step.
        DataError: if the data gave no batch that could be trained on.
    """
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, schedule)
    if penalty is not None:
        penalty.attach(optimizer)
    # Batch statistics of a single sample are no statistics: torch refuses them in training mode.
    too_small = 1 if schedule.norm_stats == "update" and normalisation_layers(model) else 0
    step = 0
    recent: list[Tensor] = []  # losses since the last line, left on the device until then
    for epoch in range(1, schedule.epochs + 1):
        set_training(model, schedule.norm_stats)
        for inputs, targets in feed(domain.batches(schedule.batch_size, shuffle), layout, model, device):
            if targets is None:
                raise DataError(f"{domain.name} has no labels, and fine-tuning needs them")
            if count(inputs) <= too_small:
                continue
            outputs = call(model, inputs)
            if domain.labels is None:
                likelihood.check_targets(targets, tuple(outputs.shape[1:]), f"{domain.name}, step {step + 1}")
            loss = likelihood.loss(outputs, targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            recent.append(loss.detach())
            if step == 1 or step % schedule.log_every == 0:
                _report(recent, step, epoch, penalty, bar, observer)
        if recent:
            _report(recent, step, epoch, penalty, bar, observer)
        if step == 0:
            raise DataError(f"{domain.name} has no batch to train on")
        check_model(model, f"after step {step}, ")
        observer.epoch_done(epoch, step)
    return step


def make_optimizer(model: nn.Module, schedule: Schedule) -> torch.optim.Optimizer:
    """Build the optimizer of a schedule over the parameters that require a gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if schedule.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=schedule.lr, momentum=schedule.momentum)
    kind = torch.optim.AdamW if schedule.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=schedule.lr)


def _report(
    recent: list[Tensor],
    step: int,
    epoch: int,
    penalty: Penalty | None,
    bar: Bar,
    observer: Observer,
) -> None:
    """Check the losses since the last report, log their mean, and forget them."""
    losses = torch.stack(recent)
    finite = losses.isfinite()
    if not finite.all():
        first = int((~finite).nonzero()[0])
        raise NonFiniteError(
            f"the loss is {losses[first].item()} at step {step - len(recent) + first + 1}. "
            "Try a lower --lr or a lower --lambda"
        )
    loss = losses.mean().item()
    held = penalty.value() if penalty is not None else 0.0
    bar.advance(len(recent), loss=loss, **({} if penalty is None else {"penalty": held}))
    observer.log({"step": step, "epoch": epoch, "loss": loss, "penalty": held})
    recent.clear()
