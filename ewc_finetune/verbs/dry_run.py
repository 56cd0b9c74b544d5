"""What a run will need, found by doing a little of it: everything is checked, nothing is written."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ewc_finetune.data.domain import Batch, Domain
from ewc_finetune.likelihood import Likelihood
from ewc_finetune.precision import float32_weights
from ewc_finetune.progress import Silent
from ewc_finetune.schedule import Schedule
from ewc_finetune.training import Trainer, count_steps
from ewc_finetune.verbs.evaluate import score
from ewc_finetune.verbs.setup import Setup

# So many batches are tried; the first takes longer than the others.
TRIED = 3
# A pass of fewer batches than this is short, and of one of so many or more several batches are tried.
_SHORT, _LONG = 4, 10


@dataclass(frozen=True)
class Estimate:
    """What a run will need.

    Attributes:
        work: What it does, and how often: `steps`, `samples`; None where the data does not say.
        seconds: How long that will take, by what was tried; None where it is not known how much there is.
        memory: The most that this process took when a little of the work was tried, in bytes: `host`, and of a CUDA
            `device`; None where the system does not say.
        files: What it will write.
        found: What the options of a fine-tune turned out to be, as its `run.json` has it.
    """

    work: dict[str, int | None]
    seconds: float | None
    memory: dict[str, int | None]
    files: tuple[Path, ...]
    found: dict[str, Any] | None = None

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What a person wants to know, each with its name."""
        known = [(name, "not known beforehand" if n is None else f"{n:,}") for name, n in self.work.items()]
        seconds = "not known beforehand" if self.seconds is None else _duration(self.seconds)
        memory = [(f"memory ({where})", f"{n / 1e9:.2f} GB") for where, n in self.memory.items() if n is not None]
        return [*known, ("time", seconds), *memory, *(("file", str(path)) for path in self.files)]

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        known = {name: value for name, value in vars(self).items() if name != "found"}
        return {**known, "files": [str(path) for path in self.files]}


class _Checked(Exception):  # noqa: N818 - no error: it carries the estimate out of a verb
    def __init__(self, estimate: Estimate) -> None:
        self.estimate = estimate


def dry_run(verb: Callable[..., object], *arguments: Any, **options: Any) -> Estimate:
    """Do what `consolidate`, `finetune` or `sweep` does up to its first step, try a few batches, and write nothing.

    Models are left as they were.

    Args:
        verb: One of the three.
        arguments: Its arguments.
        options: Likewise.

    Raises:
        EwcError: as the verb would.
    """

    def stop(estimate: Estimate) -> None:
        raise _Checked(estimate)

    try:
        verb(*arguments, before_start=stop, **options)
    except _Checked as checked:
        return checked.estimate
    raise TypeError(f"{verb} went on after its start")


def first_batches(
    domain: Domain, batch_size: int, shuffle: torch.Generator | None = None, count: int = TRIED
) -> list[Batch]:
    """Return the batches that are tried."""
    return list(islice(domain.batches(batch_size, shuffle), count))


