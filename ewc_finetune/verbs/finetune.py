"""`finetune`: adapt a model to a new domain under the penalty of its anchors."""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ewc_finetune.anchor import Anchor
from ewc_finetune.checkpoint.architecture import FORMS, looks_like_architecture
from ewc_finetune.checkpoint.checkpoint import Record, check_ending
from ewc_finetune.checkpoint.from_anchor import FromAnchor
from ewc_finetune.checkpoint.hugging_face import HuggingFace
from ewc_finetune.checkpoint.opening import (
    Opened,
    ending_of,
    is_there,
    open_checkpoint,
    open_fresh,
    open_model,
    place_of,
)
from ewc_finetune.checkpoint.state_dict import StateDict, save_state_dict
from ewc_finetune.choices import (
    HEADS,
    LINEAGES,
    NORM_STATS,
    OPTIMIZERS,
    PENALTY_FORMS,
    Head,
    LikelihoodName,
    Lineage,
    NormStats,
    OptimizerName,
    PenaltyForm,
    check_choice,
)
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.sources import resolve_domain, resolve_domains
from ewc_finetune.devices import choose_device, on_device, random_state_kept
from ewc_finetune.errors import CheckpointError, StorageError, UsageError
from ewc_finetune.figures import draw_run
from ewc_finetune.files import beside, check_output
from ewc_finetune.likelihood import Likelihood, get_likelihood
from ewc_finetune.modes import normalisation_layers
from ewc_finetune.penalty import Penalty
from ewc_finetune.precision import float32_weights
from ewc_finetune.progress import OnlyBars, Progress, Silent
from ewc_finetune.provenance import Provenance
from ewc_finetune.runs import RunFolder, check_run_folder
from ewc_finetune.stack import of_one_head, spread_lambdas
from ewc_finetune.training import Schedule, train
from ewc_finetune.verbs.dry_run import Estimate, estimate_finetuning
from ewc_finetune.verbs.evaluate import Score
from ewc_finetune.verbs.journal import Journal
from ewc_finetune.verbs.lambda_search import DEFAULT_TOLERANCE, Search, search_lambda, split
from ewc_finetune.verbs.setup import Setup, set_up

DEFAULT_LAMBDA = {"diagonal": 100.0, "identity": 100.0, "kfac": 10.0}


