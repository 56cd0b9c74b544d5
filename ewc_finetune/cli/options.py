"""Options that several commands have, and only on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ewc_finetune.cli.grouped_help import plain_option
from ewc_finetune.specs.groups import Group

F = TypeVar("F", bound=Callable[..., Any])


def trust_option(function: F) -> F:
    """Add the option of every command that opens a checkpoint."""
    return plain_option(
        "--trust-code",
        group=Group.COMPUTING,
        main=False,
        is_flag=True,
        help="Let code in the checkpoint run (a pickled module): only for files whose maker you know and trust.",
    )(function)


def dry_run_option(function: F) -> F:
    """Add the option of every command whose work takes long."""
    return plain_option(
        "--dry-run",
        group=Group.OUTPUT,
        is_flag=True,
        help="Check everything, try a few batches, say what time and memory the run needs and what it writes; write "
        "nothing.",
    )(function)


def printing_options(function: F) -> F:
    """Add the options that every command has."""
    told = {
        "debug": "Show the traceback of an error.",
        "quiet": "Print nothing but errors.",
        "verbose": "Print every line of the log, and what else there is to know.",
        "json": "Print one JSON document on stdout, of errors too.",
    }
    for name, text in told.items():
        names = (f"--{name}", "as_json") if name == "json" else (f"--{name}",)
        function = plain_option(*names, group=Group.MESSAGES, main=False, is_flag=True, help=text)(function)
    return function
