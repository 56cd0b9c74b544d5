"""More inputs than were kept: what lies between them, and images that are moved, turned and stretched a little.

The anchor has answers to any input. No label is needed of what is made here, so that it may be neither one thing nor
the other: the old model says what it is (Beyer et al. 2022, "Knowledge distillation: a good teacher is patient and
consistent", on why that helps).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.modules.batch import Inputs

# So many are made of a probe,
_MOST = 16_384
# or as many as take so many bytes, with the answers to them.
_BYTES = 256 << 20
# Images are turned by up to so many radians,
_TURN = 0.25
# stretched and slanted by up to this part,
_STRETCH = 0.15
# and moved by up to this part of their height and width.
_SHIFT = 1 / 14
# So many are in floating point at once,
_CHUNK = 256
# or as many as take so many bytes then.
_CHUNK_BYTES = 64 << 20


def varied(inputs: Inputs, spec: InputSpec, generator: torch.Generator, answer: int = 0) -> Tensor | None:
    """Return inputs that are like those given, as many as are worth their memory; None of what cannot be varied.

    Half of what is made of images are images that are moved, turned and stretched a little; the other half, and all
    that is made of other real numbers, are mixtures of two in random parts. Dictionaries and whole numbers (tokens)
    stay as they are.

    Args:
        inputs: Samples as the data has them.
        spec: How they go into the model.
        generator: What draws, on the CPU.
        answer: How many bytes an answer takes, which count with the input's.
    """
    if not isinstance(inputs, Tensor) or not (inputs.is_floating_point() or spec.bytes_to_unit) or len(inputs) < 2:
        return None
    made = inputs.new_empty(min(_MOST, _BYTES // max(1, inputs[0].nbytes + answer)), *inputs.shape[1:])
    images = inputs.ndim == 4 and min(inputs.shape[-2:]) * _SHIFT >= 1
    chunk = max(1, min(_CHUNK, _CHUNK_BYTES // (4 * max(1, inputs[0].numel()))))
    for number, part in enumerate(torch.split(made, chunk)):
        make = _moved if images and number % 2 else _mixed
        values = make(inputs, len(part), generator)
        part.copy_(values if inputs.is_floating_point() else values.round_())
    return made


def _mixed(inputs: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Mix two inputs in random parts."""
    one, other = _drawn(inputs, n, generator), _drawn(inputs, n, generator)
    return one.lerp_(other, torch.rand((n, *[1] * (inputs.ndim - 1)), generator=generator))


def _moved(images: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Move, turn and stretch images by random affine maps; their edges go on where nothing is left."""

    def random(most: float) -> Tensor:
        return most * (2 * torch.rand(n, generator=generator) - 1)

    turn, wide, high, slant = random(_TURN), 1 + random(_STRETCH), 1 + random(_STRETCH), random(_STRETCH)
    # The coordinates of an image go from -1 to 1, so that its width is 2.
    right, down = random(2 * _SHIFT), random(2 * _SHIFT)
    rows = [torch.stack([turn.cos() * wide, slant - turn.sin() * high, right], dim=1)]
    rows += [torch.stack([turn.sin() * wide, turn.cos() * high, down], dim=1)]
    chosen = _drawn(images, n, generator)
    grid = functional.affine_grid(torch.stack(rows, dim=1), list(chosen.shape), align_corners=False)
    return functional.grid_sample(chosen, grid, padding_mode="border", align_corners=False)


def _drawn(inputs: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Draw inputs, as often as it happens."""
    return inputs[torch.randint(len(inputs), (n,), generator=generator)].float()
