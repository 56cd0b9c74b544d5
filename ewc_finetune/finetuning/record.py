"""What `run.json` says of a run: what was asked for, and what that turned out to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.finetuning.lambda_search import Search
from ewc_finetune.finetuning.plan import Setup
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.likelihood.base import Likelihood


def found(
    job: Setup,
    anchors: Sequence[Anchor],
    strengths: Sequence[float],
    likelihood: Likelihood,
    schedule: Schedule,
    search: Search | None,
    identities: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what the options of a run turned out to be; `identities` is what `identify` gave."""
    start, domain = job.start, job.domain
    return {
        "model": start.label,
        "checkpoint": {"sha256": start.sha256, "architecture": start.record.architecture},
        "parameters": sum(parameter.numel() for parameter in start.model.parameters()),
        "anchors": [
            {
                "file": anchor.label,
                "sha256": anchor.digest,
                "hub": None if anchor.place is None else str(anchor.place),
                "lambda": strength,
                "provenance": asdict(anchor.provenance),
            }
            for anchor, strength in zip(anchors, strengths, strict=True)
        ],
        "data": {
            "spec": domain.name,
            "split": domain.split,
            "size": domain.size,
            "digest": identities["the digest of the data"],
        },
        "eval": [{"spec": d.name, "split": d.split, "size": d.size} for d, _ in job.watched],
        "input": job.layout.to_json(),
        "likelihood": likelihood.name,
        "norm_stats": schedule.norm_stats,
        "lambda_search": None if search is None else search.to_json(),
        "identities": dict(identities),
    }
