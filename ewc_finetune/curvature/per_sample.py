"""Sums over samples of squared per-sample gradients, for any module that torch.func or plain autograd can follow.

Both functions have one signature, which is the seam for faster engines:

    (model, parameters, inputs, factors) -> {name: sum over samples n and vectors m of (J_n^T s_mn)^2}

`parameters` are the tensors to differentiate by, `inputs` one batch on their device, and `factors` the vectors of
`Likelihood.output_factors`, shape `(M, batch, *output)`. The model is only read: gradients go to nobody's `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

Engine = Callable[[nn.Module, Mapping[str, Tensor], Tensor, Tensor], dict[str, Tensor]]


def vectorised(
    model: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor, factors: Tensor
) -> dict[str, Tensor]:
    """All samples of the batch at once, by `vmap`; holds one gradient per sample, in float32 when squared."""

    def squares(values: dict[str, Tensor], sample: Tensor, vectors: Tensor) -> dict[str, Tensor]:
        outputs, pull_back, *_ = vjp(lambda p: functional_call(model, p, (sample[None],))[0], values)
        total: dict[str, Tensor] = {}
        for vector in vectors:
            (gradients,) = pull_back(vector.to(outputs.dtype))
            for name, gradient in gradients.items():
                g = _at_least_float32(gradient)
                total[name] = g * g if name not in total else torch.addcmul(total[name], g, g)
        return total

    values = {name: parameter.detach() for name, parameter in parameters.items()}
    per_sample = vmap(squares, in_dims=(None, 0, 1))(values, inputs, factors)
    return {name: value.sum(dim=0) for name, value in per_sample.items()}


def one_at_a_time(
    model: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor, factors: Tensor
) -> dict[str, Tensor]:
    """One sample and one vector after the other, by ordinary autograd: slow, and right where `vmap` refuses."""
    # Leaves of our own, so that the model's requires_grad and .grad are never touched.
    values = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
    total = {name: torch.zeros_like(_at_least_float32(value)) for name, value in values.items()}
    for n in range(len(inputs)):
        outputs = functional_call(model, values, (inputs[n : n + 1],))
        for vectors in factors[:, n : n + 1]:
            gradients = torch.autograd.grad(
                outputs,
                list(values.values()),
                vectors.to(outputs.dtype),
                retain_graph=True,
                allow_unused=True,
            )
            for name, gradient in zip(values, gradients, strict=True):
                if gradient is not None:
                    g = _at_least_float32(gradient)
                    total[name].addcmul_(g, g)
    return {name: value.detach() for name, value in total.items()}


def batch_mean(
    model: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor, factors: Tensor
) -> dict[str, Tensor]:
    """Square of the batch's mean gradient, times the batch size: not a Fisher, but what published code computes.

    The factor makes it a sum over samples like the others, so that dividing by their number gives the mean over
    batches, each weighted by its size.
    """
    values = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
    outputs = functional_call(model, values, (inputs,))
    total = {name: torch.zeros_like(_at_least_float32(value)) for name, value in values.items()}
    for vectors in factors:
        gradients = torch.autograd.grad(
            outputs,
            list(values.values()),
            vectors.to(outputs.dtype) / len(inputs),
            retain_graph=True,
            allow_unused=True,
        )
        for name, gradient in zip(values, gradients, strict=True):
            if gradient is not None:
                g = _at_least_float32(gradient)
                total[name].addcmul_(g, g, value=len(inputs))
    return {name: value.detach() for name, value in total.items()}


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
