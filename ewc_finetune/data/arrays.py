"""Several inputs to a sample, in memory: what a model takes by the names of its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(eq=False)
class Arrays(Dataset[Any]):
    """Samples that are dictionaries of tensors.

    Attributes:
        inputs: The tensors of all samples by name, samples first, all as long.
        labels: One to a sample, if any.
    """

    inputs: Mapping[str, Tensor]
    labels: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The inputs in the order of their names, and the labels, if any, behind them."""
        return (*self.inputs.values(), *(() if self.labels is None else (self.labels,)))

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def __getitem__(self, index: int) -> Any:
        return self.named([tensor[index] for tensor in self.tensors])

    def named(self, parts: Sequence[Tensor]) -> Any:
        """Return parts of `tensors` as samples come: a dictionary, and the labels beside it, if any."""
        inputs = dict(zip(self.inputs, parts, strict=False))
        return inputs if self.labels is None else (inputs, parts[-1])

    def subset(self, indices: Sequence[int]) -> Arrays:
        """Return some of them, in this order."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        inputs = {name: tensor[chosen] for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, labels=None if self.labels is None else self.labels[chosen])
