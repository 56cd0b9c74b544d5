"""The folder of a sweep: its runs, and what they have come to as a document, a table and a figure."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ewc_finetune.errors import StorageError
from ewc_finetune.reporting.outcome import outcome_of
from ewc_finetune.reporting.tradeoff import Row, Tradeoff, trade_off
from ewc_finetune.runs.folder import versions
from ewc_finetune.runs.record import Run, read_run
from ewc_finetune.storage import signals
from ewc_finetune.storage.atomic import atomic_write, beside, storage_errors
from ewc_finetune.storage.locks import lock
from ewc_finetune.storage.workspace import remove
from ewc_finetune.sweeps.grid import Point, stack_label

FORMAT = "ewc-sweep"
FORMAT_VERSION = 1
DOCUMENT = "sweep.json"
TABLE = "sweep.csv"
FIGURE = "frontier.png"


@dataclass
class SweepFolder:
    """One sweep's folder.

    Attributes:
        path: The folder.
        points: The runs that are asked for; others may be there from an earlier call.
        new: The new domain.
        old: The other domains that are scored.
        failures: Why runs failed, by name.
        left_out: Names of runs that are there and do not belong with the others.
    """

    path: Path
    points: Sequence[Point]
    new: str
    old: tuple[str, ...]
    failures: dict[str, str] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    _finished: dict[str, Run] = field(default_factory=dict)

    def runs(self) -> dict[str, Run]:
        """Return the runs that are in the folder, by name."""
        runs = {}
        for folder in sorted(self.path.glob("*.run")):
            name = folder.name.removesuffix(".run")
            if not folder.name.startswith(".") and (folder / "run.json").is_file():
                runs[name] = self._finished.get(name) or read_run(folder)
        self._finished = {name: run for name, run in runs.items() if run.document["status"] == "finished"}
        return runs

    def without_record(self) -> list[Path]:
        """Return the run folders whose run was killed before it said anything."""
        folders = [self.path / f"{point.name}.run" for point in self.points]
        return [path for path in folders if path.is_dir() and not (path / "run.json").exists()]

    def write(self, status: str) -> Tradeoff:
        """Write what the runs have come to."""
        tradeoff = trade_off(self._rows())
        document = self.to_json(tradeoff, status)
        with atomic_write(self.path / DOCUMENT) as temporary:
            temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        with atomic_write(self.path / TABLE) as temporary:
            temporary.write_text(tradeoff.to_csv(), encoding="utf-8")
        tradeoff.draw(self.path / FIGURE, title_of(self.new))
        return tradeoff

    def to_json(self, tradeoff: Tradeoff, status: str) -> dict[str, Any]:
        """Return the document."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "status": status,
            "sweep": str(self.path),
            "versions": versions(),
            "new": self.new,
            "old": list(self.old),
            **tradeoff.to_json(),
        }

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Make the folder, and keep other sweeps out of it.

        Raises:
            StorageError: if another process is making it.
        """
        with storage_errors(self.path):
            self.path.mkdir(exist_ok=True)
        if os.name == "nt":  # where folders cannot be locked
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            if lock(handle) is False:
                raise StorageError(f"the sweep {self.path} is being made by another process; wait for it, or stop it")
            with signals.deferred():
                yield
        finally:
            os.close(handle)

    def checkpoint(self, run: Run) -> Path:
        """Return where the checkpoint of a run is."""
        return self.path / Path(str(run.document["options"]["output"])).name

    def discard(self, run: Run) -> None:
        """Remove the checkpoint of a run: its file, folder, or index and shards."""
        output = self.checkpoint(run)
        shard = re.compile(re.escape(beside(output, "").name) + r"-\d{5}-of-\d{5}\.\w+")
        for path in self.path.iterdir():
            if path.name == output.name or shard.fullmatch(path.name):
                if path.is_dir() and not path.is_symlink():
                    remove(path)
                else:
                    path.unlink(missing_ok=True)

    def _rows(self) -> list[Row]:
        runs = self.runs()
        rows = []
        for point in self.points:
            status = f"failed: {self.failures[point.name]}" if point.name in self.failures else "waiting"
            row = Row(point.name, point.stack, point.strength, point.form, point.seed, status, plain=point.plain)
            run = None if point.name in self.failures else runs.get(point.name)
            rows.append(row if run is None else self._told(row, run))
        asked = {row.name for row in rows}
        for name, run in runs.items():
            options = run.document["options"]
            lambdas = options.get("lambda")
            if name not in asked | self.left_out and isinstance(lambdas, list) and len(lambdas) == 1:
                label = stack_label(options["anchors"])
                plain = not outcome_of(run).held
                row = Row(name, label, lambdas[0], options["penalty-form"], options["seed"], "", plain=plain)
                rows.append(self._told(row, run))
        return rows

    def _told(self, row: Row, run: Run) -> Row:
        """Return a row with what its run folder says."""
        status = run.document["status"]
        if status != "finished":
            return replace(row, status=row.status or status)
        return replace(row, status=status, outcome=replace(outcome_of(run), new=self.new, old=self.old))


def title_of(new: str) -> str:
    """Return what stands above the figure of a sweep."""
    return f"What is kept and what is learned of {new}, by lambda"


def check_sweep_folder(path: Path) -> None:
    """Refuse a path for a sweep that holds something else.

    Raises:
        StorageError: saying what is there.
    """
    if path.exists() and not path.is_dir():
        raise StorageError(f"cannot make the sweep {path}: it is a file. Choose another --output")
    left = [item for item in path.iterdir() if not item.name.endswith(".tmp")] if path.is_dir() else []
    if left and not (path / DOCUMENT).is_file():
        raise StorageError(
            f"the folder {path} holds something, and no sweep: there is no {DOCUMENT} in it. Choose another --output"
        )
    if not path.parent.is_dir():
        raise StorageError(f"cannot make the sweep {path}: the folder {path.parent} does not exist. Make it first")
