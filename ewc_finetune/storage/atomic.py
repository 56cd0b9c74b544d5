"""Writing files so that there is never half of one."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ewc_finetune.errors import OccupiedError, PathClashError, StorageError
from ewc_finetune.storage import signals
from ewc_finetune.storage.workspace import Workspace, check_kind, recover

# The most bytes of a file's name, where the file system does not say.
_NAME_MAX = 255
# The last number that is tried for a file that must be kept under another name.
_LAST_NUMBER = 99


@contextlib.contextmanager
def atomic_write(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary path; when the block succeeds, flush what is there to disk and move it to `path`.

    Whatever goes wrong, an interrupt included, the temporary file is removed and `path` keeps what it had. If the
    process is killed, `workspace.recover` does that.

    Args:
        path: The file; through a link, the file that it leads to.
        overwrite: Whether a file may be replaced. If not, and one came into being during the block, what was to be
            there is kept under another name.

    Raises:
        StorageError: if the folder is missing or not writable, the disk is full, or there is what may not be replaced.
    """
    with atomic_writes([path], overwrite=overwrite) as (temporary,), storage_errors(path):
        yield temporary


@contextlib.contextmanager
def atomic_writes(paths: Sequence[Path], *, overwrite: bool = True) -> Iterator[list[Path]]:
    """Do what `atomic_write` does for several files, of which there are all in the end or none.

    Of files in several folders, if the process is killed, there may be all of one folder and none of another.
    """
    real = [Path(os.path.realpath(path)) for path in paths]
    with contextlib.ExitStack() as closing:
        spaces: dict[Path, Workspace] = {}
        names: dict[Path, list[str]] = {}
        temporaries = []
        for path, target in zip(paths, real, strict=True):
            folder = target.parent
            with storage_errors(path):
                if folder not in spaces:
                    spaces[folder] = closing.enter_context(Workspace(folder))
                temporaries.append(spaces[folder].new(len(names.setdefault(folder, []))))
                names[folder].append(target.name)
                os.close(os.open(temporaries[-1], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        permissions = [stat.S_IMODE(temporary.stat().st_mode) for temporary in temporaries]
        yield temporaries
        for path, temporary, mode in zip(paths, temporaries, permissions, strict=True):
            with storage_errors(path):
                # Writers that put a file of their own in this place (safetensors) make it private.
                temporary.chmod(mode)
                _flush(temporary)
        signals.safe_point()
        with signals.deferred():
            try:
                _place(spaces, names, overwrite)
            except FileExistsError:
                raise OccupiedError(_kept_elsewhere(list(spaces.values()), paths, real)) from None
            except OSError as error:
                raise StorageError(f"cannot write {paths[0]}: {_reason(error, paths[0])}") from error


def _place(spaces: Mapping[Path, Workspace], names: Mapping[Path, Sequence[str]], overwrite: bool) -> None:
    several = len(spaces) > 1
    try:
        for folder, space in spaces.items():
            space.place(names[folder], overwrite=overwrite, provisional=several)
    except BaseException:
        for space in spaces.values():
            space.undo()
        raise
    for space in spaces.values():
        space.settle()


def _kept_elsewhere(spaces: Sequence[Workspace], paths: Sequence[Path], real: Sequence[Path]) -> str:
    """Keep what may have taken long to make under another name, and say so; several files only make sense as named."""
    came = next((path for path, target in zip(paths, real, strict=True) if os.path.lexists(target)), paths[0])
    said = f"{came} came into being while this ran, and is left as it is"
    stem = beside(real[0], "").name
    for n in range(2, _LAST_NUMBER + 1) if len(paths) == 1 else ():
        name = f"{stem}-{n}{real[0].name.removeprefix(stem)}"
        with contextlib.suppress(FileExistsError):
            spaces[0].place([name], overwrite=False)
            place = (real if paths[0].is_symlink() else paths)[0].with_name(name)
            return f"{said}; what was to be there is {place}"
    return f"{said}; nothing was written. Choose another path, or replace it with --overwrite"


@contextlib.contextmanager
def atomic_folder(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary folder; when the block succeeds, it takes the place of what is there.

    Args:
        path: The folder; through a link, the folder that it leads to.
        overwrite: Whether a folder may be replaced.

    Raises:
        StorageError: see `atomic_write`.
    """
    real = Path(os.path.realpath(path))
    with contextlib.ExitStack() as closing:
        with storage_errors(path):
            space = closing.enter_context(Workspace(real.parent))
            space.new(0).mkdir()
        yield space.new(0)
        with storage_errors(path):
            for file in (part for part in space.new(0).rglob("*") if part.is_file()):
                _flush(file)
            signals.safe_point()
            space.place([real.name], overwrite=overwrite)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into a `StorageError` that says why."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot write {path}: {_reason(error, path)}") from error


def _reason(error: OSError, path: Path) -> str:
    if error.errno == errno.ENAMETOOLONG:
        return f"its name has {len(os.fsencode(path.name))} bytes, which is too long. Choose a shorter one"
    known = {
        (errno.ENOSPC, errno.EDQUOT): "the disk is full. Nothing was left behind; free some space and run the command "
        "again",
        (errno.ENOENT,): f"the folder {path.parent} does not exist. Make it first, or choose another --output",
        (errno.EACCES, errno.EPERM, errno.EROFS): f"no permission to write in {path.parent}. Choose another path",
        (errno.ELOOP,): "it is a link that leads back to itself. Choose another path",
        (errno.EEXIST, errno.ENOTEMPTY): "it came into being while this ran, and is left as it is. Choose another path",
    }
    said = (text for numbers, text in known.items() if error.errno in numbers)
    return next(said, error.strerror or str(error))


def check_distinct(outputs: Mapping[str, str | Path | None]) -> None:
    """Refuse to write two things to one path.

    Args:
        outputs: Paths by what is to be written there; None of what is not.

    Raises:
        PathClashError: naming both.
    """
    known: dict[Path, str] = {}
    for what, path in outputs.items():
        if path is not None:
            other = known.setdefault(Path(path).resolve(), what)
            if other != what:
                raise PathClashError(f"the {other} and the {what} cannot both be {path}")


def check_output(
    path: Path,
    overwrite: bool,
    inputs: Iterable[object] = (),
    *,
    folder: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """Refuse an output path before the work is done rather than after it.

    What commands that were killed have left there is put in order first.

    Args:
        path: The output that is to be written.
        overwrite: Whether an existing file may be replaced.
        inputs: Those among them that are paths are never replaced.
        folder: Whether the output is a model folder rather than a file.
        note: Is told what was put in order.

    Raises:
        StorageError: if `path` exists and `overwrite` is false, is an input, a folder or anything but a file, lies in
            no writable folder, or has a name that is too long.
    """
    check_place(path)
    recover(Path(os.path.realpath(path)).parent, note)
    for source in (Path(item).resolve() for item in inputs if isinstance(item, (str, Path))):
        if path.resolve() == source:
            raise PathClashError(f"the output {path} is one of the inputs; it would be lost. Choose another path")
        if folder and path.resolve() in source.parents:
            raise PathClashError(f"{source} lies in the output {path}; it would be lost. Choose another path")
    if folder and path.is_symlink() and not path.exists():
        raise StorageError(f"cannot write {path}: it is a link to what is not there. Choose another path")
    if folder and path.exists() and not (path / "config.json").is_file():
        raise StorageError(f"cannot write {path}: it is there and is no model folder. Choose another path")
    if not folder and path.is_dir():
        raise StorageError(f"cannot write {path}: it is a folder. Name a file in it")
    check_kind(Path(os.path.realpath(path)))
    if path.exists() and not overwrite:
        raise StorageError(f"{path} exists. Choose another path, or replace it with --overwrite")
    parent = Path(os.path.realpath(path)).parent
    if not parent.is_dir():
        raise StorageError(f"cannot write {path}: the folder {parent} does not exist. Make it first")
    if not os.access(parent, os.W_OK):
        raise StorageError(f"cannot write {path}: no permission to write in {parent}")


def check_place(path: Path) -> None:
    """Refuse a path that no file or folder can have.

    Raises:
        StorageError: if its name is too long, or it is a link that leads back to itself.
    """
    with storage_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
    with storage_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        # A file system may look for a name that it would not take.
        limit = os.pathconf(path.parent, "PC_NAME_MAX") if hasattr(os, "pathconf") else _NAME_MAX
        if len(os.fsencode(path.name)) > limit:
            raise OSError(errno.ENAMETOOLONG, "name too long")


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
