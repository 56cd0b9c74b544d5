"""Train, eval, and normalisation layers that must not forget by themselves.

Running statistics move in training mode even when no weight does, and they alone can destroy the old domain. Frozen
means that such layers stay in eval mode while the rest of the model trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
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


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put back what a forward pass may leave on the modules: tensors that they keep, buffers that they count in."""
    kept = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]
    names = {id(module): set(vars(module)) for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for module in model.modules():
            for name in [n for n, v in vars(module).items() if isinstance(v, torch.Tensor)]:
                if name not in names[id(module)]:
                    delattr(module, name)
        for module, name, value in kept:
            setattr(module, name, value)
        for module, name, buffer, value in buffers:
            # TorchScript gives a new object for its tensor each time it is asked.
            if not isinstance(module, torch.jit.ScriptModule) and module._buffers.get(name) is not buffer:
                module._buffers[name] = buffer
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


@contextlib.contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run what `torch.compile` has wrapped as it was written, so that its operations can be seen."""
    if not any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