@dataclass(frozen=True)
class Finetuned:
    """What a fine-tune gave.

    Attributes:
        model: The adapted model; the caller's own where a module was passed.
        before: Score on every evaluated domain before the first step.
        after: The same after the last.
        history: The lines of `metrics.jsonl`.
        search: How lambda was found, if it was looked for.
        steps: Optimizer steps taken.
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
    norm_stats: NormStats
    lineage: list[dict[str, Any]]
    head: dict[str, Any] | None
    output: Path | None
    run: Path | None


def finetune(
    model: str | Path | nn.Module | None,
    data: Any,
    *,
    anchors: Anchor | str | Path | Sequence[Anchor | str | Path] = (),
    lambdas: float | Sequence[float] | Literal["auto"] | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    penalty_form: PenaltyForm = "gradient",
    lineage: Lineage = "all",
    head: Head = "shared",
    architecture: str | None = None,
    trust_pickle: bool = False,
    epochs: int = 4,
    lr: float = 1e-4,
    batch_size: int = 100,
    optimizer: OptimizerName = "adam",
    momentum: float = 0.9,
    norm_stats: NormStats | None = None,
    likelihood: LikelihoodName | None = None,
    eval_on: Sequence[Any] | Mapping[str, Any] | None = None,
    seed: int = 0,
    device: str = "auto",
    data_dir: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    log_every: int = 50,
    before_start: Callable[[Estimate], None] | None = None,
    progress: Progress | None = None,
) -> Finetuned:
    """Adapt a model to a new domain, held by any number of anchors; without anchors, train it plainly.

    The same seed on the same machine gives the same bytes.

    Args:
        model: A module (trained in place, left in eval mode without gradients), a checkpoint file or model folder,
            `hf:org/name`, or an architecture such as `mlp` (fresh weights). None starts from the weights of the last
            anchor.
        data: The new domain: a data spec (its train split unless it says), dataset or loader.
        anchors: Anchors or their files, oldest first.
        lambdas: Strength of the penalty, one for all or one for each anchor; unless given 10 for those of K-FAC and 100
            for others. `auto` looks for the largest that costs the new domain no more than `tolerance`, in five runs of
            half as many epochs, on samples that are held out of it; see `search_lambda`.
        tolerance: Of `auto`: the share of the plain run's accuracy that may be lost.
        penalty_form: `gradient` adds the penalty's gradient to the loss's; `proximal` takes the exact implicit step of
            the penalty after each of the optimizer's, which is stable at any lambda.
        lineage: What an anchor pulls to that had a part in a later one: `all` to its own weights, `latest` to the later
            one's, so that it doesn't count twice.
        head: Whose the outputs are: `shared` by all domains; `new` replaces the last layer by a fresh one for the new
            domain's classes (the old one stays in the anchor, see `evaluate`); `expand` adds outputs for labels that
            the model has none for, and holds the old ones.
        architecture: What to build for a checkpoint that doesn't carry it.
        trust_pickle: Whether code in the checkpoint may run (a pickled module).
        epochs: Walks through the data; 0 only evaluates and writes.
        lr: Learning rate.
        batch_size: Samples a step.
        optimizer: `sgd`, `adam` or `adamw`.
        momentum: Of `sgd` alone.
        norm_stats: `frozen` keeps running statistics as they are, `update` lets them follow the new data. Unless
            given: frozen, but update for fresh weights, whose statistics nothing has filled yet.
        likelihood: How outputs become the loss, -log p(y | x); the anchors' unless given, without any that of the
            model's task (see `consolidate`).
        eval_on: Domains to score before and after each epoch, a list of specs or datasets or a dict of such by name
            (specs mean their test split unless they say); the test split of `data` unless given, where it has one.
        seed: Of fresh weights, the order of samples, and dropout.
        device: `auto`, `cpu`, `cuda` or `mps`.
        data_dir: Where downloaded data lies.
        output: Checkpoint to write, in the format of the one that the run starts from (fresh weights and modules
            as a state dict); beside it goes the run folder, of the same name with `.run`.
        overwrite: Whether these may be replaced.
        log_every: Steps between two lines of the log.
        before_start: Called with what the run will need before its first step, for which a little of it is tried; what
            it raises ends the run. See `dry_run`.
        progress: Told what happens.

    Raises:
        EwcError: naming what is wrong with the model, an anchor, the data, an option or a file. If the run ends early
            (the loss becomes NaN, say), the state after the last whole epoch is kept: a module that was passed in goes
            back to it, and the run folder has it as `last.pt`.
    """
    progress = progress or Silent()
    output = None if output is None else Path(output)
    _check_numbers(epochs=epochs, lr=lr, batch_size=batch_size, momentum=momentum, log_every=log_every)
    given = [anchors] if isinstance(anchors, (Anchor, str, Path)) else list(anchors)
    _check_words(optimizer, penalty_form, lineage, head, norm_stats or "frozen")
    stacked = [item if isinstance(item, Anchor) else Anchor.open(item) for item in given]
    strengths = _strengths(lambdas, stacked)
    domain = resolve_domain(data, "train", data_dir)
    search = None
    if lambdas == "auto":
        watched = _watched(eval_on, data, domain, stacked, data_dir, Silent(), head) if eval_on is not None else []
        trial: dict[str, Any] = {
            "penalty_form": penalty_form,
            "lineage": lineage,
            "head": head,
            "architecture": architecture,
            "trust_pickle": trust_pickle,
            "epochs": max(1, -(-epochs // 2)),
            "lr": lr,
            "batch_size": batch_size,
            "optimizer": optimizer,
            "momentum": momentum,
            "norm_stats": norm_stats,
            "likelihood": likelihood,
            "seed": seed,
            "device": device,
        }
        search = _search(model, domain, watched, stacked, tolerance, trial, progress)
        strengths = [search.strength * ratio for ratio in strengths]
    start, fresh = _start(model, architecture, trust_pickle, stacked, domain, seed)
    if output is not None:
        _check_output(output, start, overwrite, [model, *given])
    policy: NormStats = norm_stats or ("update" if fresh else "frozen")
    schedule = Schedule(epochs, lr, batch_size, optimizer, momentum, policy, log_every)
    rule = get_likelihood(_likelihood(likelihood, stacked, start))
    where = choose_device(device)
    with on_device(start.model, where), random_state_kept(where, seed), contextlib.ExitStack() as undoing:
        job = set_up(
            replace(start, record=_known(start.record, stacked)),
            domain,
            _watched(eval_on, data, domain, stacked, data_dir, progress, head),
            stacked,
            strengths,
            rule,
            device=where,
            penalty_form=penalty_form,
            lineage=lineage,
            head=head,
            seed=seed,
            written=output is not None,
            undoing=undoing,
            progress=progress,
        )
        start, domain, penalty = job.start, job.domain, job.penalty
        _say(progress, start, stacked, strengths, penalty, schedule, fresh)
        shuffle = torch.Generator().manual_seed(seed)
        if before_start is not None:
            files = [] if output is None else [*written_as(start, output), beside(output, ".run")]
            before_start(estimate_finetuning(job, schedule, rule, shuffle.clone_state(), where, files))
        folder = None
        if output is not None:
            options = _options(job, stacked, strengths, data_dir, rule, schedule)
            options |= {
                "penalty_form": penalty_form,
                "lineage": lineage,
                "head": head,
                "seed": seed,
                "device": str(where),
                "output": str(output),
                "lambda_search": None if search is None else search.to_json(),
            }
            folder = RunFolder(beside(output, ".run"), overwrite, options)
        # Scoring keeps no activations, so twice the batch fits where training does.
        # From here on it is the journal that undoes what a run leaves unfinished.
        undo = undoing.pop_all().close
        mine = isinstance(model, nn.Module)
        journal = Journal(
            start.model, job.watched, rule, 2 * batch_size, where, job.record, folder, mine, progress, undo
        )
        try:
            before = journal.score(0, 0)
            batches = domain.count_batches(batch_size)
            with (
                float32_weights(start.model) as journal.dtypes,
                progress.bar(f"fine-tuning on {domain.name}", batches and batches * epochs, "step") as bar,
            ):
                own = domain.likelihood(rule)
                steps = train(start.model, domain, job.layout, own, penalty, schedule, shuffle, bar, journal)
            start.model.zero_grad(set_to_none=True)
            start.model.eval()
            if journal.dtypes:
                progress.note("half-precision weights were trained in float32 and are rounded back now")
                journal.score(epochs, steps)
            after = journal.scores
            if output is not None and folder is not None:
                (save_state_dict if start.checkpoint is None else start.checkpoint.save)(
                    output, start.model, job.record
                )
                try:
                    draw_run(folder.path / "figure.png", journal.history, f"Fine-tuning on {domain.name}")
                except StorageError as error:  # the model is there, which is what counts
                    progress.note(str(error))
                folder.finish(steps=steps, before=[asdict(s) for s in before], after=[asdict(s) for s in after])
        except BaseException as error:
            journal.stop(error)
            raise
    return Finetuned(
        model=start.model,
        before=before,
        after=after,
        history=journal.history,
        search=search,
        steps=steps,
        norm_stats=policy,
        lineage=job.record.lineage,
        head=job.record.head,
        output=output,
        run=None if folder is None else folder.path,
    )


def default_output(model: str | Path | None, anchors: Sequence[str | Path], data: str) -> Path:
    """Return where the checkpoint goes: beside the newest anchor, else the model, named for it and the new data."""
    there = model is not None and is_there(model)
    named = place_of(str(model)) if there else Path(str(model).partition("?")[0].replace(":", "-"))
    source = Path(anchors[-1]) if anchors else named
    stem = beside(source, "").name.removesuffix(".anchor")
    ending = ending_of(model if model is not None and there else source)
    return source.with_name(f"{stem}-{re.sub(r'[^A-Za-z0-9]+', '-', data).strip('-')}{ending}")


def written_as(start: Opened, output: Path) -> list[Path]:
    """Return the files that a model will be written as."""
    return [output] if start.checkpoint is None else start.checkpoint.outputs(output)


def _check_output(output: Path, start: Opened, overwrite: bool, inputs: Sequence[object]) -> None:
    """Check the checkpoint's path, and that the run folder beside it takes nothing away."""
    kind = start.checkpoint or StateDict
    for path in written_as(start, output):
        check_output(path, overwrite, inputs, folder=kind.format == HuggingFace.format)
    if isinstance(start.checkpoint, HuggingFace):
        start.checkpoint.check_folder(output)
    check_ending(output, kind.format, kind.ending)
    folder = beside(output, ".run")
    check_run_folder(folder, overwrite)
    if folder == output:
        raise UsageError(f"the output {output} would stand where its run folder goes. Let it end in .pt, say")
    for source in inputs:
        if isinstance(source, (str, Path)) and folder.resolve() in Path(source).resolve().parents:
            raise StorageError(f"{source} lies in the run folder {folder} of this output. Choose another path")


