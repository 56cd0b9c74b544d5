"""What permuted_mnist.py and split_mnist.py share: tasks learned in turn, by each method."""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.data.sources import load_domain


class Task(NamedTuple):
    """One domain of a sequence, made when it is asked for: fifty do not fit into memory."""

    train: Callable[[], TensorDataset]
    test: Callable[[], TensorDataset]


class Method(NamedTuple):
    """A way to learn tasks in turn.

    Attributes:
        name: What to call it.
        strength: Lambda of every anchor; 0 is plain training.
        curvature: `diagonal` (EWC), `kfac` (K-FAC) or `identity` (L2).
        form: Of the penalty, `gradient` or `proximal`.
        online: Whether the anchors are merged into a running one, or stacked.
        gamma: What stays of the older curvature; online alone.
        kfac_sum: How blocks are merged; online alone.
        rehearsed: Inputs of each earlier task that are rehearsed.
    """

    name: str
    strength: float
    curvature: str = "diagonal"
    form: str = "gradient"
    online: bool = False
    gamma: float = 1.0
    kfac_sum: str = "factors"
    rehearsed: int = 0

    @classmethod
    def named(cls, name: str, strength: float, rehearsed: int = 0) -> Method:
        """Return the method that a name stands for: `plain`, `L2`, `EWC` or `K-FAC`, and `online`, `proximal`, ...

        `rehearsed` is how many inputs are, of a method whose name says `rehearsal`.
        """
        kind, *words = name.replace(",", "").split()
        return cls(
            name,
            strength,
            curvature={"L2": "identity", "rehearsal": "identity", "K-FAC": "kfac"}.get(kind, "diagonal"),
            form="proximal" if "proximal" in words else "gradient",
            online="online" in words,
            kfac_sum="nearest" if "nearest" in words else "factors",
            rehearsed=rehearsed if "rehearsal" in name else 0,
        )


class Result(NamedTuple):
    """What one run found, a row of the CSV.

    Attributes:
        setting: Which experiment.
        method: Name of the method.
        strength: Its lambda.
        seed: Of the network and the order of samples.
        means: Mean accuracy over the tasks so far, after each task.
        last: Accuracy on each task at the end.
    """

    setting: str
    method: str
    strength: float
    seed: int
    means: list[float]
    last: list[float]


