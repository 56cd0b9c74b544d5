"""How far the trace of an estimated Fisher may be from the trace that all the samples in the world would give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ewc_finetune.curvature.importance import layer_of
from ewc_finetune.modules.precision import sum_dtype


@dataclass(frozen=True)
class StandardError:
    """The standard error of the trace, relative to the trace: what is left to chance in which samples were seen.

    Attributes:
        trace: The error of the whole diagonal's sum; None for fewer than two samples.
        layers: The error of each layer's part of that sum.
    """

    trace: float | None
    layers: dict[str, float | None]


class RunningError:
    """Collects each sample's part of the trace, by layer; only sums are kept.

    Args:
        names: The parameters' names, in the order in which they will come.
        device: Where the samples' parts are.
    """

    def __init__(self, names: list[str], device: torch.device) -> None:
        self.layers = list(dict.fromkeys(map(layer_of, names)))
        self.samples = 0
        self._wide = sum_dtype(device)
        # Row l sums the parameters of layer l; the last row sums all.
        members = [[layer_of(name) == layer for name in names] for layer in self.layers] + [[True] * len(names)]
        self._members = torch.tensor(members, dtype=self._wide, device=device)
        self._sum = torch.zeros(len(members), dtype=self._wide, device=device)
        self._squares = torch.zeros_like(self._sum)

    def add(self, by_sample: Tensor) -> None:
        """Take in one batch: each sample's sum of squares, shape `(parameters, batch)`."""
        parts = self._members @ by_sample.to(self._wide)
        self.samples += by_sample.shape[1]
        self._sum += parts.sum(dim=1)
        self._squares += parts.square().sum(dim=1)

    def relative(self) -> StandardError:
        """Return the standard error, `sd / sqrt(N)`, relative to the mean."""
        n = self.samples
        if n < 2:
            return StandardError(None, dict.fromkeys(self.layers))
        relative = []
        for total, squares in zip(self._sum.tolist(), self._squares.tolist(), strict=True):
            variance = max(0.0, squares - total * total / n) / (n - 1)
            relative.append(math.sqrt(variance / n) / (total / n) if total else 0.0)
        return StandardError(relative[-1], dict(zip(self.layers, relative, strict=False)))
