"""`ewc-ft inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.grouped_help import plain_option
from ewc_finetune.cli.options import printing_options, trust_option
from ewc_finetune.errors import UsageError
from ewc_finetune.specs.groups import Group

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command, short_help="Say what is in FILE, and where it came from.")
@click.argument("file", type=click.Path())
@plain_option(
    "--verify",
    group=Group.MODEL,
    is_flag=True,
    help="Read all of it, and compare it with the checksums that it has.",
)
@plain_option("--arch", group=Group.MODEL, metavar="ARCH", help="Of a checkpoint: what its weights are of.")
@plain_option(
    "--plot",
    group=Group.OUTPUT,
    type=click.Path(dir_okay=False),
    help="Draw the importance of each layer: a .png, .pdf or .svg.",
)
@plain_option("--overwrite", group=Group.OUTPUT, is_flag=True, help="Replace that file if it exists.")
@trust_option
@printing_options
def inspect(
    file: str, plot: str | None, overwrite: bool, verify: bool, arch: str | None, trust_code: bool, printer: Printer
) -> None:
    """Say what is in FILE, an anchor or a checkpoint, and where it came from.

    Of an anchor hardly more than the header is read; of one on the Hub (hf://ORG/NAME) no more is fetched.
    """
    from ewc_finetune.checkpoint.open import is_anchor
    from ewc_finetune.checkpoint.summary import inspect_checkpoint
    from ewc_finetune.cli.layer_table import layer_table
    from ewc_finetune.commands.inspect import inspect as run

    if not is_anchor(file):
        if plot is not None:
            raise UsageError(f"{file} is a checkpoint, which has no importance to draw; --plot is for anchors")
        printer.document(
            inspect_checkpoint(file, architecture=arch, trust_code=trust_code, verify=verify), "inspect-checkpoint"
        )
        return
    if arch is not None or trust_code:
        raise UsageError(f"{file} is an anchor; --arch and --trust-code are for checkpoints")
    inspection = run(file, plot=plot, overwrite=overwrite, verify=verify, progress=printer)
    printer.facts(inspection.described(every_layer=printer.verbose))
    printer.note("")
    layer_table(printer, inspection.provenance)
    if plot is not None:
        printer.note(f"{plot}: the importance of each layer")
    printer.result(inspection.to_json(), "inspect-anchor")
