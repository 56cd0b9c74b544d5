"""The head, a model's last linear layer: a new one for a domain with classes of its own, or one with more outputs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ewc_finetune.errors import ArchitectureError, counted


def is_headless(model: nn.Module) -> bool:
    """Whether it is an encoder of timm: a model that was built for no class, and gives features."""
    return hasattr(model, "reset_classifier") and getattr(model, "num_classes", None) == 0


def give_place(model: Any) -> None:
    """Give an encoder of timm a layer in whose place a new head can come.

    Raises:
        ArchitectureError: if it would get several layers, or one that is not linear; it is as before then.
    """
    model.reset_classifier(1)
    if not isinstance(model.get_classifier(), nn.Linear):
        take_place(model)
        raise ArchitectureError(f"the classifier of a {type(model).__name__} is no linear layer, or several")


def take_place(model: Any) -> None:
    """Undo `give_place`."""
    model.reset_classifier(0)


def find_head(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last linear layer that the model lists, and its name.

    Raises:
        ArchitectureError: if there is none, or its weight is another layer's too.
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not layers or not layers[-1][0]:
        raise ArchitectureError(
            f"{type(model).__name__} has no linear layer to take for its head, so its outputs cannot be changed"
        )
    name, head = layers[-1]
    users = [other for other, p in model.named_parameters(remove_duplicate=False) if p is head.weight]
    if len(users) > 1:
        raise ArchitectureError(
            f"the head {name} shares its weight with {users[0].rpartition('.')[0]}: neither can change alone"
        )
    return name, head


def replace_head(model: nn.Module, outputs: int, keep: bool) -> tuple[str, nn.Linear]:
    """Put a linear layer with so many outputs in the place of the model's head.

    Args:
        model: Changed in place.
        outputs: How many outputs the new layer has, which is initialised as torch does, from torch's random state.
        keep: Whether its first outputs are the old layer's, with their weights.

    Returns:
        The head's name, and the layer that was there.

    Raises:
        ArchitectureError: see `find_head`; or if there would be fewer outputs than are to be kept, or those to be kept
            are frozen, which new outputs of the same tensor could not be.
    """
    name, old = find_head(model)
    parts = [part for part, _ in old.named_parameters()]
    if not set(parts) <= {"weight", "bias"}:
        raise ArchitectureError(f"the head {name} is parametrised by {', '.join(parts)}; it cannot be replaced as such")
    if keep and outputs < old.out_features:
        raise ArchitectureError(
            f"the head {name} has {counted(old.out_features, 'output')}; it cannot expand to {outputs}"
        )
    if keep and not all(parameter.requires_grad for parameter in old.parameters()):
        raise ArchitectureError(f"the head {name} is frozen, and new outputs would be too; use a new head")
    new = nn.Linear(old.in_features, outputs, old.bias is not None, old.weight.device, old.weight.dtype)
    new.train(old.training)
    if keep:
        with torch.no_grad():
            for own, kept in zip(new.parameters(), old.parameters(), strict=True):
                own[: len(kept)] = kept
    model.set_submodule(name, new)
    return name, old


@contextlib.contextmanager
def head_in_place(model: nn.Module, layer: nn.Linear) -> Iterator[None]:
    """Have a copy of the layer in the place of the model's head inside the block, on its device and in its dtype."""
    name, head = find_head(model)
    model.set_submodule(name, copy.deepcopy(layer).to(head.weight))
    try:
        yield
    finally:
        model.set_submodule(name, head)
