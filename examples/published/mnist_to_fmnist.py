"""A network that knows MNIST learns Fashion-MNIST: the published notebook experiment, with a right Fisher and its own.

The network is 784-256-128-10 with batch norm after each hidden layer, trained with Adam 1e-4, batch 100, 4 epochs on
MNIST and then 4 on Fashion-MNIST. A public notebook made this the best known EWC experiment in PyTorch; its Fisher
indexes an N by N matrix where it means N entries, squares the mean over the batch, and sees 200 samples. Here each
estimator gets its own range of lambdas, and what is compared is the frontier: the score kept on MNIST against the
score reached on Fashion-MNIST.

    python examples/published/mnist_to_fmnist.py                      about 10 minutes on two cores
    python examples/published/mnist_to_fmnist.py --quick              a few seconds, to see that it runs

Writes frontier.png, frontier.csv and frontier.md to --output (the folder mnist_to_fmnist beside this file).
"""

from __future__ import annotations

import argparse
import copy
import csv
import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.checkpoint.builtin_models import MLP
from ewc_finetune.data.sources import load_domain

NONE, UPDATING = "none", "none, statistics updating"
EXACT, L2, BATCHED, NOTEBOOK = "exact Fisher", "L2", "batched", "the notebook's, as written"
LAMBDAS = {
    EXACT: (10, 30, 50, 80, 100, 150, 200, 300, 1000, 3000),
    L2: (0.01, 0.03, 0.1, 0.3, 1.0),
    BATCHED: (1e4, 1e5, 1e6, 1e7, 1e8),
    NOTEBOOK: (1e3, 1e4, 1e5),
}
# What the notebook reports: (lambda, MNIST, Fashion-MNIST).
PUBLISHED = ((0, 0.281, 0.862), (1e3, 0.859, 0.857), (1e4, 0.939, 0.847), (1e5, 0.966, 0.839))


class Point(NamedTuple):
    """One penalty on the frontier, one seed."""

    penalty: str
    strength: float
    seed: int
    retention: float
    plasticity: float


