"""What `finetune` works with: model, data and penalty, found to suit each other before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.compatibility import remarks
from ewc_finetune.anchor.heads import of_one_head
from ewc_finetune.anchor.lineage import distinct, lineage_of
from ewc_finetune.checkpoint.architecture import FORMS, looks_like_architecture
from ewc_finetune.checkpoint.checkpoint import Record
from ewc_finetune.checkpoint.formats.from_anchor import FromAnchor
from ewc_finetune.checkpoint.location import is_there
from ewc_finetune.checkpoint.open import Opened, open_checkpoint, open_fresh, open_model
from ewc_finetune.choices import Head, LikelihoodName, Lineage, PenaltyForm
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.layout import Layout
from ewc_finetune.data.sources import resolve_domain, resolve_domains
from ewc_finetune.errors import CheckpointError, UsageError
from ewc_finetune.evaluation.chance import say_numbering
from ewc_finetune.evaluation.compatibility import prepare
from ewc_finetune.evaluation.presenting import presented, say_anchors
from ewc_finetune.finetuning.head import class_names, give_head, head_names
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.modules.heads import find_head
from ewc_finetune.penalty.penalty import Penalty
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.specs.patterns import matching


@dataclass(frozen=True)
class Setup:
    """A fine-tune before its first step.

    Attributes:
        start: The model, with the head that it is trained with.
        domain: The new domain, as the model takes it.
        layout: How its samples go into the model.
        watched: The domains to score, likewise.
        penalty: Of the anchors; None without any.
        frozen: Parameters that this run alone does not train.
        record: What is to be known of the model that is written.
    """

    start: Opened
    domain: Domain
    layout: Layout
    watched: list[tuple[Domain, Layout]]
    penalty: Penalty | None
    frozen: tuple[nn.Parameter, ...]
    record: Record

    @contextlib.contextmanager
    def freezing(self) -> Iterator[None]:
        """Leave the frozen parameters without gradient inside the block."""
        for parameter in self.frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self.frozen:
                parameter.requires_grad_(True)


def set_up(
    start: Opened,
    domain: Domain,
    scored: Sequence[Domain],
    anchors: Sequence[Anchor],
    strengths: Sequence[float],
    likelihood: Likelihood,
    *,
    device: torch.device,
    penalty_form: PenaltyForm,
    lineage: Lineage,
    head: Head,
    freeze: Sequence[str],
    seed: int,
    written: bool,
    undoing: contextlib.ExitStack,
    progress: Progress,
) -> Setup:
    """Give the model its head, and match data and anchors with it.

    Args:
        start: The model, on `device`.
        domain: The new domain.
        scored: The domains to score.
        anchors: Oldest first.
        strengths: The lambda of each.
        likelihood: Gives the loss.
        device: Where the model is.
        penalty_form: See `finetune`.
        lineage: Likewise.
        head: Likewise.
        freeze: Likewise.
        seed: Of a new head.
        written: Whether the model will be written to a file.
        undoing: Told how to put a changed head back.
        progress: Told what is assumed.

    Raises:
        EwcError: naming what does not suit.
    """
    domain = presented(domain, start, progress)
    old = find_head(start.model) if head != "shared" else None
    if old is not None:
        undoing.callback(start.model.set_submodule, *old)
        start = give_head(start, head, domain, seed, written, progress)
    for remark in [
        *(r for anchor in anchors for r in anchor.remarks),
        *remarks(anchors, lineage, ("the model", start.record.head)),
    ]:
        progress.note(remark)
    if head != "new":
        say_numbering(domain, start, progress)
    known, outputs = start.record, None if old is None else find_head(start.model)[1].out_features
    layout, _ = prepare(start.model, domain, domain.likelihood(likelihood), device, known, progress, outputs)
    say_anchors(anchors, layout, progress)
    # Where nothing is known of the model, all its data are as the new domain says.
    alike = start if known.input else replace(start, record=replace(known, input=layout.to_json()))
    others = [presented(found, alike, Silent()) for found in scored]
    watched = [(d, prepare(start.model, d, d.likelihood(likelihood), device, known, Silent())[0]) for d in others]
    for other in others:
        for remark in other.remarks:
            progress.note(f"{other.name}: {remark}")
    held = of_one_head(anchors, known.head)
    growing = head_names(old) if head == "expand" else ()
    job = Setup(start, domain, layout, watched, None, _frozen(start.model, freeze), known)
    with job.freezing():
        penalty = Penalty(start.model, held, strengths, penalty_form, lineage, growing=growing) if anchors else None
    record = Record(
        architecture=known.architecture,
        input=layout.to_json(),
        classes=class_names(known, domain, head),
        head=known.head,
        lineage=distinct([*known.lineage, *lineage_of(anchors, strengths)]),
        frozen=known.frozen,
        likelihood=likelihood.name,
    )
    return replace(job, penalty=penalty, record=record)


def _frozen(model: nn.Module, patterns: Sequence[str]) -> tuple[nn.Parameter, ...]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {name for pattern in patterns for name in matching(list(trained), pattern, "--freeze")}
    if trained and len(names) == len(trained):
        raise UsageError("no parameter is left to train: all are frozen")
    return tuple(p for name, p in trained.items() if name in names)


def open_start(
    model: str | Path | nn.Module | None,
    architecture: str | None,
    trust_code: bool,
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
        return open_model(model, architecture, trust_code=trust_code), False
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


def likelihood_of(asked: LikelihoodName | None, anchors: Sequence[Anchor], start: Opened) -> str:
    """Return the name of the likelihood: as asked for, else the anchors', else the model's own (`Opened.likelihood`).

    Raises:
        UsageError: if another is asked for than the anchors'.
    """
    known = anchors[-1].provenance.likelihood if anchors else asked or start.likelihood
    if asked is not None and asked != known:
        raise UsageError(
            f"likelihood is {asked}, and {anchors[-1].label} was made with {known}; a penalty goes with the loss that "
            "its curvature is of"
        )
    return known


def known(record: Record, anchors: Sequence[Anchor]) -> Record:
    """Return what is known of the model: one that was passed in knows nothing of its data, but its anchors do."""
    if anchors and not record.input:
        origin = anchors[-1].provenance
        return replace(record, input=origin.input, classes=origin.classes, head=origin.head)
    return record


def watched_domains(
    eval_on: Sequence[Any] | Mapping[str, Any] | None,
    data: Any,
    domain: Domain,
    anchors: Sequence[Anchor],
    data_dir: str | Path | None,
    progress: Progress,
    head: Head,
) -> tuple[list[Domain], list[str | None]]:
    """Return the domains to score, and the spec of each that has one.

    They are those asked for, else the test split of the new domain.
    """
    if head == "new" and anchors:
        progress.note(
            "domains are scored with the new head; for an old one's: ewc-ft evaluate CHECKPOINT --head ANCHOR"
        )
    if eval_on is not None:
        found = resolve_domains(eval_on, "test", data_dir)
        given = list(eval_on.values()) if isinstance(eval_on, Mapping) else [eval_on] if len(found) == 1 else eval_on
        given = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        specs = [item if isinstance(item, str) else None for item in given]
        return _named_apart(found), specs if len(specs) == len(found) else [None] * len(found)
    found = [resolve_domain(data, "test", data_dir)] if isinstance(data, str) and domain.split is not None else []
    if not found:
        progress.note(f"{domain.name} has no test split, so nothing is scored; --eval names domains to score")
    elif anchors and head != "new":
        progress.note(
            f"only {domain.name} is scored; where old data is at hand, --eval OLD --eval NEW shows what stays"
        )
    return found, [data for _ in found]


def also_selected(
    scored: Sequence[Domain], specs: list[str | None], select_on: Sequence[Any], data_dir: str | Path | None
) -> tuple[list[Domain], list[str]]:
    """Return the domains to score with those to select on among them, and the names of these; `specs` grows alike."""
    every, names = list(scored), []
    for item in select_on:
        if isinstance(item, str) and item in specs:
            names.append(every[specs.index(item)].name)
            continue
        (domain,) = resolve_domains([item], "test", data_dir)
        same = [other.name for other in every if other.samples is domain.samples]
        if not same:
            every = _named_apart([*every, domain])
            specs.append(item if isinstance(item, str) else None)
        names += same[:1] or [every[-1].name]
    return every, names


def _named_apart(domains: Sequence[Domain]) -> list[Domain]:
    """Return domains of which no two have the same name: later ones are numbered."""
    found: list[Domain] = []
    for domain in domains:
        names, name, number = {other.name for other in found}, domain.name, 2
        while name in names:
            name, number = f"{domain.name} ({number})", number + 1
        found.append(replace(domain, name=name) if name != domain.name else domain)
    return found