def _search(
    model: str | Path | nn.Module | None,
    domain: Domain,
    watched: Sequence[Domain],
    anchors: Sequence[Anchor],
    tolerance: float,
    options: Mapping[str, Any],
    progress: Progress,
) -> Search:
    """Look for lambda with short runs of `finetune`, each from the start; see `search_lambda`."""
    if not anchors:
        raise UsageError("--lambda auto looks for the strength of a penalty, and there is none without --anchors")
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance is {tolerance:g}; expected more than 0 and less than 1")
    trained, held_out = split(domain, options["seed"])
    ratios = _strengths("auto", anchors)
    latest: list[Finetuned] = []

    def run(strength: float | None) -> tuple[Score, Score, Sequence[Score]]:
        done = finetune(
            copy.deepcopy(model) if isinstance(model, nn.Module) else model,
            trained,
            anchors=anchors,
            lambdas=[0.0 if strength is None else strength * ratio for ratio in ratios],
            eval_on=[held_out, *watched],
            progress=OnlyBars(progress),
            **options,
        )
        latest[:] = [done]
        return done.before[0], done.after[0], done.after[1:]

    def distance() -> float:
        (done,) = latest
        return Penalty(done.model, of_one_head(anchors, done.head), ratios, "gradient", options["lineage"]).value()

    return search_lambda(run, distance, tolerance, progress)


