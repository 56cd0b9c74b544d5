"""Any number of answers, each yes or no."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ewc_finetune.errors import DataError
from ewc_finetune.likelihood.base import LARGEST_OUTPUT, RealValued
from ewc_finetune.likelihood.output_fisher import OutputFisher, diagonal_fisher
from ewc_finetune.modules.precision import wide


class Bernoulli(RealValued):
    """Independent yes-or-no answers: outputs are logits of any shape, targets 0 or 1 (or between) in that shape."""

    name = "bernoulli"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy, summed over a sample's answers."""
        outputs = wide(outputs)
        return functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="sum") / len(outputs)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum over the samples of the share of their answers that are on the right side."""
        right = (outputs > 0) == (targets > 0.5)
        return right.flatten(1).float().mean(dim=1).sum() if right.ndim > 1 else right.sum()

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Check that targets lie between 0 and 1, in the shape of the outputs."""
        super().check_targets(targets, output_shape, where)
        if targets.numel() and not 0 <= targets.min() <= targets.max() <= 1:
            raise DataError(
                f"{where}: targets run from {targets.min():g} to {targets.max():g}; the bernoulli likelihood needs "
                "them between 0 and 1"
            )

    def exact(self, outputs: Tensor) -> OutputFisher:
        """`S_n` is diagonal, `p (1 - p)`: one vector to an answer."""
        return diagonal_fisher(outputs.sigmoid() * (-outputs).sigmoid())

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`y - p`, written so that nothing cancels near certainty."""
        y = targets.to(outputs)
        return y * (-outputs).sigmoid() - (1 - y) * outputs.sigmoid()

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw with one uniform number to an answer."""
        p = outputs.sigmoid()
        return (torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p) < p).to(p)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the more likely answers."""
        return (outputs > 0).to(outputs)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the logits, which say log p and log(1 - p) alike."""
        return outputs.clamp(-LARGEST_OUTPUT, LARGEST_OUTPUT)

    def divergence(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """`p (log p - log q) + (1 - p) (log(1 - p) - log(1 - q))`, summed over the answers."""
        a, b = answers, self.answers(outputs)
        yes = a.sigmoid() * (functional.logsigmoid(a) - functional.logsigmoid(b))
        no = (-a).sigmoid() * (functional.logsigmoid(-a) - functional.logsigmoid(-b))
        return (yes + no).reshape(len(a), -1).sum(dim=1).clamp(min=0)

    def unchanged(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """Return the share of answers on the same side; one that was on neither may be on any."""
        same = (answers == 0) | ((answers > 0) == (outputs > 0))
        return same.reshape(len(same), -1).to(answers).mean(dim=1)
