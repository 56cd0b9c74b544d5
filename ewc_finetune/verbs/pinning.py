"""What a run is asked for, at the commits that branches on the Hub are now, so that it can be repeated."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from torch import nn

from ewc_finetune.anchor import Anchor
from ewc_finetune.checkpoint.hugging_face import HUB, address_of
from ewc_finetune.hub.address import is_address, is_commit, parse_address
from ewc_finetune.hub.anchor_files import pinned
from ewc_finetune.hub.repository import look_up
from ewc_finetune.progress import Progress

M = TypeVar("M", bound="str | Path | nn.Module | None")
A = TypeVar("A", bound="Anchor | str | Path")


def pinned_anchor(anchor: A, progress: Progress) -> A | str:
    """Return an anchor as it is, and an address with the commit and the file that it means.

    Raises:
        HubError: see `pinned`.
    """
    if not is_address(anchor):
        return anchor
    place, remarks = pinned(anchor)
    for remark in remarks:
        progress.note(remark)
    return place


def pinned_model(model: M, progress: Progress) -> M | str:
    """Return a model as it is, and one on the Hub with its commit.

    Raises:
        HubError: if there is none, or the Hub cannot be asked and it is not in the cache.
    """
    if not isinstance(model, str) or not model.startswith(HUB):
        return model
    address = parse_address(model) if is_address(model) else address_of(model)
    if is_commit(address.revision or ""):
        return model
    repository = look_up(address)
    for remark in repository.remarks:
        progress.note(remark)
    return str(address.at(repository.commit)) if is_address(model) else f"{HUB}{address.repository}@{repository.commit}"
