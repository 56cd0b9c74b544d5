"""Four curves learned one after another by one network: offline EWC, an anchor stacked after each.

The network is 1-100-100-100-100-1 and the loss the squared error (the gaussian likelihood). Each task shows one stretch
of the axis and is never seen again. With the anchors of all earlier tasks stacked the network keeps every stretch;
without, only the last, and under plain L2 (every weight alike, the best of three lambdas) not all.

    python examples/published/offline_regression.py                   about a minute on two cores
    python examples/published/offline_regression.py --quick           a few seconds, to see that it runs

Writes data.png, losses.png, fits.png and losses.md to --output (the folder offline_regression beside this file).
"""

from __future__ import annotations

import argparse
import copy
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ewc_finetune as ewc

EDGES = (-4.0, -2.0, 0.0, 2.0, 4.0)
PLAIN, L2, EWC = "plain", "L2", "offline EWC"


class Run(NamedTuple):
    """One way through the four tasks.

    Attributes:
        losses: Mean squared error on each of the tasks after each epoch, tasks one after another.
        models: The network after each task.
    """

    losses: list[list[float]]
    models: list[nn.Module]


def main() -> None:
    options = parse_arguments()
    tasks = make_tasks(options.samples)
    strengths = {PLAIN: 0.0, L2: options.l2, EWC: options.strength}
    runs = {name: learn(tasks, name, lam, options) for name, lam in strengths.items()}
    options.output.mkdir(parents=True, exist_ok=True)
    draw_data(tasks, options.output / "data.png")
    draw_losses(runs, options.epochs, options.output / "losses.png")
    draw_fits(runs, tasks, options.output / "fits.png")
    table = make_table(runs, options.epochs)
    (options.output / "losses.md").write_text(table)
    print(f"{table}\nWritten to {options.output}: data.png, losses.png, fits.png, losses.md")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lambda", dest="strength", type=float, default=100.0, help="of every anchor (100)")
    parser.add_argument("--l2", type=float, default=0.01, help="of every anchor, where all weights count alike (0.01)")
    parser.add_argument("--epochs", type=int, default=300, help="on each task (300)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (0.05)")
    parser.add_argument("--samples", type=int, default=500, help="of each task (500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""), help="folder")
    parser.add_argument("--quick", action="store_true", help="little training: shows that it runs, no result")
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.samples = 3, 40
    return options


def curve(x: Tensor) -> Tensor:
    """What all four tasks together show."""
    return torch.sin(1.6 * x) + 0.25 * x


def make_tasks(samples: int) -> list[TensorDataset]:
    """Draw noisy points of each stretch."""
    generator = torch.Generator().manual_seed(0)
    tasks = []
    for left, right in pairwise(EDGES):
        x = left + (right - left) * torch.rand(samples, 1, generator=generator)
        tasks.append(TensorDataset(x, curve(x) + 0.05 * torch.randn(x.shape, generator=generator)))
    return tasks


def learn(tasks: list[TensorDataset], name: str, lam: float, options: argparse.Namespace) -> Run:
    """Learn one task after the other, held by the anchors of those before."""
    torch.manual_seed(options.seed)
    widths = (1, 100, 100, 100, 100, 1)
    layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    anchors: list[ewc.Anchor] = []
    run = Run([[] for _ in tasks], [])
    for task in tasks:
        done = ewc.finetune(
            model,
            task,
            anchors=anchors if lam else [],
            lambdas=lam,
            likelihood="gaussian",
            epochs=options.epochs,
            lr=options.lr,
            optimizer="sgd",
            penalty_form="proximal",
            seed=options.seed,
            eval_on={str(number): other for number, other in enumerate(tasks)},
        )
        for line in done.history:
            for number, score in line.get("scores", {}).items() if line.get("epoch") else ():
                run.losses[int(number)].append(squared_error(score["loss"]))
        if lam:
            curvature = "identity" if name == L2 else "diagonal"
            anchors.append(ewc.consolidate(model, task, likelihood="gaussian", curvature=curvature))
        run.models.append(copy.deepcopy(model))
    return run


def squared_error(loss: float) -> float:
    """From the loss, half the squared error plus a constant, to the squared error."""
    return 2 * loss - torch.log(torch.tensor(2 * torch.pi)).item()


def make_table(runs: dict[str, Run], epochs: int) -> str:
    """Mean squared errors after the last task and, for comparison, right after the task itself."""
    rows = ["| mean squared error | task 1 | task 2 | task 3 | task 4 |", "|---|---|---|---|---|"]
    for name, run in runs.items():
        learned = [f"{losses[(number + 1) * epochs - 1]:.4f}" for number, losses in enumerate(run.losses)]
        kept = [f"{losses[-1]:.4f}" for losses in run.losses]
        rows += [f"| {name}, right after each task | {' | '.join(learned)} |"]
        rows += [f"| {name}, after all four | {' | '.join(kept)} |"]
    return "\n".join(rows) + "\n"


def draw_data(tasks: list[TensorDataset], path: Path) -> None:
    """Draw the points of each task on the curve."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    x = torch.linspace(EDGES[0], EDGES[-1], 400)
    axes.plot(x, curve(x), color="black", lw=1, label="the curve")
    for number, task in enumerate(tasks):
        axes.plot(*task.tensors, ".", ms=3, color=f"C{number}", label=f"task {number + 1}")
    axes.set(title="Four tasks, each a stretch of one curve", xlabel="x", ylabel="y")
    axes.legend(frameon=False, ncols=5, fontsize=8, loc="upper left")
    axes.set_ylim(-2.2, 2.9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def draw_losses(runs: dict[str, Run], epochs: int, path: Path) -> None:
    """Draw the error on each task over all the training, each way."""
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    for axes, (name, run) in zip(figure.subplots(1, len(runs), sharey=True), runs.items(), strict=True):
        for number, losses in enumerate(run.losses):
            axes.plot(range(1, len(losses) + 1), losses, color=f"C{number}", label=f"task {number + 1}")
        for number in range(1, len(run.losses)):
            axes.axvline(number * epochs, color="grey", lw=0.7, ls=":")
        axes.set(title=name, xlabel="epoch (dotted: the next task begins)", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("mean squared error")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def draw_fits(runs: dict[str, Run], tasks: list[TensorDataset], path: Path) -> None:
    """Draw what the network says of the whole axis after each task; stretches seen so far are shaded."""
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    grid = figure.subplots(len(runs), len(tasks), sharex=True, sharey=True)
    x = torch.linspace(EDGES[0], EDGES[-1], 400)[:, None]
    for row, (name, run) in zip(grid, runs.items(), strict=True):
        for number, (axes, model) in enumerate(zip(row, run.models, strict=True)):
            with torch.no_grad():
                fit = model(x)
            axes.axvspan(EDGES[0], EDGES[number + 1], color="C2", alpha=0.1, lw=0)
            axes.plot(x, curve(x), color="black", lw=1)
            axes.plot(x, fit, color="C3", lw=1.5)
            axes.set_ylim(-2.5, 2.5)
            axes.set_title(f"{name}, after task {number + 1}", fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
