"""What every command shares: its options, its errors and their exit codes."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from ewc_finetune.choices import CURVATURE_DTYPES, DEVICES, KFAC_DTYPES
from ewc_finetune.cli.config import check_named
from ewc_finetune.cli.printable import printable
from ewc_finetune.errors import EwcError
from ewc_finetune.hub.client import showing
from ewc_finetune.signals import Interrupted, noted

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130


class Command(click.Command):
    """A command whose errors are one sentence and an exit code; the traceback comes with --debug."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; what a file says may be quoted in its errors."""
        with _printable_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with a printer, turning exceptions into exit codes."""
        from ewc_finetune.cli.printer import Printer

        debug = ctx.params.pop("debug")
        ctx.params["printer"] = Printer(*(ctx.params.pop(name) for name in ("quiet", "verbose", "as_json")))
        try:
            quiet = ctx.params["printer"].quiet
            with _printable_errors(), showing(bars=not quiet and sys.stderr.isatty(), warnings=not quiet):
                check_named(ctx, ctx.params["printer"].note)
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if noted():  # nobody knows what was made of it on the way
                raise Interrupted from error
            if debug:
                _print_traceback()
            elif isinstance(error, (EwcError, OSError)):
                click.echo(f"Error: {printable(error)}", err=True)
            else:
                click.echo(
                    f"Error: {type(error).__name__}: {printable(error).strip() or 'no message'}\n"
                    "This is not an error that ewc-ft foresaw; run the command again with --debug and report what it "
                    "prints.",
                    err=True,
                )
            ctx.exit(error.exit_code if isinstance(error, EwcError) else 1)


@contextlib.contextmanager
def _printable_errors() -> Iterator[None]:
    """Make the messages of click's own errors safe to print."""
    try:
        yield
    except click.ClickException as error:
        error.message = printable(error.message)  # type: ignore[misc]  # it is shown by click, which takes it from there
        raise


def _print_traceback() -> None:
    for line in traceback.format_exc().splitlines():
        indented = line[: len(line) - len(line.lstrip(" "))]
        click.echo(indented + printable(line.strip(" ")), err=True)


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
