"""Files of arrays and tables: `npz:` and `csv:`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ewc_finetune.choices import Split
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.numbering import AS_LISTED, BY_NAME, number
from ewc_finetune.data.options import DataOptions
from ewc_finetune.data.texts import Texts, refuse_split
from ewc_finetune.errors import DataError, EwcError, UsageError, suggest
from ewc_finetune.specs.query import Address

# The most characters that a field of a table may have.
_LONGEST = 1 << 30
# The names by which columns and arrays are found where the spec does not name them.
TEXTS = ("text", "sentence", "content")
TARGETS = ("label", "labels", "target", "y")
_INPUTS = ("x", "inputs", "images", "features", "data")


def load_npz(address: Address, place: str, split: Split, options: DataOptions) -> Domain:
    """Read arrays: `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`; nothing in the file is run."""
    path = _file(address, place, "npz:arrays.npz?inputs=x&target=y")
    with _opened(path) as file:
        names = list(file.files)
        ending = f"_{split}" if any(name.endswith("_test") for name in names) else ""
        if options.split and not ending:
            raise DataError(f"{address}: {path} has no arrays that end in _train and _test, so it has no splits")
        inputs = _choose(options.inputs, _INPUTS, names, address, "inputs", ending)
        target = _choose(options.target, TARGETS, names, address, "target", ending, needed=False)
        tensors, classes = [_tensor(file[str(inputs)], f"{path}: {inputs}")], None
        if target is not None:
            labels, classes = _labels_of_array(file, target, options, str(path))
            tensors.append(labels)
        elif options.labels is not None:
            raise UsageError(f"{address}: labels= names classes, and there is no array of labels; name it with target=")
    if len({len(tensor) for tensor in tensors}) > 1:
        raise DataError(f"{path}: {inputs} has {len(tensors[0])} samples and {target} {len(tensors[1])}")
    return Domain(
        str(address),
        TensorDataset(*tensors),
        classes,
        tensors[1] if len(tensors) > 1 else None,
        split if ending else None,
        numbering=numbering_of(classes, options),
    )


def _labels_of_array(file: Any, target: str, options: DataOptions, path: str) -> tuple[Tensor, tuple[str, ...] | None]:
    """Return the labels in an array, and their names where they are texts, or named by `labels`."""
    array = file[target]
    if array.dtype.kind not in "US" and options.labels is None:
        return _tensor(array, f"{path}: {target}"), None
    if array.ndim != 1 or array.dtype.kind not in "USbui":
        raise DataError(f"{path}: {target} is {array.dtype} of shape {array.shape}; expected one class for each sample")
    values = _texts(array)
    names = options.labels
    if names is None and target.endswith(("_train", "_test")):  # a class that one of them lacks moves no other
        both = [target.rpartition("_")[0] + ending for ending in ("_train", "_test")]
        names = tuple(sorted({value for name in both if name in file.files for value in _texts(file[name])}))
    return number(values, names, f"{path}: {target}")


def _texts(array: Any) -> list[str]:
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in array.tolist()]


def numbering_of(classes: tuple[str, ...] | None, options: DataOptions) -> str | None:
    """Return how names came to their numbers; None without any."""
    if classes is None:
        return None
    return BY_NAME if options.labels is None else AS_LISTED


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            yield file
    except EwcError:
        raise
    except Exception as error:  # damaged archives fail in many ways
        reason = str(error)[:200] or type(error).__name__
        raise DataError(f"{path} cannot be read as arrays ({reason}). Expected what numpy.savez wrote") from error


def load_csv(address: Address, place: str, split: Split, options: DataOptions) -> Domain:
    """Read a table with a header: a column of texts, or all but the target as numbers."""
    path = _file(address, place, "csv:table.csv?target=label")
    refuse_split(address, options)
    csv.field_size_limit(_LONGEST)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            rows = [row for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table ({error})") from error
    if len(set(header)) != len(header) or not rows:
        raise DataError(f"{path}: expected a first line with the names of the columns, all different, and rows below")
    for n, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise DataError(f"{path}, row {n}: {len(row)} columns, and the first line names {len(header)}")
    columns: Mapping[str, Sequence[str]] = dict(zip(header, zip(*rows, strict=True), strict=True))
    targets = target_columns(options.target, list(header), str(address))
    where = f"{path}: {', '.join(targets)}"
    labels, classes = labels_of([columns[name] for name in targets], where, options.labels)
    numbering = numbering_of(classes, options)
    text = options.text or next((name for name in TEXTS if name in columns), None)
    if text is not None:
        check_column(text, list(header), str(address), "text")
        samples = Texts(columns[text], labels, options.length, options.pack)
        return Domain(str(address), samples, classes, labels, numbering=numbering)
    features = [name for name in header if name not in targets]
    if not features:
        raise DataError(f"{path} has no column beside the target")
    try:
        numbers = torch.stack([_numbers(columns[name], f"{path}: {name}") for name in features], dim=1)
    except DataError as error:
        raise DataError(
            f"{error}. Name the column of texts (text=COLUMN) or of the target (target=COLUMN); it has "
            f"{', '.join(header)}"
        ) from error
    parts = (numbers,) if labels is None else (numbers, labels)
    return Domain(str(address), TensorDataset(*parts), classes, labels, numbering=numbering)


def target_columns(asked: str | None, columns: Sequence[str], where: str) -> list[str]:
    """Return the columns of the targets: those named, `a,b`, else one that is usually called so, else none."""
    named = asked.split(",") if asked else [name for name in TARGETS if name in columns][:1]
    for name in named:
        check_column(name, columns, where, "target")
    return named


def check_column(name: str, columns: Sequence[str], where: str, what: str) -> None:
    """Refuse a column that isn't there.

    Raises:
        UsageError: listing those that are.
    """
    if name not in columns:
        raise UsageError(f"{where}: there is no column {name!r} for the {what}. {suggest(name, columns)}")


def labels_of(
    columns: Sequence[Sequence[Any]], where: str, names: tuple[str, ...] | None = None
) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Make labels of columns: class numbers, names of classes, or numbers, several to each.

    Args:
        columns: The columns with the targets.
        where: The name of the table in messages.
        names: The names of the model's outputs, in their order, where labels are to be numbered by them.

    Returns:
        The labels, None without columns, and the names of the classes where labels were names.
    """
    if names is not None and len(columns) != 1:
        raise UsageError(f"{where}: labels= names the classes in one column; there are {len(columns)} of targets")
    if not columns:
        return None, None
    for column in columns:
        for n, value in enumerate(column, start=1):
            if value is None or value == "":
                raise DataError(f"{where}: sample {n} has no label. Leave it out, or give it one")
    if len(columns) > 1:
        return torch.stack([_numbers(column, where) for column in columns], dim=1), None
    (column,) = columns
    if names is not None:
        return number([str(value) for value in column], names, where)
    if isinstance(column[0], Sequence) and not isinstance(column[0], str):
        return _several(column, where), None
    if all(isinstance(value, int) or (isinstance(value, str) and value.strip().isdecimal()) for value in column):
        whole = [int(value) for value in column]
        if max(map(abs, whole)) >= 1 << 63:
            raise DataError(f"{where}: {max(whole, key=abs)} is larger than any class")
        return torch.tensor(whole), None
    return _numbers_or_names(column, where)


