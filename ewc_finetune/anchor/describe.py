"""Where an anchor comes from, in words: what `inspect`, the model card and the report all say of it.

Values are as JSON has them and may be written by anybody: numbers that are none are left out.
Where text of the file needs quotes around it, as in Markdown, the caller hands in text with the quotes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ewc_finetune.errors import counted
from ewc_finetune.storage.json_fields import is_number

CURVATURES = {
    "diagonal": "diagonal Fisher",
    "identity": "identity (plain L2)",
    "kfac": "K-FAC blocks and diagonal Fisher",
}


def joined(*parts: object, between: str = ", ") -> str:
    """Join the parts that are not empty."""
    return between.join(str(part) for part in parts if part)


def labelled(label: str, value: Any) -> str:
    """Return a value behind its label, or nothing if there is none."""
    return f"{label} {value}" if value else ""


def number(value: Any) -> str:
    """Return a number as text, or nothing if it is none."""
    return f"{value:g}" if is_number(value) else ""


def percent(share: float | None) -> str:
    """Return a share in %, with as many digits as it takes to tell it from zero, or a dash where it is not known."""
    if share is None:
        return "\N{EN DASH}"
    value = 100 * share
    if value >= 1000:
        return f"{value:,.0f}%"
    return f"{value:.0f}%" if value >= 100 else f"{value:.1f}%" if value >= 0.1 or value == 0 else f"{value:.1g}%"


def size(in_bytes: int) -> str:
    """Return a number of bytes in a unit that people use."""
    if in_bytes < 1e5:
        return f"{in_bytes / 1e3:.1f} kB" if in_bytes >= 1e3 else f"{in_bytes} bytes"
    return f"{in_bytes / 1e6:,.1f} MB" if in_bytes < 1e9 else f"{in_bytes / 1e9:,.1f} GB"


def data(record: object, samples: Any = None) -> str:
    """Name the data, with the samples that it has or that were used: `mnist, train split, 10 of 60,000 samples`."""
    known = _mapping(record)
    used = samples if is_number(samples) else 0
    every = known["size"] if is_number(known.get("size")) else 0
    of = f"{used:,.0f} of " if used and every else ""
    count = of + counted(every or used, "sample") if every or used else ""
    return joined(known.get("spec"), known.get("split") and f"{known['split']} split", count)


def probe(record: Mapping[str, Any], in_bytes: int) -> str:
    """Say whose inputs a probe has and how many bytes it takes in the file."""
    split = "" if record["split"] is None else f", {record['split']} split,"
    whose = f"{counted(record['samples'], 'sample')} of {record['data']}{split} as they are"
    return f"{whose}, and the model's answers to them ({size(in_bytes)})"


def storage(record: Mapping[str, Any]) -> str:
    """Say what it costs that a diagonal is in half precision (`half_precision.Storage`)."""
    raised = record["raised"]
    small = f"; {raised:,} values that are too small for it were raised to its smallest" if raised else ""
    return f"diagonal in {record['dtype']}, off by {record['error']:.2g} of its norm{small}"


def curvature(origin: Mapping[str, Any]) -> str:
    """Say what kind of curvature it is and, of a merged anchor, how it was merged."""
    kind = str(origin.get("curvature") or "")
    return joined(CURVATURES.get(kind, kind), merging(origin.get("merged")))


def merging(merged: object) -> str:
    """Say how anchors were merged, and how far the result is off."""
    if not isinstance(merged, Mapping) or not merged:
        return ""
    off = max(filter(is_number, _mapping(merged.get("kfac_distance")).values()), default=0.0)
    blocks = f"{merged['kfac_sum']} for sums of blocks" if merged.get("kfac_sum") else ""
    return joined(
        joined("merged", merged.get("form"), between=" "),
        labelled("gamma", number(merged.get("gamma"))) or labelled("lineage", merged.get("lineage")),
        blocks + (f" (off by up to {off:.0%})" if off else ""),
        f"from {counted(len(merged['parents']), 'anchor')}",
    )


def estimate(origin: Mapping[str, Any]) -> str:
    """Say by which estimator the Fisher was found and how sure it is; nothing of one that was not estimated."""
    if origin.get("curvature") == "identity" or origin.get("merged"):
        return ""
    draws = number(origin.get("draws"))
    return joined(origin.get("estimator"), draws and f"{draws} draws", standard_error(origin))


def standard_error(origin: Mapping[str, Any]) -> str:
    """Return the standard error of the Fisher's trace, as far as it is known."""
    error = _mapping(origin.get("standard_error")).get("trace")
    return f"standard error of the trace {percent(error)}" if is_number(error) else ""


def ancestor(entry: Mapping[str, Any], made_of: str = "") -> str:
    """Name an anchor that had a part in the model, or that another was merged from, and say how and what it is of."""
    return joined(
        entry.get("name"),
        labelled("mended at" if entry.get("mended") else "lambda", number(entry.get("lambda"))),
        labelled("steps of polish", number(entry.get("polished"))),
        made_of,
        labelled("SHA-256", entry.get("sha256")),
        entry.get("hub"),
    )


def parent(record: Mapping[str, Any]) -> str:
    """Say where one of the anchors comes from that another was merged from."""
    origin = _mapping(record["provenance"])
    made_of = joined(data(origin.get("data"), origin.get("samples")), curvature(origin), estimate(origin))
    return ancestor({**record, "name": origin.get("name")}, made_of)


def normalisation(record: object) -> str:
    """Say how many layers keep running statistics, and what was done with them."""
    known = _mapping(record)
    layers = known.get("layers")
    many = isinstance(layers, Sequence) and len(layers)
    return f"{counted(many, 'layer')}, running statistics {known.get('statistics')}" if many else ""


def scores(record: object) -> str:
    """Return the scores of the model by name, its accuracy in %."""
    known = {name: value for name, value in sorted(_mapping(record).items()) if is_number(value)}
    return joined(*(f"{n} {value:.2%}" if n == "accuracy" else f"{n} {value:.4g}" for n, value in known.items()))


def versions(record: object) -> list[str]:
    """Return each package with its version."""
    return [f"{name} {version}" for name, version in sorted(_mapping(record).items())]


def by_reason(excluded: object) -> dict[str, list[str]]:
    """Return the parameters without curvature by the reason why they have none."""
    reasons: dict[str, list[str]] = {}
    for name, reason in _mapping(excluded).items():
        reasons.setdefault(str(reason), []).append(name)
    return reasons


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
