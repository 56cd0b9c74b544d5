"""`evaluate`: how well a model does on a domain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import with_head_of
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.choices import LikelihoodName
from ewc_finetune.data.sources import resolve_domains
from ewc_finetune.errors import UsageError
from ewc_finetune.evaluation.chance import say_numbering, warn_at_chance
from ewc_finetune.evaluation.compatibility import prepare
from ewc_finetune.evaluation.presenting import presented
from ewc_finetune.evaluation.score import Score, score
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.devices import choose_device, on_device, random_state_kept
from ewc_finetune.progress import Progress, Silent


def evaluate(
    model: str | Path | nn.Module,
    data: Any,
    *,
    architecture: str | None = None,
    trust_code: bool = False,
    likelihood: LikelihoodName | None = None,
    head: Anchor | str | Path | None = None,
    batch_size: int = 500,
    device: str = "auto",
    data_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Score]:
    """Score a model on one domain or several.

    Args:
        model: A module (left as it was), a checkpoint file or model folder, `hf:org/name`, or an anchor file.
        data: A data spec, dataset or loader; or a list of specs or datasets; or a dict of such, by name. Specs mean
            their test split unless they say.
        architecture: What to build for a checkpoint that doesn't carry it.
        trust_code: Whether code in the checkpoint may run (a pickled module).
        likelihood: How outputs become log p(y | x); unless given as in `consolidate`, and of an anchor its own.
        head: An anchor whose last layer takes the place of the model's, where that was fine-tuned with a new one.
        batch_size: Samples at once.
        device: `auto`, `cpu`, `cuda` or `mps`.
        data_dir: Where downloaded data lies.
        progress: Told what happens.

    Raises:
        EwcError: naming what is wrong with the model or the data.
    """
    progress = progress or Silent()
    opened = open_model(model, architecture, trust_code=trust_code)
    for remark in opened.remarks:
        progress.note(remark)
    if head is not None:
        anchor = head if isinstance(head, Anchor) else Anchor.open(head)
        classes = replace(opened.record, classes=anchor.provenance.classes)
        opened = replace(opened, model=with_head_of(opened.model, anchor), record=classes)
    where = choose_device(device)
    rule = get_likelihood(likelihood or opened.likelihood)
    if batch_size < 1:
        raise UsageError(f"batch size is {batch_size}; expected at least 1")
    domains = resolve_domains(data, "test", data_dir)
    with on_device(opened.model, where), random_state_kept(where):
        domains = [presented(d, opened, progress) for d in domains]
        for domain in domains:
            say_numbering(domain, opened, progress)
        found = [prepare(opened.model, d, d.likelihood(rule), where, opened.record, progress) for d in domains]
        scores: list[Score] = []
        for domain, (layout, outputs) in zip(domains, found, strict=True):
            own = domain.likelihood(rule)
            with _told_if_lost(scores, progress), progress.bar(domain.name, domain.size, "sample") as bar:
                scored = score(opened.model, domain, layout, own, batch_size, where, bar)
            warn_at_chance(domain, opened, layout, outputs, own, scored.accuracy, scored.samples, progress, own=False)
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
