"""`ewc-ft report`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.grouped_help import plain_option
from ewc_finetune.cli.options import printing_options
from ewc_finetune.specs.groups import Group

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command, short_help="Say what came of RUN on one page of HTML.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path())
@plain_option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False),
    group=Group.OUTPUT,
    help="The page.  [default: report.html in the run folder, in the folder that holds several, or beside those named; "
    "there an earlier report is replaced]",
)
@plain_option("--overwrite", group=Group.OUTPUT, is_flag=True, help="Replace any other file that is there.")
@plain_option(
    "--title", group=Group.OUTPUT, metavar="TEXT", help="Of the page.  [default: what was learned, and what from]"
)
@printing_options
def report(runs: tuple[str, ...], output: str | None, overwrite: bool, title: str | None, printer: Printer) -> None:
    """Say what came of RUN on one page of HTML, which fetches and runs nothing.

    RUN is a run folder that finetune wrote (NAME.run), or a folder that holds several; several are compared, as
    far as they learned the same data, those without anchors or at lambda 0 being plain fine-tuning.
    """
    from ewc_finetune.commands.report import report as run

    made = run(list(runs), output=output, overwrite=overwrite, title=title, progress=printer)
    printer.note(made.sentence)
    for part in made.parts if len(made.parts) > 1 else ():
        printer.note(f"{part.heading}: {part.sentence}")
    printer.note(f"{made.path}: {made.path.stat().st_size:,} bytes")
    printer.result(made.to_json())
