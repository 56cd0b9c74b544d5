"""`ewc-ft merge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.declared import options_from
from ewc_finetune.cli.options import printing_options
from ewc_finetune.penalty.options import MergeOptions

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command, short_help="Write several anchors as one that pulls as all of them.")
@click.argument("anchors", nargs=-1, required=True, metavar="ANCHOR...", type=click.Path(dir_okay=False))
@options_from(MergeOptions)
@printing_options
def merge(anchors: tuple[str, ...], printer: Printer, **options: Any) -> None:
    """Write several anchors, oldest first, as one that pulls as all of them would together.

    Exactly so, unless --online, or for K-FAC blocks, whose sum is no such block: one takes its place, and how far it is
    off is said. A merged anchor costs one anchor's memory and time.
    """
    from ewc_finetune.cli.layer_table import layer_table
    from ewc_finetune.commands.merge import merge as run

    merged = run(anchors, progress=printer, **options)
    origin = merged.provenance
    layer_table(printer, origin)
    path = Path(str(merged.path))
    printer.note(f"{path}: {path.stat().st_size:,} bytes, sha256 {merged.digest}")
    printer.result(
        {
            "anchor": str(path),
            "bytes": path.stat().st_size,
            "sha256": merged.digest,
            "checkpoint": options["checkpoint"],
            "provenance": vars(origin),
        }
    )
