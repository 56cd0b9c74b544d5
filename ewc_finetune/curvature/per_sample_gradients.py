"""One use of a parameter in a forward pass, and the squares of its per-sample gradients.

For sample n and the vector s_m at the outputs, a use takes what went into its operation (A) and the gradient at what
came out of it (G, one for each m), and adds up `sum_m (d s_m^T f(x_n) / d theta)^2` over the samples. Both have the
batch first, `(batch, *single)`, with the shape that one sample alone would have had. All sums are in float32 or wider,
whatever the model computes in.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ewc_finetune.curvature.convolution import Convolution, better_alone, patches, weight_gradients
from ewc_finetune.modules.precision import wide

# Bytes of a chunk on the CPU: few enough to stay near the cache, and enough for the matrix products to be worth their
# overhead.
_CPU_CHUNK = 8 << 20
# Bytes of a chunk elsewhere.
_ACCELERATOR_CHUNK = 512 << 20


def budget(device: torch.device) -> int:
    """Return how many bytes a chunk may have."""
    return _CPU_CHUNK if device.type == "cpu" else _ACCELERATOR_CHUNK


def chunks(batch: int, elements: int, device: torch.device) -> Iterator[slice]:
    """Cut a batch into chunks of samples whose gradients, of so many elements each, fit the budget."""
    step = max(1, min(batch, budget(device) // (4 * max(elements, 1))))
    for start in range(0, batch, step):
        yield slice(start, min(start + step, batch))


class Scratch:
    """Memory for one chunk of per-sample gradients, used again for every chunk.

    Fresh memory of this size comes from the system each time, and page faults would cost more than the products.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def __call__(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a tensor of this shape, of the dtype and on the device of another, which the next call takes back."""
        size, buffer = math.prod(shape), self._buffer
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype or buffer.device != like.device:
            buffer = self._buffer = torch.empty(size, dtype=like.dtype, device=like.device)
        return buffer[:size].view(*shape)


def sum_by_sample(values: Tensor) -> Tensor:
    """Sum over all but the first dimension, as a product: a sum starts threads, which takes longer than the sum."""
    flat = values.reshape(len(values), -1)
    return flat @ flat.new_ones(flat.shape[1])


def sum_over_samples(values: Tensor) -> Tensor:
    """Sum over the first dimension, as a product too; see `sum_by_sample`."""
    flat = values.reshape(len(values), -1)
    return (flat.new_ones(len(flat)) @ flat).view(values.shape[1:])


class Sums:
    """Collects squares of per-sample gradients, for one batch.

    Args:
        shape: The parameter's shape.
        batch: How many samples.

    Attributes:
        squares: Their sum over the samples, in the parameter's shape; None before the first.
        by_sample: Their sum over the parameter, for each sample.
    """

    def __init__(self, shape: Sequence[int], batch: int) -> None:
        self.shape = tuple(shape)
        self.batch = batch
        self.squares: Tensor | None = None
        self.by_sample: Tensor | None = None

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the sum of squares, in the parameter's shape, and its sum over the parameter for each sample."""
        if self.squares is None or self.by_sample is None:
            raise RuntimeError("finish() before add()")
        return self.squares, self.by_sample

    def _chunks(self, gradient: Tensor) -> Iterator[slice]:
        # What is made on the way, G times something, may be larger than the gradients.
        return chunks(self.batch, max(math.prod(self.shape), gradient[0].numel()), gradient.device)

    def _add_chunk(self, gradients: Tensor, samples: slice) -> None:
        if self.by_sample is None:
            self.by_sample = gradients.new_zeros(self.batch)
        self.by_sample[samples] += torch.linalg.vector_norm(gradients.reshape(len(gradients), -1), dim=1).square_()
        if self.squares is None:
            self.squares = gradients.square_().sum(dim=0)
        elif len(gradients) == 1:
            self.squares.addcmul_(gradients[0], gradients[0])
        else:
            self.squares += gradients.square_().sum(dim=0)


class Use(Sums, ABC):
    """One use of one parameter, for one batch."""

    @abstractmethod
    def gradients(self, gradient: Tensor, samples: slice, scratch: Scratch | None = None) -> Tensor:
        """Return these samples' gradients by the parameter, shape `(samples, *shape)`.

        `gradient` is G of all the batch's samples. The result is the caller's to change, and lies in the scratch if
        there is one.
        """

    def add(self, gradient: Tensor, scratch: Scratch) -> None:
        """Add the squares for one vector at the outputs, whose gradient here is `gradient`."""
        for samples in self._chunks(gradient):
            self._add_chunk(self.gradients(gradient, samples, scratch), samples)


class BySquares(Use):
    """A use to which G may matter in square alone: then its squares are summed over the vectors first."""

    @abstractmethod
    def takes_squares(self, shape: Sequence[int]) -> bool:
        """Whether that is so for a G of this shape; `from_squares` then takes the place of `add`."""

    @abstractmethod
    def from_squares(self, squares: Tensor, by_sample: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Return what `finish` would, from the squares of G summed over the vectors, and their sums by sample."""


class Factored(Use):
    """The weight of a linear map of vectors: a sample's gradient is the sum of outer products `g_t a_t^T`.

    Attributes:
        inputs: What went in, batch first.
        transposed: Whether the weight has the shape `(inputs, outputs)`.
    """

    inputs: Tensor
    transposed: bool = False

    @abstractmethod
    def input_vectors(self, samples: slice) -> Tensor:
        """Return what the weight met, shape `(samples, positions, inputs)`, in float32 or wider."""

    @abstractmethod
    def output_vectors(self, gradient: Tensor) -> Tensor:
        """Return the gradients there, shape `(batch, positions, outputs)`, in float32 or wider."""


class Dense(BySquares, Factored):
    """The weight of a linear map of vectors, one to a sample: its gradient is the outer product of G and A.

    `sum_n (g_n a_n^T)^2 = (G * G)^T (A * A)`, so no per-sample gradient is ever made, and the squares of G are summed
    over the vectors m before the one product.
    """

    def __init__(self, shape: Sequence[int], inputs: Tensor, transposed: bool = False) -> None:
        super().__init__(shape, len(inputs))
        self.inputs = inputs
        self.transposed = transposed

    def gradients(self, gradient: Tensor, samples: slice, scratch: Scratch | None = None) -> Tensor:
        """See `Use`."""
        g, a = wide(gradient[samples]).flatten(1), wide(self.inputs[samples]).flatten(1)
        return a[:, :, None] * g[:, None, :] if self.transposed else g[:, :, None] * a[:, None, :]

    def input_vectors(self, samples: slice) -> Tensor:
        """See `Factored`."""
        return wide(self.inputs[samples]).flatten(1)[:, None]

    def output_vectors(self, gradient: Tensor) -> Tensor:
        """See `Factored`."""
        return wide(gradient).flatten(1)[:, None]

    def takes_squares(self, shape: Sequence[int]) -> bool:
        """See `Use`."""
        return True

    def from_squares(self, squares: Tensor, by_sample: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """See `Use`."""
        inputs = wide(self.inputs).flatten(1)
        g, a = squares.flatten(1), torch.mul(inputs, inputs, out=scratch(inputs.shape, inputs))
        return a.T @ g if self.transposed else g.T @ a, by_sample * sum_by_sample(a)


class DenseSequence(Factored):
    """The weight of a linear map of several vectors to a sample: its gradient is the sum of their outer products."""

    def __init__(self, shape: Sequence[int], inputs: Tensor, transposed: bool = False) -> None:
        super().__init__(shape, len(inputs))
        self.inputs = inputs.flatten(1, -2)  # (batch, positions, features)
        self.transposed = transposed

    def gradients(self, gradient: Tensor, samples: slice, scratch: Scratch | None = None) -> Tensor:
        """See `Use`."""
        g, a = wide(gradient[samples]).flatten(1, -2), wide(self.inputs[samples])
        left, right = (a, g) if self.transposed else (g, a)
        out = None if scratch is None else scratch((len(g), *self.shape), g)
        return torch.bmm(left.mT, right, out=out)

    def input_vectors(self, samples: slice) -> Tensor:
        """See `Factored`."""
        return wide(self.inputs[samples])

    def output_vectors(self, gradient: Tensor) -> Tensor:
        """See `Factored`."""
        return wide(gradient).flatten(1, -2)


class Broadcast(BySquares):
    """A parameter that is broadcast over the outputs and multiplies something, or is just added: scales and biases.

    Its gradient is `G * multiplied * scale`, summed over the positions that it was broadcast to.

    Args:
        shape: The parameter's shape.
        batch: How many samples.
        view: The parameter's shape where it meets one sample's outputs, with a 1 wherever it is repeated.
        multiplied: Gives what it multiplies, for some samples; None for 1.
        scale: What that is to be multiplied by, in the parameter's shape; None for 1.
    """

    def __init__(
        self,
        shape: Sequence[int],
        batch: int,
        view: Sequence[int],
        multiplied: Callable[[slice], Tensor] | None = None,
        scale: Tensor | None = None,
    ) -> None:
        super().__init__(shape, batch)
        self.view = tuple(view)
        self.multiplied = multiplied
        self.scale = scale

    def takes_squares(self, shape: Sequence[int]) -> bool:
        """See `Use`."""
        return tuple(shape[1:]) == self.view

    def from_squares(self, squares: Tensor, by_sample: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """See `Use`."""
        if self.multiplied is not None:
            other = wide(self.multiplied(slice(None)))
            squares = torch.mul(other, other, out=scratch(other.shape, other)).mul_(squares)
            weights = squares.new_ones(self.view) if self.scale is None else self.scale.square()
            by_sample = squares.reshape(self.batch, -1) @ weights.flatten()
            return sum_over_samples(squares).view(self.shape) * weights.view(self.shape), by_sample
        return sum_over_samples(squares).view(self.shape), by_sample

    def gradients(self, gradient: Tensor, samples: slice, scratch: Scratch | None = None) -> Tensor:
        """See `Use`."""
        g = wide(gradient[samples])
        repeated = [dim for dim, size in enumerate(self.view, start=1) if size == 1 and g.shape[dim] != 1]
        if self.multiplied is not None:
            g = g * wide(self.multiplied(samples))
        elif not repeated:
            g = g.clone()
        if repeated:
            g = g.sum(dim=repeated)
        g = g.reshape(len(g), *self.shape)
        return g if self.scale is None else g.mul_(self.scale)


class Lookup(Use):
    """An embedding: row i of its gradient is the sum of G over the positions where i was looked up."""

    def __init__(self, shape: Sequence[int], indices: Tensor, padding: int | None) -> None:
        super().__init__(shape, len(indices))
        self.indices = indices.flatten(1)
        self.padding = padding

    def gradients(self, gradient: Tensor, samples: slice, scratch: Scratch | None = None) -> Tensor:
        """See `Use`."""
        g, indices = self._kept(gradient, samples)
        rows, width = self.shape
        result = torch.zeros(len(g) * rows, width, dtype=g.dtype, device=g.device)
        result.index_add_(0, self._keys(indices).flatten(), g.flatten(0, 1))
        return result.view(len(g), rows, width)

    def add(self, gradient: Tensor, scratch: Scratch) -> None:
        """See `Use`. Only the rows that a sample looked up are made, not its whole gradient."""
        g, indices = self._kept(gradient, slice(None))
        keys, inverse = self._keys(indices).flatten().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        rows = torch.zeros(len(keys), self.shape[1], dtype=g.dtype, device=g.device)
        rows.index_add_(0, inverse, g.flatten(0, 1)).square_()
        if self.squares is None or self.by_sample is None:
            self.squares = torch.zeros(self.shape, dtype=g.dtype, device=g.device)
            self.by_sample = torch.zeros(self.batch, dtype=g.dtype, device=g.device)
        self.squares.index_add_(0, keys % self.shape[0], rows)
        self.by_sample.index_add_(0, keys // self.shape[0], rows.sum(dim=1))

    def _keys(self, indices: Tensor) -> Tensor:
        """Number the rows of all samples' gradients, one sample's after the other's."""
        return indices + self.shape[0] * torch.arange(len(indices), device=indices.device)[:, None]

    def _kept(self, gradient: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        indices = self.indices[samples]
        g = wide(gradient[samples]).reshape(len(indices), -1, self.shape[1])
        if self.padding is not None:
            g = g.masked_fill((indices == self.padding)[:, :, None], 0)
        return g, indices


class Filter(Factored):
    """The weight of a convolution; its vectors are the patches that the filters meet."""

    def __init__(self, shape: Sequence[int], inputs: Tensor, convolution: Convolution) -> None:
        super().__init__(shape, len(inputs))
        self.inputs = inputs  # (batch, images of a sample, channels, *space)
        self.convolution = convolution

    def gradients(self, gradient: Tensor, samples: slice, scratch: Scratch | None = None) -> Tensor:
        """See `Use`."""
        g, a = wide(gradient[samples]), wide(self.inputs[samples])
        images = a.shape[:2]
        out = None if scratch is None else scratch((images.numel(), *self.shape), a)
        by_image = weight_gradients(self.convolution, self.shape, a.flatten(0, 1), g.flatten(0, 1), out)
        return by_image if images[1] == 1 else torch.unflatten(by_image, 0, images).sum(dim=1)

    def input_vectors(self, samples: slice) -> Tensor:
        """See `Factored`."""
        a = wide(self.inputs[samples])
        vectors = patches(self.convolution, self.shape, a.flatten(0, 1)).mT
        return vectors.reshape(len(a), -1, vectors.shape[2])

    def output_vectors(self, gradient: Tensor) -> Tensor:
        """See `Factored`."""
        g = wide(gradient)  # (batch, images of a sample, channels, *space)
        return g.flatten(3).mT.flatten(1, 2)

    def _chunks(self, gradient: Tensor) -> Iterator[slice]:
        if better_alone(self.convolution, self.shape, gradient.device):
            return (slice(n, n + 1) for n in range(self.batch))
        touched = math.prod(self.shape) + gradient[0].numel() + self.inputs[0].numel()
        return chunks(self.batch, touched, gradient.device)


class Custom(Use):
    """A parameter of a module whose rule a user has registered: the rule gives its per-sample gradients."""

    def __init__(self, shape: Sequence[int], batch: int, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__(shape, batch)
        self.rule = rule

    def gradients(self, gradient: Tensor, samples: slice, scratch: Scratch | None = None) -> Tensor:
        """See `Use`."""
        return wide(self.rule(gradient)[samples]).clone()


class Shared(Sums):
    """A parameter that is used more than once: a sample's gradients are added up before they are squared."""

    def __init__(self, uses: Sequence[Use]) -> None:
        super().__init__(uses[0].shape, uses[0].batch)
        self.uses = uses

    def add_all(self, gradients: Sequence[Tensor | None], scratch: Scratch) -> None:
        """Add the squares for one vector; a use whose output has no part in the model's has None."""
        present = [(use, g) for use, g in zip(self.uses, gradients, strict=True) if g is not None]
        if not present:
            return
        largest = max((g for _, g in present), key=lambda g: g[0].numel())
        for samples in self._chunks(largest):
            total = present[0][0].gradients(present[0][1], samples, scratch)
            for use, gradient in present[1:]:
                total += use.gradients(gradient, samples)
            self._add_chunk(total, samples)
