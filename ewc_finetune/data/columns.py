"""What is kept of a table: which columns are inputs, in what order, by which numbers, and the unit of its targets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ewc_finetune.errors import counted, few
from ewc_finetune.storage.json_fields import has, is_number, is_text, list_of, nullable, optional

# The most categories of a column; one with more has names or texts.
MOST_CATEGORIES = 1000


@dataclass(frozen=True)
class Column:
    """A column, and what is done to it in this order.

    Attributes:
        name: What it is called.
        categories: Its texts, each of which becomes an input that is 1 where the column has it and 0 otherwise; None
            for a column of numbers.
        fill: What stands for a missing number; None: there must be none missing. 0 for categories: a missing one is
            none of them.
        mean: Subtracted from the numbers, which are divided by `std` then; None where they stay as they are.
        std: There is none without `mean`.
    """

    name: str
    categories: tuple[str, ...] | None = None
    fill: float | None = None
    mean: float | None = None
    std: float | None = None

    @property
    def width(self) -> int:
        """How many inputs it becomes."""
        return 1 if self.categories is None else len(self.categories)

    def to_json(self) -> dict[str, Any]:
        """Return what is said, as JSON has it."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return said if self.categories is None else {**said, "categories": list(self.categories)}


def describe(columns: Sequence[Column]) -> str:
    """Say what is done to columns, for people; empty if nothing is."""
    categories = [f"{one.name} as one of {counted(one.width, 'text')}" for one in columns if one.categories]
    standardised = sum(one.mean is not None for one in columns)
    filled = sum(one.fill is not None for one in columns)
    parts = [
        f"{counted(standardised, 'column')} standardised" if standardised else "",
        few(categories),
        f"missing values filled in {counted(filled, 'column')}" if filled else "",
    ]
    return ", ".join(filter(None, parts))


def columns_of(document: Mapping[str, Any]) -> str:
    """Say which columns a record of inputs has and what is done to them, for people; nothing if it has none."""
    columns, unit = read_columns(document), document.get("target_unit")
    names, target = ", ".join(column.name for column in columns), f"targets divided by {unit:,g}" if unit else ""
    return "; ".join(filter(None, (names, describe(columns), target)))


def read_columns(document: Mapping[str, Any]) -> tuple[Column, ...]:
    """Return the columns that a record of inputs has, none if it has none; see `is_table_record`."""
    return tuple(
        Column(
            one["name"],
            None if one.get("categories") is None else tuple(one["categories"]),
            **{name: one.get(name) for name in ("fill", "mean", "std")},
        )
        for one in document.get("columns") or ()
    )


def is_table_record(document: Mapping[str, Any]) -> bool:
    """Whether what a file says of columns and of the unit of targets, among other things, can be so."""
    if not has(columns=optional(nullable(list_of(_is_column))), target_unit=optional(nullable(_is_divisor)))(document):
        return False
    columns = document.get("columns") or []
    return len({one["name"] for one in columns}) == len(columns) and all(map(_can_be_done, columns))


def _can_be_done(column: Mapping[str, Any]) -> bool:
    names = column.get("categories")
    if names is not None and not (len(set(names)) == len(names) <= MOST_CATEGORIES):
        return False
    if names is not None and (column.get("mean") is not None or column.get("fill")):
        return False
    return (column.get("mean") is None) == (column.get("std") is None)


def _is_divisor(value: Any) -> bool:
    return is_number(value) and value > 0 and math.isfinite(1 / value)


_is_column = has(
    name=is_text,
    categories=optional(nullable(list_of(is_text))),
    fill=optional(nullable(is_number)),
    mean=optional(nullable(is_number)),
    std=optional(nullable(_is_divisor)),
)
