"""Several numbers in one word: lists (`1,10,100`) and ranges (`1..1000:4`, `0..4`)."""

from __future__ import annotations

import math

from ewc_finetune.errors import UsageError

# The significant digits to which the values inside a range are rounded.
_DIGITS = 4


def read_lambdas(text: str) -> list[float]:
    """Read `10`, `1,10,100`, or `LOW..HIGH:N`: N values from LOW to HIGH, evenly spaced in logarithms.

    Raises:
        UsageError: saying what is wrong with it.
    """
    return [value for part in text.split(",") for value in _lambdas(part.strip())]


def _lambdas(text: str) -> list[float]:
    ends, dots, tail = text.partition("..")
    if not dots:
        return [_strength(text, text)]
    high, _, count = tail.partition(":")
    low, top = _strength(ends, text), _strength(high, text)
    if not count.isdecimal() or int(count) < 2:
        raise UsageError(f"the range {text!r} should say how many values it has, at least 2: 1..1000:4")
    if not 0 < low < top:
        raise UsageError(f"the range {text!r} should go from a number above 0 to a larger one: 1..1000:4")
    steps = int(count) - 1
    ratio = math.log(top) - math.log(low)
    between = [float(f"{low * math.exp(ratio * n / steps):.{_DIGITS}g}") for n in range(1, steps)]
    return [low, *between, top]


def _strength(text: str, where: str) -> float:
    if text.strip() == "auto":
        raise UsageError(
            "lambda is auto; a sweep tries the values that it is told (--lambda 1..1000:4). ewc-ft finetune --lambda "
            "auto looks for one"
        )
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"{where!r} is no lambda; expected a number, several (1,10,100) or a range (1..1000:4)"
        ) from None


def read_seeds(text: str) -> list[int]:
    """Read `0`, `0,1,2`, or `0..4`: all whole numbers from 0 to 4.

    Raises:
        UsageError: saying what is wrong with it.
    """
    return [value for part in text.split(",") for value in _seeds(part.strip())]


def _seeds(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise UsageError(f"{text!r} is no seed; expected a whole number, several (0,1,2) or a range (0..4)")
    if dots and int(last) < int(first):
        raise UsageError(f"the range {text!r} is empty; expected the smaller seed first")
    return list(range(int(first), int(last) + 1)) if dots else [int(first)]
