"""A fine-tune: the work of a plan, and its record."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ewc_finetune.checkpoint.checkpoint import Record
from ewc_finetune.checkpoint.formats.state_dict import StateDict, save_state_dict
from ewc_finetune.checkpoint.open import Opened
from ewc_finetune.errors import OccupiedError, RetentionError, StorageError
from ewc_finetune.evaluation.retention import meters
from ewc_finetune.finetuning.best_state import Selection
from ewc_finetune.finetuning.finetuned import Finetuned
from ewc_finetune.finetuning.job import Job, ready
from ewc_finetune.finetuning.layer_drift import movements
from ewc_finetune.finetuning.observer import Journal
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.plan import Plan, plan
from ewc_finetune.finetuning.record import found
from ewc_finetune.finetuning.request import asked, command_of
from ewc_finetune.finetuning.resume import check_identities, check_left
from ewc_finetune.finetuning.search_runs import search_by_trials
from ewc_finetune.finetuning.trainer import Trainer, count_steps
from ewc_finetune.finetuning.training_loss import training_loss, warning_of
from ewc_finetune.modules.precision import float32_weights
from ewc_finetune.progress import Progress
from ewc_finetune.reporting.plots import draw_run
from ewc_finetune.runs.folder import RunFolder
from ewc_finetune.runs.tensorboard import TensorBoard
from ewc_finetune.specs.options import names_of
from ewc_finetune.storage import signals
from ewc_finetune.storage.atomic import beside, sha256


def run(todo: Plan, progress: Progress) -> Finetuned:
    """Do the work of a plan, and record it.

    The same seed on the same machine gives the same bytes, be it in one go or resumed.

    Args:
        todo: What is to be done.
        progress: Told what happens.

    Raises:
        EwcError: if model and data do not suit each other, or the run ends early (the loss becomes NaN, say). The state
            of the last evaluation is kept then: a module that was passed in goes back to it, and the run folder has it
            as `last.pt`, and goes on with `resume`.
    """
    options = todo.options
    with contextlib.ExitStack() as closing:
        folder = None if todo.output is None else closing.enter_context(_under_way(todo, todo.output, progress))
        search, strengths = None, todo.strengths
        if options.lambdas == "auto":
            search = search_by_trials(todo, _short_run, folder, progress)
            strengths = [search.strength * ratio for ratio in strengths]
        job = closing.enter_context(ready(todo, strengths, progress))
        state, history = None, list[dict[str, Any]]()
        if folder is not None:
            folder.update(found=found(todo, job, strengths, search))
            state, history = folder.load_state()
        # From here on it is the journal that undoes what a run leaves unfinished.
        journal = _journal(todo, job, folder, _sinks(folder, options.tensorboard, state, closing), progress)
        with _put_back(journal):
            steps = _train(todo, job, journal, state, history, progress)
            if todo.output is not None and folder is not None:
                _write(todo, job, journal, folder, todo.output, steps, progress)
    return Finetuned(
        model=job.start.model,
        before=journal.before,
        after=journal.scores,
        history=journal.history,
        search=search,
        steps=steps,
        step=journal.step,
        training_loss=training_loss(journal.history),
        retention=journal.retention,
        norm_stats=todo.schedule.norm_stats or "frozen",
        lineage=job.record.lineage,
        head=job.record.head,
        output=todo.output,
        run=None if folder is None else folder.path,
    )


def _short_run(options: FinetuneOptions, progress: Progress) -> Finetuned:
    return run(plan(options, progress), progress)


def _journal(
    todo: Plan, job: Job, folder: RunFolder | None, sinks: Sequence[TensorBoard], progress: Progress
) -> Journal:
    return Journal(
        job.start.model,
        job.watched,
        2 * todo.schedule.batch_size,
        todo.device,
        job.record,
        folder,
        None if todo.chosen is None else Selection(todo.chosen, todo.schedule.patience),
        meters(job.start.model, todo.anchors, job.record.head),
        todo.options.retain,
        sinks,
        isinstance(todo.options.model, nn.Module),
        progress,
        job.undoing.pop_all().close,
    )


def _sinks(
    folder: RunFolder | None, tensorboard: bool, state: Mapping[str, Any] | None, closing: contextlib.ExitStack
) -> list[TensorBoard]:
    """Return where else the log goes."""
    if folder is None or not tensorboard:
        return []
    done = 0 if state is None else state["training"]["step"]
    return [closing.enter_context(TensorBoard(folder.path / "tensorboard", done))]


@contextlib.contextmanager
def _hint(folder: RunFolder, progress: Progress) -> Iterator[None]:
    """Say how to go on, if the run ends early with something to go on from."""
    try:
        yield
    except BaseException as error:
        if folder.resumable and not isinstance(error, RetentionError):  # which would come again
            kept = f"the state of the last evaluation is kept, as {folder.last}; " if folder.last.exists() else ""
            progress.note(f"{kept}to go on: ewc-ft finetune --resume {folder.path}")
        raise


@contextlib.contextmanager
def _put_back(journal: Journal) -> Iterator[None]:
    """Put a caller's module back to its last good state, if the run ends early."""
    try:
        yield
    except BaseException:
        journal.stop()
        raise


