"""Text from files, made safe for a terminal: the one place that all printing goes through."""

from __future__ import annotations

import re
import unicodedata

_BREAKS = re.compile(r" *[\t\n\v\f\r\x85\u2028\u2029]+ *")
# Characters that join letters in some scripts and the parts of emoji: the only invisible ones that are kept.
_JOINERS = "\u200c\u200d"


def printable(text: object) -> str:
    r"""Return a text as one line, in which a terminal finds nothing to obey.

    Line breaks and tabs become a space. Other control characters, those that turn the direction of writing, and
    surrogates become what they are written as in Python: `\x1b`, `\u202e`, `\udcff`.
    """
    line = _BREAKS.sub(" ", str(text))
    return line if line.isprintable() else "".join(map(_shown, line))


def _shown(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
