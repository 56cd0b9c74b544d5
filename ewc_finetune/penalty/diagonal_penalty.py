"""Parameters that are held one by one: the pull of a diagonal quadratic on each, many in one fused call."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.modules.precision import sum_dtype

# Tensors are worked on in pieces of so many numbers: on the CPU what is made on the way stays near the cache, on an
# accelerator they are as many as one fused call should take.
_CPU_PIECE = 1 << 20
_ACCELERATOR_PIECE = 1 << 26


class HeldParameter:
    """One parameter and its quadratic, in pieces: views of so many rows.

    Attributes:
        parameter: The model's own.
        curvature: `lambda F`, in the dtype of the centre.
        centre: `theta*`, in the parameter's dtype or a wider one.
    """

    def __init__(self, parameter: nn.Parameter, curvature: Tensor, centre: Tensor) -> None:
        self.parameter = parameter
        # float32 for half-precision weights, float64 for those.
        self.centre = centre.to(parameter.device, torch.promote_types(parameter.dtype, centre.dtype))
        self.curvature = curvature.to(self.centre)
        self._rows = max(1, _piece(parameter.device) // max(1, math.prod(parameter.shape[1:])))
        self._length = len(self.centre) if self.centre.ndim else None
        self._fixed = list(zip(self._cut(self.curvature), self._cut(self.centre), strict=True))

    def _cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return torch.split(tensor, self._rows) if tensor.ndim and len(tensor) > self._rows else (tensor,)

    def _known(self, tensor: Tensor) -> Tensor:
        """Return the rows that the anchors know."""
        return tensor if self._length is None or len(tensor) == self._length else tensor[: self._length]

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Go through views of the parameter as it is now, its curvature and its centre."""
        held = self._known(self.parameter.detach())
        for theta, (curvature, centre) in zip(self._cut(held), self._fixed, strict=True):
            yield theta, curvature, centre

    def gradients(self) -> tuple[Tensor, ...]:
        """Return views of the parameter's gradient, in the same pieces; made if there is none."""
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        return self._cut(self._known(parameter.grad))

    def value(self) -> float:
        """Return this parameter's part of the penalty."""
        total = 0.0
        for theta, curvature, centre in self.pieces():
            difference = theta.to(centre.dtype) - centre
            dtype = sum_dtype(centre.device)
            total += 0.5 * (curvature.to(dtype) * difference.to(dtype).square_()).sum().item()
        return total

    def trace(self) -> float:
        """Return the sum of `lambda F`."""
        return self.curvature.sum(dtype=sum_dtype(self.curvature.device)).item()


@torch.no_grad()
def add_gradients(held: Iterable[HeldParameter], scale: float | Tensor = 1.0) -> None:
    """Add `lambda F (theta - theta*)`, times a scale, to the gradient of every parameter that is trained."""
    trained = (own for own in held if own.parameter.requires_grad)
    pieces = ((*piece, g) for own in trained for piece, g in zip(own.pieces(), own.gradients(), strict=True))
    for thetas, curvatures, centres, gradients in _together(pieces):
        pull = torch._foreach_sub(_as(thetas, centres), centres)
        torch._foreach_mul_(pull, curvatures)
        if isinstance(scale, Tensor) or scale != 1:
            torch._foreach_mul_(pull, scale)
        torch._foreach_add_(gradients, pull)


@torch.no_grad()
def move(held: Iterable[tuple[HeldParameter, float]]) -> None:
    """Move every parameter that is trained by the implicit step of its penalty, with its learning rate."""
    trained = ((own, lr) for own, lr in held if own.parameter.requires_grad)
    pieces = ((*piece, lr) for own, lr in trained for piece in own.pieces())
    for thetas, curvatures, centres, rates in _together(pieces):
        # The share of the way to the centre, x / (1 + x), and not 1 - 1 / (1 + x), in which a small x would be lost.
        share = torch._foreach_mul(curvatures, rates)
        torch._foreach_div_(share, torch._foreach_add(share, 1.0))
        moved = _as(thetas, centres)
        torch._foreach_lerp_(moved, centres, share)
        if moved is not thetas:
            torch._foreach_copy_(thetas, moved)


def _together(pieces: Iterable[tuple[Any, ...]]) -> Iterator[list[list[Any]]]:
    """Put pieces together for one fused call each, as many as make one large one; lists of what they consist of."""
    group: list[tuple[Any, ...]] = []
    size = 0
    for piece in pieces:
        if group and (size + piece[0].numel() > _piece(piece[0].device) or _kind(piece) != _kind(group[0])):
            yield [list(part) for part in zip(*group, strict=True)]
            group, size = [], 0
        group.append(piece)
        size += piece[0].numel()
    if group:
        yield [list(part) for part in zip(*group, strict=True)]


def _kind(piece: tuple[Any, ...]) -> tuple[torch.device, torch.dtype, torch.dtype]:
    return piece[0].device, piece[0].dtype, piece[1].dtype


def _as(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Return the tensors in the dtype of the others: float32 for half-precision weights."""
    return tensors if tensors[0].dtype == others[0].dtype else [tensor.to(others[0].dtype) for tensor in tensors]


def _piece(device: torch.device) -> int:
    return _CPU_PIECE if device.type == "cpu" else _ACCELERATOR_PIECE
