"""The `head?key=value&key=value` notation that data and architectures are written in."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
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


# Options that say which part of data is taken, and how it is trained on: with any of them it is the same data still.
PARTS = ("split", "augment", "weight", "limit", "first")


def data_key(spec: str, loose: Collection[str] = ("split",)) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return what two specs of the same data have in common.

    Args:
        spec: The data; what is no address stands for itself.
        loose: Options that may be others.
    """
    try:
        address = parse(spec)
    except UsageError:
        return spec, frozenset()  # what a Python caller calls it
    return address.head, frozenset(item for item in address.options.items() if item[0] not in loose)


def without(text: str, *keys: str) -> str:
    """Return an address without these options; what is no address as it is."""
    try:
        address = parse(text)
    except UsageError:
        return text
    kept = {key: value for key, value in address.options.items() if key not in keys}
    return text if kept == address.options else str(Address(address.head, kept))


def in_file_name(addresses: str | Iterable[str]) -> str:
    """Return an address, or several, as a part of a file's name: `digits?rotate=90` as `digits-rotate-90`."""
    each = [addresses] if isinstance(addresses, str) else addresses
    return "+".join(re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") for text in each)
