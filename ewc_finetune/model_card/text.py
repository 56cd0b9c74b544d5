"""Somebody's text made safe for a card.

All that an anchor file says of itself is text by somebody unknown, so it stands in code spans (`code`), where it can be
neither HTML nor Markdown; what stands outside of them is written here, is a number, or is checked to be a Hub name.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import TypeVar

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
REVISION = re.compile(r"\w[\w./-]*", re.ASCII)
FILE_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
# Texts with more characters are cut.
_LONGEST = 200
# So many of a longer list are named, the first ones.
_NAMED = 8
# What would end a code span or a table's cell, or could be taken for HTML once somebody copies it.
_LOOKALIKES = str.maketrans(
    {
        "`": "'",
        "|": "\N{BROKEN BAR}",
        "<": "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
        ">": "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
    }
)
_DATA_FILE = re.compile(r"\.(parquet|jsonl?|csv|txt)$", re.IGNORECASE)
_ABSOLUTE = re.compile(r"[/~\\]|[A-Za-z]:[/\\]")
_T = TypeVar("_T")


def code(text: object) -> str:
    """Return text as a code span that is safe wherever it stands, in a table too.

    Backticks, bars and angle brackets become characters that look like them, and whatever cannot be seen a space.
    """
    seen = "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in str(text))
    seen = " ".join(seen.split()).translate(_LOOKALIKES)
    if len(seen) > _LONGEST:
        seen = seen[: _LONGEST - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"
    return f"`{seen or '(no name)'}`"


def code_of(value: object) -> str:
    """Return what a file says as a code span, or nothing where it says nothing."""
    return code(value) if value else ""


def name_of(value: object) -> str:
    """Return the name of an anchor, which may be anything, but no path."""
    return code(last_part(value) if isinstance(value, str) and _ABSOLUTE.match(value) else value)


def place_of(value: object) -> str:
    """Return a data spec, architecture or file name of the file without folders, or nothing if it is none."""
    return code(without_folders(value)) if isinstance(value, str) and value else ""


def without_folders(text: str) -> str:
    """Return a data spec, architecture or file name without the folders that files in it lie in; Hub names stay."""
    head, question, tail = text.partition("?")
    kind, colon, place = head.partition(":") if ":" in head else ("", "", head)
    name, at, revision = place.partition("@")
    on_hub = kind == "hf" and HUB_NAME.fullmatch(name) and not _DATA_FILE.search(name)
    if not on_hub or (at and not REVISION.fullmatch(revision)):
        place = last_part(place)
    options = []
    for option in tail.split("&"):
        key, equals, value = option.partition("=")
        options.append(f"{last_part(key)}{equals}{last_part(value)}")
    return f"{last_part(kind)}{colon}{place}{question}{'&'.join(options)}"


def last_part(path: str) -> str:
    """Return the last part of a path of any system."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def some(
    things: Iterable[_T],
    show: Callable[[_T], str] = code,
    *,
    most: int = _NAMED,
    left: str = "and {:,} more",
    between: str = ", ",
) -> str:
    """Name the first few of many things, and say how many are left."""
    every = list(things)
    more = [left.format(len(every) - most)] if len(every) > most else []
    return between.join([*map(show, every[:most]), *more])
