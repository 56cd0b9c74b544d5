"""Locks on files, which the system takes away from a process that dies."""

from __future__ import annotations

import os
from typing import IO
from weakref import WeakSet


def lock(file: IO[bytes] | int) -> bool | None:
    """Lock an open file or folder until it is closed; whether it could be had. None where there are no locks."""
    try:
        import fcntl
    except ImportError:  # no POSIX system
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    if not isinstance(file, int):
        _locked.add(file)
    return True


# A forked process (that reads samples, say) would hold the lock for as long as it lives, whatever becomes of this one.
_locked: WeakSet[IO[bytes]] = WeakSet()


def _let_go() -> None:
    for file in list(_locked):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
