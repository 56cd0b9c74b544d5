"""Kinds of data by name, and how a data spec becomes a domain."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ewc_finetune.address import Address, parse, suggest
from ewc_finetune.choices import SPLITS, Split
from ewc_finetune.data.domain import Domain, as_domain
from ewc_finetune.data.options import Options, read_options
from ewc_finetune.errors import DataError, UsageError

ENVIRONMENT = "EWC_FT_DATA"


def load_domain(spec: str, default_split: Split, data_dir: str | Path | None = None) -> Domain:
    """Load the data that a spec names.

    Args:
        spec: Such as `mnist`, `digits?rotate=90`, `imagefolder:photos/?size=64&limit=1000`.
        default_split: The split, where the spec doesn't say.
        data_dir: Where downloads lie or go; else the environment's EWC_FT_DATA, else `~/.cache/ewc-finetune/data`.

    Raises:
        UsageError: if the spec is not understood.
        DataError: if the data is not there, or nothing is left of it.
    """
    address = parse(spec)
    options = read_options(address)
    kind, colon, place = address.head.partition(":")
    split: Split = options.split or default_split  # type: ignore[assignment]
    folder = Path(data_dir or os.environ.get(ENVIRONMENT) or Path.home() / ".cache" / "ewc-finetune" / "data")
    if kind == "imagefolder":
        if not place:
            raise UsageError(f"{spec}: name the folder, as in imagefolder:photos/?size=64")
        domain = _image_folder(address, Path(place).expanduser(), split, options)
    elif kind == "images":
        if not place:
            raise UsageError(f"{spec}: name the folder, as in images:logged/?size=224")
        domain = _images(address, Path(place).expanduser(), options)
    elif kind in _IN_MEMORY and not colon:
        images, labels, classes = _IN_MEMORY[kind](split, folder)
        domain = Domain(str(address), TensorDataset(images, labels), classes, labels, split)
    else:
        raise UsageError(
            f"{spec}: no data is called {kind!r}. {suggest(kind, [*_IN_MEMORY, 'imagefolder:PATH', 'images:PATH'])}"
        )
    return _select(domain, options)


def resolve_domain(data: object, default_split: Split, data_dir: str | Path | None = None) -> Domain:
    """Make a domain of a data spec (`load_domain`), or of a dataset or loader (`as_domain`)."""
    return load_domain(data, default_split, data_dir) if isinstance(data, str) else as_domain(data)


def resolve_domains(data: Any, default_split: Split, data_dir: str | Path | None = None) -> list[Domain]:
    """Make domains of one piece of data, of a list of specs or datasets, or of a dict of such by name.

    A list of anything else is a list of batches: one domain. Datasets without a name are numbered.
    """
    if isinstance(data, Mapping):
        return [replace(resolve_domain(item, default_split, data_dir), name=name) for name, item in data.items()]
    if not isinstance(data, (list, tuple)) or not all(map(_is_domain, data)):
        return [resolve_domain(data, default_split, data_dir)]
    domains = [resolve_domain(item, default_split, data_dir) for item in data]
    return [replace(d, name=f"data {i}") if d.name == "data" else d for i, d in enumerate(domains, start=1)]


def _is_domain(item: object) -> bool:
    return isinstance(item, (str, Domain, Dataset, DataLoader))


def _select(domain: Domain, options: Options) -> Domain:
    size = domain.size or 0
    kept = options.keep(size, domain.labels)
    if not len(kept) and domain.labels is not None:
        present = ", ".join(map(str, sorted(set(domain.labels.tolist()))))
        raise DataError(f"{domain.name}: nothing is left; its labels are {present or 'none: there are no samples'}")
    if len(kept) < size:
        domain = domain.subset(kept.tolist())
    if options.active is not None:
        domain = replace(domain, active=tuple(sorted({output for part in options.active for output in part})))
    if not isinstance(domain.samples, TensorDataset):
        if options.offset:
            raise UsageError(f"{domain.name}: offset is for data that is in memory, not for folders of images")
        return domain
    images, *labels = domain.samples.tensors
    if options.changes_images:
        images = torch.cat([options.apply(part) for part in torch.split(images, 4096)])
    if options.offset and domain.labels is not None:
        moved = domain.labels + options.offset
        return replace(domain, samples=TensorDataset(images, moved), labels=moved, classes=None)
    return replace(domain, samples=TensorDataset(images, *labels))


InMemory = tuple[Tensor, Tensor, tuple[str, ...]]


def _torchvision(name: str) -> Callable[[Split, Path], InMemory]:
    def load(split: Split, folder: Path) -> InMemory:
        from torchvision import datasets

        kind = getattr(datasets, name)
        train = split == "train"
        try:
            # torchvision prints as it downloads; stdout is for --json.
            with contextlib.redirect_stdout(sys.stderr):
                try:
                    data = kind(folder, train=train, download=False)
                except RuntimeError:
                    folder.mkdir(parents=True, exist_ok=True)
                    data = kind(folder, train=train, download=True)
        except Exception as error:
            raise DataError(
                f"{name} is not in {folder}, or not whole, and could not be downloaded there "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). Put torchvision's files into that "
                f"folder (delete what is there if it is damaged), or name the one that has them with --data-dir or "
                f"{ENVIRONMENT}"
            ) from error
        images = torch.as_tensor(data.data)
        # (N, H, W) is grey; (N, H, W, C) becomes (N, C, H, W).
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        return images, torch.as_tensor(data.targets, dtype=torch.long), tuple(data.classes)

    return load


def _digits(split: Split, folder: Path) -> InMemory:
    """The 1,797 digits of 8 by 8 pixels that scikit-learn carries, in a fixed split of 4 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("the digits come with scikit-learn; install it: pip install 'ewc-finetune[digits]'") from None
    found: Any = load_digits()
    order = torch.randperm(len(found.images), generator=torch.Generator().manual_seed(0))
    chosen = order[len(order) // 5 :] if split == "train" else order[: len(order) // 5]
    images = torch.as_tensor(found.images, dtype=torch.float32)[chosen, None] / 16
    return (
        images,
        torch.as_tensor(found.target, dtype=torch.long)[chosen],
        tuple(map(str, found.target_names)),
    )


_IN_MEMORY: dict[str, Callable[[Split, Path], InMemory]] = {
    "mnist": _torchvision("MNIST"),
    "fmnist": _torchvision("FashionMNIST"),
    "kmnist": _torchvision("KMNIST"),
    "cifar10": _torchvision("CIFAR10"),
    "digits": _digits,
}


class _Images(Dataset[Any]):
    """Image files, decoded when asked for: uint8 tensors of shape `(channels, height, width)`, with labels if any."""

    def __init__(self, files: list[tuple[str, int | None]], options: Options) -> None:
        self.files = files
        self.options = options
        self.shape: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.files)

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
        if tuple(image.shape) != self.shape:
            raise DataError(
                f"{path} has shape {tuple(image.shape)} and the images before it {self.shape}; "
                "make them alike with ?size=PIXELS"
            )
        return image if label is None else (image, label)


