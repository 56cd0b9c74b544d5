"""What a run is asked for, at the commits that branches on the Hub are now, so that it can be repeated."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.location import fetch, locate
from ewc_finetune.hub.address import HubAddress, is_address, is_commit, parse_address
from ewc_finetune.hub.repository import look_up
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
    fetched = [Anchor.open(anchor) if is_address(anchor) else anchor for anchor in given]
    pinned = [
        str(anchor.place) if isinstance(anchor, Anchor) and is_address(named) else named
        for named, anchor in zip(given, fetched, strict=True)
    ]
    return fetched, pinned


def pinned_anchor(anchor: A, progress: Progress) -> A | str:
    """Return an anchor as it is, and an address with the commit and the file that it means, which are fetched.

    Raises:
        HubError: if it cannot be had.
    """
    if not is_address(anchor) or parse_address(anchor).is_pinned:
        return anchor
    fetched = Anchor.open(anchor)
    for remark in fetched.remarks:
        progress.note(remark)
    return str(fetched.place)


def pinned_model(model: M, progress: Progress) -> M | str:
    """Return a model as it is, and one on the Hub with its commit, fetched.

    Raises:
        HubError: if it cannot be had.
    """
    address = locate(model) if isinstance(model, str) else None
    if not isinstance(address, HubAddress) or is_commit(address.revision or ""):
        return model
    repository = look_up(address)
    fetch(repository)
    for remark in repository.remarks:
        progress.note(remark)
    return str(address.at(repository.commit))
