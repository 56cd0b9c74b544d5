"""Permuted MNIST: every task shuffles the pixels in a way of its own.

Three tasks with a small convolutional network (10 and 20 maps of 5 by 5, dropout, 320-50-10), two epochs each, SGD 0.01
with momentum 0.9: plain, and L2 and EWC in both forms of the penalty. Ten tasks with a hidden layer of 512, ten epochs
each, SGD 0.1 with momentum 0.9: plain, and in the proximal form L2, stacked anchors (offline) and a running one
(online). Published baselines report 0.83 for EWC on ten tasks, the original paper about 0.94. The same ten tasks as
they are mostly trained, with Adam 1e-3 in the gradient form, two epochs each: the diagonal against K-FAC blocks, all
kept (offline) or merged into one anchor in either way. Fifty tasks with two hidden layers of 100 as in Ritter et al.
2018 ("Online structured Laplace approximations for overcoming catastrophic forgetting", which reports more than 0.90),
three epochs of SGD 0.05 with momentum and four of 0.005, in the proximal form: plain, the diagonal, and K-FAC blocks,
merged into one anchor after each task.

    python examples/published/permuted_mnist.py --settings three              about 30 minutes
    python examples/published/permuted_mnist.py --settings ten                about an hour; --seeds 0 takes half of it
    python examples/published/permuted_mnist.py --settings adam --seeds 0     about 40 minutes
    python examples/published/permuted_mnist.py --settings fifty --seeds 0    about an hour
    python examples/published/permuted_mnist.py --quick                       a minute, to see that it runs

Writes a CSV, a table and a figure for each setting to --output (the folder permuted_mnist beside this file).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from in_turn import (
    Method,
    Result,
    Task,
    by_method,
    draw_means,
    images,
    learn_in_turn,
    parse_arguments,
    save_rows,
    search,
    spread,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ewc_finetune.checkpoint.builtin_models import MLP

TITLES = {
    "three": "three tasks, convolutional",
    "ten": "ten tasks, 512 hidden units",
    "adam": "ten tasks, 512 hidden units, Adam",
    "fifty": "fifty tasks, 100 and 100 hidden units",
}


def main() -> None:
    options = parse_arguments(__file__, __doc__, 10_000, list(SETTINGS))
    options.output.mkdir(parents=True, exist_ok=True)
    for setting in options.settings:
        results = []
        for result in run_setting(setting, options):
            print(f"{setting}, {result.method}, lambda {result.strength:g}, seed {result.seed}: ", end="")
            print(" ".join(f"{mean:.3f}" for mean in result.means), flush=True)
            results.append(result)
        save_rows(results, options.output / f"{setting}.csv")
        table = make_table(results, setting)
        (options.output / f"{setting}.md").write_text(table)
        draw_means({TITLES[setting]: by_method(results, setting)}, options.output / f"{setting}.png")
        print(f"\n{table}\nWritten to {options.output}: {setting}.csv, {setting}.md, {setting}.png")


class Convolutional(nn.Sequential):
    """Two convolutions with dropout, then 320-50-10."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 10, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(10, 20, 5),
            nn.Dropout2d(),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(320, 50),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(50, 10),
        )


def run_setting(setting: str, options: argparse.Namespace) -> Iterator[Result]:
    """Run every method in one setting."""
    build, count, training, ranges = SETTINGS[setting]
    tasks = make_tasks(min(count, 10) if options.quick else count, options)

    def run(method: Method, seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        short = {"epochs": 1} if options.quick else {}
        return learn_in_turn(build(), tasks, method, samples=options.samples, seed=seed, **{**training, **short})

    if options.quick:
        ranges = {name: lambdas[:1] for name, lambdas in ranges.items()}
    return search(setting, ranges, options.seeds, run)


# Of each setting: the network, how many tasks, how they are trained, and the lambdas of each method. Ten tasks need a
# large learning rate, and with it a penalty that is stable at any lambda.
SETTINGS = {
    "three": (
        Convolutional,
        3,
        {"epochs": 2, "lr": 0.01, "optimizer": "sgd", "momentum": 0.9, "batch_size": 64},
        {
            "plain": (0.0,),
            "L2": (0.01, 0.02, 0.05),
            "L2, proximal": (0.05, 0.1),
            "EWC": (3.0, 10.0),
            "EWC, proximal": (60.0, 100.0, 150.0),
        },
    ),
    "ten": (
        lambda: MLP(784, (512,), 10, batch_norm=False),
        10,
        {"epochs": 10, "lr": 0.1, "optimizer": "sgd", "momentum": 0.9, "batch_size": 128},
        {
            "plain": (0.0,),
            "L2, proximal": (0.0001, 0.001),
            "EWC offline, proximal": (30.0, 100.0, 300.0),
            "EWC online, proximal": (30.0, 100.0),
        },
    ),
    "adam": (
        lambda: MLP(784, (512,), 10, batch_norm=False),
        10,
        {"epochs": 2, "lr": 1e-3, "optimizer": "adam", "batch_size": 128},
        {
            "plain": (0.0,),
            "EWC online": (100.0, 1000.0),
            "K-FAC offline": (10.0,),
            "K-FAC online": (10.0,),
            "K-FAC online, nearest": (10.0,),
        },
    ),
    "fifty": (
        lambda: MLP(784, (100, 100), 10, batch_norm=False),
        50,
        {
            "epochs": 3,
            "lr": 0.05,
            "optimizer": "sgd",
            "momentum": 0.9,
            "batch_size": 250,
            "cooling": {"epochs": 4, "lr": 0.005},
        },
        {"plain": (0.0,), "EWC online, proximal": (30.0, 100.0), "K-FAC online, proximal": (35.0,)},
    ),
}


def make_tasks(count: int, options: argparse.Namespace) -> list[Task]:
    """Shuffle the pixels anew for every task but the first."""
    limit = "?limit=100" if options.quick else ""
    splits = [images(f"mnist{limit}", split, options.data_dir) for split in ("train", "test")]

    def shuffled(number: int, inputs: Tensor, labels: Tensor) -> TensorDataset:
        if number == 0:
            return TensorDataset(inputs, labels)
        order = torch.randperm(784, generator=torch.Generator().manual_seed(number))
        return TensorDataset(inputs.flatten(1)[:, order].view_as(inputs), labels)

    return [Task(*(partial(shuffled, number, *split) for split in splits)) for number in range(count)]


def make_table(results: Sequence[Result], setting: str) -> str:
    """Mean accuracy over the tasks so far, after some of them."""
    count = len(results[0].means)
    shown = range(1, count + 1) if count <= 5 else (1, 2, 4, 6, 8, 10) if count == 10 else (1, 10, 20, 30, 40, count)
    rows = [f"| {TITLES[setting]}: mean accuracy, % | {' | '.join(f'after {n}' for n in shown)} |"]
    rows += ["|---|" + "---|" * len(shown)]
    for label, runs in by_method(results, setting).items():
        rows += [f"| {label} | {' | '.join(spread([run.means[n - 1] for run in runs]) for n in shown)} |"]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
