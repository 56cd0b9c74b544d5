"""Tensors that stay in their file until they are asked for, one at a time."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ewc_finetune.errors import AnchorError, StorageError


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file whose names begin alike, by the rest of the name.

    Each is read when it is asked for, and again when it is asked for again: nothing is kept, nor is the file left open.

    Args:
        path: The file.
        prefix: What their names begin with.
        shapes: The shape of each, by name.
        check: Called with the name and every tensor that is read; raises if it cannot be used.
    """

    def __init__(
        self, path: Path, prefix: str, shapes: Mapping[str, torch.Size], check: Callable[[str, Tensor], None]
    ) -> None:
        self.shapes = dict(shapes)
        self._path = path
        self._prefix = prefix
        self._check = check
        self._state = _state(path)

    def without(self, names: Collection[str]) -> TensorFile:
        """Return the same but for some names."""
        kept = {name: shape for name, shape in self.shapes.items() if name not in names}
        return TensorFile(self._path, self._prefix, kept, self._check)

    @cached_property
    def bytes(self) -> dict[str, int]:
        """How many bytes each tensor takes; none is read."""
        with opened(self._path) as file:
            kinds = {name: file.get_slice(self._prefix + name).get_dtype() for name in self.shapes}
        # F32, BF16, I64, F8_E4M3, BOOL, ...: the bits are the first number of the name.
        bits = {name: re.search(r"\d+", kind) for name, kind in kinds.items()}
        return {n: self.shapes[n].numel() * (int(found[0]) if found else 8) // 8 for n, found in bits.items()}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        with opened(self._path) as file:
            if _state(self._path) != self._state:
                raise AnchorError(f"{self._path} has changed since it was opened. Run the command again")
            tensor: Tensor = file.get_tensor(self._prefix + name)
        self._check(name, tensor)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of tensors by name, without reading those that lie in a file."""
    return tensors.shapes if isinstance(tensors, TensorFile) else {name: t.shape for name, t in tensors.items()}


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file; nothing in it is ever executed.

    Raises:
        AnchorError: if it is no whole safetensors file, or cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise AnchorError(
            f"{path} cannot be read as an anchor: it is not a whole safetensors file ({error}). "
            "Copy it again from where it came, or make it again with `ewc-ft consolidate`"
        ) from error


def _state(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise AnchorError(f"{path} cannot be read any more: {error.strerror}") from error
    return found.st_size, found.st_mtime_ns


def write_tensors(temporary: Path, path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, of which the same content gives the same bytes.

    Args:
        temporary: Where it is written.
        path: What it is to be renamed to, for messages.
        tensors: On any device; those that share memory are written under each of their names.
        metadata: Texts by name.

    Raises:
        StorageError: if it cannot be written.
    """
    separate = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.detach().cpu().contiguous()
        separate[name] = whole.clone() if whole.data_ptr() in seen else whole
        seen.add(whole.data_ptr())
    try:
        save_file(separate, temporary, dict(metadata))
    except SafetensorError as error:
        full = "No space" in str(error)
        reason = "the disk is full. Nothing was left behind" if full else str(error)
        raise StorageError(f"cannot write {path}: {reason}") from error
    if metadata:
        _sort_metadata(temporary)


def _sort_metadata(path: Path) -> None:
    """Put the metadata of a safetensors file in order: they are written from a hash map, different every time.

    Raises:
        StorageError: if that cannot be.
    """
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            raise StorageError(f"cannot write {path}: the safetensors header grew from {length} to {len(text)} bytes")
        file.seek(8)
        file.write(text.ljust(length))  # the format allows trailing spaces
