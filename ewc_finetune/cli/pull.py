"""`ewc-ft pull`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.grouped_help import plain_option
from ewc_finetune.cli.options import printing_options
from ewc_finetune.specs.groups import Group

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command, short_help="Fetch an anchor from the Hugging Face Hub for good.")
@click.argument("place", metavar="hf://ORG/NAME[@REVISION][/FILE]")
@plain_option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False),
    group=Group.OUTPUT,
    help="The anchor.  [default: NAME.anchor.safetensors in this folder]",
)
@plain_option("--overwrite", group=Group.OUTPUT, is_flag=True, help="Replace the output if it exists.")
@printing_options
def pull(place: str, output: str | None, overwrite: bool, printer: Printer) -> None:
    """Fetch an anchor from the Hugging Face Hub for good.

    It becomes the one file that was pushed, byte for byte, checked against the digests that the Hub promises. What is
    in the client's cache is not fetched again. Commands that take anchors take hf://ORG/NAME too, without this one.
    """
    from ewc_finetune.commands.pull import pull as run

    pulled = run(place, output=output, overwrite=overwrite, progress=printer)
    printer.note(f"{pulled.path}: {pulled.bytes:,} bytes, sha256 {pulled.digest}")
    printer.note(f"from {pulled.place}")
    printer.result(pulled.to_json())
