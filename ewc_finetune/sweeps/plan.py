"""What a sweep will do: its runs, what they will need, and which of them are there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ewc_finetune._version import __version__
from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.formats.state_dict import StateDict
from ewc_finetune.checkpoint.location import is_there
from ewc_finetune.checkpoint.open import ending_of
from ewc_finetune.checkpoint.pin import pinned_model
from ewc_finetune.data.sources import items_of
from ewc_finetune.errors import NonFiniteError, StorageError, UsageError, counted, few
from ewc_finetune.evaluation.cost import Estimate
from ewc_finetune.finetuning.cost import cost
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.plan import plan as plan_run
from ewc_finetune.finetuning.request import asked, asked_then
from ewc_finetune.finetuning.resume import SOUND
from ewc_finetune.progress import Bar, Progress, Silent
from ewc_finetune.runs.options_file import differences
from ewc_finetune.runs.record import Run
from ewc_finetune.specs.options import names_of
from ewc_finetune.storage.workspace import recover
from ewc_finetune.sweeps.folder import SweepFolder, check_sweep_folder
from ewc_finetune.sweeps.grid import Point, Stack, as_stacks, check_grid, grid
from ewc_finetune.sweeps.options import SweepOptions
from ewc_finetune.sweeps.workers import Job, arguments_of

# Options in which the runs of a sweep differ.
_VARIED = names_of(FinetuneOptions, lambda known: known.varied)


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep will do.

    Attributes:
        options: The options that the command was given, with addresses on the Hub pinned to the commit that they name
            now.
        points: The runs that the sweep consists of.
        looks: What a run of each stack and form will need, by both.
        folder: The folder that the runs are written to.
        ending: How their checkpoints end.
    """

    options: SweepOptions
    points: list[Point]
    looks: dict[tuple[str, str], Estimate]
    folder: SweepFolder
    ending: str


@dataclass(frozen=True)
class Left:
    """What is left to be done, by the runs that are in the folder.

    Attributes:
        todo: The runs to make or to go on with.
        stopped: Names of those to go on with.
        stale: Runs that nobody asks for and that don't belong with the others: they are left out.
    """

    todo: list[Job]
    stopped: set[str]
    stale: list[Run]


def plan(options: SweepOptions) -> SweepPlan:
    """Check everything that a sweep takes, and try a little of a run of each kind.

    Raises:
        EwcError: naming what is wrong with an option, an anchor, the data or the folder.
    """
    progress = options.progress
    if options.output is None:
        raise UsageError("a sweep has a folder; name one: output=")
    path = Path(options.output)
    check_grid(options.lambdas, options.penalty_forms, options.seeds, options.jobs)
    options = replace(options, model=pinned_model(options.model, progress))
    stacks = as_stacks(options.anchors, progress)
    points = grid(stacks, options.lambdas, options.penalty_forms, options.seeds, options.plain, options.rehearses)
    if options.jobs > 1:
        for point in points:
            arguments_of(options.of_run(point))  # refuses what no command line can say
    check_sweep_folder(path)
    recover(path.parent, progress.note)
    recover(path, progress.note)
    ending = _ending(options.model, stacks[0])
    place = path.with_name(f".ewc-ft-try{ending}")  # a path like those of the runs, where nothing is
    looks = _looks(points, options, place)
    return SweepPlan(options, points, looks, SweepFolder(path, points, *_domains(looks, options.data)), ending)


def what_is_left(swept: SweepPlan) -> Left:
    """Look at the runs that are there.

    Raises:
        UsageError: naming those that were made with other options, unless they may be replaced.
        StorageError: naming a file that stands where a run goes, and is of none.
    """
    options, folder, progress = swept.options, swept.folder, swept.options.progress
    done, stopped, stale = set[str](), set[str](), list[Run]()
    points = {point.name: point for point in swept.points}
    wrong: dict[str, list[str]] = {}
    for name, run in folder.runs().items():
        point = points.get(name)
        differing = _differing(swept, run, point)
        if differing and point is None:
            stale.append(run)
        elif differing:
            wrong[name] = differing
        elif point is not None and run.document["status"] == "finished":
            if options.discard or folder.checkpoint(run).exists():
                done.add(name)
        elif point is not None and (run.document.get("versions") or {}).get("ewc_finetune") == __version__:
            stopped.add(name)
    if wrong and not options.overwrite:
        first, more = next(iter(wrong)), f", and so were {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UsageError(
            f"the sweep {folder.path} has runs that were made with other options: {first} ({'; '.join(wrong[first])})"
            f"{more}. Use the same ones, choose another --output, or replace these runs with --overwrite"
        )
    todo = [_job(swept, point, point.name in stopped) for point in swept.points if point.name not in done]
    _check_places(folder, todo)
    progress.note(
        f"{counted(len(points), 'run')}: {len(todo) - len(stopped)} to make, {len(stopped)} to go on with, "
        f"{len(done)} done"
    )
    if stale:
        names = few([run.path.name for run in stale])
        progress.note(f"left out, for they were made with other options: {names}")
    return Left(todo, stopped, stale)


