"""Time the Fisher against a plain forward and backward pass, and measure what memory it takes.

    python tests/benchmarks/run.py [--models MLP CNN] [--methods ...] [--repeats 5] [--no-time] [--no-memory]

All methods of a model take turns within one process, on two threads. A figure is the median time of a batch by that of
the plain pass in the same turn: the median over the turns, and the range. Memory is the growth of the process's peak,
each in a process of its own. `make bench` installs the libraries to compare with and runs this with
OMP_WAIT_POLICY=PASSIVE; those that are missing are left out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from methods import METHODS, SLOW, Run, plain
from models import CASES, EXACT, Case
from torch import Tensor

THREADS = 2


def make(case: Case, batches: int) -> list[tuple[Tensor, Tensor]]:
    """Draw some batches."""
    return [case.draw(case.batch) for _ in range(batches)]


def seconds(run: Run, batches: list[tuple[Tensor, Tensor]], first: int) -> float:
    """Return how long one batch takes; the first ones, with what comes once, don't count."""
    start = 0.0

    def watched() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal start
        for index, batch in enumerate(batches):
            if index == first:
                start = time.perf_counter()
            yield batch

    run(watched())
    return (time.perf_counter() - start) / (len(batches) - first)


def attempt(case: Case, method: str, model: torch.nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Run | str:
    """Set a method up and let it run for a batch; return it, or why there is none."""
    try:
        run = METHODS[method](copy.deepcopy(model), case)
        run(batches[:1])
    except ImportError:
        return "not installed"
    except Exception as error:  # noqa: BLE001 - whatever a library fails with belongs in the table
        sys.stderr.write(f"{method}: {type(error).__name__}: {str(error)[:300]}\n")
        return "fails"
    return run


def time_model(name: str, methods: list[str], repeats: int) -> dict[str, str]:
    """Return for each method the median over the repeats, and the range, of its time by that of the plain pass."""
    case = CASES[name]
    torch.manual_seed(0)
    model, batches = case.build().eval(), make(case, case.first + case.batches)
    unit = plain(copy.deepcopy(model), case)
    unit(batches)
    prepared = {method: attempt(case, method, model, batches) for method in methods}
    found: dict[str, list[float]] = {method: [] for method in methods}
    for turn in range(repeats):
        one = seconds(unit, batches, case.first)
        for method, run in prepared.items():
            if not isinstance(run, str):
                if method not in SLOW:
                    found[method].append(seconds(run, batches, case.first) / one)
                elif turn < 2:
                    found[method].append(seconds(run, batches[:2], 1) / one)
    return {
        method: run if isinstance(run, str) else f"{median(r):.2f} ({min(r):.2f}-{max(r):.2f})"
        for (method, run), r in zip(prepared.items(), found.values(), strict=True)
    }


def measure_memory(name: str, method: str, batches: int) -> float:
    """Return the growth in MB of this process's peak memory over so many batches."""
    case = CASES[name]
    torch.manual_seed(0)
    model, data = case.build().eval(), make(case, batches)
    run = plain(model, case) if method == "plain" else METHODS[method](model, case)
    plain(copy.deepcopy(model), case)([case.draw(1)])  # libraries load their kernels
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    run(data)
    return _status("VmHWM") - before


def _status(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def memory_row(name: str) -> list[str]:
    """Return the row of one model: plain, ours over one batch, and over many."""

    def child(method: str, batches: int) -> float:
        command = [sys.executable, __file__, "--memory-of", name, method, str(batches)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    unit, one, many = child("plain", 4), child("ewc-finetune", 4), child("ewc-finetune", 16)
    exact = f"{child(EXACT, 4) / unit:.2f}" if CASES[name].takes(EXACT) else "-"
    return [name, f"{unit:.0f} MB", f"{one / unit:.2f}", f"{many / unit:.2f}", exact]


def table(rows: list[list[str]]) -> None:
    """Print rows as a Markdown table."""
    for index, row in enumerate(rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
        if index == 0:
            sys.stdout.write("|" + "---|" * len(row) + "\n")
    sys.stdout.write("\n")
    sys.stdout.flush()


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--memory-of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    warnings.simplefilter("ignore")  # of the libraries' old hooks
    if options.memory_of:
        name, method, batches = options.memory_of
        sys.stdout.write(f"{measure_memory(name, method, int(batches))}\n")
        return
    if not options.no_time:
        time_table(options)
    if not options.no_memory and Path("/proc/self/clear_refs").exists():
        header = ["peak memory", "plain pass", "empirical, 4 batches", "16 batches", "exact, 4 batches"]
        table([header, *(memory_row(name) for name in options.models)])


def time_table(options: argparse.Namespace) -> None:
    """Print the table of times."""
    rows = [["time / plain pass", *options.models]]
    timed = {}
    for name in options.models:
        known = [m for m in options.methods if CASES[name].takes(m)]
        timed[name] = time_model(name, known, options.repeats)
    rows += [[method, *(timed[name].get(method, "-") for name in options.models)] for method in options.methods]
    table(rows)


if __name__ == "__main__":
    main()
