"""An anchor in several files, cut as the Hub cuts models: `NAME-00001-of-0000N.safetensors` and an index.

The tensors keep the order that they have in one file, and the index has that file's metadata: so the parts can be put
together to the same bytes, and an anchor has one digest however it is cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ewc_finetune.errors import AnchorError
from ewc_finetune.storage.checksums import forms_of, read_checksums, with_checksums
from ewc_finetune.storage.safetensors_source import (
    LARGEST_HEADER,
    Entry,
    FileSource,
    Header,
    LocalSource,
    TensorSource,
    make_header,
)

INDEX = ".safetensors.index.json"
# The format that the metadata of a part name.
PART = "ewc-anchor-part"
_TOTAL = "total_size"


class JoinedSource(TensorSource):
    """The parts that an index names, wherever they are.

    Args:
        index: The index.
        label: What to call it.
        parts: Opens a part that it names.

    Raises:
        AnchorError: if the index is damaged, names a file elsewhere, or does not fit its parts.
    """

    def __init__(self, index: Path, label: str, parts: Callable[[str], TensorSource]) -> None:
        self.label = label
        self.metadata, where = read_index(index, label)
        self._where = where
        self._parts = {name: parts(name) for name in sorted(set(where.values()))}
        entries: dict[str, Entry] = {}
        at = 0
        for name, part in self._parts.items():
            for tensor, entry in part.entries.items():
                if where.get(tensor) != name:
                    raise AnchorError(f"{label}: {tensor} is in {name}, where the index has none. Copy it again")
                entries[tensor] = _moved(entry, at)
            at += part.header.data
        missing = [tensor for tensor in where if tensor not in entries]
        if missing:
            raise AnchorError(
                f"{label}: {missing[0]} is not in {where[missing[0]]}, which should have it. Copy all files again"
            )
        self.header = Header(dict(self.metadata), entries, 0, at)  # its length is known when it is written
        self.entries = entries
        self.size = index.stat().st_size + sum(part.size for part in self._parts.values())

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
        return self._parts[self._where[name]].read(name)


class ShardedSource(JoinedSource, LocalSource):
    """The files that an index names, on this machine.

    Args:
        index: The index.
        label: What to call it; its path unless given.
        files: Where each of the files is that it names; beside it unless given.

    Raises:
        AnchorError: see `JoinedSource`; or if a file is missing, or a link to another folder.
    """

    def __init__(self, index: Path, label: str | None = None, files: Mapping[str, Path] | None = None) -> None:
        label = label or str(index)
        self._files: dict[str, FileSource] = {}

        def part(name: str) -> FileSource:
            path = _beside(index, name, label) if files is None else files[name]
            return self._files.setdefault(name, FileSource(path, f"{label}: {name}"))

        super().__init__(index, label, part)

    def header_bytes(self) -> bytes:
        """See `LocalSource`."""
        return make_header(self.metadata, self.entries)

    def check_unchanged(self) -> None:
        """See `LocalSource`."""
        for part in self._files.values():
            part.check_unchanged()

    def blocks(self, start: int, end: int) -> Iterator[bytes]:
        """See `LocalSource`."""
        before = 0
        for part in self._files.values():
            yield from part.blocks(max(start - before, 0), min(end - before, part.header.data))
            before += part.header.data


def read_index(index: Path, label: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the metadata of an index, and which file has which tensor.

    Raises:
        AnchorError: if it is damaged, or names a file that is not beside it.
    """
    try:
        document: Any = json.loads(index.read_bytes()) if index.stat().st_size <= LARGEST_HEADER else None
    except (OSError, ValueError, RecursionError) as error:
        raise AnchorError(f"{label} cannot be read as the index of an anchor ({error}). Copy it again") from error
    parts = document if isinstance(document, dict) else {}
    texts, where = parts.get("metadata"), parts.get("weight_map")
    if not isinstance(texts, dict) or not isinstance(where, dict) or not where:
        raise AnchorError(f"{label} is no index of an anchor: it should have metadata and weight_map. Copy it again")
    if not all(isinstance(name, str) for name in where.values()):
        raise AnchorError(f"{label} is damaged: its weight_map should name a file for each tensor. Copy it again")
    for name in sorted(set(where.values())):
        check_beside(name, label)
    return {str(name): text for name, text in texts.items() if isinstance(text, str)}, dict(where)


