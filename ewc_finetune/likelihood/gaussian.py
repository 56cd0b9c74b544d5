"""Real numbers with a variance of 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ewc_finetune.likelihood.base import RealValued
from ewc_finetune.likelihood.output_fisher import OutputFisher, diagonal_fisher
from ewc_finetune.modules.precision import wide


class Gaussian(RealValued):
    """Regression with unit variance: outputs of any shape are means, targets have that shape."""

    name = "gaussian"
    metric = None
    kept = torch.float32  # half precision would be too coarse for means that are large beside the unit variance

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Half the squared error, summed over a sample's outputs, and the constant `log(2 pi) / 2` for each."""
        outputs = wide(outputs)
        constant = 0.5 * math.log(2 * math.pi) * outputs[0].numel()
        return 0.5 * (outputs - targets.to(outputs)).square().sum() / len(outputs) + constant

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Nothing is right or wrong here."""
        return outputs.new_tensor(math.nan)

    def exact(self, outputs: Tensor) -> OutputFisher:
        """`S_n` is the identity: one vector to an output."""
        return diagonal_fisher(torch.ones_like(outputs))

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`y - f(x)`."""
        return targets.to(outputs) - outputs

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Add a normal number to each output, by the inverse transform: `randn` draws in blocks."""
        uniform = torch.rand(outputs.shape, generator=generator, dtype=torch.float64)
        normal: Tensor = torch.special.ndtri(uniform.clamp(min=1e-300))
        return outputs + normal.to(outputs)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the means."""
        return outputs

    def divergence(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """Half the squared distance of the means."""
        return 0.5 * (answers - outputs).reshape(len(answers), -1).square().sum(dim=1)
