"""Where a checkpoint is: a path, or a place on the Hub."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from ewc_finetune.errors import HubError, UsageError, redacted
from ewc_finetune.hub.address import HubAddress, checked, is_address, parse_address
from ewc_finetune.hub.anchor_files import ANCHOR_FILES, has_anchor, is_pushed
from ewc_finetune.hub.client import UnreachableError, hub_errors
from ewc_finetune.hub.repository import look_up, remember

HUB = "hf:"


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


def address_of(name: str) -> HubAddress:
    """Return the repository that a model's name, `hf:org/name@revision`, means.

    Raises:
        UsageError: if it names none.
    """
    repository, _, revision = name.removeprefix(HUB).partition("@")
    try:
        return checked(HubAddress(repository, revision or None), name)
    except UsageError:
        form = "expected hf:ORG/NAME, with @REVISION behind it where that matters"
        raise UsageError(f"{redacted(name)!r} names no model on the Hub; {form}") from None


def download(name: str) -> tuple[Path, str, tuple[str, ...]]:
    """Return the folder of a model on the Hub, `hf:org/name@revision`, downloaded unless it lies in the cache.

    Also return its name with the commit that the revision is, and remarks.

    Raises:
        HubError: if there is no such model, or it can't be had.
    """
    from huggingface_hub import snapshot_download

    address = address_of(name)
    found = look_up(address)
    pinned = f"{HUB}{address.repository}@{found.commit}"
    if "config.json" not in found.files and found.cached is not None:
        raise UnreachableError(f"{name} is not in the cache, and the Hub could not be asked")
    if "config.json" not in found.files and has_anchor(found):
        raise HubError(f"{name} has an anchor and no model. An anchor is named hf://{address.repository}")
    # What `save` would leave behind anyway; other folders travel along.
    stale = [
        "*.h5",
        "*.msgpack",
        "*.onnx*",
        "*.gguf",
        "*.ot",
        "*.tflite",
        "*.pt",
        "*.pth",
        "*/*.safetensors",
        "*/*.bin",
        *ANCHOR_FILES,
    ]
    if any(file.endswith(".safetensors") for file in found.files):
        stale.append("*.bin")
    folder = found.cached
    if folder is None:
        with hub_errors(found.address):
            folder = Path(snapshot_download(address.repository, revision=found.commit, ignore_patterns=stale))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        file = path.relative_to(folder).as_posix()
        if not any(fnmatch.fnmatch(file, pattern) for pattern in stale):
            found.check(file, path)
    remember(found)
    return folder, pinned, found.remarks
