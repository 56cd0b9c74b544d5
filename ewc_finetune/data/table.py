"""Rows of a table, which become inputs when it is known how the model's own did."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ewc_finetune.data.columns import Column
from ewc_finetune.data.encoding import Rows, adjusted, encode, find_columns, renamed
from ewc_finetune.data.options import DataOptions
from ewc_finetune.data.table_files import Frame


class Table(TensorDataset):
    """Rows of a file. As a dataset they are what its own training data and its spec make of them.

    Args:
        frame: The file.
        names: Those of its columns that may be inputs.
        options: What the data spec says.
        training: The rows by whose numbers inputs are made, where no record says by which.
        rows: The rows that are samples.
        labels: One to each of these, if any.
    """

    def __init__(
        self,
        frame: Frame,
        names: tuple[str, ...],
        options: DataOptions,
        training: Rows,
        rows: Rows,
        labels: Tensor | None,
    ) -> None:
        self.frame = frame
        self.names = names
        self.options = options
        self.training = training
        self.rows = rows
        self.labels = labels

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Inputs, and labels if any, where the model has no record of its own."""
        return self.encoded(self.columns(())).tensors

    def columns(self, recorded: Sequence[Column]) -> tuple[Column, ...]:
        """Return what is done to the columns.

        Args:
            recorded: What the model's record says was done to its own; nothing where there is none.

        Raises:
            DataError: naming the columns that the record has and the file lacks, or that are no numbers.
        """
        found = renamed(recorded, self.names, self.frame) if recorded else None
        return adjusted(
            find_columns(self.frame, self.names, self.options, self.training) if found is None else found,
            self.frame,
            self.options,
            self.training,
        )

    def encoded(self, columns: Sequence[Column]) -> TensorDataset:
        """Return inputs and labels, by what is done to the columns.

        Raises:
            DataError: see `encode`.
        """
        inputs = encode(columns, self.frame, self.rows, unseen_zeros=self.options.unseen == "zeros")
        return TensorDataset(inputs) if self.labels is None else TensorDataset(inputs, self.labels)

    def subset(self, indices: Sequence[int]) -> Table:
        """Return some of the rows, in this order."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        labels = None if self.labels is None else self.labels[chosen]
        return Table(self.frame, self.names, self.options, self.training, self.rows[chosen.numpy()], labels)

    def with_labels(self, labels: Tensor) -> Table:
        """Return the same rows with other labels."""
        return Table(self.frame, self.names, self.options, self.training, self.rows, labels)

    def hexdigest(self) -> str:
        """Return a digest of the rows as they stand in the file, of their labels, and of the training data."""
        digest = hashlib.sha256(repr(self.names).encode())
        for name in self.names:
            for rows in (self.rows, self.training):
                digest.update(repr(self.frame.columns[name].take(rows).to_pylist()).encode())
        digest.update(repr(None if self.labels is None else self.labels.tolist()).encode())
        return digest.hexdigest()
