"""Addresses on the Hub: `hf://ORG/NAME[@REVISION][/FILE]`, as huggingface_hub itself writes them.

A model folder of transformers has a name too, `hf:ORG/NAME[@REVISION]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TypeGuard
from urllib.parse import unquote

from ewc_finetune.errors import UsageError, redacted

SCHEME = "hf://"
# What the name of a model folder of transformers begins with.
MODEL = "hf:"
_FORM = "hf://ORG/NAME, with @REVISION and /FILE behind it where they matter"
_PART = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Revisions that have slashes in them.
_REFS = re.compile(r"refs/(?:pr/\d+|convert/[\w.-]+)(?=/|$)")
_OTHER_KINDS = ("datasets", "spaces", "buckets", "kernels")
# What no part of a path may be.
_NO_PARTS = ("", ".", "..")


@dataclass(frozen=True)
class HubAddress:
    """A place on the Hub.

    Attributes:
        repository: `ORG/NAME`, of a model.
        revision: Branch, tag or commit; the default branch if None.
        file: Path of a file in it; None where that is to be found out.
        is_model: Whether it was written `hf:ORG/NAME`, which means the model folder there, not an anchor.
    """

    repository: str
    revision: str | None = None
    file: str | None = None
    is_model: bool = False

    def __str__(self) -> str:
        if self.is_model and self.file is None:
            return f"{MODEL}{self.repository}" + ("" if self.revision is None else f"@{self.revision}")
        revision = "" if self.revision is None else f"@{_quoted(self.revision)}"
        return f"{SCHEME}{self.repository}{revision}" + ("" if self.file is None else f"/{self.file}")

    @property
    def is_pinned(self) -> bool:
        """Whether it names one file for good: a commit and a path."""
        return self.file is not None and self.revision is not None and is_commit(self.revision)

    def at(self, commit: str, file: str | None = None) -> HubAddress:
        """Return the same place at a commit, or another file there."""
        return replace(self, revision=commit, file=self.file if file is None else file)


def is_address(place: object) -> TypeGuard[str]:
    """Whether it is an address on the Hub."""
    return isinstance(place, str) and place.startswith(SCHEME)


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit's whole hash."""
    return _COMMIT.fullmatch(revision) is not None


def parse_address(text: str) -> HubAddress:
    """Read an address, with or without `hf://` in front.

    Raises:
        UsageError: if it is none, saying what is wrong with it.
    """
    parts = text.removeprefix(SCHEME).removeprefix("models/").split("/", 1)
    if parts[0] in _OTHER_KINDS:
        raise UsageError(
            f"{redacted(text)} is in one of the Hub's {parts[0]}; anchors and models are in model repositories"
        )
    if len(parts) < 2:
        raise UsageError(f"{redacted(text)!r} names no repository on the Hub; expected {_FORM}")
    name, separator, behind = _name_and_rest(parts[1])
    revision, file = None, behind
    if separator == "@":
        special = _REFS.match(behind)
        revision = special[0] if special else behind.partition("/")[0]
        file = behind[len(revision) :].removeprefix("/")
    return checked(
        HubAddress(f"{parts[0]}/{name}", None if revision is None else unquote(revision), file or None), text
    )


def parse_model_name(text: str) -> HubAddress:
    """Read the name of a model, `hf:ORG/NAME[@REVISION]`.

    Raises:
        UsageError: if it names none.
    """
    repository, _, revision = text.removeprefix(MODEL).partition("@")
    try:
        return checked(HubAddress(repository, revision or None, is_model=True), text)
    except UsageError:
        form = "expected hf:ORG/NAME, with @REVISION behind it where that matters"
        raise UsageError(f"{redacted(text)!r} names no model on the Hub; {form}") from None


def checked(address: HubAddress, text: str) -> HubAddress:
    """Return an address whose parts the Hub, git and a file system may well have.

    Args:
        address: Its repository may be without an organisation.
        text: What it was read from, for messages.

    Raises:
        UsageError: naming what cannot be.
    """
    shown = redacted(text)
    names = address.repository.split("/")
    if len(names) > 2 or not all(_PART.fullmatch(n) and "--" not in n and ".." not in n for n in names):
        raise UsageError(f"{shown!r} names no repository on the Hub; expected {_FORM}")
    if address.revision is not None and not _is_revision(address.revision):
        raise UsageError(f"{shown!r} has no revision behind the @ that git could have; expected {_FORM}")
    parts = [] if address.file is None else address.file.split("/")
    if any(part in _NO_PARTS or "\\" in part or not part.isprintable() for part in parts):
        raise UsageError(f"{shown!r} names no file in a repository; expected {_FORM}")
    return address


def _is_revision(text: str) -> bool:
    parts = text.split("/")
    return (
        re.fullmatch(r"[^\s\\:?*\[~^\x00-\x1f\x7f]+", text) is not None
        and set(parts).isdisjoint(_NO_PARTS)
        and not any(part.startswith(("-", ".")) or part.endswith((".lock", ".")) or ".." in part for part in parts)
    )


def _name_and_rest(text: str) -> tuple[str, str, str]:
    """Split `NAME[@REVISION][/FILE]` at whichever comes first."""
    match = re.match(r"([^@/]*)([@/]?)(.*)", text, re.DOTALL)
    return (text, "", "") if match is None else (match[1], match[2], match[3])


def _quoted(revision: str) -> str:
    return revision if _REFS.fullmatch(revision) else revision.replace("/", "%2F")
