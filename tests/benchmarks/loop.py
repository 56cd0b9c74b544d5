"""What the training loop of `finetune` costs beside one written by hand: `python tests/benchmarks/loop.py`.

Both train the same network on the same batches with the same optimizer and end with the same bytes. They take turns,
and what is shown are medians of ratios. Ours writes its log, moves its bar and checks every loss; saving the state,
which the other doesn't do, is counted apart.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import ewc_finetune
from ewc_finetune.checkpoint.builtin_models import CNN, MLP
from ewc_finetune.cli.printer import Printer
from ewc_finetune.finetuning.trainer import Trainer
from ewc_finetune.modules.modes import set_training

ROUNDS = 15


def by_hand(model: nn.Module, batches: Iterator[list[Tensor]]) -> float:
    """Train for an epoch as people write it, and return the seconds."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    set_training(model, "frozen")
    start = time.perf_counter()
    for inputs, targets in batches:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return time.perf_counter() - start


def from_tensors(data: TensorDataset, size: int) -> Iterator[list[Tensor]]:
    """Cut batches from tensors."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    for chosen in order.split(size):
        yield [tensor[chosen] for tensor in data.tensors]


def from_loader(data: TensorDataset, size: int) -> Iterator[list[Tensor]]:
    """Have a DataLoader collate samples."""
    return iter(DataLoader(data, size, shuffle=True, generator=torch.Generator().manual_seed(0)))


@contextlib.contextmanager
def timed(kind: type, name: str) -> Iterator[list[float]]:
    """Yield the seconds that each call of a method takes."""
    method, taken = getattr(kind, name), []

    def call(self: object, *args: object, **kwargs: object) -> object:
        start = time.perf_counter()
        found = method(self, *args, **kwargs)
        taken.append(time.perf_counter() - start)
        return found

    setattr(kind, name, call)
    try:
        yield taken
    finally:
        setattr(kind, name, method)


def by_finetune(model: nn.Module, data: TensorDataset, size: int, folder: Path) -> tuple[float, float]:
    """Train for an epoch with `finetune`; return the seconds of the loop, and those of saving its state."""
    with timed(Trainer, "run") as whole, timed(Trainer, "_evaluate") as saving:
        ewc_finetune.finetune(
            model, data, epochs=1, batch_size=size, eval_on=[], architecture="x:Y", output=folder / "m.pt",
            overwrite=True, progress=Printer(),
        )  # fmt: skip
    return whole[0] - sum(saving), sum(saving)


def compare(title: str, make: Callable[[], nn.Module], data: TensorDataset, size: int, hand: Callable) -> None:  # type: ignore[type-arg]
    """Print a row: milliseconds of a step by hand, and what ours takes of it."""
    hands, ratios, savings = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for round_ in tqdm(range(ROUNDS + 1), desc=title):
            models = [make().eval() for _ in range(2)]
            models[1].load_state_dict(models[0].state_dict())
            first = by_hand(models[0], hand(data, size)) if round_ % 2 else None
            with contextlib.redirect_stderr(io.StringIO()):
                ours, saving = by_finetune(models[1], data, size, Path(folder))
            own = first or by_hand(models[0], hand(data, size))
            if round_:  # the first warms up
                hands.append(own)
                ratios.append(ours / own)
                savings.append(saving / own)
    steps = -(-len(data) // size)
    print(
        f"| {title} | {1e3 * statistics.median(hands) / steps:.2f} ms | {statistics.median(ratios):.3f} | "
        f"{statistics.median(savings):.3f} |"
    )


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    labels = torch.randint(0, 10, (30_000,))
    print(
        "| network, batch, data by hand | step by hand | finetune / by hand | saving the state / an epoch |\n"
        "|---|---|---|---|"
    )
    sys.stdout.flush()
    compare("784-256-128-10, 100, from tensors", MLP, TensorDataset(torch.rand(30_000, 784), labels), 100, from_tensors)
    images = TensorDataset(torch.rand(4_000, 3, 32, 32), labels[:4_000])
    compare("convolutions, 3 x 32 x 32, 50, DataLoader", lambda: CNN(3, 32), images, 50, from_loader)


if __name__ == "__main__":
    main()
