"""A layer that is held as a whole: the pull of Kronecker-factored blocks on its weight and bias."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.errors import UsageError
from ewc_finetune.modules.precision import sum_dtype
from ewc_finetune.penalty.conjugate_gradients import solve
from ewc_finetune.penalty.held import Held
from ewc_finetune.penalty.kronecker_sum import stand_in, times_sum

# The implicit step of several blocks is solved until the residual is this share of what it was, ...
_TOLERANCE = 1e-4
# ... or for so many iterations; each of them brings the penalty down.
_ITERATIONS = 50
# The smallest share of the largest eigenvalue that a direction counts as held with, so that rounding stays small.
_LEAST = {torch.float64: 1e-9, torch.float32: 1e-4}


class HeldLayer(Held):
    """The penalty `1/2 sum_k <D_k, G_k D_k A_k>` on a layer, with D_k what weight and bias are away from a centre.

    Args:
        parts: Blocks, lambda in them, each with its centre, weight and bias as one matrix (`Block.join`). Those of
            fewer outputs than the model has know the first ones.
        weight: The model's own.
        bias: The model's own, if the blocks have it.

    Attributes:
        parameters: Weight and bias.
        blocks: As given, on the model's device.
    """

    def __init__(
        self, parts: Sequence[tuple[Block, Tensor]], weight: nn.Parameter, bias: nn.Parameter | None = None
    ) -> None:
        self.name = parts[0][0].weight
        self.weight = weight
        self._bias = bias
        self.parameters = [parameter for parameter in (weight, bias) if parameter is not None]
        # float64 for such weights; those of half precision are float32 in the centre.
        dtype = torch.promote_types(weight.dtype, parts[0][1].dtype)
        self._centres = [centre.to(weight.device, dtype) for _, centre in parts]
        self.blocks = [block.to(self._centres[0]) for block, _ in parts]
        self._eigen: Block | None = None
        self._scaled: list[Block] = []
        self._scale = 1.0

    def check_rates(self, rates: Sequence[float]) -> None:
        """Refuse an implicit step in which weight and bias do not move by one learning rate.

        Args:
            rates: Of those of `trained` that move.

        Raises:
            UsageError: naming the layer.
        """
        if len(rates) < len(self.parameters) or len(set(rates)) > 1:
            raise UsageError(
                f"the proximal form moves weight and bias of {self.blocks[0].layer} together, and they are not trained "
                "together, with one learning rate. Use the gradient form"
            )

    def value(self) -> float:
        """Return the penalty."""
        total = 0.0
        for block, difference in zip(self.blocks, self._differences(), strict=True):
            dtype = sum_dtype(difference.device)
            total += 0.5 * (difference.to(dtype) * block.times(difference).to(dtype)).sum().item()
        return total

    def trace(self) -> float:
        """See `Held`."""
        return sum(block.trace for block in self.blocks)

    def largest(self) -> float:
        """See `Held`: of several anchors the sum is at least as large as the largest of all together."""
        return sum(block.largest() for block in self.blocks)

    @torch.no_grad()
    def add(self, scale: float | Tensor = 1.0, only: Collection[int] | None = None) -> None:
        """Add the gradient, `sum_k G_k D_k A_k`, times a scale; `only` to parameters of these ids."""
        for block, difference in zip(self.blocks, self._differences(), strict=True):
            pull = block.times(difference)
            if isinstance(scale, Tensor) or scale != 1:
                pull *= scale
            for parameter, part in self._split(pull):
                if only is None or id(parameter) in only:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    self._known(parameter.grad, parameter, len(pull)).add_(part)

    @torch.no_grad()
    def move(self, lr: float) -> None:
        """Take the implicit step, `D <- (1 + lr sum_k A_k ⊗ G_k)^-1 D`.

        By the eigenvectors of a single block, and of several by conjugate gradients.
        """
        if not self.trained:
            return
        self.check_rates([lr] * len(self.trained))
        away = self._single(lr) if len(self.blocks) == 1 else self._several(lr)
        for parameter, part in self._split(away):
            self._known(parameter.detach(), parameter, len(away)).sub_(part.to(self._centres[0].dtype))

    def _single(self, lr: float) -> Tensor:
        (block,), (difference,) = self.blocks, self._differences()
        if self._eigen is None:
            self._eigen = replace(block, input=block.input.eigen(), output=block.output.eigen())

        def share(value: Tensor) -> Tensor:
            # Of the way to the centre, x / (1 + x): so that neither a small x is lost nor a huge one overflows.
            return (lr * value).reciprocal_().add_(1).reciprocal_()

        return self._eigen.spectral(difference, share)

    def _several(self, lr: float) -> Tensor:
        if self._eigen is None:
            centre = self._centres[0]
            near = stand_in([block.to(centre.cpu()) for block in self.blocks])
            # In numbers near 1, whatever lambda is.
            self._scale = near.largest() or 1.0
            like = centre.new_empty(0, dtype=sum_dtype(centre.device))
            # Rounding to float32 has left negative eigenvalues, along which the step would have no end.
            clean = [near, *(replace(b, input=b.input.clean(), output=b.output.clean()) for b in self.blocks)]
            scaled = [replace(b, output=b.output.scaled(1 / self._scale)).to(like) for b in clean]
            self._eigen, *self._scaled = scaled
        near = self._eigen
        widest = max(self._centres, key=len)
        pull = torch.zeros_like(widest, dtype=near.output.diagonal().dtype)
        least = max(1 / (lr * self._scale), _LEAST[pull.dtype])
        for block, difference in zip(self._scaled, self._differences(), strict=True):
            pull[: len(difference)] += block.times(difference.to(pull.dtype))
        return solve(
            lambda matrix: times_sum(self._scaled, matrix).add_(matrix, alpha=least),
            pull,
            lambda matrix: near.spectral(matrix, lambda value: 1 / (least + value)),
            _TOLERANCE,
            _ITERATIONS,
        ).value

    def _differences(self) -> list[Tensor]:
        bias = None if self._bias is None else self._bias.detach()
        matrix = self.blocks[0].join(self.weight.detach(), bias)
        return [matrix[: len(centre)].to(centre.dtype) - centre for centre in self._centres]

    def _split(self, matrix: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters that are trained, each with its part of a matrix."""
        shape = self._known(self.weight, self.weight, len(matrix)).shape
        weight, bias = self.blocks[0].split(matrix, shape)
        parts = [(self.weight, weight)] + ([] if self._bias is None or bias is None else [(self._bias, bias)])
        return [(parameter, part) for parameter, part in parts if parameter.requires_grad]

    def _known(self, tensor: Tensor, parameter: nn.Parameter, outputs: int) -> Tensor:
        """Return so many first outputs."""
        return tensor[:, :outputs] if self.blocks[0].transposed and parameter is self.weight else tensor[:outputs]
