"""Training half-precision models: in float32, so that steps too small for their own dtype add up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def float32_weights(model: nn.Module) -> Iterator[dict[str, torch.dtype]]:
    """Hold half-precision parameters and buffers in float32 inside the block, and round them back after it.

    Yields the dtypes that they come back in, by name; empty for a model without half-precision tensors.
    """
    narrow = {
        name: (tensor, tensor.dtype)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if tensor.dtype in (torch.float16, torch.bfloat16)
    }
    for tensor, _ in narrow.values():
        tensor.data = tensor.data.float()
    try:
        yield {name: dtype for name, (_, dtype) in narrow.items()}
    finally:
        for tensor, dtype in narrow.values():
            tensor.grad = None
            tensor.data = tensor.data.to(dtype)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype that sums are taken in: float64, which mps alone does not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32 if it is narrower."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
