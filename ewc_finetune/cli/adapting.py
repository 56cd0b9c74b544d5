"""The options of every command that adapts a model under anchors: `finetune` and `sweep`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ewc_finetune.choices import HEADS, LIKELIHOODS, LINEAGES, NORM_STATS
from ewc_finetune.cli.command import only_one, trust_option
from ewc_finetune.cli.training import training_options

F = TypeVar("F", bound=Callable[..., Any])


def starting_options(function: F) -> F:
    """Add the options that say what is adapted, and to what."""
    for option in reversed(_STARTING):
        function = option(function)
    return function


def adapting_options(function: F) -> F:
    """Add the options that say how, beside those of the penalty itself."""
    for option in reversed(_ADAPTING):
        function = option(function)
    return function


_STARTING = (
    click.option("--data", required=True, multiple=True, callback=only_one, metavar="DATA", help="The new domain."),
    click.option(
        "--model",
        metavar="MODEL",
        help="Start from this checkpoint, or from fresh weights of an architecture "
        "(mlp, cnn, torchvision:NAME, package.module:Class).  [default: the newest anchor's weights]",
    ),
    click.option("--arch", metavar="ARCH", help="What to build for a checkpoint that doesn't say."),
    trust_option,
)

_ADAPTING = (
    click.option(
        "--lineage",
        type=click.Choice(LINEAGES),
        default="all",
        show_default=True,
        help="Of an anchor that had a part in a newer one: pull to its own weights all the same, or to the newest it "
        "had a part in.",
    ),
    click.option(
        "--head",
        type=click.Choice(HEADS),
        default="shared",
        show_default=True,
        help="Share the last layer with the old domains; take a new one for the new domain's classes; or expand it by "
        "outputs for new labels.",
    ),
    click.option("--freeze", multiple=True, metavar="GLOB", help="Parameters not to train (features.*); repeatable."),
    training_options,
    click.option(
        "--norm-stats",
        type=click.Choice(NORM_STATS),
        help="Keep the running statistics of normalisation "
        "layers, or let them follow the new data.  [default: frozen; update for fresh weights]",
    ),
    click.option(
        "--likelihood",
        type=click.Choice(LIKELIHOODS),
        help="How outputs become the loss.  [default: the anchors', else as the model was trained, else what a "
        "model folder says, else categorical]",
    ),
    click.option(
        "--eval",
        "eval_on",
        multiple=True,
        metavar="DATA",
        help="A domain to score before training and at each evaluation; repeatable.  [default: the new one]",
    ),
    click.option(
        "--select-on",
        multiple=True,
        metavar="DATA",
        help="A domain whose score says which state, or which lambda of auto, is the best; repeatable.  [default: the "
        "new one]",
    ),
    click.option(
        "--log-every",
        type=click.IntRange(1),
        metavar="N",
        help="Steps between log lines.  [default: 50; fewer where there would be less than 20 lines]",
    ),
    click.option("--tensorboard", is_flag=True, help="Write the log for TensorBoard too, into the run folder."),
    click.option(
        "--retain",
        type=float,
        metavar="X",
        help="The share of the answers to the anchors' probes that must stay as they were: what lambda auto looks for; "
        "a run that falls below it is stopped.",
    ),
)
