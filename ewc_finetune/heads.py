"""The head, a model's last linear layer: a new one for a domain with classes of its own, or one with more outputs."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ewc_finetune.anchor import Anchor
from ewc_finetune.errors import AnchorMismatchError, ArchitectureError


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


def replace_head(model: nn.Module, outputs: int, keep: bool) -> str:
    """Put a linear layer with so many outputs in the place of the model's head, and return its name.

    Args:
        model: Changed in place.
        outputs: Of the new layer, which is initialised as torch does, from torch's random state.
        keep: Whether its first outputs are the old layer's, with their weights.

    Raises:
        ArchitectureError: see `find_head`; or if there would be fewer outputs than are to be kept.
    """
    name, old = find_head(model)
    if keep and outputs < old.out_features:
        raise ArchitectureError(f"the head {name} has {old.out_features} outputs; it cannot expand to {outputs}")
    new = nn.Linear(old.in_features, outputs, old.bias is not None, old.weight.device, old.weight.dtype)
    new.train(old.training)
    if keep:
        with torch.no_grad():
            for own, kept in zip(new.parameters(), old.parameters(), strict=True):
                own[: len(kept)] = kept
    model.set_submodule(name, new)
    return name


def with_head_of(model: nn.Module, anchor: Anchor) -> nn.Module:
    """Return a copy of the model whose head is the anchor's.

    Raises:
        AnchorMismatchError: if the anchor has no such layer, or one for other inputs.
    """
    name, head = find_head(model)
    weight = anchor.weights.get(f"{name}.weight")
    if weight is None or weight.shape[1:] != head.weight.shape[1:]:
        found = "no such layer" if weight is None else f"one of shape {tuple(weight.shape)}"
        raise AnchorMismatchError(
            f"the model's head is {name} {tuple(head.weight.shape)}, and {anchor.label} has {found}. Name the anchor "
            "that the model was fine-tuned under"
        )
    changed = copy.deepcopy(model)
    replace_head(changed, len(weight), keep=False)
    for parameter_name, parameter in changed.get_submodule(name).named_parameters():
        parameter.data = anchor.weights[f"{name}.{parameter_name}"].to(parameter)
    return changed
