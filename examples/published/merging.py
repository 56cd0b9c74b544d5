"""Two fine-tunes of one network as one: MNIST turned by 90 degrees, and Fashion-MNIST.

The four settings of kfac.py, three seeds each. The network is trained on MNIST; A is it, fine-tuned on MNIST turned by
90 degrees, and B on Fashion-MNIST. They are merged, without training, as the mean of their weights; by task arithmetic
(Ilharco et al. 2023, "Editing models with task arithmetic"); TIES (Yadav et al. 2023, "TIES-merging: resolving
interference when merging models"); RegMean (Jin et al. 2023, "Dataless knowledge fusion by merging weights of language
models"); and by their anchors, 1 to 1, as `merge --checkpoint` does. Anchors and RegMean see 10,000 samples of each.
The exact centres of K-FAC anchors, without damping, are what their stack pulls to.

    OMP_NUM_THREADS=1 python examples/published/merging.py --settings convolutional      about five minutes
    python examples/published/merging.py --quick                                       half a minute, to see it run

Writes a CSV for each setting, and of what is there merging.md, to --output (the folder merging beside this file). What
is in the CSV already is not run again.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from kfac import DIAGONAL, SAMPLES, SETTINGS
from mending import CURVATURES, anchor, data, network
from points import collect, means, parse_arguments
from torch import Tensor, nn

import ewc_finetune as ewc
from ewc_finetune.data.input_spec import InputSpec, feed
from ewc_finetune.data.sources import load_domain
from ewc_finetune.penalty.merged_model import merged_model
from ewc_finetune.progress import Silent

Weights = dict[str, Tensor]
# Task vectors are tried at these lengths; the best is taken, by the mean accuracy over the seeds on the test images.
SCALES = (0.3, 0.5, 1.0)
ARITHMETIC, TIES, REGMEAN = "task arithmetic", "TIES", "RegMean"
MERGED = {f"`merge`, {penalty}": penalty for penalty in CURVATURES}
EXACT = {f"exact centre, {penalty}": penalty for penalty in CURVATURES if penalty != DIAGONAL}
# The share of a task vector that TIES keeps, and what RegMean leaves of the Gram matrices beside their diagonals.
TRIMMED, OFF_DIAGONAL = 0.2, 0.9


class Point(NamedTuple):
    """One merged network: the method, the scale of its task vectors, and the accuracies on A's domain and B's."""

    method: str
    scale: float
    seed: int
    turned: float
    fashion: float


def main() -> None:
    options = parse_arguments(__doc__, Path(__file__).with_suffix(""))
    found = collect(Point, run_seed, options)
    table = table_of(found)
    (options.output / "merging.md").write_text(table)
    print(f"\n{table}")


def run_seed(name: str, seed: int, points: list[Point], options: argparse.Namespace) -> Iterator[Point]:
    """Train three networks, and merge two of them in every way that is not there yet."""
    done = {point.method for point in points}
    if {REGMEAN, *MERGED, *EXACT} <= done:
        return
    domains = ("turned", "fmnist")
    base = network(name, seed, "mnist", options)
    models = [network(name, seed, domain, options) for domain in domains]
    model = network(name, seed, "mnist", options)

    def point(method: str, weights: Weights, scale: float = 0.0) -> Point:
        # Running statistics are the base's, for they were frozen when it was fine-tuned.
        model.load_state_dict(weights, strict=False)
        scores = ewc.evaluate(model, [data(domain, options) for domain in domains], data_dir=options.data_dir)
        return Point(method, scale, seed, *(score.accuracy for score in scores))

    start, *ends = (dict(network.named_parameters()) for network in (base, *models))
    mean = {n: sum(weights[n].detach() for weights in ends) / len(ends) for n in start}
    if ARITHMETIC not in done:
        with torch.no_grad():
            for letter, weights in zip("AB", ends, strict=True):
                yield point(f"{letter} alone", weights)
            yield point("mean of the weights", mean)
            vectors = [{n: weights[n] - start[n] for n in start} for weights in ends]
            for method, direction in ((TIES, ties(vectors)), (ARITHMETIC, total(vectors))):
                for scale in SCALES:
                    yield point(method, {n: start[n] + scale * direction[n] for n in start}, scale)
    for method, penalty in (*MERGED.items(), *EXACT.items()):
        if method not in done:
            anchors = [anchor(one, of, penalty, seed, options) for one, of in zip(models, domains, strict=True)]
            exact = method in EXACT
            yield point(method, dict(ewc.merge(anchors).weights) if exact else merged_model(anchors, [1, 1], Silent()))
    if REGMEAN not in done:
        spec = InputSpec.read(anchor(base, "mnist", DIAGONAL, seed, options).provenance.input)
        grams = [grams_of(one, of, spec, options) for one, of in zip(models, domains, strict=True)]
        yield point(REGMEAN, mean | regmean(ends, grams))


def total(vectors: Sequence[Weights]) -> Weights:
    return {name: sum(vector[name] for vector in vectors) for name in vectors[0]}


def ties(vectors: Sequence[Weights]) -> Weights:
    """Trim each task vector to its largest numbers, elect a sign for each, and take the mean of those that have it."""
    trimmed = []
    for vector in vectors:
        sizes = torch.cat([part.abs().flatten() for part in vector.values()])
        least = sizes.topk(round(TRIMMED * len(sizes))).values[-1]
        trimmed.append({name: torch.where(part.abs() >= least, part, 0.0) for name, part in vector.items()})
    merged = {}
    for name, elected in total(trimmed).items():
        agreeing = [torch.where(vector[name] * elected > 0, vector[name], 0.0) for vector in trimmed]
        merged[name] = sum(agreeing) / sum((part != 0).float() for part in agreeing).clamp(min=1)
    return merged


def grams_of(model: nn.Module, domain: str, spec: InputSpec, options: argparse.Namespace) -> dict[str, Tensor]:
    """Return the Gram matrices of the inputs of every layer, by the name of the weight that they meet."""
    grams: dict[str, Tensor] = {}

    def watch(name: str, layer: nn.Module) -> None:
        def add(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            inputs = given[0].detach()
            if isinstance(layer, nn.Conv2d):
                inputs = nn.functional.unfold(inputs, layer.kernel_size, padding=layer.padding, stride=layer.stride).mT
            rows = inputs.flatten(0, -2).double()
            grams[name] = grams.get(name, 0.0) + rows.T @ rows

        layer.register_forward_pre_hook(add)

    watched = copy.deepcopy(model)
    for name, layer in watched.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            watch(f"{name}.weight", layer)
        elif isinstance(layer, nn.MultiheadAttention):
            watch(f"{name}.in_proj_weight", layer)
    samples = load_domain(data(domain, options), "train", options.data_dir)
    order = torch.randperm(samples.size, generator=torch.Generator().manual_seed(0))
    chosen = samples.subset(sorted(order[: 100 if options.quick else SAMPLES].tolist()))
    watched.eval()
    for inputs, _ in feed(chosen.batches(500), spec, watched, torch.device("cpu")):
        watched(inputs)
    return grams


def regmean(models: Sequence[Weights], grams: Sequence[dict[str, Tensor]]) -> Weights:
    """Return weights whose outputs are nearest to those of every model on its own inputs, layer by layer."""
    merged = {}
    for name in grams[0]:
        left, right = torch.zeros_like(grams[0][name]), 0.0
        for weights, known in zip(models, grams, strict=True):
            gram = OFF_DIAGONAL * known[name] + (1 - OFF_DIAGONAL) * known[name].diag().diag()
            left, right = left + gram, right + gram @ weights[name].detach().flatten(1).T.double()
        # Inputs that are always zero take nothing from any weight.
        solved = torch.linalg.lstsq(left, right, driver="gelsd").solution
        dead = left.diag() == 0
        solved[dead] = torch.stack([weights[name].detach().flatten(1).T[dead] for weights in models]).mean(0).double()
        merged[name] = solved.T.reshape(models[0][name].shape).float()
    return merged


def best(points: list[Point]) -> dict[str, tuple[float, float, float]]:
    """Mean accuracies over the seeds, in percent, and the scale, by method: that of the scale with the best mean."""
    found: dict[str, tuple[float, float, float]] = {}
    for (method, scale), scores in means(points).items():
        if method not in found or sum(scores) > sum(found[method][:2]):
            found[method] = (*scores, scale)
    return found


def table_of(found: dict[str, list[Point]]) -> str:
    """The accuracies on both domains and their mean, means over the seeds."""
    columns = {name: best(points) for name, points in found.items()}
    rows = ["| turned / Fashion: mean, % | " + " | ".join(SETTINGS[name].title for name in columns) + " |"]
    rows += ["|---|" + "---|" * len(columns)]
    for method in ("A alone", "B alone", "mean of the weights", ARITHMETIC, TIES, REGMEAN, *MERGED, *EXACT):
        cells = []
        for known in columns.values():
            if method not in known:
                cells.append("")
                continue
            turned, fashion, scale = known[method]
            at = f" (at {scale:g})" if scale else ""
            cells.append(f"{turned:.1f} / {fashion:.1f}: {(turned + fashion) / 2:.1f}{at}")
        rows.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()
