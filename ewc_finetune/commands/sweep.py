"""`sweep`: many fine-tunes that differ in lambda, anchors, penalty form or seed, and the frontier that they make."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ewc_finetune._version import __version__
from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.formats.state_dict import StateDict
from ewc_finetune.checkpoint.location import is_there
from ewc_finetune.checkpoint.open import ending_of
from ewc_finetune.checkpoint.pin import pinned_model
from ewc_finetune.choices import PenaltyForm
from ewc_finetune.commands.dry_run import dry_run
from ewc_finetune.commands.finetune import default_output, finetune
from ewc_finetune.errors import EwcError, NonFiniteError, StorageError, UsageError, few
from ewc_finetune.evaluation.cost import Estimate
from ewc_finetune.finetuning.options import asked_by
from ewc_finetune.finetuning.resume import SOUND
from ewc_finetune.progress import Bar, Progress, Silent
from ewc_finetune.reporting.outcome import new_domain
from ewc_finetune.reporting.tradeoff import Position, Tradeoff
from ewc_finetune.runs.options_file import differences
from ewc_finetune.runs.record import Run
from ewc_finetune.storage.atomic import beside
from ewc_finetune.storage.workspace import recover, remove
from ewc_finetune.sweeps.folder import DOCUMENT, FIGURE, TABLE, SweepFolder, check_sweep_folder
from ewc_finetune.sweeps.grid import Point, Stack, as_stacks, check_grid, grid
from ewc_finetune.sweeps.workers import Job, run_jobs

DEFAULT_LAMBDAS = (1.0, 10.0, 100.0, 1000.0, 10000.0)
# Options in which the runs of a sweep differ.
_VARIED = {"anchors", "lambda", "penalty-form", "seed"}


@dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Attributes:
        folder: Where its runs are.
        tradeoff: What came of them.
        document: The same in values that JSON has.
    """

    folder: Path
    tradeoff: Tradeoff
    document: dict[str, Any]

    def __repr__(self) -> str:
        return f"<Sweep {str(self.folder)!r}: {len(self.tradeoff.outcomes)} runs>"

    @property
    def knee(self) -> Position | None:
        """The point at which the frontier bends most."""
        return None if self.tradeoff.knee is None else self.tradeoff.positions[self.tradeoff.knee]


