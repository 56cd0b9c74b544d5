"""`ewc-ft sweep`."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.config import config_option
from ewc_finetune.cli.declared import options_from
from ewc_finetune.cli.options import dry_run_option, printing_options
from ewc_finetune.errors import counted
from ewc_finetune.sweeps.options import SweepOptions

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


def _of_run(options: MutableMapping[str, Any]) -> None:
    """Take a run's anchors as one stack, and not its checkpoint's name."""
    if options.get("anchors"):
        options["anchors"] = [",".join(options["anchors"])]
    options.pop("output", None)


@click.command(cls=Command, short_help="Fine-tune with many lambdas: what is kept, what is learned.")
@options_from(SweepOptions)
@config_option(_of_run)
@dry_run_option
@printing_options
def sweep(
    model: str | None, data: list[str], output: str | None, dry_run: bool, printer: Printer, **options: Any
) -> None:
    """Fine-tune with many lambdas, and find the frontier of what is kept against what is learned.

    Every combination of stack, lambda, penalty form and seed is a run as finetune makes it, in one folder. Called
    again, it makes those that are not there yet, and goes on with those that were stopped. It ends with a table
    (sweep.csv has a line for each run, sweep.json everything) and a figure, frontier.png. Marked is the knee: the point
    of the frontier that lies farthest beyond the line between its ends.
    """
    from ewc_finetune.commands.dry_run import dry_run as estimate
    from ewc_finetune.commands.sweep import default_folder
    from ewc_finetune.commands.sweep import sweep as run
    from ewc_finetune.progress import Silent
    from ewc_finetune.sweeps.grid import as_stacks

    anchors = options["anchors"]
    as_stacks(anchors, Silent())
    options["output"] = output or default_folder(model, anchors[0], data)
    if dry_run:
        printer.document(estimate(run, model, data, progress=printer, **options), "dry-run")
        return
    done = run(model, data, progress=printer, **options)
    printer.table(done.tradeoff.headers(), done.tradeoff.lines())
    printer.note(
        f"{done.folder}: {counted(len(done.tradeoff.outcomes), 'run')}; "
        f"ewc-ft report {done.folder} makes a page of them"
    )
    printer.result(done.document)
