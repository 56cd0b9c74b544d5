"""One printer for people and machines: remarks, bars and tables on stderr, one JSON document on stdout."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import click
from tqdm import tqdm

from ewc_finetune.cli.printable import printable
from ewc_finetune.cli.result import print_result
from ewc_finetune.progress import Bar

_SECONDS_BETWEEN_LINES = 60.0


class Document(Protocol):
    """What a verb found, for people and machines."""

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What a person wants to know, each with its name."""

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""


class Printer:
    """Draws the progress of a verb, and its result at the end.

    Args:
        quiet: Draw nothing.
        verbose: Print the details too.
        as_json: Print the result on stdout as JSON too.
        command: The command's name.
    """

    def __init__(self, quiet: bool = False, verbose: bool = False, as_json: bool = False, command: str = "") -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.as_json = as_json
        self.command = command

    def note(self, message: str) -> None:
        """Print one remark, above any bar."""
        if not self.quiet:
            tqdm.write(printable(message), file=sys.stderr)

    def detail(self, message: str) -> None:
        """Print what only those want to know who ask for everything."""
        if self.verbose:
            self.note(message)

    @contextmanager
    def bar(self, title: str, total: int | None, unit: str) -> Iterator[Bar]:
        """Draw a bar with speed and time left; without a terminal or notebook, print a line a minute."""
        title, bars = printable(title), _notebook_bars()
        if not self.quiet and bars is None and not sys.stderr.isatty():
            yield _Lines(title, total, unit, self.note)
            return
        with (bars or tqdm)(
            desc=title, total=total, unit=f" {unit}", disable=self.quiet, file=sys.stderr, dynamic_ncols=True
        ) as bar:
            yield _Bar(bar)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: the first column to the left, the others to the right."""
        if self.quiet or not rows:
            return
        headers, rows = [printable(cell) for cell in headers], [[printable(cell) for cell in row] for row in rows]
        widths = [max(len(row[i]) for row in (headers, *rows)) for i in range(len(headers))]
        for row in (headers, ["-" * width for width in widths], *rows):
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            click.echo("  ".join(cells).rstrip(), err=True)

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Print facts, a line each, their names in a column."""
        for name, value in facts:
            self.note(f"{name:<15}{value}")

    def document(self, result: Document, kind: str) -> None:
        """Print facts for people, and all that was found for machines."""
        self.facts(result.facts)
        self.result(result.to_json(), kind)

    def result(self, document: dict[str, Any], kind: str | None = None) -> None:
        """Print the result for machines, where they asked for it.

        Args:
            document: What was found.
            kind: What kind of document that is (`result.VERSIONS`); called as the command unless given.
        """
        if self.as_json:
            print_result(kind or self.command, self.command, document)


def _notebook_bars() -> Any:
    """Return tqdm's bars for notebooks; None outside of one, or where its widgets are not installed."""
    if "ipykernel" not in sys.modules:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says so where there are no widgets, and a line a minute will do
        from tqdm.auto import tqdm as bars
        from tqdm.notebook import tqdm_notebook
    return bars if issubclass(bars, tqdm_notebook) else None


class _Lines:
    """Says in words, once a minute, how far work has come."""

    def __init__(self, title: str, total: int | None, unit: str, say: Callable[[str], None]) -> None:
        self._title, self._total, self._unit, self._say = title, total, unit, say
        self._done = 0
        self._began = self._said = time.monotonic()

    def advance(self, count: int, **figures: float | str) -> None:
        """Count, and say it if a minute has passed since the last time."""
        self._done += count
        now = time.monotonic()
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = now
        taken = now - self._began
        parts = [f"{self._title}: {self._done:,}" + (f" of {self._total:,}" if self._total else "") + f" {self._unit}s"]
        if self._total and self._done:
            parts[0] += f" ({self._done / self._total:.0%})"
            parts.append(f"{tqdm.format_interval(taken / self._done * (self._total - self._done))} left")
        parts += [
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
        ]
        self._say(", ".join(parts))


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, count: int, **figures: float | str) -> None:
        """Move the bar, with the figures behind it."""
        if figures:
            shown = {n: printable(value) if isinstance(value, str) else value for n, value in figures.items()}
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update(count)
