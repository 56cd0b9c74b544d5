"""From columns of a table to inputs of a model, by the numbers of the training data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ewc_finetune.data.columns import MOST_CATEGORIES, Column
from ewc_finetune.data.options import DataOptions
from ewc_finetune.data.table_files import Frame, NoNumberError, is_with_comma
from ewc_finetune.errors import DataError, counted, few

# So many categories may be of few rows each; with more, they are half as many as the rows at most.
_FEW_CATEGORIES = 20
# Numbers of rows.
Rows = np.ndarray[Any, np.dtype[np.int64]]


def renamed(columns: Sequence[Column], names: Sequence[str], frame: Frame) -> tuple[Column, ...]:
    """Return the columns of a model's record under the names that a file has.

    Args:
        columns: The record.
        names: Columns of the file that may be inputs.
        frame: The file.

    Raises:
        DataError: naming those that it lacks.
    """
    lacking = [one.name for one in columns if one.name not in names]
    if not lacking:
        return tuple(columns)
    unnamed = all(name.isdecimal() for name in names) or all(one.name.isdecimal() for one in columns)
    if unnamed and len(columns) == len(names):  # without a header there is only the order
        return tuple(replace(one, name=name) for one, name in zip(columns, names, strict=True))
    raise DataError(
        f"{frame.path} has no column {few([repr(name) for name in lacking])}, which the model was trained on; beside "
        f"the target it has {few(names) or 'none'}. Name its columns as the training data did"
    )


def find_columns(frame: Frame, names: Sequence[str], options: DataOptions, training: Rows) -> tuple[Column, ...]:
    """Find what to do to columns that no record says anything of.

    Args:
        frame: The file.
        names: Those of its columns that are inputs.
        options: What the data spec says.
        training: The rows whose numbers and categories count.

    Raises:
        DataError: naming the columns that are texts and not to be categories, or have too many.
    """
    found, texts = [], []
    for name in names:
        try:
            if isinstance(options.onehot, tuple) and name in options.onehot:
                found.append(_find_categories(frame, name, training))
                continue
            frame.numbers(name)
        except NoNumberError as error:
            if options.onehot is True:
                found.append(_find_categories(frame, name, training))
            else:
                texts.append((name, error))
            continue
        found.append(Column(name))
    if texts:
        said = [f"{name!r} ({error.value!r} in {frame.where(error.row)})" for name, error in texts]
        columns = "columns" if len(texts) > 1 else "column"
        commas = any(is_with_comma(error.value) for _, error in texts)
        listed = ",".join(name for name, _ in texts)
        raise DataError(
            f"{frame.path}: not all values are numbers in {columns} {few(said)}. "
            + (
                "If a comma is the decimal point, say decimal=comma; those between thousands have to go. "
                if commas
                else ""
            )
            + f"Leave out what says nothing (ignore={listed}), make categories of texts (onehot={listed}), or say "
            "which is the target or the text of each row (target=COLUMN, text=COLUMN). If the first line is a row like "
            "the others: header=0"
        )
    return tuple(found)


def _find_categories(frame: Frame, name: str, training: Rows) -> Column:
    categories = sorted(value for value in set(frame.texts(name).take(training).to_pylist()) if value is not None)
    if not categories:
        raise _no_values(frame, name)
    most = min(max(_FEW_CATEGORIES, len(training) // 2), MOST_CATEGORIES)
    if len(categories) > most:
        raise DataError(
            f"{frame.path}: column {name!r} has {len(categories):,} different values in {len(training):,} rows, which "
            f"are too many for categories (at most {most:,} here). Leave it out: ignore={name}"
        )
    return Column(name, tuple(categories))


def adjusted(columns: Sequence[Column], frame: Frame, options: DataOptions, training: Rows) -> tuple[Column, ...]:
    """Return columns with what a data spec says of missing values and of standardising.

    Numbers that they have already stay: what is asked for again is done as it was.

    Args:
        columns: As they were found, or as the model's record has them, under the names that the file has.
        frame: The file.
        options: What the data spec says.
        training: The rows whose mean and deviation count, of values that are there.

    Raises:
        DataError: if a column has no values there to take the mean of, or a value is no number.
    """
    return tuple(_adjusted(one, frame, options, training) for one in columns)


def _adjusted(column: Column, frame: Frame, options: DataOptions, training: Rows) -> Column:
    if column.categories is not None:
        return column if options.missing is None else replace(column, fill=0.0)
    mean = column.mean
    if options.standardise is False:
        column = replace(column, mean=None, std=None)
    elif options.standardise and column.mean is None:
        values = _numbers(frame, column)[training]
        there = values[~np.isnan(values)]
        mean = _mean(there, frame, column.name)
        deviation = float(there.std())
        # What is left of a constant by rounding is no deviation, and neither is what has no inverse.
        constant = deviation <= 1e-12 * abs(mean) or not math.isfinite(1 / deviation)
        column = replace(column, mean=mean, std=1.0 if constant else deviation)
    if isinstance(options.missing, float):
        return replace(column, fill=options.missing)
    if options.missing == "mean" and column.fill is None:
        if mean is not None:
            return replace(column, fill=mean)
        values = _numbers(frame, column)[training]
        return replace(column, fill=_mean(values[~np.isnan(values)], frame, column.name))
    return column


def _mean(values: np.ndarray[Any, Any], frame: Frame, name: str) -> float:
    if not len(values):
        raise _no_values(frame, name)
    return float(values.mean())


def _no_values(frame: Frame, name: str) -> DataError:
    return DataError(f"{frame.path}: column {name!r} has no values in the training data. Leave it out: ignore={name}")


def _numbers(frame: Frame, column: Column) -> np.ndarray[Any, np.dtype[np.float64]]:
    try:
        return frame.numbers(column.name)
    except NoNumberError as error:
        raise DataError(
            f"{frame.path}, {frame.where(error.row)}: {error.value!r} is no number, and column {column.name!r} is one "
            "of numbers for the model. Leave the row out, or leave the value empty and fill it (missing=mean)"
        ) from None


def encode(columns: Sequence[Column], frame: Frame, rows: Rows, *, unseen_zeros: bool) -> Tensor:
    """Return inputs of shape `(len(rows), inputs)`, float32.

    Args:
        columns: What is done to each.
        frame: The file, which has columns of these names.
        rows: The rows that are wanted.
        unseen_zeros: Whether a category that the columns don't know is none of them, rather than refused.

    Raises:
        DataError: naming column and line of a missing value without a filling, of a category that is not known, or of
            a number that float32 lacks.
    """
    inputs = np.zeros((len(rows), sum(one.width for one in columns)), np.float32)
    start = 0
    for one in columns:
        part = inputs[:, start : start + one.width]
        if one.categories is None:
            _encode_numbers(one, frame, rows, part)
        else:
            _encode_categories(one, frame, rows, part, unseen_zeros)
        start += one.width
    return torch.from_numpy(inputs)


def _encode_numbers(one: Column, frame: Frame, rows: Rows, part: np.ndarray[Any, Any]) -> None:
    values = _numbers(frame, one)[rows]
    missing = np.flatnonzero(np.isnan(values))
    if len(missing):
        if one.fill is None:
            raise _missing(frame, one.name, rows[missing])
        values[missing] = one.fill
    with np.errstate(over="ignore"):
        part[:, 0] = values if one.mean is None or one.std is None else (values - one.mean) / one.std
    large = np.flatnonzero(~np.isfinite(part[:, 0]))
    if len(large):
        raise DataError(
            f"{frame.path}, {frame.where(int(rows[large[0]]))}: {one.name!r} has a number beyond those of float32"
        )


def _missing(frame: Frame, name: str, rows: Rows) -> DataError:
    more = f" and in {counted(len(rows) - 1, 'more row')}" if len(rows) > 1 else ""
    return DataError(
        f"{frame.path}: column {name!r} has no value in {frame.where(int(rows[0]))}{more}. Fill what is missing "
        f"(missing=mean, or a number: missing=0), or leave the column out (ignore={name})"
    )


def _encode_categories(one: Column, frame: Frame, rows: Rows, part: np.ndarray[Any, Any], unseen_zeros: bool) -> None:
    numbers = {name: number for number, name in enumerate(one.categories or ())}
    encoded = frame.texts(one.name).take(rows).dictionary_encode()
    known = np.array([numbers.get(name, -1) for name in encoded.dictionary.to_pylist()] or [-1])
    chosen = known[encoded.indices.fill_null(0).to_numpy()] if len(encoded.dictionary) else np.full(len(rows), -1)
    missing = encoded.is_null().to_numpy(zero_copy_only=False)
    if missing.any() and one.fill is None:
        raise _missing(frame, one.name, rows[missing])
    unseen = np.flatnonzero((chosen < 0) & ~missing)
    if len(unseen) and not unseen_zeros:
        value = encoded.dictionary[int(encoded.indices[int(unseen[0])].as_py())].as_py()
        raise DataError(
            f"{frame.path}, {frame.where(int(rows[unseen[0]]))}: column {one.name!r} is {value[:50]!r}, a category "
            f"that the training data did not have; it had {few(list(one.categories or ()))}. Leave such rows out, or "
            "let it be none of them (unseen=zeros)"
        )
    there = np.flatnonzero((chosen >= 0) & ~missing)
    part[there, chosen[there]] = 1
