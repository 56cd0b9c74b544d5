"""Likelihoods in which only some of a model's outputs count."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.likelihood.base import IGNORED, Likelihood
from ewc_finetune.likelihood.categorical import Categorical
from ewc_finetune.likelihood.output_fisher import OutputFisher


class Active(Likelihood):
    """A categorical over some of a model's outputs: the others have no say, and no gradient.

    Args:
        inner: The categorical or per-token likelihood of those that count.
        outputs: Their numbers, in rising order; targets are such numbers.

    Raises:
        UsageError: for a likelihood whose outputs are not classes.
    """

    def __init__(self, inner: Likelihood, outputs: Sequence[int]) -> None:
        if not isinstance(inner, Categorical):
            raise UsageError(f"active outputs are classes, and the {inner.name} likelihood has none")
        self.name = inner.name
        self.inner = inner
        self.outputs = torch.tensor(outputs)

    def _take(self, outputs: Tensor) -> Tensor:
        return outputs.index_select(-1, self.outputs.to(outputs.device))

    def _put(self, vector: Tensor, like: Tensor) -> Tensor:
        """Put zeros in the place of the outputs that do not count."""
        return vector.new_zeros(like.shape).index_copy_(-1, self.outputs.to(vector.device), vector)

    def _map(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point():  # a probability for each of the model's classes
            return self._take(targets)
        places = torch.searchsorted(self.outputs.to(targets.device), targets)
        return torch.where(targets == IGNORED, targets, places)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Likelihood`."""
        return self.inner.loss(self._take(outputs), self._map(targets))

    def counting(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Likelihood`."""
        return self._take(outputs), self._map(targets)

    def rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Likelihood`."""
        return self.inner.rows(self._take(outputs), self._map(targets))

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Likelihood`."""
        return self.inner.right(self._take(outputs), self._map(targets))

    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Check that the model has the outputs that are to count."""
        self.inner.check_outputs(outputs, where)
        if self.outputs[-1] >= outputs.shape[-1]:
            raise DataError(
                f"{where}: output {int(self.outputs[-1])} is to be active, and the model has "
                f"{outputs.shape[-1]} outputs, numbered from 0"
            )

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Check that the targets are among the outputs that count."""
        self.inner.check_targets(targets, output_shape, where)
        if targets.is_floating_point():
            self.inner.check_targets(self._take(targets), (len(self.outputs),), f"{where}, of the active outputs")
            return
        beyond = targets[~torch.isin(targets, self.outputs.to(targets.device)) & (targets != IGNORED)]
        if len(beyond):
            raise DataError(
                f"{where}: {len(beyond)} of {targets.numel()} labels are not among the active outputs: found "
                f"{', '.join(map(str, sorted(set(beyond.tolist()))[:10]))}"
            )

    def exact(self, outputs: Tensor) -> OutputFisher:
        """See `Likelihood`."""
        inner = self.inner.exact(self._take(outputs))
        return OutputFisher(
            inner.count, lambda m: self._put(inner[m], outputs), lambda: self._put(inner.squares(), outputs)
        )

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """See `Likelihood`."""
        return self._put(self.inner.output_gradient(self._take(outputs), self._map(targets)), outputs)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """See `Likelihood`."""
        return self.outputs.to(outputs.device)[self.inner.sample(self._take(outputs), generator)]

    def predict(self, outputs: Tensor) -> Tensor:
        """See `Likelihood`."""
        return self.outputs.to(outputs.device)[self.inner.predict(self._take(outputs))]

    def answers(self, outputs: Tensor) -> Tensor:
        """See `Likelihood`: those of the outputs that count."""
        return self.inner.answers(self._take(outputs))

    def divergence(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """See `Likelihood`."""
        return self.inner.divergence(answers, self._take(outputs))

    def unchanged(self, answers: Tensor, outputs: Tensor) -> Tensor | None:
        """See `Likelihood`."""
        return self.inner.unchanged(answers, self._take(outputs))

    def comparable(self, answers: Tensor, outputs: Tensor) -> bool:
        """See `Likelihood`."""
        return len(self.outputs) == answers.shape[-1] and int(self.outputs[-1]) < outputs.shape[-1]
