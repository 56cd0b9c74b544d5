"""Adapt a deployed model to a new domain without losing the old one: elastic weight consolidation.

The verbs of the command line under the same names, on any `torch.nn.Module`:

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
    from ewc_finetune.anchor import Anchor
    from ewc_finetune.curvature.check import check_rule
    from ewc_finetune.curvature.fisher import compute_fisher
    from ewc_finetune.curvature.rules import register_rule
    from ewc_finetune.errors import EwcError
    from ewc_finetune.penalty import Penalty
    from ewc_finetune.probe import Retention, measure
    from ewc_finetune.probe_file import Probe
    from ewc_finetune.provenance import Provenance
    from ewc_finetune.verbs.consolidate import consolidate
    from ewc_finetune.verbs.dry_run import Estimate, dry_run
    from ewc_finetune.verbs.evaluate import Score, evaluate
    from ewc_finetune.verbs.finetune import Finetuned, finetune
    from ewc_finetune.verbs.inspect import Inspection, inspect
    from ewc_finetune.verbs.merge import merge
    from ewc_finetune.verbs.pull import Pulled, pull
    from ewc_finetune.verbs.push import Pushed, push
    from ewc_finetune.verbs.report import Report, report
    from ewc_finetune.verbs.sweep import Sweep, sweep

__all__ = [
    "Anchor",
    "Estimate",
    "EwcError",
    "Finetuned",
    "Inspection",
    "Penalty",
    "Probe",
    "Provenance",
    "Pulled",
    "Pushed",
    "Report",
    "Retention",
    "Score",
    "Sweep",
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
    "Anchor": "anchor",
    "Estimate": "verbs.dry_run",
    "EwcError": "errors",
    "Finetuned": "verbs.finetune",
    "Inspection": "verbs.inspect",
    "Penalty": "penalty",
    "Probe": "probe_file",
    "Provenance": "provenance",
    "Pulled": "verbs.pull",
    "Pushed": "verbs.push",
    "Retention": "probe",
    "Report": "verbs.report",
    "Score": "verbs.evaluate",
    "Sweep": "verbs.sweep",
    "check_rule": "curvature.check",
    "consolidate": "verbs.consolidate",
    "compute_fisher": "curvature.fisher",
    "dry_run": "verbs.dry_run",
    "evaluate": "verbs.evaluate",
    "finetune": "verbs.finetune",
    "inspect": "verbs.inspect",
    "measure": "probe",
    "merge": "verbs.merge",
    "pull": "verbs.pull",
    "push": "verbs.push",
    "register_rule": "curvature.rules",
    "report": "verbs.report",
    "sweep": "verbs.sweep",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
