"""A fine-tune before its first step: model, data and penalty, found to suit each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.compatibility import remarks
from ewc_finetune.anchor.heads import of_one_head
from ewc_finetune.anchor.lineage import distinct, lineage_of
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.choices import Head
from ewc_finetune.data.augmentation import check_augmented
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.draw import draw_parts
from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.data.mixture import names_together
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.evaluation.bound_domain import BoundDomain, bind
from ewc_finetune.evaluation.chance import say_numbering
from ewc_finetune.evaluation.presenting import presented, presented_together, say_anchors
from ewc_finetune.finetuning.head import class_names, give_head, head_names, say_many_outputs
from ewc_finetune.finetuning.notes import say
from ewc_finetune.finetuning.plan import Plan
from ewc_finetune.likelihood.objective import Loss, balanced
from ewc_finetune.modules.devices import on_device, random_state_kept
from ewc_finetune.modules.heads import find_head, give_place, is_headless, take_place
from ewc_finetune.modules.modes import normalisation_layers
from ewc_finetune.penalty.penalty import Penalty
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.rehearsal.held_out import measured as left_to_measure
from ewc_finetune.rehearsal.options import PROBES
from ewc_finetune.rehearsal.rehearsal import Rehearsal
from ewc_finetune.specs.patterns import matching


@dataclass(frozen=True)
class Job:
    """A fine-tune before its first step.

    Attributes:
        start: The model, with the head that it is trained with.
        new: The new domain, as the model takes it.
        loss: What training makes small there.
        watched: The domains to score, as the model takes them.
        penalty: The penalty of the anchors; None without any.
        rehearsal: What is rehearsed; None where nothing is.
        measured: The anchors with what is measured of their probes: all of them, or what is never rehearsed.
        frozen: Parameters that this run alone does not train.
        metadata: What is to be known of the model that is written.
        undoing: What puts a changed head back; closed when the job is done with, unless it was taken over.
    """

    start: LoadedModel
    new: BoundDomain
    loss: Loss
    watched: list[BoundDomain]
    penalty: Penalty | None
    rehearsal: Rehearsal | None
    measured: Sequence[Anchor]
    frozen: tuple[nn.Parameter, ...]
    metadata: ModelMetadata
    undoing: contextlib.ExitStack

    @contextlib.contextmanager
    def freezing(self) -> Iterator[None]:
        """Leave the frozen parameters without gradient inside the block."""
        with _frozen_in(self.frozen):
            yield


@contextlib.contextmanager
def ready(plan: Plan, strengths: Sequence[float] | None, progress: Progress) -> Iterator[Job]:
    """Give the model its head, and match data and anchors with it; it is on the plan's device inside the block.

    Args:
        plan: The plan to carry out.
        strengths: The lambda of each anchor; None while they are still looked for.
        progress: Is told what is assumed.

    Raises:
        EwcError: naming what does not suit.
    """
    with (
        on_device(plan.start.model, plan.device),
        random_state_kept(plan.device, plan.options.seed),
        contextlib.ExitStack() as undoing,
    ):
        job = _matched(plan, plan.strengths if strengths is None else strengths, undoing, progress)
        known: Sequence[float | None] = [None] * len(plan.anchors) if strengths is None else strengths
        held = list(zip(plan.anchors, known, strict=True))
        say(progress, job.start, held, job.penalty, job.rehearsal, plan.schedule, plan.fresh)
        if str(plan.objective):
            progress.note(
                f"training has {plan.objective}; the curvature, the penalty and all scores stay those of the "
                f"{plan.likelihood.name} likelihood"
            )
        yield job


def _matched(plan: Plan, strengths: Sequence[float], undoing: contextlib.ExitStack, progress: Progress) -> Job:
    start, options, anchors = plan.start, plan.options, plan.anchors
    domains = [plan.domain, *plan.others]
    headed = _as_headed(start, options.head, domains)
    domain = presented_together(domains, headed, progress)
    if domain.augment:
        check_augmented(domain, domain.first())
    if options.head == "new" and is_headless(start.model):
        give_place(start.model)
        undoing.callback(take_place, start.model)
    old = find_head(start.model) if options.head != "shared" else None
    if old is not None:
        undoing.callback(start.model.set_submodule, *old)
        start = give_head(start, options.head, domain, options.seed, options.output is not None, progress)
    for remark in [
        *(r for anchor in anchors for r in anchor.remarks),
        *remarks(anchors, options.lineage, ("the model", start.metadata.head)),
    ]:
        progress.note(remark)
    if options.head != "new":
        say_numbering(domain, start, progress)
    known, outputs = start.metadata, None if old is None else find_head(start.model)[1].out_features
    new = bind(start, domain, plan.likelihood, plan.device, progress, outputs)
    # Said before anything is rehearsed or scored. A loader is not asked, whose first batch would be another then.
    with random_state_kept(plan.device):
        if new.domain.indexable and plan.schedule.epochs and not new.domain.labelled:
            raise DataError(f"{new.domain.name} has no labels, and fine-tuning needs them")
    if options.head == "shared" and not plan.fresh and not known.classes:
        say_many_outputs(domain, new.outputs, progress)
    loss = _loss(plan, new)
    say_anchors(anchors, new.input_spec, progress)
    names = class_names(headed.metadata if options.head == "expand" else known, domain, options.head)
    watched = _watched(plan, start, new.input_spec, names, progress)
    growing = head_names(old) if old is not None and options.head == "expand" else ()
    frozen = _frozen(start.model, options.freeze)
    with _frozen_in(frozen):
        held = of_one_head(anchors, known.head)
        penalty = (
            Penalty(start.model, held, strengths, options.penalty_form, options.lineage, growing=growing)
            if anchors
            else None
        )
    metadata = ModelMetadata(
        architecture=known.architecture,
        input=new.input_spec.to_json(),
        classes=names,
        head=known.head,
        lineage=distinct([*known.lineage, *lineage_of(anchors, strengths)]),
        frozen=known.frozen,
        likelihood=plan.likelihood.name,
    )
    with random_state_kept(plan.device):  # so that training is the same, whether what is rehearsed was answered before
        rehearsal = _rehearsal(plan, start, progress)
    measured: Sequence[Anchor] = anchors
    if rehearsal is not None:
        measured = rehearsal.measured
    elif plan.rehearsed:
        measured = left_to_measure(anchors, probes_rehearsed=True)
        progress.note(
            "nothing is rehearsed; what is kept is measured by those inputs of the probes that rehearsal leaves out"
        )
    return Job(start, new, loss, watched, penalty, rehearsal, measured, frozen, metadata, undoing)


def _loss(plan: Plan, new: BoundDomain) -> Loss:
    """Return the loss of training, with class weights that are counted where they are to be balanced.

    Raises:
        UsageError: if the labels are not to be had beforehand.
    """
    objective, domain, classes = plan.objective, new.domain, new.outputs[-1] if new.outputs else 1
    if objective.class_weights == "balanced":
        if domain.labels is None and not domain.indexable:
            raise UsageError(
                f"{domain.name} is a stream or loader, whose labels are not known beforehand to balance by; give "
                "--class-weights a number for each class"
            )
        with random_state_kept(plan.device):
            walk = domain.batches(plan.schedule.batch_size)
            labels = [part for _, part in walk if part is not None] if domain.labels is None else [domain.labels]
            if domain.labels is not None and domain.parts:
                labels = [domain.labels[draw_parts(domain.parts, None)]]
        for part in labels:  # of batches with any number of tokens
            shape = new.outputs if part.is_floating_point() else (*part.shape[1:], classes)
            new.likelihood.check_targets(part, shape, domain.name)
        weights = balanced(labels, classes, domain.name)
        objective = replace(objective, class_weights=weights)
    return objective.bound(new.likelihood, classes)


def _rehearsal(plan: Plan, start: LoadedModel, progress: Progress) -> Rehearsal | None:
    """Return what is rehearsed, if anything is."""
    options = plan.options
    if not plan.rehearsed or not options.rehearses:
        return None
    rehearsal = Rehearsal(
        start,
        plan.anchors,
        [PROBES if domain is None else domain for domain in plan.rehearsed],
        weight=options.rehearse_weight,
        batch_size=options.rehearse_batch or options.batch_size,
        variations=options.rehearse_variations,
        likelihood=plan.likelihood,
        seed=options.seed,
        answered=plan.answered,
    )
    least = min(rehearsal.each, *(memory.probe.samples for memory in rehearsal.memories))
    if plan.schedule.norm_stats == "update" and least < 2 and normalisation_layers(start.model):
        raise UsageError(
            "--norm-stats update takes the statistics of each batch, and a step would rehearse one sample of a source, "
            "which has none; use a larger --rehearse-batch, or leave the statistics frozen"
        )
    for memory in rehearsal.memories:
        progress.note(str(memory))
        if memory.probe.samples < rehearsal.each:
            progress.note(
                f"each step rehearses all {memory.probe.samples:,} inputs of {memory.probe.data}: there are not "
                f"{rehearsal.each:,} of them"
            )
    return rehearsal


def _as_headed(start: LoadedModel, head: Head, domains: Sequence[Domain]) -> LoadedModel:
    """Return the model with the names that its outputs will have, by which labels that are names are numbered.

    They are the old ones, with those of new classes where it is expanded; where there are none, what several domains
    call theirs.
    """
    known = start.metadata
    names = None if head == "new" or known.classes is None else list(known.classes)
    if names is None:
        together = names_together(domains)
        names = None if together is None else list(together)
    elif head == "expand":
        names = list(dict.fromkeys([*names, *(name for domain in domains for name in domain.classes or ())]))
    return replace(start, metadata=replace(known, classes=names))


def _watched(
    plan: Plan, start: LoadedModel, input_spec: InputSpec, names: list[str] | None, progress: Progress
) -> list[BoundDomain]:
    """Return the domains to score, as the model takes them; `names` are those of its outputs, where they are known."""
    known = start.metadata
    # Where nothing is known of the model, all its data are as the new domain says.
    known = known if known.input else replace(known, input=input_spec.to_json())
    watched = []
    for scored in plan.scored:
        # An old domain under a new head has classes of its own.
        mine = names is not None and (plan.options.head != "new" or set(scored.classes or ()) <= set(names))
        alike = replace(start, metadata=replace(known, classes=names if mine else None))
        domain = presented(scored, alike, Silent())
        watched.append(bind(start, domain, plan.likelihood, plan.device, Silent()))
        for remark in domain.remarks:
            progress.note(f"{domain.name}: {remark}")
    return watched


def _frozen(model: nn.Module, patterns: Sequence[str]) -> tuple[nn.Parameter, ...]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {name for pattern in patterns for name in matching(list(trained), pattern, "--freeze")}
    if trained and len(names) == len(trained):
        raise UsageError("no parameter is left to train: all are frozen")
    return tuple(p for name, p in trained.items() if name in names)


@contextlib.contextmanager
def _frozen_in(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
