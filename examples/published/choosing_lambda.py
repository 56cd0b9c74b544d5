"""What `--lambda auto` chooses, beside the best of a fine grid, in three experiments that begin with MNIST.

The network of the notebook experiment (784-256-128-10, Adam 1e-4, four epochs) is trained on MNIST and adapted to
Fashion-MNIST, to MNIST with its pixels shuffled, and to MNIST turned by 60 degrees. The best lambda of the grid is the
one with the best mean of both test accuracies, which nobody without the old data could know. Against it stand the
three ways of `--lambda auto`: by the tolerance of 2% alone, by a probe of 1,000 old inputs of which 95% of the answers
are to be kept (`--retain 0.95`), and by the old data itself (`--select-on mnist`, its training images); and what needs
no choice, a probe of 256 that is rehearsed, without a penalty and under the default one. Time is the processor's
in the whole command, in plain runs.

    OMP_NUM_THREADS=1 python examples/published/choosing_lambda.py    twenty minutes
    python examples/published/choosing_lambda.py --quick              a few seconds, to see that it runs

Writes lambdas.md and lambdas.csv to --output (the folder choosing_lambda beside this file).
"""

from __future__ import annotations

import argparse
import copy
import csv
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.checkpoint.builtin_models import MLP
from ewc_finetune.data.domain import Domain, as_domain
from ewc_finetune.data.sources import load_domain

DOMAINS = {"Fashion-MNIST": "fmnist", "permuted": "mnist?permute=1", "turned by 60 degrees": "mnist?rotate=60"}
GRID_ROW = "best of the grid"
GRID = (1, 3, 10, 30, 60, 100, 200, 300, 600, 1_000, 2_000, 3_000)


class Row(NamedTuple):
    """One fine-tune."""

    domain: str
    way: str
    strength: float
    kept: float
    learned: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="where MNIST and FashionMNIST lie (default: $EWC_FT_DATA)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""), help="folder")
    parser.add_argument("--quick", action="store_true", help="little data: shows that it runs, no result")
    options = parser.parse_args()
    epochs, grid, retain, limit = (1, GRID[::6], 0.5, 1_000) if options.quick else (4, GRID, 0.95, 10_000)

    def data(spec: str, split: str) -> Domain:
        cut = ("&" if "?" in spec else "?") + f"limit={limit}" if options.quick else ""
        return load_domain(spec + cut, split, options.data_dir)

    torch.manual_seed(0)
    start = MLP()
    old = data("mnist", "train")
    ewc.finetune(start, old, norm_stats="update", epochs=epochs, eval_on=[])
    anchor = ewc.consolidate(start, old, samples=limit, probe=limit // 10)
    small = ewc.consolidate(start, old, samples=limit, probe=64 if options.quick else 256)
    selected = as_domain(old.subset(range(limit)), "MNIST, training images")
    rows = []
    for title, spec in DOMAINS.items():
        common = {
            "anchors": anchor,
            "epochs": epochs,
            "eval_on": {"mnist": data("mnist", "test"), title: data(spec, "test")},
        }
        ways: list[tuple[str, float | str, dict[str, Any]]] = [
            ("plain", 0.0, {}),
            *((GRID_ROW, float(strength), {}) for strength in grid),
            ("auto, within 2%", "auto", {}),
            (f"auto, --retain {retain}", "auto", {"retain": retain}),
            ("auto, --select-on mnist", "auto", {"select_on": [selected]}),
            ("probe of 256 rehearsed", 0.0, {"anchors": small, "rehearse": ["probes"]}),
            ("probe of 256 rehearsed, default lambda", 10.0, {"anchors": small, "rehearse": ["probes"]}),
        ]
        for way, lambdas, more in ways:
            rows.append(Row(title, way, *adapt(copy.deepcopy(start), data(spec, "train"), lambdas, common | more)))
            print(", ".join(f"{x:.4g}" if isinstance(x, float) else x for x in rows[-1]), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "lambdas.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([Row._fields, *rows])
    table = make_table(rows)
    (options.output / "lambdas.md").write_text(table)
    print(f"\n{table}\nWritten to {options.output}")


def adapt(
    model: nn.Module, data: Domain, lambdas: float | str, options: dict[str, Any]
) -> tuple[float, float, float, float]:
    """Return the lambda, both accuracies, and the seconds."""
    begun = time.process_time()
    done = ewc.finetune(model, data, lambdas=lambdas, **options)
    kept, learned = (score.accuracy or 0.0 for score in done.after[:2])
    strength = lambdas if done.search is None else done.search.strength
    return float(strength), kept, learned, time.process_time() - begun


def make_table(rows: list[Row]) -> str:
    columns = ["new domain", "", "lambda", "MNIST", "new", "mean of both", "time, plain runs"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for title in DOMAINS:
        own = [row for row in rows if row.domain == title]
        plain, *others = own
        best = max((row for row in others if row.way == GRID_ROW), key=lambda row: row.kept + row.learned)
        for row in (plain, best, *(row for row in others if row.way != GRID_ROW)):
            lines.append(
                f"| {title} | {row.way} | {row.strength:.4g} | {row.kept:.3f} | {row.learned:.3f} | "
                f"{(row.kept + row.learned) / 2:.3f} | {row.seconds / plain.seconds:.1f} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