def check_beside(name: str, label: str) -> None:
    """Refuse a name in an index that is not the plain name of a safetensors file.

    Raises:
        AnchorError: naming it.
    """
    if "/" in name or "\\" in name or Path(name).name != name or not name.endswith(".safetensors"):
        raise AnchorError(f"{label} was made to do harm: it names {name!r}, which is no file beside it. Don't use it")


def _beside(index: Path, name: str, label: str) -> Path:
    """Return a file beside an index, which may be a link only where the index is one to the same folder."""
    path = index.parent / name
    if not path.is_file():
        raise AnchorError(f"{label} names {name}, which is not beside it. Copy all of its files")
    if path.resolve().parent not in (index.resolve().parent, index.parent.resolve()):
        raise AnchorError(f"{label} names {name}, which is a link to another folder. Copy the file itself")
    return path


def cut(source: LocalSource, folder: Path, stem: str, limit: int) -> list[Path]:
    """Write an anchor into a folder as it goes to the Hub, in parts of at most so many bytes where it is larger.

    Memory does not grow with the anchor.

    Args:
        source: The anchor.
        folder: Where the files go.
        stem: What their names begin with.
        limit: Bytes of a part, but for a tensor that is larger by itself.

    Returns:
        The files: one, or the parts and the index.

    Raises:
        AnchorError: if another tool wrote the anchor in a way that its parts would not lead back to.
    """
    if source.header.data <= limit:
        return [_write(folder / f"{stem}.safetensors", source.as_one_file())]
    if _TOTAL in source.metadata or make_header(source.metadata, source.entries) != source.header_bytes():
        raise AnchorError(
            f"{source.label} was written by another tool, in a form that cannot be cut into parts and put together "
            "again. Write it anew first: ewc_finetune.Anchor.load(path).save(another)"
        )
    groups = _groups(source.entries, limit)
    written: list[Path] = []
    where: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        path = folder / f"{stem}-{number:05}-of-{len(groups):05}.safetensors"
        start, end = source.entries[names[0]].start, source.entries[names[-1]].end
        own = {name: _moved(source.entries[name], -start) for name in names}
        header = make_header({"format": PART}, own)
        written.append(_write(path, _file(header, source.blocks(start, end))))
        where |= dict.fromkeys(names, path.name)
    index = {"metadata": {**source.metadata, _TOTAL: source.header.data}, "weight_map": dict(sorted(where.items()))}
    path = folder / f"{stem}{INDEX}"
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [*written, path]


def _groups(entries: Mapping[str, Entry], limit: int) -> list[list[str]]:
    """Share tensors out to parts, in their order."""
    groups: list[list[str]] = []
    taken = 0
    for name, entry in entries.items():
        size = entry.end - entry.start
        if not groups or taken + size > limit:
            groups.append([])
            taken = 0
        groups[-1].append(name)
        taken += size
    return groups


def _moved(entry: Entry, by: int) -> Entry:
    return entry._replace(start=entry.start + by, end=entry.end + by)


def _file(header: bytes, data: Iterator[bytes]) -> Iterator[bytes]:
    yield header
    yield from data


def write_groups(source: LocalSource, groups: tuple[str, ...], metadata: Mapping[str, str], path: Path) -> None:
    """Write those tensors of a source whose names begin so as one file, a block at a time."""
    kept: dict[str, Entry] = {}
    at = 0
    for name, entry in source.entries.items():
        if name.startswith(groups):
            kept[name] = _moved(entry, at - entry.start)
            at = kept[name].end
    known = read_checksums(source.metadata, forms_of(source.entries), source.label, AnchorError)
    metadata = metadata if known is None else with_checksums(metadata, forms_of(kept), known)
    blocks = (block for name in kept for block in source.blocks(source.entries[name].start, source.entries[name].end))
    _write(path, _file(make_header(metadata, kept), blocks))


def _write(path: Path, blocks: Iterator[bytes]) -> Path:
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)
    return path


def parts_named(index: Path, label: str) -> Sequence[str]:
    """Return the files that an index names, in order; see `read_index`."""
    return sorted(set(read_index(index, label)[1].values()))
