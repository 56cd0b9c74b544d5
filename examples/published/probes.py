"""How well does a probe tell what is kept? MNIST's, of 64, 256 and 1,000 inputs, while Fashion-MNIST is learned.

The network of the notebook experiment (784-256-128-10) is trained on MNIST and adapted to Fashion-MNIST, plainly and
under the exact Fisher with lambdas from 3 to 3,000, three seeds. After each run the share of unchanged answers is
measured on ten probes of each size, drawn from MNIST's training images as `consolidate --probe` draws them, and
compared with the truth on MNIST's 10,000 test images: the share of its answers that are unchanged, and its accuracy as
a share of what it was.

    OMP_NUM_THREADS=1 python examples/published/probes.py             about 10 minutes
    python examples/published/probes.py --quick                       a few seconds, to see that it runs

Writes probes.md, probes.csv and probes.png to --output (the folder probes beside this file).
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.checkpoint.builtin_models import MLP
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.data.sources import load_domain
from ewc_finetune.evaluation.bound_domain import BoundDomain
from ewc_finetune.evaluation.probe import take_probe
from ewc_finetune.likelihood.registry import get_likelihood

SIZES, DRAWS = (64, 256, 1_000), 10
LAMBDAS = (0, 3, 10, 30, 100, 300, 1_000, 3_000)


class Reading(NamedTuple):
    """What one probe said of one run, beside the truth."""

    seed: int
    strength: float
    size: int
    draw: int
    unchanged: float
    divergence: float
    true_unchanged: float
    true_divergence: float
    retained: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a network each (0 1 2)")
    parser.add_argument("--data-dir", type=Path, help="where MNIST and FashionMNIST lie (default: $EWC_FT_DATA)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""), help="folder")
    parser.add_argument("--quick", action="store_true", help="little data, one seed: shows that it runs, no result")
    options = parser.parse_args()
    if options.quick:
        options.seeds = [0]
    readings = [reading for seed in options.seeds for reading in run_seed(seed, options.data_dir, options.quick)]
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "probes.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Reading._fields, *readings])
    table = make_table(readings)
    (options.output / "probes.md").write_text(table)
    draw(readings, options.output / "probes.png")
    print(f"\n{table}\nWritten to {options.output}")


def run_seed(seed: int, data_dir: Path | None, quick: bool) -> list[Reading]:
    limit, epochs = ("?limit=2000", 1) if quick else ("", 4)
    old, new = (load_domain(f"{name}{limit}", "train", data_dir) for name in ("mnist", "fmnist"))
    test = load_domain(f"mnist{limit}", "test", data_dir)
    torch.manual_seed(seed)
    start = MLP()
    ewc.finetune(start, old, norm_stats="update", epochs=epochs, seed=seed, eval_on=[])
    anchor = ewc.consolidate(start, old, samples=50 if quick else 10_000, seed=seed)
    before = ewc.evaluate(start, test)[0].accuracy
    truth = probe_of(start, test, 10_000, 0)
    probes = {(size, draw): probe_of(start, old, size, draw) for size in SIZES for draw in range(DRAWS)}
    readings = []
    for strength in (0, 100) if quick else LAMBDAS:
        model = copy.deepcopy(start)
        done = ewc.finetune(
            model, new, anchors=anchor, lambdas=strength, epochs=epochs, seed=seed, eval_on={"mnist": test}
        )
        true = ewc.measure(model, truth, torch.device("cpu"), batch_size=1_000)
        retained = done.after[0].accuracy / before
        print(
            f"seed {seed}, lambda {strength:g}: {true.unchanged:.3f} of the answers unchanged, {true.divergence:.3f} "
            f"nats, {retained:.3f} of the accuracy",
            flush=True,
        )
        for (size, number), probe in probes.items():
            found = ewc.measure(model, probe, torch.device("cpu"), batch_size=1_000)
            said = found.unchanged, found.divergence, true.unchanged, true.divergence, retained
            readings.append(Reading(seed, strength, size, number, *said))
    return readings


def probe_of(model: nn.Module, domain: Domain, size: int, draw: int) -> ewc.Probe:
    input_spec = InputSpec((1, 28, 28), flat=True, bytes_to_unit=True)
    bound = BoundDomain(domain, input_spec, get_likelihood("categorical"), (10,))
    return take_probe(model, bound, size, draw, torch.device("cpu"))


def make_table(readings: list[Reading]) -> str:
    """Each lambda's truth beside the mean and spread of what probes say, then each size's error over all runs."""
    columns = ["lambda", "accuracy kept", "answers unchanged", *(f"probe of {size:,}" for size in SIZES)]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for strength in dict.fromkeys(reading.strength for reading in readings):
        own = [reading for reading in readings if reading.strength == strength]
        cells = [f"{mean(r.retained for r in own):.3f}", f"{mean(r.true_unchanged for r in own):.3f}"]
        for size in SIZES:
            errors = [r.unchanged - r.true_unchanged for r in own if r.size == size]
            cells.append(f"{mean(r.unchanged for r in own if r.size == size):.3f} ± {rms(errors):.3f}")
        rows.append(f"| {strength:g} | {' | '.join(cells)} |")
    for title, truth in (("error of unchanged answers", "true_unchanged"), ("error of accuracy kept", "retained")):
        errors = [rms([r.unchanged - getattr(r, truth) for r in readings if r.size == size]) for size in SIZES]
        rows.append(f"| {title} | | | {' | '.join(f'{error:.3f}' for error in errors)} |")
    return "\n".join(rows) + "\n"


def mean(values: object) -> float:
    return statistics.fmean(values)  # type: ignore[arg-type]


def rms(values: list[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


def draw(readings: list[Reading], path: Path) -> None:
    """Draw what each probe says against the truth, a panel to a size."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(SIZES), sharey=True)
    for axes, size in zip(panels, SIZES, strict=True):
        own = [reading for reading in readings if reading.size == size]
        axes.plot([0, 100], [0, 100], color="0.7", linewidth=1)
        axes.plot([100 * r.unchanged for r in own], [100 * r.retained for r in own], "o", markersize=3, alpha=0.4)
        axes.set(title=f"probe of {size:,} inputs", xlabel="answers unchanged, %", xlim=(0, 102), ylim=(0, 102))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="accuracy on MNIST kept, %")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
