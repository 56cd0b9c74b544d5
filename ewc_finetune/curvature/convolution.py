"""Per-sample gradients of a convolution's weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Convolution:
    """The hyperparameters of a convolution in so many dimensions.

    Attributes:
        stride: One number for each dimension, like the three after it.
        padding: Zeros on both sides.
        dilation: Steps between the kernel's elements.
        output_padding: What a transposed convolution adds to one side of its output.
        groups: Groups of channels that see only each other.
        transposed: Whether it is a transposed convolution; its weight has the shape `(inputs, outputs / groups, ...)`.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int = 1
    transposed: bool = False


def weight_gradients(
    convolution: Convolution, shape: Sequence[int], inputs: Tensor, gradient: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return the gradient of each sample by the weight, shape `(batch, *shape)`.

    Args:
        convolution: The hyperparameters.
        shape: The weight's shape.
        inputs: What went in, `(batch, channels, *space)`.
        gradient: The gradient by what came out, `(batch, channels, *space)`.
        out: Where the result may be put, `(batch, *shape)`.
    """
    kernel = shape[2:]
    if not convolution.transposed and convolution.groups == 1:
        if math.prod(kernel) == 1 and not any(convolution.padding):
            strided = inputs[(slice(None), slice(None), *(slice(None, None, step) for step in convolution.stride))]
            return _product(gradient, strided.flatten(2), shape, out)
        # With few positions to a channel, or a filter that is tiny, rearranging the input and one matrix product win
        # over the library's own kernels.
        positions, columns = gradient[0, 0].numel(), math.prod(shape[1:])
        if len(kernel) == 2 and (inputs.device.type != "cpu" or columns <= 32 or positions <= 64):
            patches = functional.unfold(
                inputs, tuple(kernel), convolution.dilation, convolution.padding, convolution.stride
            )
            return _product(gradient, patches, shape, out)
    return _by_groups(convolution, shape, inputs, gradient)


def patches(convolution: Convolution, shape: Sequence[int], inputs: Tensor) -> Tensor:
    """Return what each of the filters' elements met, `(batch, elements, positions)`.

    Raises:
        ValueError: for convolutions of more than two dimensions, with groups, or transposed.
    """
    kernel = tuple(shape[2:])
    if convolution.transposed or convolution.groups > 1 or len(kernel) > 2:
        raise ValueError("patches are of plain convolutions in one or two dimensions")
    flat = len(kernel) == 1  # one more dimension, of one element
    return functional.unfold(
        inputs.unsqueeze(-2) if flat else inputs,
        (1, *kernel) if flat else kernel,
        (1, *convolution.dilation) if flat else convolution.dilation,
        (0, *convolution.padding) if flat else convolution.padding,
        (1, *convolution.stride) if flat else convolution.stride,
    )


def better_alone(convolution: Convolution, shape: Sequence[int], device: torch.device) -> bool:
    """Whether samples are best taken one by one: groups of many channels are slow together on the CPU."""
    return device.type == "cpu" and convolution.groups == 1 and shape[0] * shape[1] >= 16384


def _product(gradient: Tensor, columns: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
    """Multiply the gradient by what each of the filter's elements met, `(batch, elements, positions)`."""
    flat = None if out is None else out.view(len(columns), shape[0], -1)
    if len(columns) == 1:
        # bmm has kernels of its own, which are slower for a single large matrix.
        gradients = torch.mm(gradient[0].flatten(1), columns[0].T, out=None if flat is None else flat[0])
    else:
        gradients = torch.bmm(gradient.flatten(2), columns.mT, out=flat)
    return gradients.view(len(columns), *shape)


def _by_groups(convolution: Convolution, shape: Sequence[int], inputs: Tensor, gradient: Tensor) -> Tensor:
    """Make one convolution of the batch in which each sample's channels are groups of their own."""
    batch = len(inputs)
    weight = inputs.new_empty(1).expand(batch * shape[0], *shape[1:])  # only its shape is read
    gradients: Tensor = torch.ops.aten.convolution_backward(
        gradient.reshape(1, batch * gradient.shape[1], *gradient.shape[2:]),
        inputs.reshape(1, batch * inputs.shape[1], *inputs.shape[2:]),
        weight,
        None,
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.transposed,
        convolution.output_padding,
        batch * convolution.groups,
        [False, True, False],
    )[1]
    return gradients.view(batch, *shape)
