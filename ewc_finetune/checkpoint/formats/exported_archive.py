"""The archive of `torch.export`, read as data: the graph as a document, the weights as bytes.

`torch.export.load` unpickles, evaluates texts and loads shared objects that an archive holds. Here nothing of that is
done: what an archive may have is on a list.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.checkpoint.formats.archive import Archive
from ewc_finetune.checkpoint.formats.stored_tensors import check_archive
from ewc_finetune.errors import CheckpointError

GRAPH = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_WEIGHTS, _CONSTANTS = "data/weights/", "data/constants/"
_MEMBERS = re.compile(
    r"(archive_format|archive_version|version|byteorder|\.data/(version|serialization_id)|extra/[^/]+|models/model\.json|"
    r"data/sample_inputs/model\.pt|data/weights/(weight_\d+|model_weights_config\.json)|"
    r"data/constants/(tensor_\d+|model_constants_config\.json))"
)
_TENSORS = re.compile(r"weight_\d+|tensor_\d+")
_LARGEST_DOCUMENT = 200 << 20
# Dtypes by their numbers in torch's schema (`torch/_export/serde/schema.py`).
DTYPES = {
    **{1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64},
    **{6: torch.float16, 7: torch.float32, 8: torch.float64, 13: torch.bfloat16},
    **{9: torch.complex32, 10: torch.complex64, 11: torch.complex128, 12: torch.bool, 28: torch.uint16},
}


class NotPlainError(CheckpointError):
    """An archive that cannot be shown to be data; torch may load it, for those who trust it."""


@dataclass(frozen=True)
class Stored:
    """A tensor within a record of the archive.

    Attributes:
        record: Name of the record, which several tensors may share.
        dtype: Its dtype.
        size: Its shape.
        stride: Its strides, in elements.
        offset: Where its first element is, in elements.
        is_parameter: Whether it is a parameter.
        requires_grad: Whether that parameter is trained.
    """

    record: str
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_parameter: bool
    requires_grad: bool

    def within(self, record: bytearray) -> Tensor:
        """Return the tensor in the memory of its record.

        Raises:
            RuntimeError, ValueError: if the record is too short for it.
        """
        if math.prod(self.size) * self.dtype.itemsize > len(record):  # strides of 0 would make any size of few bytes
            raise ValueError(f"{math.prod(self.size):,} elements in {len(record):,} bytes")
        if 0 in self.size:
            return torch.empty(self.size, dtype=self.dtype)
        return torch.as_strided(torch.frombuffer(record, dtype=self.dtype), self.size, self.stride, self.offset)


@dataclass(frozen=True)
class ExportedArchive:
    """What an archive holds.

    Attributes:
        program: The document of the graph.
        weights: Parameters and buffers by name.
        constants: Other tensors of the program by name.
        tensors: Those of both, as they are in memory; tied ones are one tensor.
        extra: Texts beside the program, by name.
    """

    program: dict[str, Any]
    weights: Mapping[str, Stored]
    constants: Mapping[str, Stored]
    tensors: Mapping[str, Tensor]
    extra: Mapping[str, str]


def read_exported(archive: Archive) -> ExportedArchive:
    """Read an archive.

    Raises:
        NotPlainError: if it has what could run code.
        CheckpointError: if it is damaged.
    """
    _check_members(archive)
    _check_samples(archive)
    program = _document(archive, GRAPH)
    weights = _stored(archive, f"{_WEIGHTS}model_weights_config.json", _WEIGHTS)
    constants = _stored(archive, f"{_CONSTANTS}model_constants_config.json", _CONSTANTS)
    try:
        extra = {n.partition("/")[2]: archive.read(n).decode() for n in archive.members if n.startswith("extra/")}
    except UnicodeError as error:
        raise _not_whole(archive.path, f"what it has beside the program is no text: {error}") from error
    return ExportedArchive(program, weights, constants, _tensors(archive, {**constants, **weights}), extra)


def write_exported(
    path: Path, target: Path, weights: Mapping[str, Stored], state: Mapping[str, Tensor], extra: Mapping[str, str]
) -> None:
    """Write an archive with other weights; the program stays as it is, to the byte.

    Args:
        path: The archive.
        target: The file to write.
        weights: Where its weights are, as `read_exported` gave them.
        state: The new weights by name.
        extra: Texts beside the program.

    Raises:
        CheckpointError: if the archive can no longer be read.
    """
    with Archive(path) as archive:
        records: dict[str, bytearray] = {}
        for name, stored in weights.items():
            if stored.record not in records:
                records[stored.record] = bytearray(archive.read(stored.record))
            stored.within(records[stored.record]).copy_(state[name].detach())
        texts = {f"extra/{name}": text.encode() for name, text in extra.items()}
        archive.rewrite(target, {**texts, **records})


def _check_members(archive: Archive) -> None:
    strange = next((name for name in archive.members if not _MEMBERS.fullmatch(name)), None)
    if strange is not None:
        raise NotPlainError(f"its archive has {strange!r:.100}, which is more than a program and its weights")
    if "byteorder" in archive.members and archive.read("byteorder") != b"little":
        raise _not_whole(archive.path, "its numbers are big-endian, which is not read")


def _check_samples(archive: Archive) -> None:
    """Refuse sample inputs that are more than tensors: they are not used here, and torch unpickles them."""
    if archive.members.get(_SAMPLES, 0):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "samples.pt")
            path.write_bytes(archive.read(_SAMPLES))
            try:
                with Archive(path) as samples:
                    check_archive(samples)
                torch.load(path, weights_only=True)
            except Exception as error:
                raise NotPlainError(f"its sample inputs are a pickle of more than tensors ({error!r:.80})") from error


def _document(archive: Archive, name: str) -> dict[str, Any]:
    if archive.members.get(name, 0) > _LARGEST_DOCUMENT:
        raise _not_whole(archive.path, f"its {name} has {archive.members[name]:,} bytes")
    try:
        document = json.loads(archive.read(name))
    except (ValueError, RecursionError) as error:
        raise _not_whole(archive.path, f"its {name} is no JSON document: {error}") from error
    if not isinstance(document, dict):
        raise _not_whole(archive.path, f"its {name} is no JSON object")
    return document


def _stored(archive: Archive, name: str, folder: str) -> dict[str, Stored]:
    stored = {}
    try:
        for tensor, told in _document(archive, name)["config"].items():
            if told["use_pickle"] or not _TENSORS.fullmatch(told["path_name"]):
                raise NotPlainError(f"its {tensor!r:.100} is a pickle")
            meta = told["tensor_meta"]
            size, stride = (tuple(_whole(n["as_int"]) for n in meta[key]) for key in ("sizes", "strides"))
            record, offset = folder + told["path_name"], _whole(meta["storage_offset"]["as_int"])
            flags = bool(told["is_param"]), bool(meta["requires_grad"])
            stored[tensor] = Stored(record, DTYPES[meta["dtype"]], size, stride, offset, *flags)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_whole(archive.path, f"its {name} is not as torch writes it: {error!r}") from error
    return stored


def _whole(number: object) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(number)
    return number


def _tensors(archive: Archive, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    """Read all tensors; names of one tensor in the archive are names of one tensor in memory."""
    records: dict[str, bytearray] = {}
    known: dict[Stored, Tensor] = {}
    for name, one in stored.items():
        if one.record not in records:
            records[one.record] = bytearray(archive.read(one.record))
        if one in known:
            continue
        try:
            tensor = one.within(records[one.record])
        except (RuntimeError, ValueError) as error:
            size = len(records[one.record])
            raise _not_whole(archive.path, f"{name} has not enough in its record of {size:,} bytes") from error
        known[one] = nn.Parameter(tensor, requires_grad=one.requires_grad) if one.is_parameter else tensor
    return {name: known[one] for name, one in stored.items()}


def _not_whole(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not an exported program that can be read ({reason:.300})")
