"""Reading what a run left in its folder; `run_folder` writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ewc_finetune.errors import StorageError

FORMAT = "ewc-run"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Run:
    """A run, as its folder tells of it.

    Attributes:
        path: The folder.
        document: What `run.json` says.
        lines: Those of `metrics.jsonl`.
    """

    path: Path
    document: dict[str, Any]
    lines: list[dict[str, Any]]


def read_run(path: Path) -> Run:
    """Read a run folder; a line of the log that was cut off is left out.

    Raises:
        StorageError: if it is none, damaged, or of another version's format.
    """
    file = path / "run.json"
    if not file.is_file():
        raise StorageError(f"{path} is no run folder: there is no run.json in it. `ewc-ft finetune` writes them")
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{file} is damaged: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StorageError(f"{file} is of no run, or of one before runs had a format; make the run again")
    version = document.get("format_version")
    if version != FORMAT_VERSION:
        raise StorageError(
            f"{file} is of format version {version}; this ewc-finetune reads {FORMAT_VERSION}. Upgrade with: "
            "pip install -U ewc-finetune"
        )
    if not isinstance(document.get("status"), str) or not isinstance(document.get("options"), dict):
        raise StorageError(f"{file} is damaged: it has no status or options")
    return Run(path, document, read_lines(path / "metrics.jsonl"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`, without a last line that was cut off; nothing where there is no such file.

    Raises:
        StorageError: if it is damaged.
    """
    try:
        whole = path.read_bytes().split(b"\n")[:-1]  # what stands behind the last end of a line was cut off
        return [json.loads(line) for line in whole]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} is damaged: {error}") from error
