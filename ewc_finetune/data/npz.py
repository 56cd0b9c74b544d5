"""Files of arrays: `npz:`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from ewc_finetune.choices import Split
from ewc_finetune.data.arrays import Arrays
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.numbering import number
from ewc_finetune.data.options import DataOptions
from ewc_finetune.data.tables import TARGETS, file_of, numbering_of
from ewc_finetune.errors import DataError, EwcError, UsageError, suggest
from ewc_finetune.specs.query import Address

# The names by which the array of inputs is found where the spec does not name it.
_INPUTS = ("x", "inputs", "images", "features", "data")


def load_npz(address: Address, place: str, split: Split, options: DataOptions) -> Domain:
    """Read arrays: `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`; nothing in the file is run.

    Raises:
        UsageError: if arrays that are named are not there, or none can be told to be the inputs.
        DataError: if arrays are no numbers, or not all as long.
    """
    path = file_of(address, place, "npz:arrays.npz?inputs=x&target=y")
    with _opened(path) as file:
        names = list(file.files)
        ending = f"_{split}" if any(name.endswith("_test") for name in names) else ""
        if options.split and not ending:
            raise DataError(f"{address}: {path} has no arrays that end in _train and _test, so it has no splits")
        asked = options.inputs or (None,)
        inputs = [_choose(name, _INPUTS, names, address, "inputs", ending) or "" for name in asked]
        target = _choose(options.target, TARGETS, names, address, "target", ending, needed=False)
        if target in inputs:
            raise UsageError(f"{address}: {target} is an input and the target too; name the target: target=NAME")
        tensors = [_tensor(file[name], f"{path}: {name}") for name in inputs]
        labels, classes = (None, None) if target is None else _labels_of_array(file, target, options, str(path))
    if target is None and options.labels is not None:
        raise UsageError(f"{address}: labels= names classes, and there is no array of labels; name it with target=")
    _check_lengths(dict(zip(inputs, tensors, strict=True)) | ({} if labels is None else {str(target): labels}), path)
    samples: Dataset[Any] = TensorDataset(*tensors, *(() if labels is None else (labels,)))
    if options.inputs is not None and len(tensors) > 1:  # by the names of the spec, which no split is part of
        samples = Arrays(dict(zip(options.inputs, tensors, strict=True)), labels)
    numbering = numbering_of(classes, options)
    return Domain(str(address), samples, classes, labels, split if ending else None, numbering=numbering)


def _check_lengths(arrays: Mapping[str, Tensor], path: Path) -> None:
    if len({len(array) for array in arrays.values()}) > 1:
        said = [f"{name} {len(array):,}" for name, array in arrays.items()]
        raise DataError(f"{path}: its arrays have different numbers of samples: {', '.join(said)}")


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
    if asked:
        raise UsageError(f"{address}: there is no array {asked!r} for the {what}. {suggest(asked, names)}")
    if needed:
        raise UsageError(
            f"{address}: which array are the {what}? Name it with {what}=NAME, or several that go in by name with "
            f"{what}=A,B. It has {', '.join(names) or 'none'}"
        )
    return None
