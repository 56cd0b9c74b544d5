"""What `finetune` works with: model, data and penalty, found to suit each other before the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ewc_finetune.anchor import Anchor
from ewc_finetune.checkpoint.checkpoint import Record
from ewc_finetune.checkpoint.opening import Opened
from ewc_finetune.choices import Head, Lineage, PenaltyForm
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.layout import Layout
from ewc_finetune.errors import UsageError
from ewc_finetune.heads import find_head
from ewc_finetune.likelihood import Likelihood
from ewc_finetune.patterns import matching
from ewc_finetune.penalty import Penalty
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.stack import distinct, lineage_of, of_one_head, remarks
from ewc_finetune.verbs.chance import say_numbering
from ewc_finetune.verbs.head import class_names, give_head, head_names
from ewc_finetune.verbs.prepare import prepare
from ewc_finetune.verbs.presenting import presented, say_anchors


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
