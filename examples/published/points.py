"""Points of an experiment on the settings of kfac.py: three seeds each, kept in a CSV, so that none is run twice.

A point is a NamedTuple that ends with its seed and two accuracies; what stands before them says which run it was.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from kfac import SETTINGS

P = TypeVar("P", bound=NamedTuple)


def parse_arguments(about: str | None, folder: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS), help="which of them (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a network each (0 1 2)")
    parser.add_argument("--data-dir", type=Path, help="where MNIST and FashionMNIST lie (default: $EWC_FT_DATA)")
    parser.add_argument("--output", type=Path, default=folder, help="folder")
    parser.add_argument("--work", type=Path, help="folder that keeps trained networks for another run (default: none)")
    parser.add_argument("--quick", action="store_true", help="little data, one seed: shows that it runs, no result")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.quick:
        options.seeds = options.seeds[:1]
    return options


def collect(
    kind: type[P],
    run_seed: Callable[[str, int, list[P], argparse.Namespace], Iterator[P]],
    options: argparse.Namespace,
) -> dict[str, list[P]]:
    """Run what is not there yet, write each point as it comes, and return all that is there, by setting."""
    for name in options.settings:
        path = options.output / f"{name}.csv"
        points = read(kind, path)
        for seed in options.seeds:
            for point in run_seed(name, seed, [point for point in points if point[-3] == seed], options):
                print(f"{name}: {point}", flush=True)
                points.append(point)
                with path.open("w", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([kind._fields, *points])
    return {name: points for name in SETTINGS if (points := read(kind, options.output / f"{name}.csv"))}


def read(kind: type[P], path: Path) -> list[P]:
    """Read the points of a setting; none if it has not been run."""
    if not path.is_file():
        return []
    fields = get_type_hints(kind)
    with path.open(newline="") as file:
        return [
            kind(*(text == "True" if fields[name] is bool else fields[name](text) for name, text in row.items()))
            for row in csv.DictReader(file)
        ]


def means(points: list[P]) -> dict[tuple[Any, ...], tuple[float, float]]:
    """Means of both accuracies over the seeds, in percent, by what stands before them."""
    groups: dict[tuple[Any, ...], list[P]] = {}
    for point in points:
        groups.setdefault(point[:-3], []).append(point)
    return {
        key: (100 * statistics.mean(p[-2] for p in group), 100 * statistics.mean(p[-1] for p in group))
        for key, group in groups.items()
    }
