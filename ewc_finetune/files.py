"""Writing files so that there is never half of one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ewc_finetune.errors import StorageError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block succeeds, flush it to disk and rename it.

    Whatever goes wrong, an interrupt included, the temporary file is removed and `path` keeps what it had.

    Raises:
        StorageError: if the folder is missing or not writable, or the disk is full.
    """
    with atomic_writes([path]) as (temporary,), storage_errors(path):
        yield temporary


@contextlib.contextmanager
def atomic_writes(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Do what `atomic_write` does for several files, of which there are all in the end or none."""
    temporaries = [hidden(path, "tmp") for path in paths]
    try:
        for path, temporary in zip(paths, temporaries, strict=True):
            with storage_errors(path):
                os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        permissions = [stat.S_IMODE(temporary.stat().st_mode) for temporary in temporaries]
        yield temporaries
        for path, temporary, mode in zip(paths, temporaries, permissions, strict=True):
            with storage_errors(path):
                # Writers that put a file of their own in this place (safetensors) make it private.
                temporary.chmod(mode)
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
        _rename(list(zip(temporaries, paths, strict=True)))
        for folder in {path.parent for path in paths}:
            _sync_folder(folder)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; when the block succeeds, it takes the place of what is there.

    Raises:
        StorageError: see `atomic_write`.
    """
    path = path.resolve()  # of a link to a folder, it is the folder that is replaced
    temporary, old = hidden(path, "tmp"), hidden(path, "old")
    try:
        with storage_errors(path):
            temporary.mkdir()
        yield temporary
        with storage_errors(path):
            for file in (part for part in temporary.rglob("*") if part.is_file()):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            try:
                if path.exists():
                    path.rename(old)
                temporary.rename(path)
            except BaseException:
                if old.exists() and not path.exists():
                    old.rename(path)
                raise
        _sync_folder(path.parent)
    finally:
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)


def _rename(pairs: Sequence[tuple[Path, Path]]) -> None:
    """Rename files, and undo it if one cannot be renamed or somebody interrupts."""
    kept: list[tuple[Path, Path]] = []
    try:
        for _, path in pairs[:-1]:  # the last one has nothing behind it that could fail
            if path.exists():
                kept.append((hidden(path, "old"), path))
                with storage_errors(path):
                    os.link(path, kept[-1][0])
        done: list[Path] = []
        try:
            for temporary, path in pairs:
                with storage_errors(path):
                    done.append(path)
                    temporary.replace(path)
        except BaseException:
            before = {path: old for old, path in kept}
            for path in done[:-1]:
                if path in before:
                    before[path].replace(path)
                else:
                    path.unlink(missing_ok=True)
            raise
    finally:
        for old, _ in kept:
            old.unlink(missing_ok=True)


def hidden(path: Path, ending: str) -> Path:
    """Return a path beside this one for what nobody should see yet, or no more; another one each time."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{ending}")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into a `StorageError` that says why."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {_reason(error, path)}") from error


def _reason(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full. Nothing was left behind; free some space and run the command again"
    if error.errno == errno.ENOENT:
        return f"the folder {path.parent} does not exist. Make it first, or choose another --output"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to write in {path.parent}. Choose another path"
    return error.strerror or str(error)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_output(path: Path, overwrite: bool, inputs: Iterable[object] = (), *, folder: bool = False) -> None:
    """Refuse an output path before the work is done rather than after it.

    Args:
        path: Where the output is to go.
        overwrite: Whether an existing file may be replaced.
        inputs: Those among them that are paths are never replaced.
        folder: Whether the output is a model folder rather than a file.

    Raises:
        StorageError: if `path` exists and `overwrite` is false, is an input or a folder, or lies in no writable folder.
    """
    for source in (Path(item).resolve() for item in inputs if isinstance(item, (str, Path))):
        if path.resolve() == source:
            raise StorageError(f"the output {path} is one of the inputs; it would be lost. Choose another path")
        if folder and path.resolve() in source.parents:
            raise StorageError(f"{source} lies in the output {path}; it would be lost. Choose another path")
    if folder and path.is_symlink() and not path.exists():
        raise StorageError(f"cannot write {path}: it is a link to what is not there. Choose another path")
    if folder and path.exists() and not (path / "config.json").is_file():
        raise StorageError(f"cannot write {path}: it is there and is no model folder. Choose another path")
    if not folder and path.is_dir():
        raise StorageError(f"cannot write {path}: it is a folder. Name a file in it")
    if path.exists() and not overwrite:
        raise StorageError(f"{path} exists. Choose another path, or replace it with --overwrite")
    if not path.parent.is_dir():
        raise StorageError(f"cannot write {path}: the folder {path.parent} does not exist. Make it first")
    if not os.access(path.parent, os.W_OK):
        raise StorageError(f"cannot write {path}: no permission to write in {path.parent}")


def beside(path: Path, ending: str) -> Path:
    """Return the path beside a checkpoint or anchor that ends differently: `m.pt` to `m.run`, `v1.0` to `v1.0.run`."""
    for known in (
        ".safetensors.index.json",
        ".pt",
        ".pt2",
        ".pth",
        ".ckpt",
        ".bin",
        ".torchscript",
        ".ts",
        ".safetensors",
        ".onnx",
    ):
        if path.name.endswith(known) and path.name != known:
            return path.with_name(path.name.removesuffix(known) + ending)
    return path.with_name(path.name + ending)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
