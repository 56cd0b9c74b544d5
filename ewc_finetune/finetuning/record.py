"""What the options of a run turned out to be, as `run.json` has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ewc_finetune.finetuning.job import Job
from ewc_finetune.finetuning.lambda_search import Search
from ewc_finetune.finetuning.plan import Plan
from ewc_finetune.rehearsal.held_out import held_out


def findings(
    plan: Plan, job: Job, identities: Mapping[str, Any], strengths: Sequence[float], search: Search | None
) -> dict[str, Any]:
    """Return what the options of a run turned out to be; `identities` is what `identify` gave, before the job."""
    start, domain, watched = job.start, job.new.domain, [bound.domain for bound in job.watched]
    return {
        "model": start.label,
        "checkpoint": {"sha256": start.sha256, "architecture": start.metadata.architecture},
        "parameters": sum(parameter.numel() for parameter in start.model.parameters()),
        "anchors": [
            {
                "file": anchor.label,
                "sha256": anchor.digest,
                "hub": None if anchor.place is None else str(anchor.place),
                "lambda": strength,
                "provenance": asdict(anchor.provenance),
            }
            for anchor, strength in zip(plan.anchors, strengths, strict=True)
        ],
        "data": {
            "spec": plan.domain.name,
            "split": plan.domain.split,
            "size": domain.size,
            "digest": identities["the digest of the data"],
            "parts": [{"spec": part.name, "size": part.samples, "drawn": part.drawn} for part in domain.parts],
        },
        "new": plan.new,
        "eval": [{"spec": one.name, "split": one.split, "size": one.size} for one in watched],
        "rehearsed": _rehearsed(plan, job),
        "input": job.new.input_spec.to_json(),
        "likelihood": plan.likelihood.name,
        "norm_stats": plan.schedule.norm_stats,
        "lambda_search": None if search is None else search.to_json(),
        "identities": dict(identities),
    }


def _rehearsed(plan: Plan, job: Job) -> list[dict[str, Any]]:
    """Return what is rehearsed; where nothing is (`--rehearse-weight 0`), what the probes are measured by."""
    if job.rehearsal is not None:
        return [memory.to_json() for memory in job.rehearsal.memories]
    return [
        {
            "teacher": anchor.label,
            "data": probe.data,
            "samples": 0,
            "variations": 0,
            "held_out": held_out(probe, anchor.label),
            "left_out": 0,
        }
        for anchor in (plan.anchors if plan.rehearsed else ())
        for probe in anchor.probes
    ]
