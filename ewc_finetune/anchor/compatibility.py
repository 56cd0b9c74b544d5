"""Whether anchors fit each other, and what to know before they are stacked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import foreign_head
from ewc_finetune.anchor.lineage import had_a_part, members_of, of_another_digest
from ewc_finetune.choices import Lineage
from ewc_finetune.errors import AnchorMismatchError
from ewc_finetune.storage.lazy_tensors import shapes_of


def grown_parameters(anchors: Sequence[Anchor]) -> set[str]:
    """Return the parameters of the one layer of which some anchors know more rows than others; none without one.

    Raises:
        AnchorMismatchError: if they are of several layers, and so of no head that was expanded.
    """
    shapes: dict[str, set[torch.Size]] = {}
    for anchor in anchors:
        for name, shape in anchor.held_shapes().items():
            shapes.setdefault(name, set()).add(shape)
    grown = {name for name, known in shapes.items() if len(known) > 1}
    if len({name.rpartition(".")[0] for name in grown}) > 1:
        raise AnchorMismatchError(
            f"anchors of different models: {', '.join(sorted(grown)[:3])} have other shapes in {anchors[0].label} than "
            f"in {anchors[-1].label}, and only one layer can have been expanded"
        )
    return grown


def remarks(
    anchors: Sequence[Anchor], lineage: Lineage = "all", model: tuple[str, Mapping[str, Any] | None] | None = None
) -> list[str]:
    """Say what a user should know before stacking these: what counts twice, is left out, or has another scale.

    Args:
        anchors: Oldest first.
        lineage: See `sum_quadratics`.
        model: What to call the model that they pull on, and its head; the newest anchor's unless given.
    """
    if model is None:
        model = (anchors[-1].label, anchors[-1].provenance.head) if anchors else ("", None)
    texts = []
    for number, anchor in enumerate(anchors):
        for other in anchors[:number]:
            if anchor.digest is not None and anchor.digest == other.digest:
                texts.append(f"{anchor.label} is the same anchor as {other.label}: it counts twice. Drop one")
            elif members_of(anchor) & members_of(other):
                merged, part = (anchor, other) if anchor.provenance.merged else (other, anchor)
                verb = "was merged from anchors that are in" if part.provenance.merged else "was merged from"
                texts.append(f"{merged.label} {verb} {part.label}, which so counts twice. Drop one of them")
        inside = [other.label for other in anchors if other is not anchor and had_a_part(other, anchor)]
        if inside and lineage == "all":
            texts.append(
                f"{anchor.label} was made from a checkpoint that {', '.join(inside)} already pulled on, so the older "
                "domain counts twice in part. --lineage latest moves the older curvature to the newer weights "
                "(leaving the older anchor out would give its domain up)"
            )
        late = [other.label for other in anchors[number + 1 :] if had_a_part(other, anchor)]
        if late:
            texts.append(f"{', '.join(late)} had a part in {anchor.label} and comes after it; expected oldest first")
        if foreign_head(anchor, model[1]):
            texts.append(f"{anchor.label} has another last layer than {model[0]}, so the anchor's is left out")
    texts += [text for anchor in anchors if (text := of_another_digest(anchor, anchors)) is not None]
    for what, values in (
        ("curvature", {anchor.provenance.curvature: anchor.label for anchor in anchors}),
        ("estimator", {anchor.provenance.estimator: anchor.label for anchor in anchors}),
        ("architecture", {a.provenance.checkpoint.get("architecture") or "": a.label for a in anchors}),
    ):
        values.pop("", None)
        if len(values) > 1:
            known = ", ".join(f"{label} has {value}" for value, label in values.items())
            scale = "" if what == "architecture" else ", and so perhaps in scale"
            texts.append(f"the anchors differ in {what}{scale}: {known}")
    return texts


def check_together(anchors: Sequence[Anchor], growing: Collection[str] = ()) -> None:
    """Check that anchors can be stacked at all; no tensor is read. For `growing` see `sum_quadratics`.

    Raises:
        AnchorMismatchError: naming both anchors and what differs.
    """
    for older, newer in pairwise(anchors):
        if older.provenance.likelihood != newer.provenance.likelihood:
            raise AnchorMismatchError(
                f"{older.label} has the likelihood {older.provenance.likelihood} and {newer.label} "
                f"{newer.provenance.likelihood}; one penalty can't be made of both"
            )
    for other in anchors[1:]:
        if not set(shapes_of(other.weights)) & set(shapes_of(anchors[0].weights)):
            raise AnchorMismatchError(
                f"anchors of different models: {anchors[0].label} and {other.label} have no parameter in common"
            )
    first: dict[str, tuple[Anchor, torch.Size]] = {}
    for anchor in anchors:
        for name, shape in anchor.held_shapes().items():
            other, expected = first.setdefault(name, (anchor, shape))
            alike = is_grown(shape, expected) or is_grown(expected, shape)
            if shape != expected and not (name in growing and alike):
                grown = alike and not growing
                hint = ". If the head was expanded in between, add --head expand" if grown else ""
                raise AnchorMismatchError(
                    f"anchors of different models: {name} has shape {tuple(expected)} in "
                    f"{other.label} and {tuple(shape)} in {anchor.label}{hint}"
                )


def is_grown(shape: torch.Size, other: torch.Size) -> bool:
    """Whether the other shape is this one with rows added."""
    return len(shape) == len(other) > 0 and shape[1:] == other[1:] and shape[0] <= other[0]
