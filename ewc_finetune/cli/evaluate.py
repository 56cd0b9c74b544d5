"""`ewc-ft evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.choices import LIKELIHOODS
from ewc_finetune.cli.command import Command
from ewc_finetune.cli.options import common_options, trust_option

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command)
@click.argument("model", type=click.Path())
@click.option("--data", required=True, multiple=True, metavar="DATA", help="A domain to score on; repeatable.")
@click.option("--arch", metavar="ARCH", help="What to build for a checkpoint that doesn't say.")
@click.option(
    "--likelihood",
    type=click.Choice(LIKELIHOODS),
    help="How the model's outputs become log p(y | x).  [default: as MODEL was trained, else what a model "
    "folder says, else categorical]",
)
@click.option(
    "--head",
    type=click.Path(dir_okay=False),
    metavar="ANCHOR",
    help="Take the last layer from this anchor, where MODEL was fine-tuned with a new one.",
)
@click.option("--batch-size", type=click.IntRange(1), default=500, show_default=True, help="Samples at once.")
@trust_option
@common_options
def evaluate(model: str, data: tuple[str, ...], arch: str | None, printer: Printer, **options: Any) -> None:
    """Score MODEL (a checkpoint or an anchor): loss and accuracy, a row for each domain."""
    from ewc_finetune.commands.evaluate import evaluate as run

    scores = run(model, list(data), architecture=arch, progress=printer, **options)
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
