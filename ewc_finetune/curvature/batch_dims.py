"""Where the batch is in a tensor in the middle of a model, and how to bring it to the front.

Models move the batch about: `(T, batch, E)` inside attention, `(batch * windows, ...)` in a Swin transformer,
`(T * batch, E)` before an output projection. Batch first, such a tensor has the shape `(batch, *single)`:
what is behind the batch is the shape for one sample alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchDim:
    """The dimension of a tensor that holds its samples.

    Attributes:
        dim: The dimension that grows with the batch.
        size: How long it is for one sample.
        minor: Whether the sample's number runs fastest there, `(T * batch)`, not slowest, `(batch * T)`.
    """

    dim: int
    size: int = 1
    minor: bool = False


class CourseChangedError(Exception):
    """The model did something else with its parameters than when it was looked at."""


@dataclass(frozen=True)
class BatchFirst:
    """Brings the samples of one call's tensors to the front; a view where that can be.

    Attributes:
        batch_dim: Where they are.
        batch: How many there are.
    """

    batch_dim: BatchDim
    batch: int

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the call as `(batch, *single)`.

        Raises:
            CourseChangedError: if it is not as long as so many samples are.
        """
        dim, size = self.batch_dim.dim, self.batch_dim.size
        if tensor.ndim <= dim or tensor.shape[dim] != self.batch * size:
            raise CourseChangedError
        if self.batch_dim.minor:
            return torch.unflatten(tensor, dim, (size, self.batch)).movedim(dim + 1, 0)
        return torch.unflatten(tensor, dim, (self.batch, size)).movedim(dim, 0)


def find_batch_dim(batched: Tensor, singles: list[Tensor]) -> BatchDim | None:
    """Find which dimension of a tensor holds its samples, from what it is for each of the samples alone.

    Args:
        batched: The tensor for all the samples together.
        singles: The same for each sample by itself; two or more.

    Returns:
        None where that cannot be told: the tensor is the same for all samples, of no regular shape, or its values fit
        neither order of the samples in that dimension, or both.
    """
    batch, single = len(singles), singles[0].shape
    if any(other.shape != single for other in singles) or batched.ndim != len(single):
        return None
    grown = [dim for dim, (b, s) in enumerate(zip(batched.shape, single, strict=True)) if b != s]
    if len(grown) != 1 or batched.shape[grown[0]] != batch * single[grown[0]]:
        return None
    candidates = [BatchDim(grown[0], single[grown[0]], minor) for minor in (False, True)]
    if single[grown[0]] == 1:
        return candidates[0]
    fitting = [candidate for candidate in candidates if _fits(BatchFirst(candidate, batch)(batched), singles)]
    return fitting[0] if len(fitting) == 1 else None


def _fits(batched: Tensor, singles: list[Tensor]) -> bool:
    """Whether these are the single samples' tensors, but for rounding."""
    expected = torch.stack(singles)
    rounding = torch.finfo(expected.dtype).eps ** 0.5 if expected.is_floating_point() else 0.0
    difference = (batched.double() - expected.double()).norm()
    return bool(difference <= rounding * expected.double().norm())
