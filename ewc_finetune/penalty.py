"""The elastic penalty of a stack of anchors on a model, and its gradient.

`lambda/2 * sum_i F_i (theta_i - theta*_i)^2` (Kirkpatrick et al. 2017, equation 3), summed over the anchors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ewc_finetune.anchor import Anchor
from ewc_finetune.errors import AnchorMismatchError
from ewc_finetune.stack import collapse, spread_lambdas


class Penalty:
    """Pulls a model's parameters back to the anchors, in any training loop.

    >>> penalty = Penalty(model, anchor, 100.0)
    >>> loss.backward()
    >>> penalty.add_gradient()
    >>> optimizer.step()

    Args:
        model: The model that is trained, on its device.
        anchors: One anchor or several, oldest first.
        lambdas: One strength for all or one for each anchor, 0 or above.

    Raises:
        UsageError: for lambdas that are negative, not finite, or of the wrong number.
        AnchorMismatchError: if an anchor does not fit the model, or another anchor.
    """

    def __init__(self, model: nn.Module, anchors: Anchor | Sequence[Anchor], lambdas: float | Sequence[float]) -> None:
        stacked = [anchors] if isinstance(anchors, Anchor) else list(anchors)
        strengths = spread_lambdas(lambdas, len(stacked))
        parameters = dict(model.named_parameters())
        for anchor in stacked:
            check_fit(parameters, anchor)
        quadratic = collapse(stacked, strengths)
        held = [name for name in quadratic.curvature if parameters[name].requires_grad]
        self._parameters = [parameters[name] for name in held]
        self._curvature = [quadratic.curvature[name].to(parameters[name].device) for name in held]
        self._centre = [quadratic.centre[name].to(parameters[name].device) for name in held]
        self._constant = quadratic.constant
        self.free = tuple(name for name, p in parameters.items() if p.requires_grad and name not in set(held))

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add the penalty's gradient, `lambda F (theta - theta*)`, to every parameter's `.grad`.

        Call it once for each optimizer step, after the backward pass; no graph is made.
        """
        if not self._parameters:
            return  # every lambda is zero; torch's fused calls refuse empty lists
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        pull = self._differences()
        torch._foreach_mul_(pull, self._curvature)
        torch._foreach_add_([cast(Tensor, parameter.grad) for parameter in self._parameters], pull)

    @torch.no_grad()
    def value(self) -> float:
        """Return the penalty, summed in float64 (float32 on mps), the constant of a stack included."""
        if not self._parameters:
            return self._constant
        total = self._constant
        for difference, curvature in zip(self._differences(), self._curvature, strict=True):
            wide = difference.dtype if difference.device.type == "mps" else torch.float64
            total += 0.5 * (curvature * difference.square()).sum(dtype=wide).item()
        return total

    def _differences(self) -> list[Tensor]:
        """`theta - theta*` in the centre's dtype: float32 even for half-precision weights."""
        centres = self._centre
        values = [p.detach().to(c.dtype) for p, c in zip(self._parameters, centres, strict=True)]
        return list(torch._foreach_sub(values, centres))


def check_fit(parameters: dict[str, nn.Parameter], anchor: Anchor) -> None:
    """Check that the model has every parameter that the anchor holds, in the same shape.

    Raises:
        AnchorMismatchError: naming the anchor, the parameter and both shapes.
    """
    for name, fisher in anchor.fisher.items():
        if name not in parameters:
            raise AnchorMismatchError(
                f"{anchor.label} does not fit the model: it holds {name} {tuple(fisher.shape)}, which the model "
                "does not have. Start from the checkpoint that the anchor was made from, or one trained on from it"
            )
        if parameters[name].shape != fisher.shape:
            raise AnchorMismatchError(
                f"{anchor.label} does not fit the model: {name} has shape {tuple(fisher.shape)} in the anchor and "
                f"{tuple(parameters[name].shape)} in the model"
            )
