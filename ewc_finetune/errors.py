"""One tree of exceptions, each with the exit code that the command line ends with.

It is 2 where the words of a command are wrong, so that it can never do as it stands: no such option, kind of data,
column or architecture, a value that cannot be, words that contradict each other. It is 1 where the words may be right,
and a file, a device or the network is not as they need it, or the work fails.

A message says what is wrong, where, what was expected, and what to do about it.
"""

import contextlib
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

# The most things of one kind that a message names.
_NAMED = 4
# The most words that a message lists which offers all that are known, and how many it names of more.
_LISTED = 30
_NEAREST = 5
# The shape of a token of the Hugging Face Hub.
_TOKEN = re.compile(r"\b(hf_(?:oauth_|jwt_)?|api_org_)[A-Za-z0-9]{20,}[\w.-]*")


def redacted(text: str) -> str:
    """Return a text without what looks like a token of the Hub."""
    return _TOKEN.sub(r"\1***", text)


def few(things: Sequence[str], between: str = ", ") -> str:
    """Name the first few of many things, and say how many more there are."""
    more = [f"and {len(things) - _NAMED} more"] if len(things) > _NAMED else []
    return between.join([*things[:_NAMED], *more])


def counted(number: float, what: str) -> str:
    """Say how many there are of something: `1 layer`, `2,000 layers`."""
    return f"{number:,.0f} {what}" + ("" if number == 1 else "s")


class EwcError(Exception):
    """Anything this package refuses or cannot do; exit code 1."""

    exit_code = 1


class UsageError(EwcError):
    """Words of a command, or arguments of a function, that are wrong; exit code 2."""

    exit_code = 2


class SeveralError(EwcError):
    """Several things that are wrong at once.

    Args:
        errors: What is wrong, each for itself.
    """

    def __init__(self, errors: Sequence[EwcError]) -> None:
        self.errors = tuple(errors)
        self.exit_code = max(error.exit_code for error in errors)
        super().__init__("\n- ".join([f"{len(errors)} things are wrong:", *map(str, errors)]))


class Mistakes:
    """Collects what is wrong with things that don't depend on each other, so that all of it is said at once."""

    def __init__(self) -> None:
        self.found: list[EwcError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Go on behind the block where something in it is wrong. What it was to assign is not there then."""
        try:
            yield
        except EwcError as error:
            self.found.append(error)

    def check(self) -> None:
        """Raise what was found: the one mistake as it is, or several as `SeveralError`."""
        if len(self.found) > 1:
            raise SeveralError(self.found) from self.found[0]
        if self.found:
            raise self.found[0]


class CheckpointError(EwcError):
    """A checkpoint that is missing, unsafe, damaged or not a checkpoint."""


class ArchitectureError(EwcError):
    """An architecture that cannot be found, built, or made to fit the weights."""


class WrongArchitectureError(ArchitectureError, UsageError):
    """An architecture whose name or options there are not, as somebody typed it; exit code 2."""


class AnchorError(EwcError):
    """An anchor file that is missing, damaged, of another format, or of no use."""


class AnchorMismatchError(AnchorError):
    """An anchor that does not fit the model, or anchors that do not fit each other."""


class DataError(EwcError):
    """Data that cannot be found or read, or that does not suit the model."""


class NonFiniteError(EwcError):
    """NaN or infinity in weights, outputs, Fisher or loss."""


class RetentionError(EwcError):
    """A model that has lost more of what it knew than it may."""


class DeviceError(EwcError):
    """A device that is not there."""


class HubError(EwcError):
    """Something on the Hugging Face Hub that is not there, may not be had, or is not what was promised."""

    def __str__(self) -> str:
        return redacted(super().__str__())


class StorageError(EwcError):
    """A file or folder that cannot be written: in the way, forbidden, or the disk is full."""


class PathClashError(StorageError, UsageError):
    """An output that is to be written over an input or over another output; exit code 2."""


class OccupiedError(StorageError):
    """A place that was taken by another file while what was to be there was made, which is kept elsewhere."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error of another library says, 200 characters at most; else its class."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__


def suggest(word: str, known: Iterable[str]) -> str:
    """Say which known word was probably meant, and list them all, or of many the nearest; for the end of a message."""
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1)
    if len(choices) <= _LISTED:
        listed = f"Known: {', '.join(choices)}"
    else:
        listed = f"The nearest of {len(choices)}: {', '.join(difflib.get_close_matches(word, choices, _NEAREST, 0))}"
    return (f"Did you mean {near[0]!r}? " if near else "") + listed
