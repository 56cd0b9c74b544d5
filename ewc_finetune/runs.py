"""The run folder: `run.json`, `metrics.jsonl`, `figure.png`, and the last good state while a run is under way."""

from __future__ import annotations

import contextlib
import json
import platform
import secrets
import shutil
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch
import torchvision

from ewc_finetune._version import __version__
from ewc_finetune.errors import StorageError
from ewc_finetune.files import atomic_write, storage_errors


class RunFolder:
    """One run's folder, open from the run's start to its end.

    Args:
        path: Made here; its parent must exist.
        overwrite: Whether a folder of an earlier run may be replaced.
        options: Everything that the run was told, as JSON has it.

    Raises:
        StorageError: if there is such a folder already, or it can't be made.
    """

    def __init__(self, path: Path, overwrite: bool, options: Mapping[str, Any]) -> None:
        self.path = path
        self.last = path / "last.pt"
        # The folder of an earlier run stands aside until this one has something to put in its place.
        self._earlier = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
        with storage_errors(path):
            if overwrite and (path / "run.json").is_file():
                path.rename(self._earlier)
            check_run_folder(path, overwrite=False)
            path.mkdir()
        try:
            self._open(options)
        except BaseException:
            self._give_way()
            raise

    def _open(self, options: Mapping[str, Any]) -> None:
        with storage_errors(self.path):
            self._metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8")
        self._document: dict[str, Any] = {
            "status": "running",
            "started": _now(),
            "options": dict(options),
            "versions": {
                "ewc_finetune": __version__,
                "torch": torch.__version__,
                "torchvision": torchvision.__version__,
                "safetensors": safetensors.__version__,
                "numpy": numpy.__version__,
                "python": platform.python_version(),
            },
            "platform": platform.platform(),
        }
        self.update()

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl`."""
        with storage_errors(self.path / "metrics.jsonl"):
            self._metrics.write(json.dumps(line) + "\n")
            self._metrics.flush()

    def update(self, **values: Any) -> None:
        """Write `run.json` again, with these values in it."""
        self._document |= values
        with atomic_write(self.path / "run.json") as temporary:
            temporary.write_text(json.dumps(self._document, indent=2) + "\n", encoding="utf-8")

    def finish(self, **results: Any) -> None:
        """Record that the run is done; its intermediate state is no longer needed."""
        self._metrics.close()
        self.update(status="finished", ended=_now(), **results)
        self.last.unlink(missing_ok=True)
        self._drop_earlier()

    def stop(self, status: str) -> None:
        """Record why the run ended early, if it has an epoch's state to keep; else leave things as they were."""
        with contextlib.suppress(OSError):
            self._metrics.close()
        if self.last.exists():
            with contextlib.suppress(StorageError):  # the disk may be what stopped the run
                self.update(status=status, ended=_now())
            self._drop_earlier()
        else:
            self._give_way()

    def _give_way(self) -> None:
        """Remove this folder, and put back the one of the earlier run."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._earlier.rename(self.path)

    def _drop_earlier(self) -> None:
        if self._earlier.is_symlink():
            self._earlier.unlink()
        shutil.rmtree(self._earlier, ignore_errors=True)


def check_run_folder(path: Path, overwrite: bool) -> None:
    """Refuse a path for a run folder that holds something: whatever it is without `overwrite`, with it what is no run.

    Raises:
        StorageError: saying what is there.
    """
    if path.exists() and not (overwrite and (path / "run.json").is_file()):
        raise StorageError(
            f"the run folder {path} exists ({_status(path)}). Choose another path, or replace it with --overwrite"
        )


def _status(path: Path) -> str:
    try:
        return f"status: {json.loads((path / 'run.json').read_text(encoding='utf-8'))['status']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "not a run of ewc-ft"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


# Reading one back needs no torch, so it is a module of its own.
from ewc_finetune.run_record import Run as Run  # noqa: E402, PLC0414
from ewc_finetune.run_record import read_run as read_run  # noqa: E402, PLC0414
