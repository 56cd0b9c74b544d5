"""Files of tables, read by pyarrow: texts with a separator, parquet and Arrow."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from ewc_finetune.errors import DataError, counted, first_line

# What stands between fields, the likeliest first, by what to call it.
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
# Characters of a file, and rows of it, by which its separator is found.
_LOOKED_AT, _ROWS_LOOKED_AT = 1 << 16, 50
# The most bytes of a field, and of the file that is parsed at once.
_LONGEST = 1 << 30
# Values that a compressed file may have for each of its bytes: more are no table, but meant to fill the memory.
_VALUES_PER_BYTE, _VALUES_ANYWAY = 1000, 1 << 20
# What stands in a text where there is no value.
_MISSING = ("", "NA", "N/A", "#N/A", "NaN", "nan", "NULL", "null")


# Numbers with points between thousands, and numbers with a comma as decimal point; in the syntax of RE2 too.
_THOUSANDS = r"^\s*[-+]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?\s*$"
_COMMA = r"^\s*[-+]?(\d*|[1-9]\d{0,2}(\.\d{3})+),\d+\s*$"

# The largest number of float32.
_LARGEST = float(np.finfo(np.float32).max)


class NoNumberError(Exception):
    """A value that is no number, at a row."""

    def __init__(self, row: int, value: str) -> None:
        self.row, self.value = row, value[:50]
        super().__init__(value)


@dataclass(frozen=True)
class Frame:
    """The columns of a file.

    Attributes:
        path: The file.
        columns: A pyarrow array to each name, all as long; texts are as they stand in the file.
        separator: What stands between the fields of a text; None for other files, whose rows have no lines.
        header: Whether the first line of a text has the names.
    """

    path: Path
    columns: dict[str, Any]
    separator: str | None = None
    header: bool = True

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(next(iter(self.columns.values()), ()))

    def where(self, row: int) -> str:
        """Say where a row is: in which line of a text, counted from 1."""
        if self.separator is None:
            return f"row {row + 1}"
        with self.path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=self.separator)
            left = row + self.header
            for fields in reader:
                left -= bool(fields)
                if left < 0:
                    break
            return f"line {reader.line_num}"

    def numbers(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return a column in float64, NaN where there is no value.

        Raises:
            NoNumberError: at the first value that is no number of float32.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        column = self.columns[name]
        if pa.types.is_string(column.type):
            column = self.texts(name)
        try:
            values: np.ndarray[Any, np.dtype[np.float64]]
            values = pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        except pa.ArrowException:
            return np.array([_number(value, row) for row, value in enumerate(column.to_pylist())])
        beyond = np.flatnonzero(np.abs(values) > _LARGEST)
        if len(beyond):
            raise NoNumberError(int(beyond[0]), str(values[beyond[0]]))
        return values

    def texts(self, name: str) -> Any:
        """Return a column as a pyarrow array of texts without spaces around them, null where there is no value."""
        import pyarrow as pa
        import pyarrow.compute as pc

        texts = pc.utf8_trim_whitespace(pc.cast(self.columns[name], pa.string()).combine_chunks())
        return pc.if_else(pc.is_in(texts, value_set=pa.array(_MISSING)), pa.scalar(None, pa.string()), texts)

    def missing(self, name: str) -> list[int]:
        """Return the rows in which a column has no value."""
        return [row for row, absent in enumerate(self.texts(name).is_null().to_pylist()) if absent]


def _number(value: Any, row: int) -> float:
    if value is None:
        return np.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = np.inf
    if not abs(number) <= _LARGEST:
        raise NoNumberError(row, str(value))
    return number


def read_table(path: Path, *, header: bool | None = None, decimal_comma: bool = False) -> Frame:
    """Read a file: parquet (`.parquet`, `.pq`), Arrow (`.arrow`, `.feather`), or a text whose separator is found.

    Args:
        path: The file. Nothing in it is run.
        header: Whether the first line of a text has the names of the columns; without, they are called `1`, `2`, ...
            Unless it is said, the first line is refused if it is all numbers.
        decimal_comma: Whether 1,5 is a number, and not 1.5.

    Raises:
        DataError: if it is no such table.
    """
    import pyarrow as pa

    csv.field_size_limit(_LONGEST)
    binary = _BINARY.get(path.suffix.lower())
    try:
        table, separator = (binary(path), None) if binary is not None else _read_text(path, header)
        table.validate(full=True)
        columns = {name: _plain(column, name) for name, column in zip(table.column_names, table.columns, strict=True)}
    except (pa.ArrowException, OSError, ValueError, MemoryError, csv.Error) as error:
        reason = first_line(error)
        if isinstance(error, UnicodeDecodeError) or "invalid UTF8" in reason:
            reason += ". Save it as UTF-8, which a spreadsheet calls CSV UTF-8"
        raise DataError(f"{path} cannot be read as a table: {reason}") from error
    if len(columns) != table.num_columns or not columns or not table.num_rows:
        raise _no_table(path)
    if decimal_comma:
        columns = {name: _with_points(column) for name, column in columns.items()}
    return Frame(path, columns, separator, header is not False)


def _with_points(column: Any) -> Any:
    """Return a column whose texts that are numbers with a comma have a point in its place.

    Where all points of a column can stand between thousands, as in 1.234 and 1.234,5, they do.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_string(column.type):
        return column
    thousands = pc.match_substring_regex(column, _THOUSANDS)
    if pc.all(pc.or_(thousands, pc.invert(pc.match_substring(column, ".")))).as_py():
        column = pc.if_else(thousands, pc.replace_substring(column, ".", ""), column)
    return pc.replace_substring_regex(column, r"^(\s*[-+]?\d*),(\d+\s*)$", r"\1.\2")


