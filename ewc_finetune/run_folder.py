"""The run folder: `run.json`, `run.toml`, `metrics.jsonl`, `figure.png`, and the state while a run is under way."""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import shutil
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import numpy
import safetensors
import torch
import torchvision

from ewc_finetune._version import __version__
from ewc_finetune.config import to_toml
from ewc_finetune.errors import StorageError
from ewc_finetune.files import atomic_write, hidden, storage_errors
from ewc_finetune.runs import FORMAT, FORMAT_VERSION, read_lines, read_run


class RunFolder:
    """One run's folder, open from the run's start to its end; as a context it says how that came.

    `RunFolder.create` makes one, `RunFolder.reopen` goes on with one of a run that was stopped.

    Attributes:
        path: Of the folder.
        last: Of the checkpoint after the last evaluation, while the run is under way.
        best: Of the one with the best score, likewise.
        document: What `run.json` says.
    """

    def __init__(self, path: Path, document: dict[str, Any], earlier: Path | None, *, reopened: bool = False) -> None:
        self._place(path)
        self._reopened = reopened
        self.document = document
        self._earlier = earlier
        with storage_errors(path):
            # Without a buffer each line is one write, of which a killed process leaves all or nothing.
            self._metrics = (path / "metrics.jsonl").open("ab", buffering=0)
        if not lock(self._metrics):
            self._metrics.close()
            raise StorageError(f"the run {path} is being written by another process; wait for it, or stop it first")

    def _place(self, path: Path) -> None:
        self.path = path
        self.last, self.best, self._state = path / "last.pt", path / "best.pt", path / "state.pt"

    @classmethod
    def create(cls, path: Path, overwrite: bool, options: Mapping[str, Any], command: str | None) -> RunFolder:
        """Make a folder; its parent must exist.

        Args:
            path: Where.
            overwrite: Whether a folder of an earlier run may be replaced.
            options: Everything that the run was told, by the names of the command line.
            command: The command line that says the same; None where none can.

        Raises:
            StorageError: if there is such a folder already, or it can't be made.
        """
        if not overwrite:
            check_run_folder(path, overwrite=False)
        document = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "status": "running",
            "started": _now(),
            "options": dict(options),
            "command": command,
            "folder": str(Path.cwd()),
            "versions": versions(),
            "platform": platform.platform(),
        }
        # It is made out of sight, so that nobody ever sees half of it. The folder of an earlier run stands aside until
        # this one has something to put in its place.
        made, earlier = hidden(path, "tmp"), hidden(path, "old")
        closing = contextlib.ExitStack()
        try:
            with storage_errors(path):
                made.mkdir()
            folder = cls(made, document, earlier)
            closing.callback(folder._metrics.close)
            folder.update()
            with atomic_write(made / "run.toml") as temporary:
                temporary.write_text(to_toml(options), encoding="utf-8")
            with storage_errors(path):
                if overwrite and (path / "run.json").is_file():
                    path.rename(earlier)
                check_run_folder(path, overwrite=False)
                made.rename(path)
        except BaseException:
            closing.close()
            shutil.rmtree(made, ignore_errors=True)
            if earlier.exists() and not path.exists():
                earlier.rename(path)
            raise
        folder._place(path)
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of a run that was stopped.

        Raises:
            StorageError: if it is none, its run is at its end, or under way in another process.
        """
        run = read_run(path)
        if run.document["status"] == "finished":
            raise StorageError(f"the run {path} is finished; start another one from its checkpoint")
        return cls(path, run.document, None, reopened=True)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.stop(f"failed: {error}" if isinstance(error, Exception) else "interrupted")
        self._metrics.close()

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`."""
        with storage_errors(self.path / "metrics.jsonl"):
            text, place = json.dumps(line).encode() + b"\n", self._metrics.tell()
            if self._metrics.write(text) != len(text):  # the disk is full, and half a line is none
                self._metrics.truncate(place)
                raise OSError(errno.ENOSPC, "no space left")

    def update(self, **values: Any) -> None:
        """Write `run.json` again, with these values in it."""
        self.document |= values
        with atomic_write(self.path / "run.json") as temporary:
            temporary.write_text(json.dumps(self.document, indent=2) + "\n", encoding="utf-8")

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Keep what is needed to go on from here: tensors and plain values."""
        with atomic_write(self._state) as temporary:
            torch.save({**state, "metrics": self._metrics.tell()}, temporary)
        self._drop_earlier()

    def load_state(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Return the state to go on from (None: from the start), and the lines of the log up to there; drop later ones.

        Raises:
            StorageError: if the state cannot be read.
        """
        state: dict[str, Any] | None = None
        if self._state.exists():
            try:
                state = torch.load(self._state, weights_only=True, map_location="cpu")
                size = int(state["metrics"])
            except Exception as error:  # whatever is wrong with the file, torch may say it in any way
                raise StorageError(
                    f"{self._state} cannot be read ({type(error).__name__}); start the run again, with --overwrite"
                ) from error
        else:
            size = 0
        with storage_errors(self.path / "metrics.jsonl"):
            self._metrics.truncate(size)
        return state, read_lines(self.path / "metrics.jsonl")

    @property
    def resumable(self) -> bool:
        """Whether there is a state to go on from."""
        return self._state.exists()

    def finish(self, *, keep_last: bool, **results: Any) -> None:
        """Record that the run is done; its intermediate states are no longer needed.

        Args:
            keep_last: Whether to keep the last checkpoint, which is not what the run ends with.
            results: What to record.
        """
        self._metrics.close()
        self.document.pop("trials", None)  # `found` has them now
        self.update(status="finished", ended=_now(), **results)
        for state in (self._state, self.best, *(() if keep_last else (self.last,))):
            state.unlink(missing_ok=True)
        self._drop_earlier()

    def stop(self, status: str) -> None:
        """Record why the run ended early, if it has a state to go on from; else leave things as they were."""
        with contextlib.suppress(OSError):
            self._metrics.close()
        if self._state.exists() or self._reopened:
            with contextlib.suppress(StorageError):  # the disk may be what stopped the run
                self.update(status=status, ended=_now())
        else:
            _give_way(self.path, self._earlier)

    def _drop_earlier(self) -> None:
        if self._earlier is not None:
            if self._earlier.is_symlink():
                self._earlier.unlink()
            shutil.rmtree(self._earlier, ignore_errors=True)
            self._earlier = None


def _give_way(path: Path, earlier: Path | None) -> None:
    """Remove a folder, and put back the one of an earlier run."""
    shutil.rmtree(path, ignore_errors=True)
    if earlier is not None:
        with contextlib.suppress(OSError):
            earlier.rename(path)


def lock(file: IO[bytes] | int) -> bool:
    """Lock a file or folder until it is closed; whether it could be had. Where there are no locks, it can."""
    try:
        import fcntl
    except ImportError:  # no POSIX system
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def check_run_folder(path: Path, overwrite: bool) -> None:
    """Refuse a path for a run folder that holds something: whatever it is without `overwrite`, with it what is no run.

    Raises:
        StorageError: saying what is there.
    """
    if path.exists() and not (overwrite and (path / "run.json").is_file()):
        raise StorageError(
            f"the run folder {path} exists ({_status(path)}). Choose another path, or replace it with --overwrite"
        )


def versions() -> dict[str, str]:
    """Return the versions of all that has a part in the numbers of a run."""
    return {
        "ewc_finetune": __version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "safetensors": safetensors.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def _status(path: Path) -> str:
    try:
        return f"status: {json.loads((path / 'run.json').read_text(encoding='utf-8'))['status']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "not a run of ewc-ft"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
