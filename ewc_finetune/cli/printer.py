"""One printer for people and machines: remarks, bars and tables on stderr, one JSON document on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import click
from tqdm import tqdm

from ewc_finetune.provenance import Provenance


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
        as_json: Print the result on stdout as JSON too.
    """

    def __init__(self, quiet: bool, as_json: bool) -> None:
        self.quiet = quiet
        self.as_json = as_json

    def note(self, message: str) -> None:
        """Print one remark, above any bar."""
        if not self.quiet:
            tqdm.write(message, file=sys.stderr)

    @contextmanager
    def bar(self, title: str, total: int | None, unit: str) -> Iterator[_Bar]:
        """Draw a bar with speed and time left; without a terminal, a line a minute."""
        seldom = {} if sys.stderr.isatty() else {"mininterval": 60.0, "maxinterval": 60.0}
        with tqdm(
            desc=title,
            total=total,
            unit=f" {unit}",
            disable=self.quiet,
            file=sys.stderr,
            dynamic_ncols=True,
            **seldom,
        ) as bar:
            yield _Bar(bar)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: the first column to the left, the others to the right."""
        if self.quiet or not rows:
            return
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

    def document(self, found: Document) -> None:
        """Print facts for people, and all that was found for machines."""
        self.facts(found.facts)
        self.result(found.to_json())

    def result(self, document: Any) -> None:
        """Print the result for machines, where they asked for it."""
        if self.as_json:
            click.echo(json.dumps(document, indent=2, default=str))


def importance_table(printer: Printer, origin: Provenance) -> None:
    """Print a row for each layer of an anchor."""
    errors = (origin.standard_error or {}).get("layers", {})
    printer.table(
        ["layer", "parameters", "share of curvature", "error", "mean", "max"],
        [
            [
                layer["layer"],
                f"{layer['parameters']:,}",
                f"{layer['share']:.1%}",
                "-" if errors.get(layer["layer"]) is None else f"{errors[layer['layer']]:.1%}",
                f"{layer['mean']:.2e}",
                f"{layer['max']:.2e}",
            ]
            for layer in origin.importance
        ],
    )


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def advance(self, count: int, **figures: float | str) -> None:
        """Move the bar, with the figures behind it."""
        if figures:
            self._bar.set_postfix(figures, refresh=False)
        self._bar.update(count)
