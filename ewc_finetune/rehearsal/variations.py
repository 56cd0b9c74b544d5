"""More inputs than were kept: what lies between them, and images moved a little. The anchor has answers to any input.

No label is needed of what is made here, so that it may be neither one thing nor the other: the old model says what it
is (Beyer et al. 2022, "Knowledge distillation: a good teacher is patient and consistent", on why that helps).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.modules.batch import Inputs

# So many are made of a probe,
_MOST = 4096
# or as many as take so many bytes.
_BYTES = 256 << 20
# Images are moved by up to this part of their height and width.
_SHIFT = 1 / 14


def varied(inputs: Inputs, spec: InputSpec, generator: torch.Generator) -> Tensor | None:
    """Return inputs that are like those given, as many as are worth their memory; None of what cannot be varied.

    Half of the images are moved, by a pixel or some; the others are mixed of two in random parts, as all other real
    numbers are. Dictionaries and whole numbers (tokens) stay as they are.

    Args:
        inputs: Samples as the data has them.
        spec: How they go into the model.
        generator: What draws, on the CPU.
    """
    if not isinstance(inputs, Tensor) or not (inputs.is_floating_point() or spec.bytes_to_unit) or len(inputs) < 2:
        return None
    n = min(_MOST, _BYTES // max(1, inputs[0].nbytes))
    moved = n // 2 if inputs.ndim == 4 and min(inputs.shape[-2:]) * _SHIFT >= 1 else 0
    made = [_mixed(inputs, n - moved, generator)]
    if moved:
        made.append(_moved(inputs, moved, generator))
    return torch.cat(made)


def _mixed(inputs: Tensor, n: int, generator: torch.Generator) -> Tensor:
    one, other = (inputs[torch.randint(len(inputs), (n,), generator=generator)].float() for _ in range(2))
    part = torch.rand((n, *[1] * (inputs.ndim - 1)), generator=generator)
    mixed = one.lerp_(other, part)
    return mixed.to(inputs.dtype) if inputs.is_floating_point() else mixed.round_().to(inputs.dtype)


def _moved(images: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """Move images, whose edges go on where nothing is left."""
    height, width = images.shape[-2:]
    down, right = int(height * _SHIFT), int(width * _SHIFT)
    chosen = images[torch.randint(len(images), (n,), generator=generator)]
    padded = functional.pad(chosen.float(), (right, right, down, down), mode="replicate").to(images.dtype)
    tops = torch.randint(2 * down + 1, (n,), generator=generator).tolist()
    lefts = torch.randint(2 * right + 1, (n,), generator=generator).tolist()
    return torch.stack(
        [image[:, t : t + height, s : s + width] for image, t, s in zip(padded, tops, lefts, strict=True)]
    )
