"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def trust_option(function: F) -> F:
    """Add the option of every command that opens a checkpoint."""
    return click.option(
        "--trust-code",
        is_flag=True,
        help="Let code in the checkpoint run (a pickled module): only for files whose maker you know and trust.",
    )(function)


def dry_run_option(function: F) -> F:
    """Add the option of every command whose work takes long."""
    return click.option(
        "--dry-run",
        is_flag=True,
        help="Check everything, try a few batches, say what time and memory the run needs and what it writes; write "
        "nothing.",
    )(function)


def printing_options(function: F) -> F:
    """Add the options that every command has."""
    for option in (
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
        click.option("--quiet", is_flag=True, help="Print nothing but errors."),
        click.option("--verbose", is_flag=True, help="Print every line of the log, and what else there is to know."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
    ):
        function = option(function)
    return function
