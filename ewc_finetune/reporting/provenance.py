"""Where every anchor of a run and the run itself come from, as names and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ewc_finetune.reporting.measures import NOTHING, listed
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
            "Started from", _words(found.get("model"), checkpoint.get("architecture")), _text(checkpoint.get("sha256"))
        ),
        Fact("Data", _data(data, None), _text(data.get("digest"))),
        Fact("Input", _input(found.get("input"))),
        Fact("Likelihood", _text(found.get("likelihood"))),
        Fact("Normalisation", _statistics(found.get("norm_stats"))),
        Fact("Parameters", _count(found.get("parameters"))),
        Fact("Seed", _text(outcome.options.get("seed"))),
        Fact("Versions", _versions(document.get("versions"))),
        Fact("Platform", _text(document.get("platform"))),
    ]
    return [fact for fact in facts if fact.value or fact.digest]


def _origin(anchor: Mapping[str, Any]) -> Origin:
    source, strength = anchor["provenance"], anchor.get("lambda")
    checkpoint, data = source.get("checkpoint") or {}, source.get("data") or {}
    merged = source.get("merged")
    facts = [
        Fact("File", _text(anchor.get("file")), _text(anchor.get("sha256"))),
        Fact("Lambda", NOTHING if strength is None else f"{strength:g}"),
        Fact("Data", _data(data, source.get("samples")), _text(data.get("fingerprint"))),
        Fact("Curvature", _curvature(source)),
        Fact("Estimator", "" if merged else _estimator(source)),
        Fact("Likelihood", _text(source.get("likelihood"))),
        Fact(
            "Checkpoint",
            _words(checkpoint.get("file"), checkpoint.get("architecture")),
            _text(checkpoint.get("sha256")),
        ),
        Fact("Trained under", "; ".join(_pulled(entry) for entry in source.get("lineage") or [])),
        Fact("Normalisation", _normalisation(source.get("normalisation") or {})),
        Fact("Left free", "; ".join(f"{name}: {why}" for name, why in (source.get("excluded") or {}).items())),
        Fact("Scores", _scores(source.get("scores") or {})),
        Fact("Probes", _probes(source)),
        Fact("Made", _time(source.get("created")) or "no time recorded"),
        Fact("Versions", _versions(source.get("versions"))),
    ]
    for number, parent in enumerate((merged or {}).get("parents") or [], start=1):
        facts.append(Fact(f"Parent {number}", _parent(parent), _text(parent.get("sha256"))))
    name = _text(source.get("name")) or "anchor"
    return Origin(name, [fact for fact in facts if fact.value or fact.digest])


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _words(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _count(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else ""


def _time(value: Any) -> str:
    """Return an ISO time as people write it."""
    text = _text(value).replace("T", " ", 1)
    return text.removesuffix("+00:00").removesuffix("Z") + (" UTC" if text.endswith(("+00:00", "Z")) else "")


def _data(data: Mapping[str, Any], samples: Any) -> str:
    split, size = data.get("split"), data.get("size")
    used = f"{_count(samples)} of {_count(size)} samples" if samples and size else ""
    used = used or (f"{_count(samples or size)} samples" if samples or size else "")
    return _words(data.get("spec"), split and f"{split} split", used)


def _input(layout: Any) -> str:
    if isinstance(layout, dict):
        return _words(*(f"{name} {_shape(value)}" for name, value in layout.items() if value not in (None, [], {}, "")))
    return _text(layout)


def _shape(value: Any) -> str:
    whole = isinstance(value, list) and all(isinstance(item, int) for item in value)
    return " \N{MULTIPLICATION SIGN} ".join(map(str, value)) if whole else _text(value)


def _curvature(source: Mapping[str, Any]) -> str:
    kind = source.get("curvature")
    names = {
        "kfac": "K-FAC blocks, diagonal elsewhere",
        "identity": "identity (plain L2)",
        "diagonal": "diagonal Fisher",
    }
    merged = source.get("merged")
    how = f"merged {merged.get('form') or ''} from {len(merged['parents'])} anchors" if merged else ""
    return _words(names.get(str(kind), kind), how)


def _estimator(source: Mapping[str, Any]) -> str:
    if source.get("curvature") == "identity":
        return ""
    draws, error = source.get("draws"), (source.get("standard_error") or {}).get("trace")
    spread = f"standard error of the trace {100 * error:.1f}%" if isinstance(error, (int, float)) else ""
    return _words(source.get("estimator"), draws and f"{draws} draws", spread)


def _pulled(entry: Mapping[str, Any]) -> str:
    strength = entry.get("lambda")
    return _words(
        entry.get("name"),
        None if strength is None else f"lambda {strength}",
        _text(entry.get("sha256"))[:12],
        entry.get("hub"),
    )


def _statistics(policy: Any) -> str:
    return f"running statistics {policy}" if policy else ""


def _normalisation(found: Mapping[str, Any]) -> str:
    layers = found.get("layers")
    if not isinstance(layers, list) or not layers:
        return "no layers with statistics"
    return f"{len(layers)} {'layer' if len(layers) == 1 else 'layers'}, running statistics {found.get('statistics')}"


def _scores(scores: Mapping[str, Any]) -> str:
    return listed([f"{name} {value:.4g}" for name, value in sorted(scores.items()) if isinstance(value, (int, float))])


def _probes(source: Mapping[str, Any]) -> str:
    return "; ".join(
        _words(probe.get("data"), probe.get("samples") and f"{_count(probe['samples'])} samples")
        for probe in source.get("probes") or []
    )


def _versions(versions: Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) if isinstance(versions, dict) else ""


def _parent(parent: Mapping[str, Any]) -> str:
    source = parent["provenance"]
    strength = parent.get("lambda")
    return _words(
        source.get("name"),
        None if strength is None else f"lambda {strength:g}",
        _data(source.get("data") or {}, source.get("samples")),
        _curvature(source) if not source.get("merged") else "itself merged",
        _estimator(source),
    )
