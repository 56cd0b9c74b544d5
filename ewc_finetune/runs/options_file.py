"""The options of a run by the names of the command line: as a command, as TOML, and read from a file."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from ewc_finetune.errors import StorageError, UsageError, suggest
from ewc_finetune.runs.record import read_document

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def to_command(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return the command line with these options, those left out that are what they are by default."""
    words = ["ewc-ft", "finetune"]
    for name, value in options.items():
        if name in defaults and value == defaults[name]:
            continue
        for item in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if item is True else [f"--{name}", to_text(item)]
    return shlex.join(words)


def to_text(value: Any) -> str:
    """Return a value as a command line has it."""
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def to_toml(options: Mapping[str, Any], unsaid: Collection[str]) -> str:
    """Return these options as `--config` reads them; None has no place in TOML, and is left out.

    Args:
        options: The options, by their names on the command line.
        unsaid: The names of the options that no file may say.
    """
    kept = {name: value for name, value in options.items() if value is not None and name not in unsaid}
    return tomli_w.dumps(kept)


def read_config(path: Path, known: Collection[str], also: Collection[str] = ()) -> dict[str, Any]:
    """Read options from a TOML file, a run folder, or its `run.json`.

    Args:
        path: The file to read.
        known: The options that it may say, by their names on the command line.
        also: The names of options that there are, and that it may not say.

    Raises:
        UsageError: for an option that there isn't, naming the nearest, or a value that none can have.
        StorageError: if the file cannot be read.
    """
    if path.is_dir() or path.suffix == ".run" or path.name == "run.json":
        said = read_document(path.parent if path.name == "run.json" else path)["options"]
        return {name: value for name, value in said.items() if value is not None and name in known}
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(f"there is no config at {path}") from None
    except (OSError, ValueError) as error:  # TOML's own error is a ValueError
        raise StorageError(f"{path} is no TOML file: {error}") from error
    for name, value in said.items():
        if name.replace("_", "-") in also:
            raise UsageError(f"{path}: {name} cannot stand in a file; give it on the command line")
        if name.replace("_", "-") not in known:
            raise UsageError(f"{path}: there is no option {name!r}. {suggest(name, known)}")
        if isinstance(value, dict):
            raise UsageError(f"{path}: {name} is a table; options stand at the top, one to a line: {name} = ...")
    return {name.replace("_", "-"): value for name, value in said.items()}


def differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, str]:
    """Return what differs between two sets of options, each said in words."""
    return {
        name: f"{name} was {_shown(then.get(name))}, is {_shown(now.get(name))}"
        for name in {**then, **now}
        if now.get(name) != then.get(name)
    }


def _shown(value: Any) -> str:
    return "not given" if value is None or value == [] else json.dumps(value)
