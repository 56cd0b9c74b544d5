"""What is named as `package.module:name`, and the values behind its question mark.

Whoever gives a command may name anything. A checkpoint may only name a class that is defined in a module of the user's
own: one that lies in the working directory, in PYTHONPATH, or in another folder that the program was given, and not
among Python's own modules or installed ones.
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

from ewc_finetune.errors import ArchitectureError, EwcError


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


def find_own(head: str, option: str, note: Callable[[str], None] | None) -> object:
    """Import the class `package.module:name` that a file names as an architecture, if it is the user's own.

    Nothing is imported before that is known, and what is imported is said first.

    Args:
        head: The name.
        option: What names it on the command line.
        note: Told what is imported.

    Raises:
        ArchitectureError: if it is not the user's own, or see `find`.
    """
    module, _, name = head.partition(":")
    named, file = f"a file names {head} as the architecture", own_source(module)
    remedy = (
        "Run ewc-ft in the folder that holds it, put that folder into PYTHONPATH, or, if you trust it, name it "
        f"yourself with {option}"
    )
    if file is None:
        raise ArchitectureError(
            f"{named}, and there is no such module of your own: a file may name none of Python's or of installed "
            f"packages, so it was not imported. {remedy}"
        )
    if not _has_class(file, name.partition(".")[0]):
        raise ArchitectureError(f"{named}, and no such class is seen in {file}, so it was not imported. {remedy}")
    if module in sys.modules and _file_of(module) != file:
        raise ArchitectureError(f"{named}, and another module is called {module} already")
    if note is not None:
        note(f"{named}: importing {file}")
    value = find(head, "architecture", ArchitectureError)
    if not _is_own(value):
        home = getattr(value, "__module__", None)
        raise ArchitectureError(
            f"{named}, which {file} has from {home or 'elsewhere'}; a file may only name what is defined in a module "
            f"of your own. {remedy}"
        )
    return value


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


def _has_class(file: Path, name: str) -> bool:
    """Whether a module's source defines a class or imports a name, seen without importing it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return any(
        (isinstance(node, ast.ClassDef) and node.name == name)
        or (isinstance(node, ast.ImportFrom) and {name, "*"} & {other.asname or other.name for other in node.names})
        for node in ast.walk(tree)
    )


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
