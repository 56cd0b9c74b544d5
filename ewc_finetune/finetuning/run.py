"""A fine-tune: the work of a plan, and its record."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ewc_finetune.checkpoint.formats.state_dict import StateDict, save_state_dict
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.data.texts import Generated
from ewc_finetune.errors import OccupiedError, RetentionError, StorageError
from ewc_finetune.evaluation.evaluation import Evaluation
from ewc_finetune.evaluation.retention import meters
from ewc_finetune.finetuning.aims import what_keeps_more
from ewc_finetune.finetuning.best_state import Selection
from ewc_finetune.finetuning.finetuned import Finetuned
from ewc_finetune.finetuning.job import Job, ready
from ewc_finetune.finetuning.layer_drift import movements
from ewc_finetune.finetuning.observer import RunObserver, Sink
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.plan import Plan, plan
from ewc_finetune.finetuning.readings import Readings
from ewc_finetune.finetuning.record import findings
from ewc_finetune.finetuning.request import UNSAID, asked, code_named, command_of
from ewc_finetune.finetuning.resume import check_identities, check_left
from ewc_finetune.finetuning.run_checkpoints import RunCheckpoints
from ewc_finetune.finetuning.search_runs import answers, search_by_trials
from ewc_finetune.finetuning.trainer import Trainer, count_steps
from ewc_finetune.finetuning.training_loss import training_loss, warning_of
from ewc_finetune.modules.precision import float32_weights
from ewc_finetune.rehearsal.memory import Memory
from ewc_finetune.reporting.figure import draw_run
from ewc_finetune.runs.folder import RunFolder
from ewc_finetune.runs.tensorboard import TensorBoard
from ewc_finetune.storage import signals
from ewc_finetune.storage.atomic import beside, sha256


def run(todo: Plan) -> Finetuned:
    """Do the work of a plan, and record it.

    The same seed on the same machine gives the same bytes, be it in one go or resumed.

    Raises:
        EwcError: if model and data do not suit each other, or the run ends early (the loss becomes NaN, say). The state
            of the last evaluation is kept then: a module that was passed in goes back to it, and the run folder has it
            as `last.pt`, and goes on with `resume`.
    """
    options, progress = todo.options, todo.options.progress
    with contextlib.ExitStack() as closing:
        folder, identities = None, dict[str, Any]()
        if todo.output is not None:
            identities = todo.identify()
            folder = closing.enter_context(_under_way(todo, todo.output, identities))
            todo = _keeping_generated(todo, folder.generated)
        elif options.lambdas == "auto":  # all its runs read what is generated once
            kept = closing.enter_context(tempfile.TemporaryDirectory())
            todo = _keeping_generated(todo, lambda number: Path(kept) / f"{number}.json")
        search, strengths = None, todo.strengths
        if options.lambdas == "auto":
            todo = replace(todo, answered=answers(todo))
            search = search_by_trials(todo, _short_run, folder)
            strengths = [search.strength * ratio for ratio in strengths]
        job = closing.enter_context(ready(todo, strengths, progress))
        state, history = None, list[dict[str, Any]]()
        if folder is not None:
            folder.update(found=findings(todo, job, identities, strengths, search))
            state, history = folder.load_state()
            if folder.reopened and state is None:
                progress.note(f"{folder.path} has no state of its training to go on from: it starts at its first step")
        sinks = _sinks(folder, options.tensorboard, state, closing)
        observer = _observer(todo, job, folder, sinks, None if search is None else search.strength)
        with _put_back(observer.checkpoints):
            steps = _train(todo, job, observer, state, history)
            if todo.output is not None and folder is not None:
                _write(todo, job, observer, folder, todo.output, steps)
    return Finetuned(
        model=job.start.model,
        before=Evaluation(observer.before),
        after=Evaluation(observer.readings.scores),
        history=observer.history,
        search=search,
        steps=steps,
        step=observer.checkpoints.step,
        training_loss=training_loss(observer.history),
        retention=observer.readings.retention,
        norm_stats=todo.schedule.norm_stats or "frozen",
        lineage=job.metadata.lineage,
        head=job.metadata.head,
        output=todo.output,
        run=None if folder is None else folder.path,
    )


def _short_run(options: FinetuneOptions, answered: Sequence[Memory]) -> Finetuned:
    return run(replace(plan(options), answered=answered))


def _observer(
    todo: Plan, job: Job, folder: RunFolder | None, sinks: Sequence[Sink], found: float | None
) -> RunObserver:
    """Return what watches the run; from here on it undoes what a run leaves unfinished.

    `found` is the lambda that was found, if one was looked for.
    """
    model, size = job.start.model, 2 * todo.schedule.batch_size
    selection = None if todo.chosen is None else Selection(todo.chosen, todo.schedule.patience)
    probes, metrics = meters(model, job.measured, job.metadata.head), todo.options.metrics
    readings = Readings(model, job.watched, probes, size, todo.device, metrics)
    of_caller = isinstance(todo.options.model, nn.Module)
    checkpoints = RunCheckpoints(model, job.metadata, folder, selection, of_caller, job.undoing.pop_all().close)
    advice = what_keeps_more(todo.options, found)
    return RunObserver(readings, checkpoints, sinks, todo.options.retain, todo.options.progress, advice)


def _sinks(
    folder: RunFolder | None, tensorboard: bool, state: Mapping[str, Any] | None, closing: contextlib.ExitStack
) -> list[Sink]:
    """Return where the log goes."""
    if folder is None:
        return []
    if not tensorboard:
        return [folder]
    done = 0 if state is None else state["training"]["step"]
    return [folder, closing.enter_context(TensorBoard(folder.path / "tensorboard", done))]


@contextlib.contextmanager
def _hint(folder: RunFolder, options: FinetuneOptions) -> Iterator[None]:
    """Say how to go on, if the run ends early with something to go on from."""
    try:
        yield
    except BaseException as error:
        trust = " --trust-code" if options.trust_code or code_named(vars(options)) else ""
        lost, go_on = isinstance(error, RetentionError), f"ewc-ft finetune --resume {folder.path}{trust}"
        # What was lost stays lost, but with less to be kept; a search for lambda has made its runs for that share.
        if folder.resumable and not (lost and options.lambdas == "auto"):
            kept = f"the state of the last evaluation is kept, as {folder.last}; " if folder.last.exists() else ""
            how = f" with less: {go_on} --retain X, of a smaller X" if lost else f": {go_on}"
            options.progress.note(f"{kept}to go on{how}")
        elif isinstance(error, (signals.Interrupted, KeyboardInterrupt)) and not (lost or folder.reopened):
            options.progress.note(
                "nothing of the run is kept, for its first evaluation was not reached; --eval-every N makes it sooner"
            )
        raise


@contextlib.contextmanager
def _put_back(checkpoints: RunCheckpoints) -> Iterator[None]:
    """Put a caller's module back to its last good state, if the run ends early."""
    try:
        yield
    except BaseException:
        checkpoints.put_back()
        raise


