"""Parameters that a user names by a pattern."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from ewc_finetune.errors import UsageError, suggest


def matching(names: Sequence[str], pattern: str, option: str) -> list[str]:
    """Return the names that a pattern such as `head.*` matches.

    Raises:
        UsageError: if there is none, naming the option and the nearest name.
    """
    matches = fnmatch.filter(names, pattern)
    if not matches:
        raise UsageError(f"{option} {pattern} matches no parameter. {suggest(pattern, names)}")
    return matches
