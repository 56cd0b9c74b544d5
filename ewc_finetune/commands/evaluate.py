"""`evaluate`: how well a model does on a domain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import with_head_of
from ewc_finetune.checkpoint.open import LoadedModel, open_model
from ewc_finetune.data.augmentation import refuse_augmented
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.sources import resolve_domains
from ewc_finetune.evaluation.bound_domain import bind
from ewc_finetune.evaluation.chance import say_numbering, warn_at_chance
from ewc_finetune.evaluation.evaluation import Evaluation
from ewc_finetune.evaluation.metrics import check_metrics
from ewc_finetune.evaluation.options import EvaluateOptions
from ewc_finetune.evaluation.presenting import presented
from ewc_finetune.evaluation.score import Score, score
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.devices import choose_device, on_device, random_state_kept
from ewc_finetune.progress import Progress
from ewc_finetune.specs.options import check_declared, takes


@takes(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> Evaluation:
    """Score a model on one domain or several: a list of scores in their order, each to be had by its name too.

    Args:
        options: Model and data, and by their names the others of `EvaluateOptions`.

    Raises:
        EwcError: naming what is wrong with the model or the data.
    """
    return run(plan(options))


@dataclass(frozen=True)
class EvaluationPlan:
    """What an evaluation will do.

    Attributes:
        options: The options that the command was given.
        loaded: The model, with the head that it is scored with.
        domains: The domains that the model is scored on.
        likelihood: The likelihood of the model's outputs.
        device: The device to compute on.
    """

    options: EvaluateOptions
    loaded: LoadedModel
    domains: list[Domain]
    likelihood: Likelihood
    device: torch.device


def plan(options: EvaluateOptions) -> EvaluationPlan:
    """Open and check everything that an evaluation takes.

    Raises:
        EwcError: naming what is wrong with the model, the data or an option.
    """
    check_declared(options)
    loaded, head = open_model(options.model, options.architecture, trust_code=options.trust_code), options.head
    for remark in loaded.remarks:
        options.progress.note(remark)
    if head is None and loaded.metadata.head is not None:
        options.progress.note("scored with the head that the model was given last; for an old domain's: --head ANCHOR")
    if head is not None:
        anchor = head if isinstance(head, Anchor) else Anchor.open(head)
        classes = replace(loaded.metadata, classes=anchor.provenance.classes)
        loaded = replace(loaded, model=with_head_of(loaded.model, anchor), metadata=classes)
    device = choose_device(options.device)
    domains = resolve_domains(options.data, "test", options.data_dir)
    for domain in domains:
        refuse_augmented(domain, "evaluate")
    rule = get_likelihood(options.likelihood or loaded.likelihood(domains))
    check_metrics(options.metrics, rule.name)
    return EvaluationPlan(options, loaded, domains, rule, device)


def run(todo: EvaluationPlan) -> Evaluation:
    """Score the model on each domain.

    Raises:
        EwcError: if model and data do not suit each other.
    """
    loaded, rule, device, progress = todo.loaded, todo.likelihood, todo.device, todo.options.progress
    with on_device(loaded.model, device), random_state_kept(device):
        bound = []
        for domain in todo.domains:
            shown = presented(domain, loaded, progress)
            say_numbering(shown, loaded, progress)
            bound.append(bind(loaded, shown, rule, device, progress))
        scores = Evaluation()
        for one in bound:
            with _told_if_lost(scores, progress), progress.bar(one.name, one.domain.size, "sample") as bar:
                scored = score(loaded.model, one, todo.options.batch_size, device, bar, todo.options.metrics)
            warn_at_chance(one, loaded, scored.accuracy, scored.samples, progress, own=False)
            scores.append(scored)
    return scores


@contextmanager
def _told_if_lost(scores: Sequence[Score], progress: Progress) -> Iterator[None]:
    """Say the scores that are there when a later one cannot be had."""
    try:
        yield
    except BaseException:
        if scores:
            progress.note(f"scored until then: {', '.join(f'{s.domain} {s.main}' for s in scores)}")
        raise
