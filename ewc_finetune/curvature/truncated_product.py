"""Products of factors that were cut to their largest eigenvalues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ewc_finetune.curvature.kronecker_factors import EighDecomposed


@dataclass(frozen=True)
class CutBlock:
    """A block of which both factors are cut.

    Attributes:
        narrow: The factor of fewer eigenvectors.
        wide: The other factor, as it counts along the kept eigenvectors of narrow.
        coarse: The other factor, as it counts along the directions that narrow leaves.
        turned: Whether narrow is the output factor.
    """

    narrow: EighDecomposed
    wide: EighDecomposed
    coarse: EighDecomposed
    turned: bool

    @property
    def factors(self) -> tuple[EighDecomposed, EighDecomposed, EighDecomposed]:
        """Narrow, wide and coarse."""
        return self.narrow, self.wide, self.coarse

    def times(self, difference: Tensor) -> Tensor:
        """See `Block.times`."""
        return self._multiplied(difference, self._own)

    def spectral(self, difference: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """See `Block.spectral`."""
        return self._multiplied(difference, self._shares(function))

    @cached_property
    def _own(self) -> _Shares:
        return self._shares(lambda value: value)

    def _shares(self, function: Callable[[Tensor], Tensor]) -> _Shares:
        """Return what a function of the block's eigenvalues multiplies by."""
        narrow, wide, coarse = self.factors
        rest = function(narrow.eigenvalues.new_tensor([narrow.rest * coarse.rest]))
        aside = function(narrow.eigenvalues * wide.rest)
        both = function(torch.outer(wide.eigenvalues, narrow.eigenvalues))
        left = function(coarse.eigenvalues * narrow.rest)
        return _Shares(both - aside, aside - rest, (left - rest)[:, None], rest)

    def _multiplied(self, difference: Tensor, shares: _Shares) -> Tensor:
        """Multiply by these."""
        matrix = difference.T if self.turned else difference  # its rows are of the wide factor
        narrow, wide, coarse = (factor.vectors.to(matrix) for factor in self.factors)
        # D = D P + D (1 - P), P projecting on narrow's eigenvectors; most of D (1 - P) is multiplied by one number.
        columns = matrix @ narrow
        rows = (coarse.T @ matrix).mul_(shares.left)
        within = (wide.T @ columns).mul_(shares.both)
        along = columns.mul_(shares.aside).addmm_(wide, within).addmm_(coarse, rows @ narrow, alpha=-1)
        product = (matrix * shares.rest).addmm_(coarse, rows).addmm_(along, narrow.T)
        return product.T if self.turned else product


class _Shares(NamedTuple):
    """What the directions of a cut block are multiplied by, each above what the coarser ones that hold it are.

    Attributes:
        both: Pairs of kept eigenvectors, `(wide, narrow)`.
        aside: Narrow's kept ones with what wide leaves.
        left: Coarse's, with what narrow leaves, `(coarse, 1)`.
        rest: All others.
    """

    both: Tensor
    aside: Tensor
    left: Tensor
    rest: Tensor