def _image_folder(address: Address, root: Path, split: Split, options: Options) -> Domain:
    """A folder with a folder of images for each class, by itself or under `train/` and `test/`.

    Classes are numbered over both splits together, so that a class that one of them lacks moves no other.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    if not root.is_dir():
        raise DataError(f"there is no folder {root}, which {address} names")
    splits = {name: root / name for name in SPLITS if _folders_in(root / name)}
    if options.split and not splits:
        raise DataError(f"{address}: {root} has no folders train/ and test/, so it has no splits to choose from")
    folder = splits.get(split) if splits else root
    if folder is None:
        raise DataError(f"{address}: there is no folder {root / split} with a folder for each class")
    classes = sorted({name for part in (splits.values() or [root]) for name in _folders_in(part)})
    numbers = {name: number for number, name in enumerate(classes)}
    files = make_dataset(str(folder), numbers, extensions=IMG_EXTENSIONS, allow_empty=True) if classes else []
    if not files:
        raise DataError(f"{folder} holds no images. Expected a folder for each class, with images in it")
    labels = torch.tensor([label for _, label in files], dtype=torch.long)
    return Domain(str(address), _Images(files, options), tuple(classes), labels, split if len(splits) == 2 else None)


def _images(address: Address, root: Path, options: Options) -> Domain:
    """All the images under a folder, however deep, without labels: logged inputs, say."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    for option in ("split", "classes"):
        if getattr(options, option) is not None:
            raise UsageError(f"{address}: images have no {option}, for they have no labels; imagefolder:PATH has")
    if not root.is_dir():
        raise DataError(f"there is no folder {root}, which {address} names")
    files = sorted(str(path) for path in root.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
    if not files:
        raise DataError(f"{root} holds no images, in itself or in any folder of it")
    return Domain(str(address), _Images([(path, None) for path in files], options))


def _folders_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
