"""Adapt a deployed model to a new domain without losing the old one: elastic weight consolidation.

The commands under the same names, on any `torch.nn.Module`:

>>> import ewc_finetune
>>> anchor = ewc_finetune.consolidate(model, old_data)
>>> ewc_finetune.finetune(model, new_data, anchors=anchor)
>>> ewc_finetune.evaluate(model, old_data)

Names are imported when they are first used, so that `import ewc_finetune` does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ewc_finetune._version import __version__

if TYPE_CHECKING:
    from ewc_finetune.anchor.anchor import Anchor as Anchor
    from ewc_finetune.anchor.probe_tensors import Probe as Probe
    from ewc_finetune.anchor.provenance import Provenance as Provenance
    from ewc_finetune.anchor.summary import Inspection as Inspection
    from ewc_finetune.commands.consolidate import consolidate as consolidate
    from ewc_finetune.commands.dry_run import dry_run as dry_run
    from ewc_finetune.commands.evaluate import evaluate as evaluate
    from ewc_finetune.commands.finetune import finetune as finetune
    from ewc_finetune.commands.inspect import inspect as inspect
    from ewc_finetune.commands.mend import mend as mend
    from ewc_finetune.commands.merge import merge as merge
    from ewc_finetune.commands.pull import Pulled as Pulled
    from ewc_finetune.commands.pull import pull as pull
    from ewc_finetune.commands.push import Pushed as Pushed
    from ewc_finetune.commands.push import push as push
    from ewc_finetune.commands.report import Report as Report
    from ewc_finetune.commands.report import report as report
    from ewc_finetune.commands.sweep import sweep as sweep
    from ewc_finetune.curvature.check_rule import check_rule as check_rule
    from ewc_finetune.curvature.fisher import compute_fisher as compute_fisher
    from ewc_finetune.curvature.options import ConsolidateOptions as ConsolidateOptions
    from ewc_finetune.curvature.rules import register_rule as register_rule
    from ewc_finetune.errors import EwcError as EwcError
    from ewc_finetune.evaluation.cost import Estimate as Estimate
    from ewc_finetune.evaluation.evaluation import Evaluation as Evaluation
    from ewc_finetune.evaluation.options import EvaluateOptions as EvaluateOptions
    from ewc_finetune.evaluation.probe import Retention as Retention
    from ewc_finetune.evaluation.probe import measure as measure
    from ewc_finetune.evaluation.score import Score as Score
    from ewc_finetune.finetuning.finetuned import Finetuned as Finetuned
    from ewc_finetune.finetuning.options import FinetuneOptions as FinetuneOptions
    from ewc_finetune.penalty.options import MergeOptions as MergeOptions
    from ewc_finetune.penalty.penalty import Penalty as Penalty
    from ewc_finetune.rehearsal.rehearsal import Rehearsal as Rehearsal
    from ewc_finetune.sweeps.options import SweepOptions as SweepOptions
    from ewc_finetune.sweeps.run import Sweep as Sweep

# In which module each name is; type checkers read the imports above.
_HOMES = {
    "Anchor": "anchor.anchor",
    "ConsolidateOptions": "curvature.options",
    "Estimate": "evaluation.cost",
    "EvaluateOptions": "evaluation.options",
    "Evaluation": "evaluation.evaluation",
    "EwcError": "errors",
    "FinetuneOptions": "finetuning.options",
    "Finetuned": "finetuning.finetuned",
    "Inspection": "anchor.summary",
    "MergeOptions": "penalty.options",
    "Penalty": "penalty.penalty",
    "Probe": "anchor.probe_tensors",
    "Provenance": "anchor.provenance",
    "Pulled": "commands.pull",
    "Pushed": "commands.push",
    "Rehearsal": "rehearsal.rehearsal",
    "Report": "commands.report",
    "Retention": "evaluation.probe",
    "Score": "evaluation.score",
    "Sweep": "sweeps.run",
    "SweepOptions": "sweeps.options",
    "check_rule": "curvature.check_rule",
    "compute_fisher": "curvature.fisher",
    "consolidate": "commands.consolidate",
    "dry_run": "commands.dry_run",
    "evaluate": "commands.evaluate",
    "finetune": "commands.finetune",
    "inspect": "commands.inspect",
    "measure": "evaluation.probe",
    "mend": "commands.mend",
    "merge": "commands.merge",
    "pull": "commands.pull",
    "push": "commands.push",
    "register_rule": "curvature.rules",
    "report": "commands.report",
    "sweep": "commands.sweep",
}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the names of what is listed once


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
