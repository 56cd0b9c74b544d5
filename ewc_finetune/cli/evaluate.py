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
    perplexity = any(score.perplexity is not None for score in scores)
    printer.table(
        ["domain", "samples", "loss", "accuracy", *(["perplexity"] if perplexity else [])],
        [
            [
                s.domain,
                f"{s.samples:,}",
                f"{s.loss:.4f}",
                *("-" if v is None else f"{v:.4f}" for v in (s.accuracy, s.perplexity)[: 1 + perplexity]),
            ]
            for s in scores
        ],
    )
    printer.result({"model": model, "scores": [vars(s) for s in scores]})
