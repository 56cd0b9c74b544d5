"""What a run is asked for, at the commits that branches on the Hub are now, so that it can be repeated."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.location import is_on_hub
from ewc_finetune.checkpoint.open import pinned
from ewc_finetune.hub.address import is_address, parse_address
from ewc_finetune.progress import Progress

M = TypeVar("M", bound="str | Path | nn.Module | None")
A = TypeVar("A", bound="Anchor | str | Path")


def fetched_anchors(
    anchors: Iterable[Anchor | str | Path],
) -> tuple[list[Anchor | str | Path], list[Anchor | str | Path]]:
    """Return anchors, those on the Hub opened; and what each is, of those the address at its commit.

    Raises:
        HubError: if one cannot be had.
    """
    given = list(anchors)
    opened = [Anchor.open(anchor) if is_address(anchor) else anchor for anchor in given]
    told = [
        str(found.place) if isinstance(found, Anchor) and is_address(anchor) else anchor
        for anchor, found in zip(given, opened, strict=True)
    ]
    return opened, told


def pinned_anchor(anchor: A, progress: Progress) -> A | str:
    """Return an anchor as it is, and an address with the commit and the file that it means, which are fetched.

    Raises:
        HubError: if it cannot be had.
    """
    if not is_address(anchor) or parse_address(anchor).is_pinned:
        return anchor
    found = Anchor.open(anchor)
    for remark in found.remarks:
        progress.note(remark)
    return str(found.place)


def pinned_model(model: M, progress: Progress) -> M | str:
    """Return a model as it is, and one on the Hub with its commit, fetched.

    Raises:
        HubError: if it cannot be had.
    """
    if not isinstance(model, str) or not is_on_hub(model):
        return model
    name, remarks = pinned(model)
    for remark in remarks:
        progress.note(remark)
    return name
