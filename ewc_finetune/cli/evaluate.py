"""`ewc-ft evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.declared import options_from
from ewc_finetune.cli.options import printing_options
from ewc_finetune.evaluation.options import EvaluateOptions

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command, short_help="Score MODEL on domains: loss and accuracy.")
@click.argument("model", type=click.Path())
@options_from(EvaluateOptions)
@printing_options
def evaluate(model: str, data: list[str], printer: Printer, **options: Any) -> None:
    """Score MODEL (a checkpoint or an anchor): loss and accuracy, a row for each domain."""
    from ewc_finetune.commands.evaluate import evaluate as run

    scores = run(model, data, progress=printer, **options)
    printer.table(*scores.table())
    printer.result({"model": model, "scores": [vars(s) for s in scores]})
