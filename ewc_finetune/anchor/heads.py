"""Last layers of anchors: those that stand in for a model's, and those that have nothing to do with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.errors import AnchorMismatchError
from ewc_finetune.modules.heads import find_head


def with_head_of(model: nn.Module, anchor: Anchor) -> nn.Module:
    """Return a copy of the model whose head is the anchor's.

    Raises:
        AnchorMismatchError: see `head_of`.
    """
    layer = head_of(anchor, model)
    changed = copy.deepcopy(model)
    changed.set_submodule(find_head(model)[0], layer)
    return changed


def head_of(anchor: Anchor, model: nn.Module) -> nn.Linear:
    """Return the anchor's head as a layer that can take the place of the model's.

    Raises:
        AnchorMismatchError: if the anchor has no such layer, or one for other inputs.
    """
    name, head = find_head(model)
    weight, bias = (anchor.weights.get(f"{name}.{part}") for part in ("weight", "bias"))
    if weight is None or weight.ndim != 2 or weight.shape[1] != head.in_features:
        instead = "no such layer" if weight is None else f"one of shape {tuple(weight.shape)}"
        raise AnchorMismatchError(
            f"the model's head is {name} {tuple(head.weight.shape)}, and {anchor.label} has {instead}. Name the anchor "
            "that the model was fine-tuned under"
        )
    # Made without numbers, it takes none from torch's random state.
    layer = nn.Linear(head.in_features, len(weight), bias is not None, "meta", head.weight.dtype)
    layer.to_empty(device=head.weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer.train(head.training)


def of_one_head(anchors: Sequence[Anchor], head: Mapping[str, Any] | None) -> list[Anchor]:
    """Return the anchors, without the last layer of those that have another one than this (`Provenance.head`).

    Two layers that were trained each from the start have nothing to do with each other, even if they are of one shape.
    """
    return [
        replace(anchor.without(other), provenance=replace(anchor.provenance, head=None if head is None else dict(head)))
        if (other := foreign_head(anchor, head))
        else anchor
        for anchor in anchors
    ]


def foreign_head(anchor: Anchor, head: Mapping[str, Any] | None) -> set[str]:
    """Return the parameters of the last layer, if the anchor's is not this one; none if it is."""
    own = anchor.provenance.head
    if (own or {}).get("id") == (head or {}).get("id"):
        return set()
    return {name for known in (own, head) if known is not None for name in known["parameters"]}
