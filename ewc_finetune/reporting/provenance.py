"""Where every anchor of a run and the run itself come from, as names and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ewc_finetune.anchor import describe
from ewc_finetune.anchor.describe import joined
from ewc_finetune.reporting.measures import NOTHING
from ewc_finetune.reporting.outcome import Outcome


@dataclass(frozen=True)
class Fact:
    """One line of provenance.

    Attributes:
        name: What it is.
        value: What is shown.
        digest: A digest behind it, of which the page shows the beginning.
    """

    name: str
    value: str
    digest: str = ""


@dataclass(frozen=True)
class Origin:
    """Where one anchor comes from."""

    name: str
    facts: list[Fact]


def origins(outcome: Outcome) -> list[Origin]:
    """Return where each of a run's anchors comes from."""
    return [_origin(anchor) for anchor in outcome.anchors]


def run_facts(outcome: Outcome) -> list[Fact]:
    """Return where the run itself comes from, and what it was on."""
    document, found = outcome.run.document, outcome.found
    checkpoint, data = found.get("checkpoint") or {}, found.get("data") or {}
    facts = [
        Fact("Status", document["status"]),
        Fact("Started", _time(document.get("started"))),
        Fact("Ended", _time(document.get("ended"))),
        Fact(
            "Started from", joined(found.get("model"), checkpoint.get("architecture")), _text(checkpoint.get("sha256"))
        ),
        Fact("Data", describe.data(data), _text(data.get("digest"))),
        Fact("Of these in each epoch", _parts(data.get("parts"))),
        Fact("Input", _input(found.get("input"))),
        Fact("Likelihood", _text(found.get("likelihood"))),
        Fact("Normalisation", _statistics(found.get("norm_stats"))),
        Fact("Parameters", f"{found['parameters']:,.0f}" if found.get("parameters") else ""),
        Fact("Seed", _text(outcome.options.get("seed"))),
        Fact("Versions", ", ".join(describe.versions(document.get("versions")))),
        Fact("Platform", _text(document.get("platform"))),
    ]
    return [fact for fact in facts if fact.value or fact.digest]


def _parts(parts: Sequence[Mapping[str, Any]] | None) -> str:
    """Say how much of each part of what is mixed an epoch has."""
    return "; ".join(f"{part['drawn']:,.0f} of {part['size']:,.0f} of {part['spec']}" for part in parts or ())


def _origin(anchor: Mapping[str, Any]) -> Origin:
    source, strength = anchor["provenance"], anchor.get("lambda")
    checkpoint, data = source.get("checkpoint") or {}, source.get("data") or {}
    merged, free = source.get("merged") or {}, describe.by_reason(source.get("excluded"))
    facts = [
        Fact("File", _text(anchor.get("file")), _text(anchor.get("sha256"))),
        Fact("Lambda", NOTHING if strength is None else f"{strength:g}"),
        Fact("Data", describe.data(data, source.get("samples")), _text(data.get("fingerprint"))),
        Fact("Curvature", describe.curvature(source)),
        Fact("Estimator", describe.estimate(source)),
        Fact("Likelihood", _text(source.get("likelihood"))),
        Fact(
            "Checkpoint",
            joined(checkpoint.get("file"), checkpoint.get("architecture")),
            _text(checkpoint.get("sha256")),
        ),
        Fact("Lineage", "; ".join(_ancestor(entry) for entry in source.get("lineage") or [])),
        Fact("Normalisation", describe.normalisation(source.get("normalisation")) or "no layers with statistics"),
        Fact("Left free", "; ".join(f"{', '.join(names)}: {reason}" for reason, names in free.items())),
        Fact("Scores", describe.scores(source.get("scores"))),
        Fact("Probes", "; ".join(map(_probe, source.get("probes") or []))),
        Fact("Made", _time(source.get("created")) or "no time recorded"),
        Fact("Versions", ", ".join(describe.versions(source.get("versions")))),
    ]
    for number, parent in enumerate(merged.get("parents") or [], start=1):
        facts.append(Fact(f"Parent {number}", describe.parent({**parent, "sha256": ""}), _text(parent.get("sha256"))))
    name = _text(source.get("name")) or "anchor"
    return Origin(name, [fact for fact in facts if fact.value or fact.digest])


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _time(value: Any) -> str:
    """Return an ISO time as people write it."""
    text = _text(value).replace("T", " ", 1)
    return text.removesuffix("+00:00").removesuffix("Z") + (" UTC" if text.endswith(("+00:00", "Z")) else "")


def _input(layout: Any) -> str:
    if isinstance(layout, dict):
        return joined(*(f"{name} {_shape(value)}" for name, value in layout.items() if value not in (None, [], {}, "")))
    return _text(layout)


def _shape(value: Any) -> str:
    whole = isinstance(value, list) and all(isinstance(item, int) for item in value)
    return " \N{MULTIPLICATION SIGN} ".join(map(str, value)) if whole else _text(value)


def _statistics(policy: Any) -> str:
    return f"running statistics {policy}" if policy else ""


def _ancestor(entry: Mapping[str, Any]) -> str:
    return describe.ancestor({**entry, "sha256": _text(entry.get("sha256"))[:12]})


def _probe(probe: Mapping[str, Any]) -> str:
    return describe.data({"spec": probe.get("data"), "split": probe.get("split"), "size": probe.get("samples")})