def _train(
    todo: Plan,
    job: Job,
    observer: RunObserver,
    state: Mapping[str, Any] | None,
    history: list[dict[str, Any]],
) -> int:
    """Train from the start or from a state, and leave the model as the run is to end; return the number of steps."""
    model, domain, schedule, progress = job.start.model, job.new.domain, todo.schedule, todo.options.progress
    checkpoints, shuffle = observer.checkpoints, torch.Generator().manual_seed(todo.options.seed)
    if state is None:
        observer.start()
    else:
        place = state["training"]
        check_left(schedule.epochs, place["epoch"] - (place["batch"] == 0))
        observer.load_state(state["journal"], history)
        progress.note(f"going on after step {checkpoints.last:,}")
    total = count_steps(domain, schedule)
    with (
        float32_weights(model) as checkpoints.dtypes,
        job.freezing(),
        progress.bar(f"fine-tuning on {domain.name}", total, "step") as bar,
    ):
        trainer = Trainer(job, schedule, shuffle, bar, observer)
        steps = trainer.run(None if state is None else state["training"], go_on=not checkpoints.exhausted)
        if trainer.skipped:
            progress.note(f"{trainer.skipped:,} of {steps:,} steps were skipped, for gradients overflowed in fp16")
        if schedule.keeps_best:
            observer.choose()
    model.zero_grad(set_to_none=True)
    model.eval()
    if checkpoints.dtypes:
        progress.note("half-precision weights were trained in float32 and are rounded back now")
        observer.look_again()
    loss = training_loss(observer.history)
    if loss is not None and loss.worse:
        held = job.penalty is not None and job.penalty.pulls
        progress.note(warning_of(loss, checkpoints.step, checkpoints.last, held))
    observer.check_retention(checkpoints.step)
    return steps


