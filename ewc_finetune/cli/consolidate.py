"""`ewc-ft consolidate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.declared import options_from
from ewc_finetune.cli.options import dry_run_option, printing_options
from ewc_finetune.curvature.options import ConsolidateOptions
from ewc_finetune.errors import counted, few

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command, short_help="Make an anchor of MODEL while its data is at hand.")
@click.argument("model", type=click.Path())
@options_from(ConsolidateOptions)
@dry_run_option
@printing_options
def consolidate(
    model: str, data: list[str], output: str | None, dry_run: bool, printer: Printer, **options: Any
) -> None:
    """Compute the Fisher of the checkpoint MODEL and save it, with the weights, as an anchor.

    The anchor stands in for the old data from then on. MODEL is a state dict (.pt, or in a trainer's file), safetensors
    (one file, or the index of several), a model folder of transformers or hf:ORG/NAME, TorchScript, torch.export, ONNX,
    or with --trust-code a pickled module; no code in it is run otherwise. The data needs no labels, but for the
    empirical and batched estimators.
    """
    from ewc_finetune.anchor import describe
    from ewc_finetune.cli.layer_table import layer_table
    from ewc_finetune.commands.consolidate import consolidate as run
    from ewc_finetune.commands.consolidate import default_output
    from ewc_finetune.commands.dry_run import dry_run as estimate

    options["output"] = output or default_output(model, data)
    if dry_run:
        printer.document(estimate(run, model, data, progress=printer, **options), "dry-run")
        return
    anchor = run(model, data, progress=printer, **options)
    origin = anchor.provenance
    layer_table(printer, origin)
    path = Path(str(anchor.path))
    if origin.scores:
        known = [f"{name} {value:.4f}" for name, value in sorted(origin.scores.items())]
        printer.note(f"the checkpoint's own score: {', '.join(known)}")
    for reason, names in describe.by_reason(origin.excluded).items():
        printer.note(f"left free: {', '.join(names) if printer.verbose else few(names)}, {reason}")
    if origin.standard_error and origin.standard_error["trace"] is not None:
        printer.note(
            f"{origin.estimator} Fisher of {counted(origin.samples, 'sample')}; the standard error of its trace is "
            f"{origin.standard_error['trace']:.1%}"
        )
    if origin.curvature_storage is not None:
        printer.note(describe.storage(origin.curvature_storage))
    if origin.weights_reference is not None:
        printer.note(
            f"{len(origin.weights_reference['tensors'])} of {len(anchor.weights)} tensors of weights are not in the "
            "anchor but in "
            f"{origin.weights_reference['repository']} on the Hub"
        )
    printer.note(f"{path}: {counted(origin.samples, 'sample')}, {path.stat().st_size:,} bytes, sha256 {anchor.digest}")
    printer.result(
        {
            "anchor": str(path),
            "bytes": path.stat().st_size,
            "sha256": anchor.digest,
            "provenance": vars(origin),
        }
    )
