"""`finetune`: adapt a model to a new domain under the penalty of its anchors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.checkpoint import Record, check_ending
from ewc_finetune.checkpoint.formats.state_dict import StateDict, save_state_dict
from ewc_finetune.checkpoint.formats.transformers_folder import HuggingFace
from ewc_finetune.checkpoint.location import is_there, place_of
from ewc_finetune.checkpoint.open import Opened, ending_of
from ewc_finetune.checkpoint.pin import fetched_anchors, pinned_model
from ewc_finetune.choices import (
    DEFAULT_LAMBDA,
    HEADS,
    LINEAGES,
    PENALTY_FORMS,
    Head,
    LikelihoodName,
    Lineage,
    NormStats,
    PenaltyForm,
    check_choice,
)
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.sources import resolve_domain
from ewc_finetune.errors import Mistakes, OccupiedError, RetentionError, StorageError, UsageError, suggest
from ewc_finetune.evaluation.cost import Estimate
from ewc_finetune.evaluation.probe import Retention
from ewc_finetune.evaluation.retention import meters
from ewc_finetune.evaluation.score import Score
from ewc_finetune.finetuning.aims import Aim
from ewc_finetune.finetuning.best_state import Selection, selecting
from ewc_finetune.finetuning.cost import estimate_finetuning
from ewc_finetune.finetuning.fingerprint import identify
from ewc_finetune.finetuning.lambda_search import DEFAULT_TOLERANCE, Search
from ewc_finetune.finetuning.layer_drift import movements
from ewc_finetune.finetuning.notes import say
from ewc_finetune.finetuning.observer import Journal
from ewc_finetune.finetuning.options import asked, defaults, is_told, listed
from ewc_finetune.finetuning.plan import Setup, also_selected, known, likelihood_of, open_start, set_up, watched_domains
from ewc_finetune.finetuning.record import found as recorded
from ewc_finetune.finetuning.resume import check_identities, check_left, check_options, output_of
from ewc_finetune.finetuning.schedule import Schedule, Training
from ewc_finetune.finetuning.search_runs import aim_of, search_by_trials, trials_cost
from ewc_finetune.finetuning.trainer import Trainer, count_steps
from ewc_finetune.finetuning.training_loss import TrainingLoss, training_loss, warning_of
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.devices import choose_device, on_device, random_state_kept
from ewc_finetune.modules.modes import normalisation_layers
from ewc_finetune.modules.precision import float32_weights
from ewc_finetune.penalty.quadratic import spread_lambdas
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.reporting.plots import draw_run
from ewc_finetune.runs.folder import RunFolder, check_run_folder
from ewc_finetune.runs.idle import FINETUNE, say_idle
from ewc_finetune.runs.options_file import to_command
from ewc_finetune.runs.record import Run, read_run, recover_run
from ewc_finetune.runs.tensorboard import TensorBoard
from ewc_finetune.storage import signals
from ewc_finetune.storage.atomic import beside, check_output, sha256

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Finetuned:
    """What a fine-tune gave.

    Attributes:
        model: The adapted model; the caller's own where a module was passed.
        before: Score on every evaluated domain before the first step.
        after: The same of the state that the run ended with.
        history: The lines of `metrics.jsonl`.
        search: How lambda was found, if it was looked for.
        steps: Optimizer steps taken.
        step: The one whose state this is: the last, or the best; 0 is the start.
        training_loss: How the loss of its own batches went; None if no step was taken.
        retention: What the state has kept of the answers to the anchors' probes.
        norm_stats: What was done with normalisation statistics.
        lineage: The anchors that have pulled on the model, for `consolidate`; a checkpoint file carries them itself.
        head: What is known of its last layer, if it was given a new one; likewise.
        output: The checkpoint file, where one was written.
        run: The run folder, where one was written.
    """

    model: nn.Module
    before: list[Score]
    after: list[Score]
    history: list[dict[str, Any]]
    search: Search | None
    steps: int
    step: int
    training_loss: TrainingLoss | None
    retention: list[Retention]
    norm_stats: NormStats
    lineage: list[dict[str, Any]]
    head: dict[str, Any] | None
    output: Path | None
    run: Path | None

    def __repr__(self) -> str:
        scores = [f"{b.domain} {b.main} to {a.main}" for b, a in zip(self.before, self.after, strict=True)]
        parts = [f"{self.steps:,} steps", *scores, *([] if self.output is None else [str(self.output)])]
        return f"<Finetuned {type(self.model).__name__}: {', '.join(parts)}>"


def finetune(
    model: str | Path | nn.Module | None,
    data: Any,
    *,
    anchors: Anchor | str | Path | Sequence[Anchor | str | Path] = (),
    lambdas: float | Sequence[float] | Literal["auto"] | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    retain: float | None = None,
    penalty_form: PenaltyForm = "gradient",
    lineage: Lineage = "all",
    head: Head = "shared",
    freeze: Sequence[str] = (),
    architecture: str | None = None,
    trust_code: bool = False,
    likelihood: LikelihoodName | None = None,
    eval_on: Sequence[Any] | Mapping[str, Any] | None = None,
    select_on: Sequence[Any] = (),
    seed: int = 0,
    device: str = "auto",
    data_dir: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    resume: str | Path | None = None,
    tensorboard: bool = False,
    before_start: Callable[[Estimate], None] | None = None,
    progress: Progress | None = None,
    **training: Unpack[Training],
) -> Finetuned:
    """Adapt a model to a new domain, held by any number of anchors; without anchors, train it plainly.

    The same seed on the same machine gives the same bytes, be it in one go or resumed.

    Args:
        model: A module (trained in place, left in eval mode without gradients), a checkpoint file or model folder,
            `hf:org/name`, `hf://org/name/file`, or an architecture such as `mlp` (fresh weights). None starts from the
            weights of the last anchor.
        data: The new domain: a data spec (its train split unless it says), dataset or loader.
        anchors: Anchors, their files, or their addresses on the Hub (`hf://org/name`), oldest first.
        lambdas: Strength of the penalty, one for all or one for each anchor; unless given 10 for those of K-FAC and 100
            for others. `auto` looks for the largest that costs the new domain no more than `tolerance`, in five runs of
            half as many epochs, on samples that are held out of it; see `search_lambda`.
        tolerance: Of `auto`: the share of the plain run's accuracy that may be lost.
        retain: The share of the answers to the anchors' probes (`consolidate --probe`) that must stay as they were:
            `auto` looks for the smallest lambda that keeps it, in up to seven short runs, and goes no further if none
            does. A run that has less of them, and no more for three evaluations, is stopped; one that ends with less
            is refused.
        penalty_form: `gradient` adds the penalty's gradient to the loss's; `proximal` takes the exact implicit step of
            the penalty after each of the optimizer's, which is stable at any lambda.
        lineage: What an anchor pulls to that had a part in a later one: `all` to its own weights, `latest` to the later
            one's, so that it doesn't count twice.
        head: Whose the outputs are: `shared` by all domains; `new` replaces the last layer by a fresh one for the new
            domain's classes (the old one stays in the anchor, see `evaluate`); `expand` adds outputs for labels that
            the model has none for, and holds the old ones.
        freeze: Patterns (`features.*`) of parameters that this run does not train.
        architecture: What to build for a checkpoint that doesn't carry it.
        trust_code: Whether code in the checkpoint may run (a pickled module).
        likelihood: How outputs become the loss, -log p(y | x); the anchors' unless given, without any as in
            `consolidate`.
        eval_on: Domains to score before training and at each evaluation, a list of specs or datasets or a dict of such
            by name (specs mean their test split unless they say); the test split of `data` unless given, where it has
            one.
        select_on: Of these, or beside them, the domains whose mean score, with the new one's if it is scored, says
            which state is the best. `auto` then looks for the lambda with the best mean score over them and what is
            held out of the new domain.
        seed: Of fresh weights, the order of samples, and dropout.
        device: `auto`, `cpu`, `cuda` or `mps`.
        data_dir: Where downloaded data lies.
        output: Checkpoint to write, in the format of the one that the run starts from (fresh weights and modules
            as a state dict); beside it goes the run folder, of the same name with `.run`.
        overwrite: Whether these may be replaced.
        resume: Folder of a run that was stopped, to go on with; everything else as it was then, but for options that
            only say how or how long.
        tensorboard: Whether to write the log for TensorBoard too, into the run folder.
        before_start: Called with what the run will need before its first step, for which a little of it is tried; what
            it raises ends the run. See `dry_run`.
        progress: Told what happens.
        training: How to train: see `Schedule`.

    Raises:
        EwcError: naming what is wrong with the model, an anchor, the data, an option or a file. If the run ends early
            (the loss becomes NaN, say), the state of the last evaluation is kept: a module that was passed in goes
            back to it, and the run folder has it as `last.pt`, and goes on with `resume`.
    """
    arguments = locals()
    progress = progress or Silent()
    _check_names(training, arguments)
    schedule = Schedule(**training)
    arguments["model"] = model = pinned_model(model, progress)
    given, arguments["anchors"] = fetched_anchors(listed(anchors))
    options = asked(arguments, schedule)
    earlier = None if resume is None else _stopped(Path(resume), progress)
    output = None if output is None else Path(output)
    if earlier is not None:
        output = _resumed(earlier, output, options, schedule, before_start is not None, progress)
    opened = _open(arguments, given, schedule, output, earlier, progress)
    stacked, strengths, domain, scored, specs, start, fresh, selection, rule, where, aim, overwrite = opened
    schedule = replace(schedule, norm_stats=schedule.norm_stats or ("update" if fresh else "frozen"))
    say_idle(finetune, FINETUNE, {**arguments, **training, **_facts(domain, start)}, progress)
    identities = (
        {}
        if output is None and before_start is None
        else identify(start, stacked, domain, scored, isinstance(data, str), specs)
    )
    with contextlib.ExitStack() as closing:
        folder = None
        if output is not None and before_start is None:
            folder = closing.enter_context(
                _under_way(output, overwrite, earlier, options, arguments, identities, progress)
            )
        search = None
        if lambdas == "auto" and before_start is None:
            search = search_by_trials(domain, scored, stacked, strengths, arguments, schedule, aim, folder, progress)
            strengths = [search.strength * ratio for ratio in strengths]
        closing.enter_context(on_device(start.model, where))
        closing.enter_context(random_state_kept(where, seed))
        undoing = closing.enter_context(contextlib.ExitStack())
        job = set_up(
            replace(start, record=known(start.record, stacked)),
            domain,
            scored,
            stacked,
            strengths,
            rule,
            device=where,
            penalty_form=penalty_form,
            lineage=lineage,
            head=head,
            freeze=freeze,
            seed=seed,
            written=output is not None,
            undoing=undoing,
            progress=progress,
        )
        say(progress, job.start, stacked, strengths, job.penalty, schedule, fresh)
        shuffle = torch.Generator().manual_seed(seed)
        if before_start is not None:
            files = [] if output is None else [*written_as(start, output), beside(output, ".run")]
            shorter = 0 if lambdas != "auto" else trials_cost(schedule.epochs)
            estimate = estimate_finetuning(job, schedule, rule, shuffle.clone_state(), where, files, shorter)
            found = recorded(job, stacked, strengths, rule, schedule, search, identities)
            before_start(replace(estimate, found=found))
        state, history = None, list[dict[str, Any]]()
        if folder is not None:
            folder.update(found=recorded(job, stacked, strengths, rule, schedule, search, identities))
            state, history = folder.load_state()
        sinks = _sinks(folder, tensorboard, state, closing)
        # From here on it is the journal that undoes what a run leaves unfinished.
        undo = undoing.pop_all().close
        journal = Journal(
            job.start.model, job.watched, rule, 2 * schedule.batch_size, where, job.record, folder, selection,
            meters(job.start.model, stacked, job.record.head), retain, sinks,
            isinstance(model, nn.Module), progress, undo,
        )  # fmt: skip
        with _put_back(journal):
            steps = _train(job, schedule, rule, shuffle, journal, state, history, progress)
            if output is not None and folder is not None:
                _write(job, schedule, journal, folder, output, overwrite, steps, progress)
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
        norm_stats=schedule.norm_stats or "frozen",
        lineage=job.record.lineage,
        head=job.record.head,
        output=output,
        run=None if folder is None else folder.path,
    )


def _stopped(path: Path, progress: Progress) -> Run:
    """Read the run that is to go on."""
    recover_run(path, progress.note)
    return read_run(path)


class _Opened(NamedTuple):
    """What a run is given, opened and checked."""

    anchors: list[Anchor]
    strengths: list[float]
    domain: Domain
    scored: list[Domain]
    specs: list[str | None]
    start: Opened
    fresh: bool
    selection: Selection | None
    likelihood: Likelihood
    device: torch.device
    aim: Aim
    overwrite: bool


def _open(
    arguments: Mapping[str, Any],
    given: Sequence[Anchor | str | Path],
    schedule: Schedule,
    output: Path | None,
    earlier: Run | None,
    progress: Progress,
) -> _Opened:
    """Open what the arguments of `finetune` name; what is wrong is said all at once, as far as it can be known."""
    asked_for = SimpleNamespace(**arguments)
    data, data_dir, mistakes = asked_for.data, asked_for.data_dir, Mistakes()
    anchors: list[Anchor] = []
    for item in given:
        with mistakes.noted():
            anchors.append(item if isinstance(item, Anchor) else Anchor.open(item))
    with mistakes.noted():
        domain = resolve_domain(data, "train", data_dir)
    if not mistakes.found:
        with mistakes.noted():
            start, fresh = open_start(
                asked_for.model, asked_for.architecture, asked_for.trust_code, anchors, domain, asked_for.seed
            )
    opened = not mistakes.found
    overwrite = asked_for.overwrite
    with mistakes.noted():
        if output is not None:
            inputs = [asked_for.model, *given]
            overwrite = _check_output(output, start if opened else None, overwrite, inputs, earlier, progress)
    with mistakes.noted():
        _check_words(asked_for.penalty_form, asked_for.lineage, asked_for.head)
    with mistakes.noted():
        device = choose_device(asked_for.device)
    with mistakes.noted():
        strengths = _strengths(asked_for.lambdas, len(given), anchors)
    if opened:
        with mistakes.noted():
            rule = get_likelihood(likelihood_of(asked_for.likelihood, anchors, start))
        with mistakes.noted():
            scored, specs = watched_domains(
                asked_for.eval_on, data, domain, anchors, data_dir, progress, asked_for.head
            )
            scored, chosen = also_selected(scored, specs, asked_for.select_on, data_dir)
            selection = _selection(schedule, data, scored, specs, chosen)
            aim = aim_of(arguments, chosen, anchors)
    mistakes.check()
    return _Opened(anchors, strengths, domain, scored, specs, start, fresh, selection, rule, device, aim, overwrite)


def _resumed(
    earlier: Run, output: Path | None, options: dict[str, Any], schedule: Schedule, dry: bool, progress: Progress
) -> Path:
    """Check that a run can be gone on with as it is asked for, and return where its checkpoint goes."""
    if dry:
        raise UsageError("--dry-run is of whole runs; leave it out to go on with one, or leave out --resume")
    found = output_of(earlier, output)
    options["output"] = earlier.document["options"]["output"]
    check_options(earlier, options, schedule, progress)
    return found


def _selection(
    schedule: Schedule, data: Any, scored: Sequence[Domain], specs: Sequence[str | None], chosen: Sequence[str]
) -> Selection | None:
    """Return how states are compared, where any option asks for it."""
    if not schedule.keeps_best and schedule.patience is None:
        return None
    return Selection(tuple(selecting(data, scored, specs, chosen)), schedule.patience)


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
    job: Setup,
    schedule: Schedule,
    likelihood: Likelihood,
    shuffle: torch.Generator,
    journal: Journal,
    state: Mapping[str, Any] | None,
    history: list[dict[str, Any]],
    progress: Progress,
) -> int:
    """Train from the start or from a state, and leave the model as the run is to end; return the number of steps."""
    model, domain = job.start.model, job.domain
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
        own = domain.likelihood(likelihood)
        trainer = Trainer(model, domain, job.layout, own, job.penalty, schedule, shuffle, bar, journal)
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
    job: Setup,
    schedule: Schedule,
    journal: Journal,
    folder: RunFolder,
    output: Path,
    overwrite: bool,
    steps: int,
    progress: Progress,
) -> None:
    """Write the checkpoint, and close the run folder."""
    start = job.start
    layers = movements(start.model, journal.start_weights, job.penalty)
    loss = training_loss(journal.history)
    save = save_state_dict if start.checkpoint is None else start.checkpoint.save
    with folder.writing(), _kept(start, job.record, journal, folder, output):
        save(output, start.model, job.record, overwrite=overwrite)
    try:
        draw_run(folder.path / "figure.png", journal.history, f"Fine-tuning on {job.domain.name}")
    except StorageError as error:  # the model is there, which is what counts
        progress.note(str(error))
    folder.finish(
        keep_last=schedule.keeps_best and journal.step != journal.last,
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
def _under_way(
    output: Path,
    overwrite: bool,
    earlier: Run | None,
    options: dict[str, Any],
    arguments: Mapping[str, Any],
    identities: Mapping[str, Any],
    progress: Progress,
) -> Iterator[RunFolder]:
    """Have the run folder while the run is under way, in which a signal waits until it can be left in order."""
    with (
        signals.deferred(),
        _folder(output, overwrite, earlier, options, arguments, identities) as folder,
        _hint(folder, progress),
    ):
        yield folder


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


def _folder(
    output: Path,
    overwrite: bool,
    earlier: Run | None,
    options: dict[str, Any],
    arguments: Mapping[str, Any],
    identities: Mapping[str, Any],
) -> RunFolder:
    """Open the run folder: a new one, or that of the run to go on with, if it is still the same run."""
    told = all(is_told(arguments[name]) for name in ("model", "data", "anchors", "eval_on", "select_on"))
    command = to_command(options, defaults()) if told else None
    if earlier is None:
        return RunFolder.create(beside(output, ".run"), overwrite, options, command, identities)
    check_identities(earlier, identities)
    folder = RunFolder.reopen(earlier.path)
    try:
        folder.take_up(options, command)
    except BaseException:
        folder.stop("interrupted")
        raise
    return folder


def default_output(model: str | Path | None, anchors: Sequence[str | Path], data: str) -> Path:
    """Return where the checkpoint goes: beside the newest anchor, else the model, named for it and the new data."""
    there = model is not None and is_there(model)
    named = place_of(str(model)) if there else Path(str(model).partition("?")[0].replace(":", "-"))
    source = place_of(anchors[-1]) if anchors else named
    stem = beside(source, "").name.removesuffix(".anchor")
    ending = ending_of(model if model is not None and there else anchors[-1] if anchors else source)
    return source.with_name(f"{stem}-{re.sub(r'[^A-Za-z0-9]+', '-', data).strip('-')}{ending}")


def written_as(start: Opened, output: Path) -> list[Path]:
    """Return the files that a model will be written as."""
    return [output] if start.checkpoint is None else start.checkpoint.outputs(output)


def _check_output(
    output: Path,
    start: Opened | None,
    overwrite: bool,
    inputs: Sequence[object],
    earlier: Run | None,
    progress: Progress,
) -> bool:
    """Check the checkpoint's path, and that the run folder beside it takes nothing away.

    Where it is not known what is written, for the model could not be opened, what is there is looked at all the same.

    Returns:
        Whether what is there may be replaced, be it that a run that was stopped was allowed to, or may have written it.
    """
    if earlier is not None:
        then = earlier.document
        written = bool(then.get("writing")) or then["status"] == "finished"  # which `RunFolder.reopen` refuses
        overwrite = overwrite or written or bool(then["options"].get("overwrite"))
    if start is None:
        check_output(output, overwrite, inputs, folder=output.is_dir(), note=progress.note)
    else:
        _check_files(output, start, overwrite, inputs, progress)
    folder = beside(output, ".run")
    if earlier is None:
        check_run_folder(folder, overwrite, progress.note)
    if folder == output:
        raise UsageError(f"the output {output} would stand where its run folder goes. Let it end in .pt, say")
    for source in inputs:
        if isinstance(source, (str, Path)) and folder.resolve() in Path(source).resolve().parents:
            raise StorageError(f"{source} lies in the run folder {folder} of this output. Choose another path")
    return overwrite


def _check_files(output: Path, start: Opened, overwrite: bool, inputs: Sequence[object], progress: Progress) -> None:
    kind = start.checkpoint or StateDict
    for path in written_as(start, output):
        check_output(path, overwrite, inputs, folder=kind.format == HuggingFace.format, note=progress.note)
    if isinstance(start.checkpoint, HuggingFace):
        start.checkpoint.check_folder(output)
    check_ending(output, kind.format, kind.ending)


def _strengths(
    lambdas: float | Sequence[float] | Literal["auto"] | None, given: int, anchors: Sequence[Anchor]
) -> list[float]:
    """Return lambda of each anchor; of so many that are given, not all need have been opened for one to be wrong."""
    if lambdas == "auto":
        least = min((DEFAULT_LAMBDA[anchor.provenance.curvature] for anchor in anchors), default=1.0)
        return [DEFAULT_LAMBDA[anchor.provenance.curvature] / least for anchor in anchors]
    if lambdas is None:
        return [DEFAULT_LAMBDA[anchor.provenance.curvature] for anchor in anchors]
    # Without anchors a lambda does nothing, but a wrong one is still an error.
    return spread_lambdas(lambdas, given or 1)[:given]


def _facts(domain: Domain, start: Opened) -> dict[str, Any]:
    """Return what is to be known beside the options to say which of them do nothing."""
    return {"read": domain.read_singly, "normalised": bool(normalisation_layers(start.model))}


def _check_names(training: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse an argument that there isn't, as Python would, naming the nearest."""
    for name in training:
        if name not in Training.__annotations__:
            choices = {*others, *Training.__annotations__} - {"training"}
            raise TypeError(f"finetune() has no argument {name!r}. {suggest(name, choices)}")


def _check_words(penalty_form: str, lineage: str, head: str) -> None:
    for option, value, choices in (
        ("penalty form", penalty_form, PENALTY_FORMS),
        ("lineage", lineage, LINEAGES),
        ("head", head, HEADS),
    ):
        check_choice(option, value, choices)
