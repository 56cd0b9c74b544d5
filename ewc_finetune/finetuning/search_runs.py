"""The short runs of `--lambda auto`: each is a fine-tune of its own, from the start, on what is not held out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ewc_finetune.anchor.heads import of_one_head
from ewc_finetune.errors import UsageError
from ewc_finetune.finetuning.aims import Trial
from ewc_finetune.finetuning.finetuned import Finetuned
from ewc_finetune.finetuning.head import head_names
from ewc_finetune.finetuning.job import ready
from ewc_finetune.finetuning.lambda_search import RUNS, Search, search_lambda, split
from ewc_finetune.finetuning.options import DEFAULT_TOLERANCE, FinetuneOptions
from ewc_finetune.finetuning.plan import Plan
from ewc_finetune.finetuning.plan import plan as plan_of
from ewc_finetune.modules.heads import find_head
from ewc_finetune.penalty.penalty import Penalty
from ewc_finetune.progress import OnlyBars, Silent
from ewc_finetune.rehearsal.memory import Memory
from ewc_finetune.rehearsal.options import PROBES
from ewc_finetune.runs.folder import RunFolder


def search_by_trials(
    plan: Plan,
    finetune: Callable[[FinetuneOptions, Sequence[Memory]], Finetuned],
    folder: RunFolder | None,
) -> Search:
    """Look for lambda with short runs; see `search_lambda`.

    Args:
        plan: The fine-tune that a lambda is looked for.
        finetune: Makes one, of which what is rehearsed may be answered.
        folder: Remembers the runs that are made, and knows those that were made before the run was stopped.

    Raises:
        UsageError: if there is no anchor, or nothing can be held out.
    """
    if not plan.anchors:
        raise UsageError("--lambda auto looks for the strength of a penalty, and there is none without --anchors")
    short = _short(plan)
    remembered: list[Trial] = []
    if folder is not None:
        remembered += [Trial.read(document) for document in folder.document.get("trials", [])]

    def run(strength: float | None) -> Trial:
        made = next((trial for trial in remembered if trial.strength == strength), None)
        if made is None:
            lambdas = [0.0 if strength is None else strength * ratio for ratio in plan.strengths]
            weight = 0.0 if strength is None else short.rehearse_weight  # a plain run is one without any help
            options = replace(short, model=_fresh(short.model), lambdas=lambdas, rehearse_weight=weight)
            done = finetune(options, plan.answered)
            made = _trial(plan, strength, done)
            remembered.append(made)
            if folder is not None:
                folder.keep_trials([trial.to_json() for trial in remembered])
        return made

    return search_lambda(run, plan.aim, plan.options.progress)


def answers(plan: Plan) -> Sequence[Memory]:
    """Have the old model answer once what all the runs rehearse; empty where none do, or each is to ask for itself.

    That is so of merged anchors: data is answered by the model that is trained then, whose head a run may expand.

    Args:
        plan: The fine-tune that a lambda is looked for.
    """
    anchors, options = plan.anchors, plan.options
    if not (plan.rehearsed and options.rehearses and anchors) or any(one.provenance.merged for one in anchors):
        return ()
    short = replace(_short(plan), model=_fresh(options.model), lambdas=[0.0] * len(anchors))
    with ready(plan_of(short), None, Silent()) as job:
        return [] if job.rehearsal is None else job.rehearsal.memories


def _fresh(model: Any) -> Any:
    """Return a copy of a module that is to be trained, or where one is read from."""
    return copy.deepcopy(model) if isinstance(model, nn.Module) else model


def _short(plan: Plan) -> FinetuneOptions:
    """Return the options of a short run, but for lambda."""
    trained, held_out = split(plan.domain, plan.options.seed)
    return replace(
        plan.options,
        data=[trained, *plan.others],
        eval_new=None,
        anchors=plan.anchors,
        # What was generated once, with where it is kept.
        rehearse=[PROBES if domain is None else domain for domain in plan.rehearsed],
        eval_on=[held_out, *plan.scored],
        epochs=shorter(plan.schedule.epochs),
        norm_stats=plan.schedule.norm_stats,
        # Only the whole run chooses a state, stops early and writes files.
        patience=None,
        keep=None,
        retain=None,
        select_on=(),
        metrics=(),
        tolerance=DEFAULT_TOLERANCE,
        output=None,
        overwrite=False,
        resume=None,
        tensorboard=False,
        progress=OnlyBars(plan.options.progress),
    )


def _trial(plan: Plan, strength: float | None, done: Finetuned) -> Trial:
    """Return what is to be known of a short run."""
    held = of_one_head(plan.anchors, done.head)
    growing = _grown(done.model, plan.options.head)
    penalty = Penalty(done.model, held, plan.strengths, "gradient", plan.options.lineage, growing=growing)
    return Trial(
        strength=strength,
        before=done.before[0],
        score=done.after[0],
        watched=tuple(done.after[1:]),
        retention=tuple(done.retention),
        distance=penalty.value(),
    )


def _grown(model: nn.Module, head: str) -> tuple[str, ...]:
    """Return the parameters that may have more rows than the anchors know."""
    return head_names(find_head(model)) if head == "expand" else ()


def shorter(epochs: int) -> int:
    """Return how many epochs a short run has."""
    return max(1, -(-epochs // 2))


def trials_cost(epochs: int) -> int:
    """Return how many epochs all the short runs have together, if none beyond `RUNS` are needed."""
    return (1 + RUNS) * shorter(epochs)
