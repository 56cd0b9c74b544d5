"""Polish: training on from the mended weights for a little, with the old domains rehearsed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import UsageError
from ewc_finetune.evaluation.presenting import presented
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.plan import Plan
from ewc_finetune.finetuning.plan import plan as plan_finetuning
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.mending.options import MendOptions
from ewc_finetune.modules.batch import Batch
from ewc_finetune.progress import OnlyBars, Silent
from ewc_finetune.rehearsal.held_out import measured as left_to_measure
from ewc_finetune.rehearsal.options import PROBES, Rehearsing, is_probes


def rehearsed(options: MendOptions) -> list[object]:
    """Return what is rehearsed: the old anchors' probes unless it is said."""
    return Rehearsing(rehearse=options.rehearse).sources or [PROBES]


def measured(options: MendOptions, old: Sequence[Anchor]) -> list[Anchor]:
    """Return the old anchors with what is measured of their probes, before polish and after: what is not rehearsed.

    Raises:
        UsageError: if a probe is too small for both.
    """
    asks = options.polish is not None and any(map(is_probes, rehearsed(options)))
    return left_to_measure(old, asks)


def plan_polish(options: MendOptions, loaded: LoadedModel, old: Sequence[Anchor], domain: Domain) -> Plan | None:
    """Plan the fine-tune that starts from whatever weights the model has then; None where none is asked for.

    It has no penalty: the mended weights are where that is least already, and away from them rehearsal holds more.

    Raises:
        EwcError: if there is nothing to rehearse, or something is wrong with it, with the data or with an option.
    """
    if options.polish is None:
        return None
    if not has_labels(domain, loaded):
        raise UsageError(f"{domain.name} has no labels, and polish trains on them; leave --polish out")
    size = min(Schedule.batch_size, options.batch_size)
    asked = FinetuneOptions(
        loaded.model, _so_many(domain, options.polish, size), anchors=list(old), lambdas=0.0,
        rehearse=rehearsed(options), epochs=1, batch_size=size, eval_on=[], device=options.device,
        data_dir=options.data_dir, progress=OnlyBars(options.progress),
        lr=Schedule.lr if options.lr is None else options.lr,
    )  # fmt: skip
    return plan_finetuning(asked, loaded)


def has_labels(domain: Domain, loaded: LoadedModel) -> bool:
    """Whether samples of a domain come with labels, as the model takes them."""
    first = domain.subset([0]) if domain.indexable and domain.size else domain
    return presented(first, loaded, Silent()).labelled


def _so_many(domain: Domain, steps: int, batch_size: int) -> Domain:
    """Return the domain with as many samples as so many steps take, drawn from walks through all of it."""
    if not domain.indexable:
        return replace(domain, samples=_Batches(domain, steps, batch_size))
    size, wanted = domain.size or 0, steps * batch_size
    generator = torch.Generator().manual_seed(0)
    walks = [torch.randperm(size, generator=generator) for _ in range(-(-wanted // max(1, size)))]
    return domain.subset(torch.cat(walks)[:wanted].tolist())


@dataclass(frozen=True)
class _Batches:
    """So many batches of a domain that gives no samples by number: it is walked through as often as that takes."""

    domain: Domain
    steps: int
    batch_size: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        left, before = self.steps, -1
        while left and left != before:  # an empty walk would go on for ever
            before = left
            for batch in islice(self.domain.batches(self.batch_size), left):
                yield batch
                left -= 1
