"""The old model, which teaches what is rehearsed: for a while, the model that is trained takes its anchor's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import head_of
from ewc_finetune.errors import AnchorMismatchError
from ewc_finetune.modules.heads import head_in_place
from ewc_finetune.modules.wrappers import fitting, without
from ewc_finetune.storage.lazy_tensors import shapes_of


@contextlib.contextmanager
def as_anchored(model: nn.Module, anchor: Anchor) -> Iterator[None]:
    """Have a model be as its anchor keeps it inside the block: its weights, its buffers, and its head if that changed.

    Raises:
        AnchorMismatchError: if the anchor is of another model, or has no layer for the place of the model's head.
    """
    with contextlib.ExitStack() as undoing:
        if not _fits(model, anchor):
            undoing.enter_context(head_in_place(model, head_of(anchor, model)))
            if not _fits(model, anchor):
                raise AnchorMismatchError(
                    f"{anchor.label} cannot teach the model: they differ in more than the last layer. Start from the "
                    "checkpoint that the anchor was made from, or one trained on from it"
                )
        for name, tensor in _named(model, anchor).items():
            kept = (anchor.weights[name] if name in anchor.weights else anchor.buffers[name]).to(tensor)
            if not torch.equal(kept, tensor):
                undoing.callback(tensor.copy_, tensor.clone())
                tensor.copy_(kept)
        yield


def _fits(model: nn.Module, anchor: Anchor) -> bool:
    named = _named(model, anchor)
    known = {**shapes_of(anchor.buffers), **shapes_of(anchor.weights)}
    return all(known.get(name) == tensor.shape for name, tensor in named.items())


def _named(model: nn.Module, anchor: Anchor) -> dict[str, Tensor]:
    """Return the model's parameters and persistent buffers, by the names that the anchor has for them."""
    saved = model.state_dict().keys()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {name: tensor.detach() for name, tensor in named.items() if name in saved}
    return without(known, fitting(known, anchor.weights))
