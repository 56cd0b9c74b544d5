"""The zip archives that torch writes: looked at before anything in them is loaded.

torch reads them with a parser of its own, which compares no checksums. What is found here holds for that parser too,
for an archive is refused that two parsers could read differently.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ewc_finetune.errors import CheckpointError

# Bytes, unpacked. torch packs code alone; packed members may be far larger than the file.
_LARGEST_PACKED = 100 << 20
_BLOCK = 1 << 20
# The records at the end of an archive, from the last one back: the end, the locator of the ZIP64 end, and that end.
_END = struct.Struct("<4s4H2LH")
_PLACE_64 = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
# torch lets tensors begin at multiples of so many bytes, so that they can be mapped.
_ALIGNMENT = 64
# The tag of the extra field with which torch fills the space before a tensor.
_PADDING = b"FB"
# The header before each member.
_LOCAL = struct.Struct("<4s5H3L2H")
# The flag of an encrypted member.
_ENCRYPTED = 1
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
# The attribute of a folder, as MS-DOS has it.
_FOLDER = 0x10
# What the end has for the number of entries, the size and the start where the ZIP64 end has them.
_UNSAID = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


def is_archive(path: Path) -> bool:
    """Whether a file begins as a zip archive does."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


class Archive:
    """The members of a zip archive, by their names in the folder that they share; to be used in a `with`.

    Attributes:
        folder: The folder that all members are in, with its slash; empty if there is none.
        members: Their sizes in bytes.
        has_checksums: Whether there are checksums, which `torch.serialization.set_crc32_options(False)` leaves out.

    Raises:
        CheckpointError: if it is damaged, or made to do harm.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._archive = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise self._damaged(str(error)) from error
        infos = self._archive.infolist()
        try:
            self._check_end(len(infos))
            _check_names(path, [member.orig_filename for member in infos])
            self._check_places(infos)
            _check_packed(path, infos)
        except BaseException:
            self._archive.close()
            raise
        folders = {member.filename.partition("/")[0] for member in infos}
        self.folder = f"{folders.pop()}/" if len(folders) == 1 else ""
        self.members = {member.filename.removeprefix(self.folder): member.file_size for member in infos}
        self.has_checksums = any(member.CRC for member in infos)
        for member in infos if not self.has_checksums else ():
            del member.CRC  # zipfile then compares no checksums

    def __enter__(self) -> Archive:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._archive.close()

    def read(self, name: str) -> bytes:
        """Return the bytes of a member.

        Raises:
            CheckpointError: if there is none of that name, or its bytes are not those that were written.
        """
        if name not in self.members:
            raise self._damaged(f"it has no {name}")
        with self._reading(name) as file:
            content = file.read()
        self._check_size(name, len(content))
        return content

    def verify(self) -> None:
        """Read every member, and compare it with its checksum.

        Raises:
            CheckpointError: naming a member whose bytes are not those that were written.
        """
        for name in self.members:
            with self._reading(name) as file:
                read = 0
                while block := file.read(_BLOCK):
                    read += len(block)
            self._check_size(name, read)

    def rewrite(self, target: Path, changed: Mapping[str, bytes | bytearray]) -> None:
        """Write the archive with other bytes for some members, and new ones behind them; no time goes into it."""
        with zipfile.ZipFile(target, "w") as written:
            for name in dict.fromkeys([*self.members, *changed]):
                data = changed[name] if name in changed else self.read(name)
                member = zipfile.ZipInfo(f"{self.folder}{name}")
                member.extra = _padding(written.start_dir + _LOCAL.size + len(member.filename.encode()))
                written.writestr(member, data)

    @contextmanager
    def _reading(self, name: str) -> Iterator[IO[bytes]]:
        try:
            with self._archive.open(f"{self.folder}{name}") as file:
                yield file
        except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:
            raise self._damaged(f"the bytes of {name} are not those that were written: {error}") from error

    def _check_size(self, name: str, size: int) -> None:
        if size != self.members[name]:
            raise self._damaged(f"{name} has {size:,} bytes, and should have {self.members[name]:,}")

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is a damaged archive ({reason}). Copy it again from where it came")

    def _check_places(self, members: list[zipfile.ZipInfo]) -> None:
        """Refuse members whose two headers differ, that lie in one another, or are of two sizes."""
        end = 0
        with self.path.open("rb") as file:
            for member in sorted(members, key=lambda member: member.header_offset):
                signature, _, flags, method, *_, name, extra = _read(file, member.header_offset, _LOCAL)
                stored = member.compress_type == zipfile.ZIP_STORED
                if (
                    signature != b"PK\x03\x04"
                    or member.header_offset < end
                    or flags != member.flag_bits
                    or flags & _ENCRYPTED
                    or method != member.compress_type
                    or method not in _METHODS
                    or (stored and member.compress_size != member.file_size)
                    or (member.file_size and _is_folder(member))
                ):
                    raise self._damaged(f"the headers of {member.filename!r:.100} differ")
                end = member.header_offset + _LOCAL.size + name + extra + member.compress_size
        if end > self._archive.start_dir:
            raise self._damaged("its members run into the list of them")

    def _check_end(self, count: int) -> None:
        """Refuse an archive whose end can be read in two ways: with a comment, a gap, or two lists of members."""
        with self.path.open("rb") as file:
            end = self.path.stat().st_size - _END.size
            signature, *_, entries, size, start, comment = _read(file, end, _END)
            if signature != b"PK\x05\x06" or comment:
                raise self._damaged("something follows its end")
            if (place := _read(file, end - _PLACE_64.size, _PLACE_64))[0] == b"PK\x06\x07":
                end -= _PLACE_64.size + _END_64.size
                said = (entries, size, start)
                signature, *_, entries, size, start = _read(file, end, _END_64)
                unsaid = all(a in (b, limit) for a, b, limit in zip(said, (entries, size, start), _UNSAID, strict=True))
                if signature != b"PK\x06\x06" or place[2] != end or not unsaid:
                    raise self._damaged("it has two ends")
        if (entries, start, start + size) != (count, self._archive.start_dir, end):
            raise self._damaged("its list of members is not where it is said to be")


def _read(file: IO[bytes], place: int, record: struct.Struct) -> tuple[Any, ...]:
    if place < 0:
        return (b"",) * len(record.unpack(bytes(record.size)))
    file.seek(place)
    return record.unpack(file.read(record.size).ljust(record.size, b"\0"))


def _is_folder(member: zipfile.ZipInfo) -> bool:
    """Whether torch's parser takes a member for a folder, of which it reads nothing into the memory of a tensor."""
    return bool(member.external_attr & _FOLDER) or member.orig_filename.endswith("/")


def _padding(start: int) -> bytes:
    """Return the extra field behind which a tensor is aligned, for a field that begins at `start`."""
    size = -(start + len(_PADDING) + 2) % _ALIGNMENT
    return _PADDING + struct.pack("<H", size) + bytes(size)


def _check_names(path: Path, names: list[str]) -> None:
    for name in names:
        if ".." in name.split("/") or name.startswith("/") or not name.isprintable() or "\\" in name:
            raise CheckpointError(f"{path} was made to do harm: its archive names {name!r:.100}. Don't use it")
    # torch's parser ignores the case of names.
    name, times = next(iter(Counter(name.casefold() for name in names).most_common(1)), ("", 0))
    if times > 1:
        raise CheckpointError(
            f"{path} was made to do harm: its archive has {times} members {name!r:.100}. Don't use it"
        )


def _check_packed(path: Path, members: list[zipfile.ZipInfo]) -> None:
    packed = sum(member.file_size for member in members if member.compress_type != zipfile.ZIP_STORED)
    if packed > _LARGEST_PACKED:
        raise CheckpointError(
            f"{path} was made to do harm, or not by torch: {packed:,} bytes of its archive are packed, where torch "
            "packs code alone. Save the model again with torch.save"
        )
