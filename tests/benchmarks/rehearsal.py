"""What a rehearsing step costs beside a plain one: `python tests/benchmarks/rehearsal.py`.

A step of `finetune` without a penalty, and the same step with old inputs of a probe (and variations of them) rehearsed,
take turns on the same network, on one thread. What is shown is the median of the ratios of the time on the processor
(the longer step would wait more often for it where others run), beside the one that there would be if a rehearsed
sample cost exactly what a new one does, optimizer included, and the difference.
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ewc_finetune
from ewc_finetune.checkpoint.builtin_models import CNN, MLP
from ewc_finetune.finetuning.job import ready
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.plan import plan
from ewc_finetune.finetuning.trainer import Trainer
from ewc_finetune.modules.modes import set_training
from ewc_finetune.progress import Silent

# Of the steps of each kind the first do not count.
FIRST = 10


class Nobody:
    """Is told of everything, and keeps nothing."""

    def log(self, line: dict[str, Any]) -> None:
        """See `Observer`."""

    def evaluate(self, epoch: int, step: int, state: Callable[[], dict[str, Any]]) -> bool:
        """See `Observer`."""
        return True


@contextmanager
def trainer(model: nn.Module, data: TensorDataset, anchor: Path, size: int, rehearsed: int) -> Iterator[Trainer]:
    """Yield the trainer of a run; with 0 samples to rehearse, of a plain one."""
    sources = ("probes",) if rehearsed else ()
    options = FinetuneOptions(
        model, data, anchors=anchor, lambdas=0.0, rehearse=sources, rehearse_batch=rehearsed or None, batch_size=size,
        eval_on=[],
    )  # fmt: skip
    todo = plan(options)
    with ready(todo, todo.strengths, Silent()) as job, Silent().bar("", None, "") as bar:
        made = Trainer(replace(job, penalty=None), todo.schedule, torch.Generator(), bar, Nobody())
        set_training(made.model, "frozen")
        yield made


def batches(data: TensorDataset, size: int) -> list[tuple[Tensor, Tensor]]:
    """Cut batches."""
    inputs, labels = data.tensors
    return list(zip(inputs.split(size), labels.split(size), strict=True))


def compare(title: str, model: nn.Module, data: TensorDataset, size: int, steps: int) -> None:
    """Print the rows of a network."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as open_:
        anchor = ewc_finetune.consolidate(
            model, data, probe=256, curvature="identity", output=Path(folder) / "a.safetensors"
        ).path
        shares = (0, size // 2, size)
        trainers = [open_.enter_context(trainer(copy.deepcopy(model), data, anchor, size, n)) for n in shares]
        taken: list[list[float]] = [[] for _ in shares]
        every = batches(data, size)
        for step in range(steps):
            batch = every[step % len(every)]
            order = list(range(len(shares)))
            for n in order if step % 2 else order[::-1]:
                start = time.thread_time()
                trainers[n]._step([batch])
                taken[n].append(time.thread_time() - start)
        plain = taken[0][FIRST:]
        for n, rehearsed in enumerate(shares[1:], 1):
            ratios = [own / other for own, other in zip(taken[n][FIRST:], plain, strict=True)]
            ratio, fair = statistics.median(ratios), 1 + rehearsed / size
            print(
                f"| {title}, {size} | {1e3 * statistics.median(plain):.2f} ms | {rehearsed} | {ratio:.3f} | {fair:.2f} "
                f"| {ratio - fair:+.3f} |"
            )
            sys.stdout.flush()


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    labels = torch.randint(0, 10, (6_000,))
    print(
        "| network, batch | plain step | rehearsed | rehearsing / plain | 1 + rehearsed / batch | the rest |\n"
        "|---|---|---|---|---|---|"
    )
    compare("784-256-128-10", MLP().eval(), TensorDataset(torch.rand(6_000, 784), labels), 100, 300)
    images = TensorDataset(torch.rand(1_000, 3, 32, 32), labels[:1_000])
    compare("convolutions, 3 x 32 x 32", CNN(3, 32).eval(), images, 50, 80)


if __name__ == "__main__":
    main()
