"""SIGINT and SIGTERM, which end the program where nothing is half done.

Outside of `deferred` there is nothing to put in order but what was registered with `on_leaving`: the program leaves at
once. In it a signal is noted, and raised as `Interrupted` at the next `safe_point`, never between any two lines of
somebody else's code; another one leaves at once, and what is left behind then is for the next command to put in order.

Only `run`, the program's frame, installs handlers. Where this package is used as a library nothing is ever noted, and
Ctrl-C is what it always is.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_WORDS = {signal.SIGINT: b"Interrupted.\n", signal.SIGTERM: b"Terminated.\n"}


class _State:
    """What is known of signals, which are the whole process's."""

    noted: int | None = None
    depth = 0  # of blocks in which they wait
    silent = False
    last_words: Callable[[str, int], str] | None = None


_state = _State()
_last_things: list[Callable[[], object]] = []


class Interrupted(BaseException):
    """A signal asks the program to end; no `Exception`, so that no library takes it for an error of its own."""


def noted() -> bool:
    """Whether a signal has come that is to end the program."""
    return _state.noted is not None


def safe_point() -> None:
    """Raise `Interrupted` if a signal has come; not while another exception is being handled, which leads out too."""
    if _state.noted is not None and sys.exc_info()[0] is None:
        raise Interrupted


@contextmanager
def deferred() -> Iterator[None]:
    """Have signals wait for the next `safe_point`, of which the end of the block is one."""
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1
    safe_point()


def on_leaving(do: Callable[[], object]) -> None:
    """Have something done when a signal ends the program, until it is forgotten."""
    _last_things.append(do)


def forget(done: Callable[[], object]) -> None:
    """Take back what was asked for with `on_leaving`."""
    if done in _last_things:
        _last_things.remove(done)


def end_with(last_words: Callable[[str, int], str] | None) -> None:
    """Have a text printed on stdout when a signal ends the program.

    Args:
        last_words: Makes it of what stderr is told and of the exit code; None takes back what was asked for.
    """
    _state.last_words = last_words


def run(program: Callable[[], object]) -> None:
    """Run a program to its end, or to the first place at which a signal may end it: exit code 130 or 143 then.

    Args:
        program: Called without arguments.
    """
    for number in _WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, say
            signal.signal(number, _handle)
    # Registered first, done last: from there to the end of the process no Python code runs that could act on a signal.
    atexit.register(_ignore)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_leave_it_to_the_parent)
    try:
        program()
    except Interrupted:
        pass
    except BaseException:
        if _state.noted is None:
            raise
    if _state.noted is not None:
        _put_in_order()
        _say(_state.noted)
        sys.exit(128 + _state.noted)


def _handle(number: int, _: FrameType | None) -> None:
    if _state.depth and _state.noted is None:
        _state.noted = number
        return
    if not _state.depth:
        _put_in_order()
    _say(number)
    os._exit(128 + number)


def _put_in_order() -> None:
    for do in reversed(_last_things.copy()):
        with suppress(Exception):  # which is no time for a traceback
            do()


def _say(number: int) -> None:
    if not _state.silent:
        _state.silent = True  # once is enough
        with suppress(OSError):
            # The line of a terminal on which ^C or a bar stands is ended first; Python's own stream may be in use.
            words = _WORDS[signal.Signals(number)]
            os.write(2, (b"\n" if os.isatty(2) else b"") + words)
            if _state.last_words is not None:
                os.write(1, _state.last_words(words.decode().strip(), 128 + number).encode() + b"\n")


def _ignore() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _WORDS:
            signal.signal(number, signal.SIG_IGN)


def _leave_it_to_the_parent() -> None:
    """In a forked process (that reads samples, say): Ctrl-C reaches the parent too, which ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
