"""Weights and buffers of a module: that they are finite, and copies of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ewc_finetune.errors import AnchorError, NonFiniteError


def is_known_dtype(dtype: torch.dtype) -> bool:
    """Whether torch computes with such numbers, rather than keeping them alone."""
    eight_bits = dtype.is_floating_point and dtype.itemsize == 1
    return not (dtype.is_complex or eight_bits or dtype in (torch.uint16, torch.uint32, torch.uint64))


def check_weights(weights: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights with NaN or infinity; `where` goes before the name in the message.

    Raises:
        AnchorError: naming the first tensor that is not of real numbers.
        NonFiniteError: naming the first tensor, with the number of bad values.
    """
    for name, tensor in weights.items():
        check_weight(name, tensor, where)


def check_weight(name: str, tensor: Tensor, where: str) -> None:
    """Refuse one tensor with NaN or infinity; see `check_weights`."""
    if not is_known_dtype(tensor.dtype):
        raise AnchorError(
            f"{where}{name} is of {tensor.dtype}, and a penalty needs real numbers of 16 bits or more. Use the "
            "weights from before that"
        )
    # By the extremes, into which NaN goes too: `isfinite` takes as much memory again as the tensor.
    if tensor.numel() and not torch.stack(torch.aminmax(tensor.detach())).isfinite().all():
        bad = int((~tensor.isfinite()).sum())
        raise NonFiniteError(
            f"{where}{name} holds NaN or infinity ({bad} of {tensor.numel()} values). "
            "Go back to the last good checkpoint"
        )


def check_buffers(buffers: Mapping[str, Tensor], where: str) -> None:
    """Refuse running statistics with NaN or infinity, and NaN in any other buffer (a mask may well hold -inf).

    Raises:
        NonFiniteError: naming the first tensor.
    """
    for name, tensor in buffers.items():
        check_buffer(name, tensor, where)


def check_buffer(name: str, tensor: Tensor, where: str) -> None:
    """Check one buffer; see `check_buffers`."""
    if name.endswith(("running_mean", "running_var")):
        check_weight(name, tensor, where)
    if tensor.isnan().any():
        raise NonFiniteError(f"{where}{name} holds NaN. Go back to the last good checkpoint")


def check_model(model: nn.Module, where: str) -> None:
    """Apply `check_weights` and `check_buffers` to a model."""
    check_weights(dict(model.named_parameters()), where)
    check_buffers(dict(model.named_buffers()), where)


def cpu_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU that share no memory with the originals."""
    return {name: torch.empty_like(t, device="cpu").copy_(t.detach()) for name, t in tensors.items()}
