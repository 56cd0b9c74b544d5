"""Processes that are killed at a step of one's choice."""

import builtins
import io
import os
import signal
import warnings
from pathlib import Path
from unittest import mock

_STEPS = ("mkdir", "open", "link", "rename", "replace", "unlink", "rmdir", "fsync", "chmod")


def runs_through(act, step, hard_links=True):
    """Do something in a child that is killed at its `step`-th call to the system; whether it came to its end before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that the parent may have
        child = os.fork()
    if child == 0:
        try:
            _die_at(step, hard_links)
            act()
        except BaseException:  # noqa: BLE001 - it has no test to tell
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


def _die_at(step, hard_links):
    left = [step]

    def counted(call):
        def wrapper(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return wrapper

    os.fsync = lambda handle: None  # for the power to fail, which takes time and proves nothing here
    if not hard_links:
        mock.patch.object(os, "link", side_effect=PermissionError(1, "no hard links here")).start()
    for name in _STEPS:
        mock.patch.object(os, name, counted(getattr(os, name))).start()
    opening = counted(io.open)
    mock.patch.object(io, "open", opening).start()
    mock.patch.object(builtins, "open", opening).start()


def files_in(folder):
    """Return what is in a folder, hidden or not, by path; folders are there by themselves too."""
    found = sorted(Path(folder).rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}
