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
    from ewc_finetune.anchor.anchor import Anchor
    from ewc_finetune.anchor.probe_tensors import Probe
    from ewc_finetune.anchor.provenance import Provenance
    from ewc_finetune.anchor.summary import Inspection
    from ewc_finetune.commands.consolidate import consolidate
    from ewc_finetune.commands.dry_run import dry_run
    from ewc_finetune.commands.evaluate import evaluate
    from ewc_finetune.commands.finetune import finetune
    from ewc_finetune.commands.inspect import inspect
    from ewc_finetune.commands.merge import merge
    from ewc_finetune.commands.pull import Pulled, pull
    from ewc_finetune.commands.push import Pushed, push
    from ewc_finetune.commands.report import Report, report
    from ewc_finetune.commands.sweep import sweep
    from ewc_finetune.curvature.check_rule import check_rule
    from ewc_finetune.curvature.fisher import compute_fisher
    from ewc_finetune.curvature.options import ConsolidateOptions
    from ewc_finetune.curvature.rules import register_rule
    from ewc_finetune.errors import EwcError
    from ewc_finetune.evaluation.cost import Estimate
    from ewc_finetune.evaluation.options import EvaluateOptions
    from ewc_finetune.evaluation.probe import Retention, measure
    from ewc_finetune.evaluation.score import Score
    from ewc_finetune.finetuning.finetuned import Finetuned
    from ewc_finetune.finetuning.options import FinetuneOptions
    from ewc_finetune.penalty.options import MergeOptions
    from ewc_finetune.penalty.penalty import Penalty
    from ewc_finetune.sweeps.options import SweepOptions
    from ewc_finetune.sweeps.run import Sweep

__all__ = [
    "Anchor",
    "ConsolidateOptions",
    "Estimate",
    "EvaluateOptions",
    "EwcError",
    "FinetuneOptions",
    "Finetuned",
    "Inspection",
    "MergeOptions",
    "Penalty",
    "Probe",
    "Provenance",
    "Pulled",
    "Pushed",
    "Report",
    "Retention",
    "Score",
    "Sweep",
    "SweepOptions",
    "__version__",
    "check_rule",
    "compute_fisher",
    "consolidate",
    "dry_run",
    "evaluate",
    "finetune",
    "inspect",
    "measure",
    "merge",
    "pull",
    "push",
    "register_rule",
    "report",
    "sweep",
]

_HOMES = {
    "Anchor": "anchor.anchor",
    "ConsolidateOptions": "curvature.options",
    "Estimate": "evaluation.cost",
    "EvaluateOptions": "evaluation.options",
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
    "merge": "commands.merge",
    "pull": "commands.pull",
    "push": "commands.push",
    "register_rule": "curvature.rules",
    "report": "commands.report",
    "sweep": "commands.sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
