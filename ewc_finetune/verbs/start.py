"""What a fine-tune starts from: a checkpoint, an anchor's weights, a module, or fresh weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ewc_finetune.anchor import Anchor
from ewc_finetune.checkpoint.architecture import FORMS, looks_like_architecture
from ewc_finetune.checkpoint.checkpoint import Record
from ewc_finetune.checkpoint.from_anchor import FromAnchor
from ewc_finetune.checkpoint.opening import Opened, is_there, open_checkpoint, open_fresh, open_model
from ewc_finetune.choices import LikelihoodName
from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import CheckpointError, UsageError


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
