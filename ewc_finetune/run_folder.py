"""The run folder: `run.json`, `run.toml`, `metrics.jsonl`, `figure.png`, and the state while a run is under way."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import shutil
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

import numpy
import safetensors
import torch
import torchvision

from ewc_finetune._version import __version__
from ewc_finetune.checkpoint.state_dict import save_object
from ewc_finetune.config import to_toml
from ewc_finetune.errors import StorageError
from ewc_finetune.files import atomic_write, hidden, storage_errors
from ewc_finetune.runs import FORMAT, FORMAT_VERSION, read_document, read_lines


class RunFolder:
    """One run's folder, open from the run's start to its end; as a context it says how that came.

    `RunFolder.create` makes one, `RunFolder.reopen` goes on with one of a run that was stopped.

    Attributes:
        path: Of the folder.
        last: Of the checkpoint after the last evaluation, while the run is under way.
        document: What `run.json` says.
    """

    def __init__(self, path: Path, document: dict[str, Any], earlier: Path | None, *, reopened: bool = False) -> None:
        self._place(path)
        self._reopened = reopened
        self._finished = False
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
        self.last, self._state = path / "last.pt", path / "state.pt"

    @classmethod
    def create(
        cls,
        path: Path,
        overwrite: bool,
        options: Mapping[str, Any],
        command: str | None,
        identities: Mapping[str, Any] | None = None,
    ) -> RunFolder:
        """Make a folder; its parent must exist.

        Args:
            path: Where.
            overwrite: Whether a folder of an earlier run may be replaced.
            options: Everything that the run was told, by the names of the command line.
            command: The command line that says the same; None where none can.
            identities: What tells its model, anchors and data from others.

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
            "identities": dict(identities or {}),
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
            folder._write_options()
            with storage_errors(path):
                if overwrite and (path / "run.json").is_file():
                    _check_idle(path)
                    folder.update(replaces=earlier.name)
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
        folder = cls(path, read_document(path), None, reopened=True)
        # Only now does nobody else write it.
        folder.document = read_document(path)
        replaced = folder.document.get("replaces")
        if isinstance(replaced, str) and Path(replaced).name == replaced and replaced.startswith(f".{path.name}."):
            folder._earlier = path.with_name(replaced)
        folder._tidy()
        if folder.document["status"] == "finished":
            folder._clear(keep_last=bool(folder.document.get("kept_last")))
            folder._metrics.close()
            raise StorageError(f"the run {path} is finished; start another one from its checkpoint")
        return folder

    def take_up(self, options: Mapping[str, Any], command: str | None) -> None:
        """Record that the run goes on, with these options."""
        self.document.pop("ended", None)
        self.update(status="running", options=dict(options), command=command)
        self._write_options()

    def _write_options(self) -> None:
        with atomic_write(self.path / "run.toml") as temporary:
            temporary.write_text(to_toml(self.document["options"]), encoding="utf-8")

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
        os.fsync(self._metrics.fileno())
        with atomic_write(self._state) as temporary:
            save_object(temporary, self._state, {**state, "metrics": self._metrics.tell()})
        self._drop_earlier()

    def best(self, step: int) -> Path:
        """Return where the checkpoint of the best step goes."""
        return self.path / f"best-{step}.pt"

    def keep_best(self, step: int) -> None:
        """Remove the checkpoints of steps that were the best before this one."""
        for path in self.path.glob("best-*.pt"):
            if path != self.best(step):
                path.unlink(missing_ok=True)

    def load_state(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        """Return the state to go on from (None: from the start), and the lines of the log up to there; drop later ones.

        Raises:
            StorageError: if the state cannot be read.
        """
        state: dict[str, Any] | None = None
        if self._state.exists():
            try:
                state = torch.load(self._state, weights_only=True, map_location="cpu")
                size, _ = int(state["metrics"]), (state["training"]["step"], state["journal"]["step"])
            except Exception as error:  # whatever is wrong with the file, torch may say it in any way
                raise StorageError(
                    f"{self._state} cannot be read ({type(error).__name__}); start the run again, with --overwrite"
                ) from error
        else:
            size = 0
        metrics = self.path / "metrics.jsonl"
        if metrics.stat().st_size < size:
            raise StorageError(f"{metrics} is shorter than it was; put it back, or start the run again")
        with storage_errors(metrics):
            self._metrics.truncate(size)
        return state, read_lines(self.path / "metrics.jsonl")

    @property
    def resumable(self) -> bool:
        """Whether there is something to go on from: a state, or runs of a search."""
        kept = self._state.exists() or self.last.exists()
        return not self._finished and (kept or bool(self.document.get("trials")))

    def finish(self, *, keep_last: bool, **results: Any) -> None:
        """Record that the run is done; its intermediate states are no longer needed.

        Args:
            keep_last: Whether to keep the last checkpoint, which is not what the run ends with.
            results: What to record.
        """
        self.document.pop("trials", None)  # `found` has them now
        self.update(status="finished", ended=_now(), kept_last=keep_last, **results)
        self._finished = True
        self._clear(keep_last)
        self._tidy()
        self._drop_earlier()
        self._metrics.close()

    def _clear(self, keep_last: bool) -> None:
        """Remove the states of a run that is finished."""
        gone = [self._state, *self.path.glob("best-*.pt"), *(() if keep_last else (self.last,))]
        for path in gone:
            path.unlink(missing_ok=True)

    def _tidy(self) -> None:
        """Remove files that a killed process left half written."""
        for path in self.path.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def stop(self, status: str) -> None:
        """Record why the run ended early, if there is something to go on from; else leave things as they were."""
        if self._finished:
            return
        if self.resumable or self._reopened:
            with contextlib.suppress(StorageError):  # the disk may be what stopped the run
                self.update(status=status, ended=_now())
            self._metrics.close()
        else:
            self._metrics.close()
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


def _check_idle(path: Path) -> None:
    """Refuse to replace the folder of a run that is under way."""
    metrics = path / "metrics.jsonl"
    if metrics.exists():
        with metrics.open("ab") as file:
            if not lock(file):
                raise StorageError(f"the run {path} is being written by another process; wait for it, or stop it first")


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
    if not isinstance(file, int):
        _locked.add(file)
    return True


# A forked process (that reads samples, say) would hold the lock for as long as it lives, whatever becomes of this one.
_locked: WeakSet[IO[bytes]] = WeakSet()


def _let_go() -> None:
    for file in list(_locked):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def check_run_folder(path: Path, overwrite: bool) -> None:
    """Refuse a path for a run folder that holds something: whatever it is without `overwrite`, with it what is no run.

    Raises:
        StorageError: saying what is there.
    """
    if path.exists() and not (overwrite and (path / "run.json").is_file()):
        status = _status(path)
        begun = status.startswith("status: ") and status != "status: finished"
        go_on = f"go on with it (ewc-ft finetune --resume {path}), " if begun else ""
        raise StorageError(
            f"the run folder {path} exists ({status}). Choose another path, {go_on}or replace it with --overwrite"
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
