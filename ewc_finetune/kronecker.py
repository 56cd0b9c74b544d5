"""Kronecker-factored blocks of a Fisher: a layer's two factors, in full or cut to their leading eigenvectors.

The block of a layer with weights W, shape `(outputs, inputs)`, a bias being one more column, is `A ⊗ G`: it takes a
difference D of that shape to `G D A`, and its quadratic is `1/2 <D, G D A>` (Martens and Grosse 2015).

Where both factors are cut, pairs of directions that hold a twentieth of the trace at most are told apart less finely
(`Block.terms`), since these are most of the work.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ewc_finetune.choices import KfacDtype
from ewc_finetune.errors import UsageError

# Up to so many rows eigenvectors are worked out in float64, all of them.
EXACT_EIGEN = 1024
# Of larger ones: eigenvectors that are looked for at first, such as are looked for beside them, and how often.
_FIRST, _SPARE, _ITERATIONS = 64, 16, 2
# The share of a block's trace that may be told apart less finely.
_COARSE = 0.05
# The share of a factor's trace that its kept eigenvectors hold, unless it is said.
AUTO_RANK = 0.99
Rank = float | Literal["auto", "full"]


class Factor(ABC):
    """One factor of a block: a symmetric matrix without negative eigenvalues."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many rows it has."""

    @property
    @abstractmethod
    def trace(self) -> float:
        """The sum of its eigenvalues."""

    @property
    @abstractmethod
    def products(self) -> int:
        """How many multiplications a vector takes that it is applied to."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return its diagonal."""

    @abstractmethod
    def after(self, matrix: Tensor) -> Tensor:
        """Return `matrix @ self`."""

    @abstractmethod
    def before(self, matrix: Tensor) -> Tensor:
        """Return `self @ matrix`."""

    @abstractmethod
    def to(self, like: Tensor) -> Factor:
        """Return it on the device and in the dtype of a tensor."""

    @abstractmethod
    def scaled(self, by: float) -> Factor:
        """Return it times a number."""

    @abstractmethod
    def eigen(self) -> Truncated:
        """Return its eigenvalues and eigenvectors."""

    @abstractmethod
    def clean(self) -> Factor:
        """Return it without the negative eigenvalues that rounding has left; in float64, where there is such."""

    def truncated(self, rank: float | int) -> Factor:
        """Keep the leading eigenvectors, and the mean of the other eigenvalues for each of these.

        Args:
            rank: How many, or, below 1, what share of the trace they are to hold.

        Returns:
            That, or for a share this itself, if it would take as many eigenvectors as it has rows, or half of them:
            then it is faster whole.
        """
        whole = self.eigen()
        values = whole.eigenvalues.double()
        kept = int((values.cumsum(0) < rank * self.trace).sum()) + 1 if rank < 1 else int(rank)
        if rank < 1 and 2 * kept >= self.size:
            return self
        if kept >= len(values):
            return self
        return whole.leading(kept)

    @abstractmethod
    def largest(self) -> float:
        """Return its largest eigenvalue, right to a few percent at worst."""

    def matrix(self) -> Tensor:
        """Return it as a matrix."""
        like = self.diagonal()
        return self.after(torch.eye(self.size, dtype=like.dtype, device=like.device))


