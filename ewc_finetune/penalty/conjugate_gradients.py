"""Linear equations of layers' weights, by preconditioned conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


class Solution(NamedTuple):
    """What was found.

    Attributes:
        value: X.
        left: What is left of the right side, as a part of it, by the norm of `inverse`.
    """

    value: Tensor
    left: float


def solve(times: Map, right: Tensor, inverse: Map, tolerance: float, iterations: int) -> Solution:
    """Solve `times(X) = right` (Hestenes and Stiefel 1952, "Methods of conjugate gradients").

    Args:
        times: A linear map that is symmetric and has no negative eigenvalues.
        right: What it is to give; where the map is zero, so is this.
        inverse: Something near its inverse, without negative eigenvalues either; X has only what this gives.
        tolerance: Stop when what is left of `right` is so much of it, by the norm of `inverse`.
        iterations: Stop after so many at the latest.
    """
    solution, residual = torch.zeros_like(right), right
    direction = inverse(residual)
    slope = whole = (residual * direction).sum()
    least = whole * tolerance**2
    for _ in range(iterations):
        if slope <= least:
            break
        image = times(direction)
        curvature = (direction * image).sum()
        if curvature <= 0:  # rounding: there is nothing left to gain
            break
        solution = solution + direction * (slope / curvature)
        residual = residual - image * (slope / curvature)
        towards = inverse(residual)
        before, slope = slope, (residual * towards).sum()
        direction = towards + direction * (slope / before)
    return Solution(solution, (slope.clamp(min=0) / whole).sqrt().item() if whole > 0 else 0.0)
