"""What every command shares: its help, its errors and their exit codes."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from ewc_finetune.cli.config import check_named
from ewc_finetune.cli.grouped_help import help_all_option, write_groups
from ewc_finetune.cli.other_words import COMMANDS, meant
from ewc_finetune.cli.printable import printable
from ewc_finetune.cli.result import interrupted, print_error
from ewc_finetune.errors import EwcError
from ewc_finetune.hub.client import showing
from ewc_finetune.storage import signals

INTERRUPTED = 130
# The key under which click's context remembers that errors are wanted as JSON too.
_JSON = "ewc_finetune.cli.json"


class Commands(click.Group):
    """The program: finds the command that is meant, and prints every error as JSON too where that is wanted."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does. Whether JSON is wanted is known from the words alone, which may be wrong otherwise."""
        if "--json" in args:
            ctx.meta[_JSON] = True
            signals.end_with(lambda sentence, code: interrupted(ctx.invoked_subcommand, sentence, code))
        with _errors_as_json(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find a command, or say which one was probably meant."""
        known = [it for it, words in COMMANDS.items() if args[0].lower() in words.split()]
        if known and args[0] not in self.commands and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(known)}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        with _errors_as_json(ctx):
            return super().invoke(ctx)


class Command(click.Command):
    """A command whose errors are one sentence and an exit code; the traceback comes with --debug."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.params.append(help_all_option())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups."""
        write_groups(ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; what a file says may be quoted in its errors."""
        with _printable_errors():
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                others = getattr(ctx.find_root().command, "commands", {})
                found = meant(self, others, error.option_name)
                if not found:
                    raise
                words = [f"{it}, without an option" if it.isupper() else it for it in found]
                said = f"No such option {error.option_name!r}. Did you mean {' or '.join(words)}?"
                raise click.NoSuchOption(error.option_name, said, ctx=ctx) from None
            except EwcError as error:  # of a file that options are taken from
                self._fail(ctx, error, debug="--debug" in args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command with a printer, turning exceptions into exit codes."""
        from ewc_finetune.cli.printer import Printer

        debug = ctx.params.pop("debug")
        quiet, verbose, as_json = (ctx.params.pop(name) for name in ("quiet", "verbose", "as_json"))
        ctx.params["printer"] = printer = Printer(quiet, verbose, as_json, str(ctx.command.name))
        if not as_json:  # the word may be another option's value
            ctx.meta.pop(_JSON, None)
            signals.end_with(None)
        try:
            with _printable_errors(), showing(bars=not quiet and sys.stderr.isatty(), warnings=not quiet):
                check_named(ctx, printer.note)
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            _as_json(ctx, signals.Interrupted(), "Interrupted.", INTERRUPTED)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            if signals.noted():  # nobody knows what was made of it on the way
                raise signals.Interrupted from error
            self._fail(ctx, error, debug)

    def _fail(self, ctx: click.Context, error: Exception, debug: bool) -> NoReturn:
        """Say what went wrong, and end with its exit code."""
        code = error.exit_code if isinstance(error, EwcError) else 1
        foreseen = isinstance(error, (EwcError, OSError))
        sentence = printable(error)
        if not foreseen:
            sentence = f"{type(error).__name__}: {sentence.strip() or 'no message'}"
        if debug:
            _print_traceback()
        else:
            click.echo(f"Error: {sentence}", err=True)
            if not foreseen:
                click.echo(
                    "This is not an error that ewc-ft foresaw; run the command again with --debug and report what it "
                    "prints.",
                    err=True,
                )
        _as_json(ctx, error, sentence, code)
        ctx.exit(code)


@contextlib.contextmanager
def _errors_as_json(context: click.Context) -> Iterator[None]:
    """Print the errors that click itself prints as JSON too, where that is wanted."""
    try:
        yield
    except click.ClickException as error:
        _as_json(context, error, error.format_message(), error.exit_code)
        raise


def _as_json(context: click.Context, error: BaseException, sentence: str, exit_code: int) -> None:
    """Print an error as JSON, where that is wanted."""
    if context.meta.get(_JSON):
        print_error(context.find_root().invoked_subcommand, error, sentence, exit_code)


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
