"""What format a file is in, by what it holds and not by its name; nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ewc_finetune.checkpoint.formats.archive import Archive, is_archive
from ewc_finetune.errors import CheckpointError

Format = Literal[
    "anchor", "safetensors", "sharded safetensors", "torchscript", "torch.export", "onnx", "torch.save", "hugging face"
]

# Beyond so much an index of shards is none.
_LARGEST_INDEX = 100 << 20

# An ONNX file has no magic number: it begins with these fields of a protobuf message, each of its type of number.
_LENGTH = 2
_ONNX_VERSION, _ONNX_GRAPH = 1, 7
_ONNX_BEFORE_GRAPH = {2: _LENGTH, 3: _LENGTH, 4: _LENGTH, 5: 0, 6: _LENGTH, _ONNX_GRAPH: _LENGTH}
_ONNX_FIELDS = 20
_ONNX_LARGEST_VERSION = 1000
_ONNX_LARGEST = 2 << 30
# The first bytes of the fields that a graph may begin with (nodes, name, initializers, text, inputs and so on), and of
# those that may follow it (sets of operators, metadata, functions and so on).
_ONNX_IN_GRAPH = {0x0A, 0x12, 0x2A, 0x52, 0x5A, 0x62, 0x6A, 0x72, 0x7A, 0x82}
_ONNX_AFTER_GRAPH = {0x3A, 0x42, 0x72, 0xA2, 0xCA, 0xD2}


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
            return "anchor" if _is_anchor(index.get("metadata")) else "sharded safetensors"
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
    return "anchor" if _is_anchor(metadata) else "safetensors"


def _is_anchor(metadata: object) -> bool:
    """Whether these are the metadata of an anchor, or of a part of one, which it is then for the anchor to say."""
    return isinstance(metadata, dict) and metadata.get("format") in ("ewc-anchor", "ewc-anchor-part")


def _index(path: Path) -> dict[str, Any] | None:
    """Return what an index of several files holds; None if the file is none."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("weight_map"), dict) else None


def _is_onnx(path: Path) -> bool:
    """Whether a file is a protobuf message whose first fields are an ONNX model's, the version and then the graph."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(1) != bytes([_ONNX_VERSION << 3]) or not 0 < (_varint(file) or 0) < _ONNX_LARGEST_VERSION:
            return False
        for _ in range(_ONNX_FIELDS):
            tag = _varint(file)
            if tag is None or tag & 7 != _ONNX_BEFORE_GRAPH.get(tag >> 3):
                return False
            value = _varint(file)
            if value is None:
                return False
            if tag >> 3 == _ONNX_GRAPH:
                return _may_be_graph(file, value, size)
            if tag & 7 == _LENGTH:
                if file.tell() + value > size:
                    return False
                file.seek(value, 1)
    return False


def _may_be_graph(file: BinaryIO, length: int, size: int) -> bool:
    """Whether a graph of this length may begin here: it may be cut short, for that is to be said of it."""
    end = file.tell() + length
    first = file.read(1)
    if length > _ONNX_LARGEST or (first and first[0] not in _ONNX_IN_GRAPH):
        return False
    file.seek(min(end, size))
    after = file.read(1)
    return not after or after[0] in _ONNX_AFTER_GRAPH


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
