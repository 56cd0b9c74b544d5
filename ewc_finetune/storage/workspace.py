"""The hidden folder in which files are made before they take their places, and what becomes of it if its maker dies.

In it are `lock`, held for as long as the maker lives; `new-0`, `new-1`, ..., what is made; `old-0`, ..., what stood in
their places; and `journal`, for as long as all of that can and should be undone. Whoever finds such a folder whose lock
is free undoes what its journal says, and removes it. Where there are no locks nobody can tell, and it stays.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ewc_finetune.errors import StorageError, few
from ewc_finetune.storage import signals
from ewc_finetune.storage.locks import lock

_NAME = re.compile(r"\.ewc-ft-[0-9a-f]{8}\.tmp")
_JOURNAL = "journal"


class Workspace:
    """A hidden folder in another one, for as long as something is made in it.

    Args:
        folder: The other one, where what is made will be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with signals.deferred():
            while (made := _make(folder)) is None:
                pass
            self.path, self._lock = made
            signals.on_leaving(self.close)

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def new(self, n: int) -> Path:
        """Return where the n-th thing is made."""
        return self.path / f"new-{n}"

    def place(self, names: Sequence[str], *, overwrite: bool, provisional: bool = False) -> None:
        """Put all that was made in its places, or nothing.

        Args:
            names: In the folder, of `new(0)` and so on.
            overwrite: Whether what is there may be replaced.
            provisional: Whether it can be undone until `settle`, and is if this process dies.

        Raises:
            FileExistsError: if something is there that may not be replaced.
            StorageError: if something is there that is neither file nor folder.
        """
        paths = [self._folder / name for name in names]
        with signals.deferred():
            for path in paths:
                check_kind(path)
            alone = len(paths) == 1 and not provisional and not self.new(0).is_dir()
            if alone and overwrite:
                self.new(0).replace(paths[0])
            elif not (alone and _link(self.new(0), paths[0])):
                self._exchange(paths, overwrite, provisional)
            sync_folder(self._folder)

    def _exchange(self, paths: Sequence[Path], overwrite: bool, provisional: bool) -> None:
        self._begin(paths, provisional)
        n = 0
        try:
            for n, path in enumerate(paths):
                if overwrite and os.path.lexists(path):
                    path.rename(self.path / f"old-{n}")
                _put(self.new(n), path)
        except FileExistsError:
            _undo(self.path, reached=n)
            raise
        except BaseException:
            self.undo()
            raise
        if not provisional:
            self.settle()

    def _begin(self, paths: Sequence[Path], provisional: bool) -> None:
        things = [
            {"name": path.name, "had": os.path.lexists(path), "made": _inode(self.new(n))}
            for n, path in enumerate(paths)
        ]
        document = {"folder": _inode(self.path), "provisional": provisional, "things": things}
        part = self.path / f"{_JOURNAL}.part"
        with part.open("w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(self.path / _JOURNAL)
        sync_folder(self.path)

    @property
    def has_old(self) -> bool:
        """Whether something was replaced that can be put back."""
        return any(path.name.startswith("old-") for path in self.path.iterdir())

    def undo(self) -> None:
        """Put everything back as it was."""
        _undo(self.path)

    def settle(self) -> None:
        """Let what was placed stay, whatever comes."""
        (self.path / _JOURNAL).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder; what can still be undone is left to the next command."""
        self._lock.close()
        if not (self.path / _JOURNAL).exists():
            shutil.rmtree(self.path, ignore_errors=True)
        signals.forget(self.close)


def remove(path: Path) -> None:
    """Remove a folder and all that is in it, of which nobody ever sees half.

    Raises:
        OSError: if it cannot be.
    """
    with Workspace(path.parent) as space:
        path.rename(space.new(0))


def recover(folder: Path, note: Callable[[str], None]) -> None:
    """Put in order what commands that were killed have left in a folder.

    Args:
        folder: The folder that their outputs are in, or were to be in.
        note: Is told of what was found, if there was anything.
    """
    removed = 0
    restored: list[Path] = []
    try:
        names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))  # noqa: PTH208 - no Path for each
    except OSError:
        return
    for space in (folder / name for name in names):
        with suppress(OSError), signals.deferred():  # others may be at it, or forbid it
            if not _is_own_folder(space):
                continue
            with (space / "lock").open("ab") as file:
                if not lock(file):
                    continue
                restored += _undo(space)
                settled = not (space / _JOURNAL).exists()
            if settled:
                shutil.rmtree(space)
                removed += 1
    if restored:
        note(f"put back as it was before a command that was killed: {few([str(path) for path in restored])}")
    elif removed:
        note(f"removed from {folder}: what a command that was killed had left half made")


def _make(folder: Path) -> tuple[Path, Any] | None:
    """Make a workspace and take its lock; None if somebody thought it dead in between."""
    path = folder / f".ewc-ft-{secrets.token_hex(4)}.tmp"
    path.mkdir(0o700)
    try:
        file = (path / "lock").open("wb")
    except FileNotFoundError:
        return None
    if lock(file) is not False and _inode(path / "lock") == os.fstat(file.fileno()).st_ino:
        return path, file
    file.close()
    return None


def _undo(space: Path, reached: int | None = None) -> list[Path]:
    """Do what a workspace's journal asks for, and return what was put back; any number of times, from any state.

    Args:
        space: The workspace.
        reached: The first thing whose place was another's, so that an empty file there, or later, is not its own.
    """
    try:
        journal = json.loads((space / _JOURNAL).read_text(encoding="utf-8"))
        # In a copy, or something from elsewhere, it does not speak of the files that are beside it now.
        if journal["folder"] != _inode(space) or not all(_is_plain(thing["name"]) for thing in journal["things"]):
            return []
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return []
    restored, in_the_way = [], False
    things = list(enumerate(journal["things"]))
    if journal["provisional"] or any(os.path.lexists(space / f"new-{n}") for n, _ in things):
        for n, thing in things:
            path, new, old = space.parent / thing["name"], space / f"new-{n}", space / f"old-{n}"
            moved, waiting = os.path.lexists(old), os.path.lexists(new)
            keeps_place = waiting and (moved or not thing["had"]) and (reached is None or n < reached)
            if _inode(path) == thing["made"] or (keeps_place and _is_empty_file(path)):
                if waiting:
                    path.unlink()
                else:
                    path.rename(new)
            if moved and not os.path.lexists(path):
                old.rename(path)
                restored.append(path)
            elif moved:
                in_the_way = True
        sync_folder(space.parent)
    if not in_the_way:
        (space / _JOURNAL).unlink()
    return restored


def _put(new: Path, path: Path) -> None:
    """Move a file or folder to a place where nothing is.

    Raises:
        FileExistsError: if something is there.
    """
    if new.is_dir():
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        new.rename(path)  # which fails if a file or a folder with something in it has come in between
    elif not _link(new, path):
        # An empty file keeps the place, which is known for one that may be replaced.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        new.replace(path)


def _link(new: Path, path: Path) -> bool:
    """Move a file to a place where nothing is, whoever else wants to do so; False where there are no hard links.

    Raises:
        FileExistsError: if something is there.
    """
    try:
        os.link(new, path)
    except FileExistsError:
        raise
    except OSError:
        return False
    new.unlink()
    return True


def check_kind(path: Path) -> None:
    """Refuse to replace what is neither file nor folder.

    Raises:
        StorageError: saying what it is.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    kind = "a link that leads nowhere" if stat.S_ISLNK(mode) else kinds.get(stat.S_IFMT(mode))
    if kind is not None:
        raise StorageError(f"cannot write {path}: it is {kind}, and only files are replaced. Choose another path")


def sync_folder(folder: Path) -> None:
    """Make a rename itself survive a power cut, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None


def _is_plain(name: str) -> bool:
    """Whether it names something in the folder itself."""
    return name not in ("", ".", "..") and Path(name).name == name


def _is_empty_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == 0


def _is_own_folder(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and (not hasattr(os, "geteuid") or status.st_uid == os.geteuid())