def estimate_consolidation(
    run: Callable[[Sequence[Batch]], object],
    domain: Domain | None,
    batch_size: int,
    samples: int | None,
    prepared: float,
    device: torch.device,
    output: Path | None,
) -> Estimate:
    """Take the Fisher of the first batches: of one, in a longer pass once more, in a long one of several.

    No more is tried than half of the pass, but for its first batch.

    Args:
        run: Takes it.
        domain: The samples; None for a curvature that needs none.
        batch_size: Samples to each.
        samples: How many there will be, if that is known.
        prepared: The seconds that it took to get at the samples.
        device: Where the model is.
        output: The anchor, if it is to be written.
    """
    files = () if output is None else (output,)
    total = None if samples is None else -(-samples // batch_size)
    once, several = (total or 0) < _SHORT, (total or 0) >= _LONG
    with _memory(device) as memory:
        if domain is None:  # nothing is taken of the data
            return Estimate({"samples": 0}, prepared, memory, files)
        batches = first_batches(domain, batch_size, count=TRIED if several else 1)
        first = _timed(run, batches[:1])
        again = first if once else _timed(run, batches[:1])
        whole = _timed(run, batches) if len(batches) > 1 else again
    # What is done once, looking at the model, is in each of them.
    each = max(whole - again, 0.0) / (len(batches) - 1) if len(batches) > 1 else again
    seconds = None if total is None else prepared + first + each * (total - 1)
    return Estimate({"samples": samples}, seconds, memory, files)


def _timed(run: Callable[[Sequence[Batch]], object], batches: Sequence[Batch]) -> float:
    start = time.perf_counter()
    run(batches)
    return time.perf_counter() - start


def estimate_finetuning(
    job: Setup,
    schedule: Schedule,
    likelihood: Likelihood,
    shuffle: torch.Generator,
    device: torch.device,
    files: Sequence[Path],
    more: int = 0,
) -> Estimate:
    """Train for a few steps and score a few batches, and put the model back as it was.

    Args:
        job: What is trained.
        schedule: How.
        likelihood: Gives the loss.
        shuffle: Draws the order of the samples.
        device: Where the model is.
        files: What the run will write.
        more: Epochs of training beside those of the schedule, with an evaluation each.
    """
    model, size = job.start.model, schedule.batch_size
    each = replace(schedule, epochs=1).count_steps(job.domain.count_batches(size))
    steps = None if each is None else each * (schedule.epochs + more)
    count_steps(job.domain, schedule)  # refuses what cannot be counted
    clock = _Clock()
    with _memory(device) as memory, _put_back(model):
        scoring = sum((_scoring(job, n, likelihood, 2 * size, device) or 0.0) for n in range(len(job.watched)))
        with float32_weights(model):
            tried = replace(
                job.domain,
                samples=first_batches(job.domain, size, shuffle, TRIED * schedule.accumulate),
                labels=None,
                collate=None,
            )
            own = job.domain.likelihood(likelihood)
            few = replace(schedule, epochs=min(1, schedule.epochs), log_every=1, eval_every=None, workers=0)
            with job.freezing(), Silent().bar("", None, "") as bar:
                Trainer(model, tried, job.layout, own, job.penalty, few, shuffle, bar, clock).run()
    evaluations = schedule.epochs + more + 1
    if schedule.eval_every is not None and steps is not None:
        evaluations = steps // schedule.eval_every + 1
    seconds = None if steps is None else steps * clock.step + scoring * evaluations
    return Estimate({"steps": steps}, seconds, memory, tuple(files))


def _scoring(job: Setup, n: int, likelihood: Likelihood, batch_size: int, device: torch.device) -> float | None:
    """Return how long scoring a watched domain will take; None where it has no number of samples."""
    domain, layout = job.watched[n]
    total = domain.count_batches(batch_size)
    batches = first_batches(domain, batch_size)
    if total is None or not batches:
        return None
    part = replace(domain, samples=batches, collate=None)
    start = time.perf_counter()
    score(job.start.model, part, layout, domain.likelihood(likelihood), batch_size, device)
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


@contextmanager
def _memory(device: torch.device) -> Iterator[dict[str, int | None]]:
    """Yield the most memory taken, known when the block is done."""
    found: dict[str, int | None] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    found["host"] = host_peak()
    if device.type == "cuda":
        found["device"] = torch.cuda.max_memory_allocated(device)


def host_peak() -> int | None:
    """Return the most memory that this process had, in bytes; None where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says there may be the peak of whoever started the process
        found = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(found[0].split()[1]) << 10 if found else None
    try:
        import resource
    except ImportError:  # no POSIX system
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # bytes on macOS, elsewhere kilobytes


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "less than a second"
    if seconds < 120:
        return f"about {seconds:.0f} seconds"
    return f"about {seconds / 60:.0f} minutes" if seconds < 7200 else f"about {seconds / 3600:.1f} hours"
