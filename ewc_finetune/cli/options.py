"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ewc_finetune.choices import (
    CURVATURE_DTYPES,
    DEVICES,
    KFAC_DTYPES,
)

F = TypeVar("F", bound=Callable[..., Any])


def only_one(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str:
    """Refuse an option that is given twice, where the last would win unnoticed."""
    if len(values) != 1:
        raise click.BadParameter(f"given {len(values)} times; this command takes one")
    return values[0]


def _rank(text: str) -> float | str:
    if text in ("auto", "full"):
        return text
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither auto, full, a share nor a whole number.") from None


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


def storage_options(function: F) -> F:
    """Add the options of every command that stores curvature."""
    for option in (
        click.option(
            "--curvature-dtype",
            type=click.Choice(CURVATURE_DTYPES),
            default=CURVATURE_DTYPES[0],
            show_default=True,
            help="Precision in which the diagonal is stored; what half precision costs is said.",
        ),
        click.option(
            "--kfac-dtype",
            type=click.Choice(KFAC_DTYPES),
            default=KFAC_DTYPES[0],
            show_default=True,
            help="Precision in which kept eigenvectors are stored; factors that are kept whole are in float32.",
        ),
        click.option(
            "--kfac-rank",
            type=_rank,
            default="auto",
            show_default=True,
            metavar="X",
            help="Eigenvectors to keep of each factor: those that hold a share of the trace (below 1), or so many; "
            "auto is 0.99, full keeps all.",
        ),
    ):
        function = option(function)
    return function


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


def common_options(function: F) -> F:
    """Add the options of every command that runs a model on data, and those that every command has."""
    for option in (
        printing_options,
        click.option(
            "--data-dir",
            type=click.Path(file_okay=False),
            help="Where downloaded data lies or goes.  [default: $EWC_FT_DATA, else ~/.cache/ewc-finetune/data]",
        ),
        click.option(
            "--device",
            type=click.Choice(DEVICES),
            default="auto",
            show_default=True,
            help="Where to compute.",
        ),
    ):
        function = option(function)
    return function
