"""`merge`: write a stack of anchors as one anchor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune._version import __version__
from ewc_finetune.anchor import Anchor, validate
from ewc_finetune.block_sum import centre_of, distance, sum_of
from ewc_finetune.checkpoint.checkpoint import Record, check_ending, cpu_state
from ewc_finetune.checkpoint.from_anchor import FromAnchor
from ewc_finetune.checkpoint.opening import open_checkpoint
from ewc_finetune.choices import (
    CURVATURE_DTYPES,
    KFAC_DTYPES,
    KFAC_SUMS,
    LINEAGES,
    MERGED_HEADS,
    CurvatureDtype,
    KfacDtype,
    KfacSum,
    Lineage,
    MergedHead,
    check_choice,
)
from ewc_finetune.curvature.importance import importance_by_layer
from ewc_finetune.curvature.storage import Storage, rounded
from ewc_finetune.errors import AnchorMismatchError, Mistakes, NonFiniteError, StorageError, UsageError
from ewc_finetune.files import atomic_writes, check_output, storage_errors
from ewc_finetune.kronecker import Block, Rank, check_rank
from ewc_finetune.precision import wide
from ewc_finetune.probe_file import Probe, bytes_of, describe, records_of
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.provenance import Provenance
from ewc_finetune.stack import (
    Quadratic,
    check_together,
    collapse,
    distinct,
    foreign_head,
    grown_parameters,
    lineage_of,
    newest_whole,
    of_one_head,
    remarks,
    scaled,
    spread_lambdas,
)
from ewc_finetune.tensor_file import shapes_of
from ewc_finetune.verbs.idle import MERGE, say_idle

# By how much of the sum a block must be off for it to be said.
_NOTED = 0.005


def merge(
    anchors: Anchor | str | Path | Sequence[Anchor | str | Path],
    *,
    lambdas: float | Sequence[float] = 1.0,
    online: bool = False,
    gamma: float = 1.0,
    lineage: Lineage = "all",
    head: MergedHead = "shared",
    kfac_sum: KfacSum = "factors",
    kfac_rank: Rank = "auto",
    kfac_dtype: KfacDtype = "float16",
    curvature_dtype: CurvatureDtype = "float32",
    probes: bool = True,
    name: str | None = None,
    output: str | Path | None = None,
    checkpoint: str | Path | None = None,
    architecture: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Anchor:
    """Make one anchor of several: under any lambda it pulls as they would together, each under its share of it.

    Offline (the default) this is exact: `F = sum_k lambda_k F_k`, and the centre is the mean of the parents' weights,
    each weighted by its lambda F (Matena and Raffel 2022, "Merging models with Fisher-weighted averaging"). Where no
    parent has curvature the newest one's weights are kept, and its buffers. Files are read a tensor at a time.

    K-FAC blocks are merged into one for each layer, read all together. Their centre is where all of them together pull
    least, to a millionth; their sum is no such block, so that another stands in for it (`kfac_sum`), and the merged
    anchor does not pull quite as they would. How far that block is off, as it is stored, is said and recorded.

    Args:
        anchors: Anchors or their files, oldest first; a merged one is an anchor like any other.
        lambdas: One for all or one for each, relative to each other: the merged anchor gets a lambda when it is used.
        online: Take the running form instead: `F <- gamma F + lambda_k F_k` from the oldest to the newest, with the
            newest one's weights for the centre (Schwarz et al. 2018, "Progress & compress").
        gamma: How much of the older curvature stays at each newer anchor, 0 to 1; `online` alone.
        lineage: See `collapse`; offline alone.
        head: `expand` for anchors of which the last layer got more outputs from one to the next: those of fewer
            outputs hold the first ones. What one anchor alone knows of a layer that was replaced is left out anyway.
        kfac_sum: The block for a sum of blocks: that of weighted sums of the `factors`, which keeps the trace, or the
            `nearest` by the Frobenius norm, which may let a small anchor go (see `block_sum.sum_of`).
        kfac_rank: What is kept of its factors, as in `consolidate`, whatever was kept of the parents'.
        kfac_dtype: Likewise, in which precision.
        curvature_dtype: In which the diagonal is stored, as in `consolidate`, whatever the parents' is.
        probes: Whether to keep the parents' probes, the samples of data in them; those of a parent with another last
            layer than the newest are left out anyway.
        name: What to call it; the parents' names joined by `+` unless given.
        output: File to save the anchor to; not saved unless given.
        checkpoint: File to write the centre to as a model, in the format of the newest parent's checkpoint.
        architecture: What to build for that model; what the newest parent carries unless given.
        overwrite: Whether existing files may be replaced.
        progress: Told what happens.

    Returns:
        The merged anchor, on the CPU.

    Raises:
        EwcError: naming what is wrong with an option, an anchor or a file.
    """
    options = locals()
    progress = progress or Silent()
    check_choice("lineage", lineage, LINEAGES)
    check_choice("head", head, MERGED_HEADS)
    check_choice("kfac sum", kfac_sum, KFAC_SUMS)
    check_rank(kfac_rank)
    check_choice("kfac dtype", kfac_dtype, KFAC_DTYPES)
    check_choice("curvature dtype", curvature_dtype, CURVATURE_DTYPES)
    given = [anchors] if isinstance(anchors, (Anchor, str, Path)) else list(anchors)
    if not given:
        raise UsageError("there is nothing to merge; name one anchor or more")
    mistakes = Mistakes()
    with mistakes.noted():
        _check_form(online, gamma, lineage)
        if architecture is not None and checkpoint is None:
            raise UsageError(
                "an architecture is for the checkpoint, and none is to be written; name one with --checkpoint"
            )
    with mistakes.noted():
        strengths = _strengths(lambdas, len(given))
    with mistakes.noted():
        _check_outputs([output, checkpoint], overwrite, given, progress)
    parents = []
    for anchor in given:
        with mistakes.noted():
            parents.append(anchor if isinstance(anchor, Anchor) else Anchor.open(anchor))
    mistakes.check()
    say_idle(merge, MERGE, {**options, "anchors": given}, progress)
    for remark in [r for parent in parents for r in parent.remarks] + remarks(parents, "latest" if online else lineage):
        progress.note(remark)
    if online:
        # What the older ones keep when all of them have faded.
        strengths = [lam * gamma ** (len(parents) - 1 - k) for k, lam in enumerate(strengths)]
    used = [(parent, lam) for parent, lam in zip(parents, strengths, strict=True) if lam > 0]
    parents, strengths = [parent for parent, _ in used], [lam for _, lam in used]
    if (kfac_sum, kfac_rank, kfac_dtype) != ("factors", "auto", "float16") and not any(p.blocks for p in parents):
        raise UsageError("no anchor has K-FAC blocks, which kfac sum, rank and dtype are for; leave them away")
    growing = grown_parameters(parents) if head == "expand" else set()
    alike = of_one_head(parents, parents[-1].provenance.head)
    quadratic = _online(alike, strengths, growing) if online else collapse(alike, strengths, lineage, growing=growing)
    quadratic, distances = _sum_blocks(
        quadratic, alike, lambda blocks: sum_of(blocks, kfac_sum).stored(kfac_rank, kfac_dtype)
    )
    _check_sums(quadratic)
    if any(off >= _NOTED for off in distances.values()):
        worst = max(distances, key=distances.__getitem__)
        progress.note(
            f"the blocks that stand for sums ({kfac_sum}) are off by up to {distances[worst]:.0%} ({worst}; Frobenius "
            "norm, relative to the sum's)"
        )
    curvature, storage = rounded({n: value.float() for n, value in quadratic.curvature.items()}, curvature_dtype)
    quadratic = replace(quadratic, curvature=curvature)
    if storage is not None:
        progress.note(storage.sentence)
    weights = _weights(parents, quadratic)
    merged = Anchor(
        weights=weights,
        fisher=quadratic.curvature,
        buffers=_of_one_width(parents[-1].buffers, quadratic),
        provenance=_provenance(
            parents,
            strengths,
            quadratic,
            name,
            {
                "form": "online" if online else "offline",
                "gamma": gamma if online else None,
                "lineage": None if online else lineage,
                "kfac_sum": kfac_sum if quadratic.blocks else None,
                "kfac_distance": distances,
            },
            _alike(parents, weights).provenance,
            storage,
        ),
        blocks={block.layer: block for block, _ in quadratic.blocks},
        probes=_probes(parents, progress) if probes else (),
    )
    validate(merged)
    model = None if checkpoint is None else _model(merged, parents, strengths, architecture, Path(checkpoint))
    paths = [Path(path) for path in (output, checkpoint) if path is not None]
    with atomic_writes(paths, overwrite=overwrite) as temporaries:
        if output is not None:
            with storage_errors(paths[0]):
                merged = merged.write(temporaries[0], paths[0])
        if model is not None:
            with storage_errors(paths[-1]):
                source, module, record = model
                source.write(temporaries[-1], paths[-1], cpu_state(module), record)
    if checkpoint is not None:
        progress.note(f"{checkpoint}: the centre of the stack as a model, with the buffers of {parents[-1].label}")
    return merged


def _strengths(lambdas: float | Sequence[float], anchors: int) -> list[float]:
    found = spread_lambdas(lambdas, anchors)
    if not any(found):
        raise UsageError("every lambda is 0, so nothing would be left")
    return found


def _check_form(online: bool, gamma: float, lineage: Lineage) -> None:
    if not 0 <= gamma <= 1:
        raise UsageError(f"gamma is {gamma}; expected 0 to 1")
    if gamma != 1 and not online:
        raise UsageError("gamma belongs to the online form; add --online (online=True)")
    if online and lineage != "all":
        raise UsageError("the online form pulls to the newest weights as it is; lineage belongs to the offline one")


def _sum_blocks(
    quadratic: Quadratic, anchors: Sequence[Anchor], sum_of_blocks: Callable[[Sequence[Block]], Block]
) -> tuple[Quadratic, dict[str, float]]:
    """Bring the blocks of each layer together into one, with the centre of all of them; and say how far each is off."""
    distances = {}
    layers: dict[str, list[tuple[Block, Tensor]]] = {}
    for block, centre in quadratic.blocks:
        layers.setdefault(block.weight, []).append((block, centre))
    found = replace(quadratic, centre=dict(quadratic.centre), constant=dict(quadratic.constant), blocks=[])
    for weight, parts in layers.items():
        summed = [block for block, _ in parts]
        block = sum_of_blocks(summed)
        distances[block.layer] = distance(block, summed)
        twice = [name for name in block.names if name in quadratic.curvature]
        if twice:
            raise AnchorMismatchError(
                f"{', '.join(twice)} is held by a K-FAC block in one anchor and by a diagonal in another, and no one "
                "anchor can hold it as both do. Stack them in finetune instead"
            )
        centre, constant = centre_of(parts)
        shape = _newest(anchors, weight).shape
        for name, part in zip(block.names, block.split(centre.to(parts[-1][1].dtype), shape), strict=False):
            if part is not None and name not in found.centre:
                found.centre[name] = part
        if constant:
            found.constant[weight] = found.constant.get(weight, 0.0) + constant
        found.blocks.append((block, centre))
    return found, distances


def _check_outputs(
    outputs: Sequence[str | Path | None], overwrite: bool, anchors: Sequence[Anchor | str | Path], progress: Progress
) -> None:
    written = [Path(path) for path in outputs if path is not None]
    sources = [item.path if isinstance(item, Anchor) else item for item in anchors]
    for path in written:
        check_output(path, overwrite, sources, note=progress.note)
    if outputs[0] is not None and Path(outputs[0]).suffix in (".pt", ".pth", ".ckpt", ".bin"):
        raise UsageError(f"the output {outputs[0]} is an anchor, named as a checkpoint; let it end in .safetensors")
    if len({path.resolve() for path in written}) < len(written):
        raise StorageError(f"the anchor and the checkpoint cannot both be {written[0]}")


def _online(anchors: Sequence[Anchor], lambdas: Sequence[float], growing: Collection[str]) -> Quadratic:
    """Sum the curvatures at the newest weights; `lambdas` say what is left of each. Accumulated in float64."""
    check_together(anchors, growing)
    found = Quadratic({}, {}, {})
    for name in dict.fromkeys(name for anchor in anchors for name in anchor.fisher):
        holding = [anchor for anchor in anchors if name in anchor.fisher]
        found.centre[name] = newest_whole(anchors, holding, name).weights[name]
        total = torch.zeros_like(found.centre[name], dtype=torch.float64)
        for anchor, lam in zip(anchors, lambdas, strict=True):
            if name in anchor.fisher:
                fisher = anchor.fisher[name].double()
                total[slice(len(fisher)) if name in growing else ...] += fisher * lam
        found.curvature[name] = total.float()
    for anchor, lam in zip(anchors, lambdas, strict=True):
        for block in anchor.blocks.values():
            for name in block.names:
                if name not in found.centre:
                    found.centre[name] = _newest(anchors, name)
            bias = None if block.bias is None else found.centre[block.bias]
            centre = wide(block.join(found.centre[block.weight], bias))[: block.output.size]
            found.blocks.append((scaled(block, lam), centre))
    return found


def _newest(anchors: Sequence[Anchor], name: str) -> Tensor:
    """Return the newest weights that have all rows of a parameter that any of the anchors holds."""
    return newest_whole(anchors, [anchor for anchor in anchors if name in anchor.held_shapes()], name).weights[name]


def _check_sums(quadratic: Quadratic) -> None:
    """Refuse lambdas that float32 cannot hold, in which the file has them."""
    sums = [curvature.float() for curvature in quadratic.curvature.values()]
    traces = [block.trace for block, _ in quadratic.blocks]
    if not all(map(math.isfinite, (*quadratic.constant.values(), *traces))) or not all(
        part.isfinite().all() for part in sums
    ):
        raise NonFiniteError("the sum of the curvatures is too large for its numbers; use smaller lambdas")
    if (sums or traces) and not any(part.any() for part in sums) and not any(traces):
        raise NonFiniteError("the sum of the curvatures is zero in its numbers; use larger lambdas")


def _alike(parents: Sequence[Anchor], weights: Mapping[str, Tensor]) -> Anchor:
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


def _weights(anchors: Sequence[Anchor], quadratic: Quadratic) -> dict[str, Tensor]:
    """Return the centre, and for parameters without curvature the newest weights there are."""
    found: dict[str, Tensor] = {}
    for anchor in reversed(anchors):
        for name in anchor.weights:
            if name not in found:
                found[name] = quadratic.centre[name] if name in quadratic.centre else anchor.weights[name]
    return _of_one_width(found, quadratic)


def _of_one_width(tensors: Mapping[str, Tensor], quadratic: Quadratic) -> dict[str, Tensor]:
    """Bring half-precision tensors to float32 where the centre is: a model computes in one precision."""
    narrow = any(t.dtype in (torch.float16, torch.bfloat16) for t in quadratic.centre.values())
    return dict(tensors) if narrow else {name: wide(tensor) for name, tensor in tensors.items()}


def _provenance(
    anchors: Sequence[Anchor],
    lambdas: Sequence[float],
    quadratic: Quadratic,
    name: str | None,
    how: Mapping[str, Any],
    newest: Provenance,
    storage: Storage | None,
) -> Provenance:
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


def _probes(anchors: Sequence[Anchor], progress: Progress) -> tuple[Probe, ...]:
    """Return the probes of the anchors that have the newest one's head: of the others' heads nothing is left."""
    found: list[Probe] = []
    for anchor in anchors:
        own = zip(records_of(anchor.probes), bytes_of(anchor.probes), strict=True)
        if foreign_head(anchor, anchors[-1].provenance.head):
            for record, size in own:
                progress.note(
                    f"{anchor.label} holds {describe(record, size)}; they are left out, for the merged anchor has "
                    "another last layer"
                )
            continue
        for record, size in own:
            progress.note(f"the merged anchor holds {describe(record, size)}: whoever has the anchor has them")
        found += anchor.probes
    return tuple(found)


def _importance(quadratic: Quadratic, newest: Provenance) -> list[dict[str, Any]]:
    """Return the importance of each layer, in the order that the newest parent has them in."""
    order = {layer["layer"]: number for number, layer in enumerate(newest.importance)}
    blocks = [block for block, _ in quadratic.blocks]
    found = [asdict(layer) for layer in importance_by_layer(quadratic.curvature, blocks)]
    return sorted(found, key=lambda layer: order.get(layer["layer"], len(order)))


def _model(
    merged: Anchor, parents: Sequence[Anchor], lambdas: Sequence[float], architecture: str | None, path: Path
) -> tuple[FromAnchor, nn.Module, Record]:
    """Return the centre as a model, each tensor in the dtype that the newest parent has it in, and its record."""
    newest = {**parents[-1].weights, **parents[-1].buffers}
    weights, buffers = (
        {name: t.to(newest[name].dtype) if name in newest else t for name, t in part.items()}
        for part in (merged.weights, merged.buffers)
    )
    found = FromAnchor(replace(merged, weights=weights, buffers=buffers))
    check_ending(path, found.format, found.ending)
    opened = open_checkpoint(found, architecture)
    return found, opened.model, replace(opened.record, lineage=lineage_of(parents, lambdas))
