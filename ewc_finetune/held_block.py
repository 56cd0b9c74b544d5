"""A layer that is held as a whole: the pull of one Kronecker-factored block on its weight and bias."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ewc_finetune.kronecker import Block


class HeldBlock:
    """The penalty `1/2 <D, G D A>` on a layer, with D what weight and bias are away from the centre.

    Args:
        block: The factors, lambda in them.
        centre: `theta*`, weight and bias as one matrix (`Block.join`).
        weight: The model's own, which may have more outputs than the block knows: the first ones are held then.
        bias: Likewise, or None.
    """

    def __init__(self, block: Block, centre: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight = weight
        self._bias = bias
        # float64 for such weights; those of half precision are float32 in the centre.
        self._centre = centre.to(weight.device, torch.promote_types(weight.dtype, centre.dtype))
        self.block = block.to(self._centre)
        self._eigen: Block | None = None

    def _difference(self) -> Tensor:
        weight = self.weight.detach()
        matrix = self.block.join(weight, None if self._bias is None else self._bias.detach())
        return matrix[: len(self._centre)].to(self._centre.dtype) - self._centre

    def value(self) -> float:
        """Return the penalty."""
        difference = self._difference()
        wide = difference.dtype if difference.device.type == "mps" else torch.float64
        return 0.5 * (difference * self.block.times(difference)).sum(dtype=wide).item()

    @torch.no_grad()
    def add(self, scale: float | Tensor = 1.0) -> None:
        """Add the gradient, `G D A`, times a scale."""
        pull = self.block.times(self._difference())
        if isinstance(scale, Tensor) or scale != 1:
            pull *= scale
        for parameter, part in self._parts(pull):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._known(parameter.grad, parameter).add_(part)

    @torch.no_grad()
    def move(self, lr: float) -> None:
        """Take the implicit step, `D <- (1 + lr A ⊗ G)^-1 D`, in the eigenbasis."""
        if self._eigen is None:
            self._eigen = replace(self.block, input=self.block.input.eigen(), output=self.block.output.eigen())

        def share(value: Tensor) -> Tensor:
            # Of the way to the centre, x / (1 + x): so that neither a small x is lost nor a huge one overflows.
            return (lr * value).reciprocal_().add_(1).reciprocal_()

        for parameter, part in self._parts(self._eigen.spectral(self._difference(), share)):
            self._known(parameter.detach(), parameter).sub_(part)

    def _parts(self, matrix: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters that are trained, each with its part of a matrix."""
        weight, bias = self.block.split(matrix, self._known(self.weight, self.weight).shape)
        parts = [(self.weight, weight)] + ([] if self._bias is None or bias is None else [(self._bias, bias)])
        return [(parameter, part) for parameter, part in parts if parameter.requires_grad]

    def _known(self, tensor: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return the outputs that the block knows."""
        outputs = self.block.output.size
        return tensor[:, :outputs] if self.block.transposed and parameter is self.weight else tensor[:outputs]
