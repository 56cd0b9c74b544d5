"""What a penalty adds to a training step: for stacks of any size, beside the loop over anchors, and on a ResNet-18.

    OMP_WAIT_POLICY=PASSIVE python tests/benchmarks/penalty.py

Prints two tables. The first has the time of one training step of an MLP (784-256-128-10, batch 200) under so many
anchors, by that of a step without any, and what the penalty keeps in memory, by the model's own size; beside it the
loop over anchors with autograd that published implementations use. The second has one training step of a ResNet-18 on
32 images of 32 by 32, and the penalty's own time by the time in which memory is copied that is as large as what it must
read and write: parameter, centre, curvature and gradient once each, and the gradient back.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from models import CASES
from run import table
from torch import Tensor, nn

import ewc_finetune as ewc

STACKS = (1, 5, 20, 1000)
LOOPED = (1, 5, 20)
Step = Callable[[], None]


def an_anchor(model: nn.Module) -> ewc.Anchor:
    """Make an anchor near the model's weights."""
    weights = {name: p.detach() + 0.01 * torch.randn_like(p) for name, p in model.named_parameters()}
    fisher = {name: torch.rand_like(p) for name, p in weights.items()}
    return ewc.Anchor(weights, fisher, {}, ewc.Provenance("a"))


def training_step(model: nn.Module, inputs: Tensor, targets: Tensor, pull: Callable[[], Tensor | None]) -> Step:
    """Forward, backward and a step of SGD, with a term to the loss if `pull` returns one, else with what it does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        term = pull()
        (loss if term is None else loss + term).backward()
        optimizer.step()

    return step


def attached(model: nn.Module, inputs: Tensor, targets: Tensor, penalty: ewc.Penalty) -> Step:
    """Make a step with the penalty attached to its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    penalty.attach(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def loop_over(model: nn.Module, anchors: list[ewc.Anchor]) -> Callable[[], Tensor]:
    """Add up `F (theta - theta*)^2` over anchors and parameters in the graph, as published code does."""

    def term() -> Tensor:
        total = torch.zeros(())
        for anchor in anchors:
            for name, parameter in model.named_parameters():
                total = total + 0.5 * (anchor.fisher[name] * (parameter - anchor.weights[name]) ** 2).sum()
        return total

    return term


def timed(steps: dict[str, Step], turns: int, repeats: int) -> dict[str, float]:
    """Return the median time of each step, taken in turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(turns):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(repeats):
                step()
            found[name].append((time.perf_counter() - start) / repeats)
    return {name: median(seconds) for name, seconds in found.items()}


def stacks(turns: int) -> list[list[str]]:
    """Return the rows of the first table."""
    case = CASES["MLP"]
    torch.manual_seed(0)
    model = case.build().eval()
    inputs, targets = case.draw(case.batch)
    size = sum(p.numel() * 4 for p in model.parameters())
    steps: dict[str, Step] = {"none": training_step(copy.deepcopy(model), inputs, targets, lambda: None)}
    kept: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = an_anchor(model).save(Path(folder) / "0.safetensors")
        files = [Path(folder) / f"{n}.safetensors" for n in range(max(STACKS))]
        for file in files[1:]:
            os.link(str(first.path), file)
        for count in STACKS:
            own = copy.deepcopy(model)
            before = memory()
            penalty = ewc.Penalty(own, files[:count], 1.0)
            kept[f"stack of {count}"] = (memory() - before) / size
            steps[f"stack of {count}"] = attached(own, inputs, targets, penalty)
    for count in LOOPED:
        own = copy.deepcopy(model)
        before = memory()
        term = loop_over(own, [an_anchor(own) for _ in range(count)])
        kept[f"loop over {count}"] = (memory() - before) / size
        steps[f"loop over {count}"] = training_step(own, inputs, targets, term)
    seconds = timed(steps, turns, 10)
    rows = [["penalty", "time of a step / without", "memory / the model's"]]
    return rows + [[name, f"{s / seconds['none']:.2f}", f"{kept.get(name, 0.0):.1f}"] for name, s in seconds.items()]


def memory() -> float:
    """Return the bytes that live tensors hold."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_sparse}
    return float(sum(storages.values()))


def resnet(turns: int) -> list[list[str]]:
    """Return the rows of the second table."""
    case = CASES["ResNet-18"]
    torch.manual_seed(0)
    model = case.build().eval()
    inputs, targets = case.draw(case.batch)
    held = copy.deepcopy(model)
    numbers = sum(p.numel() for p in model.parameters())
    penalty, proximal = (ewc.Penalty(held, an_anchor(model), 1.0, form) for form in ("gradient", "proximal"))
    source = torch.rand(numbers)
    target = torch.empty_like(source)
    seconds = timed(
        {
            "step": training_step(model, inputs, targets, lambda: None),
            "step with penalty": attached(held, inputs, targets, penalty),
            "gradient": penalty.add_gradient,
            "proximal": lambda: proximal.proximal_step(1e-4),
            "copy": lambda: (target.copy_(source), None)[1],
        },
        turns,
        1,
    )
    moved = {"gradient": 5, "proximal": 4}  # tensors as large as the model that must be read or written
    rows = [["ResNet-18, batch 32", "ratio"]]
    rows += [["step with the penalty / without", f"{seconds['step with penalty'] / seconds['step']:.3f}"]]
    for form, count in moved.items():
        ideal = seconds["copy"] * count / 2
        rows.append([f"{form} form alone / step", f"{seconds[form] / seconds['step']:.3f}"])
        rows.append([f"{form} form alone / copying as much memory", f"{seconds[form] / ideal:.2f}"])
    return rows


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(2)
    table(stacks(options.turns))
    table(resnet(options.turns))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