def _numbers_or_names(column: Sequence[Any], where: str) -> tuple[Tensor, tuple[str, ...] | None]:
    try:
        return _numbers(column, where), None
    except DataError:
        return number([str(value) for value in column], None, where)


def _several(column: Sequence[Any], where: str) -> Tensor:
    """Make labels of a column of lists, all as long."""
    lengths = {len(value) if isinstance(value, Sequence) else 1 for value in column}
    if len(lengths) > 1:
        raise DataError(f"{where}: its lists are of different lengths, {', '.join(map(str, sorted(lengths)))}")
    return torch.stack([_numbers(part, where) for part in zip(*column, strict=True)], dim=1)


def _numbers(column: Sequence[Any], where: str) -> Tensor:
    values = []
    for n, value in enumerate(column, start=1):
        try:
            values.append(float(value))
        except (TypeError, ValueError):
            raise DataError(f"{where}, sample {n}: {str(value)[:50]!r} is not a number") from None
    return torch.tensor(values)


def _tensor(array: Any, where: str) -> Tensor:
    if array.dtype.kind not in "buif" or array.ndim == 0:
        raise DataError(f"{where} is {array.dtype} of shape {array.shape}; expected numbers, samples first")
    if array.dtype.kind in "ui" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if array.dtype.kind == "f":  # of any width and byte order
        array = array.astype(np.float16 if array.dtype.itemsize == 2 else np.float32)
    return torch.from_numpy(np.array(array))


def _choose(
    asked: str | None,
    usual: Sequence[str],
    names: Sequence[str],
    address: Address,
    what: str,
    ending: str,
    *,
    needed: bool = True,
) -> str | None:
    """Return the array that is asked for, or usual, of the split."""
    for name in [asked] if asked else usual:
        for candidate in (f"{name}{ending}", name):
            if candidate in names:
                return candidate
    if asked or needed:
        raise UsageError(
            f"{address}: which array are the {what}? Name it with {what}=NAME. It has {', '.join(names) or 'none'}"
        )
    return None


def _file(address: Address, place: str, example: str) -> Path:
    if not place:
        raise UsageError(f"{address}: name the file, as in {example}")
    path = Path(place).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file {path}, which {address} names")
    return path
