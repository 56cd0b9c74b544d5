"""`merge`: write a stack of anchors as one anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from ewc_finetune.anchor.anchor import Anchor, validate
from ewc_finetune.anchor.compatibility import grown_parameters, remarks
from ewc_finetune.anchor.half_precision import rounded
from ewc_finetune.anchor.heads import of_one_head
from ewc_finetune.anchor.lineage import lineage_of
from ewc_finetune.checkpoint.checkpoint import Record, check_ending, cpu_state
from ewc_finetune.checkpoint.formats.from_anchor import FromAnchor
from ewc_finetune.checkpoint.open import open_checkpoint
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
from ewc_finetune.curvature.kronecker_factors import Rank, check_rank
from ewc_finetune.errors import Mistakes, StorageError, UsageError
from ewc_finetune.penalty.kronecker_sum import sum_of
from ewc_finetune.penalty.merging import (
    check_sums,
    joined_probes,
    merged_provenance,
    merged_weights,
    newest_alike,
    of_one_width,
    online_quadratic,
    sum_blocks,
)
from ewc_finetune.penalty.quadratic import collapse, spread_lambdas
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.runs.idle import MERGE, say_idle
from ewc_finetune.storage.atomic import atomic_writes, check_output, storage_errors

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
    quadratic = (
        online_quadratic(alike, strengths, growing) if online else collapse(alike, strengths, lineage, growing=growing)
    )
    quadratic, distances = sum_blocks(
        quadratic, alike, lambda blocks: sum_of(blocks, kfac_sum).stored(kfac_rank, kfac_dtype)
    )
    check_sums(quadratic)
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
    weights = merged_weights(parents, quadratic)
    merged = Anchor(
        weights=weights,
        fisher=quadratic.curvature,
        buffers=of_one_width(parents[-1].buffers, quadratic),
        provenance=merged_provenance(
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
            newest_alike(parents, weights).provenance,
            storage,
        ),
        blocks={block.layer: block for block, _ in quadratic.blocks},
        probes=joined_probes(parents, progress) if probes else (),
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
