"""What every command shares: its options, its errors and their exit codes."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import click

from ewc_finetune.cli.config import check_named
from ewc_finetune.cli.printable import printable
from ewc_finetune.errors import EwcError
from ewc_finetune.hub.client import showing
from ewc_finetune.storage.signals import Interrupted, noted

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