def sweep(
    model: str | Path | nn.Module | None,
    data: Any,
    *,
    anchors: Anchor | str | Path | Sequence[Anchor | str | Path | Sequence[Anchor | str | Path]],
    lambdas: Sequence[float] = DEFAULT_LAMBDAS,
    penalty_forms: Sequence[PenaltyForm] = ("gradient",),
    seeds: Sequence[int] = (0,),
    plain: bool = True,
    jobs: int = 1,
    discard: bool = False,
    output: str | Path,
    overwrite: bool = False,
    before_start: Callable[[Estimate], None] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Sweep:
    """Fine-tune with every combination of lambda, anchors, penalty form and seed, and find the frontier.

    Each is a `finetune` of its own. Called again, it makes what is not there yet and goes on with what was stopped; a
    run that fails does not end the others, and is tried again.

    Args:
        model: As in `finetune`; a module is copied for each run.
        data: Likewise.
        anchors: The stacks to try: each an anchor, or a sequence of anchors that pull together, oldest first.
        lambdas: Strengths to try, each for all anchors of a stack.
        penalty_forms: Forms of the penalty to try.
        seeds: Each point is tried with all of them, and is their mean.
        plain: Whether to make a run without penalty too, for each seed.
        jobs: How many runs at a time. More than one are made in processes of their own, which share this one's threads;
            they are spawned, so a script needs `if __name__ == "__main__":`.
        discard: Whether to remove the checkpoints in the end, but for those of the knee and of the best mean.
        output: The folder of the sweep.
        overwrite: Whether runs in it that were made with other options may be replaced.
        before_start: As in `finetune`; what it is called with is of all the runs that are left.
        progress: Told what happens.
        options: Others of `finetune`. `eval_on` names an old domain and the new one, unless the anchors have probes; of
            data without a spec the new one is that of the same name, else the last.

    Raises:
        EwcError: naming what is wrong with an option, an anchor, the data or the folder; or if every run failed.
    """
    progress, path = progress or Silent(), Path(output)
    check_grid(lambdas, penalty_forms, seeds, jobs)
    model, stacks = pinned_model(model, progress), as_stacks(anchors, progress)
    points = grid(stacks, lambdas, penalty_forms, seeds, plain)
    check_sweep_folder(path)
    recover(path.parent, progress.note)
    recover(path, progress.note)
    ending = _ending(model, stacks[0])
    place = path.with_name(f".ewc-ft-try{ending}")  # a path like those of the runs, where nothing is
    looks = _looks(points, model, data, {**options, "output": place}, progress)
    folder = SweepFolder(path, points, *_domains(looks, data))
    # What only asks makes no folder, which is what another sweep would be kept out by.
    keeping_out = folder.alone() if before_start is None else contextlib.nullcontext()
    with keeping_out:
        plan = _plan(folder, model, data, looks, options, overwrite, discard)
        todo = [_job(point, folder, ending, options, plan) for point in points if point.name not in plan.done]
        _check_places(folder, todo)
        going_on = sum(point.name in plan.stopped for point in points)
        progress.note(
            f"{len(points)} runs: {len(todo) - going_on} to make, {going_on} to go on with, "
            f"{len(points) - len(todo)} done"
        )
        if plan.stale:
            progress.note(
                f"left out, for they were made with other options: {few([run.path.name for run in plan.stale])}"
            )
        if before_start is not None:
            before_start(_estimate(looks, todo, points, folder, jobs))
        folder.left_out |= {run.path.name.removesuffix(".run") for run in plan.stale}
        for killed in folder.without_record():
            remove(killed)
        with _ending_well(folder, progress):
            folder.write("running")
            _make(folder, todo, model, data, jobs, progress)
        found = folder.write("finished")
        if len(folder.failures) == len(points):
            first = next(iter(folder.failures.values()))
            raise EwcError(f"all {len(points)} runs of the sweep {path} failed; the first one: {first}")
        done = Sweep(path, found, folder.to_json(found, "finished"))
        if discard:
            _discard(done, folder, progress)
    return done


def default_folder(model: str | Path | None, stack: Sequence[str | Path], data: str) -> Path:
    """Return where a sweep goes: beside the first stack's newest anchor, named for it and the new data."""
    return beside(default_output(model, stack, data), ".sweep")


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


def _looks(
    points: Sequence[Point], model: Any, data: Any, options: Mapping[str, Any], progress: Progress
) -> dict[tuple[str, str], Estimate]:
    """Try a little of one run of each stack and form: what does not fit is refused before the first one is made."""
    looks: dict[tuple[str, str], Estimate] = {}
    told = _Once(progress)
    for point in sorted(points, key=lambda point: (point.strength == 0, point.strength)):
        key = (point.stack, point.form)
        if key in looks:
            continue
        tried = {**options, **point.options, "progress": told}
        try:
            looks[key] = dry_run(finetune, model, data, **tried)
        except NonFiniteError:  # a lambda may be too large, which its run will say
            looks[key] = dry_run(finetune, model, data, **{**tried, "lambdas": [0.0], "progress": Silent()})
    starts = {str((look.found or {})["checkpoint"]["sha256"]) for look in looks.values()}
    if len(starts) > 1:
        progress.note(
            "the stacks start from different weights, each from those of its newest anchor; --model has all of them "
            "start from the same"
        )
    return looks


def _domains(looks: Mapping[tuple[str, str], Estimate], data: Any) -> tuple[str, tuple[str, ...]]:
    """Return the new domain and the old ones among those that are scored.

    Raises:
        UsageError: if there is nothing to compare runs by.
    """
    found = [look.found or {} for look in looks.values()]
    names = [str(domain["spec"]) for domain in found[0]["eval"]]
    new = new_domain(found[0]["data"]["spec"], names)
    if new is None and not isinstance(data, str) and names:
        new = names[-1]
    probed = all(any(map(_tells, one["anchors"])) for one in found)
    old = tuple(name for name in names if name != new)
    if new is None or not (old or probed):
        missing = "the new domain is not scored" if new is None else "no old domain is scored and anchors have no probe"
        raise UsageError(
            f"a sweep compares what is learned with what is kept, and {missing}. Name both: --eval OLD --eval NEW; or "
            "the new one alone, with anchors that have a probe (consolidate --probe)"
        )
    return new, old


@dataclass(frozen=True)
class _Plan:
    """What is to be done about the runs that are in the folder.

    Attributes:
        done: Names of those that are finished.
        stopped: Of those to go on with.
        stale: Runs that nobody asks for and that don't belong with the others: they are left out.
    """

    done: set[str]
    stopped: set[str]
    stale: list[Run]


def _plan(
    folder: SweepFolder,
    model: Any,
    data: Any,
    looks: Mapping[tuple[str, str], Estimate],
    options: Mapping[str, Any],
    overwrite: bool,
    discard: bool,
) -> _Plan:
    """Look at the runs that are there.

    Raises:
        UsageError: naming those that were made with other options, unless they may be replaced.
    """
    plan = _Plan(set(), set(), [])
    points = {point.name: point for point in folder.points}
    wrong: dict[str, list[str]] = {}
    fresh = isinstance(model, (str, Path)) and not is_there(model)
    for name, run in folder.runs().items():
        point = points.get(name)
        like = point or folder.points[0]
        now = asked_by(model, data, {**options, **like.options})
        found = looks[like.stack, like.form].found or {}
        differing = _differing(
            run, now, found, others=point is None, plain=like.strength == 0, fixed=model is not None, fresh=fresh
        )
        if differing and point is None:
            plan.stale.append(run)
        elif differing:
            wrong[name] = differing
        elif point is not None and run.document["status"] == "finished":
            if discard or folder.checkpoint(run).exists():
                plan.done.add(name)
        elif point is not None and (run.document.get("versions") or {}).get("ewc_finetune") == __version__:
            plan.stopped.add(name)
    if wrong and not overwrite:
        first, more = next(iter(wrong)), f", and so were {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise UsageError(
            f"the sweep {folder.path} has runs that were made with other options: {first} ({'; '.join(wrong[first])})"
            f"{more}. Use the same ones, choose another --output, or replace these runs with --overwrite"
        )
    return plan


