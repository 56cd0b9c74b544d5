"""`merge`: write a stack of anchors as one anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ewc_finetune.anchor.anchor import Anchor, validate
from ewc_finetune.anchor.compatibility import grown_parameters, remarks
from ewc_finetune.anchor.half_precision import Storage, rounded
from ewc_finetune.anchor.heads import of_one_head
from ewc_finetune.anchor.lineage import lineage_of
from ewc_finetune.checkpoint.checkpoint import ModelMetadata, check_ending, cpu_state
from ewc_finetune.checkpoint.formats.from_anchor import FromAnchor
from ewc_finetune.checkpoint.open import open_checkpoint
from ewc_finetune.choices import Lineage
from ewc_finetune.curvature.kronecker_factors import check_rank
from ewc_finetune.errors import Mistakes, UsageError
from ewc_finetune.penalty.kronecker_sum import sum_of
from ewc_finetune.penalty.merged_model import merged_model
from ewc_finetune.penalty.merging import (
    centred,
    check_sums,
    joined_probes,
    merged_provenance,
    merged_weights,
    newest_alike,
    of_one_width,
    online_quadratic,
    sum_blocks,
)
from ewc_finetune.penalty.options import MergeOptions
from ewc_finetune.penalty.quadratic import Quadratic, spread_lambdas, sum_quadratics
from ewc_finetune.progress import Progress
from ewc_finetune.runs.idle import MERGE, say_idle
from ewc_finetune.specs.options import check_declared, takes
from ewc_finetune.storage.atomic import atomic_writes, check_distinct, check_output, storage_errors

# A block that is off by this share of the sum, in the Frobenius norm, is worth a note.
_NOTED = 0.005


@takes(MergeOptions)
def merge(options: MergeOptions) -> Anchor:
    """Make one anchor of several: under any lambda it pulls as they would together, each under its share of it.

    Offline (the default) this is exact: `F = sum_k lambda_k F_k`, and the centre is the mean of the parents' weights,
    each weighted by its lambda F (Matena and Raffel 2022, "Merging models with Fisher-weighted averaging"). Where no
    parent has curvature the newest one's weights are kept, and its buffers. Files are read a tensor at a time.

    K-FAC blocks are merged into one for each layer, read all together. Their centre is where all of them together pull
    least, to a millionth; their sum is no such block, so that another stands in for it (`kfac_sum`), and the merged
    anchor does not pull quite as they would. How far that block is off, as it is stored, is said and recorded. The
    model that `checkpoint` names is not at that centre, but where damped blocks have theirs (`merged_model`).

    Args:
        options: The anchors, and by their names the others of `MergeOptions`.

    Returns:
        The merged anchor, on the CPU.

    Raises:
        EwcError: naming what is wrong with an option, an anchor or a file.
    """
    return run(plan(options))


@dataclass(frozen=True)
class MergePlan:
    """What a merge will do.

    Attributes:
        options: The options that the command was given.
        parents: The anchors that count, oldest first.
        strengths: The lambda of each.
    """

    options: MergeOptions
    parents: list[Anchor]
    strengths: list[float]

    @property
    def growing(self) -> set[str]:
        """The parameters that have got more rows from one parent to the next."""
        return grown_parameters(self.parents) if self.options.head == "expand" else set()

    @property
    def alike(self) -> list[Anchor]:
        """The parents without curvature of a head that the newest one has no more."""
        return of_one_head(self.parents, self.parents[-1].provenance.head)


def plan(options: MergeOptions) -> MergePlan:
    """Open and check everything that a merge takes.

    Raises:
        EwcError: naming what is wrong with an option, an anchor or a file.
    """
    check_declared(options)
    check_rank(options.kfac_rank)
    progress = options.progress
    given = [options.anchors] if isinstance(options.anchors, (Anchor, str, Path)) else list(options.anchors)
    if not given:
        raise UsageError("there is nothing to merge; name one anchor or more")
    mistakes = Mistakes()
    with mistakes.noted():
        _check_form(options.online, options.gamma, options.lineage)
        if options.architecture is not None and options.checkpoint is None:
            raise UsageError(
                "an architecture is for the checkpoint, and none is to be written; name one with --checkpoint"
            )
    with mistakes.noted():
        strengths = _strengths(options.lambdas, len(given))
    with mistakes.noted():
        _check_outputs([options.output, options.checkpoint], options.overwrite, given, progress)
    parents = []
    for anchor in given:
        with mistakes.noted():
            parents.append(anchor if isinstance(anchor, Anchor) else Anchor.open(anchor))
    mistakes.check()
    say_idle(options, MERGE, {}, progress)
    lineage = "latest" if options.online else options.lineage
    for remark in [r for parent in parents for r in parent.remarks] + remarks(parents, lineage):
        progress.note(remark)
    if options.online:
        # Each anchor has faded once for every newer one.
        strengths = [lam * options.gamma ** (len(parents) - 1 - k) for k, lam in enumerate(strengths)]
    used = [(parent, lam) for parent, lam in zip(parents, strengths, strict=True) if lam > 0]
    parents, strengths = [parent for parent, _ in used], [lam for _, lam in used]
    of_blocks = (options.kfac_sum, options.kfac_rank, options.kfac_dtype)
    if of_blocks != ("factors", "auto", "float16") and not any(p.blocks for p in parents):
        raise UsageError("no anchor has K-FAC blocks, which kfac sum, rank and dtype are for; leave them away")
    return MergePlan(options, parents, strengths)


def run(todo: MergePlan) -> Anchor:
    """Make one anchor of several, and write it.

    Raises:
        EwcError: if the anchors do not fit each other, or a file cannot be written.
    """
    options, parents, strengths = todo.options, todo.parents, todo.strengths
    quadratic, distances, storage = _summed(todo)
    weights = merged_weights(parents, quadratic)
    form = {
        "form": "online" if options.online else "offline",
        "gamma": options.gamma if options.online else None,
        "lineage": None if options.online else options.lineage,
        "kfac_sum": options.kfac_sum if quadratic.blocks else None,
        "kfac_distance": distances,
    }
    alike = newest_alike(parents, weights).provenance
    merged = Anchor(
        weights=weights,
        fisher=quadratic.curvature,
        buffers=of_one_width(parents[-1].buffers, quadratic),
        provenance=merged_provenance(parents, strengths, quadratic, options.name, form, alike, storage),
        blocks={block.layer: block for block, _ in quadratic.blocks},
        probes=joined_probes(parents, options.progress) if options.probes else (),
    )
    validate(merged)
    return _written(todo, merged)


def _summed(todo: MergePlan) -> tuple[Quadratic, dict[str, float], Storage | None]:
    """Return the sum of the anchors as it is stored, how far its blocks are off, and what half precision cost."""
    options, alike, growing = todo.options, todo.alike, todo.growing
    quadratic = (
        online_quadratic(alike, todo.strengths, growing)
        if options.online
        else sum_quadratics(alike, todo.strengths, options.lineage, growing=growing)
    )
    quadratic, distances = sum_blocks(
        centred(quadratic, alike, options.progress),
        lambda blocks: sum_of(blocks, options.kfac_sum).stored(options.kfac_rank, options.kfac_dtype),
    )
    check_sums(quadratic)
    if any(off >= _NOTED for off in distances.values()):
        worst = max(distances, key=distances.__getitem__)
        options.progress.note(
            f"the blocks that stand for sums ({options.kfac_sum}) are off by up to {distances[worst]:.0%} ({worst}; "
            "Frobenius norm, relative to the sum's)"
        )
    values = {name: value.float() for name, value in quadratic.curvature.items()}
    curvature, storage = rounded(values, options.curvature_dtype)
    if storage is not None:
        options.progress.note(storage.sentence)
    return replace(quadratic, curvature=curvature), distances, storage


def _written(todo: MergePlan, merged: Anchor) -> Anchor:
    """Write the anchor, and one model for all parents, where they are asked for: both or neither."""
    options, output, checkpoint = todo.options, todo.options.output, todo.options.checkpoint
    model = None
    if checkpoint is not None:
        model = _model(todo, merged, Path(checkpoint))
    paths = [Path(path) for path in (output, checkpoint) if path is not None]
    with atomic_writes(paths, overwrite=options.overwrite) as temporaries:
        if output is not None:
            with storage_errors(paths[0]):
                merged = merged.write(temporaries[0], paths[0])
        if model is not None:
            with storage_errors(paths[-1]):
                source, module, metadata = model
                source.write(temporaries[-1], paths[-1], cpu_state(module), metadata)
    if checkpoint is not None:
        options.progress.note(f"{checkpoint}: one model for all of them, with the buffers of {todo.parents[-1].label}")
    return merged


def _strengths(lambdas: float | Sequence[float], anchors: int) -> list[float]:
    strengths = spread_lambdas(lambdas, anchors)
    if not any(strengths):
        raise UsageError("every lambda is 0, so nothing would be left")
    return strengths


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
    check_distinct(dict(zip(("anchor", "checkpoint"), outputs, strict=True)))


def _model(todo: MergePlan, merged: Anchor, path: Path) -> tuple[FromAnchor, nn.Module, ModelMetadata]:
    """Return one model for all parents, each tensor in the dtype that the newest has it in, and its metadata."""
    parents, options = todo.parents, todo.options
    weights = merged.weights
    if merged.blocks and not options.online:
        weights = merged_model(todo.alike, todo.strengths, options.progress, options.lineage, todo.growing)
    newest = {**parents[-1].weights, **parents[-1].buffers}
    weights, buffers = (
        {name: t.to(newest[name].dtype) if name in newest else t for name, t in part.items()}
        for part in (weights, merged.buffers)
    )
    checkpoint = FromAnchor(replace(merged, weights=weights, buffers=buffers))
    check_ending(path, checkpoint.format, checkpoint.ending)
    loaded = open_checkpoint(checkpoint, options.architecture)
    return checkpoint, loaded.model, replace(loaded.metadata, lineage=lineage_of(parents, todo.strengths))
