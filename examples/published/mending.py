"""What mending brings back: MNIST, then Fashion-MNIST without any penalty, then `mend`.

The four settings of kfac.py, three seeds each. The network is trained on MNIST and consolidated (10,000 samples; a
probe of 256 inputs), with a diagonal and with K-FAC blocks (as they are stored by default, cut to 99% of their trace,
and whole), then trained plainly on Fashion-MNIST and mended: at every ratio that `mend` tries, at the knee that it
takes when it goes by the probe alone, and at the knee of K-FAC polished for 200 steps. Beside them are plain means of
the weights, and 200 such steps without mending.

    OMP_NUM_THREADS=1 python examples/published/mending.py --settings convolutional      about ten minutes
    python examples/published/mending.py --quick                                         a minute, to see that it runs

Writes a CSV for each setting, and of what is there mending.md and mending.png, to --output (the folder mending beside
this file). What is in the CSV already is not run again.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from kfac import DIAGONAL, KFAC, SAMPLES, SETTINGS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from points import collect, means, parse_arguments
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.mending.choice import choose

WHOLE = "K-FAC, whole factors"
CURVATURES = {
    DIAGONAL: {},
    KFAC: {"curvature": "kfac"},
    WHOLE: {"curvature": "kfac", "kfac_rank": "full"},
}
PROBE, STEPS = 256, 200
PLAIN, MEAN, REHEARSED = (
    "fine-tuned plainly",
    "mean of the weights",
    f"fine-tuned plainly, then {STEPS} steps rehearsed",
)
KNEE, POLISHED = "knee", f"knee, polished for {STEPS} steps"
# What the table has of each way; the figure has all.
ROWS = (
    (PLAIN, ""), (MEAN, "75%"), (MEAN, "50%"), (MEAN, "25%"),
    *((name, place) for name in CURVATURES for place in ("0.3", "1", "3", KNEE)),
    (KFAC, POLISHED), (REHEARSED, ""),
)  # fmt: skip
# Data by what a network of it is called; `{}` stands for a limit.
DATA = {"mnist": "mnist?{}", "fmnist": "fmnist?{}", "turned": "mnist?rotate=90&{}"}


class Point(NamedTuple):
    """One network: how it was made, at which ratio or part of the way, and its accuracies."""

    way: str
    place: str
    seed: int
    kept: float
    learned: float


def main() -> None:
    options = parse_arguments(__doc__, Path(__file__).with_suffix(""))
    found = collect(Point, run_seed, options)
    table = table_of(found)
    (options.output / "mending.md").write_text(table)
    print(f"\n{table}")
    draw(found, options.output / "mending.png")


def data(name: str, options: argparse.Namespace) -> str:
    """Return the spec of MNIST, Fashion-MNIST or MNIST turned by 90 degrees."""
    return DATA[name].format("limit=200" if options.quick else "").rstrip("?&")


def network(name: str, seed: int, domain: str, options: argparse.Namespace) -> nn.Module:
    """Return the network of a setting and a seed, trained on MNIST, and from there on another domain."""
    setting = SETTINGS[name]
    kept = None if options.work is None else options.work / f"{name}-{seed}-{domain}.pt"
    if kept is not None and kept.is_file():
        model = setting.build().eval()
        model.load_state_dict(torch.load(kept))
        return model
    common = {"seed": seed, "data_dir": options.data_dir, "eval_on": []}
    short = {"epochs": 1} if options.quick else {}
    if domain == "mnist":
        torch.manual_seed(seed)
        model = setting.build()
        ewc.finetune(model, data("mnist", options), **{**common, **setting.first, **short})
    else:
        model = network(name, seed, "mnist", options)
        ewc.finetune(model, data(domain, options), **{**common, **setting.second, **short})
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), kept)
    return model


def anchor(
    model: nn.Module, domain: str, penalty: str, seed: int, options: argparse.Namespace, probe: int = 0
) -> ewc.Anchor:
    samples = 100 if options.quick else SAMPLES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        ewc.consolidate(
            model, data(domain, options), **CURVATURES[penalty], samples=samples, probe=probe, output=path,
            seed=seed, data_dir=options.data_dir,
        )  # fmt: skip
        return ewc.Anchor.load(path)


def run_seed(name: str, seed: int, points: list[Point], options: argparse.Namespace) -> Iterator[Point]:
    """Train on MNIST and on Fashion-MNIST, then mend in every way that is not there yet."""
    done = {point[:2] for point in points}
    if {(REHEARSED, ""), *((penalty, KNEE) for penalty in CURVATURES)} <= done:
        return
    start, forgot = (network(name, seed, domain, options) for domain in ("mnist", "fmnist"))
    mnist, fmnist = data("mnist", options), data("fmnist", options)

    def accuracies(model: nn.Module) -> tuple[float, float]:
        return tuple(score.accuracy for score in ewc.evaluate(model, [mnist, fmnist], data_dir=options.data_dir))

    if (PLAIN, "") not in done:
        yield Point(PLAIN, "", seed, *accuracies(forgot))
    for penalty in CURVATURES:
        if (penalty, KNEE) in done:
            continue
        old = anchor(start, "mnist", penalty, seed, options, PROBE)
        given = {"anchors": old, "anchor_of_new": anchor(forgot, "fmnist", penalty, seed, options)}
        given["data_dir"] = options.data_dir
        tried = ewc.mend(copy.deepcopy(forgot), fmnist, eval_on=[mnist], **given)
        # As `mend` chooses where the probe alone tells what is kept.
        chosen, _ = choose([replace(point, kept=point.retention[0].unchanged) for point in tried.points], None)
        knee = tried.points[chosen]
        if penalty == KFAC:
            steps = 2 if options.quick else STEPS
            polished = ewc.mend(copy.deepcopy(forgot), fmnist, ratios=[knee.ratio], polish=steps, **given)
            yield Point(penalty, POLISHED, seed, *accuracies(polished.model))
        for point in tried.points:
            learned, kept = (score.accuracy for score in point.scores)
            if point.ratio is not None:
                yield Point(penalty, f"{point.ratio:g}", seed, kept, learned)
            elif penalty == DIAGONAL and "%" in point.name:
                yield Point(MEAN, point.name.partition(" ")[0], seed, kept, learned)
        yield Point(penalty, KNEE, seed, *(score.accuracy for score in reversed(knee.scores)))
    if (REHEARSED, "") in done:
        return
    old = anchor(start, "mnist", DIAGONAL, seed, options, PROBE)
    few = f"fmnist?limit={200 if options.quick else 100 * STEPS}"
    rehearsed = {"anchors": old, "lambdas": 0.0, "rehearse": ["probes"], "epochs": 1, "eval_on": []}
    ewc.finetune(forgot, few, seed=seed, data_dir=options.data_dir, **rehearsed)
    yield Point(REHEARSED, "", seed, *accuracies(forgot))


def table_of(found: dict[str, list[Point]]) -> str:
    """What is kept and what is learned, means over the seeds."""
    columns = {name: means(points) for name, points in found.items()}
    rows = ["| MNIST / Fashion-MNIST, % | " + " | ".join(SETTINGS[name].title for name in columns) + " |"]
    rows += ["|---|" + "---|" * len(columns)]
    for way, place in ROWS:
        told = {MEAN: f", {place} of the way"}.get(way, f", {place} to 1" if place[:1].isdigit() else f", {place}")
        found_here = [known.get((way, place)) for known in columns.values()]
        cells = ["" if one is None else f"{one[0]:.1f} / {one[1]:.1f}" for one in found_here]
        rows.append(f"| {way}{told if place else ''} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def draw(found: dict[str, list[Point]], path: Path) -> None:
    """Draw what is kept against what is learned, a panel to a setting; whole factors lie where those cut do."""
    rows = 1 + (len(found) > 2)
    columns = max(1, -(-len(found) // rows))
    figure = Figure(figsize=(5 * columns, 4.2 * rows), layout="constrained")
    figure.suptitle("MNIST, then Fashion-MNIST, then mended\n(numbers: ratio of old to new; ring: the knee)")
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (name, points) in zip(panels, found.items(), strict=False):
        known = means(points)
        for way, style, color in (
            (MEAN, "^--", "0.6"),
            (DIAGONAL, "o-", "C0"),
            (KFAC, "s-", "C1"),
        ):
            curve(axes, {place: value for (of, place), value in known.items() if of == way}, style, color, way)
        for single, marker, color, size, label in (
            ((PLAIN, ""), "X", "k", 7, PLAIN),
            ((REHEARSED, ""), "P", "0.4", 8, f"then {STEPS} steps rehearsed, not mended"),
            ((KFAC, POLISHED), "*", "C3", 12, f"K-FAC, {POLISHED}"),
        ):
            if single in known:
                axes.plot(*known[single], marker, color=color, ms=size, label=label)
        # Equal ratios of errors are equal distances, for most of what there is to see lies beyond 90%.
        axes.set_xscale("function", functions=(lambda x: -np.log(100.01 - x), lambda y: 100.01 - np.exp(-y)))
        axes.set_xticks([50, 80, 90, 95, 97, 98, 99])
        axes.set(title=SETTINGS[name].title, xlabel="accuracy on MNIST, %", ylabel="accuracy on Fashion-MNIST, %")
        highest = max(learned for _, learned in known.values())
        axes.set(xlim=(known[PLAIN, ""][0] - 5, 98.8), ylim=(highest - 24, highest + 2))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    shown = {line.get_label(): line for axes in figure.axes for line in axes.get_legend_handles_labels()[0]}
    columns = 3 if columns > 1 else 1
    figure.legend(handles=shown.values(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def curve(axes: Axes, known: dict[str, tuple[float, float]], style: str, color: str, label: str) -> None:
    """Draw the places of one way, with a ring at the knee."""
    places = {place: value for place, value in known.items() if place[0].isdigit()}
    if not places:
        return
    axes.plot(*zip(*places.values(), strict=True), style, color=color, ms=5, label=label)
    for place, position in places.items():
        away = {DIAGONAL: (-4, -12), KFAC: (3, 5), MEAN: (-8, -12)}[label]
        if place == "0.03":  # there is no room for it, and the others say which it is
            continue
        axes.annotate(
            place, position, xytext=away, textcoords="offset points", fontsize=7, color=color, annotation_clip=True
        )
    if KNEE in known:
        axes.plot(*known[KNEE], "o", color=color, ms=13, fillstyle="none")


if __name__ == "__main__":
    main()
