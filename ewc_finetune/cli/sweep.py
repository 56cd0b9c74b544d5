"""`ewc-ft sweep`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.choices import PENALTY_FORMS
from ewc_finetune.cli.command import Command
from ewc_finetune.cli.config import config_option
from ewc_finetune.cli.options import adapting_options, common_options, dry_run_option, starting_options
from ewc_finetune.errors import UsageError
from ewc_finetune.specs.ranges import read_lambdas, read_seeds

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


def _reading(read: Callable[[str], Sequence[Any]]) -> Callable[..., list[Any]]:
    def values(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> list[Any]:
        try:
            return list(dict.fromkeys(value for text in texts for value in read(str(text))))
        except UsageError as error:
            raise click.BadParameter(f"{error}.") from None

    return values


def _stacks(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> list[tuple[str, ...]]:
    # A comma may also be a part of a file's name.
    stacks: list[tuple[str, ...]] = []
    for text in texts:
        with contextlib.suppress(OSError):  # a name that is too long is no file's
            if Path(text).exists():
                stacks.append((text,))
                continue
        names = tuple(text.split(","))
        if not all(names):
            raise click.BadParameter(f"{text!r} has an empty name in it; expected anchors joined by commas")
        stacks.append(names)
    return stacks


def _of_run(options: MutableMapping[str, Any]) -> None:
    """Take a run's anchors as one stack, and not its checkpoint's name."""
    if options.get("anchors"):
        options["anchors"] = [",".join(options["anchors"])]
    options.pop("output", None)


@click.command(cls=Command)
@click.option(
    "--anchors",
    multiple=True,
    metavar="FILE[,FILE]",
    callback=_stacks,
    help="A stack to try: an anchor, or several that pull together, joined by commas, oldest first. Repeat it to "
    "compare stacks, such as anchors of other curvatures; each is tried with every lambda.",
)
@starting_options
@click.option(
    "--lambda",
    "lambdas",
    multiple=True,
    metavar="X",
    default=["1..10000:5"],
    callback=_reading(read_lambdas),
    help="Strengths to try: a number, several (1,10,100), or LOW..HIGH:N, which are N values evenly spaced in "
    "logarithms; repeatable. Each is that of all anchors of a stack.  "
    "[default: 1..10000:5]",
)
@click.option(
    "--penalty-form",
    "penalty_forms",
    multiple=True,
    type=click.Choice(PENALTY_FORMS),
    default=["gradient"],
    help="A form of the penalty to try; repeatable.  [default: gradient]",
)
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    metavar="N",
    default=["0"],
    callback=_reading(read_seeds),
    help="Seeds whose mean each point is: a number, several (0,1,2), or 0..4; repeatable.  [default: 0]",
)
@click.option("--plain/--no-plain", default=True, help="Make a run without penalty too, for each seed.  [default: yes]")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Runs at a time, in as many processes.",
)
@click.option("--discard", is_flag=True, help="Remove the checkpoints in the end, but for those of the knee.")
@adapting_options
@click.option(
    "--output",
    "-o",
    type=click.Path(),
    metavar="FOLDER",
    help="The folder of the sweep.  [default: named for the first anchor and the data, with .sweep]",
)
@click.option("--overwrite", is_flag=True, help="Replace runs in the folder that were made with other options.")
@config_option(_of_run)
@dry_run_option
@common_options
def sweep(
    anchors: list[tuple[str, ...]],
    data: str,
    model: str | None,
    arch: str | None,
    eval_on: tuple[str, ...],
    output: str | None,
    dry_run: bool,
    printer: Printer,
    **options: Any,
) -> None:
    """Fine-tune with many lambdas, and find the frontier of what is kept against what is learned.

    Every combination of stack, lambda, penalty form and seed is a run as finetune makes it, in one folder. Called
    again, it makes those that are not there yet, and goes on with those that were stopped. It ends with a table
    (sweep.csv has a line for each run, sweep.json everything) and a figure, frontier.png. Marked is the knee: the point
    of the frontier that lies farthest beyond the line between its ends.
    """
    from ewc_finetune.commands.dry_run import dry_run as estimate
    from ewc_finetune.commands.sweep import default_folder
    from ewc_finetune.commands.sweep import sweep as run
    from ewc_finetune.progress import Silent
    from ewc_finetune.sweeps.grid import as_stacks

    as_stacks(anchors, Silent())
    options |= {"anchors": anchors, "architecture": arch, "eval_on": eval_on or None, "progress": printer}
    options |= {"output": output or default_folder(model, anchors[0], data)}
    if dry_run:
        printer.document(estimate(run, model, data, **options))
        return
    done = run(model, data, **options)
    printer.table(done.tradeoff.headers(), done.tradeoff.lines())
    printer.note(f"{done.folder}: {len(done.tradeoff.outcomes)} runs; ewc-ft report {done.folder} makes a page of them")
    printer.result(done.document)
