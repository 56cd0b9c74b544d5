"""What format a file is in, by what it holds and not by its name; nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ewc_finetune.anchor.schema import FORMAT
from ewc_finetune.checkpoint.formats.archive import Archive, is_archive
from ewc_finetune.errors import CheckpointError
from ewc_finetune.storage.shards import PART

Format = Literal[
    "anchor", "safetensors", "sharded safetensors", "torchscript", "torch.export", "onnx", "torch.save", "hugging face"
]

# Bytes: no index of shards, and no header of a safetensors file, is larger.
_LARGEST_INDEX = 100 << 20

# An ONNX file has no magic number. It is a protobuf message that begins with its version, then says in texts and a
# number what wrote it, and then has the graph, which begins with its nodes or its name.
_ONNX_VERSION = b"\x08"
_ONNX_TEXTS = (b"\x12", b"\x1a", b"\x22", b"\x32")
_ONNX_NUMBER = b"\x28"
_ONNX_GRAPH = b"\x3a"
_ONNX_IN_GRAPH = (b"\x0a", b"\x12", b"")  # nothing follows where the file is cut short
_ONNX_MOST_FIELDS = 20
_ONNX_LARGEST_VERSION = 1000


@contextmanager
def detected(path: Path) -> Iterator[tuple[Format, Archive | None]]:
    """Tell the format of a file; where that is an archive, it is open inside the block.

    Raises:
        CheckpointError: if it is missing, empty, or an archive that is damaged or made to do harm.
    """
    if path.is_file() and is_archive(path):
        with Archive(path) as archive:
            yield _of_archive(archive), archive
    else:
        yield _of_file(path), None


def detect(path: Path) -> Format:
    """Return the format of a file; see `detected`."""
    with detected(path) as (kind, _):
        return kind


def _of_file(path: Path) -> Format:
    if path.is_dir():
        if (path / "config.json").is_file():
            return "hugging face"
        raise CheckpointError(
            f"{path} is a folder without a config.json; expected a checkpoint file (name the one in it), or a model "
            "folder of transformers"
        )
    if not path.is_file():
        raise CheckpointError(
            f"there is no checkpoint at {path}. On the Hub a model is named hf:ORG/NAME, an anchor "
            "or a file hf://ORG/NAME/FILE"
        )
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError(f"{path} is empty; expected a checkpoint. Copy it again from where it came")
    with path.open("rb") as file:
        head = file.read(9)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        return _of_safetensors(path)
    if head[:1] == b"{" and size < _LARGEST_INDEX:
        index = _index(path)
        if index is not None:
            return "anchor" if is_of_anchor(index.get("metadata")) else "sharded safetensors"
    return "onnx" if _is_onnx(path) else "torch.save"


def _of_safetensors(path: Path) -> Format:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LARGEST_INDEX:
            raise CheckpointError(f"{path}: its safetensors header claims {length:,} bytes. Copy it again")
        try:
            metadata = json.loads(file.read(length)).get("__metadata__") or {}
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is not a whole safetensors file. Copy it again from where it came"
            ) from error
    return "anchor" if is_of_anchor(metadata) else "safetensors"


def is_of_anchor(metadata: object) -> bool:
    """Whether these are the metadata of an anchor, or of a part of one, which the anchor's reader refuses by name."""
    return isinstance(metadata, Mapping) and metadata.get("format") in (FORMAT, PART)


def _index(path: Path) -> dict[str, Any] | None:
    """Return what an index of several files holds; None if the file is none."""
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and isinstance(document.get("weight_map"), dict) else None


def _is_onnx(path: Path) -> bool:
    """Whether a file begins as an ONNX model does; whether it is whole is for onnx to say."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(1) != _ONNX_VERSION or not 0 < (_varint(file) or 0) < _ONNX_LARGEST_VERSION:
            return False
        for _ in range(_ONNX_MOST_FIELDS):
            tag, value = file.read(1), _varint(file)
            if tag == _ONNX_GRAPH:
                return value is not None and file.read(1) in _ONNX_IN_GRAPH
            if value is None or tag not in (*_ONNX_TEXTS, _ONNX_NUMBER):
                return False
            if tag in _ONNX_TEXTS:
                file.seek(min(value, size), 1)
    return False


def _varint(file: BinaryIO) -> int | None:
    """Read a number as protobuf writes it; None if there is none."""
    value = 0
    for position in range(10):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 127) << 7 * position
        if byte[0] < 128:
            return value
    return None


def _of_archive(archive: Archive) -> Format:
    members = archive.members
    if any(name.startswith("models/") and name.endswith(".json") for name in members) or (
        "serialized_exported_program.json" in members
    ):
        return "torch.export"
    if "constants.pkl" in members and any(name.startswith("code/") for name in members):
        return "torchscript"
    return "torch.save"
