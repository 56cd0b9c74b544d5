"""The run folder: `run.json`, `run.toml`, `metrics.jsonl`, `figure.png`, and the state while a run is under way."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch
import torchvision

from ewc_finetune._version import __version__
from ewc_finetune.checkpoint.formats.state_dict import save_object
from ewc_finetune.errors import StorageError
from ewc_finetune.runs.options_file import to_toml
from ewc_finetune.runs.record import FORMAT, FORMAT_VERSION, read_document, read_lines, recover_run
from ewc_finetune.storage.atomic import atomic_write, check_place, storage_errors
from ewc_finetune.storage.locks import lock
from ewc_finetune.storage.workspace import Workspace, remove


class RunFolder:
    """One run's folder, open from the run's start to its end; as a context it says how that came.

    `RunFolder.create` makes one, `RunFolder.reopen` goes on with one of a run that was stopped.

    Attributes:
        path: The run folder.
        last: Where the checkpoint after the last evaluation is, while the run is under way.
        document: What `run.json` says.
        reopened: Whether it is that of a run that was stopped.
    """

    def __init__(self, path: Path, document: dict[str, Any], *, reopened: bool = False) -> None:
        self._place(path)
        self.reopened = reopened
        self._finished = False
        self.document = document
        self._earlier: Workspace | None = None
        with storage_errors(path):
            # Without a buffer each line is one write, of which a killed process leaves all or nothing.
            self._metrics = (path / "metrics.jsonl").open("ab", buffering=0)
        if lock(self._metrics) is False:
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
        unsaid: Collection[str] = (),
    ) -> RunFolder:
        """Make a folder; its parent must exist.

        Args:
            path: The folder to make.
            overwrite: Whether a folder of an earlier run may be replaced.
            options: Everything that the run was told, by the names of the command line.
            command: The command line that says the same; None where none can.
            identities: What tells its model, anchors and data from others.
            unsaid: Options that no file may say.

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
        real = Path(os.path.realpath(path))  # of a link to a folder, it is the folder that is replaced
        with contextlib.ExitStack() as undoing:
            with storage_errors(path):
                space = Workspace(real.parent)
                undoing.callback(space.close)
                undoing.callback(space.undo)
                space.new(0).mkdir()
            folder = cls(space.new(0), document)
            undoing.callback(folder._metrics.close)
            folder.update()
            folder._write_options(unsaid)
            with _idle(real):
                check_run_folder(path, overwrite)
                with storage_errors(path):
                    space.place([real.name], overwrite=overwrite, provisional=True)
            folder._place(path)
            folder._earlier = space
            if not space.has_old:
                folder._drop_earlier()
            undoing.pop_all()
        return folder

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open the folder of a run that was stopped.

        Raises:
            StorageError: if it is none, its run is at its end, or under way in another process.
        """
        folder = cls(path, read_document(path), reopened=True)
        # Only now does nobody else write it.
        folder.document = read_document(path)
        if folder.document["status"] == "finished":
            folder._clear(keep_last=bool(folder.document.get("kept_last")))
            folder._metrics.close()
            raise StorageError(f"the run {path} is finished; start another one from its checkpoint")
        return folder

    def take_up(self, options: Mapping[str, Any], command: str | None, unsaid: Collection[str] = ()) -> None:
        """Record that the run goes on, with these options."""
        self.document.pop("ended", None)
        self.update(status="running", options=dict(options), command=command)
        self._write_options(unsaid)

    def _write_options(self, unsaid: Collection[str]) -> None:
        with atomic_write(self.path / "run.toml") as temporary:
            temporary.write_text(to_toml(self.document["options"], unsaid), encoding="utf-8")

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.stop(f"failed: {error}" if isinstance(error, Exception) else "interrupted")
        self._metrics.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Record, for whoever goes on if it is killed, that the run writes its checkpoint in the block."""
        self.update(writing=True)
        try:
            yield
        except BaseException:
            self.document.pop("writing")
            raise

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

    def keep_trials(self, trials: Sequence[Mapping[str, Any]]) -> None:
        """Record the runs that a search has made so far."""
        self.update(trials=list(trials))
        self._drop_earlier()

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

    def generated(self, number: int) -> Path:
        """Return where what was generated for a source of rehearsal is kept, by the source's number."""
        return self.path / f"generated-{number}.json"

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
        """Whether there is something to go on from: a state, runs of a search, or what was generated."""
        kept = self._state.exists() or self.last.exists() or any(self.path.glob("generated-*.json"))
        return not self._finished and (kept or bool(self.document.get("trials")))

    def finish(self, *, keep_last: bool, **results: Any) -> None:
        """Record that the run is done; its intermediate states are no longer needed.

        Args:
            keep_last: Whether to keep the last checkpoint, which is not what the run ends with.
            results: What came of the run, by the keys of `run.json`.
        """
        self.document.pop("trials", None)  # `found` has them now
        self.document.pop("writing", None)
        self._drop_earlier()
        self.update(status="finished", ended=_now(), kept_last=keep_last, **results)
        self._finished = True
        self._clear(keep_last)
        self._metrics.close()

    def _clear(self, keep_last: bool) -> None:
        """Remove the states of a run that is finished."""
        made = [*self.path.glob("best-*.pt"), *self.path.glob("generated-*.json")]
        gone = [self._state, *made, *(() if keep_last else (self.last,))]
        for path in gone:
            path.unlink(missing_ok=True)

    def stop(self, status: str) -> None:
        """Record why the run ended early, if there is something to go on from; else leave things as they were."""
        if self._finished:
            return
        if self.resumable or self.reopened:
            with contextlib.suppress(StorageError):  # the disk may be what stopped the run
                self.update(status=status, ended=_now())
            self._metrics.close()
            self._drop_earlier()
            return
        self._metrics.close()
        with contextlib.suppress(OSError):
            if self._earlier is None:
                remove(self.path)
            else:
                self._earlier.undo()
                self._earlier.close()

    def _drop_earlier(self) -> None:
        if self._earlier is not None:
            self._earlier.settle()
            self._earlier.close()
            self._earlier = None


@contextlib.contextmanager
def _idle(path: Path) -> Iterator[None]:
    """Keep the run of a folder that is to be replaced from going on; refuse to replace one that is under way."""
    metrics = path / "metrics.jsonl"
    with metrics.open("ab") if metrics.exists() else contextlib.nullcontext() as file:
        if file is not None and lock(file) is False:
            raise StorageError(f"the run {path} is being written by another process; wait for it, or stop it first")
        yield


def check_run_folder(path: Path, overwrite: bool, note: Callable[[str], None] = lambda _: None) -> None:
    """Refuse a path for a run folder that holds something: whatever it is without `overwrite`, with it what is no run.

    What runs that were killed have left there is put in order first.

    Args:
        path: The run folder.
        overwrite: Whether the folder of an earlier run may be replaced.
        note: Is told what was put in order.

    Raises:
        StorageError: saying what is there, or that there can be nothing of that name.
    """
    check_place(path)
    recover_run(path, note)
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