def _write(todo: Plan, job: Job, observer: RunObserver, folder: RunFolder, output: Path, steps: int) -> None:
    """Write the checkpoint, and close the run folder."""
    start, checkpoints, readings = job.start, observer.checkpoints, observer.readings
    layers = movements(start.model, checkpoints.start_weights, job.penalty)
    loss = training_loss(observer.history)
    save = save_state_dict if start.checkpoint is None else start.checkpoint.save
    with folder.writing(), _kept(start, checkpoints, folder, output):
        save(output, start.model, job.metadata, overwrite=todo.overwrite)
    try:
        draw_run(folder.path / "figure.png", observer.history, f"Fine-tuning on {job.new.name}")
    except StorageError as error:  # the model is there, which is what counts
        todo.options.progress.note(str(error))
    folder.finish(
        keep_last=todo.schedule.keeps_best and checkpoints.step != checkpoints.last,
        written={"file": output.name, "sha256": sha256(output) if output.is_file() else None},
        steps=steps,
        step=checkpoints.step,
        seconds=round(observer.elapsed(), 3),
        training_loss=None if loss is None else asdict(loss),
        before=[asdict(score) for score in observer.before],
        after=[asdict(score) for score in readings.scores],
        retention=[asdict(kept) for kept in readings.retention] or None,
        layers=layers,
    )


@contextlib.contextmanager
def _under_way(todo: Plan, output: Path, identities: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Have the run folder while the run is under way, in which a signal waits until it can be left in order."""
    with signals.deferred(), _folder(todo, output, identities) as folder, _hint(folder, todo.options):
        yield folder


def _folder(todo: Plan, output: Path, identities: Mapping[str, Any]) -> RunFolder:
    """Open the run folder: a new one, or that of the run to go on with, if it is still the same run."""
    options, command = asked(todo.options), command_of(todo.options)
    if todo.earlier is None:
        return RunFolder.create(beside(output, ".run"), todo.overwrite, options, command, identities, UNSAID)
    options["output"] = todo.earlier.document["options"]["output"]
    check_identities(todo.earlier, identities)
    folder = RunFolder.reopen(todo.earlier.path)
    try:
        folder.take_up(options, command, UNSAID)
    except BaseException:
        folder.stop("interrupted")
        raise
    return folder


def _keeping_generated(todo: Plan, path: Callable[[int], Path]) -> Plan:
    """Have what is generated to be rehearsed kept at a path for each source, by its number, and read if it is there."""
    rehearsed = [
        replace(domain, samples=replace(domain.samples, kept=path(number)))
        if domain is not None and isinstance(domain.samples, Generated)
        else domain
        for number, domain in enumerate(todo.rehearsed, 1)
    ]
    return replace(todo, rehearsed=rehearsed)


@contextlib.contextmanager
def _kept(start: LoadedModel, checkpoints: RunCheckpoints, folder: RunFolder, output: Path) -> Iterator[None]:
    """Leave what was trained in the run folder as a state dict, if it cannot be written in its own format.

    Raises:
        StorageError: saying where it is.
    """
    try:
        yield
    except OccupiedError:  # which says where the model is
        raise
    except Exception as error:
        kept = folder.last if checkpoints.step == checkpoints.last else folder.best(checkpoints.step)
        if not kept.exists():
            try:
                save_state_dict(kept, start.model, checkpoints.metadata)
            except StorageError:  # the disk may be what stopped it
                raise error from None
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        kind = StateDict.format if start.checkpoint is None else start.checkpoint.format
        raise StorageError(
            f"the model is trained, and could not be written to {output} as {kind} ({reason}). Its weights are kept "
            f"as a state dict: {kept}"
        ) from error
