"""What a user names as `package.module:name`, and the values behind its question mark."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from ewc_finetune.errors import EwcError


def find(head: str, what: str, error: type[EwcError]) -> object:
    """Import `package.module:name` and return what has that name.

    Args:
        head: The name.
        what: What it is for, for messages.
        error: What is raised.

    Raises:
        EwcError: of that kind, if there is no such module or name, or the module fails.
    """
    module, _, name = head.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise error(f"the module {module} has no {name}. Check the name in {head}") from None
    except Exception as reason:
        raise error(
            f"cannot import {module} for the {what} {head}: {type(reason).__name__}: {reason}. "
            "Run ewc-ft in the folder that holds it, or put that folder into PYTHONPATH"
        ) from reason
    return found


@contextlib.contextmanager
def working_directory_on_path(*, first: bool) -> Iterator[None]:
    """Have the working directory on the import path, before everything else or after it."""
    folder = str(Path.cwd())
    sys.path.insert(0 if first else len(sys.path), folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def value_of(text: str) -> object:
    """Read `128`, `0.5`, `256,128`, `true`, `None` as what they look like, anything else as text."""
    if text.lower() in ("true", "yes", "on", "false", "no", "off"):
        return text.lower() in ("true", "yes", "on")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
