"""The `head?key=value&key=value` notation that data and architectures are written in."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ewc_finetune.errors import UsageError


@dataclass(frozen=True)
class Address:
    """A parsed address: what stands before the question mark, and the options behind it, in order."""

    head: str
    options: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.options:
            return self.head
        return self.head + "?" + "&".join(f"{key}={value}" for key, value in self.options.items())


def parse(text: str) -> Address:
    """Split an address into its head and its options.

    Raises:
        UsageError: if the head is empty, or an option has no value or comes twice.
    """
    head, _, tail = text.strip().partition("?")
    head = head.rstrip()
    if not head:
        raise UsageError(f"{text!r} names nothing before its options; expected something like mnist?limit=100")
    options: dict[str, str] = {}
    for part in tail.split("&") if tail else []:
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise UsageError(f"in {text!r}, {part!r} is not an option; expected key=value, joined by &")
        if key in options:
            raise UsageError(f"in {text!r}, the option {key!r} comes twice")
        options[key] = value
    return Address(head, options)


def in_file_name(text: str) -> str:
    """Return an address as a part of a file's name: `digits?rotate=90` as `digits-rotate-90`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")
