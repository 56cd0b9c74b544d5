"""Which operations the engine knows: what each one's parameters need for their per-sample gradients.

A rule stands for a function of torch that takes parameters. It gets what came out of a call and the call's own
arguments, and yields each parameter with a maker of its `Use`, or None in its place where it has no answer for this
parameter in this call. It is keyed by the function and not by a module's class, so it serves every module that calls
the function, and a parameter that is passed to a function without a rule is seen and goes to the fallback.

For a module of your own, `register_rule`; `check_rule` compares it with autograd.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ewc_finetune.curvature.batch_dims import BatchFirst
from ewc_finetune.curvature.convolution import Convolution
from ewc_finetune.curvature.per_sample_gradients import Broadcast, Dense, DenseSequence, Filter, Lookup, Use
from ewc_finetune.modules.precision import wide

Maker = Callable[[BatchFirst], Use]
Makers = Iterator[tuple[Tensor, Maker | None]]
Rule = Callable[..., Makers]
# What a parameter multiplies, for some of the samples, once it is known which dimension holds them.
Multiplied = Callable[[BatchFirst], Callable[[slice], Tensor]]
ModuleRule = Callable[[nn.Module, tuple[Any, ...], Tensor], Mapping[str, Tensor]]

FUNCTION_RULES: dict[Any, Rule] = {}
# Functions that have a cheaper form where the parameters' own gradients are not wanted.
FORMS: dict[Any, Callable[..., Tensor]] = {}
MODULE_RULES: dict[type[nn.Module], ModuleRule] = {}


def register_rule(kind: type[nn.Module]) -> Callable[[ModuleRule], ModuleRule]:
    """Register a rule for the parameters of modules of this class, as a decorator.

    It is needed only for modules that do with their parameters what the engine has no rule for, and that should not
    take the slower fallback. The rule is called as `rule(module, inputs, gradient)` after each backward pass:

    - `inputs`: the positional arguments of the module's call, with the batch in the first dimension;
    - `gradient`: the gradient by the module's output, one tensor, with the batch in the first dimension;
    - it returns, for each of the module's own parameters by name, every sample's gradient, shape
      `(batch, *parameter.shape)`.

    What the rule says is compared with autograd on the first samples of every pass; where they differ, the fallback is
    taken. Compare them in your own tests with `check_rule`.
    """

    def register(rule: ModuleRule) -> ModuleRule:
        MODULE_RULES[kind] = rule
        return rule

    return register


def _rule(*functions: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        FUNCTION_RULES.update(dict.fromkeys(functions, rule))
        return rule

    return register


def _dense(weight: Tensor, inputs: Tensor, transposed: bool = False) -> Maker:
    def make(batch_first: BatchFirst) -> Use:
        vectors = batch_first(inputs)
        one_vector = math.prod(vectors.shape[1:-1]) == 1
        return (Dense if one_vector else DenseSequence)(weight.shape, vectors, transposed)

    return make


def _broadcast(
    parameter: Tensor, view: Sequence[int], multiplied: Multiplied | None = None, scale: Tensor | None = None
) -> Maker:
    """Make the use of a parameter that has the shape `view` where it meets the output."""

    def make(batch_first: BatchFirst) -> Use:
        others = None if multiplied is None else multiplied(batch_first)
        return Broadcast(parameter.shape, batch_first.batch, view, others, scale)

    return make


def _trailing(parameter: Tensor, output: Tensor) -> tuple[int, ...]:
    """Return the shape that broadcasting gives a parameter: ones in front."""
    return (1,) * (output.ndim - parameter.ndim) + tuple(parameter.shape)


def _channels(parameter: Tensor, output: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter with one number for each channel, channels being dimension 1."""
    return (1, parameter.numel(), *(1,) * (output.ndim - 2))


def _of(tensor: Tensor) -> Multiplied:
    return lambda batch_first: batch_first(tensor).__getitem__


