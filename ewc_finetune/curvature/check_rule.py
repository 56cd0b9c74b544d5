"""For tests of one's own rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.curvature.backward_pass import differentiable
from ewc_finetune.curvature.rules import MODULE_RULES


def check_rule(module: nn.Module, *inputs: Any, tolerance: float | None = None) -> None:
    """Compare the rule that is registered for a module's class with autograd, one sample at a time.

    Args:
        module: The module, in the mode it is used in; float64 shows most.
        inputs: The module's positional arguments, tensors with the batch in the first dimension (2 samples or more).
        tolerance: How far a parameter's gradients may differ, relative to their norm; what the dtype's rounding
            explains unless given: 1e-8 in float64, 1e-4 in float32.

    Raises:
        AssertionError: naming the parameter and by how much it differs.
        KeyError: if no rule is registered for the class.
    """
    if type(module) not in MODULE_RULES:
        raise KeyError(f"no rule is registered for {type(module).__name__}; see register_rule")
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        outputs = module(*inputs)
    vectors = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(outputs)
    with torch.no_grad():
        ours = dict(MODULE_RULES[type(module)](module, inputs, vectors) or {})
    batch = len(outputs)
    expected: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for n in range(batch):
        with differentiable(module, parameters):
            single = module(*(i[n : n + 1] if isinstance(i, Tensor) else i for i in inputs))
            gradients = torch.autograd.grad(single, list(parameters.values()), vectors[n : n + 1], allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            expected[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    for name, each in expected.items():
        truth = torch.stack(each)
        if name not in ours:
            raise AssertionError(f"{name}: the rule gives no gradient for it, only for {', '.join(ours) or 'nothing'}")
        if ours[name].shape != truth.shape:
            raise AssertionError(
                f"{name}: the rule's gradients have shape {tuple(ours[name].shape)}; expected {tuple(truth.shape)}"
            )
        difference, norm = (ours[name] - truth).norm().item(), truth.norm().item()
        allowed = torch.finfo(truth.dtype).eps ** 0.5 / 4 if tolerance is None else tolerance
        if not difference <= allowed * norm:
            raise AssertionError(
                f"{name}: the rule and autograd differ by {difference / (norm or 1):.1e} of the norm, in "
                f"{truth.dtype}; {allowed:.1e} is allowed"
            )