def main() -> None:
    options = parse_arguments()
    points = []
    for seed in options.seeds:
        for point in run_seed(seed, options):
            print(f"seed {seed}: {point.penalty}, lambda {point.strength:g}: ", end="")
            print(f"MNIST {point.retention:.3f}, Fashion-MNIST {point.plasticity:.3f}", flush=True)
            points.append(point)
    if options.lambdas:
        print(f"\n{make_table(points)}")
        return
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "frontier.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Point._fields, *points])
    table = make_table(points)
    (options.output / "frontier.md").write_text(table)
    draw(points, options.output / "frontier.png")
    print(f"\n{table}\nWritten to {options.output}: frontier.png, frontier.csv, frontier.md")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a network each (0 1 2)")
    parser.add_argument("--samples", type=int, default=10_000, help="samples of the exact Fisher (10,000)")
    parser.add_argument("--lambdas", type=float, nargs="+", help="run the exact Fisher alone, and only print")
    parser.add_argument("--data-dir", type=Path, help="where MNIST and FashionMNIST lie (default: $EWC_FT_DATA)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""), help="folder")
    parser.add_argument("--quick", action="store_true", help="little data, one seed: shows that it runs, no result")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.samples = [0], 50
    return options


def run_seed(seed: int, options: argparse.Namespace) -> Iterator[Point]:
    """Train on MNIST, then adapt to Fashion-MNIST under each penalty."""
    limit, epochs = ("?limit=500", 1) if options.quick else ("", 4)
    mnist, fmnist = f"mnist{limit}", f"fmnist{limit}"
    common = {"seed": seed, "epochs": epochs, "data_dir": options.data_dir}

    torch.manual_seed(seed)
    start = MLP(784, (256, 128), 10)
    ewc.finetune(start, mnist, norm_stats="update", eval_on=[], **common)

    def adapt(name: str, strength: float, anchor: ewc.Anchor | None, norm_stats: str = "frozen") -> Point:
        done = ewc.finetune(
            copy.deepcopy(start),
            fmnist,
            anchors=[] if anchor is None else anchor,
            lambdas=strength,
            norm_stats=norm_stats,
            eval_on=[mnist, fmnist],
            **common,
        )
        retention, plasticity = (score.accuracy for score in done.after)
        return Point(name, strength, seed, retention, plasticity)

    anchors = make_anchors(start, mnist, seed, options)
    if options.lambdas:
        for strength in options.lambdas:
            yield adapt(EXACT, strength, anchors[EXACT])
        return
    yield adapt(NONE, 0, None)
    yield adapt(UPDATING, 0, None, "update")
    for name, anchor in anchors.items():
        for strength in LAMBDAS[name]:
            yield adapt(name, strength, anchor)


def make_anchors(model: nn.Module, data: str, seed: int, options: argparse.Namespace) -> dict[str, ewc.Anchor]:
    """Consolidate one network with each estimator."""
    common = {"seed": seed, "data_dir": options.data_dir}
    exact = ewc.consolidate(model, data, samples=options.samples, **common)
    batched = ewc.consolidate(model, data, estimator="batched", samples=200, batch_size=200, **common)
    inputs, labels = load_domain(data, "train", options.data_dir).samples.tensors
    fisher = notebook_fisher(model, inputs[:200].flatten(1) / 255, labels[:200])
    notebook = dataclasses.replace(exact, fisher=fisher)
    identity = ewc.consolidate(model, data, curvature="identity", **common)
    return {EXACT: exact, L2: identity, BATCHED: batched, NOTEBOOK: notebook}


def notebook_fisher(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The notebook's estimate, errors included: `[:, labels]` is N by N, and what is squared is the mean of it all."""
    likelihoods = []
    for x, y in zip(inputs.split(100), labels.split(100), strict=True):
        likelihoods.append(model(x).log_softmax(dim=1)[:, y])
    gradients = torch.autograd.grad(torch.cat(likelihoods).mean(), list(model.parameters()))
    return {name: g.square() for (name, _), g in zip(model.named_parameters(), gradients, strict=True)}


def make_table(points: list[Point]) -> str:
    """Means over the seeds, as Markdown, beside what the notebook reports."""
    rows = ["| penalty | lambda | MNIST | Fashion-MNIST | mean of both |", "|---|---|---|---|---|"]
    published = [Point("published in the notebook", *(float(p[0]), 0, p[1], p[2])) for p in PUBLISHED]
    for (name, strength), group in grouped([*published, *points]).items():
        kept, learned = (statistics.mean(p[field] for p in group) for field in (3, 4))
        rows.append(f"| {name} | {strength:g} | {kept:.3f} | {learned:.3f} | {(kept + learned) / 2:.3f} |")
    return "\n".join(rows) + "\n"


def grouped(points: list[Point]) -> dict[tuple[str, float], list[Point]]:
    """The seeds of each penalty and lambda, in the order of the first."""
    groups: dict[tuple[str, float], list[Point]] = {}
    for point in points:
        groups.setdefault((point.penalty, point.strength), []).append(point)
    return groups


def draw(points: list[Point], path: Path) -> None:
    """Draw the frontier, means over seeds: what the penalty buys, and which Fisher buys how much."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle("MNIST, then Fashion-MNIST: what is kept against what is learned (numbers: lambda)")
    whole, close = figure.subplots(1, 2)
    groups = grouped(points)
    for name, label, color in ((UPDATING, "plain", "C3"), (NONE, "plain, batch norm frozen", "0.4")):
        (position,) = means(groups, name).values()
        whole.plot(*position, marker="X", ms=10, color=color, ls="", label=label)
    draw_frontier(whole, means(groups, EXACT), "o-", "C0", "held by the anchor", label_every=(10, 30, 100, 1000, 3000))
    draw_frontier(whole, means(groups, L2), "v-", "C4", "held by L2", (-8, -13))
    whole.set_title("What the penalty buys")
    for name, style, color, offset in (
        (EXACT, "o-", "C0", (6, 3)),
        (BATCHED, "^-", "C1", (5, -11)),
        (NOTEBOOK, "s-", "C3", (-16, -14)),
    ):
        draw_frontier(close, means(groups, name), style, color, name, offset)
    published = [(100 * kept, 100 * learned) for _, kept, learned in PUBLISHED]
    close.plot(
        *zip(*published, strict=True), "s--", mfc="white", color="C3", alpha=0.5, label="the notebook, as published"
    )
    close.set(title="Which Fisher buys how much", xlim=(84, 98.5))
    for axes in (whole, close):
        axes.set(xlabel="retention: accuracy on MNIST, %", ylabel="plasticity: accuracy on Fashion-MNIST, %")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=110)


def means(groups: dict[tuple[str, float], list[Point]], name: str) -> dict[float, tuple[float, float]]:
    """Mean retention and plasticity in percent by lambda, for one penalty."""
    found = {}
    for (penalty, strength), group in groups.items():
        if penalty == name:
            kept, learned = (statistics.mean(point[field] for point in group) for field in (3, 4))
            found[strength] = (100 * kept, 100 * learned)
    return found


def draw_frontier(
    axes: Axes,
    frontier: dict[float, tuple[float, float]],
    style: str,
    color: str,
    label: str,
    offset: tuple[int, int] = (6, 3),
    label_every: tuple[float, ...] | None = None,
) -> None:
    """Draw one curve, with its lambdas beside the points."""
    axes.plot(*zip(*frontier.values(), strict=True), style, color=color, label=label)
    for strength, position in frontier.items():
        if label_every is None or strength in label_every:
            text = f"{strength:g}" if strength < 10_000 else f"{strength:.0e}".replace("e+0", "e")
            axes.annotate(
                text, position, xytext=offset, textcoords="offset points", fontsize=8, color=color, annotation_clip=True
            )


if __name__ == "__main__":
    main()
