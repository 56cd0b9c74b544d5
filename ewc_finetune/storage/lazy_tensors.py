"""Tensors that stay where they are until they are asked for, one at a time; and how files of them are written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ewc_finetune.errors import StorageError
from ewc_finetune.storage.checksums import checksum, with_checksums
from ewc_finetune.storage.safetensors_source import TensorSource, header_text


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a source whose names begin alike, by the rest of the name.

    Each is read when it is asked for, and again when it is asked for again: nothing is kept.

    Args:
        source: The file that the tensors are in.
        prefix: The prefix of their names in the file.
        use: Called with the name and every tensor that is read; returns what is to be used of it, or raises.
        left_out: Rests of names that are not among them.
    """

    def __init__(
        self,
        source: TensorSource,
        prefix: str,
        use: Callable[[str, Tensor], Tensor],
        left_out: Collection[str] = (),
    ) -> None:
        self._source = source
        self._prefix = prefix
        self._use = use
        self._left_out = frozenset(left_out)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each; none is read."""
        keys = (key for key in sorted(self._source.entries) if key.startswith(self._prefix))
        names = (name for name in (key[len(self._prefix) :] for key in keys) if name and name not in self._left_out)
        alike: dict[tuple[int, ...], torch.Size] = {}
        shapes = ((name, self._source.entries[self._prefix + name].shape) for name in names)
        return {name: alike.setdefault(shape, torch.Size(shape)) for name, shape in shapes}

    @cached_property
    def bytes(self) -> dict[str, int]:
        """How many bytes each takes in the file; none is read."""
        entries = {name: self._source.entries[self._prefix + name] for name in self.shapes}
        return {name: entry.end - entry.start for name, entry in entries.items()}

    def without(self, names: Collection[str]) -> TensorFile:
        """Return the same but for some names."""
        return TensorFile(self._source, self._prefix, self._use, self._left_out | set(names))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return self._use(name, self._source.read(self._prefix + name))

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of tensors by name, without reading those that lie in a file."""
    return tensors.shapes if isinstance(tensors, TensorFile) else {name: t.shape for name, t in tensors.items()}


def write_tensors(temporary: Path, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, of which the same content gives the same bytes.

    Args:
        temporary: The file to write.
        path: The file that it will be renamed to, for messages.
        tensors: On any device; those that share memory are written under each of their names.
        metadata: Texts by name.

    Raises:
        StorageError: if it cannot be written.
    """
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.detach().cpu().contiguous()
        storage = whole.untyped_storage().data_ptr()
        separate[name] = whole.clone() if storage in seen else whole
        seen.add(storage)
    checksums = {name: checksum(tensor) for name, tensor in separate.items()}
    forms = dict.fromkeys(separate, ("", ()))  # known when they are written
    try:
        save_file(separate, temporary, with_checksums(metadata, forms, checksums))
    except SafetensorError as error:
        full = "No space" in str(error)
        reason = "the disk is full. Nothing was left behind" if full else str(error)
        raise StorageError(f"cannot write {path}: {reason}") from error
    _finish_header(temporary, metadata, checksums)


def _finish_header(path: Path, metadata: Mapping[str, str], checksums: Mapping[str, str]) -> None:
    """Put the metadata in order, which are written from a hash map, different every time; with the header's checksum.

    Raises:
        StorageError: if that cannot be.
    """
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        del header["__metadata__"]
        forms = {name: (told["dtype"], tuple(told["shape"])) for name, told in header.items()}
        header = {"__metadata__": dict(sorted(with_checksums(metadata, forms, checksums).items())), **header}
        text = header_text(header)
        if len(text) > length:
            raise StorageError(f"cannot write {path}: the safetensors header grew from {length} to {len(text)} bytes")
        file.seek(8)
        file.write(text.ljust(length))  # the format allows trailing spaces
