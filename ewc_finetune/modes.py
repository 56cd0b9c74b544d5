"""Train, eval, and normalisation layers that must not forget by themselves.

Running statistics move in training mode even when no weight does, and they alone can destroy the old domain. Frozen
means that such layers stay in eval mode while the rest of the model trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ewc_finetune.choices import NormStats


def normalisation_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that keep running statistics (batch norm and its kin), by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None and getattr(module, "running_var", None) is not None
    }


def set_training(model: nn.Module, norm_stats: NormStats) -> None:
    """Put the model in training mode; with `frozen`, its normalisation layers stay in eval mode."""
    model.train()
    if norm_stats == "frozen":
        for module in normalisation_layers(model).values():
            module.eval()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and each back in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
