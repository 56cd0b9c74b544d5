"""`ewc-ft inspect`."""

from __future__ import annotations

import click

from ewc_finetune.cli.command import Command, printing_options


@click.command(cls=Command)
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--plot", type=click.Path(dir_okay=False), help="Draw the importance of each layer: a .png, .pdf or .svg."
)
@click.option("--overwrite", is_flag=True, help="Replace that file if it exists.")
@printing_options
def inspect(file: str, plot: str | None, overwrite: bool, quiet: bool, as_json: bool) -> None:
    """Say what is in the anchor FILE and where it came from; hardly more than its header is read."""
    from ewc_finetune.cli.printer import Printer, importance_table
    from ewc_finetune.verbs.inspect import inspect as run

    printer = Printer(quiet, as_json)
    found = run(file, plot=plot, overwrite=overwrite)
    for key, value in found.facts:
        printer.note(f"{key:<15}{value}")
    printer.note("")
    importance_table(printer, found.provenance)
    if plot is not None:
        printer.note(f"{plot}: the importance of each layer")
    printer.result(found.to_json())
