"""`report`: what came of runs, on one page."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ewc_finetune.errors import StorageError, UsageError
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.reporting.comparison import grouped
from ewc_finetune.reporting.outcome import Outcome, outcome_of
from ewc_finetune.reporting.page import GENERATOR, Part, headline, part_of, render
from ewc_finetune.runs.record import Run, read_run, recover_run
from ewc_finetune.specs.options import settings
from ewc_finetune.storage.atomic import atomic_write, check_output

NAME = "report.html"


@dataclass(frozen=True)
class Report:
    """What `report` made.

    Attributes:
        path: The file.
        sentence: The outcome in one sentence; of runs that cannot be compared, how many there are of each kind.
        parts: The sections of the page, one for each kind of runs: what they learned, under which likelihood.
    """

    path: Path
    sentence: str
    parts: list[Part]

    def to_json(self) -> dict[str, Any]:
        """Return what a program wants of it, in values that JSON has."""
        return {
            "report": str(self.path),
            "sentence": self.sentence,
            "figures": _numbers(self.parts[0]) if len(self.parts) == 1 else [],
            "kinds": [
                {
                    "heading": part.heading,
                    "sentence": part.sentence,
                    "figures": _numbers(part),
                    "runs": [str(section.outcome.run.path) for section in part.sections],
                }
                for part in self.parts
            ],
            "runs": [
                {
                    "run": str(section.outcome.run.path),
                    "status": section.outcome.run.document["status"],
                    "sentence": section.sentence,
                    "data": section.outcome.target,
                    "lambda": [anchor.get("lambda") for anchor in section.outcome.anchors],
                    "new": section.outcome.new,
                    "old": list(section.outcome.old),
                    "before": list(section.outcome.before.values()),
                    "after": list(section.outcome.after.values()),
                    "probes": section.outcome.probes,
                }
                for part in self.parts
                for section in part.sections
            ],
        }


def _numbers(part: Part) -> list[dict[str, str]]:
    """Return the few large numbers of a part."""
    return [{key: value for key, value in asdict(one).items() if key != "style"} for one in part.main.key_figures]


def report(
    runs: str | Path | Sequence[str | Path],
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    title: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Say what came of runs on one page of HTML, which fetches and runs nothing.

    The same runs give the same bytes.

    Args:
        runs: Run folders, or folders that hold several.
        output: The file; by default `report.html` in the run's folder, in the folder that holds several, or beside
            them. There an earlier report is replaced.
        overwrite: Whether any other file may be replaced.
        title: The title of the page.
        progress: Told what happens.

    Returns:
        The report, with its file and the outcome in one sentence.

    Raises:
        EwcError: naming what is wrong with a run.
    """
    progress = progress or Silent()
    named = [Path(item) for item in ([runs] if isinstance(runs, (str, Path)) else runs)]
    for folder in named:
        recover_run(folder, progress.note)
    folders = _run_folders(named)
    path = Path(output) if output is not None else _place(named, folders)
    derived = output is None and _is_ours(path)
    inputs = [folder / name for folder in folders for name in ("run.json", "metrics.jsonl", "figure.png", "last.pt")]
    check_output(path, overwrite or derived, inputs, note=progress.note)
    read = [read_run(folder) for folder in folders]
    begun = [run for run in read if run.document.get("found") is not None]
    outcomes = [_in_its_sweep(outcome_of(run)) for run in begun or map(_begun, read)]
    parts = [part_of(group) for group in grouped(outcomes, settings(FinetuneOptions))]
    page = render(parts, title)
    with atomic_write(path, overwrite=overwrite or derived) as temporary:
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
    return Report(path, headline(parts), parts)


def _in_its_sweep(outcome: Outcome) -> Outcome:
    """Take from a sweep which domain is the new one, where that can't be told by data specs."""
    try:
        new = json.loads((outcome.run.path.parent / "sweep.json").read_text(encoding="utf-8"))["new"]
    except (OSError, ValueError, KeyError, TypeError):
        return outcome
    scored = [*outcome.before, *(name for name in outcome.after if name not in outcome.before)]
    if outcome.new is not None or new not in scored:
        return outcome
    return replace(outcome, new=new, old=tuple(name for name in scored if name != new))


def _begun(run: Run) -> Run:
    """Refuse a run of which nothing is known yet."""
    if run.document.get("found") is None:
        raise StorageError(
            f"the run {run.path} was stopped before it began to train, so there is nothing to report; go on with it: "
            f"ewc-ft finetune --resume {run.path}"
        )
    return run


def _run_folders(named: Sequence[Path]) -> list[Path]:
    """Return the run folders among these, and those directly in them, each once."""
    if not named:
        raise UsageError("no run to report; name run folders (NAME.run), or a folder of them")
    found: dict[Path, Path] = {}
    for path in named:
        if not path.exists():
            raise StorageError(f"{path} does not exist. Name a run folder that finetune wrote (NAME.run)")
        if not path.is_dir():
            raise StorageError(
                f"{path} is a file. Name the run folder beside a checkpoint (NAME.run), or one of several"
            )
        inside = [path] if (path / "run.json").exists() else _inside(path)
        if not inside:
            raise StorageError(
                f"{path} is no run folder and holds none: there is no run.json in it or in a folder in it. Name the "
                "folder that finetune wrote (NAME.run)"
            )
        for folder in inside:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _inside(path: Path) -> list[Path]:
    """Return the run folders in a folder, numbers in their names in order; hidden ones are half done or set aside."""
    runs = [child for child in path.iterdir() if not child.name.startswith(".") and (child / "run.json").exists()]
    return sorted(runs, key=lambda run: [p.zfill(20) if p.isdecimal() else p for p in re.split(r"(\d+)", run.name)])


def _place(named: Sequence[Path], folders: Sequence[Path]) -> Path:
    """Return where a report goes that nobody named a place for."""
    if len(named) == 1:
        return named[0] / NAME
    parents = {folder.resolve().parent for folder in folders}
    return folders[0].parent / NAME if len(parents) == 1 else Path(NAME)


def _is_ours(path: Path) -> bool:
    """Whether a file is an earlier report."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(1000)
