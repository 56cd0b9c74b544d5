"""What `run.json` says of a run: what was asked for, and what that turned out to be."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ewc_finetune.anchor import Anchor
from ewc_finetune.config import spoken
from ewc_finetune.data.domain import Domain, Fingerprint
from ewc_finetune.likelihood import Likelihood
from ewc_finetune.schedule import Schedule
from ewc_finetune.verbs.lambda_search import Search
from ewc_finetune.verbs.setup import Setup

# Of the data's samples, so many are looked at to know it again.
_LOOKED_AT = 64


def defaults() -> dict[str, Any]:
    """Return what `finetune` does unless it is told otherwise, by the names of the command line."""
    return asked_by(None, None, {})


def asked_by(model: Any, data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `finetune(model, data, **options)` is asked for, as it records it itself.

    Raises:
        UsageError: if an option of training has a value that it cannot have.
    """
    from ewc_finetune.verbs.finetune import finetune

    plain = {
        name: parameter.default
        for name, parameter in inspect.signature(finetune).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    training = {field.name for field in fields(Schedule)}
    own = {name: value for name, value in options.items() if name not in training}
    schedule = Schedule(**{name: value for name, value in options.items() if name in training})
    return asked({**plain, **own, "model": model, "data": data}, schedule)


def asked(arguments: Mapping[str, Any], schedule: Schedule) -> dict[str, Any]:
    """Return the options of a run as JSON has them, by the names of the command line."""
    unsaid = {"resume", "before_start", "progress", "training"}
    given = {name: value for name, value in {**arguments, **asdict(schedule)}.items() if name not in unsaid}
    given["anchors"] = listed(given["anchors"])
    if given["lambdas"] not in (None, "auto"):
        given["lambdas"] = listed(given["lambdas"])
    return {spoken(name): _plain(value) for name, value in given.items()}


def listed(value: Any) -> list[Any]:
    """Return what may be given singly as a list."""
    return [value] if isinstance(value, (Anchor, str, Path, int, float)) else list(value)


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; of what is no text or number, what to call it."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Anchor):
        return value.label
    if isinstance(value, Domain):
        return value.name
    if isinstance(value, (list, tuple, Mapping)):
        return [_plain(item) for item in value]
    return f"a {type(value).__name__}"


def found(
    job: Setup,
    anchors: Sequence[Anchor],
    strengths: Sequence[float],
    likelihood: Likelihood,
    schedule: Schedule,
    search: Search | None,
    same: bool,
) -> dict[str, Any]:
    """Return what the options of a run turned out to be; `same` is whether the data are the same whenever read."""
    start, domain = job.start, job.domain
    return {
        "model": start.label,
        "checkpoint": {"sha256": start.sha256, "architecture": start.record.architecture},
        "parameters": sum(parameter.numel() for parameter in start.model.parameters()),
        "anchors": [
            {
                "file": anchor.label,
                "sha256": anchor.digest,
                "lambda": strength,
                "provenance": asdict(anchor.provenance),
            }
            for anchor, strength in zip(anchors, strengths, strict=True)
        ],
        "data": {
            "spec": domain.name,
            "split": domain.split,
            "size": domain.size,
            "digest": _digest(domain) if same else None,
        },
        "eval": [{"spec": d.name, "split": d.split, "size": d.size} for d, _ in job.watched],
        "input": job.layout.to_json(),
        "likelihood": likelihood.name,
        "norm_stats": schedule.norm_stats,
        "lambda_search": None if search is None else search.to_json(),
    }


def _digest(domain: Domain) -> str | None:
    """Return a digest of a few samples from all over the data, if they can be had by number."""
    size = domain.size or 0
    if not domain.indexable or not size:
        return None
    looked_at = sorted({size * n // _LOOKED_AT for n in range(_LOOKED_AT)})
    fingerprint = Fingerprint()
    for inputs, labels in domain.subset(looked_at).batches(_LOOKED_AT):
        fingerprint.update(inputs, labels)
    return fingerprint.hexdigest()
