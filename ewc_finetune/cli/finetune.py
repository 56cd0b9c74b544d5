"""`ewc-ft finetune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.choices import PENALTY_FORMS
from ewc_finetune.cli.command import Command
from ewc_finetune.cli.config import config_option, resumed
from ewc_finetune.cli.options import adapting_options, common_options, dry_run_option, starting_options

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


def _strength(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither auto nor a number.") from None


def _strengths(context: click.Context, parameter: click.Parameter, values: tuple[float | str, ...]) -> Any:
    if "auto" in values and len(values) > 1:
        raise click.BadParameter("auto stands for all anchors; give it alone")
    return "auto" if values == ("auto",) else list(values) or None


@click.command(cls=Command)
@click.option(
    "--anchors",
    multiple=True,
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="An anchor to be held by; repeatable, oldest first. Without any it is plain training.",
)
@starting_options
@click.option(
    "--lambda",
    "lambdas",
    type=_strength,
    multiple=True,
    metavar="X|auto",
    callback=_strengths,
    help="Strength of the penalty: once for all anchors, or once for each; auto looks for the largest within "
    "--tolerance, in five short runs.  [default: 100; 10 for anchors of K-FAC]",
)
@click.option(
    "--tolerance",
    type=float,
    default=0.02,
    show_default=True,
    metavar="X",
    help="Of --lambda auto: the share of plain fine-tuning's accuracy on the new domain that may be lost.",
)
@click.option(
    "--penalty-form",
    type=click.Choice(PENALTY_FORMS),
    default="gradient",
    show_default=True,
    help="Add the penalty's gradient to the loss's, or take its exact implicit step after each of the optimizer's, "
    "which is stable at any lambda.",
)
@adapting_options
@click.option(
    "--output",
    "-o",
    type=click.Path(),
    help="The new checkpoint; the run folder goes beside it.  [default: named for the anchor and the data]",
)
@click.option("--overwrite", is_flag=True, help="Replace the output and its run folder if they exist.")
@click.option(
    "--resume",
    type=click.Path(file_okay=False),
    metavar="RUN",
    is_eager=True,
    expose_value=True,
    callback=resumed,
    help="Go on with a run that was stopped, by its folder: with its options, to the same bytes.",
)
@config_option()
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    help="Of fresh weights, sample order and dropout.",
)
@dry_run_option
@common_options
def finetune(
    anchors: tuple[str, ...],
    data: str,
    model: str | None,
    arch: str | None,
    eval_on: tuple[str, ...],
    output: str | None,
    dry_run: bool,
    resume: str | None,
    printer: Printer,
    **options: Any,
) -> None:
    """Adapt a model to a new domain under the penalty of its anchors.

    Writes a checkpoint in the format that the anchor came from, and beside it a run folder: run.json, the same options
    as run.toml (for --config), metrics.jsonl and a figure.
    """
    from ewc_finetune.commands.dry_run import dry_run as estimate
    from ewc_finetune.commands.finetune import default_output
    from ewc_finetune.commands.finetune import finetune as run

    options |= {"anchors": anchors, "architecture": arch, "eval_on": eval_on or None, "progress": printer}
    options |= {"output": output or default_output(model, anchors, data), "resume": resume}
    if dry_run:
        printer.document(estimate(run, model, data, **options))
        return
    done = run(model, data, **options)
    loss = "loss (perplexity)" if any(score.perplexity is not None for score in done.before) else "loss"
    printer.table(
        ["domain", "accuracy before", "after", "change", f"{loss} before", "after"],
        [
            [
                b.domain,
                *(("-",) * 3 if b.accuracy is None or a.accuracy is None else _change(b.accuracy, a.accuracy)),
                *(f"{s.loss:.4f}" if s.perplexity is None else f"{s.loss:.4f} ({s.perplexity:.2f})" for s in (b, a)),
            ]
            for b, a in zip(done.before, done.after, strict=True)
        ],
    )
    printer.note(f"{done.output}: {done.steps:,} steps; the run is in {done.run}")
    printer.result(
        {
            "checkpoint": str(done.output),
            "run": str(done.run),
            "steps": done.steps,
            "step": done.step,
            "training_loss": None if done.training_loss is None else vars(done.training_loss),
            "norm_stats": done.norm_stats,
            "lambda_search": None if done.search is None else done.search.to_json(),
            "retention": [vars(found) for found in done.retention],
            "before": [vars(score) for score in done.before],
            "after": [vars(score) for score in done.after],
        }
    )


def _change(before: float, after: float) -> tuple[str, str, str]:
    return f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"