def _strengths(lambdas: float | Sequence[float] | Literal["auto"] | None, anchors: Sequence[Anchor]) -> list[float]:
    if lambdas == "auto":
        least = min((DEFAULT_LAMBDA[anchor.provenance.curvature] for anchor in anchors), default=1.0)
        return [DEFAULT_LAMBDA[anchor.provenance.curvature] / least for anchor in anchors]
    if lambdas is None:
        return [DEFAULT_LAMBDA[anchor.provenance.curvature] for anchor in anchors]
    # Without anchors a lambda does nothing, but a wrong one is still an error.
    return spread_lambdas(lambdas, len(anchors) or 1)[: len(anchors)]


def _check_words(optimizer: str, penalty_form: str, lineage: str, head: str, norm_stats: str) -> None:
    for option, value, choices in (
        ("optimizer", optimizer, OPTIMIZERS),
        ("penalty form", penalty_form, PENALTY_FORMS),
        ("lineage", lineage, LINEAGES),
        ("head", head, HEADS),
        ("norm stats", norm_stats, NORM_STATS),
    ):
        check_choice(option, value, choices)


def _check_numbers(epochs: int, lr: float, batch_size: int, momentum: float, log_every: int) -> None:
    for name, value, least in (
        ("epochs", epochs, 0),
        ("batch size", batch_size, 1),
        ("log every", log_every, 1),
    ):
        if value < least:
            raise UsageError(f"{name} is {value}; expected at least {least}")
    if not (math.isfinite(lr) and lr > 0):
        raise UsageError(f"lr is {lr}; expected a finite number above 0")
    if not 0 <= momentum < 1:
        raise UsageError(f"momentum is {momentum}; expected 0 or above, and below 1")


def _start(
    model: str | Path | nn.Module | None,
    architecture: str | None,
    trust_pickle: bool,
    anchors: Sequence[Anchor],
    domain: Domain,
    seed: int,
) -> tuple[Opened, bool]:
    """Open what the run starts from; also return whether its weights are fresh."""
    if model is None:
        if not anchors:
            raise UsageError("there is nothing to start from; name --anchors, or a --model for plain training")
        return open_checkpoint(FromAnchor(anchors[-1]), architecture), False
    if isinstance(model, nn.Module) or is_there(model):
        return open_model(model, architecture, trust_pickle=trust_pickle), False
    if not looks_like_architecture(str(model)):
        raise CheckpointError(f"there is no checkpoint at {model}, and it names no architecture either: {FORMS}")
    if architecture is not None:
        raise UsageError(f"--model {model} is an architecture already; --arch says what a checkpoint file holds")
    return open_fresh(str(model), _sample_shape(domain), domain.count_classes(), seed), True


def _sample_shape(domain: Domain) -> tuple[int, ...]:
    sample = domain.first()
    if not isinstance(sample, torch.Tensor):
        raise UsageError(f"{domain.name} has dictionaries of tensors; build the model and pass it as a module")
    return tuple(sample.shape[1:])


