"""What a few hundred old inputs hold: MNIST, then Fashion-MNIST, with and without rehearsal and penalties.

The four settings of kfac.py, three seeds each. The anchor of MNIST has a probe of 64, 256 or 1,000 inputs, of which
three quarters are rehearsed; beside that there is no penalty, or the diagonal or K-FAC. Each probe is also rehearsed as
it is, without variations, and that of 1,000 with less weight. Plain fine-tuning, and joint training on Fashion-MNIST
and all of MNIST with its labels, are the ends of what can be had: joint in batches of twice the size, which are as many
steps with as many new images as in the other runs, and in twice as many steps.

    OMP_NUM_THREADS=1 python examples/published/rehearsal.py --settings transformer      half an hour to two hours
    python examples/published/rehearsal.py --quick                                       a minute, to see that it runs

Writes a CSV for each setting, and of what is there rehearsal.md and rehearsal.png, to --output (the folder rehearsal
beside this file). Runs that are in the CSV already are not made again.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from kfac import DIAGONAL, SAMPLES, SETTINGS
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from mending import data, network
from points import collect, means, parse_arguments
from torch.utils.data import ConcatDataset

import ewc_finetune as ewc
from ewc_finetune.data.sources import load_domain

NONE, KFAC = "none", "K-FAC"
PROBES = (0, 64, 256, 1_000)
WEIGHT, LESS = 1.0, 0.3  # what rehearsed samples count beside 1 for new ones
LAMBDAS = {NONE: (0.0,), DIAGONAL: (10.0, 100.0), KFAC: (1.0, 3.0, 10.0)}
# Joint training, in batches of twice the size, and in twice as many steps.
JOINT, JOINT_LONGER = -2, -1
NAMES = {JOINT: "joint training", JOINT_LONGER: "joint training, twice the steps", 0: "nothing rehearsed"}


class Point(NamedTuple):
    """One run: inputs in the probe (or JOINT), how they are rehearsed, the penalty, and the accuracies after it."""

    probe: int
    variations: bool
    weight: float
    penalty: str
    strength: float
    seed: int
    kept: float
    learned: float


def main() -> None:
    options = parse_arguments(__doc__, Path(__file__).with_suffix(""))
    found = collect(Point, run_seed, options)
    table = table_of(found)
    (options.output / "rehearsal.md").write_text(table)
    print(f"\n{table}")
    draw(found, options.output / "rehearsal.png")


def wanted(quick: bool) -> Iterator[tuple[int, bool, float, str, float]]:
    """Go through the runs of a seed: probe, variations, weight, penalty, lambda."""
    yield 0, True, WEIGHT, NONE, 0.0
    yield JOINT, True, WEIGHT, NONE, 0.0
    yield JOINT_LONGER, True, WEIGHT, NONE, 0.0
    for probe in PROBES:
        for penalty, strengths in LAMBDAS.items():
            for strength in strengths:
                if (probe or penalty != NONE) and not (quick and (probe > 64 or strength > 1)):
                    yield probe, True, WEIGHT, penalty, strength
    for probe in PROBES[1:]:
        if not quick:
            yield probe, False, WEIGHT, NONE, 0.0
    if not quick:
        yield PROBES[-1], True, LESS, NONE, 0.0


def run_seed(name: str, seed: int, points: list[Point], options: argparse.Namespace) -> Iterator[Point]:
    """Train on MNIST, then adapt to Fashion-MNIST in each way that is not there yet."""
    done = {point[:5] for point in points}
    left = [one for one in wanted(options.quick) if one not in done]
    if not left:
        return
    mnist, fmnist = data("mnist", options), data("fmnist", options)
    start = network(name, seed, "mnist", options)
    common = {"seed": seed, "data_dir": options.data_dir}
    short = {"epochs": 1} if options.quick else {}
    second = {**common, **SETTINGS[name].second, **short, "eval_on": [mnist, fmnist]}
    with tempfile.TemporaryDirectory() as folder:
        anchors: dict[tuple[int, str], ewc.Anchor] = {}

        def anchor(probe: int, penalty: str) -> ewc.Anchor:
            if (probe, penalty) not in anchors:
                curvature = (
                    {"curvature": "identity"} if penalty == NONE else {"samples": 100 if options.quick else SAMPLES}
                )
                if penalty == KFAC:
                    curvature["curvature"] = "kfac"
                path = Path(folder) / f"{probe}-{penalty}.safetensors"
                ewc.consolidate(start, mnist, probe=probe, output=path, **curvature, **common)
                anchors[probe, penalty] = ewc.Anchor.open(path)
            return anchors[probe, penalty]

        for probe, variations, weight, penalty, strength in left:
            if probe in (JOINT, JOINT_LONGER):
                both = ConcatDataset([load_domain(data, "train", options.data_dir).samples for data in (mnist, fmnist)])
                batch = 200 if probe == JOINT else 100
                made = ewc.finetune(copy.deepcopy(start), both, batch_size=batch, **second)
            elif not probe and penalty == NONE:
                made = ewc.finetune(copy.deepcopy(start), fmnist, **second)
            else:
                how = {"rehearse": ["probes"], "rehearse_weight": weight, "rehearse_variations": variations}
                held = {"anchors": anchor(probe, penalty), "lambdas": strength, **(how if probe else {})}
                made = ewc.finetune(copy.deepcopy(start), fmnist, **held, **second)
            yield Point(probe, variations, weight, penalty, strength, seed, *(score.accuracy for score in made.after))


def table_of(found: dict[str, list[Point]]) -> str:
    """What is kept and what is learned, means over the seeds: a table to a setting."""
    return "\n".join(setting_table(SETTINGS[name].title, means(points)) for name, points in found.items())


def setting_table(title: str, known: dict[tuple[int, bool, float, str, float], tuple[float, float]]) -> str:
    """One row to each probe, one column to each penalty."""
    columns = {
        (True, WEIGHT, penalty, strength): f"{penalty}, {strength:g}"
        for penalty in LAMBDAS
        for strength in LAMBDAS[penalty]
    }
    columns[True, WEIGHT, NONE, 0.0] = "no penalty"
    columns[True, LESS, NONE, 0.0] = f"no penalty, weight {LESS:g}"
    columns[False, WEIGHT, NONE, 0.0] = "no penalty, no variations"
    rows = [f"| {title}: kept / learned, % | {' | '.join(columns.values())} |", "|---" * (1 + len(columns)) + "|"]
    for probe in (*PROBES, JOINT, JOINT_LONGER):
        cells = [known.get((probe, *column)) for column in columns]
        if any(cells):
            texts = [f"{cell[0]:.1f} / {cell[1]:.1f}" if cell else "" for cell in cells]
            rows.append(f"| {NAMES.get(probe, f'a probe of {probe:,}')} | {' | '.join(texts)} |")
    return "\n".join(rows) + "\n"


def draw(found: dict[str, list[Point]], path: Path) -> None:
    """Draw what is kept against what is learned, a panel to a setting, with a line from no penalty to the largest."""
    columns = min(2, max(1, len(found)))
    rows = -(-len(found) // columns) or 1
    figure = Figure(figsize=(6.2 * columns, 4.4 * rows + 0.6), layout="constrained")
    figure.suptitle("MNIST, then Fashion-MNIST: what a rehearsed probe keeps")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[len(found) :]:
        axes.set_visible(False)
    for axes, (name, points) in zip(grid, found.items(), strict=False):
        known = means(points)
        for probe, color in zip(PROBES, ("0.6", "C0", "C1", "C2"), strict=True):
            start = known.get((probe, True, WEIGHT, NONE, 0.0))
            for penalty, style in {DIAGONAL: "o:", KFAC: "s-"}.items():
                own = {key[-1]: value for key, value in known.items() if key[:-1] == (probe, True, WEIGHT, penalty)}
                line = [*([start] if start else []), *own.values()]
                if own:
                    axes.plot(*zip(*line, strict=True), style, ms=4, lw=1, color=color)
                # With rehearsal the lambdas are the same, and lie too near to be told.
                for strength, position in own.items() if not probe else ():
                    axes.annotate(f"{strength:g}", position, xytext=(4, 3), textcoords="offset points", fontsize=7)
            if start:
                label = f"a probe of {probe:,} rehearsed" if probe else NAMES[0]
                axes.plot(*start, "*", ms=11, color=color, label=label)
        for joint, marker in ((JOINT, "P"), (JOINT_LONGER, "X")):
            if (joint, True, WEIGHT, NONE, 0.0) in known:
                axes.plot(*known[joint, True, WEIGHT, NONE, 0.0], marker, color="k", ms=8, label=NAMES[joint])
        # Half of what is lost is as far everywhere.
        axes.set_xscale("function", functions=(lambda x: -np.log(100.5 - x), lambda y: 100.5 - np.exp(-y)))
        axes.set_xticks([20, 50, 80, 90, 95, 97, 98, 99])
        axes.set(title=SETTINGS[name].title, xlabel="accuracy on MNIST, %", ylabel="accuracy on Fashion-MNIST, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    lines = [Line2D([], [], marker=m, ls=s, color="0.3", ms=4, lw=1) for m, s in (("o", ":"), ("s", "-"))]
    handles, labels = figure.axes[0].get_legend_handles_labels()
    labels += ["diagonal, lambda 10 and 100", "K-FAC, lambda 1, 3 and 10"]
    figure.legend(
        [*handles, *lines], labels, frameon=False, fontsize=9, ncols=min(4, 2 * columns), loc="outside lower center"
    )
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
