"""What Kronecker-factored blocks buy: MNIST, then Fashion-MNIST, under diagonal and K-FAC anchors.

Four settings, three seeds each: the network of mnist_to_fmnist.py (784-256-128-10 with batch norm) as it is trained
there (Adam 1e-4, batch 100, 4 epochs), and trained harder (Adam 3e-4, 8 epochs); a convolutional network (16 and 32
maps of 5 by 5, pooled, 64 hidden units); and a small transformer (16 patches of 7 by 7, 64 wide, two layers), both with
batch 100 and two epochs on each, Adam 1e-3 on MNIST and 3e-4 on Fashion-MNIST. The first two also show what is
lost when the factors are cut and their eigenvectors stored in half precision.

    python examples/published/kfac.py --settings notebook           about 25 minutes; all four take two hours
    python examples/published/kfac.py --quick                       a minute, to see that it runs

Writes a CSV for each setting, and of what is there frontiers.md, frontiers.png and ranks.md, to --output (the folder
kfac beside this file).
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import ewc_finetune as ewc
from ewc_finetune.checkpoint.builtin_models import MLP

DIAGONAL, EXPAND, REDUCE = "diagonal", "K-FAC, expand", "K-FAC, reduce"
KFAC = "K-FAC"
SAMPLES = 10_000


class Transformer(nn.Module):
    """Patches of 7 by 7 as tokens, two encoder layers, the mean of what comes out, a linear head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patch = nn.Linear(49, width)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape `(batch, 10)`."""
        patches = nn.functional.unfold(images, 7, stride=7).mT
        return self.head(self.layers(self.patch(patches) + self.place).mean(dim=1))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Setting(NamedTuple):
    """A network, how it is trained on each domain, and the lambdas of each penalty.

    Attributes:
        title: What to call it.
        build: Makes the network.
        first: How it is trained on MNIST.
        second: How on Fashion-MNIST.
        lambdas: Of each penalty.
        forms: What K-FAC does with positions, by penalty.
    """

    title: str
    build: Callable[[], nn.Module]
    first: dict[str, object]
    second: dict[str, object]
    lambdas: dict[str, tuple[float, ...]]
    forms: dict[str, str]


def notebook(title: str, lr: float, epochs: int, lambdas: dict[str, tuple[float, ...]]) -> Setting:
    return Setting(
        f"784-256-128-10, {title}",
        lambda: MLP(784, (256, 128), 10),
        {"epochs": 4, "norm_stats": "update"},
        {"epochs": epochs, "lr": lr},
        lambdas,
        {KFAC: "expand"},
    )


def several(title: str, build: Callable[[], nn.Module]) -> Setting:
    return Setting(
        title,
        build,
        {"epochs": 2, "lr": 1e-3},
        {"epochs": 2, "lr": 3e-4},
        {DIAGONAL: (30, 300, 3000, 30_000), EXPAND: (10, 100, 1000, 10_000), REDUCE: (10, 100, 1000, 10_000)},
        {EXPAND: "expand", REDUCE: "reduce"},
    )


SETTINGS = {
    "notebook": notebook(
        "Adam 1e-4, 4 epochs", 1e-4, 4, {DIAGONAL: (30, 100, 300, 1000, 3000), KFAC: (1, 3, 10, 30, 100)}
    ),
    "harder": notebook("Adam 3e-4, 8 epochs", 3e-4, 8, {DIAGONAL: (100, 300, 1000), KFAC: (3, 10, 30)}),
    "convolutional": several("convolutional", convolutional),
    "transformer": several("transformer", Transformer),
}
# How blocks are kept (`kfac_rank`, `kfac_dtype`), compared at one lambda in the first two settings.
STORED = {
    "whole": ("full", "float32"),
    "99%, float32": (0.99, "float32"),
    "99%": (0.99, "float16"),
    "90%": (0.9, "float16"),
}
COMPARED_AT = 10.0


class Point(NamedTuple):
    """One penalty, one lambda, one seed; `stored` is how the blocks are kept, `bytes` what the curvature takes."""

    penalty: str
    stored: str
    strength: float
    seed: int
    bytes: int
    retention: float
    plasticity: float


def main() -> None:
    options = parse_arguments()
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.settings:
        points = []
        for seed in options.seeds:
            for point in run_seed(SETTINGS[name], seed, options):
                print(f"{name}, seed {seed}: {point.penalty} {point.stored}, lambda {point.strength:g}: ", end="")
                print(f"MNIST {point.retention:.3f}, Fashion-MNIST {point.plasticity:.3f}", flush=True)
                points.append(point)
        with (options.output / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([Point._fields, *points])
    found = {name: read(options.output / f"{name}.csv") for name in SETTINGS}
    found = {name: points for name, points in found.items() if points}
    for name, table in (("frontiers", frontier_table(found)), ("ranks", rank_table(found))):
        (options.output / f"{name}.md").write_text(table)
        print(f"\n{table}")
    draw(found, options.output / "frontiers.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS), help="which of them (all); none draws again"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a network each (0 1 2)")
    parser.add_argument("--data-dir", type=Path, help="where MNIST and FashionMNIST lie (default: $EWC_FT_DATA)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""), help="folder")
    parser.add_argument("--quick", action="store_true", help="little data, one seed: shows that it runs, no result")
    options = parser.parse_args()
    if options.quick:
        options.seeds = [0]
    return options


def run_seed(setting: Setting, seed: int, options: argparse.Namespace) -> Iterator[Point]:
    """Train on MNIST, then adapt to Fashion-MNIST under each penalty."""
    limit = "?limit=200" if options.quick else ""
    mnist, fmnist = f"mnist{limit}", f"fmnist{limit}"
    common = {"seed": seed, "data_dir": options.data_dir}
    short = {"epochs": 1} if options.quick else {}
    torch.manual_seed(seed)
    start = setting.build()
    ewc.finetune(start, mnist, eval_on=[], **{**common, **setting.first, **short})

    def consolidate(name: str, stored: str) -> tuple[ewc.Anchor | None, int]:
        if name == "none":
            return None, 0
        kfac = {}
        if name != DIAGONAL:
            rank, dtype = STORED[stored]
            kfac = {"curvature": "kfac", "kfac_form": setting.forms[name], "kfac_rank": rank, "kfac_dtype": dtype}
        samples = 100 if options.quick else SAMPLES
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.safetensors"
            ewc.consolidate(start, mnist, samples=samples, output=path, **kfac, **common)
            return ewc.Anchor.load(path), ewc.inspect(path).curvature_bytes

    def adapt(name: str, stored: str, strength: float, anchor: ewc.Anchor | None, size: int) -> Point:
        held = {} if anchor is None else {"anchors": anchor, "lambdas": strength}
        options = {**common, **setting.second, **short}
        done = ewc.finetune(copy.deepcopy(start), fmnist, eval_on=[mnist, fmnist], **held, **options)
        return Point(name, stored, strength, seed, size, *(score.accuracy for score in done.after))

    default = "99%"
    for name, strengths in ({"none": (0.0,)} | setting.lambdas).items():
        anchor = consolidate(name, default)
        for strength in strengths[:1] if options.quick else strengths:
            yield adapt(name, default if name in setting.forms else "", strength, *anchor)
    for stored in STORED if KFAC in setting.forms else ():
        if stored != default:
            yield adapt(KFAC, stored, COMPARED_AT, *consolidate(KFAC, stored))


def read(path: Path) -> list[Point]:
    """Read the points of a setting; none if it has not been run."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return [
            Point(
                row["penalty"],
                row["stored"],
                float(row["strength"]),
                int(row["seed"]),
                int(row["bytes"]),
                float(row["retention"]),
                float(row["plasticity"]),
            )
            for row in csv.DictReader(file)
        ]


