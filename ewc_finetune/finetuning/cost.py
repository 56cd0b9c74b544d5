"""What a run will need, found by doing a little of it: everything is checked, nothing is written."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ewc_finetune.data.domain import Domain
from ewc_finetune.data.texts import Generated
from ewc_finetune.evaluation.bound_domain import BoundDomain
from ewc_finetune.evaluation.cost import TRIED, Estimate, first_batches, watched_memory
from ewc_finetune.evaluation.score import score
from ewc_finetune.finetuning.job import Job, ready
from ewc_finetune.finetuning.outputs import written_as
from ewc_finetune.finetuning.plan import Plan
from ewc_finetune.finetuning.record import findings
from ewc_finetune.finetuning.search_runs import trials_cost
from ewc_finetune.finetuning.trainer import Trainer, count_steps
from ewc_finetune.modules.precision import float32_weights
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.storage.atomic import beside


def cost(todo: Plan) -> Estimate:
    """Train for a few steps and score a few batches, and put the model back as it was.

    Raises:
        EwcError: if model and data do not suit each other.
    """
    files = [] if todo.output is None else [*written_as(todo.start, todo.output), beside(todo.output, ".run")]
    identities = todo.identify()  # of the model as it is, before it is given another head
    todo = replace(todo, rehearsed=[_few_generated(domain, todo.options.progress) for domain in todo.rehearsed])
    with ready(todo, None if todo.options.lambdas == "auto" else todo.strengths, todo.options.progress) as job:
        return replace(
            _tried(todo, job), files=tuple(files), found=findings(todo, job, identities, todo.strengths, None)
        )


def _few_generated(domain: Domain | None, progress: Progress) -> Domain | None:
    """Return the same data, of which few samples are generated."""
    if domain is None or not isinstance(domain.samples, Generated) or domain.samples.count <= TRIED:
        return domain
    progress.note(f"{TRIED} of the {domain.samples.count:,} samples of {domain.name} are generated to try it")
    return replace(domain, samples=replace(domain.samples, count=TRIED))


def _tried(todo: Plan, job: Job) -> Estimate:
    schedule, device = todo.schedule, todo.device
    shuffle = torch.Generator().manual_seed(todo.options.seed)
    # Epochs of the short runs, with an evaluation each.
    more = 0 if todo.options.lambdas != "auto" else trials_cost(schedule.epochs)
    model, size = job.start.model, schedule.batch_size
    each = replace(schedule, epochs=1).count_steps(job.new.domain.count_batches(size))
    steps = None if each is None else each * (schedule.epochs + more)
    count_steps(job.new.domain, schedule)  # refuses what cannot be counted
    clock = _Clock()
    with watched_memory(device) as memory, _put_back(model):
        scoring = sum((_scoring(model, bound, 2 * size, device) or 0.0) for bound in job.watched)
        with float32_weights(model):
            batches = first_batches(job.new.domain, size, shuffle, TRIED * schedule.accumulate)
            tried = replace(
                job.new, domain=replace(job.new.domain, samples=batches, labels=None, collate=None, parts=())
            )
            few = replace(schedule, epochs=min(1, schedule.epochs), log_every=1, eval_every=None, workers=0)
            with job.freezing(), Silent().bar("", None, "") as bar:
                Trainer(replace(job, new=tried), few, shuffle, bar, clock).run()
    evaluations = schedule.epochs + more + 1
    if schedule.eval_every is not None and steps is not None:
        evaluations = steps // schedule.eval_every + 1
    seconds = None if steps is None else steps * clock.step + scoring * evaluations
    return Estimate({"steps": steps}, seconds, memory, ())


def _scoring(model: nn.Module, bound: BoundDomain, batch_size: int, device: torch.device) -> float | None:
    """Return how long scoring a watched domain will take; None where it has no number of samples."""
    domain = bound.domain
    total = domain.count_batches(batch_size)
    batches = first_batches(domain, batch_size)
    if total is None or not batches:
        return None
    start = time.perf_counter()
    score(model, replace(bound, domain=replace(domain, samples=batches, collate=None)), batch_size, device)
    return (time.perf_counter() - start) / len(batches) * total


class _Clock:
    """Looks at the time after every step."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def log(self, line: dict[str, Any]) -> None:
        """See `Observer`."""
        self.times.append(time.perf_counter())

    def evaluate(self, epoch: int, step: int, state: Callable[[], dict[str, Any]]) -> bool:
        """See `Observer`."""
        return True

    @property
    def step(self) -> float:
        """The time of a step: of the first only if there is no other."""
        taken = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return statistics.median(taken[1:] or taken or [0.0])


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    gradients = [parameter.grad for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for module, training in modes:
            module.training = training
