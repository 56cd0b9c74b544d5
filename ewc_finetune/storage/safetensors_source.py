"""Where an anchor's tensors are: in a safetensors file, in several with an index (`shards`), or on the Hub."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ewc_finetune.errors import AnchorError

_BLOCK = 1 << 20
# The types of numbers that torch has too, and how many bits each takes.
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
# The most dimensions that torch computes with.
_MOST_DIMENSIONS = 64
# The most bytes of a safetensors header; the library reads no longer one either.
LARGEST_HEADER = 100 << 20


class Entry(NamedTuple):
    """What the header of a safetensors file says of one tensor.

    Attributes:
        kind: Its dtype, as the header has it: `F32`, `BF16`.
        shape: The shape of the tensor.
        start: Where its bytes begin, counted from the end of the header.
        end: Where its bytes end.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    Attributes:
        metadata: The metadata of the file, texts by name.
        entries: An entry for each tensor, in the order of their bytes.
        length: Its own bytes, with the eight that say how many there are; the tensors' begin behind them.
        data: The bytes of all tensors.
    """

    metadata: dict[str, str]
    entries: dict[str, Entry]
    length: int
    data: int


class TensorSource(ABC):
    """Tensors by name, each read when it is asked for.

    Attributes:
        label: The name to use in messages.
        metadata: Texts by name.
        entries: What is known of each tensor without reading it.
        size: The size of the file in bytes.
        header: That of the one file that they are or could be.
    """

    label: str
    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    size: int
    header: Header

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return a tensor.

        Raises:
            AnchorError: if it cannot be read, or the files have changed meanwhile.
        """


class LocalSource(TensorSource):
    """Tensors in files on this machine, of which each byte can be had."""

    @abstractmethod
    def header_bytes(self) -> bytes:
        """Return the header of the one file that they are or could be, with the eight bytes in front of it."""

    @abstractmethod
    def blocks(self, start: int, end: int) -> Iterator[bytes]:
        """Yield bytes of the tensors, from one place behind the header to another, in blocks of a megabyte at most."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Refuse files that are no longer what they were when they were opened.

        Raises:
            AnchorError: naming the one.
        """

    def as_one_file(self) -> Iterator[bytes]:
        """Yield the bytes of that one file."""
        yield self.header_bytes()
        yield from self.blocks(0, self.header.data)

    def digest(self) -> str:
        """Return the SHA-256 of that one file, in hexadecimal: of an anchor it is the same however it is cut."""
        digest = hashlib.sha256()
        for block in self.as_one_file():
            digest.update(block)
        return digest.hexdigest()


class FileSource(LocalSource):
    """One safetensors file.

    Args:
        path: The file.
        label: The name to use in messages; the path unless given.

    Raises:
        AnchorError: if it is no whole safetensors file, or cannot be read.
    """

    def __init__(self, path: Path, label: str | None = None) -> None:
        self.path = path
        self.label = label or str(path)
        self._state = state_of(path)
        try:
            self.header = read_header(path, self.label)
        except OSError as error:
            raise unreadable(self.label, str(error)) from error
        self.metadata, self.entries = self.header.metadata, self.header.entries
        self.size = self._state[0]

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
        with opened(self.path, self.label) as file:
            self.check_unchanged()
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def check_unchanged(self) -> None:
        """See `LocalSource`."""
        if state_of(self.path) != self._state:
            raise AnchorError(f"{self.label} has changed since it was opened. Run the command again")

    def header_bytes(self) -> bytes:
        """See `LocalSource`."""
        return b"".join(blocks_of(self.path, 0, self.header.length))

    def blocks(self, start: int, end: int) -> Iterator[bytes]:
        """See `LocalSource`."""
        return blocks_of(self.path, self.header.length + start, self.header.length + end)


@contextmanager
def opened(path: Path, label: str | None = None) -> Iterator[Any]:
    """Open a safetensors file; nothing in it is ever executed.

    Raises:
        AnchorError: if it is no whole safetensors file, or cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise unreadable(label or str(path), str(error)) from error


def unreadable(label: str, reason: str) -> AnchorError:
    """Return the error of what is no whole safetensors file."""
    return AnchorError(
        f"{label} cannot be read as an anchor: it is not a whole safetensors file ({reason}). Copy it again from where "
        "it came, or make it again with `ewc-ft consolidate`"
    )


def state_of(path: Path) -> tuple[int, int]:
    """Return what tells whether a file has changed: its size and time."""
    try:
        status = path.stat()
    except OSError as error:
        raise AnchorError(f"{path} cannot be read any more: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns


def blocks_of(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file from one place to another, a megabyte at a time."""
    with path.open("rb") as file:
        file.seek(start)
        while start < end and (block := file.read(min(_BLOCK, end - start))):
            yield block
            start += len(block)


def read_header(path: Path, label: str) -> Header:
    """Read the header of a safetensors file.

    Raises:
        AnchorError: if it has none, or its tensors do not fill the rest of the file.
    """
    with path.open("rb") as file:
        start = file.read(8)
        header = parse_header(start + file.read(header_length(start, label)), label)
    if header.length + header.data != path.stat().st_size:
        raise unreadable(label, "its size is not what its header says")
    return header


def header_length(start: bytes, label: str) -> int:
    """Return how long a header is behind the first eight bytes of a file, which say it.

    Raises:
        AnchorError: if there are fewer, or it is longer than any header.
    """
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > LARGEST_HEADER:
        raise unreadable(label, "it does not begin as one")
    return length


def parse_header(header: bytes, label: str) -> Header:
    """Parse a header, with the eight bytes in front of it; tensors must follow one another without gaps.

    Raises:
        AnchorError: if it is damaged.
    """
    try:
        document = json.loads(header[8:])
        metadata = document.pop("__metadata__", {})
        entries = {
            str(name): Entry(str(told["dtype"]), _whole(told["shape"]), *_whole(told["data_offsets"]))
            for name, told in document.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(label, "its header is damaged") from error
    at = 0
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    ordered = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.kind not in _BITS:
            raise unreadable(label, f"{name} has the type {entry.kind!r:.20}, which is not one of {', '.join(_BITS)}")
        if len(entry.shape) > _MOST_DIMENSIONS:
            raise unreadable(label, f"{name} has {len(entry.shape)} dimensions; torch has {_MOST_DIMENSIONS} at most")
        if entry.start != at or entry.end < at or entry.end - at != bytes_of(entry):
            raise unreadable(label, "its header does not fit its tensors")
        # What is alike is kept once: a thousand anchors may be open at a time.
        ordered[name] = Entry(sys.intern(entry.kind), shapes.setdefault(entry.shape, entry.shape), at, entry.end)
        at = entry.end
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise unreadable(label, "its metadata are not texts")
    return Header(metadata, ordered, len(header), at)


def make_header(metadata: Mapping[str, str], entries: Mapping[str, Entry]) -> bytes:
    """Return the header that `write_tensors` gives a file with these tensors: metadata in order, padded to 8 bytes."""
    document: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    for name, entry in entries.items():
        document[name] = {
            "dtype": entry.kind,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
    text = header_text(document)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_text(document: Mapping[str, Any]) -> bytes:
    """Return a header as this package writes it, without what pads it."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _whole(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(numbers)
    return tuple(numbers)


def bytes_of(entry: Entry) -> int:
    """Return how many bytes a tensor takes."""
    return math.prod(entry.shape) * _BITS[entry.kind] // 8