def parse_arguments(script: str, doc: str | None, samples: int, settings: Sequence[str]) -> argparse.Namespace:
    """Read the options of an example; `samples` is the default for each task's Fisher."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=settings, default=list(settings), help="which of them (all)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a network each (0 1 2)")
    parser.add_argument("--samples", type=int, default=samples, help=f"of each task's Fisher ({samples:,})")
    parser.add_argument("--data-dir", type=Path, help="where MNIST lies (default: $EWC_FT_DATA)")
    parser.add_argument("--output", type=Path, default=Path(script).with_suffix(""), help="folder")
    parser.add_argument("--quick", action="store_true", help="little data, one seed: shows that it runs, no result")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.samples = [0], 20
    return options


def images(data: str, split: str, folder: Path | None) -> tuple[Tensor, Tensor]:
    """Return images between 0 and 1, shape `(samples, 1, 28, 28)`, and labels."""
    inputs, labels = load_domain(data, split, folder).samples.tensors
    return inputs.float() / 255, labels


def learn_in_turn(
    model: nn.Module,
    tasks: Sequence[Task],
    method: Method,
    *,
    samples: int,
    select: Callable[[int], None] = lambda _: None,
    cooling: Mapping[str, object] | None = None,
    **training: object,
) -> list[list[float]]:
    """Learn the tasks one after another and return, after each, the accuracy on all so far.

    Args:
        model: Trained in place.
        tasks: In their order.
        method: How the earlier ones are kept.
        samples: Of each task's Fisher.
        select: Called with a task's number before the model is used on it.
        cooling: What is otherwise in a second round of training on each task.
        training: Passed to `ewc_finetune.finetune`.
    """
    anchors: list[ewc.Anchor] = []
    accuracy = []
    for number, task in enumerate(tasks):
        select(number)
        held = {"anchors": anchors, "lambdas": method.strength, "penalty_form": method.form}
        if method.rehearsed and anchors:
            held["rehearse"] = ["probes"]
        train = task.train()
        for options in (training,) if cooling is None else (training, {**training, **cooling}):
            ewc.finetune(model, train, eval_on=[], **held, **options)
        if (method.strength or method.rehearsed) and number + 1 < len(tasks):
            fisher = {} if method.curvature == "identity" else {"samples": samples, "estimator": "exact"}
            # Of a probe of this size a quarter, at least 16, is not rehearsed but measured.
            probe = max(method.rehearsed + 16, method.rehearsed * 4 // 3) if method.rehearsed else 0
            anchor = ewc.consolidate(model, train, curvature=method.curvature, probe=probe, **fisher)
            if method.online and anchors:
                how = {"kfac_sum": method.kfac_sum} if method.curvature == "kfac" else {}
                anchors = [ewc.merge([*anchors, anchor], online=True, gamma=method.gamma, **how)]
            else:
                anchors.append(anchor)
        row = []
        for earlier, other in enumerate(tasks[: number + 1]):
            select(earlier)
            (score,) = ewc.evaluate(model, {"task": other.test()})
            row.append(score.accuracy)
        accuracy.append(row)
    return accuracy


def search(
    setting: str,
    ranges: dict[str, Sequence[float]],
    seeds: Sequence[int],
    run: Callable[[Method, int], list[list[float]]],
    known: Sequence[Result] = (),
    rehearsed: int = 0,
) -> Iterator[Result]:
    """Run each method under every lambda of its range on the first seed, and under the best of them on the others.

    Args:
        setting: Which experiment.
        ranges: Lambdas by the method's name (`Method.named`).
        seeds: One or more.
        run: Gives the accuracies of a method with a seed.
        known: What need not be run again.
        rehearsed: See `Method.named`.
    """
    done = {result[:4]: result for result in known}

    for name, lambdas in ranges.items():

        def result(strength: float, seed: int, name: str = name) -> Result:
            found = done.get((setting, name, strength, seed))
            if found is None:
                rows = run(Method.named(name, strength, rehearsed), seed)
                found = Result(setting, name, strength, seed, [statistics.mean(row) for row in rows], rows[-1])
            return found

        tried = []
        for strength in lambdas:
            tried.append(result(strength, seeds[0]))
            yield tried[-1]
        for seed in seeds[1:]:
            yield result(max(tried, key=lambda found: found.means[-1]).strength, seed)


def by_method(results: Sequence[Result], setting: str) -> dict[str, list[Result]]:
    """Return each method's runs under its best lambda on the first seed, by what to call them."""
    found = {}
    for name in dict.fromkeys(result.method for result in results if result.setting == setting):
        runs = [result for result in results if (result.setting, result.method) == (setting, name)]
        first = [result for result in runs if result.seed == runs[0].seed]
        best = max(first, key=lambda result: result.means[-1]).strength
        found[f"{name}, lambda {best:g}" if best else name] = [run for run in runs if run.strength == best]
    return found


def save_rows(results: Sequence[Result], path: Path) -> None:
    """Write a line for each run: the mean accuracy after each task, and the last accuracy on each."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["setting", "method", "lambda", "seed", "means after each task", "on each task at the end"])
        for r in results:
            means, last = (" ".join(f"{value:.4f}" for value in values) for values in (r.means, r.last))
            out.writerow([r.setting, r.method, f"{r.strength:g}", r.seed, means, last])


def read_rows(path: Path) -> list[Result]:
    """Read what `save_rows` wrote; nothing where there is nothing."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [
        Result(setting, method, float(strength), int(seed), *([float(v) for v in cell.split()] for cell in cells))
        for setting, method, strength, seed, *cells in rows
    ]


def spread(values: Sequence[float]) -> str:
    """A mean in percent, with the standard deviation where there are several."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return f"{mean} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else mean


def draw_means(panels: dict[str, dict[str, list[Result]]], path: Path) -> None:
    """Draw, for each setting, the mean accuracy after each task; a curve for each method, mean over its seeds."""
    figure = Figure(figsize=(4.2 * len(panels), 4.4), layout="constrained")
    for axes, (title, methods) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for label, results in methods.items():
            means = torch.tensor([result.means for result in results]).mean(dim=0) * 100
            axes.plot(range(1, len(means) + 1), means, marker="o", ms=4, label=label)
        axes.set(title=title, xlabel="tasks learned", ylabel="mean accuracy, %")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    figure.savefig(path, dpi=120)