@dataclass(frozen=True)
class Full(Factor):
    """A factor as it is."""

    values: Tensor

    @property
    def size(self) -> int:
        """See `Factor`."""
        return len(self.values)

    @property
    def trace(self) -> float:
        """See `Factor`."""
        return self.values.diagonal().sum(dtype=torch.float64).item()

    @property
    def products(self) -> int:
        """See `Factor`."""
        return self.size * self.size

    def diagonal(self) -> Tensor:
        """See `Factor`."""
        return self.values.diagonal()

    def matrix(self) -> Tensor:
        """See `Factor`."""
        return self.values

    def after(self, matrix: Tensor) -> Tensor:
        """See `Factor`."""
        return matrix @ self.values

    def before(self, matrix: Tensor) -> Tensor:
        """See `Factor`."""
        return self.values @ matrix

    def to(self, like: Tensor) -> Full:
        """See `Factor`."""
        return Full(self.values.to(like))

    def scaled(self, by: float) -> Full:
        """See `Factor`."""
        return Full(self.values * by)

    def truncated(self, rank: float | int) -> Factor:
        """See `Factor`; of a large one the eigenvectors are those that subspace iteration finds."""
        if self.size <= EXACT_EIGEN or rank >= self.size // 4:
            return super().truncated(rank)
        return self._leading(rank) or self

    def _leading(self, rank: float | int) -> Truncated | None:
        """Find so many leading eigenvectors, or those with a share of the trace unless these are too many.

        Randomized subspace iteration (Halko, Martinsson and Tropp 2011, "Finding structure with randomness"). Whatever
        it finds is orthonormal, and its eigenvalues are what the factor is along it, so that no share is overstated.
        """
        generator = torch.Generator().manual_seed(0)
        basis = self.values.new_empty(self.size, 0)
        most = (self.size - 1) // 2
        count = _FIRST if rank < 1 else int(rank)
        while True:
            more = torch.randn(self.size, count + _SPARE - basis.shape[1], generator=generator)
            basis = torch.cat([basis, more.to(self.values)], dim=1)
            for _ in range(_ITERATIONS):
                basis = torch.linalg.qr(self.values @ basis).Q
            values, rotation = torch.linalg.eigh(basis.T @ (self.values @ basis))
            values, vectors = values.flip(0)[:count].clamp(min=0), (basis @ rotation.flip(1))[:, :count]
            held = values.double().cumsum(0)
            kept = count if rank >= 1 else int((held < rank * self.trace).sum()) + 1
            if kept <= count:
                rest = (self.trace - held[kept - 1].item()) / (self.size - kept)
                return Truncated(vectors[:, :kept].contiguous(), values[:kept], max(0.0, rest))
            # What is left hardly has larger ones than the last of these.
            if held[-1].item() + (most - count) * values[-1].item() < rank * self.trace:
                return None
            count = min(2 * count, most)

    def largest(self) -> float:
        """See `Factor`; by power iterations."""
        vector = torch.randn(1, self.size, generator=torch.Generator().manual_seed(0)).to(self.values)
        norm = torch.linalg.vector_norm(vector)
        for _ in range(50):
            if not norm:
                return 0.0
            vector = self.after(vector / norm)
            norm = torch.linalg.vector_norm(vector)
        return float(norm)

    def eigen(self) -> Truncated:
        """See `Factor`."""
        # In float64 it takes minutes for thousands of rows, and what it would add is below what the factor knows.
        matrix = self.values.cpu() if self.values.device.type == "mps" else self.values  # mps has no float64
        values, vectors = torch.linalg.eigh(matrix.double() if self.size <= EXACT_EIGEN else matrix)
        return Truncated(vectors.flip(1).to(self.values), values.flip(0).clamp(min=0).to(self.values), 0.0)

    def clean(self) -> Full:
        """See `Factor`."""
        found = self.eigen()
        wide = torch.float32 if self.values.device.type == "mps" else torch.float64
        vectors = found.vectors.to(wide)
        return Full((vectors * found.eigenvalues.to(wide)) @ vectors.T)