def _train(
    todo: Plan,
    job: Job,
    journal: Journal,
    state: Mapping[str, Any] | None,
    history: list[dict[str, Any]],
    progress: Progress,
) -> int:
    """Train from the start or from a state, and leave the model as the run is to end; return the number of steps."""
    model, domain, schedule = job.start.model, job.new.domain, todo.schedule
    shuffle = torch.Generator().manual_seed(todo.options.seed)
    if state is None:
        journal.start()
    else:
        place = state["training"]
        check_left(schedule.epochs, place["epoch"] - (place["batch"] == 0))
        journal.load_state(state["journal"], history)
        progress.note(f"going on after step {journal.last:,}")
    total = count_steps(domain, schedule)
    with (
        float32_weights(model) as journal.dtypes,
        job.freezing(),
        progress.bar(f"fine-tuning on {domain.name}", total, "step") as bar,
    ):
        trainer = Trainer(model, job.new, job.penalty, schedule, shuffle, bar, journal)
        steps = trainer.run(None if state is None else state["training"], go_on=not journal.exhausted)
        if trainer.skipped:
            progress.note(f"{trainer.skipped:,} of {steps:,} steps were skipped, for gradients overflowed in fp16")
        if schedule.keeps_best:
            journal.choose()
    model.zero_grad(set_to_none=True)
    model.eval()
    if journal.dtypes:
        progress.note("half-precision weights were trained in float32 and are rounded back now")
        journal.look_again()
    loss = training_loss(journal.history)
    if loss is not None and loss.worse:
        progress.note(warning_of(loss, journal.step, journal.last, job.penalty is not None))
    journal.check_retention(journal.step)
    return steps


def _write(
    todo: Plan, job: Job, journal: Journal, folder: RunFolder, output: Path, steps: int, progress: Progress
) -> None:
    """Write the checkpoint, and close the run folder."""
    start = job.start
    layers = movements(start.model, journal.start_weights, job.penalty)
    loss = training_loss(journal.history)
    save = save_state_dict if start.checkpoint is None else start.checkpoint.save
    with folder.writing(), _kept(start, job.record, journal, folder, output):
        save(output, start.model, job.record, overwrite=todo.overwrite)
    try:
        draw_run(folder.path / "figure.png", journal.history, f"Fine-tuning on {job.new.name}")
    except StorageError as error:  # the model is there, which is what counts
        progress.note(str(error))
    folder.finish(
        keep_last=todo.schedule.keeps_best and journal.step != journal.last,
        written={"file": output.name, "sha256": sha256(output) if output.is_file() else None},
        steps=steps,
        step=journal.step,
        seconds=round(journal.elapsed(), 3),
        training_loss=None if loss is None else asdict(loss),
        before=[asdict(found) for found in journal.before],
        after=[asdict(found) for found in journal.scores],
        retention=[asdict(found) for found in journal.retention] or None,
        layers=layers,
    )


@contextlib.contextmanager
def _under_way(todo: Plan, output: Path, progress: Progress) -> Iterator[RunFolder]:
    """Have the run folder while the run is under way, in which a signal waits until it can be left in order."""
    with signals.deferred(), _folder(todo, output) as folder, _hint(folder, progress):
        yield folder


def _folder(todo: Plan, output: Path) -> RunFolder:
    """Open the run folder: a new one, or that of the run to go on with, if it is still the same run."""
    options, command = asked(todo.options), command_of(todo.options)
    unsaid = names_of(FinetuneOptions, lambda known: not known.filed)
    if todo.earlier is None:
        return RunFolder.create(beside(output, ".run"), todo.overwrite, options, command, todo.identities, unsaid)
    options["output"] = todo.earlier.document["options"]["output"]
    check_identities(todo.earlier, todo.identities)
    folder = RunFolder.reopen(todo.earlier.path)
    try:
        folder.take_up(options, command, unsaid)
    except BaseException:
        folder.stop("interrupted")
        raise
    return folder


@contextlib.contextmanager
def _kept(start: Opened, record: Record, journal: Journal, folder: RunFolder, output: Path) -> Iterator[None]:
    """Leave what was trained in the run folder as a state dict, if it cannot be written in its own format.

    Raises:
        StorageError: saying where it is.
    """
    try:
        yield
    except OccupiedError:  # which says where the model is
        raise
    except Exception as error:
        kept = folder.last if journal.step == journal.last else folder.best(journal.step)
        if not kept.exists():
            try:
                save_state_dict(kept, start.model, record)
            except StorageError:  # the disk may be what stopped it
                raise error from None
        reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
        kind = StateDict.format if start.checkpoint is None else start.checkpoint.format
        raise StorageError(
            f"the model is trained, and could not be written to {output} as {kind} ({reason}). Its weights are kept "
            f"as a state dict: {kept}"
        ) from error
