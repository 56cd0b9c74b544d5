"""Where a checkpoint is: a path, or a place on the Hub."""

from __future__ import annotations

from pathlib import Path

from ewc_finetune.checkpoint.formats.transformers_folder import (
    HUB,
    address_of,
)
from ewc_finetune.hub.address import is_address, parse_address
from ewc_finetune.hub.anchor_files import is_pushed


def is_on_hub(model: object) -> bool:
    """Whether it names a model, or a file, on the Hub."""
    return isinstance(model, str) and model.startswith(HUB)


def place_of(model: str | Path) -> Path:
    """Return the path that names what is made of a model or anchor: its own; for one on the Hub, in this folder."""
    if is_address(model):
        address = parse_address(model)
        named = address.repository if address.file is None or is_pushed(address.file) else address.file
        return Path(named.rpartition("/")[2])
    if is_on_hub(model):
        return Path(address_of(str(model)).repository.rpartition("/")[2])
    return Path(model)


def is_there(model: str | Path) -> bool:
    """Whether it is a checkpoint rather than an architecture: a file, a folder, or the name of one on the Hub."""
    return is_on_hub(model) or Path(model).exists()
