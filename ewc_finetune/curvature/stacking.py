"""Where the batch is in a tensor in the middle of a model, and how to bring it to the front.

Models move the batch about: `(T, batch, E)` inside attention, `(batch * windows, ...)` in a Swin transformer,
`(T * batch, E)` before an output projection. Stacked, such a tensor has the shape `(batch, *single)`, where `single` is
the shape it would have had for one sample alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stacking:
    """How one tensor holds its samples.

    Attributes:
        dim: The dimension that grows with the batch.
        minor: Whether the sample's number runs fastest there, `(T * batch)`, not slowest, `(batch * T)`.
    """

    dim: int
    minor: bool = False


@dataclass(frozen=True)
class Stack:
    """Stacks the tensors of one call; called with a tensor, it returns `(batch, *single)`, a view where that can be.

    Attributes:
        stacking: How the call's tensors hold the samples.
        batch: How many there are.
    """

    stacking: Stacking
    batch: int

    def __call__(self, tensor: Tensor) -> Tensor:
        """Stack a tensor of the call."""
        dim = self.stacking.dim
        size = tensor.shape[dim] // self.batch
        if self.stacking.minor:
            return torch.unflatten(tensor, dim, (size, self.batch)).movedim(dim + 1, 0)
        return torch.unflatten(tensor, dim, (self.batch, size)).movedim(dim, 0)


def find_stacking(batched: Tensor, singles: list[Tensor]) -> Stacking | None:
    """Find how a tensor holds its samples, from what it is for each of the samples alone.

    Args:
        batched: The tensor for all the samples together.
        singles: The same for each sample by itself; two or more.

    Returns:
        None where its shape does not say: the tensor is the same for all samples, or of no regular shape.
    """
    batch, single = len(singles), singles[0].shape
    if any(other.shape != single for other in singles) or batched.ndim != len(single):
        return None
    grown = [dim for dim, (b, s) in enumerate(zip(batched.shape, single, strict=True)) if b != s]
    if len(grown) != 1 or batched.shape[grown[0]] != batch * single[grown[0]]:
        return None
    candidates = [Stacking(grown[0]), Stacking(grown[0], minor=True)]
    if single[grown[0]] == 1:
        return candidates[0]
    return min(candidates, key=lambda candidate: _distance(Stack(candidate, batch)(batched), singles))


def _distance(stacked: Tensor, singles: list[Tensor]) -> float:
    return math.fsum(
        (part.double() - single.double()).abs().sum().item() for part, single in zip(stacked, singles, strict=True)
    )
