"""What the values of a JSON document may be, where somebody else may have written it: predicates, and how they combine.

>>> is_layer = has(name=is_text, share=is_number, bias=optional(is_text))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]
# What `has` looks at where there is no such key: it is nothing that JSON has, so that only `optional` takes it.
_ABSENT = object()


def is_text(value: Any) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    """Whether it is an object, whatever is in it."""
    return isinstance(value, dict)


def is_list(value: Any) -> bool:
    """Whether it is a list, whatever is in it."""
    return isinstance(value, list)


def is_flag(value: Any) -> bool:
    """Whether it is true or false."""
    return isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is a finite number; a whole one of 64 bits."""
    return math.isfinite(value) if isinstance(value, float) else type(value) is int and abs(value) < 2**63


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 0 on, of 64 bits."""
    return type(value) is int and 0 <= value < 2**63


def nullable(check: Check) -> Check:
    """Null, or what the check takes."""
    return lambda value: value is None or check(value)


def optional(check: Check) -> Check:
    """Where `has` finds no such key, or what the check takes."""
    return lambda value: value is _ABSENT or check(value)


def list_of(check: Check) -> Check:
    """A list of what the check takes."""
    return lambda value: is_list(value) and all(map(check, value))


def object_of(check: Check) -> Check:
    """An object of which the check takes all values."""
    return lambda value: is_object(value) and all(map(check, value.values()))


def has(**checks: Check) -> Check:
    """An object with these keys, of which each value is one that its check takes; other keys may be there too."""
    return lambda value: is_object(value) and all(check(value.get(key, _ABSENT)) for key, check in checks.items())
