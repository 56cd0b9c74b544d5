"""How long work tells of itself: remarks, and bars with figures beside them.

The commands take a `Progress` and never print; the command line passes one that draws, everybody else gets silence.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Bar(Protocol):
    """One piece of work, under way."""

    def advance(self, count: int, **figures: float | str) -> None:
        """Say that `count` more units are done, and what the figures beside the bar are now."""


class Progress(Protocol):
    """Where a verb says what it does."""

    def note(self, message: str) -> None:
        """Say one thing that the user should know: an assumption, a choice, a warning."""

    def detail(self, message: str) -> None:
        """Say a thing that only those want to know who ask for everything."""

    def bar(self, title: str, total: int | None, unit: str) -> AbstractContextManager[Bar]:
        """Open a bar for `total` units of work; None where the length is not known."""


class Silent:
    """Says nothing."""

    def __repr__(self) -> str:
        return "Silent()"

    def note(self, message: str) -> None:
        """Drop the message."""

    def detail(self, message: str) -> None:
        """Drop the message."""

    def bar(self, title: str, total: int | None, unit: str) -> AbstractContextManager[Bar]:
        """Give a bar that nobody sees."""
        return nullcontext(_SilentBar())


class OnlyBars:
    """Shows the bars of work within other work, and drops its remarks.

    Args:
        progress: Where they are shown.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def note(self, message: str) -> None:
        """Drop the message."""

    def detail(self, message: str) -> None:
        """Drop the message."""

    def bar(self, title: str, total: int | None, unit: str) -> AbstractContextManager[Bar]:
        """See `Progress`."""
        return self._progress.bar(title, total, unit)


class _SilentBar:
    def advance(self, count: int, **figures: float | str) -> None:
        pass
