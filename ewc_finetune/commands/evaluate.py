"""`evaluate`: how well a model does on a domain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import with_head_of
from ewc_finetune.checkpoint.open import Opened, open_model
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.sources import resolve_domains
from ewc_finetune.errors import UsageError
from ewc_finetune.evaluation.bound_domain import bind
from ewc_finetune.evaluation.chance import say_numbering, warn_at_chance
from ewc_finetune.evaluation.options import EvaluateArgs, EvaluateOptions
from ewc_finetune.evaluation.presenting import presented
from ewc_finetune.evaluation.score import Score, score
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.devices import choose_device, on_device, random_state_kept
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.specs.options import takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(EvaluateOptions)
def evaluate(
    model: str | Path | nn.Module, data: Any, *, progress: Progress | None = None, **options: Unpack[EvaluateArgs]
) -> list[Score]:
    """Score a model on one domain or several.

    Args:
        model: A module (left as it was), a checkpoint file or model folder, `hf:org/name`, or an anchor file.
        data: A data spec, dataset or loader; or a list of specs or datasets; or a dict of such, by name. Specs mean
            their test split unless they say.
        progress: Told what happens.
        options: See `EvaluateOptions`.

    Raises:
        EwcError: naming what is wrong with the model or the data.
    """
    progress = progress or Silent()
    return run(plan(EvaluateOptions(model=model, data=data, **options), progress), progress)


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation will do.

    Attributes:
        options: As they were asked for.
        opened: The model, with the head that it is scored with.
        domains: What it is scored on.
        likelihood: Of the outputs.
        device: Where to compute.
    """

    options: EvaluateOptions
    opened: Opened
    domains: list[Domain]
    likelihood: Likelihood
    device: torch.device


def plan(options: EvaluateOptions, progress: Progress) -> EvaluationPlan:
    """Open and check everything that an evaluation takes.

    Args:
        options: What is asked for.
        progress: Told what is to be known of the model.

    Raises:
        EwcError: naming what is wrong with the model, the data or an option.
    """
    opened, head = open_model(options.model, options.architecture, trust_code=options.trust_code), options.head
    for remark in opened.remarks:
        progress.note(remark)
    if head is not None:
        anchor = head if isinstance(head, Anchor) else Anchor.open(head)
        classes = replace(opened.record, classes=anchor.provenance.classes)
        opened = replace(opened, model=with_head_of(opened.model, anchor), record=classes)
    device = choose_device(options.device)
    rule = get_likelihood(options.likelihood or opened.likelihood)
    if options.batch_size < 1:
        raise UsageError(f"batch size is {options.batch_size}; expected at least 1")
    return EvaluationPlan(options, opened, resolve_domains(options.data, "test", options.data_dir), rule, device)


def run(todo: EvaluationPlan, progress: Progress) -> list[Score]:
    """Score the model on each domain.

    Args:
        todo: What is to be done.
        progress: Told what happens.

    Raises:
        EwcError: if model and data do not suit each other.
    """
    opened, rule, device = todo.opened, todo.likelihood, todo.device
    with on_device(opened.model, device), random_state_kept(device):
        bound = []
        for domain in todo.domains:
            shown = presented(domain, opened, progress)
            say_numbering(shown, opened, progress)
            bound.append(bind(opened, shown, rule, device, progress))
        scores: list[Score] = []
        for one in bound:
            with _told_if_lost(scores, progress), progress.bar(one.name, one.domain.size, "sample") as bar:
                scored = score(opened.model, one, todo.options.batch_size, device, bar)
            warn_at_chance(one, opened, scored.accuracy, scored.samples, progress, own=False)
            scores.append(scored)
    return scores


@contextmanager
def _told_if_lost(scores: list[Score], progress: Progress) -> Iterator[None]:
    """Say the scores that are there when a later one cannot be had."""
    try:
        yield
    except BaseException:
        if scores:
            progress.note(f"scored until then: {', '.join(f'{s.domain} {s.main}' for s in scores)}")
        raise
