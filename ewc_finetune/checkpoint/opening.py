"""From what a caller has (a path, an architecture, a module) to a model and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ewc_finetune.anchor import check_model
from ewc_finetune.checkpoint import state_dict
from ewc_finetune.checkpoint.architecture import build, complete
from ewc_finetune.checkpoint.state_dict import Checkpoint, Record, build_model, load_checkpoint
from ewc_finetune.devices import random_state_kept


@dataclass(frozen=True)
class Opened:
    """A model ready for work.

    Attributes:
        model: The module; the caller's own where a module was passed.
        label: What to call it in messages.
        record: What is known of it, its architecture included where that is known.
        file: Name of the checkpoint file, without its folder.
        sha256: Digest of the checkpoint file.
        format: The format that it is to be written back in.
    """

    model: nn.Module
    label: str
    record: Record
    file: str | None = None
    sha256: str | None = None
    format: str = state_dict.FORMAT


def open_model(model: str | Path | nn.Module, architecture: str | None = None) -> Opened:
    """Open a checkpoint file (or the checkpoint within an anchor), or take a module as it is.

    Args:
        model: Where the weights are.
        architecture: What to build for them; what the file carries unless given. For a module it is only recorded.

    Raises:
        CheckpointError, ArchitectureError, AnchorError, NonFiniteError: see `load_checkpoint` and `build_model`.
    """
    if isinstance(model, nn.Module):
        check_model(model, "the model's ")
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        return Opened(model, type(model).__name__, Record(architecture=architecture, frozen=frozen))
    return open_checkpoint(load_checkpoint(model), architecture)


def open_checkpoint(checkpoint: Checkpoint, architecture: str | None = None) -> Opened:
    """Build the model of a checkpoint that is already read."""
    module, found = build_model(checkpoint, architecture)
    return Opened(
        module,
        checkpoint.label,
        replace(checkpoint.record, architecture=found),
        Path(checkpoint.label).name,
        checkpoint.sha256,
        checkpoint.format,
    )


def open_fresh(architecture: str, sample_shape: tuple[int, ...], num_classes: int, seed: int) -> Opened:
    """Build an architecture with fresh weights for data of this shape and so many classes.

    Raises:
        ArchitectureError: see `build`.
    """
    text = complete(architecture, sample_shape, num_classes)
    with random_state_kept(torch.device("cpu"), seed):
        return Opened(build(text, trusted=True), text, Record(architecture=text))