def _no_table(path: Path) -> DataError:
    return DataError(
        f"{path}: expected a first line with the names of the columns, all different, and rows below. Without names, "
        "say header=0, and call the columns by number from 1"
    )


def _plain(column: Any, name: str) -> Any:
    """Return a column as numbers or texts.

    Raises:
        ValueError: if it is neither.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = pc.cast(column, kind.value_type), kind.value_type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if number:
        return column
    if pa.types.is_decimal(kind):
        return pc.cast(column, pa.float64())
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise ValueError(f"its column {name!r} is {kind}; expected numbers or texts")
    return pc.cast(column, pa.string())


def _read_parquet(path: Path) -> Any:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        values = file.metadata.num_rows * file.metadata.num_columns
        if values > _VALUES_PER_BYTE * path.stat().st_size + _VALUES_ANYWAY:
            raise ValueError(f"it claims {values:,} values in {path.stat().st_size:,} bytes")
        return file.read()


def _read_arrow(path: Path) -> Any:
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        with pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file) as reader:
            return reader.read_all()


_BINARY: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys((".parquet", ".pq"), _read_parquet),
    **dict.fromkeys((".arrow", ".feather"), _read_arrow),
}
# How files of tables end.
ENDINGS = (".csv", ".tsv", *_BINARY)


def _read_text(path: Path, header: bool | None) -> tuple[Any, str]:
    """Read a text; also return its separator."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = list(StringIO(file.read(_LOOKED_AT), newline=""))
    separator, first = _find_separator(lines, path.suffix.lower() == ".tsv")
    if not first:
        raise _no_table(path)
    if header is None:
        _check_first(first, path)
    header = header is not False
    # A column without a name, as an index often is, has its number for one.
    names = [(name.strip() if header else "") or str(number) for number, name in enumerate(first, start=1)]
    if len(set(names)) < len(names):
        raise _no_table(path)
    uneven: list[Any] = []

    def seen(row: Any) -> str:
        uneven.append(row)
        return "error"

    try:
        table = arrow_csv.read_csv(
            path,
            arrow_csv.ReadOptions(
                use_threads=False,  # which would not know the number of a row that is wrong
                block_size=min(max(path.stat().st_size + 1, 1 << 20), _LONGEST),
                column_names=None if header else names,
            ),
            arrow_csv.ParseOptions(
                delimiter=separator,
                newlines_in_values=True,
                invalid_row_handler=seen,
            ),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(first if header else names, pa.string()), strings_can_be_null=False
            ),
        )
    except pa.ArrowInvalid as error:
        if uneven:
            raise DataError(_say_uneven(path, uneven[0], separator)) from error
        raise
    if table.num_rows and "\n" in table.column(table.num_columns - 1)[-1].as_py() and not _ends_in_quote(path):
        raise ValueError(f"a double quote in its last column, at row {table.num_rows + header}, is never closed")
    return table.rename_columns(names), separator


def _ends_in_quote(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1024))
        return file.read().rstrip().endswith(b'"')


def _say_uneven(path: Path, row: Any, separator: str) -> str:
    return (
        f"{path}, row {row.number}: {counted(row.actual_columns, 'field')}, and the first line has "
        f"{row.expected_columns}. "
        f"The separator was taken to be a {_SEPARATORS[separator]}; a field that has one in it stands in double quotes"
    )


def _check_first(first: Sequence[str], path: Path) -> None:
    """Refuse a first line that seems to be no header: names are no numbers."""
    if len(first) > 1 and all(map(is_number, first)):
        raise DataError(
            f"{path}: its first line is all numbers ({', '.join(first[:3])}{', ...' if len(first) > 3 else ''}), so it "
            "seems to have no names of columns. Say header=0, and call the columns by number from 1 (target=1), or "
            "header=1 if these are the names"
        )


def is_with_comma(text: str) -> bool:
    """Whether a text is a number if a comma is the decimal point: 1,5 or 1.234,5."""
    return "," in text and re.match(_COMMA, text) is not None


def is_number(text: str) -> bool:
    """Whether a text is read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _find_separator(lines: Sequence[str], tabs: bool) -> tuple[str, list[str]]:
    """Return the separator that cuts all rows into as many fields, and the fields of the first row.

    Args:
        lines: The beginning of the file.
        tabs: Whether its name says that it is the tab.
    """
    found: dict[str, list[list[str]]] = {}
    for separator in ("\t",) if tabs else _SEPARATORS:
        reader = csv.reader(lines, delimiter=separator)
        rows: list[list[str]] = []
        try:
            for row in reader:
                rows += [row] if row else []
                if len(rows) > _ROWS_LOOKED_AT:
                    break
        except csv.Error:  # a field longer than csv takes
            pass
        found[separator] = rows
        whole = rows[:-1] if len(rows) > 2 else rows  # the last may have been cut off
        if len({len(row) for row in whole}) == 1 and len(rows[0]) > 1:
            return separator, rows[0]
    # None fits, or there is one column: what stands in the first line oftenest is meant, if anything does.
    separator = max(found, key=lambda one: len(found[one][0]) if found[one] else 0)
    return separator, found[separator][0] if found[separator] else []
