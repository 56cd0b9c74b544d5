"""What is done to images before a model sees them, as torchvision's transforms do it, and who says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
# The most pixels of a side in a file that is believed.
_LARGEST = 1 << 16


@dataclass(frozen=True)
class Transform:
    """What is done to images, in this order; what is None is not said.

    Attributes:
        size: Resized to (height, width), whatever the shape was.
        resize: Resized until the shorter side has so many pixels.
        crop: What is kept of the middle: (height, width). Smaller images get a black border.
        interpolation: How the two resize; bilinear unless given.
        mean: The mean of each channel, or one for all: subtracted from pixels of 0 to 1.
        std: What they are divided by then; there is none without the other.
    """

    size: tuple[int, int] | None = None
    resize: int | None = None
    crop: tuple[int, int] | None = None
    interpolation: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    @property
    def reshapes(self) -> bool:
        """Whether it says what becomes of an image's height and width."""
        return self.size is not None or self.resize is not None or self.crop is not None

    def reshape(self, images: Tensor) -> Tensor:
        """Resize and crop images of shape `(..., channels, height, width)`; bytes to the same bytes on any machine."""
        from torchvision.transforms.v2 import functional as image_ops  # which takes a second; `report` does without

        size, (height, width) = self.size, images.shape[-2:]
        if self.resize is not None:
            size = (self.resize * height // min(height, width), self.resize * width // min(height, width))
        if size is not None:
            images = _resized(images, size, self.interpolation or "bilinear")
        return images if self.crop is None else image_ops.center_crop(images, list(self.crop))

    def normalise(self, images: Tensor) -> Tensor:
        """Subtract the mean and divide by the deviation; images are floats of shape `(n, channels, height, width)`."""
        if self.mean is None or self.std is None:
            return images
        mean, std = images.new_tensor(self.mean), images.new_tensor(self.std)
        return (images - mean[:, None, None]) / std[:, None, None]

    def completed(self, other: Transform) -> Transform:
        """Return this, and what `other` says of size or of numbers where this says nothing of them."""
        numbers = self if self.mean is not None else other
        return replace(self if self.reshapes else other, mean=numbers.mean, std=numbers.std)

    def effective(self) -> Transform:
        """Return the same without numbers that change nothing (mean 0 and deviation 1)."""
        nothing = self.mean is not None and set(self.mean) == {0.0} and set(self.std or ()) == {1.0}
        transform = replace(self, mean=None, std=None) if nothing else self
        return transform if transform.reshapes else replace(transform, interpolation=None)

    def describe_shape(self) -> str:
        """Say what becomes of height and width, for people; empty if nothing does."""
        parts = []
        if self.size is not None:
            parts.append(f"resized to {_pixels(self.size)}")
        if self.resize is not None:
            parts.append(f"the shorter side resized to {self.resize}")
        if self.crop is not None:
            parts.append(f"cropped to {_pixels(self.crop)}")
        return ", ".join(parts)

    def describe_numbers(self) -> str:
        """Say what becomes of the pixels, for people; empty if nothing does."""
        if self.mean is None or self.std is None:
            return ""
        return f"normalised by mean {_numbers(self.mean)} and std {_numbers(self.std)}"

    def to_json(self) -> dict[str, Any]:
        """Return what is said, as JSON has it."""
        said = {name: getattr(self, name) for name in _CHECKS}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in said.items()
            if value is not None
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Transform:
        """Return the transform of which `to_json` made this, perhaps among other things; see `is_transform`."""
        said = {name: document.get(name) for name in _CHECKS}
        values: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
        return cls(**values)


@dataclass(frozen=True)
class Assumption:
    """What is done to images unless their data says otherwise.

    Attributes:
        transform: What is done to them.
        source: Who says so: the model's own `record`, the `weights` that torchvision or timm has for its architecture,
            or `nobody`: then images go in as 0 to 1.
        shape: Height and width that images have in the record, if it says so; those that have them are not resized.
        whose: Whose weights they are, where those say so, for people.
    """

    transform: Transform
    source: Literal["record", "weights", "nobody"]
    shape: tuple[int, ...] | None = None
    whose: str = ""


def is_transform(document: Mapping[str, Any]) -> bool:
    """Whether what a file says of a transform, among other things, can be one."""
    if any(document.get(name) is not None and not check(document[name]) for name, check in _CHECKS.items()):
        return False
    return (document.get("mean") is None) == (document.get("std") is None)


def _resized(images: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize images; bytes as Pillow does, which made the photographs that networks are trained and evaluated on.

    What torch makes of a tensor of bytes is off by one or two here and there, elsewhere on another processor, and up to
    five photographs of a hundred are then taken for something else.
    """
    import numpy as np
    import torch
    from PIL import Image
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2 import functional as image_ops

    if images.dtype != torch.uint8:
        whole: Tensor = image_ops.resize(
            images, list(size), interpolation=InterpolationMode(interpolation), antialias=True
        )
        return whole
    filtered = Image.Resampling[interpolation.upper()]
    planes = images.reshape(-1, *images.shape[-2:]).cpu().numpy()
    resized = [np.asarray(Image.fromarray(plane).resize(size[::-1], filtered)) for plane in planes]
    return torch.from_numpy(np.array(resized, np.uint8)).reshape(*images.shape[:-2], *size).to(images.device)


def _is_side(value: Any) -> bool:
    return type(value) is int and 0 < value <= _LARGEST


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_side, value))


def _is_numbers(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) in (1, 3)
        and all(type(number) in (int, float) and abs(number) < 1e30 for number in value)
    )


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "size": _is_pair,
    "resize": _is_side,
    "crop": _is_pair,
    "interpolation": lambda value: value in INTERPOLATIONS,
    "mean": _is_numbers,
    "std": lambda value: _is_numbers(value) and all(number > 0 and math.isfinite(1 / number) for number in value),
}


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
