"""Squared per-sample gradients for parameters that no rule reaches, for any module that autograd can follow.

`vectorised` and `one_at_a_time` have one signature:

    (model, parameters, inputs, vectors) -> {name: (sum over n and m of (J_n^T s_mn)^2, its sum for each sample)}

`parameters` are the tensors to differentiate by, `inputs` one batch on their device, and `vectors` those of its
`OutputFisher`, shape `(M, batch, *output)`. The model is only read: gradients go to nobody's `.grad`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from ewc_finetune.curvature.backward_pass import Squares, differentiable, fit
from ewc_finetune.likelihood.output_fisher import OutputFisher
from ewc_finetune.modules.batch import Inputs, arguments, call, count, each, outputs_of, take
from ewc_finetune.modules.precision import wide

Fallback = Callable[[nn.Module, Mapping[str, Tensor], Inputs, Tensor], Squares]

# Bytes of per-sample gradients on the CPU: more of them leave the cache and cost twice the time.
_CPU_BYTES = 24 << 20
# Bytes of per-sample gradients elsewhere: more of them cannot use the allocator's memory again.
_ACCELERATOR_BYTES = 1 << 30


def chunk_size(parameters: Mapping[str, Tensor]) -> int:
    """Return how many samples' gradients of the largest parameter fit the budget of `vectorised`."""
    largest = max(parameters.values(), key=torch.Tensor.numel)
    budget = _CPU_BYTES if largest.device.type == "cpu" else _ACCELERATOR_BYTES
    return max(1, min(512, budget // (4 * max(largest.numel(), 1))))


def vectorised(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Inputs, vectors: Tensor) -> Squares:
    """Take all samples of the batch at once, by `vmap`; holds one gradient for each, in float32 when squared."""

    def squares(values: dict[str, Tensor], sample: Inputs, sample_vectors: Tensor) -> dict[str, Tensor]:
        args, kwargs = arguments(model, each(lambda tensor: tensor[None], sample))
        outputs, pull_back, *_ = vjp(lambda p: outputs_of(functional_call(model, p, args, kwargs))[0], values)
        total: dict[str, Tensor] = {}
        for vector in sample_vectors:
            fitting, scale = fit(vector[None], outputs.dtype)
            (gradients,) = pull_back(fitting[0])
            for name, gradient in gradients.items():
                g = wide(gradient) if scale is None else wide(gradient) * scale
                total[name] = g * g if name not in total else torch.addcmul(total[name], g, g)
        return total

    values = {name: parameter.detach() for name, parameter in parameters.items()}
    with differentiable(model, {}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        per_sample = vmap(squares, in_dims=(None, 0, 1))(values, inputs, vectors)
    return {name: (value.sum(dim=0), value.reshape(len(value), -1).sum(dim=1)) for name, value in per_sample.items()}


def one_at_a_time(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Inputs, vectors: Tensor) -> Squares:
    """Take one sample and one vector after the other, by ordinary autograd: slow, and right where `vmap` refuses."""
    total = {name: torch.zeros_like(wide(p.detach())) for name, p in parameters.items()}
    by_sample = {name: total[name].new_zeros(count(inputs)) for name in parameters}
    with differentiable(model, parameters):
        for n in range(count(inputs)):
            outputs = call(model, take(inputs, slice(n, n + 1)))
            for vector in vectors[:, n : n + 1]:
                for name, g in gradients_of(outputs, parameters, vector).items():
                    total[name].addcmul_(g, g)
                    by_sample[name][n] += torch.linalg.vector_norm(g).square()
    return {name: (total[name], by_sample[name]) for name in parameters}


def batch_mean(
    model: nn.Module, parameters: Mapping[str, Tensor], inputs: Inputs, fisher_of: Callable[[Tensor], OutputFisher]
) -> tuple[Tensor, Squares]:
    """Square the batch's mean gradient, times the batch size: not a Fisher, but what published code computes.

    The factor makes it a sum over samples like the others, so that dividing by their number gives the mean over
    batches, each weighted by its size. No sample has a part of its own; the sum for each is that of all, shared out.
    Returns the outputs too.
    """
    size = count(inputs)
    total = {name: torch.zeros_like(wide(p.detach())) for name, p in parameters.items()}
    with differentiable(model, parameters):
        outputs = call(model, each(torch.clone, inputs))  # which some models overwrite
        for vector in fisher_of(outputs).vectors(slice(None)):
            for name, g in gradients_of(outputs, parameters, vector / size).items():
                total[name].addcmul_(g, g, value=size)
    return outputs.detach(), {name: (value, (value.sum() / size).expand(size)) for name, value in total.items()}


def gradients_of(outputs: Tensor, parameters: Mapping[str, Tensor], vector: Tensor) -> dict[str, Tensor]:
    """Return the gradients of `outputs . vector` by the parameters that it depends on, in float32 or wider."""
    if not outputs.requires_grad:
        return {}
    fitting, scale = fit(vector.reshape(1, *vector.shape), outputs.dtype)
    gradients = torch.autograd.grad(
        outputs, list(parameters.values()), fitting[0], retain_graph=True, allow_unused=True
    )
    dense = {
        n: wide(g.to_dense() if g.is_sparse else g) for n, g in zip(parameters, gradients, strict=True) if g is not None
    }
    return dense if scale is None else {name: g * scale.item() for name, g in dense.items()}
