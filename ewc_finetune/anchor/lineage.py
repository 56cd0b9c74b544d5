"""Which anchors had a part in which: the lineage that an anchor records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ewc_finetune.anchor.anchor import Anchor


def of_another_digest(anchor: Anchor, anchors: Sequence[Anchor]) -> str | None:
    """Say so where the lineage of others knows an anchor of this name by another digest alone."""
    parts = [entry for other in anchors for entry in other.provenance.lineage]
    known = {str(entry.get("sha256")) for entry in parts if entry.get("name") == anchor.provenance.name}
    if not known or anchor.digest is None or anchor.digest in known:
        return None
    return (
        f"{anchor.label} is not the anchor {anchor.provenance.name!r} that had a part in the weights: its SHA-256 is "
        f"{anchor.digest:.12}..., and was {min(known):.12}... It was made anew, replaced or damaged since"
    )


def lineage_of(anchors: Sequence[Anchor], lambdas: Sequence[float]) -> list[dict[str, Any]]:
    """Return every anchor with a part in weights that these anchors pulled on: theirs, their parents, and they."""
    entries = [entry for anchor in anchors for entry in anchor.provenance.lineage]
    for anchor, lam in zip(anchors, lambdas, strict=True):
        if lam > 0:
            merged = anchor.provenance.merged or {}
            for parent in merged.get("parents", ()):
                name = parent["provenance"].get("name")
                entries.append({"name": name, "sha256": parent["sha256"], "lambda": parent["lambda"] * lam})
            entries += [{"name": None, "sha256": digest, "lambda": lam} for digest in merged.get("through", ())]
            place = {} if anchor.place is None else {"hub": str(anchor.place)}
            entries.append({"name": anchor.provenance.name, "sha256": anchor.digest, "lambda": lam, **place})
    return distinct(entries)


def distinct(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entries of a lineage once each, wherever the anchor was taken from."""
    first: dict[str, dict[str, Any]] = {}
    for entry in entries:
        known = [entry.get(key) for key in ("name", "sha256", "lambda")]
        # Anchors that were never saved have no digest, and may be others of the same name.
        key = repr(known) if entry.get("sha256") else repr(sorted(entry.items(), key=str))
        first[key] = first.get(key) or entry
    return list(first.values())


def had_a_part(anchor: Anchor, other: Anchor) -> bool:
    """Whether the other's weights were trained under this anchor's penalty; if merged, those of all parents."""
    merged = other.provenance.merged
    if merged is None:
        lineages = [other.provenance.lineage]
    else:
        parents = merged["parents"] if merged.get("form") == "offline" else merged["parents"][-1:]
        lineages = [parent["provenance"].get("lineage", []) for parent in parents]
    digests = [{entry.get("sha256") for entry in entries} for entries in lineages]
    return anchor.digest is not None and all(anchor.digest in known for known in digests)


def members_of(anchor: Anchor) -> set[str]:
    """Return the digests of the anchors that this one consists of: its own, and those it was merged from."""
    merged = anchor.provenance.merged or {}
    known = [anchor.digest, *merged.get("through", ()), *(p["sha256"] for p in merged.get("parents", ()))]
    return {digest for digest in known if digest is not None}
