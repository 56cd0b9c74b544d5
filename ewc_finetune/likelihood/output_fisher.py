"""The Fisher at the outputs as a sum of outer products, `S_n = sum_m s_m s_m^T` for every sample n of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class OutputFisher:
    """`S_n` for every sample of a batch, by its vectors `s_m`, made one at a time: those of 1,000 classes may not fit.

    Attributes:
        count: How many there are (M).
    """

    count: int
    _make: Callable[[int], Tensor]
    _squares: Callable[[], Tensor]

    def __getitem__(self, m: int) -> Tensor:
        """Return vector m for every sample, in the shape of the outputs."""
        return self._make(m)

    def squares(self) -> Tensor:
        """Return `sum_m s_m^2`, the diagonal of each `S_n`, in the shape of the outputs."""
        return self._squares()

    def vectors(self, samples: slice) -> Tensor:
        """Return all vectors of some samples, shape `(M, samples, *output)`."""
        return torch.stack([self._make(m)[samples] for m in range(self.count)])


def softmax_fisher(p: Tensor) -> OutputFisher:
    """Return `diag(p) - p p^T` for each row of probabilities, shape `(rows, classes)`.

    This is the Cholesky factor in closed form (Tanabe and Sagae 1992, "An exact Cholesky decomposition and the
    generalized inverse of the variance-covariance matrix of the multinomial distribution"), with the classes of each
    row taken in falling order of probability. It has classes - 1 vectors, where `sqrt(p_c) (e_c - p)` would be one
    more, none of its terms cancels, and what the last ones add is small: those that all together hold less than the
    dtype's epsilon of the trace over the batch are left out.
    """
    ordered, order = p.sort(dim=1, descending=True)
    # The probability of class m and all behind it, then of those behind it alone; summed from the small end.
    left = _tails(ordered)
    after = functional.pad(left[:, 1:], (0, 1))
    scale = torch.nan_to_num(ordered * after / left)
    norms = scale * torch.nan_to_num(1 + functional.pad(_tails(ordered.square())[:, 1:], (0, 1)) / after.square())
    tails = _tails(norms.sum(dim=0, keepdim=True))[0]
    count = int((tails > torch.finfo(p.dtype).eps * tails[0]).sum())
    root = scale.sqrt()
    below = torch.nan_to_num(root / after).neg_()

    def make(m: int) -> Tensor:
        vector = ordered * below[:, m, None]
        vector[:, :m] = 0
        vector[:, m] = root[:, m]
        return torch.zeros_like(p).scatter_(1, order, vector)

    def squares() -> Tensor:
        # p (1 - p), with the sum of the others for 1 - p.
        others = left[:, :1] - ordered
        others[:, 0] = after[:, 0]
        return torch.zeros_like(p).scatter_(1, order, ordered * others)

    return OutputFisher(max(1, min(count, p.shape[1] - 1)), make, squares)


def _tails(values: Tensor) -> Tensor:
    """Sum each row from every place to its end."""
    return values.flip(1).cumsum(dim=1).flip(1)


def diagonal_fisher(variance: Tensor) -> OutputFisher:
    """Return a diagonal `S_n`: vector m is `sqrt(variance)` at output m and zero elsewhere."""
    flat = variance.sqrt().reshape(len(variance), -1)

    def make(m: int) -> Tensor:
        vector = torch.zeros_like(flat)
        vector[:, m] = flat[:, m]
        return vector.view_as(variance)

    return OutputFisher(flat.shape[1], make, lambda: variance)
