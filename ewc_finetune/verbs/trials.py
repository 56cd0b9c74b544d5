"""The short runs of `--lambda auto`: each is a `finetune` of its own, from the start, on what is not held out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from ewc_finetune.anchor import Anchor
from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import UsageError
from ewc_finetune.penalty import Penalty
from ewc_finetune.progress import OnlyBars, Progress
from ewc_finetune.run_folder import RunFolder
from ewc_finetune.schedule import Schedule
from ewc_finetune.stack import of_one_head
from ewc_finetune.verbs.evaluate import Score
from ewc_finetune.verbs.lambda_search import RUNS, Search, search_lambda, split

# Arguments of `finetune` that a short run takes over.
_TAKEN_OVER = (
    "penalty_form",
    "lineage",
    "head",
    "freeze",
    "architecture",
    "trust_pickle",
    "likelihood",
    "seed",
    "device",
)


def search_by_trials(
    domain: Domain,
    watched: Sequence[Domain],
    anchors: Sequence[Anchor],
    ratios: Sequence[float],
    arguments: Mapping[str, Any],
    schedule: Schedule,
    folder: RunFolder | None,
    progress: Progress,
) -> Search:
    """Look for lambda with short runs; see `search_lambda`.

    Args:
        domain: The new domain.
        watched: Those that are scored beside it.
        anchors: Oldest first.
        ratios: Lambda of each is this multiple of what is looked for.
        arguments: Of the `finetune` that it is for.
        schedule: Likewise.
        folder: Remembers the runs that are made, and knows those that were made before the run was stopped.
        progress: Told of every run.

    Raises:
        UsageError: if there is no anchor, or nothing can be held out.
    """
    tolerance = arguments["tolerance"]
    if not anchors:
        raise UsageError("--lambda auto looks for the strength of a penalty, and there is none without --anchors")
    if not 0 < tolerance < 1:
        raise UsageError(f"tolerance is {tolerance:g}; expected more than 0 and less than 1")
    trained, held_out = split(domain, arguments["seed"])
    options = {name: arguments[name] for name in _TAKEN_OVER}
    options |= {**asdict(schedule), "epochs": shorter(schedule.epochs), "patience": None, "keep": None}
    remembered: list[dict[str, Any]] = [] if folder is None else list(folder.document.get("trials", []))

    def make(strength: float | None) -> dict[str, Any]:
        from ewc_finetune.verbs.finetune import finetune

        model = arguments["model"]
        done = finetune(
            copy.deepcopy(model) if isinstance(model, nn.Module) else model,
            trained,
            anchors=anchors,
            lambdas=[0.0 if strength is None else strength * ratio for ratio in ratios],
            eval_on=[held_out, *watched],
            progress=OnlyBars(progress),
            **options,
        )
        held = of_one_head(anchors, done.head)
        return {
            "lambda": strength,
            "before": [asdict(score) for score in done.before],
            "after": [asdict(score) for score in done.after],
            "distance": Penalty(done.model, held, ratios, "gradient", options["lineage"]).value(),
        }

    def run(strength: float | None) -> tuple[Score, Score, Sequence[Score]]:
        made = next((trial for trial in remembered if trial["lambda"] == strength), None)
        if made is None:
            made = make(strength)
            remembered.append(made)
            if folder is not None:
                folder.update(trials=remembered)
        before, after = ([Score(**score) for score in made[key]] for key in ("before", "after"))
        return before[0], after[0], after[1:]

    return search_lambda(run, lambda: float(remembered[0]["distance"]), tolerance, progress)


def shorter(epochs: int) -> int:
    """Return how many epochs a short run has."""
    return max(1, -(-epochs // 2))


def trials_cost(epochs: int) -> int:
    """Return how many epochs all the short runs have together."""
    return (1 + RUNS) * shorter(epochs)
