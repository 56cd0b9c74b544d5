"""One batch of inputs, a tensor or a dictionary of tensors, and how a model is called with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ewc_finetune.errors import DataError

# The first dimension of each tensor is the batch.
Inputs = Tensor | dict[str, Tensor]
# Inputs and labels; every kind of data may come without labels.
Batch = tuple[Inputs, Tensor | None]


def count(inputs: Inputs) -> int:
    """Return how many samples the batch has.

    Raises:
        DataError: if the tensors of a dictionary don't agree on it.
    """
    if isinstance(inputs, Tensor):
        return len(inputs)
    sizes = {name: len(tensor) if tensor.ndim else None for name, tensor in inputs.items()}
    size = next(iter(sizes.values()))
    if size is None or len(set(sizes.values())) != 1:
        raise DataError(f"the inputs of one batch have different numbers of samples: {sizes}")
    return size


def each(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply a function to each tensor of the batch."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    return {name: function(tensor) for name, tensor in inputs.items()}


def tensors(inputs: Inputs) -> list[Tensor]:
    """Return the tensors of the batch."""
    return list(named(inputs).values())


def named(inputs: Inputs) -> dict[str, Tensor]:
    """Return the tensors of the batch by name; a single one has an empty name."""
    return {"": inputs} if isinstance(inputs, Tensor) else inputs


def take(inputs: Inputs, samples: slice | list[int]) -> Inputs:
    """Return some of the batch's samples."""
    return each(lambda tensor: tensor[samples], inputs)


def signature(inputs: Inputs) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Return what batches that fit together have in common: the names, and each sample's shape and dtype."""
    return tuple((name, tensor.shape[1:], tensor.dtype) for name, tensor in named(inputs).items())


def is_inputs(value: object) -> TypeGuard[Inputs]:
    """Whether a value is a tensor or a dictionary of tensors, by name."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    return isinstance(value, Tensor)


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """Call the model and return the tensor of its outputs, wherever in its result that is (`outputs_of`)."""
    args, kwargs = arguments(model, inputs)
    return outputs_of(model(*args, **kwargs))


def arguments(model: nn.Module, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return the arguments of a call: a dictionary goes by name where `forward` has those names, else whole."""
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return (inputs,), {}
    try:
        signature.bind(**inputs)
    except TypeError as error:
        if set(inputs) & set(signature.parameters):
            raise DataError(
                f"the inputs {', '.join(inputs)} don't go into the model: {error}; its forward takes "
                f"{', '.join(signature.parameters)}"
            ) from None
        return (inputs,), {}
    return (), dict(inputs)


def outputs_of(result: Any) -> Tensor:
    """Return the tensor of outputs in what a model returned.

    A tensor is itself; of a dictionary (or an object such as those of transformers) it is `logits`, else `out`, else
    the only tensor there is; of a tuple or list, the first tensor.

    Raises:
        DataError: if there is none, or none that can be told from the others.
    """
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        named = {str(name): value for name, value in result.items() if isinstance(value, Tensor)}
    elif isinstance(result, (tuple, list)) and not hasattr(result, "logits"):
        first = next((value for value in result if isinstance(value, Tensor)), None)
        if first is not None:
            return first
        named = {}
    else:
        named = {name: v for name in ("logits", "out") if isinstance(v := getattr(result, name, None), Tensor)}
    for name in ("logits", "out"):
        if name in named:
            return named[name]
    if len(named) == 1:
        return next(iter(named.values()))
    raise DataError(
        f"the model returned a {type(result).__name__}"
        + (f" with {', '.join(named)}" if named else "")
        + "; expected a tensor of outputs, a tuple that begins with it, or a dictionary in which it is 'logits'"
    )


def detached(inputs: Inputs) -> Inputs:
    """Return the inputs without history, so that no gradient flows to them."""
    return each(torch.Tensor.detach, inputs)
