"""What runs are compared by: accuracy, perplexity or loss, each with its unit and the direction that is better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"


@dataclass(frozen=True)
class Measure:
    """One figure of a score.

    Attributes:
        name: What it is called, and its key in a score.
        unit: The label of an axis that shows it.
        scale: What a score's number is multiplied by to be shown.
        rising: Whether more is better.
    """

    name: str
    unit: str
    scale: float
    rising: bool

    def of(self, score: Mapping[str, Any] | None) -> float | None:
        """Return a score's number as it is shown, or None where it has none."""
        value = None if score is None else score.get(self.name)
        return None if value is None else self.scale * value

    def text(self, value: float | None) -> str:
        """Return a number with its unit, or a dash."""
        if value is None:
            return NOTHING
        if self.name == "accuracy":
            return f"{value:.1f}%"
        return signed(f"{value:.1f}" if self.name == "perplexity" and abs(value) >= 10 else f"{value:.3g}")

    def on(self, what: str, where: str) -> str:
        """Return the label of an axis."""
        name, _, unit = self.unit.partition(", ")
        return f"{what}: {name} on {where}" + (f", {unit}" if unit else "")

    def change(self, before: float | None, after: float | None) -> str:
        """Return how far `after` is from `before`, with its sign; empty where one is missing."""
        if before is None or after is None:
            return ""
        if self.name == "accuracy":
            return signed(f"{round(after - before, 1) + 0.0:+.1f}") + " points"
        return signed(f"{after - before + 0.0:+.3g}")

    def mean(self, values: Iterable[float | None]) -> float | None:
        """Return the mean of the numbers (of perplexities the geometric one), None where one is missing."""
        numbers = [value for value in values if value is not None]
        if not numbers or len(numbers) != len(list(values)):
            return None
        if self.name == "perplexity" and min(numbers) > 0:
            return math.exp(sum(map(math.log, numbers)) / len(numbers))
        return sum(numbers) / len(numbers)

    def good(self, value: float) -> float:
        """Return a number that is larger the better `value` is, to be added to others of this measure."""
        if self.name == "perplexity" and value > 0:
            return -math.log(value)
        return value if self.rising else -value


ACCURACY = Measure("accuracy", "accuracy, %", 100.0, True)
PERPLEXITY = Measure("perplexity", "perplexity", 1.0, False)
LOSS = Measure("loss", "loss, nats", 1.0, False)


def measure_of(scores: Sequence[Mapping[str, Any]]) -> Measure:
    """Return the first of perplexity, accuracy and loss that all these scores have; that is what people look at."""
    for measure in (PERPLEXITY, ACCURACY):
        if scores and all(measure.of(score) is not None for score in scores):
            return measure
    return LOSS


def signed(text: str) -> str:
    """Return a number's text with the sign that typography has for minus."""
    return text.replace("-", MINUS)


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""


def short(name: str, most: int = 36) -> str:
    """Return a name with its middle left out, where it is too long for a sentence."""
    half = most // 2
    return name if len(name) <= most else f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"
