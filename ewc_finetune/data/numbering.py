"""Labels that are names, and the numbers that stand for them: those of the model's outputs."""

from __future__ import annotations

import csv
from collections.abc import Sequence

import torch
from torch import Tensor

from ewc_finetune.errors import DataError, few

# So many names may be of one sample each; of more, at most this share of the labels are different ones.
_FEW_NAMES, _DIFFERENT = 20, 0.9
# The ways in which names of classes are numbered, in words.
BY_NAME = "in alphabetical order"
AS_LISTED = "in the order of labels="
BY_DATASET = "as the dataset does"


def read_names(text: str) -> tuple[str, ...]:
    """Read names joined by commas; one with a comma in it stands in double quotes.

    Raises:
        ValueError: if one is empty or comes twice.
    """
    names = next(csv.reader([text], strict=True, skipinitialspace=True), [])
    if not all(names) or len(set(names)) != len(names):
        raise ValueError
    return tuple(names)


def number(values: Sequence[str], names: tuple[str, ...] | None, where: str) -> tuple[Tensor, tuple[str, ...]]:
    """Number labels that are names.

    Args:
        values: The label of each sample.
        names: The names of all the model's outputs, in their order; the labels in alphabetical order unless given.
        where: The name of the data in messages.

    Returns:
        The numbers, and the names by number.

    Raises:
        DataError: if there is a label that is none of the names, or there are none and nearly all labels differ.
    """
    present = sorted(set(values))
    if names is None and len(present) > _FEW_NAMES and len(present) > _DIFFERENT * len(values):
        raise DataError(
            f"{where}: {len(present):,} of {len(values):,} labels are different, such as {present[0][:50]!r}, and "
            "hardly name classes. Are they what is to be predicted (target=NAME), or are text= and target= swapped? If "
            "each is a class, labels= names all of them"
        )
    names = tuple(present) if names is None else names
    check_names(present, names, where)
    numbers = {name: n for n, name in enumerate(names)}
    return torch.tensor([numbers[value] for value in values], dtype=torch.long), names


def check_names(present: Sequence[str], names: Sequence[str], where: str) -> None:
    """Refuse names of outputs that some label of the data is not among.

    Raises:
        DataError: naming such labels, and the names that no label has.
    """
    missing = [name for name in present if name not in set(names)]
    if missing:
        unused = [name for name in names if name not in set(present)]
        raise DataError(
            f"{where}: labels= does not name {few([repr(name) for name in missing])}, which samples are labelled with"
            + (f", and no sample is labelled {few([repr(name) for name in unused])}" if unused else "")
            + ". Name the model's outputs in their order, by the names that the data has"
        )