def frontier_table(found: dict[str, list[Point]]) -> str:
    """What is kept and what is learned under each penalty and lambda, means over the seeds."""
    rows = ["| setting | penalty | lambda: kept / learned, % |", "|---|---|---|"]
    for name, points in found.items():
        for penalty, frontier in frontiers(points).items():
            cells = [f"{strength:g}: {kept:.1f} / {learned:.1f}" for strength, (kept, learned) in frontier.items()]
            text = cells[0].removeprefix("0: ") if penalty == "none" else " · ".join(cells)
            rows.append(f"| {SETTINGS[name].title} | {penalty} | {text} |")
    return "\n".join(rows) + "\n"


def rank_table(found: dict[str, list[Point]]) -> str:
    """What is lost when the factors are cut."""
    rows = [f"| setting, lambda {COMPARED_AT:g} | kept of each factor | bytes | MNIST | Fashion-MNIST |"]
    rows += ["|---|---|---|---|---|"]
    for name, points in found.items():
        for stored in STORED if KFAC in SETTINGS[name].forms else ():
            chosen = [p for p in points if (p.penalty, p.stored, p.strength) == (KFAC, stored, COMPARED_AT)]
            if chosen:
                size, kept, learned = (statistics.mean(p[field] for p in chosen) for field in (4, 5, 6))
                rows.append(f"| {SETTINGS[name].title} | {stored} | {size:,.0f} | {kept:.4f} | {learned:.4f} |")
        size = next((p.bytes for p in points if p.penalty == DIAGONAL), None)
        if size is not None and KFAC in SETTINGS[name].forms:
            rows.append(f"| {SETTINGS[name].title} | a diagonal, for comparison | {size:,} | | |")
    return "\n".join(rows) + "\n"


def frontiers(points: list[Point]) -> dict[str, dict[float, tuple[float, float]]]:
    """Mean retention and plasticity in percent, by penalty and lambda, as they are stored by default."""
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for penalty, strength in dict.fromkeys((p.penalty, p.strength) for p in points if p.stored in ("", "99%")):
        group = [p for p in points if (p.penalty, p.strength) == (penalty, strength) and p.stored in ("", "99%")]
        kept, learned = (100 * statistics.mean(p[field] for p in group) for field in (5, 6))
        found.setdefault(penalty, {})[strength] = (kept, learned)
    return found


def draw(found: dict[str, list[Point]], path: Path) -> None:
    """Draw the frontiers of each setting."""
    rows = 1 + (len(found) > 2)
    columns = -(-len(found) // rows)
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    figure.suptitle("MNIST, then Fashion-MNIST: what is kept against what is learned (numbers: lambda)")
    styles = {DIAGONAL: ("o-", "C0"), KFAC: ("s-", "C1"), EXPAND: ("s-", "C1"), REDUCE: ("^-", "C2")}
    for axes, (name, points) in zip(figure.subplots(rows, columns, squeeze=False).flat, found.items(), strict=False):
        for penalty, frontier in frontiers(points).items():
            if penalty == "none":
                continue
            style, color = styles[penalty]
            axes.plot(*zip(*frontier.values(), strict=True), style, color=color, ms=4, label=penalty)
            for strength, position in frontier.items():
                axes.annotate(
                    f"{strength:g}", position, xytext=(4, 4), textcoords="offset points", fontsize=7, color=color
                )
        axes.set(title=SETTINGS[name].title, xlabel="accuracy on MNIST, %", ylabel="accuracy on Fashion-MNIST, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
