"""`ewc-ft consolidate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.choices import ANCHOR_WEIGHTS, CURVATURES, ESTIMATORS, KFAC_FORMS, LIKELIHOODS
from ewc_finetune.cli.command import Command
from ewc_finetune.cli.options import common_options, dry_run_option, only_one, storage_options, trust_option

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


def _samples(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r} is neither auto nor a number of samples, at least 1.")
    return int(text)


@click.command(cls=Command)
@click.argument("model", type=click.Path())
@click.option(
    "--data",
    required=True,
    multiple=True,
    callback=only_one,
    metavar="DATA",
    help="The data that the model was trained on.",
)
@click.option(
    "--arch",
    metavar="ARCH",
    help="What to build for a checkpoint that doesn't say: package.module:Class, "
    "mlp, cnn or torchvision:NAME, with keyword arguments behind a question mark.",
)
@click.option(
    "--output", "-o", type=click.Path(dir_okay=False), help="The anchor.  [default: MODEL.anchor.safetensors]"
)
@click.option("--overwrite", is_flag=True, help="Replace the output if it exists.")
@click.option(
    "--curvature",
    type=click.Choice(CURVATURES),
    default="diagonal",
    show_default=True,
    help="The diagonal of the Fisher; Kronecker-factored blocks for linear layers and convolutions, and the diagonal "
    "for the rest (kfac); or the identity: every parameter counts alike (plain L2).",
)
@click.option(
    "--kfac-form",
    type=click.Choice(KFAC_FORMS),
    default="expand",
    show_default=True,
    help="What kfac does with several positions of a sample: take each for a sample (expand), or put them together.",
)
@storage_options
@click.option(
    "--anchor-weights",
    type=click.Choice(ANCHOR_WEIGHTS),
    default=ANCHOR_WEIGHTS[0],
    show_default=True,
    help="reference: leave out what a model on the Hub has anyway, at a commit, and have it fetched by its digest.",
)
@click.option(
    "--name", help="What to call the domain.  [default: the kind of data, or the file or folder that it is in]"
)
@click.option(
    "--estimator",
    type=click.Choice(ESTIMATORS),
    default="auto",
    show_default=True,
    help="Whose labels the Fisher uses: the model's own in expectation (exact), draws of them (sampled), "
    "its best guess (predicted), the data's (empirical); batched squares the mean of a batch, which is no "
    "Fisher but what published code does. auto is exact for up to 32 outputs, sampled beyond.",
)
@click.option("--draws", type=click.IntRange(1), default=1, show_default=True, help="Labels drawn for each sample.")
@click.option(
    "--samples",
    type=_samples,
    metavar="N|auto",
    help="Use a random subset of N samples; auto goes on until the standard error of the Fisher's trace is --rtol "
    "of it.  [default: all]",
)
@click.option("--rtol", type=float, metavar="X", default=0.02, show_default=True, help="Where --samples auto stops.")
@click.option("--rules/--no-rules", default=True, show_default=True, help="Use layer rules, where there are any.")
@click.option("--batch-size", type=click.IntRange(1), default=200, show_default=True, help="Samples at once.")
@click.option(
    "--likelihood",
    type=click.Choice(LIKELIHOODS),
    help="How the model's outputs become log p(y | x).  [default: what a model folder says; categorical otherwise]",
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave these parameters free; repeatable.")
@click.option(
    "--probe",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    help="Keep N inputs as they are in the anchor, with the model's answers: finetune then says what it keeps of them. "
    "Whoever has the anchor has these inputs.  [default: none]",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of the subset, the sampled labels and the probe.",
)
@dry_run_option
@trust_option
@common_options
def consolidate(
    model: str,
    data: str,
    arch: str | None,
    output: str | None,
    dry_run: bool,
    printer: Printer,
    **options: Any,
) -> None:
    """Compute the Fisher of the checkpoint MODEL and save it, with the weights, as an anchor.

    The anchor stands in for the old data from then on. MODEL is a state dict (.pt, or in a trainer's file), safetensors
    (one file, or the index of several), a model folder of transformers or hf:ORG/NAME, TorchScript, torch.export, ONNX,
    or with --trust-code a pickled module; no code in it is run otherwise. The data needs no labels, but for the
    empirical and batched estimators.
    """
    from ewc_finetune.anchor.half_precision import describe
    from ewc_finetune.cli.layer_table import layer_table
    from ewc_finetune.commands.consolidate import consolidate as run
    from ewc_finetune.commands.consolidate import default_output
    from ewc_finetune.commands.dry_run import dry_run as estimate

    options |= {"architecture": arch, "output": output or default_output(model), "progress": printer}
    if dry_run:
        printer.document(estimate(run, model, data, **options))
        return
    anchor = run(model, data, **options)
    origin = anchor.provenance
    layer_table(printer, origin)
    path = Path(str(anchor.path))
    if origin.scores:
        known = [f"{name} {value:.4f}" for name, value in sorted(origin.scores.items())]
        printer.note(f"the checkpoint's own score: {', '.join(known)}")
    for names, reason in origin.left_free(every=printer.verbose):
        printer.note(f"left free: {names}, {reason}")
    if origin.standard_error and origin.standard_error["trace"] is not None:
        printer.note(
            f"{origin.estimator} Fisher of {origin.samples:,} samples; the standard error of its trace is "
            f"{origin.standard_error['trace']:.1%}"
        )
    if origin.curvature_storage is not None:
        printer.note(describe(origin.curvature_storage))
    if origin.weights_reference is not None:
        printer.note(
            f"{len(origin.weights_reference['tensors'])} of {len(anchor.weights)} tensors of weights are not in the "
            "anchor but in "
            f"{origin.weights_reference['repository']} on the Hub"
        )
    printer.note(f"{path}: {origin.samples:,} samples, {path.stat().st_size:,} bytes, sha256 {anchor.digest}")
    printer.result(
        {
            "anchor": str(path),
            "bytes": path.stat().st_size,
            "sha256": anchor.digest,
            "provenance": vars(origin),
        }
    )
