"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ewc_finetune.choices import (
    AMPS,
    CURVATURE_DTYPES,
    DECAYS,
    DEVICES,
    HEADS,
    KEEPS,
    KFAC_DTYPES,
    LIKELIHOODS,
    LINEAGES,
    NORM_STATS,
    OPTIMIZERS,
)

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


def only_one(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str:
    """Refuse an option that is given twice, where the last would win unnoticed."""
    if len(values) != 1:
        raise click.BadParameter(f"given {len(values)} times; this command takes one")
    return values[0]


def _rank(text: str) -> float | str:
    if text in ("auto", "full"):
        return text
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither auto, full, a share nor a whole number.") from None


def trust_option(function: F) -> F:
    """Add the option of every command that opens a checkpoint."""
    return click.option(
        "--trust-code",
        is_flag=True,
        help="Let code in the checkpoint run (a pickled module): only for files whose maker you know and trust.",
    )(function)


def dry_run_option(function: F) -> F:
    """Add the option of every command whose work takes long."""
    return click.option(
        "--dry-run",
        is_flag=True,
        help="Check everything, try a few batches, say what time and memory the run needs and what it writes; write "
        "nothing.",
    )(function)


def storage_options(function: F) -> F:
    """Add the options of every command that stores curvature."""
    for option in (
        click.option(
            "--curvature-dtype",
            type=click.Choice(CURVATURE_DTYPES),
            default=CURVATURE_DTYPES[0],
            show_default=True,
            help="Precision in which the diagonal is stored; what half precision costs is said.",
        ),
        click.option(
            "--kfac-dtype",
            type=click.Choice(KFAC_DTYPES),
            default=KFAC_DTYPES[0],
            show_default=True,
            help="Precision in which kept eigenvectors are stored; factors that are kept whole are in float32.",
        ),
        click.option(
            "--kfac-rank",
            type=_rank,
            default="auto",
            show_default=True,
            metavar="X",
            help="Eigenvectors to keep of each factor: those that hold a share of the trace (below 1), or so many; "
            "auto is 0.99, full keeps all.",
        ),
    ):
        function = option(function)
    return function


def printing_options(function: F) -> F:
    """Add the options that every command has."""
    for option in (
        click.option("--debug", is_flag=True, help="Show the traceback of an error."),
        click.option("--quiet", is_flag=True, help="Print nothing but errors."),
        click.option("--verbose", is_flag=True, help="Print every line of the log, and what else there is to know."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
    ):
        function = option(function)
    return function


def common_options(function: F) -> F:
    """Add the options of every command that runs a model on data, and those that every command has."""
    for option in (
        printing_options,
        click.option(
            "--data-dir",
            type=click.Path(file_okay=False),
            help="Where downloaded data lies or goes.  [default: $EWC_FT_DATA, else ~/.cache/ewc-finetune/data]",
        ),
        click.option(
            "--device",
            type=click.Choice(DEVICES),
            default="auto",
            show_default=True,
            help="Where to compute.",
        ),
    ):
        function = option(function)
    return function


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
