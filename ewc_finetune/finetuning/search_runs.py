"""The short runs of `--lambda auto`: each is a `finetune` of its own, from the start, on what is not held out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import of_one_head
from ewc_finetune.anchor.probe_tensors import records_of
from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import UsageError
from ewc_finetune.finetuning.aims import Aim, Best, Retaining, Trial, Within
from ewc_finetune.finetuning.head import head_names
from ewc_finetune.finetuning.lambda_search import RUNS, Search, search_lambda, split
from ewc_finetune.finetuning.schedule import Schedule, is_number
from ewc_finetune.modules.heads import find_head
from ewc_finetune.penalty.penalty import Penalty
from ewc_finetune.progress import OnlyBars, Progress
from ewc_finetune.runs.folder import RunFolder

# Arguments of `finetune` that a short run takes over.
_TAKEN_OVER = (
    "penalty_form",
    "lineage",
    "head",
    "freeze",
    "architecture",
    "trust_code",
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
    aim: Aim,
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
        aim: What is looked for.
        folder: Remembers the runs that are made, and knows those that were made before the run was stopped.
        progress: Told of every run.

    Raises:
        UsageError: if there is no anchor, or nothing can be held out.
    """
    if not anchors:
        raise UsageError("--lambda auto looks for the strength of a penalty, and there is none without --anchors")
    trained, held_out = split(domain, arguments["seed"])
    options = {name: arguments[name] for name in _TAKEN_OVER}
    options |= {**asdict(schedule), "epochs": shorter(schedule.epochs), "patience": None, "keep": None}
    remembered: list[Trial] = []
    if folder is not None:
        remembered += [Trial.read(document) for document in folder.document.get("trials", [])]

    def make(strength: float | None) -> Trial:
        from ewc_finetune.commands.finetune import finetune

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
        return Trial(
            strength=strength,
            before=done.before[0],
            score=done.after[0],
            watched=tuple(done.after[1:]),
            retention=tuple(done.retention),
            distance=Penalty(
                done.model, held, ratios, "gradient", options["lineage"], growing=_grown(done.model, options["head"])
            ).value(),
        )

    def run(strength: float | None) -> Trial:
        made = next((trial for trial in remembered if trial.strength == strength), None)
        if made is None:
            made = make(strength)
            remembered.append(made)
            if folder is not None:
                folder.keep_trials([trial.to_json() for trial in remembered])
        return made

    return search_lambda(run, aim, progress)


def _grown(model: nn.Module, head: str) -> tuple[str, ...]:
    """Return the parameters that may have more rows than the anchors know."""
    return head_names(find_head(model)) if head == "expand" else ()


def aim_of(arguments: Mapping[str, Any], chosen: Sequence[str], anchors: Sequence[Anchor]) -> Aim:
    """Return what a search is to look for.

    Args:
        arguments: Of the `finetune` that it is for.
        chosen: Names of the domains to select on.
        anchors: That it is held by.

    Raises:
        UsageError: if two aims are asked for, or a share that is none or that no probe can tell.
    """
    tolerance, share = arguments["tolerance"], arguments["retain"]
    if not is_number(tolerance) or not 0 < tolerance < 1:
        raise UsageError(f"tolerance is {tolerance}; expected a number, more than 0 and less than 1")
    _check_retain(share, anchors)
    if share is not None and chosen and arguments["lambdas"] == "auto":
        raise UsageError("--lambda auto goes by --retain or by --select-on, not by both; leave one of them out")
    if share is not None:
        return Retaining(share, _holding_better(anchors, arguments["penalty_form"]))
    return Best(chosen) if chosen else Within(tolerance)


def _check_retain(retain: float | None, anchors: Sequence[Anchor]) -> None:
    if retain is None:
        return
    if not is_number(retain) or not 0 < retain <= 1:
        raise UsageError(f"retain is {retain}; expected a share of answers, more than 0 and up to 1")
    if not any(probe.get("likelihood") != "gaussian" for anchor in anchors for probe in records_of(anchor.probes)):
        raise UsageError(
            "--retain goes by the answers to the probes in the anchors, and there is none in them (regressions have no "
            "answers to compare); ewc-ft consolidate --probe N keeps one while the old data is at hand"
        )


def _holding_better(anchors: Sequence[Anchor], form: str) -> list[str]:
    """Say what keeps more of what these anchors hold than any lambda does."""
    found = ["anchors with more inputs in the probe (consolidate --probe), of which each counts for less"]
    if any(anchor.provenance.curvature != "kfac" for anchor in anchors):
        found.append("anchors of K-FAC (consolidate --curvature kfac)")
    if form == "gradient":
        found.append("--penalty-form proximal, whose steps are exact at any lambda")
    return found


def shorter(epochs: int) -> int:
    """Return how many epochs a short run has."""
    return max(1, -(-epochs // 2))


def trials_cost(epochs: int) -> int:
    """Return how many epochs all the short runs have together, if none beyond `RUNS` are needed."""
    return (1 + RUNS) * shorter(epochs)