@_rule(functional.linear)
def _linear(output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Makers:
    yield weight, _dense(weight, input)
    if bias is not None:
        yield bias, _broadcast(bias, _trailing(bias, output))


@_rule(torch.addmm)
def _addmm(output: Tensor, input: Tensor, mat1: Tensor, mat2: Tensor) -> Makers:
    yield input, _broadcast(input, _trailing(input, output))
    yield mat2, _dense(mat2, mat1, transposed=True)
    yield mat1, None


@_rule(torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm)
def _matmul(output: Tensor, input: Tensor, other: Tensor) -> Makers:
    yield other, _dense(other, input, transposed=True) if other.ndim == 2 and input.ndim >= 2 else None
    yield input, None


@_rule(functional.embedding)
def _embedding(
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Makers:
    if max_norm is not None or scale_grad_by_freq:
        yield weight, None
        return
    padding = None if padding_idx is None else padding_idx % len(weight)
    yield weight, lambda batch_first: Lookup(weight.shape, batch_first(input), padding)


def _for_each_dimension(value: Any, weight: Tensor) -> tuple[int, ...]:
    return (value,) * (weight.ndim - 2) if isinstance(value, int) else tuple(value)


def _filters(output: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution) -> Makers:
    if bias is not None:
        yield bias, _broadcast(bias, _channels(bias, output))
    yield weight, lambda batch_first: Filter(weight.shape, batch_first(inputs), convolution)


@_rule(functional.conv1d, functional.conv2d, functional.conv3d)
def _convolution(
    output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Makers:
    padded = input
    stride, dilation, none = (_for_each_dimension(value, weight) for value in (stride, dilation, 0))
    if padding == "valid":
        padding = 0
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(t % 2 for t in total):
            # The two sides of a dimension cannot get as much: the right one gets one more.
            sides = [side for t in reversed(total) for side in (t // 2, t - t // 2)]
            padded, padding = functional.pad(input, sides), 0
        else:
            padding = [t // 2 for t in total]
    convolution = Convolution(stride, _for_each_dimension(padding, weight), dilation, none, groups)
    return _filters(output, padded, weight, bias, convolution)


class _TransposedOptions(NamedTuple):
    """The last arguments of torch's transposed convolutions, in their order."""

    stride: Any = 1
    padding: Any = 0
    output_padding: Any = 0
    groups: int = 1
    dilation: Any = 1


@_rule(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
def _transposed_convolution(
    output: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, *last: Any, **named: Any
) -> Makers:
    options = _TransposedOptions(*last, **named)
    sizes = (options.stride, options.padding, options.dilation, options.output_padding)
    stride, padding, dilation, output_padding = (_for_each_dimension(size, weight) for size in sizes)
    convolution = Convolution(stride, padding, dilation, output_padding, options.groups, transposed=True)
    return _filters(output, input, weight, bias, convolution)


def _register_normalisation(function: Callable[..., Tensor], view: Callable[[Tensor, Tensor], tuple[int, ...]]) -> None:
    """Register the rule of a normalisation whose scale and shift have the shape `view` where they meet the output."""
    signature = inspect.signature(function)

    def rule(output: Tensor, *args: Any, **kwargs: Any) -> Makers:
        given = signature.bind(*args, **kwargs).arguments
        weight, bias = given.pop("weight", None), given.pop("bias", None)
        if "running_mean" in given and given.get("use_input_stats", True):
            # They are not used then, but would be moved.
            given |= {"running_mean": None, "running_var": None}

        def normalised(batch_first: BatchFirst) -> Callable[[slice], Tensor]:
            # Made when the gradient is there, so that it isn't kept beside the input meanwhile. The scale does not say
            # what it multiplied, for it may be 0.
            @cache
            def made() -> Tensor:
                with torch.no_grad():
                    return batch_first(function(**given))

            return lambda samples: made()[samples]

        if bias is not None:
            yield bias, _broadcast(bias, view(bias, output))
        if weight is not None:
            yield weight, _broadcast(weight, view(weight, output), normalised)

    _rule(function)(rule)


_register_normalisation(functional.layer_norm, _trailing)
_register_normalisation(functional.rms_norm, _trailing)
_register_normalisation(functional.group_norm, _channels)
_register_normalisation(functional.instance_norm, _channels)


class _BatchNormOptions(NamedTuple):
    """The last arguments of torch's batch norm, in their order."""

    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


@_rule(functional.batch_norm)
def _batch_norm(
    output: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *last: Any,
    **named: Any,
) -> Makers:
    if bias is not None:
        yield bias, _broadcast(bias, _channels(bias, output))
    if weight is None:
        return
    if running_mean is None or running_var is None:
        yield weight, None
        return
    view = _channels(weight, output)
    mean = running_mean.view(view)
    scale = wide(running_var + _BatchNormOptions(*last, **named).eps).rsqrt()

    def centred(batch_first: BatchFirst) -> Callable[[slice], Tensor]:
        # Not by batch_norm itself, which is several times slower than a subtraction.
        return lambda samples: wide(batch_first(input)[samples]) - mean

    yield weight, _broadcast(weight, view, centred, scale)


def _affine(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise with running statistics by one product and one sum: `batch_norm` has a backward many times as slow."""
    alike = input.dtype in (torch.float32, torch.float64) and all(
        other is None or other.dtype == input.dtype for other in (running_mean, running_var, weight, bias)
    )
    if training or running_mean is None or running_var is None or not input.requires_grad or not alike:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    with torch.no_grad():
        view = (-1, *(1,) * (input.ndim - 2))
        scale = (running_var + eps).rsqrt()
        scale = scale if weight is None else scale * weight
        shift = -running_mean * scale
        shift = shift if bias is None else shift + bias
        scale, shift = scale.view(view), shift.view(view)
    return (input * scale).add_(shift)


FORMS[functional.batch_norm] = _affine


@_rule(functional.prelu, torch.Tensor.prelu)
def _prelu(output: Tensor, input: Tensor, weight: Tensor) -> Makers:
    view = _channels(weight, output) if weight.numel() > 1 else (1,) * output.ndim
    yield weight, _broadcast(weight, view, lambda batch_first: lambda samples: batch_first(input)[samples].clamp(max=0))


@_rule(torch.Tensor.add, torch.add, torch.Tensor.add_)
def _add(output: Tensor, input: Any, other: Any, *, alpha: float = 1) -> Makers:
    for operand in (input, other):
        if isinstance(operand, Tensor):
            known = alpha == 1 and input is not other
            yield operand, _broadcast(operand, _trailing(operand, output)) if known else None


@_rule(torch.Tensor.mul, torch.mul)
def _mul(output: Tensor, input: Any, other: Any) -> Makers:
    for operand, multiplied in ((input, other), (other, input)):
        if isinstance(operand, Tensor):
            if isinstance(multiplied, Tensor) and multiplied is not operand:
                yield operand, _broadcast(operand, _trailing(operand, output), _of(multiplied.expand_as(output)))
            else:
                yield operand, None


@_rule(torch.Tensor.expand)
def _expand(output: Tensor, input: Tensor, *sizes: Any) -> Makers:
    yield input, _broadcast(input, _trailing(input, output))
