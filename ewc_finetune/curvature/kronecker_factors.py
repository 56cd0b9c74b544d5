"""The two factors of a Kronecker block: as matrices, or as their leading eigenvalues and eigenvectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ewc_finetune.errors import UsageError
from ewc_finetune.modules.precision import sum_dtype

# Up to so many rows all eigenvectors are worked out, in float64; of more, subspace iteration finds the leading ones.
EXACT_EIGEN = 1024
# How many eigenvectors subspace iteration looks for at first.
_FIRST = 64
# How many it follows beside those, by which the last of them come out better.
_SPARE = 16
# How often it multiplies by the factor before the eigenvalues are looked at.
_ITERATIONS = 2
# The share of a block's trace that may be told apart less finely.
COARSE = 0.05
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
    def damped(self, by: float) -> Factor:
        """Return it with so many times the mean of its eigenvalues added to each."""

    @abstractmethod
    def eigen(self) -> EighDecomposed:
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
class DenseFactor(Factor):
    """A factor as a matrix.

    Attributes:
        values: The matrix, `(size, size)`.
    """

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

    def to(self, like: Tensor) -> DenseFactor:
        """See `Factor`."""
        return DenseFactor(self.values.to(like))

    def scaled(self, by: float) -> DenseFactor:
        """See `Factor`."""
        return DenseFactor(self.values * by)

    def damped(self, by: float) -> DenseFactor:
        """See `Factor`."""
        values = self.values.clone()
        values.diagonal().add_(by * self.trace / self.size)
        return DenseFactor(values)

    def truncated(self, rank: float | int) -> Factor:
        """See `Factor`; of a large one the eigenvectors are those that subspace iteration finds."""
        if self.size <= EXACT_EIGEN or rank >= self.size // 4:
            return super().truncated(rank)
        return self._leading(rank) or self

    def _leading(self, rank: float | int) -> EighDecomposed | None:
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
                return EighDecomposed(vectors[:, :kept].contiguous(), values[:kept], max(0.0, rest))
            # The eigenvalues that are left are hardly larger than the last of those at hand.
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

    def eigen(self) -> EighDecomposed:
        """See `Factor`."""
        # For thousands of rows float64 takes minutes, and its digits are beyond the sampling error of the factor.
        matrix = self.values.cpu() if self.values.device.type == "mps" else self.values  # mps has no float64
        values, vectors = torch.linalg.eigh(matrix.double() if self.size <= EXACT_EIGEN else matrix)
        return EighDecomposed(vectors.flip(1).to(self.values), values.flip(0).clamp(min=0).to(self.values), 0.0)

    def clean(self) -> DenseFactor:
        """See `Factor`."""
        eigen = self.eigen()
        wide = sum_dtype(self.values.device)
        vectors = eigen.vectors.to(wide)
        return DenseFactor((vectors * eigen.eigenvalues.to(wide)) @ vectors.T)


@dataclass(frozen=True)
class EighDecomposed(Factor):
    """`sum_i e_i v_i v_i^T` over the leading eigenvectors, and the same number for all directions that they leave.

    Attributes:
        vectors: One to a column, orthonormal, `(size, rank)`; in half precision they may be stored.
        eigenvalues: The eigenvalues of these, in falling order.
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

    def to(self, like: Tensor) -> EighDecomposed:
        """See `Factor`."""
        rest = torch.tensor(self.rest, dtype=like.dtype).item()
        return EighDecomposed(self.vectors.to(like), self.eigenvalues.to(like), rest)

    def scaled(self, by: float) -> EighDecomposed:
        """See `Factor`."""
        return EighDecomposed(self.vectors, self.eigenvalues * by, self.rest * by)

    def damped(self, by: float) -> EighDecomposed:
        """See `Factor`."""
        more = by * self.trace / self.size
        return EighDecomposed(self.vectors, self.eigenvalues + more, self.rest + more)

    def largest(self) -> float:
        """See `Factor`; exactly."""
        rest = 0.0 if self.complete else self.rest
        return float(max([rest, *self.eigenvalues[:1].tolist()]))

    def eigen(self) -> EighDecomposed:
        """See `Factor`."""
        return self

    def clean(self) -> EighDecomposed:
        """See `Factor`; its eigenvalues are kept without negative ones."""
        return self

    def leading(self, count: int) -> EighDecomposed:
        """Return it with so many of its eigenvectors, of less than all, and the mean of what the others hold."""
        rest = (self.trace - self.eigenvalues[:count].sum(dtype=torch.float64).item()) / (self.size - count)
        return EighDecomposed(self.vectors[:, :count].contiguous(), self.eigenvalues[:count], max(0.0, rest))


def spectral_function(
    g: EighDecomposed, a: EighDecomposed, matrix: Tensor, function: Callable[[Tensor], Tensor]
) -> Tensor:
    """Apply a function as `Block.spectral` does, where the eigenvectors of a are complete."""
    return _along(g, matrix @ a.vectors, lambda values: function(values[:, None] * a.eigenvalues)) @ a.vectors.T


def _along(g: EighDecomposed, matrix: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
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
