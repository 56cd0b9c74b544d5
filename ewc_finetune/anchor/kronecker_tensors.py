"""How Kronecker-factored blocks lie in an anchor file.

A factor in full is one tensor, `kfac.<layer>.input` or `kfac.<layer>.output`: the rows of its lower triangle one after
the other. A truncated one is two, `.vectors`, one to a column, and `.values`, theirs and at the end that of all other
directions; vectors may be in half precision. Which parameters a layer has is in the provenance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.curvature.kronecker_factors import DenseFactor, EighDecomposed, Factor
from ewc_finetune.errors import AnchorError, NonFiniteError
from ewc_finetune.storage.lazy_tensors import TensorFile

SIDES = ("input", "output")
# How far below zero rounding to float32 may bring an eigenvalue, by the largest number on the diagonal, and products of
# eigenvectors from those of orthonormal ones, in half precision.
_ROUNDING = 1e-4
_OFF = 1e-2


class BlockFile(Mapping[str, Block]):
    """The blocks of an anchor file by layer; each is read when it is asked for, and not kept.

    Args:
        tensors: The file's `kfac.` tensors.
        records: Of each layer `weight`, `bias` and `transposed`.
        where: The file, for messages.

    Attributes:
        records: As given.
        tensors: As given.
        where: As given.
    """

    def __init__(self, tensors: TensorFile, records: Mapping[str, dict[str, Any]], where: str) -> None:
        self.records = dict(records)
        self.tensors = tensors
        self.where = where

    def without(self, layers: Collection[str]) -> BlockFile:
        """Return the same but for some layers."""
        kept = {layer: record for layer, record in self.records.items() if layer not in layers}
        return BlockFile(self.tensors, kept, self.where)

    def __getitem__(self, layer: str) -> Block:
        record = self.records[layer]
        factors = [_read(self.tensors, f"{layer}.{side}", self.where) for side in SIDES]
        block = Block(record["weight"], record["bias"], record["transposed"], *factors)
        check_block(block, self.where)
        return block

    def __iter__(self) -> Iterator[str]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


def names_of(blocks: Mapping[str, Block]) -> dict[str, tuple[str, ...]]:
    """Return the parameters of each layer, weight first, without reading a block."""
    return {
        layer: (record["weight"],) if record["bias"] is None else (record["weight"], record["bias"])
        for layer, record in records_of(blocks).items()
    }


def keys_of(tensors: Mapping[str, Tensor], layers: Collection[str]) -> set[str]:
    """Return which of the tensors the factors of these layers are made of."""
    keys: set[str] = set()
    for layer in layers:
        for side in SIDES:
            key = f"{layer}.{side}"
            keys |= {key} if key in tensors else {f"{key}.vectors", f"{key}.values"}
    return keys


def sizes_of(blocks: Mapping[str, Block], layer: str) -> dict[str, int | None]:
    """Return how many rows the factors of a layer have, None for one that is missing, without reading them."""
    if isinstance(blocks, BlockFile):
        return {side: _size(blocks.tensors.shapes, f"{layer}.{side}") for side in SIDES}
    return {side: getattr(blocks[layer], side).size for side in SIDES}


@dataclass(frozen=True)
class StoredFactor:
    """What is kept of one factor.

    Attributes:
        rows: How many it has.
        kept: How many of its eigenvectors; all of one that is stored whole.
        share: Of the trace, what these hold; 1 of one that is stored whole.
        whole: Whether it is.
        bytes: What it takes in the file.
    """

    rows: int
    kept: int
    share: float
    whole: bool
    bytes: int

    @property
    def whole_bytes(self) -> int:
        """What it would take as a triangle in float32."""
        return 2 * self.rows * (self.rows + 1)


@dataclass(frozen=True)
class StoredBlock:
    """What is kept of a block.

    Attributes:
        input: Of its input factor.
        output: Of its output factor.
        products: How many multiplications it takes to apply it.
    """

    input: StoredFactor
    output: StoredFactor
    products: int


def stored_block(blocks: BlockFile, layer: str) -> StoredBlock:
    """Return what is kept of the block of a layer; nothing but eigenvalues is read.

    Raises:
        AnchorError: if these cannot be.
    """
    record = blocks.records[layer]
    factors = [_outline(blocks.tensors, f"{layer}.{side}", blocks.where) for side in SIDES]
    block = Block(record["weight"], record["bias"], record["transposed"], *factors)
    a, g = (_stored(blocks.tensors, f"{layer}.{side}", factor) for side, factor in zip(SIDES, factors, strict=True))
    return StoredBlock(a, g, block.products)


def _outline(tensors: TensorFile, key: str, where: str) -> Factor:
    """Return a factor of which the matrix has no numbers."""
    rows = _size(tensors.shapes, key) or 0
    if key in tensors:
        return DenseFactor(torch.empty(rows, rows, device="meta"))
    values = tensors[f"{key}.values"].float()
    if not (values.isfinite() & (values >= 0)).all():
        raise AnchorError(f"{where}: kfac.{key}.values holds what no eigenvalues are. Make the anchor again")
    return EighDecomposed(torch.empty(rows, len(values) - 1, device="meta"), values[:-1], values[-1].item())


def _stored(tensors: TensorFile, key: str, factor: Factor) -> StoredFactor:
    if not isinstance(factor, EighDecomposed):
        return StoredFactor(factor.size, factor.size, 1.0, True, tensors.bytes[key])
    held, trace = factor.eigenvalues.double().sum().item(), factor.trace
    taken = sum(tensors.bytes[f"{key}.{part}"] for part in ("vectors", "values"))
    share = held / trace if trace > 0 else 1.0
    return StoredFactor(factor.size, len(factor.eigenvalues), share, False, taken)


def matrix_of(blocks: Mapping[str, Block], layer: str, shape: torch.Size) -> dict[str, int | None]:
    """Return how many rows the factors of a layer should have, for a weight of this shape."""
    record = records_of(blocks)[layer]
    if len(shape) < 2:
        return dict.fromkeys(SIDES)
    outputs = shape[1] if record["transposed"] else shape[0]
    return {"input": shape.numel() // max(outputs, 1) + (record["bias"] is not None), "output": outputs}


def to_tensors(blocks: Mapping[str, Block]) -> dict[str, Tensor]:
    """Return the tensors of blocks, by their names behind `kfac.`."""
    tensors = {}
    for layer, block in blocks.items():
        for side in SIDES:
            factor: Factor = getattr(block, side)
            if isinstance(factor, EighDecomposed):
                rest = factor.eigenvalues.new_tensor([factor.rest])
                tensors[f"{layer}.{side}.vectors"] = factor.vectors
                tensors[f"{layer}.{side}.values"] = torch.cat([factor.eigenvalues, rest])
            else:
                rows, columns = torch.tril_indices(factor.size, factor.size)
                tensors[f"{layer}.{side}"] = factor.matrix()[rows, columns]
    return tensors


def records_of(blocks: Mapping[str, Block]) -> dict[str, dict[str, Any]]:
    """Return what the provenance says of each block, without reading it."""
    if isinstance(blocks, BlockFile):
        return blocks.records
    return {
        layer: {"layer": layer, "weight": block.weight, "bias": block.bias, "transposed": block.transposed}
        for layer, block in blocks.items()
    }


def check_block(block: Block, where: str) -> None:
    """Refuse factors that are no mean of outer products.

    Raises:
        AnchorError: naming the layer.
        NonFiniteError: naming the layer.
    """
    for side in SIDES:
        factor: Factor = getattr(block, side)
        name = f"{where}: the {side} factor of {block.layer}"
        if isinstance(factor, EighDecomposed):
            tensors = [factor.vectors, factor.eigenvalues, torch.tensor(factor.rest)]
        else:
            tensors = [factor.matrix()]
        if not all(tensor.isfinite().all() for tensor in tensors):
            raise NonFiniteError(f"{name} holds NaN or infinity. Make the anchor again")
        if isinstance(factor, EighDecomposed):
            _check_eigen(factor, name)
        else:
            _check_matrix(factor.matrix(), name)


def check_factor(name: str, tensor: Tensor, where: str) -> None:
    """Refuse a tensor of a factor that holds no real numbers.

    Raises:
        AnchorError: naming it.
    """
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        raise AnchorError(f"{where}: kfac.{name} has type {tensor.dtype}; expected float32")


def _check_eigen(factor: EighDecomposed, name: str) -> None:
    if (factor.eigenvalues < 0).any() or factor.rest < 0:
        raise AnchorError(f"{name} has negative eigenvalues; it must be a mean of outer products")
    if (factor.eigenvalues.diff() > 0).any():
        raise AnchorError(f"{name} has eigenvalues that do not fall from the first to the last. Make the anchor again")
    vectors = factor.vectors.double()
    off = (vectors.T @ vectors - torch.eye(vectors.shape[1], dtype=vectors.dtype)).abs().max() if vectors.numel() else 0
    if off > _OFF:
        raise AnchorError(f"{name} has eigenvectors that are not orthonormal. Make the anchor again")


def _check_matrix(matrix: Tensor, name: str) -> None:
    scale = matrix.diagonal().abs().max().item() if len(matrix) else 0.0
    if (matrix - matrix.T).abs().max().item() > _ROUNDING * scale:
        raise AnchorError(f"{name} is not symmetric; it must be a mean of outer products")
    # It has a Cholesky factor, once rounding is made up for, unless an eigenvalue is negative.
    lifted = matrix.double() + _ROUNDING * scale * torch.eye(len(matrix), dtype=torch.float64)
    if not scale and matrix.any():
        raise AnchorError(f"{name} has negative eigenvalues; it must be a mean of outer products")
    if scale and int(torch.linalg.cholesky_ex(lifted).info):
        raise AnchorError(f"{name} has negative eigenvalues; it must be a mean of outer products")


def _size(shapes: Mapping[str, torch.Size], key: str) -> int | None:
    """Return how many rows the factor has of which these are the tensors' shapes; None if they are of no factor."""
    if key in shapes:
        if len(shapes[key]) != 1:
            return None
        rows = (math.isqrt(8 * shapes[key].numel() + 1) - 1) // 2
        return rows if rows * (rows + 1) // 2 == shapes[key].numel() else None
    vectors, values = (shapes.get(f"{key}.{part}") for part in ("vectors", "values"))
    if vectors is None or values is None or len(vectors) != 2 or values != (vectors[1] + 1,) or vectors[1] > vectors[0]:
        return None
    return vectors[0]


def _read(tensors: TensorFile, key: str, where: str) -> Factor:
    size = _size(tensors.shapes, key)
    if size is None:
        raise AnchorError(f"{where}: kfac.{key} is missing or has a shape that no factor has. Make the anchor again")
    if key in tensors:
        values = tensors[key].float()
        rows, columns = torch.tril_indices(size, size)
        matrix = values.new_zeros(size, size)
        matrix[rows, columns] = values
        matrix[columns, rows] = values
        return DenseFactor(matrix)
    eigenvalues = tensors[f"{key}.values"].float()
    return EighDecomposed(tensors[f"{key}.vectors"], eigenvalues[:-1], eigenvalues[-1].item())
