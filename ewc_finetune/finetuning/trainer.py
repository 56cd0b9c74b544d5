"""The training loop: one page, read from top to bottom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ewc_finetune.data.augmentation import augmented
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.input_spec import feed
from ewc_finetune.errors import DataError, NonFiniteError, UsageError
from ewc_finetune.finetuning.job import Job
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.modules.batch import Batch, call, count
from ewc_finetune.modules.devices import random_state, set_random_state
from ewc_finetune.modules.finite import check_model
from ewc_finetune.modules.modes import normalisation_layers, set_training
from ewc_finetune.progress import Bar


class Observer(Protocol):
    """Who is told what happens."""

    def log(self, line: dict[str, Any]) -> None:
        """Take one line: `step`, `epoch`, `penalty` and `lr` (now), `loss` and `rehearsed` (means since the last)."""

    def evaluate(self, epoch: int, step: int, state: Callable[[], dict[str, Any]]) -> bool:
        """Look at the model, whose weights are finite, and return whether to go on.

        Args:
            epoch: The epoch of the last step.
            step: The number of steps that are done.
            state: Returns what `Trainer.run` needs to go on from here: nothing but tensors, which are those in use, and
                plain values.
        """


class Trainer:
    """Trains a model on one domain, pulled back by the penalty.

    Args:
        job: The model, trained in place on its device, the new domain, the loss that is made small there, and what
            holds the model at every step.
        schedule: How long and how fast.
        shuffle: Draws the order of the samples.
        bar: Told of the steps, with task loss and penalty apart.
        observer: Told of losses every few steps, and asked to look at the model as the schedule says.

    Raises:
        UsageError: if the learning rate depends on the number of steps, and the data doesn't say how many there are.
    """

    def __init__(
        self,
        job: Job,
        schedule: Schedule,
        shuffle: torch.Generator,
        bar: Bar,
        observer: Observer,
    ) -> None:
        model, new, penalty = job.start.model, job.new, job.penalty
        self.model, self.domain, self.input_spec, self.likelihood = model, new.domain, new.input_spec, new.likelihood
        self.loss, self.penalty, self.rehearsal, self.schedule = job.loss, penalty, job.rehearsal, schedule
        self.shuffle, self.bar, self.observer = shuffle, bar, observer
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, schedule)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=schedule.amp == "fp16")
        self.total = count_steps(new.domain, schedule)
        self.log_every = schedule.logged_every(self.total)
        self.norm_stats = schedule.norm_stats or "frozen"
        # Batch statistics of a single sample are no statistics: torch refuses them in training mode.
        self.too_small = 1 if self.norm_stats == "update" and normalisation_layers(model) else 0
        self.forward: Any = torch.compile(model) if schedule.compile else model
        self.autocast: Any = contextlib.nullcontext()
        if schedule.amp is not None:
            half = torch.float16 if schedule.amp == "fp16" else torch.bfloat16
            self.autocast = torch.autocast(self.device.type, half)
        if penalty is not None and penalty.form == "proximal":
            penalty.attach(self.optimizer)
        self.epoch = 1  # the one that is under way
        self.batch = 0  # batches of this epoch that are done
        self.step = 0  # steps that are done in all
        self.skipped = 0  # steps that were not taken, for their gradients overflowed in half precision
        # Random states at the beginning of this epoch, from which a run that stopped in its middle goes on.
        self.order, self.random = shuffle.get_state(), random_state(self.device)
        self.recent: list[Tensor] = []  # losses since the last line, left on the device until then
        self.rehearsed: list[Tensor] = []  # the same of what was rehearsed

    def run(self, resumed: MutableMapping[str, Any] | None = None, *, go_on: bool = True) -> int:
        """Train to the end, and return the number of optimizer steps.

        Args:
            resumed: A state that the observer was once given. From there it goes on as if it had never stopped: on
                the same machine it ends with the same bytes. It is emptied.
            go_on: Whether to train at all, or only go back to that state.

        Raises:
            NonFiniteError: if the loss or a weight becomes NaN or infinite, naming the step.
            DataError: if the data gave no batch that could be trained on.
        """
        random = None
        if resumed is not None:
            random = resumed["random"]
            self.load_state(resumed)
            self.bar.advance(self.step)
            resumed.clear()  # it is as large as the model several times over
        while go_on and self.epoch <= self.schedule.epochs:
            set_training(self.model, self.norm_stats)
            for group in self._groups(random):
                self.batch += len(group)
                fitting = [batch for batch in group if count(batch[0]) > self.too_small]
                if fitting:
                    self._step(fitting)
                    every = self.schedule.eval_every
                    if every is not None and self.step % every == 0:
                        go_on = self._evaluate(self.epoch)
                        if not go_on:
                            return self.step
            random = None
            if self.step == 0:
                raise DataError(f"{self.domain.name} has no batch to train on")
            if self.recent:
                self._report()
            done, self.epoch, self.batch = self.epoch, self.epoch + 1, 0
            self.order, self.random = self.shuffle.get_state(), random_state(self.device)
            every = self.schedule.eval_every
            if every is None or (done == self.schedule.epochs and self.step % every):
                go_on = self._evaluate(done)
        if self.step and self.skipped == self.step:
            raise NonFiniteError(
                f"none of {self.step} steps was taken, for every gradient overflowed in fp16. Use --amp bf16, or none, "
                "or train for longer"
            )
        return self.step

    def state(self) -> dict[str, Any]:
        """Return what `run` needs to go on from here."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "skipped": self.skipped,
            "order": self.order,
            "epoch_random": self.random,
            "random": random_state(self.device),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rehearsal": None if self.rehearsal is None else self.rehearsal.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a state."""
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]
        self.skipped = state["skipped"]
        self.order, self.random = state["order"], state["epoch_random"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.rehearsal is not None:
            self.rehearsal.load_state_dict(state["rehearsal"])
        self.shuffle.set_state(self.order)
        set_random_state(self.random, self.device)

    def _groups(self, random: list[Tensor] | None) -> Iterator[list[Batch]]:
        """Walk through what is left of the epoch, the batches of a step together.

        Args:
            random: State of the generators to go on with, when what is done of the epoch has been passed by.
        """
        by_number = self.domain.indexable and not self.schedule.workers
        size, workers = self.schedule.batch_size, self.schedule.workers
        batches = self.domain.batches(size, self.shuffle, workers=workers, skip=self.batch if by_number else 0)
        if random is not None:
            for _ in islice(batches, 0 if by_number else self.batch):
                pass
            set_random_state(random, self.device)
        if self.domain.augment:
            batches = augmented(batches, self.domain.augment)
        fed = feed(batches, self.input_spec, self.model, self.device)
        if self.schedule.accumulate == 1:
            return ([batch] for batch in fed)
        return iter(lambda: list(islice(fed, self.schedule.accumulate)), [])

    def _step(self, group: list[Batch]) -> None:
        """Take one step of the optimizer, with the mean gradient over the samples of these batches."""
        schedule, optimizer = self.schedule, self.optimizer
        if schedule.varies:
            for parameters in optimizer.param_groups:
                parameters["lr"] = schedule.rate(self.step + 1, self.total)
        optimizer.zero_grad(set_to_none=True)
        samples = sum(count(inputs) for inputs, _ in group) if len(group) > 1 else 0
        losses = []
        for inputs, targets in group:
            if targets is None:
                raise DataError(f"{self.domain.name} has no labels, and fine-tuning needs them")
            with self.autocast:
                outputs = call(self.forward, inputs)
            if self.domain.labels is None:
                where = f"{self.domain.name}, step {self.step + 1}"
                self.likelihood.check_targets(targets, tuple(outputs.shape[1:]), where)
            loss = self.loss(outputs, targets)
            if samples:
                loss = loss * (count(inputs) / samples)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if self.rehearsal is not None:
            with self.autocast:
                rehearsed = self.rehearsal.loss(self.forward)
            self.scaler.scale(rehearsed).backward()  # type: ignore[no-untyped-call]
            self.rehearsed.append(rehearsed.detach())
        if schedule.amp == "fp16":
            self.scaler.unscale_(optimizer)
        if self.penalty is not None and self.penalty.form == "gradient":
            self.penalty.add_gradient()
        if schedule.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), schedule.clip)
        if schedule.amp == "fp16":
            scale = self.scaler.get_scale()
            self.scaler.step(optimizer)
            self.scaler.update()
            self.skipped += self.scaler.get_scale() < scale
        else:
            optimizer.step()
        self.step += 1
        self.bar.advance(1)
        self.recent.append(losses[0] if len(losses) == 1 else torch.stack(losses).sum())
        if self.step == 1 or self.step % self.log_every == 0:
            self._report()

    def _report(self) -> None:
        """Check the losses since the last report, log their mean, and forget them."""
        losses = torch.stack(self.recent)
        finite = losses.isfinite()
        if not finite.all():
            first = int((~finite).nonzero()[0])
            held = self.penalty is not None and self.penalty.pulls
            raise NonFiniteError(
                f"the loss is {losses[first].item()} at step {self.step - len(losses) + first + 1}. "
                f"Try a lower --lr{' or a lower --lambda' if held else ''}"
            )
        loss = losses.mean().item()
        penalty = self.penalty.value() if self.penalty is not None else 0.0
        self.bar.advance(0, loss=loss, **({} if self.penalty is None else {"penalty": penalty}))
        line = {"step": self.step, "epoch": self.epoch, "loss": loss, "penalty": penalty}
        if self.rehearsed:
            line["rehearsed"] = torch.stack(self.rehearsed).mean().item()
        self.observer.log({**line, "lr": self.optimizer.param_groups[0]["lr"]})
        self.recent.clear()
        self.rehearsed.clear()

    def _evaluate(self, epoch: int) -> bool:
        """Have the model looked at, and return whether to go on."""
        if self.recent:
            self._report()
        check_model(self.model, f"after step {self.step}, ")
        go_on = self.observer.evaluate(epoch, self.step, self.state)
        set_training(self.model, self.norm_stats)
        return go_on


def count_steps(domain: Domain, schedule: Schedule) -> int | None:
    """Return how many steps there will be, None where the data doesn't say.

    Raises:
        UsageError: if the learning rate depends on it then.
    """
    total = schedule.count_steps(domain.count_batches(schedule.batch_size))
    if total is None and schedule.needs_total:
        raise UsageError(
            f"{domain.name} doesn't say how many batches it has, on which the learning rate depends; leave out the "
            "decay, and give the warmup in steps"
        )
    return total


def make_optimizer(model: nn.Module, schedule: Schedule) -> torch.optim.Optimizer:
    """Build the optimizer of a schedule over the parameters that require a gradient."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = schedule.weight_decay
    if schedule.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=schedule.lr, momentum=schedule.momentum, weight_decay=decay or 0.0)
    if schedule.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=schedule.lr, weight_decay=0.01 if decay is None else decay)
    return torch.optim.Adam(parameters, lr=schedule.lr, weight_decay=decay or 0.0)
