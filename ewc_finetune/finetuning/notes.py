"""What `finetune` says of a run before its first step."""

from __future__ import annotations

from collections.abc import Sequence

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.errors import counted
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.modules.modes import normalisation_layers
from ewc_finetune.penalty.penalty import Penalty
from ewc_finetune.progress import Progress
from ewc_finetune.rehearsal.rehearsal import Rehearsal


def _warn_of_overshooting(progress: Progress, penalty: Penalty | None, schedule: Schedule) -> None:
    """Say it before training if steps along the penalty's gradient cannot converge.

    Gradient descent with momentum m on a quadratic of curvature h is stable up to a learning rate of 2 (1 + m) / h.
    Adam's steps are no larger than its learning rate whatever the gradient.
    """
    if penalty is None or penalty.form != "gradient" or schedule.optimizer != "sgd":
        return
    name, largest = penalty.largest_curvature()
    bound = 2 * (1 + schedule.momentum)
    if schedule.lr * largest > bound:
        progress.note(
            f"this lambda is too large for gradient steps: the largest lambda F, {largest:.3g} in {name}, times the "
            f"learning rate {schedule.lr:g} is {schedule.lr * largest:.3g}, and beyond {bound:g} each step overshoots "
            f"further. Use --penalty-form proximal, stable at any lambda, or --lr up to {bound / largest:.2g}"
        )


def _curvature(origin: Provenance) -> str:
    if origin.curvature == "identity":
        return "identity"
    kind = "K-FAC blocks" if origin.curvature == "kfac" else "Fisher"
    return f"{origin.estimator} {kind} of {counted(origin.samples, 'sample')}"


def say(
    progress: Progress,
    start: LoadedModel,
    held: Sequence[tuple[Anchor, float | None]],
    penalty: Penalty | None,
    rehearsal: Rehearsal | None,
    schedule: Schedule,
    fresh: bool,
) -> None:
    """Tell the user what the run assumes; `held` are the anchors with their lambdas, None while looked for."""
    progress.note(f"starting from {'fresh weights of ' if fresh else ''}{start.label}")
    for remark in start.remarks:
        progress.note(remark)
    if rehearsal is None and not held and not fresh:
        progress.note("held by no anchor: plain training, in which the old domain may be lost")
    for anchor, strength in held:
        origin = anchor.provenance
        if strength == 0:
            progress.note(f"not held by {anchor.label}: lambda 0")
        else:
            known = "a lambda to be looked for" if strength is None else f"lambda {strength:g}"
            progress.note(f"held by {anchor.label}: {origin.name}, {_curvature(origin)}, {known}")
    if penalty is not None and penalty.free and any(strength != 0 for _, strength in held):
        progress.note(f"free, since no anchor holds them: {', '.join(penalty.free)}")
    layers = normalisation_layers(start.model)
    if layers:
        progress.note(f"normalisation statistics of {counted(len(layers), 'layer')}: {schedule.norm_stats}")
    if all(strength is not None for _, strength in held):
        _warn_of_overshooting(progress, penalty, schedule)
