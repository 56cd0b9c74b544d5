"""Fine-tunes one after another in this process, or several at a time as commands of their own, which end with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from ewc_finetune.__main__ import main
from ewc_finetune.errors import UsageError
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.request import command_of
from ewc_finetune.progress import Progress
from ewc_finetune.storage import signals

# Seconds that a process which is told to stop may take to leave its run folder in order.
_PATIENCE = 10.0
# Seconds after which it is seen again whether a process has ended or a signal has come.
_BETWEEN_LOOKS = 0.2
# What a process runs: isolated from the folder that it is started in, it finds modules where this one does.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from ewc_finetune.sweeps.workers import work; work()"
)


@dataclass(frozen=True)
class Job:
    """One fine-tune."""

    name: str
    options: FinetuneOptions


# A job's name, and why it failed, if it did.
Done = tuple[str, str | None]


def run_jobs(
    jobs: Sequence[Job],
    finetune: Callable[[FinetuneOptions, Progress], object],
    at_once: int,
    started: Callable[[str], Progress],
) -> Generator[Done, None, None]:
    """Make fine-tunes, and yield each as it ends; one that fails does not end the others.

    Args:
        jobs: The fine-tunes to make, in this order.
        finetune: Makes one in this process.
        at_once: How many at a time; more than one run as commands of their own, which share this one's threads.
        started: Called with the name of each as it begins; what it returns is told how that goes, in this process.

    Raises:
        UsageError: if no command line can say the model, the data or the anchors of one that is to run by itself.
    """
    if at_once > 1 and len(jobs) > 1:
        yield from _in_processes([(job.name, arguments_of(job.options)) for job in jobs], at_once, started)
        return
    for job in jobs:
        try:
            finetune(job.options, started(job.name))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one run, the others may be right
            yield job.name, str(error).strip() or type(error).__name__
        else:
            yield job.name, None


def arguments_of(options: FinetuneOptions) -> list[str]:
    """Return the arguments of `ewc-ft` that make a fine-tune.

    Raises:
        UsageError: if there are none.
    """
    said = command_of(options)
    if said is None:
        raise UsageError(
            "several jobs at once are commands of their own, which cannot be told of a model, data or anchors that are "
            "in memory. Name files and data specs, or leave --jobs at 1"
        )
    resume = [] if options.resume is None else ["--resume", str(options.resume)]
    return [*shlex.split(said)[1:], *resume, "--quiet"]


class _Process:
    """A command that is under way."""

    def __init__(self, name: str, arguments: Sequence[str], threads: int) -> None:
        self.name, self.errors = name, tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(  # noqa: S603 - this program's own command
            [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), *arguments],
            stdin=subprocess.PIPE,  # which closes when this process ends, however that comes
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C is for the process that started it, which ends it
        )

    def failure(self) -> str | None:
        """Return why a command that has ended failed, if it did."""
        code = self.process.returncode
        if code == 0:
            return None
        self.errors.seek(0)
        told = re.search(r"^Error: (.*)", self.errors.read().decode(errors="replace"), re.MULTILINE | re.DOTALL)
        if told and code > 0:
            return told[1].strip()
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"its process ended {how}; out of memory, perhaps: try fewer --jobs"

    def close(self) -> None:
        """Let go of what it was given."""
        with suppress(OSError), self.process:
            self.errors.close()


def _in_processes(
    commands: Iterable[tuple[str, list[str]]], at_once: int, started: Callable[[str], Progress]
) -> Generator[Done, None, None]:
    threads = max(1, torch.get_num_threads() // at_once)
    waiting, running = deque(commands), list[_Process]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_Process(*waiting.popleft(), threads))
                started(running[-1].name)
            time.sleep(_BETWEEN_LOOKS)
            signals.safe_point()
            for ended in [one for one in running if one.process.poll() is not None]:
                running.remove(ended)
                failure = ended.failure()
                ended.close()
                yield ended.name, failure
    finally:
        _stop(running)


def _stop(running: Sequence[_Process]) -> None:
    """End processes at once: asked first, so that their run folders say so, then by force."""
    try:
        for one in running:
            one.process.terminate()
        for one in running:
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(_PATIENCE)
    finally:
        for one in running:
            one.process.kill()
            one.close()


def work() -> None:
    """Be one command, and end with the process that started it."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main()


def _end_with_parent() -> None:
    with suppress(OSError):
        os.read(0, 1)  # nothing is ever written there: it ends when the other process does
    os._exit(1)
