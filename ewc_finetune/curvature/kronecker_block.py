"""Kronecker-factored blocks of a Fisher: a layer's two factors, in full or cut to their leading eigenvectors.

The block of a layer with weights W, shape `(outputs, inputs)`, a bias being one more column, is `A ⊗ G`: it takes a
difference D of that shape to `G D A`, and its quadratic is `1/2 <D, G D A>` (Martens and Grosse 2015).

Where both factors are cut, pairs of directions that hold a twentieth of the trace at most are told apart less finely
(`Block.terms`), since these are most of the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ewc_finetune.choices import KfacDtype
from ewc_finetune.curvature.kronecker_factors import AUTO_RANK, COARSE, EighDecomposed, Factor, Rank, spectral_function
from ewc_finetune.curvature.truncated_product import CutBlock


@dataclass(frozen=True)
class Block:
    """A layer's block of the Fisher.

    Attributes:
        weight: Name of the parameter; flattened but for its outputs, it is the matrix W.
        bias: Name of the bias that is W's last column, or None.
        transposed: Whether the weight's shape is `(inputs, outputs)`.
        input: The factor of the inputs, A.
        output: The factor of the outputs, G.
    """

    weight: str
    bias: str | None
    transposed: bool
    input: Factor
    output: Factor

    @property
    def layer(self) -> str:
        """What to call it: the module's name, else the parameter's."""
        return self.weight.removesuffix(".weight")

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that the block is of."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def trace(self) -> float:
        """The sum of the diagonal of the block."""
        return self.input.trace * self.output.trace

    @property
    def products(self) -> int:
        """How many multiplications it takes to apply it."""
        if self._cut is None:
            return self.input.products * self.output.size + self.output.products * self.input.size
        narrow, wide, coarse = self._cut.factors
        along = narrow.products * wide.size + wide.products * len(narrow.eigenvalues)
        return along + coarse.products * (narrow.size + len(narrow.eigenvalues))

    @cached_property
    def _cut(self) -> CutBlock | None:
        """See `terms`; None unless both factors are cut."""
        a, g = self.input, self.output
        if not isinstance(a, EighDecomposed) or not isinstance(g, EighDecomposed) or a.complete or g.complete:
            return None
        narrow, wide = (a, g) if len(a.eigenvalues) <= len(g.eigenvalues) else (g, a)
        count = len(wide.eigenvalues)
        left = narrow.rest * (narrow.size - len(narrow.eigenvalues))
        if len(narrow.eigenvalues) and left > 0:
            smallest = narrow.eigenvalues[-1] * wide.eigenvalues[-1]
            as_large = int((narrow.rest * wide.eigenvalues >= smallest).sum())
            held = wide.eigenvalues.double().cumsum(0)
            enough = int((left * (wide.trace - held) > COARSE * self.trace).sum()) + 1
            count = min(count, max(as_large, enough))
        return CutBlock(narrow, wide, wide.leading(count), narrow is g)

    def terms(self) -> list[tuple[Factor, Factor]]:
        """Return the factors, input and output, of the Kronecker products that the block is the sum of.

        One, `A ⊗ G`, unless both are cut. Then the one of fewer eigenvectors, say A, is taken apart: what it keeps
        meets G, and what it leaves, of which every direction counts as the mean, meets a G that is cut further: to the
        eigenvectors that give a pair as large as the smallest pair of kept ones, or more, so that the others hold a
        twentieth of the block's trace at most. The trace stays what it is.
        """
        if self._cut is None:
            return [(self.input, self.output)]
        narrow, wide, coarse = self._cut.factors
        kept = replace(narrow, rest=0.0)
        left = replace(narrow, eigenvalues=torch.zeros_like(narrow.eigenvalues))
        terms: list[tuple[Factor, Factor]] = [(kept, wide), (left, coarse)]
        return [(a, g) for g, a in terms] if self._cut.turned else terms

    def largest(self) -> float:
        """Return its largest eigenvalue, right to a few percent at worst."""
        return max(a.largest() * g.largest() for a, g in self.terms())

    def join(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return weight and bias as the matrix that the factors are of."""
        matrix = weight.T if self.transposed else weight.flatten(1)
        return matrix if bias is None else torch.cat([matrix, bias[:, None]], dim=1)

    def to(self, like: Tensor) -> Block:
        """Return it on the device and in the dtype of a tensor."""
        return replace(self, input=self.input.to(like), output=self.output.to(like))

    def stored(self, rank: Rank = "auto", dtype: KfacDtype = "float16") -> Block:
        """Return it as an anchor keeps it: on the CPU, of no higher rank than this.

        Args:
            rank: See `check_rank`.
            dtype: The dtype of kept eigenvectors, whose numbers are all below 1. The rest is float32: rounding a dense
                factor would make small eigenvalues negative.
        """
        factors = [factor.to(torch.empty(0)) for factor in (self.input, self.output)]
        if rank != "full":
            factors = [factor.truncated(AUTO_RANK if isinstance(rank, str) else rank) for factor in factors]
        if dtype == "float16":
            factors = [replace(f, vectors=f.vectors.half()) if isinstance(f, EighDecomposed) else f for f in factors]
        return replace(self, input=factors[0], output=factors[1])

    def split(self, matrix: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
        """Return the parts of such a matrix that belong to a weight of this shape, and to the bias."""
        own = matrix if self.bias is None else matrix[:, :-1]
        own = own.T if self.transposed else own
        return own.reshape(shape), None if self.bias is None else matrix[:, -1]

    def times(self, difference: Tensor) -> Tensor:
        """Return `G D A`."""
        if self._cut is not None:
            return self._cut.times(difference)
        return self.output.before(self.input.after(difference))

    def diagonal(self) -> Tensor:
        """Return the diagonal of the block, in the shape of D."""
        return torch.stack([torch.outer(g.diagonal(), a.diagonal()) for a, g in self.terms()]).sum(dim=0)

    def spectral(self, difference: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function of the block to D: of its eigenvalues, in its eigenbasis.

        Args:
            difference: D.
            function: Takes products of eigenvalues to what they are to be replaced by.
        """
        if self._cut is not None:
            return self._cut.spectral(difference, function)
        a, g = self.input.eigen(), self.output.eigen()
        return (
            spectral_function(g, a, difference, function)
            if a.complete
            else spectral_function(a, g, difference.T, function).T
        )
