"""Files of tables: `table:`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ewc_finetune.choices import Split
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.encoding import Rows
from ewc_finetune.data.numbering import AS_LISTED, BY_NAME, number
from ewc_finetune.data.options import DataOptions
from ewc_finetune.data.table import Table
from ewc_finetune.data.table_files import Frame, NoNumberError, is_number, is_with_comma, read_table
from ewc_finetune.data.texts import Texts, as_texts
from ewc_finetune.errors import DataError, UsageError, counted, suggest
from ewc_finetune.specs.query import Address

# The names by which columns and arrays are found where the spec does not name them.
TEXTS = ("text", "sentence", "content")
TARGETS = ("label", "labels", "target", "y")


def numbering_of(classes: tuple[str, ...] | None, options: DataOptions) -> str | None:
    """Return how names came to their numbers; None without any."""
    if classes is None:
        return None
    return BY_NAME if options.labels is None else AS_LISTED


def load_table(address: Address, place: str, split: Split, options: DataOptions) -> Domain:
    """Read a table: a column of texts, or all but the target as numbers and categories."""
    path = file_of(address, place, "table:rows.csv?target=price")
    if options.split and options.test is None:
        raise UsageError(
            f"{address}: one file has no splits to choose from; name the file of the other split, or hold a part out "
            "for it (test=0.2)"
        )
    frame = read_table(path, header=options.header, decimal_comma=options.decimal == "comma")
    names = list(frame.columns)
    targets = target_columns(options.target, names, str(address))
    for asked, option in ((options.ignore, "ignore"), (options.onehot, "onehot")):
        for name in () if isinstance(asked, bool) else asked:
            check_column(name, names, str(address), f"option {option}=")
    labels, classes = _targets(frame, targets, options)
    training, rows = _split_rows(frame, split, options, address)
    labels = None if labels is None else labels[torch.from_numpy(rows)]
    texts = text_columns(options.text, [name for name in names if name not in options.ignore], str(address))
    samples: Texts | Table
    if texts:
        if options.encodes:
            said = " and ".join(map(repr, texts))
            raise UsageError(f"{address}: its samples are texts ({said}), so no columns of it are made numbers")
        columns = [frame.columns[name].take(rows).to_pylist() for name in texts]
        samples = Texts(as_texts(columns), labels, options.length, options.pack)
    else:
        features = tuple(name for name in names if name not in (*targets, *options.ignore))
        if not features:
            raise DataError(f"{path} has no column beside the target")
        samples = Table(frame, features, options, training, rows, labels)
    own = None if options.test is None else split
    numbering = numbering_of(classes, options)
    return Domain(str(address), samples, classes, labels, own, numbering=numbering, target_unit=options.unit)


def _split_rows(frame: Frame, split: Split, options: DataOptions, address: Address) -> tuple[Rows, Rows]:
    """Return the rows of the training data, and those of the split; all of them where nothing is held out."""
    every: Rows = np.arange(frame.rows)
    if options.test is None:
        return every, every
    held_out = round(options.test * frame.rows)
    if not 0 < held_out < frame.rows:
        raise DataError(f"{address}: test={options.test:g} of {counted(frame.rows, 'row')} leaves a split without any")
    order = torch.randperm(frame.rows, generator=torch.Generator().manual_seed(options.seed)).numpy()
    training = np.sort(order[held_out:])
    return training, training if split == "train" else np.sort(order[:held_out])


def _targets(
    frame: Frame, targets: Sequence[str], options: DataOptions
) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return the labels of all rows, and the names of the classes where labels were names.

    Raises:
        DataError: naming column and line of a label that is missing, or is no number where most are.
    """
    for name in targets if options.labels is None else ():
        missing = frame.missing(name)
        if missing:
            more = f" and in {counted(len(missing) - 1, 'more row')}" if len(missing) > 1 else ""
            raise DataError(
                f"{frame.path}: the target {name!r} has no label in {frame.where(missing[0])}{more}. Leave such rows "
                "out, or give them one"
            )
        _check_numbers(frame, name)
    columns = [frame.columns[name].to_pylist() for name in targets]
    labels, classes = labels_of(columns, f"{frame.path}: {', '.join(targets)}", options.labels)
    return in_unit(labels, classes, options, f"{frame.path}: {', '.join(targets)}"), classes


def in_unit(labels: Tensor | None, classes: tuple[str, ...] | None, options: DataOptions, where: str) -> Tensor | None:
    """Divide numbers to predict by what the spec says, if it does.

    Raises:
        UsageError: if they are names of classes.
    """
    if options.unit is None or labels is None:
        return labels
    if classes is not None:
        raise UsageError(f"{where}: unit= is of numbers to predict, and the target has names of classes")
    return labels / options.unit


def _check_numbers(frame: Frame, name: str) -> None:
    """Refuse a target of numbers with something else among them, which would be taken for names of classes."""
    try:
        frame.numbers(name)
    except NoNumberError as error:
        values = frame.texts(name).to_pylist()
        others = [value for value in values if not is_number(value)]
        start = f"{frame.path}, {frame.where(error.row)}: the target {name!r} is {error.value!r}"
        if others and all(map(is_with_comma, others)):
            raise DataError(
                f"{start}. If a comma is the decimal point, say decimal=comma; those between thousands have to go; if "
                "such values are names of classes, labels= names all of them"
            ) from None
        if 2 * len(others) < len(values):
            raise DataError(
                f"{start}, and most of its values are numbers ({counted(len(others), 'value')} of {len(values):,} are "
                "not). Leave such rows out; if they are names of classes, labels= names all of them"
            ) from None


def target_columns(asked: str | None, columns: Sequence[str], where: str) -> list[str]:
    """Return the columns of the targets: those named, `a,b`, else one that is usually called so, else none."""
    named = asked.split(",") if asked else [name for name in TARGETS if name in columns][:1]
    for name in named:
        check_column(name, columns, where, "target")
    return named


def text_columns(asked: tuple[str, ...] | None, columns: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the column of the texts, or the two of pairs: as named, else one that is usually called so, else none."""
    names = asked or tuple(name for name in TEXTS if name in columns)[:1]
    for name in names:
        check_column(name, columns, where, "text")
    return names


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
    if all(isinstance(value, int) or (isinstance(value, str) and _is_whole(value)) for value in column):
        whole = [int(value) for value in column]
        if max(map(abs, whole)) >= 1 << 63:
            raise DataError(f"{where}: {max(whole, key=abs)} is larger than any class")
        return torch.tensor(whole), None
    return _numbers_or_names(column, where)


def _is_whole(text: str) -> bool:
    return text.strip().removeprefix("-").isdecimal()


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


def file_of(address: Address, place: str, example: str) -> Path:
    """Return the file that a spec names.

    Raises:
        UsageError: showing an example, if it names none.
        DataError: if it is not there.
    """
    if not place:
        raise UsageError(f"{address}: name the file, as in {example}")
    path = Path(place).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file {path}, which {address} names")
    return path
