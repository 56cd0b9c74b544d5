"""Fine-tunes one after another in this process, or several at a time in others, which never outlive it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess

import torch

from ewc_finetune.errors import UsageError
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.storage import signals

# How long a process that is told to stop may take to leave its run folder in order.
_PATIENCE = 10.0
# Seconds after which it is seen whether a signal came.
_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Job:
    """One fine-tune.

    Attributes:
        name: What to call it.
        options: Of it.
    """

    name: str
    options: FinetuneOptions


# What makes a fine-tune.
Make = Callable[[FinetuneOptions, Progress], object]
# A job's name, and why it failed, if it did.
Done = tuple[str, str | None]


def run_jobs(
    jobs: Sequence[Job],
    finetune: Make,
    at_once: int,
    started: Callable[[str], Progress],
) -> Generator[Done, None, None]:
    """Make fine-tunes, and yield each as it ends; one that fails does not end the others.

    Args:
        jobs: What to make, in this order.
        finetune: Makes one; in another process it must be one that can be imported there.
        at_once: How many at a time; more than one run in processes of their own, which share this one's threads.
        started: Called with the name of each as it begins; what it returns is told how that goes, in this process.

    Raises:
        UsageError: if model, data or options cannot be sent to another process.
    """
    if at_once > 1 and len(jobs) > 1:
        yield from _in_processes(jobs, finetune, at_once, started)
        return
    for job in jobs:
        yield job.name, _make(finetune, job.options, started(job.name))


def _make(finetune: Make, options: FinetuneOptions, progress: Progress) -> str | None:
    """Make one fine-tune; return why it failed, if it did."""
    try:
        finetune(options, progress)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with one run, the others may be right
        return str(error).strip() or type(error).__name__
    return None


class _Worker:
    """A process that makes one fine-tune after another."""

    def __init__(self, finetune: Make, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.job = ""
        self.process: SpawnProcess = context.Process(target=_work, args=(theirs, finetune, threads))
        self.process.start()
        theirs.close()

    def begin(self, job: Job) -> None:
        """Give it the next fine-tune."""
        self.job = job.name
        try:
            self.connection.send(job.options)
        except OSError:
            return  # the process is gone, which `result` will say
        except Exception as error:  # whatever pickle says of what it cannot take
            raise UsageError(
                "several jobs at once need a model, data and options that other processes can have, and these cannot "
                f"be sent there ({error}). Name files and data specs, or leave --jobs at 1"
            ) from error

    def result(self) -> tuple[str | None, bool]:
        """Return why the fine-tune failed, if it did, and whether the process can make another."""
        try:
            return self.connection.recv(), True
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            return f"its process ended {how}; out of memory, perhaps: try fewer --jobs", False

    def leave(self) -> None:
        """Have the process end, for there is nothing left to do."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join()
        self.connection.close()


def _in_processes(
    jobs: Sequence[Job], finetune: Make, at_once: int, started: Callable[[str], Progress]
) -> Generator[Done, None, None]:
    threads = max(1, torch.get_num_threads() // at_once)
    waiting, workers = deque(jobs), list[_Worker]()
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # or it would let signals through while it starts
    try:
        while waiting or workers:
            while waiting and len(workers) < at_once:
                with _deaf_to_interrupts():  # until it is known here
                    workers.append(_Worker(finetune, threads))
                workers[-1].begin(waiting.popleft())
                started(workers[-1].job)
            # The system takes the wait up again after a signal, so that it must end by itself.
            while not (ready := connection.wait([worker.connection for worker in workers], _BETWEEN_LOOKS)):
                signals.safe_point()
            for worker in [worker for worker in workers if worker.connection in ready]:
                failure, alive = worker.result()
                done = worker.job
                if alive and waiting:
                    worker.begin(waiting.popleft())
                    started(worker.job)
                else:
                    if alive:
                        worker.leave()
                    workers.remove(worker)
                yield done, failure
    finally:
        _stop(workers)


def _stop(workers: Sequence[_Worker]) -> None:
    """End processes at once: asked first, so that their run folders say so, then by force."""
    try:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join(_PATIENCE)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()


@contextlib.contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Have a process that is started in the block not hear Ctrl-C: the one that started it does, and ends it."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(orders: connection.Connection, finetune: Make, threads: int) -> None:
    """Make fine-tunes as they are asked for, in a process of its own."""
    signals.run(partial(_obey, orders, finetune, threads), silent=True)


def _obey(orders: connection.Connection, finetune: Make, threads: int) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError):
        while (options := orders.recv()) is not None:
            orders.send(_make(finetune, options, Silent()))


def _end_with_parent() -> None:
    """Wait for the process that started this one to end, however that came, and end too."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
