"""The one JSON document that a command with --json prints on stdout: its result, or what went wrong."""

from __future__ import annotations

import json
import math
from typing import Any

import click

from ewc_finetune.errors import EwcError, SeveralError
from ewc_finetune.storage import signals

# The kinds of documents with the versions of their schemas, which are in documents.schema.json. A version grows when a
# key goes or means something else, not when one is added.
VERSIONS = {
    "consolidate": 1,
    "dry-run": 1,
    "error": 1,
    "evaluate": 1,
    "finetune": 1,
    "inspect-anchor": 1,
    "inspect-checkpoint": 1,
    "mend": 1,
    "merge": 1,
    "pull": 1,
    "push": 1,
    "report": 1,
    "sweep": 1,
}


def print_result(kind: str, command: str | None, content: dict[str, Any]) -> None:
    """Print the document, once for each command: what comes after it, a signal say, prints none."""
    with signals.deferred():
        signals.end_with(None)
        click.echo(as_text(kind, command, content))


def print_error(command: str | None, error: BaseException, sentence: str, exit_code: int) -> None:
    """Print what went wrong; several things at once one by one too."""
    content = {"type": type(error).__name__, "message": sentence, "exit_code": exit_code}
    if isinstance(error, SeveralError):
        content["errors"] = [_of_part(part) for part in error.errors]
    print_result("error", command, {"error": content})


def interrupted(command: str | None, sentence: str, exit_code: int) -> str:
    """Return what went wrong where a signal ended the command."""
    content = {"type": signals.Interrupted.__name__, "message": sentence, "exit_code": exit_code}
    return as_text("error", command, {"error": content})


def as_text(kind: str, command: str | None, content: dict[str, Any]) -> str:
    """Return a document as JSON, with null for what is no finite number."""
    document = {"schema": f"ewc-ft/{kind}/{VERSIONS[kind]}", "command": command, **_finite(content)}
    return json.dumps(document, indent=2, default=str, allow_nan=False)


def _of_part(error: EwcError) -> dict[str, Any]:
    return {"type": type(error).__name__, "message": str(error), "exit_code": error.exit_code}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