def _ending(model: str | Path | nn.Module | None, stack: Stack) -> str:
    """Return how the runs' checkpoints end."""
    if isinstance(model, nn.Module):
        return StateDict.ending
    if model is not None:
        return ending_of(model) if is_there(model) else StateDict.ending
    newest = stack[-1]
    if isinstance(newest, Anchor) and newest.place is not None:
        return ending_of(str(newest.place))
    source = newest.path if isinstance(newest, Anchor) else newest
    return StateDict.ending if source is None else ending_of(source)


def _looks(points: Sequence[Point], options: SweepOptions, place: Path) -> dict[tuple[str, str], Estimate]:
    """Try a little of one run of each stack and form: what does not fit is refused before the first one is made."""
    looks: dict[tuple[str, str], Estimate] = {}
    told = _Once(options.progress)
    for point in sorted(points, key=lambda point: (point.strength == 0, point.strength)):
        key = (point.stack, point.form)
        if key in looks:
            continue
        tried = options.of_run(point, output=place, progress=told)
        try:
            looks[key] = cost(plan_run(tried))
        except NonFiniteError:  # a lambda may be too large, which its run will say
            looks[key] = cost(plan_run(replace(tried, lambdas=[0.0], progress=Silent())))
    starts = {str((look.found or {})["checkpoint"]["sha256"]) for look in looks.values()}
    if len(starts) > 1:
        options.progress.note(
            "the stacks start from different weights, each from those of its newest anchor; --model has all of them "
            "start from the same"
        )
    return looks


def _domains(looks: Mapping[tuple[str, str], Estimate], data: Any) -> tuple[str, tuple[str, ...]]:
    """Return the new domain and the old ones among those that are scored.

    Raises:
        UsageError: if there is nothing to compare runs by.
    """
    known = [look.found or {} for look in looks.values()]
    names = [str(domain["spec"]) for domain in known[0]["eval"]]
    new = known[0]["new"]
    if new is None and not isinstance(items_of(data)[0], str) and names:
        new = names[-1]
    probed = all(any(map(_tells, one["anchors"])) for one in known)
    old = tuple(name for name in names if name != new)
    if new is None or not (old or probed):
        missing = "the new domain is not scored" if new is None else "no old domain is scored and anchors have no probe"
        raise UsageError(
            f"a sweep compares what is learned with what is kept, and {missing}. Name both: --eval OLD --eval-new NEW; "
            "or the new one alone, with anchors that have a probe (consolidate --probe)"
        )
    return new, old


def _tells(anchor: Mapping[str, Any]) -> bool:
    """Whether an anchor of a run has a probe that says what share of the answers is unchanged."""
    return any(probe.get("likelihood") != "gaussian" for probe in anchor["provenance"].get("probes") or [])


def _differing(swept: SweepPlan, run: Run, point: Point | None) -> list[str]:
    """Say in what a run differs from what is asked for.

    Args:
        swept: The sweep.
        run: The run that is there.
        point: Which of the sweep's it is; None if it is at another point.
    """
    options, like = swept.options, point or swept.points[0]
    others, plain, fixed = point is None, like.plain, options.model is not None
    # Fresh weights differ from seed to seed.
    fresh = isinstance(options.model, (str, Path)) and not is_there(options.model)
    finished = run.document["status"] == "finished"
    ignored = {*SOUND, "tolerance", "output"} | (_VARIED if others else set())
    if plain and finished:  # anchors have no part in plain fine-tuning
        ignored = {*ignored, "anchors"}
    now = asked(options.of_run(like))
    texts = [
        text for name, text in differences(now, asked_then(run.document["options"])).items() if name not in ignored
    ]
    then = run.document.get("found")
    if then is None or texts:
        return texts
    known = run.document.get("identities") or {}
    here = (swept.looks[like.stack, like.form].found or {})["identities"]
    left_out: tuple[str, ...] = ("anchor ",) if others or (plain and finished) else ()
    left_out += ("the model's digest",) if fresh or (others and not fixed) else ()
    if left_out:
        known, here = (
            {name: value for name, value in these.items() if not name.startswith(left_out)} for these in (known, here)
        )
    return list(differences(here, known).values())


def _job(swept: SweepPlan, point: Point, goes_on: bool) -> Job:
    path = swept.folder.path
    resume = path / f"{point.name}.run" if goes_on else None
    output = path / f"{point.name}{swept.ending}"
    return Job(point.name, swept.options.of_run(point, output=output, overwrite=True, resume=resume))


def _check_places(folder: SweepFolder, todo: Sequence[Job]) -> None:
    """Refuse to write over files that no run of the sweep has written.

    Raises:
        StorageError: naming the file.
    """
    known = folder.runs()
    for job in todo:
        output = Path(str(job.options.output))
        if output.exists() and job.name not in known:
            raise StorageError(f"{output} exists, and is of no run of this sweep; move it, or choose another --output")


class _Once:
    """Passes every remark on once."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._said: set[str] = set()

    def note(self, message: str) -> None:
        """See `Progress`."""
        if message not in self._said:
            self._said.add(message)
            self._progress.note(message)

    def detail(self, message: str) -> None:
        """See `Progress`."""
        self._progress.detail(message)

    def bar(self, title: str, total: int | None, unit: str) -> contextlib.AbstractContextManager[Bar]:
        """See `Progress`."""
        return self._progress.bar(title, total, unit)
