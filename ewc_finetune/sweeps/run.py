"""A sweep: the runs of a plan, and the frontier that they make."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from ewc_finetune.errors import EwcError, StorageError, UsageError, counted, few
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.plan import plan as plan_run
from ewc_finetune.finetuning.run import run as do_run
from ewc_finetune.progress import Bar, Progress, Silent
from ewc_finetune.reporting.plots import figure_of
from ewc_finetune.reporting.tradeoff import BEST, KNEE, Position, Tradeoff
from ewc_finetune.specs.html import html_table
from ewc_finetune.storage.workspace import remove
from ewc_finetune.sweeps.folder import SweepFolder, title_of
from ewc_finetune.sweeps.plan import SweepPlan, what_is_left
from ewc_finetune.sweeps.workers import Job, run_jobs


@dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Attributes:
        folder: The folder with the runs.
        tradeoff: What the runs kept and learned, and the frontier that they make.
        document: The trade-off as a JSON document.
    """

    folder: Path
    tradeoff: Tradeoff
    document: dict[str, Any]

    def __repr__(self) -> str:
        return f"<Sweep {str(self.folder)!r}: {counted(len(self.tradeoff.outcomes), 'run')}>"

    def plot(self) -> Figure:
        """Draw the frontier of what is kept against what is learned, as `frontier.png` has it.

        Raises:
            UsageError: if no run says both.
        """
        chart = self.tradeoff.chart()
        if chart is None:
            raise UsageError(f"no run of the sweep {self.folder} says what was kept and what was learned")
        return figure_of([chart], title_of(self.document["new"]))

    def _repr_html_(self) -> str:
        caption = f"{self.folder}: {counted(len(self.tradeoff.outcomes), 'run')}"
        return html_table(self.tradeoff.headers(), self.tradeoff.lines(), caption)

    @property
    def knee(self) -> Position | None:
        """The point at which the frontier bends most."""
        return None if self.tradeoff.knee is None else self.tradeoff.positions[self.tradeoff.knee]


def run(swept: SweepPlan) -> Sweep:
    """Make the runs of a sweep that are left.

    Called again, it makes what is not there yet and goes on with what was stopped; a run that fails does not end the
    others, and is tried again.

    Raises:
        EwcError: if every run failed.
    """
    folder, options, progress = swept.folder, swept.options, swept.options.progress
    with folder.alone():
        left = what_is_left(swept)
        folder.left_out |= {run.path.name.removesuffix(".run") for run in left.stale}
        for killed in folder.without_record():
            remove(killed)
        with _ending_well(folder, progress):
            folder.write("running")
            _make(folder, left.todo, options.jobs, progress)
        tradeoff = folder.write("finished")
        if len(folder.failures) == len(swept.points):
            first = next(iter(folder.failures.values()))
            raise EwcError(
                f"of {counted(len(swept.points), 'run')} of the sweep {folder.path} all failed; the first one: {first}"
            )
        done = Sweep(folder.path, tradeoff, folder.to_json(tradeoff, "finished"))
        if options.discard:
            _discard(done, folder, progress)
    return done


def finetune(options: FinetuneOptions, progress: Progress) -> object:
    """Make one run; a module is copied for it."""
    if isinstance(options.model, nn.Module):
        options = replace(options, model=copy.deepcopy(options.model))
    return do_run(plan_run(replace(options, progress=progress)))


def _make(folder: SweepFolder, todo: Sequence[Job], jobs: int, progress: Progress) -> None:
    """Make the runs that are left, and write what there is after each."""
    if not todo:
        return
    with progress.bar("sweep", len(todo), "run") as bar:

        def started(name: str) -> Progress:
            bar.advance(0, run=name)
            return _Within(bar, name)

        with contextlib.closing(run_jobs(todo, finetune, jobs, started)) as ended:
            for name, failure in ended:
                if failure is not None:
                    folder.failures[name] = failure
                tradeoff = folder.write("running")
                row = next(row for row in tradeoff.rows if row.name == name)
                bar.advance(1)
                progress.note(f"{name}: {tradeoff.said(row)}")


@contextlib.contextmanager
def _ending_well(folder: SweepFolder, progress: Progress) -> Iterator[None]:
    """Say how a sweep goes on that is interrupted."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(StorageError):  # the disk may be what stopped it
            folder.write("interrupted")
        progress.note(f"what there is of the sweep is in {folder.path}; the same command again goes on with it")
        raise


def _discard(done: Sweep, folder: SweepFolder, progress: Progress) -> None:
    """Remove the checkpoints, but for those of the knee and of the best mean."""
    tradeoff = done.tradeoff
    kept = [n for n, marks in enumerate(tradeoff.marks) if {KNEE, BEST} & set(marks)]
    if not kept:
        progress.note("no point is better than all others, so every checkpoint is kept")
        return
    names = {row.name for n in kept for row in tradeoff.positions[n].rows}
    gone = [o.label for o in tradeoff.outcomes if o.label in names and not folder.checkpoint(o.run).exists()]
    if gone:
        progress.note(
            f"nothing is discarded, for the checkpoints of {few(gone)} are gone already; without --discard the sweep "
            "makes them again"
        )
        return
    for outcome in tradeoff.outcomes:
        if outcome.run.path.name.removesuffix(".run") not in names:
            folder.discard(outcome.run)
    progress.note(f"the checkpoints but for those of {', '.join(sorted(names))} are discarded")


class _Within(Silent):
    """Shows how far one run has come beside the bar of all."""

    def __init__(self, bar: Bar, name: str) -> None:
        self._bar, self._name = bar, name

    def bar(self, title: str, total: int | None, unit: str) -> contextlib.AbstractContextManager[Bar]:
        """See `Progress`."""
        return contextlib.nullcontext(_Share(self._bar, self._name, total))


class _Share:
    def __init__(self, outer: Bar, name: str, total: int | None) -> None:
        self._outer, self._name, self._total, self._done = outer, name, total, 0

    def advance(self, count: int, **figures: float | str) -> None:
        self._done += count
        if self._total:
            self._outer.advance(0, run=f"{self._name} {self._done / self._total:.0%}")