def _differing(
    run: Run, now: Mapping[str, Any], found: Mapping[str, Any], *, others: bool, plain: bool, fixed: bool, fresh: bool
) -> list[str]:
    """Say in what a run differs from what is asked for.

    Args:
        run: The run that is there.
        now: The options that are asked for.
        found: What they turn out to be.
        others: Whether the run is at another point of the sweep.
        plain: Whether it is plain fine-tuning, which anchors have no part in, if it is finished.
        fixed: Whether all runs start from the same model.
        fresh: Whether they start from fresh weights, of which each seed has its own.
    """
    finished = run.document["status"] == "finished"
    ignored = {*SOUND, "tolerance", "output"} | (_VARIED if others else set())
    if plain and finished:
        ignored = {*ignored, "anchors"}
    texts = [text for name, text in differences(now, run.document["options"]).items() if name not in ignored]
    then = run.document.get("found")
    if then is None or texts:
        return texts
    known, here = run.document.get("identities") or {}, found["identities"]
    left_out: tuple[str, ...] = ("anchor ",) if others or (plain and finished) else ()
    left_out += ("the model's digest",) if fresh or (others and not fixed) else ()
    if left_out:
        known, here = (
            {name: value for name, value in these.items() if not name.startswith(left_out)} for these in (known, here)
        )
    return list(differences(here, known).values())


