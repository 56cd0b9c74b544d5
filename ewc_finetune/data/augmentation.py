"""Augmentation: images to train on are changed at random, each by itself, as torchvision's transforms do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.modules.batch import Batch, Inputs

# `crop` moves an image by up to this part of its sides, over a black border.
_BORDER = 8


def augmented(batches: Iterator[Batch], names: Sequence[str]) -> Iterator[Batch]:
    """Change the images of each batch at random, drawn from torch's random state.

    Args:
        batches: Batches of images of shape `(n, channels, height, width)`, in bytes or from 0 to 1.
        names: What is done, in this order (`AUGMENTATIONS`).
    """
    change = None
    for images, labels in batches:
        each = cast("Tensor", images)  # see `check_augmented`
        if change is None:
            change = _change(names, *each.shape[-2:])
        yield torch.stack([change(image) for image in each]), labels


def check_augmented(domain: Domain, sample: Inputs) -> None:
    """Refuse to augment what is no image as it comes.

    Raises:
        DataError: saying what it is.
    """
    if domain.augment and not (isinstance(sample, Tensor) and domain.is_raw(sample)):
        shape = tuple(sample.shape[1:]) if isinstance(sample, Tensor) else "a dictionary"
        raise DataError(
            f"{domain.name}: augment= is for images in bytes or from 0 to 1, and a sample is {shape}. Augment in a "
            "function of your own: --data package.module:function"
        )
    if "rand" in domain.augment and isinstance(sample, Tensor) and sample.shape[1] not in (1, 3):
        raise DataError(
            f"{domain.name}: augment=rand is for images of 1 or 3 channels, and these have {sample.shape[1]}; leave it "
            "out, or add channels=3"
        )


def refuse_augmented(domain: Domain, use: str) -> None:
    """Refuse data that is to be augmented where it is taken as it is.

    Raises:
        UsageError: saying what it is used for.
    """
    if domain.augment:
        raise UsageError(f"{domain.name}: augment= is for data to train on, and {use} takes it as it is; leave it out")


def _change(names: Sequence[str], height: int, width: int) -> Callable[[Tensor], Tensor]:
    from torchvision.transforms import v2

    border = [max(1, width // _BORDER), max(1, height // _BORDER)]
    known = {
        "flip": v2.RandomHorizontalFlip,
        "crop": lambda: v2.RandomCrop((height, width), padding=border),
        "rand": v2.RandAugment,
    }
    change: Callable[[Tensor], Tensor] = v2.Compose([known[name]() for name in names])
    return change
