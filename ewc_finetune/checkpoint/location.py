"""Where a model or an anchor is: a path, or a place on the Hub; and how the latter gets onto this machine."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TypeAlias

from ewc_finetune.checkpoint.file_format import detect
from ewc_finetune.checkpoint.published import is_published, name_of
from ewc_finetune.errors import HubError
from ewc_finetune.hub.address import MODEL, HubAddress, is_address, parse_address, parse_model_name
from ewc_finetune.hub.anchor_files import ANCHOR_FILES, HubAnchor, anchor_in, fetch_with_parts, has_anchor, is_pushed
from ewc_finetune.hub.client import hub_errors, not_in_the_cache
from ewc_finetune.hub.repository import Repository, look_up, remember

Location: TypeAlias = Path | HubAddress

# Files of a model folder that are not downloaded: weights in other formats or in folders within it, and anchors.
_NOT_DOWNLOADED = (
    *("*.h5", "*.msgpack", "*.onnx*", "*.gguf", "*.ot", "*.tflite", "*.pt", "*.pth", "*/*.safetensors", "*/*.bin"),
    *ANCHOR_FILES,
)


def locate(place: str | Location) -> Location:
    """Read where something is: a path, `hf:ORG/NAME[@REVISION]` or `hf://ORG/NAME[@REVISION][/FILE]`.

    Raises:
        UsageError: if the text begins as a place on the Hub does, and names none.
    """
    if not isinstance(place, str):
        return place
    if is_address(place):
        return parse_address(place)
    return parse_model_name(place) if place.startswith(MODEL) else Path(place)


def is_there(place: str | Location) -> bool:
    """Whether it is a checkpoint rather than an architecture: a file, a folder, or the name of one on the Hub."""
    if is_published(place):
        return True
    location = locate(place)
    return isinstance(location, HubAddress) or location.exists()


def local_name(place: str | Location) -> Path:
    """Return the path that names what is made of a model or anchor: its own, or one in this folder if it has none."""
    if isinstance(place, str) and is_published(place):
        return Path(name_of(place))
    location = locate(place)
    if isinstance(location, Path):
        return location
    file = location.file
    return Path((location.repository if file is None or is_pushed(file) else file).rpartition("/")[2])


def on_this_machine(place: str | Location) -> Path:
    """Return the path of a checkpoint, or where it is once it is fetched from the Hub.

    Raises:
        HubError: if it cannot be had.
    """
    location = locate(place)
    return location if isinstance(location, Path) else fetch(look_up(location))[0]


def means_model(repository: Repository) -> bool:
    """Whether the address that a repository was looked up for means its model folder."""
    address = repository.address
    return address.is_model or (
        address.file is None and "config.json" in repository.files and not has_anchor(repository)
    )


def fetch(repository: Repository) -> tuple[Path, HubAnchor | None]:
    """Fetch what a repository was looked up for: the model folder, the file that is named, or the anchor.

    Returns:
        Its path; and the anchor, if it is one.

    Raises:
        HubError: if there is no such thing, or it cannot be had.
        CheckpointError, AnchorError: if its file is damaged.
    """
    if means_model(repository):
        return _fetch_folder(repository), None
    file = repository.address.file
    if file is not None and file in repository.files:
        path = fetch_with_parts(repository, file).path
        if detect(path) != "anchor":
            remember(repository)
            return path, None
    anchor = anchor_in(repository)
    return anchor.path, anchor


def _fetch_folder(repository: Repository) -> Path:
    """Return the folder of a model, downloaded unless it lies in the cache."""
    from huggingface_hub import snapshot_download

    address = repository.address
    if "config.json" not in repository.files and repository.cached is not None:
        raise not_in_the_cache(address, "the Hub could not be asked")
    if "config.json" not in repository.files and has_anchor(repository):
        raise HubError(f"{address} has an anchor and no model. An anchor is named hf://{address.repository}")
    ignored = list(_NOT_DOWNLOADED)
    if any(file.endswith(".safetensors") for file in repository.files):
        ignored.append("*.bin")
    folder = repository.cached
    if folder is None:
        with hub_errors(address):
            folder = Path(snapshot_download(address.repository, revision=repository.commit, ignore_patterns=ignored))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        file = path.relative_to(folder).as_posix()
        if not any(fnmatch.fnmatch(file, pattern) for pattern in ignored):
            repository.check(file, path)
    remember(repository)
    return folder
