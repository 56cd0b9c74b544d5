"""What is named as `package.module:name`, and the values behind its question mark.

Whoever gives a command may name anything. A file may only name what is defined in a module of the user's own: one that
lies in the working directory, in PYTHONPATH, or in another folder that the program was given, and not among Python's
own modules or installed ones.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
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
        value: object = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except AttributeError:
        raise error(f"the module {module} has no {name}. Check the name in {head}") from None
    except Exception as reason:
        raise error(
            f"cannot import {module} for the {what} {head}: {type(reason).__name__}: {reason}. "
            "Run ewc-ft in the folder that holds it, or put that folder into PYTHONPATH"
        ) from reason
    return value


def find_own(
    head: str,
    what: str,
    option: str,
    error: type[EwcError],
    note: Callable[[str], None] | None,
    *,
    only_classes: bool = False,
) -> object:
    """Import `package.module:name` that a file names, if it is the user's own, and return what has that name.

    Nothing is imported before that is known, and what is imported is said first.

    Args:
        head: The name.
        what: What it is for, for messages.
        option: Which option of the command line names it again.
        error: What is raised.
        note: Told what is imported.
        only_classes: Whether the module's source must show a class of that name.

    Raises:
        EwcError: of that kind, if it is not the user's own, or see `find`.
    """
    module, _, name = head.partition(":")
    file = own_source(module)
    if file is None:
        raise error(
            f"a file names {head} as the {what}, and there is no such module of your own: a file may name none of "
            f"Python's or of installed packages, so it was not imported. {_remedy(option)}"
        )
    if not _is_in_source(file, name.partition(".")[0], only_classes):
        raise error(
            f"a file names {head} as the {what}, and no such {'class' if only_classes else 'name'} is seen in {file}, "
            f"so it was not imported. {_remedy(option)}"
        )
    if module in sys.modules and _file_of(module) != file:
        raise error(f"a file names {head} as the {what}, and another module is called {module} already")
    if note is not None:
        note(f"a file names {head} as the {what}: importing {file}")
    value = find(head, what, error)
    if not _is_own(value):
        home = getattr(value, "__module__", None)
        raise error(
            f"a file names {head} as the {what}, which {file} has from {home or 'elsewhere'}; a file may only name "
            f"what is defined in a module of your own. {_remedy(option)}"
        )
    return value


def _remedy(option: str) -> str:
    return (
        "Run ewc-ft in the folder that holds it, put that folder into PYTHONPATH, or, if you trust it, name it "
        f"yourself with {option}"
    )


def own_source(module: str) -> Path | None:
    """Return the file that importing a module runs, if it is one of the user's own; nothing is imported to know it."""
    top, *rest = module.split(".")
    own_package = __name__.partition(".")[0]
    if not all(part.isidentifier() for part in (top, *rest)) or top in (*sys.stdlib_module_names, own_package):
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    packages = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    places = packages or [Path((spec and spec.origin) or "")]
    folders = _own_folders()
    if not all(place.parent.resolve() in folders for place in places):
        return None
    bases = [place.joinpath(*rest) for place in places]
    files = (base / "__init__.py" if base.is_dir() else base.with_suffix(".py") for base in bases if base.name)
    return next((file for file in files if file.is_file()), None)


def _own_folders() -> set[Path]:
    """Return the folders of the import path that neither Python nor what is installed is in."""
    folders = {Path(entry).resolve() for entry in sys.path}
    python = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "scripts")]
    packages = {folder for folder in folders if {"site-packages", "dist-packages"} & set(folder.parts)}
    # A package in editable mode counts as installed, but for who works in its folder or names it in PYTHONPATH.
    linked = {
        (pth.parent / line.strip()).resolve()
        for folder in packages
        for pth in folder.glob("*.pth")
        for line in pth.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip() and not line.startswith(("#", "import ", "import\t"))
    } - {Path(entry).resolve() for entry in (".", *os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    return {folder for folder in folders - packages - linked if not any(map(folder.is_relative_to, python))}


def _is_own(found: object) -> bool:
    """Whether something is defined in a module of the user's own, wherever it was found."""
    home = getattr(found, "__module__", None)
    file = own_source(home) if isinstance(home, str) else None
    return file is not None and _file_of(str(home)) == file


def _file_of(module: str) -> Path | None:
    """Return the file that a module was imported from."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else Path(file)


def _is_in_source(file: Path, name: str, only_classes: bool) -> bool:
    """Whether a module's source defines or imports a name, seen without importing it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.ImportFrom) and {name, "*"} & {other.asname or other.name for other in node.names}:
            return True
        if only_classes:
            continue
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
    return False


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