@dataclass(frozen=True)
class Truncated(Factor):
    """`sum_i e_i v_i v_i^T` over the leading eigenvectors, and the same number for all directions that they leave.

    Attributes:
        vectors: One to a column, orthonormal, `(size, rank)`; in half precision they may be stored.
        eigenvalues: Theirs, in falling order.
        rest: The eigenvalue of what is orthogonal to all of them.
    """

    vectors: Tensor
    eigenvalues: Tensor
    rest: float

    @property
    def complete(self) -> bool:
        """Whether no direction is left out."""
        return len(self.eigenvalues) == self.size

    @property
    def size(self) -> int:
        """See `Factor`."""
        return len(self.vectors)

    @property
    def trace(self) -> float:
        """See `Factor`."""
        return self.eigenvalues.sum(dtype=torch.float64).item() + self.rest * (self.size - len(self.eigenvalues))

    @property
    def products(self) -> int:
        """See `Factor`."""
        return 2 * self.size * len(self.eigenvalues)

    def diagonal(self) -> Tensor:
        """See `Factor`."""
        return self.vectors.to(self.eigenvalues).square() @ (self.eigenvalues - self.rest) + self.rest

    def after(self, matrix: Tensor) -> Tensor:
        """See `Factor`."""
        vectors = self.vectors.to(matrix)
        within = matrix @ vectors
        return torch.addmm(matrix, within * (self.eigenvalues - self.rest), vectors.T, beta=self.rest)

    def before(self, matrix: Tensor) -> Tensor:
        """See `Factor`."""
        return self.after(matrix.T).T

    def to(self, like: Tensor) -> Truncated:
        """See `Factor`."""
        rest = torch.tensor(self.rest, dtype=like.dtype).item()
        return Truncated(self.vectors.to(like), self.eigenvalues.to(like), rest)

    def scaled(self, by: float) -> Truncated:
        """See `Factor`."""
        return Truncated(self.vectors, self.eigenvalues * by, self.rest * by)

    def largest(self) -> float:
        """See `Factor`; exactly."""
        rest = 0.0 if self.complete else self.rest
        return float(max([rest, *self.eigenvalues[:1].tolist()]))

    def eigen(self) -> Truncated:
        """See `Factor`."""
        return self

    def clean(self) -> Truncated:
        """See `Factor`; its eigenvalues are none of rounding's."""
        return self

    def leading(self, count: int) -> Truncated:
        """Return it with so many of its eigenvectors, of less than all, and the mean of what the others hold."""
        rest = (self.trace - self.eigenvalues[:count].sum(dtype=torch.float64).item()) / (self.size - count)
        return Truncated(self.vectors[:, :count].contiguous(), self.eigenvalues[:count], max(0.0, rest))


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
    def _cut(self) -> _Cut | None:
        """See `terms`; None unless both factors are cut."""
        a, g = self.input, self.output
        if not isinstance(a, Truncated) or not isinstance(g, Truncated) or a.complete or g.complete:
            return None
        narrow, wide = (a, g) if len(a.eigenvalues) <= len(g.eigenvalues) else (g, a)
        count = len(wide.eigenvalues)
        left = narrow.rest * (narrow.size - len(narrow.eigenvalues))
        if len(narrow.eigenvalues) and left > 0:
            smallest = narrow.eigenvalues[-1] * wide.eigenvalues[-1]
            as_large = int((narrow.rest * wide.eigenvalues >= smallest).sum())
            held = wide.eigenvalues.double().cumsum(0)
            enough = int((left * (wide.trace - held) > _COARSE * self.trace).sum()) + 1
            count = min(count, max(as_large, enough))
        return _Cut(narrow, wide, wide.leading(count), narrow is g)

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
        found: list[tuple[Factor, Factor]] = [(kept, wide), (left, coarse)]
        return [(a, g) for g, a in found] if self._cut.turned else found

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
            dtype: Of kept eigenvectors, whose numbers are all below 1. The rest is float32: of a factor as it is,
                rounding would make small eigenvalues negative.
        """
        factors = [factor.to(torch.empty(0)) for factor in (self.input, self.output)]
        if rank != "full":
            factors = [factor.truncated(AUTO_RANK if isinstance(rank, str) else rank) for factor in factors]
        if dtype == "float16":
            factors = [replace(f, vectors=f.vectors.half()) if isinstance(f, Truncated) else f for f in factors]
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
        return _spectral(g, a, difference, function) if a.complete else _spectral(a, g, difference.T, function).T


@dataclass(frozen=True)
class _Cut:
    """A block of which both factors are cut.

    Attributes:
        narrow: The factor of fewer eigenvectors.
        wide: The other one, as it counts along these.
        coarse: As it counts along what they leave.
        turned: Whether narrow is the output factor.
    """

    narrow: Truncated
    wide: Truncated
    coarse: Truncated
    turned: bool

    @property
    def factors(self) -> tuple[Truncated, Truncated, Truncated]:
        """All three."""
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
        matrix = difference.T if self.turned else difference  # a row for each of wide's
        narrow, wide, coarse = (factor.vectors.to(matrix) for factor in self.factors)
        # With P on narrow's eigenvectors D = D P + D (1 - P), and of the second most is multiplied by one number.
        columns = matrix @ narrow
        rows = (coarse.T @ matrix).mul_(shares.left)
        within = (wide.T @ columns).mul_(shares.both)
        along = columns.mul_(shares.aside).addmm_(wide, within).addmm_(coarse, rows @ narrow, alpha=-1)
        found = (matrix * shares.rest).addmm_(coarse, rows).addmm_(along, narrow.T)
        return found.T if self.turned else found


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


def _spectral(g: Truncated, a: Truncated, matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """See `Block.spectral`; of a that is complete."""
    return _along(g, matrix @ a.vectors, lambda values: function(values[:, None] * a.eigenvalues)) @ a.vectors.T


def _along(g: Truncated, matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Multiply what of each column lies along an eigenvector by what the function has for its eigenvalue, a row."""
    rows = g.vectors.T @ matrix
    if g.complete:
        return g.vectors @ rows.mul_(function(g.eigenvalues))
    rest = function(g.eigenvalues.new_tensor([g.rest]))
    return (matrix * rest).addmm_(g.vectors, rows.mul_(function(g.eigenvalues) - rest))


def check_rank(rank: Rank) -> None:
    """Refuse what is no rank: `auto`, `full`, a share of the trace below 1, or how many eigenvectors to keep.

    Raises:
        UsageError: saying what was expected.
    """
    if isinstance(rank, (int, float)) and not isinstance(rank, bool):
        if type(rank) is float and rank == 1:
            raise UsageError("kfac rank is 1.0; for all of the trace say full, for one eigenvector the whole number 1")
        known = 0 < rank < 1 or (rank >= 1 and float(rank).is_integer())
    else:
        known = rank in ("auto", "full")
    if not known:
        raise UsageError(
            f"kfac rank is {rank!r}; expected auto, full, a share between 0 and 1, or a number of eigenvectors"
        )
