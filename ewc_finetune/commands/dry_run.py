"""`dry_run`: what a command would need, without doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ewc_finetune.commands.consolidate import consolidate
from ewc_finetune.commands.consolidate import cost as cost_of_consolidation
from ewc_finetune.commands.consolidate import plan as plan_consolidation
from ewc_finetune.commands.finetune import finetune
from ewc_finetune.commands.sweep import sweep
from ewc_finetune.curvature.options import ConsolidateOptions
from ewc_finetune.errors import UsageError
from ewc_finetune.evaluation.cost import Estimate
from ewc_finetune.finetuning.cost import cost as cost_of_finetuning
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.plan import plan as plan_finetuning
from ewc_finetune.specs.options import check_keywords
from ewc_finetune.sweeps.cost import cost as cost_of_sweep
from ewc_finetune.sweeps.options import SweepOptions
from ewc_finetune.sweeps.plan import plan as plan_sweep


def dry_run(command: Callable[..., object], model: Any, data: Any, **options: Any) -> Estimate:
    """Do what `consolidate`, `finetune` or `sweep` does up to its first step, try a few batches, and write nothing.

    Models are left as they were.

    Args:
        command: `consolidate`, `finetune` or `sweep`.
        model: The model that the command would be given.
        data: The data that the command would be given.
        options: The command's other options, by name.

    Raises:
        EwcError: as the command would.
        TypeError: if it is another one, or has no such option.
    """
    if command not in _PLANS:
        raise TypeError(f"{command} has no dry run; consolidate, finetune and sweep have one")
    if options.get("resume") is not None:
        raise UsageError("--dry-run is of whole runs; leave it out to go on with one, or leave out --resume")
    declared, plan, cost = _PLANS[command]
    check_keywords(command, options)
    return cost(plan(declared(model, data, **options)))


_PLANS: dict[Callable[..., object], tuple[Any, Callable[..., Any], Callable[..., Estimate]]] = {
    finetune: (FinetuneOptions, plan_finetuning, cost_of_finetuning),
    sweep: (SweepOptions, plan_sweep, cost_of_sweep),
    consolidate: (ConsolidateOptions, plan_consolidation, cost_of_consolidation),
}
