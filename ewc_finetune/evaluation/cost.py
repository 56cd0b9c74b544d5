"""What a command will need, from a little of it that is tried."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ewc_finetune.data.domain import Domain
from ewc_finetune.modules.batch import Batch

# How many batches are tried; the first takes longer than the others.
TRIED = 3
# A pass of fewer batches than this is not timed a second time.
_SHORT = 4
# A pass of at least so many batches is tried with several, to tell what each takes from what is done once.
_LONG = 10


@dataclass(frozen=True)
class Estimate:
    """What a run will need.

    Attributes:
        work: What it does, and how often: `steps`, `samples`; None where the data does not say.
        seconds: How long that will take, by what was tried; None where it is not known how much there is.
        memory: The most that this process took when a little of the work was tried, in bytes: `host`, and of a CUDA
            `device`; None where the system does not say.
        files: The files that will be written.
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
        device: The device that the model is on.
        output: The anchor, if it is to be written.
    """
    files = () if output is None else (output,)
    total = None if samples is None else -(-samples // batch_size)
    once, several = (total or 0) < _SHORT, (total or 0) >= _LONG
    with watched_memory(device) as memory:
        if domain is None:  # nothing is taken of the data
            return Estimate({"samples": 0}, prepared, memory, files)
        batches = first_batches(domain, batch_size, count=TRIED if several else 1)
        first = _timed(run, batches[:1])
        again = first if once else _timed(run, batches[:1])
        whole = _timed(run, batches) if len(batches) > 1 else again
    # Each timing includes what is done once, so that only differences tell what a batch takes.
    each = max(whole - again, 0.0) / (len(batches) - 1) if len(batches) > 1 else again
    seconds = None if total is None else prepared + first + each * (total - 1)
    return Estimate({"samples": samples}, seconds, memory, files)


def _timed(run: Callable[[Sequence[Batch]], object], batches: Sequence[Batch]) -> float:
    start = time.perf_counter()
    run(batches)
    return time.perf_counter() - start


@contextmanager
def watched_memory(device: torch.device) -> Iterator[dict[str, int | None]]:
    """Yield the most memory taken, known when the block is done."""
    peaks: dict[str, int | None] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield peaks
    peaks["host"] = host_peak()
    if device.type == "cuda":
        peaks["device"] = torch.cuda.max_memory_allocated(device)


def host_peak() -> int | None:
    """Return the most memory that this process had, in bytes; None where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says there may be the peak of whoever started the process
        peaks = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(peaks[0].split()[1]) << 10 if peaks else None
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
