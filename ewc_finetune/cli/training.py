"""The options that say how to train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ewc_finetune.choices import AMPS, DECAYS, KEEPS, OPTIMIZERS

F = TypeVar("F", bound=Callable[..., Any])


def training_options(function: F) -> F:
    """Add the options of every command that trains; see `Schedule`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


_OPTIONS = (
    click.option("--epochs", type=click.IntRange(0), default=4, show_default=True, help="Walks through the data."),
    click.option("--lr", type=float, default=1e-4, show_default=True, help="Learning rate."),
    click.option("--batch-size", type=click.IntRange(1), default=100, show_default=True, help="Samples at once."),
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adam", show_default=True),
    click.option("--momentum", type=float, default=0.9, show_default=True, help="Of sgd."),
    click.option("--weight-decay", type=float, metavar="X", help="The optimizer's own.  [default: 0; of adamw 0.01]"),
    click.option(
        "--accumulate", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Batches to a step."
    ),
    click.option("--clip", type=float, metavar="X", help="Largest norm of a step's gradient, the penalty's included."),
    click.option(
        "--warmup",
        type=float,
        default=0,
        show_default=True,
        metavar="N",
        help="Steps in which the learning rate rises; below 1 a share of all steps.",
    ),
    click.option(
        "--decay",
        type=click.Choice(DECAYS),
        default="constant",
        show_default=True,
        help="What the learning rate does then: it falls to 0 at the end, or not.",
    ),
    click.option("--amp", type=click.Choice(AMPS), help="Compute in half precision where that is safe.  [default: no]"),
    click.option("--compile", is_flag=True, help="Train through torch.compile."),
    click.option(
        "--workers",
        type=click.IntRange(0),
        default=0,
        show_default=True,
        metavar="N",
        help="Processes that read samples ahead, for data that is not in memory.",
    ),
    click.option(
        "--eval-every", type=click.IntRange(1), metavar="N", help="Steps between evaluations.  [default: an epoch]"
    ),
    click.option(
        "--patience",
        type=click.IntRange(1),
        metavar="N",
        help="Stop early, after so many evaluations no better than the best.  [default: never]",
    ),
    click.option(
        "--keep",
        type=click.Choice(KEEPS),
        help="The state to write in the end; the other one stays in the run folder.  [default: last; best with "
        "--patience]",
    ),
)
