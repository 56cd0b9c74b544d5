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

M = TypeVar("M", bound="str | Path | nn.Module | None")
A = TypeVar("A", bound="Anchor | str | Path")


def pinned_anchor(anchor: A) -> A | str:
    """Return an anchor as it is, and an address with the commit and the file that it means.

    Raises:
        HubError: see `pinned`.
    """
    return pinned(anchor) if is_address(anchor) else anchor


def pinned_model(model: M) -> M | str:
    """Return a model as it is, and one on the Hub with its commit.

    Raises:
        HubError: if there is none, or the Hub cannot be asked and it is not in the cache.
    """
    if is_address(model):
        address = parse_address(model)
        return str(address if is_commit(address.revision or "") else address.at(look_up(address).commit))
    if isinstance(model, str) and model.startswith(HUB):
        address = address_of(model)
        if not is_commit(address.revision or ""):
            return f"{HUB}{address.repository}@{look_up(address).commit}"
    return model
