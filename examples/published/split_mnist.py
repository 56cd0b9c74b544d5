"""MNIST's digits two at a time: the comparison of Hsu et al. (2018, "Re-evaluating continual learning scenarios").

Five tasks (0 and 1, 2 and 3, ...), an MLP 784-400-400, Adam 1e-3, batch 128, 4 epochs on each. In the task-incremental
setting each task has two outputs of its own and it is known which task a sample is of; in the domain-incremental one
all tasks share two outputs; in the class-incremental one there are ten, and all of them answer. Plain training, L2,
offline EWC (an anchor stacked for each task) and online EWC (one running anchor), each under every lambda of its range
on the first seed, and under the best of them on all: best by the mean accuracy at the end, which
flatters every method alike. Where it is not known which task a sample is of, also with 20 inputs of each class
rehearsed, with and without a penalty.

    python examples/published/split_mnist.py                          about half an hour on two cores
    python examples/published/split_mnist.py --quick                  a few seconds, to see that it runs

Writes split.csv, split.md and split.png to --output (the folder split_mnist beside this file). Runs that are in the CSV
already are not made again.
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
    read_rows,
    save_rows,
    search,
    spread,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TASK, DOMAIN, CLASS = "task-incremental", "domain-incremental", "class-incremental"
REHEARSAL = "rehearsal"
LAMBDAS = {
    "plain": (0.0,),
    "L2": (0.001, 0.01, 0.1, 1.0, 10.0),
    "EWC offline": (1e2, 1e3, 1e4, 1e5, 1e6),
    "EWC online": (1e2, 1e3, 1e4, 1e5, 1e6),
    REHEARSAL: (0.0,),
    f"EWC offline, {REHEARSAL}": (1e1, 1e2, 1e3),
}
# Inputs of each task, which has two classes.
REHEARSED = 40
# What Hsu et al. report: mean accuracy over the tasks at the end.
PUBLISHED = {
    TASK: {"plain": "93.5", "EWC offline": "97.7", "EWC online": "98.0"},
    DOMAIN: {"plain": "55.2", "EWC offline": "58.9", "EWC online": "57.3"},
    CLASS: {"EWC offline": "19.8"},
}


class Digits(nn.Module):
    """784-400-400 and ten outputs, of which some are active."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU())
        self.head = nn.Linear(400, outputs)
        self.active = slice(None)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the active outputs."""
        return self.head(self.body(x))[:, self.active]


def main() -> None:
    options = parse_arguments(__file__, __doc__, 2_000, (TASK, DOMAIN, CLASS))
    options.output.mkdir(parents=True, exist_ok=True)
    known, results = read_rows(options.output / "split.csv"), []
    for setting in options.settings:
        for result in run_setting(setting, options, known):
            print(f"{setting}, {result.method}, lambda {result.strength:g}, seed {result.seed}: ", end="")
            print(f"{100 * result.means[-1]:.1f}", flush=True)
            results.append(result)
            save_rows([*results, *(other for other in known if other not in results)], options.output / "split.csv")
    table = make_table(results, options.settings)
    (options.output / "split.md").write_text(table)
    draw_means({setting: by_method(results, setting) for setting in options.settings}, options.output / "split.png")
    print(f"\n{table}\nWritten to {options.output}: split.csv, split.md, split.png")


def run_setting(setting: str, options: argparse.Namespace, known: Sequence[Result]) -> Iterator[Result]:
    """Run every method in one setting."""
    tasks = make_tasks(setting, options)

    def run(method: Method, seed: int) -> list[list[float]]:
        torch.manual_seed(seed)
        model = Digits(2 if setting == DOMAIN else 10)

        def select(number: int) -> None:
            model.active = slice(2 * number, 2 * number + 2) if setting == TASK else slice(None)

        training = {"epochs": 1 if options.quick else 4, "lr": 1e-3, "batch_size": 128, "seed": seed}
        return learn_in_turn(model, tasks, method, samples=options.samples, select=select, **training)

    ranges = {name: lambdas[:1] if options.quick else lambdas for name, lambdas in methods(setting).items()}
    return search(setting, ranges, options.seeds, run, known, 16 if options.quick else REHEARSED)


def methods(setting: str) -> dict[str, tuple[float, ...]]:
    """Return what is compared in a setting, with its lambdas.

    Rehearsal is not where a task has outputs of its own: its old inputs would have to go to these.
    """
    return {name: lambdas for name, lambdas in LAMBDAS.items() if setting != TASK or REHEARSAL not in name}


def make_tasks(setting: str, options: argparse.Namespace) -> list[Task]:
    """Split MNIST into five tasks, with the labels that the setting has."""
    splits = {split: images("mnist", split, options.data_dir) for split in ("train", "test")}

    def part(split: str, number: int) -> TensorDataset:
        inputs, labels = splits[split]
        kept = (labels // 2 == number).nonzero()[:, 0]
        kept = kept[:40] if options.quick else kept
        labels = labels[kept]
        return TensorDataset(inputs[kept], labels if setting == CLASS else labels % 2)

    return [Task(partial(part, "train", number), partial(part, "test", number)) for number in range(5)]


def make_table(results: Sequence[Result], settings: Sequence[str]) -> str:
    """Mean accuracy over the five tasks at the end, beside what is published."""
    rows = [f"| mean accuracy, % | {' | '.join(settings)} |", "|---|" + "---|" * len(settings)]
    for name in LAMBDAS:
        cells = []
        for setting in settings:
            runs = next((runs for runs in by_method(results, setting).values() if runs[0].method == name), [])
            strength = f" (lambda {runs[0].strength:g})" if runs and runs[0].strength else ""
            cells.append(f"{spread([run.means[-1] for run in runs])}{strength}" if runs else "-")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    for name in ("plain", "EWC offline", "EWC online"):
        cells = [PUBLISHED[setting].get(name, "-") for setting in settings]
        rows.append(f"| published: {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