def _job(point: Point, folder: SweepFolder, ending: str, options: Mapping[str, Any], plan: _Plan) -> Job:
    own: dict[str, Any] = {"output": folder.path / f"{point.name}{ending}", "overwrite": True}
    if point.name in plan.stopped:
        own["resume"] = folder.path / f"{point.name}.run"
    return Job(point.name, {**options, **point.options, **own})


def _tells(anchor: Mapping[str, Any]) -> bool:
    """Whether an anchor of a run has a probe that says what share of the answers is unchanged."""
    return any(probe.get("likelihood") != "gaussian" for probe in anchor["provenance"].get("probes") or [])


def _check_places(folder: SweepFolder, todo: Sequence[Job]) -> None:
    """Refuse to write over files that no run of the sweep has written.

    Raises:
        StorageError: naming the file.
    """
    known = folder.runs()
    for job in todo:
        output = Path(job.options["output"])
        if output.exists() and job.name not in known:
            raise StorageError(f"{output} exists, and is of no run of this sweep; move it, or choose another --output")


def _estimate(
    looks: Mapping[tuple[str, str], Estimate],
    todo: Sequence[Job],
    points: Sequence[Point],
    folder: SweepFolder,
    jobs: int,
) -> Estimate:
    """Return what the runs that are left will need, one after another."""
    left = {job.name: Path(job.options["output"]) for job in todo}
    chosen = [point for point in points if point.name in left]
    each = [looks[point.stack, point.form] for point in chosen]
    steps = [look.work["steps"] for look in each]
    seconds = [look.seconds for look in each]
    most: Counter[str] = Counter()
    for look in looks.values():
        for where, size in look.memory.items():
            most[where] = max(most[where], (size or 0) * max(1, min(jobs, len(todo))))
    return Estimate(
        work={"runs": len(todo), "steps": None if None in steps else sum(n for n in steps if n is not None)},
        seconds=None if None in seconds else sum(s for s in seconds if s is not None),
        memory={where: size or None for where, size in most.items()},
        files=(
            *(path for output in left.values() for path in (output, beside(output, ".run"))),
            *(folder.path / name for name in (TABLE, DOCUMENT, FIGURE)),
        ),
    )


def _make(folder: SweepFolder, todo: Sequence[Job], model: Any, data: Any, jobs: int, progress: Progress) -> None:
    """Make the runs that are left, and write what there is after each."""
    if not todo:
        return
    with progress.bar("sweep", len(todo), "run") as bar:

        def started(name: str) -> Progress:
            bar.advance(0, run=name)
            return _Within(bar, name)

        with contextlib.closing(run_jobs(todo, model, data, jobs, started)) as ended:
            for name, failure in ended:
                if failure is not None:
                    folder.failures[name] = failure
                found = folder.write("running")
                row = next(row for row in found.rows if row.name == name)
                bar.advance(1)
                progress.note(f"{name}: {found.said(row)}")


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
    found = done.tradeoff
    kept = [n for n, marks in enumerate(found.marks) if {"knee", "best mean"} & set(marks)]
    if not kept:
        progress.note("no point is better than all others, so every checkpoint is kept")
        return
    names = {row.name for n in kept for row in found.positions[n].rows}
    gone = [o.label for o in found.outcomes if o.label in names and not folder.checkpoint(o.run).exists()]
    if gone:
        progress.note(
            f"nothing is discarded, for the checkpoints of {few(gone)} are gone already; without --discard the sweep "
            "makes them again"
        )
        return
    for outcome in found.outcomes:
        if outcome.run.path.name.removesuffix(".run") not in names:
            folder.discard(outcome.run)
    progress.note(f"the checkpoints but for those of {', '.join(sorted(names))} are discarded")


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
