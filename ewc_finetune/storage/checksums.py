"""Checksums in the metadata of a safetensors file, by which a flipped bit is noticed: the format itself has none.

The metadata `ewc_checksums` are a JSON object: of each tensor the CRC-32 of its bytes, eight hexadecimal digits by the
tensor's name, and under `__metadata__` that of the rest of the header (`header_checksum`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from operator import ne
from typing import Any

import torch
from torch import Tensor

from ewc_finetune.errors import AnchorError, EwcError
from ewc_finetune.storage.safetensors_source import Entry, TensorSource

KEY = "ewc_checksums"
# The key of the header's checksum among those of the tensors; safetensors allows no tensor of this name.
_HEADER = "__metadata__"


def checksum(tensor: Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes, as they are in a file."""
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{zlib.crc32(data):08x}"


def header_checksum(metadata: Mapping[str, str], entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Return the CRC-32 of what a header says, however it is written.

    Args:
        metadata: Its texts, of which the checksums are left out.
        entries: Type and shape of each tensor.
    """
    texts = {name: text for name, text in metadata.items() if name != KEY}
    tensors = {name: [kind, list(shape)] for name, (kind, shape) in entries.items()}
    return f"{zlib.crc32(json.dumps([texts, tensors], sort_keys=True).encode()):08x}"


def with_checksums(
    metadata: Mapping[str, str], entries: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Mapping[str, str]
) -> dict[str, str]:
    """Return the metadata with the checksums of these tensors, and of the header that they and the entries make."""
    checksums = {_HEADER: header_checksum(metadata, entries), **{name: tensors[name] for name in entries}}
    return {**metadata, KEY: json.dumps(checksums, sort_keys=True)}


def read_checksums(
    metadata: Mapping[str, str], entries: Mapping[str, tuple[str, tuple[int, ...]]], where: str, error: type[EwcError]
) -> dict[str, str] | None:
    """Return the checksums of the tensors of a file, whose header is compared with its own; None if it has none.

    Raises:
        EwcError: of that kind, if the header is not the one that was written.
    """
    if KEY not in metadata:
        if any(len(name) == len(KEY) and sum(map(ne, name, KEY)) == 1 for name in metadata):
            raise damaged("its header", where, error)
        return None
    try:
        document = json.loads(metadata[KEY])
        known = {str(name): str(value) for name, value in document.items()}
    except (ValueError, AttributeError, RecursionError) as reason:
        raise damaged("its checksums", where, error) from reason
    if known.pop(_HEADER, None) != header_checksum(metadata, entries) or known.keys() != entries.keys():
        raise damaged("its header", where, error)
    return known


def check_tensor(name: str, tensor: Tensor, checksums: Mapping[str, str], where: str, error: type[EwcError]) -> None:
    """Compare a tensor with its checksum.

    Raises:
        EwcError: of that kind, naming it.
    """
    if checksums[name] != checksum(tensor):
        raise damaged(name, where, error)


def verdict(has_checksums: bool) -> str:
    """Say what it tells that a file could be read whole, its checksums included where it has any."""
    if has_checksums:
        return "all that is read of it is as it was written, by its checksums"
    return "it can be read, and has no checksums to compare it with"


def damaged(what: str, where: str, error: type[EwcError]) -> EwcError:
    """Return the error of what is no longer as it was written."""
    return error(
        f"{where} is damaged: {what} is not as it was written, by the checksums in the file. Copy it again from where "
        f"it came. If another program has changed it and kept its metadata, have that leave {KEY!r} out"
    )


class CheckedSource(TensorSource):
    """Tensors that are compared with their checksums when they are first read, where there are any.

    Raises:
        AnchorError: if the header is not the one that was written.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.label, self.metadata, self.size, self.header = source.label, source.metadata, source.size, source.header
        self.entries = source.entries
        self._left = read_checksums(source.metadata, forms_of(source.entries), source.label, AnchorError) or {}

    def read(self, name: str) -> Tensor:
        """See `TensorSource`.

        Raises:
            AnchorError: if the tensor cannot be read, or is not the one that was written.
        """
        tensor = self._source.read(name)
        if name in self._left:
            check_tensor(name, tensor, self._left, self.label, AnchorError)
            del self._left[name]
        return tensor


def forms_of(entries: Mapping[str, Entry]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of each tensor."""
    return {name: (entry.kind, entry.shape) for name, entry in entries.items()}
