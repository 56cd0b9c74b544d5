"""`ewc-ft finetune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.config import config_option, resumed
from ewc_finetune.cli.declared import options_from
from ewc_finetune.cli.grouped_help import plain_option
from ewc_finetune.cli.options import dry_run_option, printing_options
from ewc_finetune.errors import counted
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.specs.groups import Group

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command, short_help="Adapt a model to new data under the penalty of its anchors.")
@options_from(FinetuneOptions)
@plain_option(
    "--resume",
    group=Group.OUTPUT,
    main=False,
    type=click.Path(file_okay=False),
    metavar="RUN",
    is_eager=True,
    callback=resumed,
    help="Go on with a run that was stopped, by its folder: with its options, to the same bytes.",
)
@config_option()
@dry_run_option
@printing_options
def finetune(
    model: str | None, data: list[str], output: str | None, dry_run: bool, printer: Printer, **options: Any
) -> None:
    """Adapt a model to a new domain under the penalty of its anchors.

    Writes a checkpoint in the format that the anchor came from, and beside it a run folder: run.json, the same options
    as run.toml (for --config), metrics.jsonl and a figure.
    """
    from ewc_finetune.commands.dry_run import dry_run as estimate
    from ewc_finetune.commands.finetune import default_output
    from ewc_finetune.commands.finetune import finetune as run

    options["output"] = output or default_output(model, options["anchors"], data)
    if dry_run:
        printer.document(estimate(run, model, data, progress=printer, **options), "dry-run")
        return
    done = run(model, data, progress=printer, **options)
    for headers, rows in done.tables():
        printer.table(headers, rows)
    if not done.after:
        printer.note(
            f"nothing was scored, for {' + '.join(data)} has no test split: ewc-ft evaluate {done.output} --data DATA "
            "scores the model, and --eval-new DATA would have"
        )
    printer.note(f"{done.output}: {counted(done.steps, 'step')}; the run is in {done.run}")
    printer.result(
        {
            "checkpoint": str(done.output),
            "run": str(done.run),
            "steps": done.steps,
            "step": done.step,
            "training_loss": None if done.training_loss is None else vars(done.training_loss),
            "norm_stats": done.norm_stats,
            "lambda_search": None if done.search is None else done.search.to_json(),
            "retention": [vars(kept) for kept in done.retention],
            "before": [vars(score) for score in done.before],
            "after": [vars(score) for score in done.after],
        }
    )
