"""Datasets of Hugging Face: on the Hub, or local files of parquet, JSON lines or CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ewc_finetune.choices import Split
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.numbering import BY_DATASET
from ewc_finetune.data.options import DataOptions
from ewc_finetune.data.tables import TEXTS, in_unit, labels_of, numbering_of, target_columns, text_columns
from ewc_finetune.data.texts import Texts, TextStream, as_texts
from ewc_finetune.errors import DataError, UsageError, first_line
from ewc_finetune.specs.query import Address

_IMAGES = ("image", "img")
_KINDS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
# The names of a dataset's splits that stand for ours; the first that there is.
_SPLITS = {"train": ("train",), "test": ("test", "validation")}


@dataclass(eq=False)
class ImageColumn(Dataset[Any]):
    """Images of a column: uint8 tensors of shape `(channels, height, width)`, with labels if any."""

    images: Sequence[Any]
    labels: Tensor | None
    options: DataOptions

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, indices: Sequence[int]) -> ImageColumn:
        """Return some of them, in this order."""
        labels = None if self.labels is None else self.labels[torch.as_tensor(indices, dtype=torch.long)]
        return replace(self, images=[self.images[index] for index in indices], labels=labels)

    def __getitem__(self, index: int) -> Tensor | tuple[Tensor, Tensor]:
        from torchvision.transforms.v2.functional import pil_to_tensor

        image = self.options.apply(pil_to_tensor(self.images[index].convert("RGB")))
        return image if self.labels is None else (image, self.labels[index])


def load_hugging_face(address: Address, place: str, split: Split, options: DataOptions) -> Domain:
    """Read a dataset of texts or images."""
    if not place:
        raise UsageError(f"{address}: name the dataset, as in hf:org/name?text=text&target=label or hf:reviews.jsonl")
    splits = _load(address, place, options)
    name = next((name for name in _SPLITS[split] if name in splits), None)
    only = len(splits) == 1 and not options.split
    if name is None and not only:
        raise DataError(f"{address}: there is no {split} split; it has {', '.join(splits)}")
    rows = splits[name] if name is not None else next(iter(splits.values()))
    return of_rows(rows, str(address), options, None if only else split)


def is_rows(data: object) -> bool:
    """Whether it is a dataset of the package datasets with texts or images; one of tensors is as any other."""
    columns = getattr(data, "column_names", None)
    return isinstance(columns, list) and any(name in columns for name in (*TEXTS, *_IMAGES))


def of_rows(rows: Any, name: str, options: DataOptions, split: Split | None = None) -> Domain:
    """Make a domain of a dataset of the package datasets.

    Args:
        rows: The dataset, which may be a stream.
        name: The name of this one in messages.
        options: Which columns have what.
        split: Which split it is, if it is one of several.

    Raises:
        UsageError: if there are no such columns, listing those that are there.
        DataError: if targets are neither numbers nor names.
    """
    columns = list(rows.column_names or [])
    targets = target_columns(options.target, columns, name)
    classes = _class_names(rows, targets)
    texts = text_columns(options.text, columns, name)
    if not hasattr(rows, "__len__"):
        if not texts or len(targets) > 1:
            raise UsageError(f"{name}: a stream is of texts, with one target at most; name the column with text=")
        if options.labels is not None:
            raise UsageError(f"{name}: the labels of a stream are not known beforehand; leave stream=1 or labels= out")
        target = targets[0] if targets else None
        stream = TextStream(rows, texts, target, length=options.length, unit=options.unit)
        return Domain(name, stream, classes, split=split, target_unit=options.unit)
    columns_of_targets = [rows[column] for column in targets]
    if options.labels is not None and classes is not None:
        columns_of_targets = [_by_name(columns_of_targets[0], classes, f"{name}: {targets[0]}")]
    labels, names = labels_of(columns_of_targets, f"{name}: {', '.join(targets)}", options.labels)
    numbering = BY_DATASET if names is None and classes is not None else numbering_of(names, options)
    classes = names or classes
    labels = in_unit(labels, classes, options, f"{name}: {', '.join(targets)}")
    if texts:
        samples = Texts(as_texts([rows[column] for column in texts]), labels, options.length, options.pack)
        return Domain(name, samples, classes, labels, split, numbering=numbering, target_unit=options.unit)
    image = next((column for column in _IMAGES if column in columns), None)
    if image is None:
        raise UsageError(
            f"{name}: which column has the texts? Name it with text=COLUMN, or text=A,B for pairs. It has "
            f"{', '.join(columns)}. A file of numbers and categories is table:FILE"
        )
    images = ImageColumn(rows[image], labels, options)
    return Domain(name, images, classes, labels, split, numbering=numbering, target_unit=options.unit)


def _by_name(labels: Sequence[Any], classes: Sequence[str], where: str) -> list[str]:
    """Return the names of a dataset's class numbers."""
    wrong = [value for value in labels if value is None or not 0 <= value < len(classes)]
    if wrong:
        raise DataError(f"{where}: {wrong[0]} is the number of no class of the {len(classes)} that it names")
    return [classes[value] for value in labels]


def _load(address: Address, place: str, options: DataOptions) -> Mapping[str, Any]:
    """Return the splits by name."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{address} needs the package datasets; install it: pip install 'ewc-finetune[transformers]'"
        ) from error
    path = Path(place).expanduser()
    settings: dict[str, Any] = {"streaming": options.stream, "name": options.config, "revision": options.revision}
    if path.is_file():
        if not path.stat().st_size:
            raise DataError(f"{path}, which {address} names, is empty")
        kind = _KINDS.get(path.suffix)
        if kind is None:
            raise UsageError(
                f"{address}: {path.suffix or 'no ending'} is none of {', '.join(_KINDS)}. A file of columns with any "
                "separator is table:FILE, one of lines text:FILE"
            )
        arguments, settings = (kind,), {"data_files": str(path), "streaming": options.stream}
    else:
        arguments = (str(path) if path.is_dir() else place,)
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        dataset: Mapping[str, Any] = datasets.load_dataset(*arguments, **settings)
    except Exception as error:
        raise DataError(
            f"{address} cannot be loaded ({first_line(error)}). Expected a dataset on the Hub, org/name, or a file or "
            "folder of parquet, JSON lines or CSV"
        ) from error
    finally:
        if shown:
            datasets.enable_progress_bars()
    return dataset


def _class_names(rows: Any, targets: Sequence[str]) -> tuple[str, ...] | None:
    feature = (rows.features or {}).get(targets[0]) if len(targets) == 1 else None
    names = getattr(feature, "names", None)
    return None if names is None else tuple(map(str, names))
