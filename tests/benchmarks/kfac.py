"""What K-FAC costs: its consolidation beside the diagonal's, and its penalty beside a training step.

    OMP_WAIT_POLICY=PASSIVE EWC_FT_DATA=... python tests/benchmarks/kfac.py

Prints two tables. The first has the time of a pass with K-FAC blocks by that of the same pass with the diagonal, with
the exact estimator. The second has the time of the penalty alone by that of a training step without it, for factors
that are whole, and cut to 99% and 90%, with the seconds that cutting them takes: an MLP (784-256-128-10 with batch
norm, trained on MNIST for one epoch; Adam, 100 images), and a ResNet-18 (trained for 100 steps on Fashion-MNIST, in
three channels of 32 by 32, since the factors of random weights are of rank 1; SGD with momentum, 32 images). Two
threads, but for the MLP's penalty one, on which its step is faster.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from models import CASES
from penalty import timed
from run import table
from torch import Tensor, nn

import ewc_finetune as ewc
from ewc_finetune.checkpoint.builtin_models import MLP
from ewc_finetune.data.sources import load_domain
from ewc_finetune.likelihood.registry import get_likelihood

RANKS = {"whole": "full", "99%": 0.99, "90%": 0.9}
IMAGES = "fmnist?size=32&channels=3"
BATCHES = {"MLP": 40, "CNN": 8, "ResNet-18": 2}


def consolidation(turns: int) -> list[list[str]]:
    """Return the rows of the first table."""
    rows = [["consolidation: time / the diagonal's", "MLP", "CNN", "ResNet-18"]]
    columns = []
    for name in rows[0][1:]:
        case = CASES[name]
        torch.manual_seed(0)
        model = case.build().eval()
        batches = [case.draw(case.batch) for _ in range(BATCHES[name])]
        likelihood = get_likelihood(case.likelihood)

        def one_pass(
            form: str | None,
            model: nn.Module = model,
            batches: list[tuple[Tensor, Tensor]] = batches,
            likelihood: object = likelihood,
        ) -> Callable[[], None]:
            return lambda: ewc.compute_fisher(model, batches, likelihood, "exact", kfac=form)

        passes = {str(form): one_pass(form) for form in (None, "expand", "reduce")}
        seconds = timed(passes, turns, 1)
        columns.append([f"{seconds[key] / seconds['None']:.2f}" for key in ("expand", "reduce")])
    labels = ("K-FAC, expand", "K-FAC, reduce")
    return rows + [[label, *(column[row] for column in columns)] for row, label in enumerate(labels)]


def trained_mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """Return the MLP, and 100 images of MNIST with labels."""
    torch.manual_seed(0)
    model = MLP(in_features=784, hidden=(256, 128), num_classes=10, batch_norm=True)
    ewc.finetune(model, "mnist", epochs=1, norm_stats="update", eval_on=[])
    inputs, labels = load_domain("mnist", "train", None).samples.tensors
    return model.eval(), inputs[:100].flatten(1).float() / 255, labels[:100]


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    """Return the ResNet-18, and 32 random images."""
    torch.manual_seed(0)
    model = CASES["ResNet-18"].build()
    ewc.finetune(model, f"{IMAGES}&limit=3200", epochs=1, lr=1e-3, batch_size=32, norm_stats="update", eval_on=[])
    return model.eval(), *CASES["ResNet-18"].draw(32)


def step_of(model: nn.Module, inputs: Tensor, labels: Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Forward, backward and a step of the optimizer."""

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def penalty(name: str, turns: int) -> list[list[str]]:
    """Return the rows of one model in the second table."""
    model, inputs, labels = trained_mlp() if name == "MLP" else resnet()
    data, estimator = ("mnist", "exact") if name == "MLP" else (IMAGES, "sampled")
    whole = ewc.consolidate(model, data, curvature="kfac", kfac_rank="full", estimator=estimator, samples=200)
    anchors, cutting = {}, {}
    for label, rank in RANKS.items():
        start = time.perf_counter()
        anchors[label] = replace(whole, blocks={layer: block.stored(rank) for layer, block in whole.blocks.items()})
        cutting[label] = f"{time.perf_counter() - start:.2f}"
    diagonal = ewc.consolidate(model, data, estimator=estimator, samples=100)
    plain = copy.deepcopy(model)
    optimizer = (
        torch.optim.Adam(plain.parameters(), lr=1e-4)
        if name == "MLP"
        else torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9)
    )
    steps = {"step": step_of(plain, inputs, labels, optimizer)}
    for label, anchor in (*anchors.items(), ("diagonal", diagonal)):
        held = copy.deepcopy(model)
        held.zero_grad()
        steps[f"{label}, gradient"] = ewc.Penalty(held, anchor, 1.0).add_gradient
        moved = ewc.Penalty(held, anchor, 1.0, "proximal")
        steps[f"{label}, proximal"] = lambda moved=moved: moved.proximal_step(1e-4)
    seconds = timed(steps, turns, 5 if name == "MLP" else 1)
    return [
        [
            f"{name}, {label}",
            *(f"{seconds[f'{label}, {form}'] / seconds['step']:.2f}" for form in ("gradient", "proximal")),
            cutting.get(label, ""),
        ]
        for label in (*anchors, "diagonal")
    ]


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(2)
    table(consolidation(options.turns))
    rows = [["penalty alone: time / a training step", "gradient form", "proximal form", "to cut, s"]]
    torch.set_num_threads(1)
    rows += penalty("MLP", 5 * options.turns)
    torch.set_num_threads(2)
    table([*rows, *penalty("ResNet-18", options.turns)])


if __name__ == "__main__":
    main()
