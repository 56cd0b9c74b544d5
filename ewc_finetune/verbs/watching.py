"""The domains that a fine-tune scores, and those among them that a choice goes by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ewc_finetune.anchor import Anchor
from ewc_finetune.choices import Head
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.sources import resolve_domain, resolve_domains
from ewc_finetune.progress import Progress


def watched_domains(
    eval_on: Sequence[Any] | Mapping[str, Any] | None,
    data: Any,
    domain: Domain,
    anchors: Sequence[Anchor],
    data_dir: str | Path | None,
    progress: Progress,
    head: Head,
) -> tuple[list[Domain], list[str | None]]:
    """Return the domains to score, and the spec of each that has one.

    They are those asked for, else the test split of the new domain.
    """
    if head == "new" and anchors:
        progress.note(
            "domains are scored with the new head; for an old one's: ewc-ft evaluate CHECKPOINT --head ANCHOR"
        )
    if eval_on is not None:
        found = resolve_domains(eval_on, "test", data_dir)
        given = list(eval_on.values()) if isinstance(eval_on, Mapping) else [eval_on] if len(found) == 1 else eval_on
        given = given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given
        specs = [item if isinstance(item, str) else None for item in given]
        return _named_apart(found), specs if len(specs) == len(found) else [None] * len(found)
    found = [resolve_domain(data, "test", data_dir)] if isinstance(data, str) and domain.split is not None else []
    if not found:
        progress.note(f"{domain.name} has no test split, so nothing is scored; --eval names domains to score")
    elif anchors and head != "new":
        progress.note(
            f"only {domain.name} is scored; where old data is at hand, --eval OLD --eval NEW shows what stays"
        )
    return found, [data for _ in found]


def also_selected(
    scored: Sequence[Domain], specs: list[str | None], select_on: Sequence[Any], data_dir: str | Path | None
) -> tuple[list[Domain], list[str]]:
    """Return the domains to score with those to select on among them, and the names of these; `specs` grows alike."""
    every, names = list(scored), []
    for item in select_on:
        if isinstance(item, str) and item in specs:
            names.append(every[specs.index(item)].name)
            continue
        (domain,) = resolve_domains([item], "test", data_dir)
        same = [other.name for other in every if other.samples is domain.samples]
        if not same:
            every = _named_apart([*every, domain])
            specs.append(item if isinstance(item, str) else None)
        names += same[:1] or [every[-1].name]
    return every, names


def _named_apart(domains: Sequence[Domain]) -> list[Domain]:
    """Return domains of which no two have the same name: later ones are numbered."""
    found: list[Domain] = []
    for domain in domains:
        names, name, number = {other.name for other in found}, domain.name, 2
        while name in names:
            name, number = f"{domain.name} ({number})", number + 1
        found.append(replace(domain, name=name) if name != domain.name else domain)
    return found
