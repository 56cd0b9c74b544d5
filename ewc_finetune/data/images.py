"""Folders of images, decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ewc_finetune.choices import SPLITS, Split
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.numbering import AS_LISTED, BY_NAME, check_names
from ewc_finetune.data.options import DataOptions
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.specs.query import Address


@dataclass(eq=False)
class ImageFiles(Dataset[Any]):
    """Image files, decoded when asked for: uint8 tensors of shape `(channels, height, width)`, with labels if any.

    Attributes:
        files: Paths, with labels.
        options: What is done to each image.
        alike: Whether they must be of one size.
        shape: The shape of the first that was read.
    """

    files: list[tuple[str, int | None]]
    options: DataOptions
    alike: bool = True
    shape: tuple[int, ...] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.files)

    def subset(self, indices: Sequence[int]) -> ImageFiles:
        """Return some of them, in this order."""
        return replace(self, files=[self.files[index] for index in indices])

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, int]:
        from PIL import Image, UnidentifiedImageError
        from torchvision.transforms.v2.functional import pil_to_tensor

        path, label = self.files[index]
        try:
            with Image.open(path) as picture:
                image = pil_to_tensor(picture.convert("RGB"))
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"{path} cannot be read as an image ({error}). Repair it or take it out") from error
        image = self.options.apply(image)
        self.shape = self.shape or tuple(image.shape)
        if self.alike and tuple(image.shape) != self.shape:
            raise DataError(
                f"{path} has shape {tuple(image.shape)} and the images before it {self.shape}; "
                "make them alike with ?size=PIXELS, or ?resize=256&crop=224, as the model's own images were"
            )
        return image if label is None else (image, label)


def load_image_folder(address: Address, place: str, split: Split, options: DataOptions) -> Domain:
    """A folder with a folder of images for each class, by itself or under `train/` and `test/`.

    Classes are numbered as `labels` says, else over both splits together, so that a class that one of them lacks moves
    no other.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    root = _folder(address, place)
    splits = {name: root / name for name in SPLITS if _folders_in(root / name)}
    if options.split and not splits:
        raise DataError(f"{address}: {root} has no folders train/ and test/, so it has no splits to choose from")
    folder = splits.get(split) if splits else root
    if folder is None:
        raise DataError(f"{address}: there is no folder {root / split} with a folder for each class")
    classes = sorted({name for part in (splits.values() or [root]) for name in _folders_in(part)})
    if options.labels is not None:
        check_names(classes, options.labels, str(address))
        classes = list(options.labels)
    numbers = {name: number for number, name in enumerate(classes)}
    files = make_dataset(str(folder), numbers, extensions=IMG_EXTENSIONS, allow_empty=True) if classes else []
    if not files:
        here = any(file.suffix.lower() in IMG_EXTENSIONS for file in folder.iterdir())
        raise DataError(
            f"{folder} holds images, and no folder for each class. Without labels they are images:{folder}"
            if here
            else f"{folder} holds no images. Expected a folder for each class, with images in it"
        )
    labels = torch.tensor([label for _, label in files], dtype=torch.long)
    return Domain(
        str(address),
        ImageFiles(files, options),
        tuple(classes),
        labels,
        split if len(splits) == 2 else None,
        numbering=BY_NAME if options.labels is None else AS_LISTED,
    )


def load_images(address: Address, place: str, split: Split, options: DataOptions) -> Domain:
    """All the images under a folder, however deep, without labels: logged inputs, say."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    for option in ("split", "classes"):
        if getattr(options, option) is not None:
            raise UsageError(f"{address}: images have no {option}, for they have no labels; imagefolder:PATH has")
    root = _folder(address, place)
    files = sorted(str(path) for path in root.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
    if not files:
        raise DataError(f"{root} holds no images, in itself or in any folder of it")
    return Domain(str(address), ImageFiles([(path, None) for path in files], options))


def _folder(address: Address, place: str) -> Path:
    if not place:
        raise UsageError(f"{address}: name the folder, as in {address.head.rstrip(':')}:photos/?size=224")
    root = Path(place).expanduser()
    if not root.is_dir():
        raise DataError(f"there is no folder {root}, which {address} names")
    return root


def _folders_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
