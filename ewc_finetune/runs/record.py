"""What a run folder says, read back: `run.json` checked, `metrics.jsonl` as far as it is whole.

`folder` writes it; this needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ewc_finetune.choices import OLD_WORDS
from ewc_finetune.errors import StorageError
from ewc_finetune.storage.json_fields import (
    Check,
    has,
    is_number,
    is_object,
    is_text,
    list_of,
    nullable,
    object_of,
    optional,
)
from ewc_finetune.storage.workspace import recover

FORMAT = "ewc-run"
FORMAT_VERSION = 1
# Sums and products of such numbers stay finite.
_LARGEST = 3.5e38


@dataclass(frozen=True)
class Run:
    """One run's record. Numbers that were NaN, infinite or beyond those of float32 are None.

    Attributes:
        path: The run folder.
        document: What `run.json` holds.
        lines: Those of `metrics.jsonl`, in their order.
    """

    path: Path
    document: dict[str, Any]
    lines: list[dict[str, Any]]


def recover_run(path: Path, note: Callable[[str], None]) -> None:
    """Put in order what runs that were killed have left of a run folder and in it.

    Args:
        path: The run folder, which need not exist.
        note: Is told of what was found, if there was anything.
    """
    real = Path(os.path.realpath(path))
    recover(real.parent, note)
    recover(real, note)


def read_run(folder: str | Path) -> Run:
    """Read a run folder; the last line of `metrics.jsonl` may be cut off, for a run may have been killed.

    Raises:
        StorageError: saying what is wrong with it.
    """
    path = Path(folder)
    return Run(path, read_document(path), read_lines(path / "metrics.jsonl"))


def read_document(path: Path) -> dict[str, Any]:
    """Read the `run.json` of a run folder alone.

    Raises:
        StorageError: saying what is wrong with it.
    """
    document = _parsed(_text(path / "run.json"), path / "run.json")
    _check_document(document, path / "run.json")
    document["options"] = {OLD_WORDS.get(name, name): value for name, value in document["options"].items()}
    return document


def read_lines(metrics: Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`, without a last line that was cut off; nothing where there is no such file.

    Raises:
        StorageError: naming a line that is damaged.
    """
    lines: list[dict[str, Any]] = []
    texts = [text for text in (_text(metrics).split("\n") if metrics.exists() else []) if text.strip()]
    for number, text in enumerate(texts, start=1):
        try:
            line = _parsed(text, metrics)
            _check(line, _LINE, f"{metrics}, line {number}")
        except StorageError:
            if number == len(texts):
                break
            raise
        lines.append(line)
    return lines


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        folder = path.parent
        found = f"is no run folder: there is no {path.name} in it" if folder.is_dir() else "is not there"
        raise StorageError(f"{folder} {found}. Name the folder that finetune wrote, NAME.run") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise StorageError(f"cannot read {path}: {reason}") from error


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(text, parse_constant=lambda _: None, parse_float=_finite, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is damaged: it is not a JSON document ({error}). Make the run again") from error
    if not isinstance(document, dict):
        raise StorageError(f"{path} is damaged: it should be a JSON object. Make the run again")
    return document


def _finite(text: str) -> float | None:
    return value if abs(value := float(text)) < _LARGEST else None


def _integer(text: str) -> int | float | None:
    return int(text) if len(text) < 16 else _finite(text)


def _check_document(document: dict[str, Any], path: Path) -> None:
    if document.get("format") != FORMAT:
        raise StorageError(
            f"{path} is not the record of a run, or of one by an ewc-ft before runs had a format; make the run again "
            "with this version"
        )
    version = document.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise StorageError(
            f"{path} is of format version {version}; this ewc-ft reads up to {FORMAT_VERSION}. Upgrade with: pip "
            "install -U ewc-finetune"
        )
    if document.get("status") is None or document.get("options") is None:
        raise StorageError(f"{path} is not the record of a run: it has no status or no options")
    _check(document, _DOCUMENT, str(path))
    _check(document.get("found") or {}, _FOUND, f"{path}, in found")


def _check(document: dict[str, Any], expected: dict[str, tuple[Check, str]], where: str) -> None:
    for key, (is_right, words) in expected.items():
        value = document.get(key)
        if value is not None and not is_right(value):
            raise StorageError(f"{where} is damaged: {key} is {value!r:.80}; expected {words}")


def _perhaps(check: Check) -> Check:
    return optional(nullable(check))


_is_number = _perhaps(is_number)
_is_objects = list_of(is_object)
_objects = ("versions", "checkpoint", "data", "normalisation", "scores", "excluded", "standard_error")
_is_provenance = has(
    importance=_perhaps(list_of(has(layer=is_text, mean=_is_number, parameters=_is_number))),
    curvature=_perhaps(is_text),
    merged=_perhaps(has(parents=list_of(has(provenance=is_object)))),
    lineage=_perhaps(_is_objects),
    probes=_perhaps(_is_objects),
    **dict.fromkeys(_objects, _perhaps(is_object)),
)
_is_score = has(
    domain=is_text,
    metrics=_perhaps(object_of(nullable(is_number))),
    **dict.fromkeys(("samples", "loss", "accuracy", "perplexity"), _is_number),
)
_is_part = has(spec=is_text, size=is_number, drawn=is_number)
_is_kept = has(data=_perhaps(is_text), unchanged=_is_number, divergence=_is_number)
_is_trial = has(score=_is_score, watched=_perhaps(list_of(_is_score)), **{"lambda": _is_number})
_is_layer = has(layer=is_text, parameters=_is_number, share=_is_number, moved=_is_number, penalty=_is_number)

# What the value of each key must be, if there is one: as a predicate, and in words for the message.
_DOCUMENT: dict[str, tuple[Check, str]] = {
    "status": (is_text, "a text"),
    "started": (is_text, "a time"),
    "ended": (is_text, "a time"),
    "options": (is_object, "an object"),
    "command": (is_text, "a text"),
    "folder": (is_text, "a path"),
    "found": (is_object, "an object"),
    "versions": (is_object, "an object"),
    "identities": (is_object, "an object"),
    "trials": (_is_objects, "a list of trials"),
    "platform": (is_text, "a text"),
    "written": (has(file=is_text, sha256=_perhaps(is_text)), "a file and its digest"),
    "steps": (_is_number, "a number"),
    "seconds": (_is_number, "a number"),
    "before": (list_of(_is_score), "a list of scores"),
    "after": (list_of(_is_score), "a list of scores"),
    "retention": (list_of(_is_kept), "a list of what probes found"),
    "layers": (list_of(_is_layer), "a list of layers"),
}
_FOUND: dict[str, tuple[Check, str]] = {
    "checkpoint": (is_object, "an object"),
    "anchors": (
        list_of(has(provenance=_is_provenance, **{"lambda": _is_number})),
        "a list of anchors, each with its lambda and provenance",
    ),
    "data": (has(spec=is_text, size=_is_number, parts=_perhaps(list_of(_is_part))), "an object with a spec"),
    "new": (is_text, "the name of a domain"),
    "likelihood": (is_text, "a text"),
    "eval": (_is_objects, "a list of objects"),
    "rehearsed": (_is_objects, "a list of objects"),
    "parameters": (_is_number, "a number"),
    "lambda_search": (has(trials=list_of(_is_trial)), "a search with its trials"),
}
_LINE: dict[str, tuple[Check, str]] = {
    "step": (_is_number, "a number"),
    "epoch": (_is_number, "a number"),
    "loss": (_is_number, "a number"),
    "penalty": (_is_number, "a number"),
    "scores": (object_of(_is_score), "an object of scores"),
    "retention": (list_of(_is_kept), "a list of what probes found"),
}
