"""Several anchors as one: sums of their curvature, and what is known of them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ewc_finetune._version import __version__
from ewc_finetune.anchor import describe
from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.compatibility import check_together
from ewc_finetune.anchor.half_precision import Storage
from ewc_finetune.anchor.heads import foreign_head
from ewc_finetune.anchor.lineage import distinct
from ewc_finetune.anchor.probe_tensors import Probe, bytes_of, records_of
from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.curvature.importance import importance_by_layer
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.errors import AnchorMismatchError, NonFiniteError
from ewc_finetune.modules.precision import wide
from ewc_finetune.penalty.kronecker_sum import ITERATIONS, TOLERANCE, centre_of, distance
from ewc_finetune.penalty.quadratic import Quadratic, newest_whole, scaled
from ewc_finetune.progress import Progress
from ewc_finetune.storage.lazy_tensors import shapes_of


def centred(quadratic: Quadratic, anchors: Sequence[Anchor], progress: Progress) -> Quadratic:
    """Return the same quadratic with one centre for each layer: where its blocks together pull least.

    Raises:
        AnchorMismatchError: if the blocks of a layer are of other parameters, or one of them is under a diagonal too.
    """
    found = replace(quadratic, centre=dict(quadratic.centre), constant=dict(quadratic.constant), blocks=[])
    for weight, parts in _by_layer(quadratic.blocks).items():
        block = parts[-1][0]
        twice = [name for name in block.names if name in quadratic.curvature]
        if twice:
            raise AnchorMismatchError(
                f"{', '.join(twice)} is held by a K-FAC block in one anchor and by a diagonal in another, and no one "
                "anchor can hold it as both do. Stack them in finetune instead"
            )
        centre, constant, left = centre_of(parts)
        if left > TOLERANCE:
            progress.note(
                f"the centre of {block.layer} is not quite found: {left:.0e} of the pull is left after {ITERATIONS:,} "
                "steps, for its anchors hold some directions hardly at all"
            )
        shape = _newest(anchors, weight).shape
        for name, part in zip(block.names, block.split(centre.to(parts[-1][1].dtype), shape), strict=False):
            if part is not None and name not in found.centre:
                found.centre[name] = part
        if constant:
            found.constant[weight] = found.constant.get(weight, 0.0) + constant
        found.blocks.extend((part, centre[: len(own)]) for part, own in parts)
    return found


def sum_blocks(
    quadratic: Quadratic, sum_of_blocks: Callable[[Sequence[Block]], Block]
) -> tuple[Quadratic, dict[str, float]]:
    """Bring the blocks of each layer, which have one centre, together into one; and say how far each is off."""
    distances = {}
    merged = replace(quadratic, blocks=[])
    for parts in _by_layer(quadratic.blocks).values():
        blocks = [block for block, _ in parts]
        block = sum_of_blocks(blocks)
        distances[block.layer] = distance(block, blocks)
        merged.blocks.append((block, max((centre for _, centre in parts), key=len)))
    return merged, distances


def _by_layer(blocks: Sequence[tuple[Block, Tensor]]) -> dict[str, list[tuple[Block, Tensor]]]:
    """Return the blocks of each layer with their centres, by the name of its weight."""
    layers: dict[str, list[tuple[Block, Tensor]]] = {}
    for block, centre in blocks:
        layers.setdefault(block.weight, []).append((block, centre))
    return layers


def online_quadratic(anchors: Sequence[Anchor], lambdas: Sequence[float], growing: Collection[str]) -> Quadratic:
    """Sum the curvatures at the newest weights; `lambdas` say what is left of each. Accumulated in float64."""
    check_together(anchors, growing)
    running = Quadratic({}, {}, {})
    for name in dict.fromkeys(name for anchor in anchors for name in anchor.fisher):
        holding = [anchor for anchor in anchors if name in anchor.fisher]
        running.centre[name] = newest_whole(anchors, holding, name).weights[name]
        total = torch.zeros_like(running.centre[name], dtype=torch.float64)
        for anchor, lam in zip(anchors, lambdas, strict=True):
            if name in anchor.fisher:
                fisher = anchor.fisher[name].double()
                total[slice(len(fisher)) if name in growing else ...] += fisher * lam
        running.curvature[name] = total.float()
    for anchor, lam in zip(anchors, lambdas, strict=True):
        for block in anchor.blocks.values():
            for name in block.names:
                if name not in running.centre:
                    running.centre[name] = _newest(anchors, name)
            bias = None if block.bias is None else running.centre[block.bias]
            centre = wide(block.join(running.centre[block.weight], bias))[: block.output.size]
            running.blocks.append((scaled(block, lam), centre))
    return running


def _newest(anchors: Sequence[Anchor], name: str) -> Tensor:
    """Return the newest weights that have all rows of a parameter that any of the anchors holds."""
    return newest_whole(anchors, [anchor for anchor in anchors if name in anchor.held_shapes()], name).weights[name]


def check_sums(quadratic: Quadratic) -> None:
    """Refuse lambdas that float32 cannot hold, in which the file has them."""
    sums = [curvature.float() for curvature in quadratic.curvature.values()]
    traces = [block.trace for block, _ in quadratic.blocks]
    if not all(map(math.isfinite, (*quadratic.constant.values(), *traces))) or not all(
        part.isfinite().all() for part in sums
    ):
        raise NonFiniteError("the sum of the curvatures is too large for its numbers; use smaller lambdas")
    if (sums or traces) and not any(part.any() for part in sums) and not any(traces):
        raise NonFiniteError("the sum of the curvatures is zero in its numbers; use larger lambdas")


def newest_alike(parents: Sequence[Anchor], weights: Mapping[str, Tensor]) -> Anchor:
    """Return the newest parent whose weights have the shapes of the merged ones, and so the same architecture."""
    shapes = shapes_of(weights)
    head = parents[-1].provenance.head
    for parent in reversed(parents):
        own, foreign = shapes_of(parent.weights), foreign_head(parent, head)
        for name, shape in shapes.items():
            if name not in foreign and tuple(own.get(name, shape)) > tuple(shape):
                raise AnchorMismatchError(
                    f"{name} has shape {tuple(own[name])} in {parent.label}, which does not hold it, and "
                    f"{tuple(shape)} where it is held: some of its rows would be lost. Consolidate that checkpoint "
                    "without excluding it"
                )
    fitting = [p for p in parents if all(shapes_of(p.weights).get(n, shape) == shape for n, shape in shapes.items())]
    return fitting[-1] if fitting else parents[-1]


def merged_weights(anchors: Sequence[Anchor], quadratic: Quadratic) -> dict[str, Tensor]:
    """Return the centre, and for parameters without curvature the newest weights there are."""
    weights: dict[str, Tensor] = {}
    for anchor in reversed(anchors):
        for name in anchor.weights:
            if name not in weights:
                weights[name] = quadratic.centre[name] if name in quadratic.centre else anchor.weights[name]
    return of_one_width(weights, quadratic)


def of_one_width(tensors: Mapping[str, Tensor], quadratic: Quadratic) -> dict[str, Tensor]:
    """Bring half-precision tensors to float32 where the centre is: a model computes in one precision."""
    narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in quadratic.centre.values())
    return dict(tensors) if narrow else {name: wide(tensor) for name, tensor in tensors.items()}


def merged_provenance(
    anchors: Sequence[Anchor],
    lambdas: Sequence[float],
    quadratic: Quadratic,
    name: str | None,
    how: Mapping[str, Any],
    newest: Provenance,
    storage: Storage | None,
) -> Provenance:
    """Return what is known of the merged anchor, by its parents."""
    origins = [anchor.provenance for anchor in anchors]
    held = {*quadratic.curvature, *quadratic.centre}
    reasons = {n: reason for origin in origins for n, reason in origin.excluded.items() if n not in held}
    every = [entry for origin in origins for entry in origin.lineage]
    estimators = {origin.estimator for origin in origins}
    curvatures = {origin.curvature for origin in origins}
    parents: list[dict[str, Any]] = []
    through: list[str | None] = []
    for anchor, lam in zip(anchors, lambdas, strict=True):
        before = anchor.provenance.merged
        if before is None:
            place = {} if anchor.place is None else {"hub": str(anchor.place)}
            parents.append({"sha256": anchor.digest, "lambda": lam, "provenance": _known_of(anchor), **place})
        else:  # its parents take its place, so that what is known doesn't nest
            parents += [{**parent, "lambda": parent["lambda"] * lam} for parent in before["parents"]]
            through += [*before.get("through", ()), anchor.digest]
    merged: dict[str, Any] = {
        **how,
        "parents": parents,
        "through": [digest for digest in through if digest is not None],
    }
    return Provenance(
        name=name or "+".join(origin.name for origin in origins),
        versions={"ewc_finetune": __version__, "torch": torch.__version__},
        checkpoint={
            "file": None,
            "sha256": None,
            "format": newest.checkpoint.get("format"),
            "architecture": newest.checkpoint.get("architecture"),
        },
        likelihood=newest.likelihood,
        estimator=estimators.pop() if len(estimators) == 1 else "mixed",
        samples=sum(origin.samples for origin in origins),
        curvature=curvatures.pop() if len(curvatures) == 1 else "kfac" if quadratic.blocks else "diagonal",
        constant=quadratic.constant,
        merged=merged,
        importance=_importance(quadratic, newest),
        excluded=reasons,
        normalisation=newest.normalisation,
        lineage=distinct(every),
        head=newest.head,
        input=newest.input,
        classes=newest.classes,
        curvature_storage=None if storage is None else storage.to_json(),
    )


def _known_of(anchor: Anchor) -> dict[str, Any]:
    """Return the provenance of a parent, but for its probes and where its weights were, which are not its own now."""
    return replace(anchor.provenance, probes=[], weights_reference=None).to_json()


def joined_probes(anchors: Sequence[Anchor], progress: Progress) -> tuple[Probe, ...]:
    """Return the probes of the anchors that have the newest one's head: of the others' heads nothing is left."""
    probes: list[Probe] = []
    for anchor in anchors:
        own = zip(records_of(anchor.probes), bytes_of(anchor.probes), strict=True)
        if foreign_head(anchor, anchors[-1].provenance.head):
            for record, size in own:
                progress.note(
                    f"{anchor.label} holds {describe.probe(record, size)}; they are left out, for the merged anchor "
                    "has another last layer"
                )
            continue
        for record, size in own:
            progress.note(f"the merged anchor holds {describe.probe(record, size)}: whoever has the anchor has them")
        probes += anchor.probes
    return tuple(probes)


def _importance(quadratic: Quadratic, newest: Provenance) -> list[dict[str, Any]]:
    """Return the importance of each layer, in the order that the newest parent has them in."""
    order = {layer["layer"]: number for number, layer in enumerate(newest.importance)}
    blocks = [block for block, _ in quadratic.blocks]
    layers = [asdict(layer) for layer in importance_by_layer(quadratic.curvature, blocks)]
    return sorted(layers, key=lambda layer: order.get(layer["layer"], len(order)))
