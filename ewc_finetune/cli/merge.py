"""`ewc-ft merge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.choices import KFAC_SUMS, LINEAGES, MERGED_HEADS
from ewc_finetune.cli.command import Command
from ewc_finetune.cli.options import printing_options, storage_options

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command)
@click.argument("anchors", nargs=-1, required=True, metavar="ANCHOR...", type=click.Path(dir_okay=False))
@click.option("--output", "-o", required=True, type=click.Path(dir_okay=False), help="The merged anchor.")
@click.option(
    "--lambda",
    "lambdas",
    type=float,
    multiple=True,
    default=[1.0],
    show_default="1",
    help="Strength relative to the others: once for all anchors, or once for each.",
)
@click.option("--online", is_flag=True, help="The running form: older curvature fades, and the newest weights count.")
@click.option(
    "--gamma", type=float, default=1.0, show_default=True, help="What stays of older curvature at each anchor; online."
)
@click.option(
    "--lineage",
    type=click.Choice(LINEAGES),
    default="all",
    show_default=True,
    help="Of an anchor that had a part in a newer one: its own weights count, or the newest it had a part in.",
)
@click.option(
    "--head",
    type=click.Choice(MERGED_HEADS),
    default="shared",
    show_default=True,
    help="expand: the last layer got more outputs from one to the next, and older anchors hold the first ones.",
)
@click.option(
    "--kfac-sum",
    type=click.Choice(KFAC_SUMS),
    default="factors",
    show_default=True,
    help="What stands for a sum of K-FAC blocks: the block of the weighted sums of their factors, or the nearest one.",
)
@storage_options
@click.option(
    "--probes/--no-probes",
    default=True,
    show_default=True,
    help="Keep the samples of data that are in the anchors; without them, an anchor may be shared with anybody.",
)
@click.option("--name", help="What to call the merged anchor.  [default: the names, joined by +]")
@click.option(
    "--checkpoint",
    type=click.Path(dir_okay=False),
    help="Write the centre of the stack as a model too: the Fisher-weighted mean of the parents.",
)
@click.option("--arch", metavar="ARCH", help="What to build for that model, if the newest anchor doesn't say.")
@click.option("--overwrite", is_flag=True, help="Replace the output and the checkpoint if they exist.")
@printing_options
def merge(anchors: tuple[str, ...], output: str, arch: str | None, printer: Printer, **options: Any) -> None:
    """Write several anchors, oldest first, as one that pulls as all of them would together.

    Exactly so, unless --online, or for K-FAC blocks, whose sum is no such block: one takes its place, and how far it is
    off is said. A merged anchor costs one anchor's memory and time.
    """
    from ewc_finetune.cli.layer_table import layer_table
    from ewc_finetune.commands.merge import merge as run

    merged = run(anchors, architecture=arch, output=output, progress=printer, **options)
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