def _watched(
    eval_on: Sequence[Any] | Mapping[str, Any] | None,
    data: Any,
    domain: Domain,
    anchors: Sequence[Anchor],
    data_dir: str | Path | None,
    progress: Progress,
    head: Head,
) -> list[Domain]:
    """Return the domains to score: those asked for, else the test split of the new domain."""
    if head == "new" and anchors:
        progress.note(
            "domains are scored with the new head; for an old one's: ewc-ft evaluate CHECKPOINT --head ANCHOR"
        )
    if eval_on is not None:
        return resolve_domains(eval_on, "test", data_dir)
    found = [resolve_domain(data, "test", data_dir)] if isinstance(data, str) and domain.split is not None else []
    if not found:
        progress.note(f"{domain.name} has no test split, so nothing is scored; --eval names domains to score")
    elif anchors and head != "new":
        progress.note(
            f"only {domain.name} is scored; where old data is at hand, --eval OLD --eval NEW shows what stays"
        )
    return found


def _options(
    job: Setup,
    anchors: Sequence[Anchor],
    strengths: Sequence[float],
    data_dir: str | Path | None,
    likelihood: Likelihood,
    schedule: Schedule,
) -> dict[str, Any]:
    """Return what `run.json` says of how the run was set up."""
    start, domain = job.start, job.domain
    return {
        "model": start.label,
        "checkpoint": {"sha256": start.sha256, "architecture": start.record.architecture},
        "anchors": [
            {"file": anchor.label, "sha256": anchor.digest, "lambda": strength}
            for anchor, strength in zip(anchors, strengths, strict=True)
        ],
        "data": {"spec": domain.name, "split": domain.split, "size": domain.size},
        "eval": [{"spec": d.name, "split": d.split, "size": d.size} for d, _ in job.watched],
        "data_dir": None if data_dir is None else str(data_dir),
        "input": job.layout.to_json(),
        "likelihood": likelihood.name,
        **asdict(schedule),
    }


def _likelihood(asked: LikelihoodName | None, anchors: Sequence[Anchor], start: Opened) -> str:
    known = anchors[-1].provenance.likelihood if anchors else asked or start.likelihood
    if asked is not None and asked != known:
        raise UsageError(
            f"likelihood is {asked}, and {anchors[-1].label} was made with {known}; a penalty goes with the loss that "
            "its curvature is of"
        )
    return known


def _known(record: Record, anchors: Sequence[Anchor]) -> Record:
    """Return what is known of the model: one that was passed in knows nothing of its data, but its anchors do."""
    if anchors and not record.input:
        origin = anchors[-1].provenance
        return replace(record, input=origin.input, classes=origin.classes, head=origin.head)
    return record


def _warn_of_overshooting(progress: Progress, penalty: Penalty | None, schedule: Schedule) -> None:
    """Say it before training if steps along the penalty's gradient cannot converge.

    Gradient descent with momentum m on a quadratic of curvature h is stable up to a learning rate of 2 (1 + m) / h.
    Adam's steps are no larger than its learning rate whatever the gradient.
    """
    if penalty is None or penalty.form != "gradient" or schedule.optimizer != "sgd":
        return
    name, largest = penalty.largest_curvature()
    bound = 2 * (1 + schedule.momentum)
    if schedule.lr * largest > bound:
        progress.note(
            f"this lambda is too large for gradient steps: the largest lambda F, {largest:.3g} in {name}, times the "
            f"learning rate {schedule.lr:g} is {schedule.lr * largest:.3g}, and beyond {bound:g} each step overshoots "
            f"further. Use --penalty-form proximal, stable at any lambda, or --lr up to {bound / largest:.2g}"
        )


def _curvature(origin: Provenance) -> str:
    if origin.curvature == "identity":
        return "identity"
    kind = "K-FAC blocks" if origin.curvature == "kfac" else "Fisher"
    return f"{origin.estimator} {kind} of {origin.samples} samples"


def _say(
    progress: Progress,
    start: Opened,
    anchors: Sequence[Anchor],
    strengths: Sequence[float],
    penalty: Penalty | None,
    schedule: Schedule,
    fresh: bool,
) -> None:
    """Tell the user what the run assumes."""
    progress.note(f"starting from {'fresh weights of ' if fresh else ''}{start.label}")
    for remark in start.remarks:
        progress.note(remark)
    if not anchors and not fresh:
        progress.note("held by no anchor: plain training, in which the old domain may be lost")
    for anchor, strength in zip(anchors, strengths, strict=True):
        origin = anchor.provenance
        progress.note(f"held by {anchor.label}: {origin.name}, {_curvature(origin)}, lambda {strength:g}")
    if penalty is not None and penalty.free:
        progress.note(f"free, since no anchor holds them: {', '.join(penalty.free)}")
    layers = normalisation_layers(start.model)
    if layers:
        progress.note(f"normalisation statistics of {len(layers)} layers: {schedule.norm_stats}")
    _warn_of_overshooting(progress, penalty, schedule)
