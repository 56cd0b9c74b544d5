"""A mending: the work of a plan, and its record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from torch import Tensor

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import of_one_head
from ewc_finetune.anchor.lineage import distinct, lineage_of
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.choices import LikelihoodName
from ewc_finetune.curvature.options import ConsolidateOptions
from ewc_finetune.errors import RetentionError, StorageError
from ewc_finetune.evaluation.probe import least_unchanged
from ewc_finetune.finetuning.plan import Plan as FinetunePlan
from ewc_finetune.finetuning.run import run as finetune
from ewc_finetune.mending.chart import chart, title_of
from ewc_finetune.mending.choice import choose
from ewc_finetune.mending.frontier import Measures, centre, places, put
from ewc_finetune.mending.mended import Mended
from ewc_finetune.mending.options import MendOptions
from ewc_finetune.mending.plan import MendPlan
from ewc_finetune.mending.point import Point
from ewc_finetune.modules.devices import on_device, random_state_kept
from ewc_finetune.progress import Silent
from ewc_finetune.reporting.plots import draw_charts

# Makes the anchor of a model that is open.
Consolidate = Callable[[ConsolidateOptions, LoadedModel], Anchor]


def run(todo: MendPlan, consolidate: Consolidate) -> Mended:
    """Go through the ratios, take one, polish it if that is asked for, and write the model.

    Args:
        todo: The plan.
        consolidate: Makes the anchor of the model on the new domain, where none is given.

    Raises:
        EwcError: if model, anchors and data do not suit each other. The model is left as it was then.
        RetentionError: if no ratio keeps what must be kept, or polish does not.
    """
    options, loaded = todo.options, todo.loaded
    new = todo.new or consolidate(_consolidation(todo), loaded)
    anchors = of_one_head([*todo.old, new], loaded.metadata.head)
    start = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items() if isinstance(tensor, Tensor)}
    try:
        points, chosen, why = _mended(todo, anchors)
    except BaseException:
        loaded.model.load_state_dict(start, strict=False)
        raise
    loaded.model.eval()
    if todo.output is not None:
        _write(todo, todo.output, points[chosen])
    if options.plot is not None:
        try:
            draw_charts(Path(options.plot), [chart(points, chosen)], title_of(points))
        except StorageError as error:  # the model is there, which is what counts
            options.progress.note(str(error))
    return Mended(loaded.model, tuple(points), chosen, why, todo.output)


def _consolidation(todo: MendPlan) -> ConsolidateOptions:
    """Ask for the anchor of the model on the new domain, with curvature of the kind that the newest old one has."""
    options, old = todo.options, todo.old[-1].provenance
    curvature: Literal["diagonal", "kfac"] = "kfac" if old.curvature == "kfac" else "diagonal"
    return ConsolidateOptions(
        todo.loaded.model, todo.domain, samples=options.samples, curvature=curvature, device=options.device,
        data_dir=options.data_dir, progress=options.progress, likelihood=cast("LikelihoodName", old.likelihood),
    )  # fmt: skip


def _mended(todo: MendPlan, anchors: list[Anchor]) -> tuple[list[Point], int, str]:
    """Measure the model at every place, and leave it at the one to take; return them, which it is, and why."""
    options, model, points = todo.options, todo.loaded.model, list[Point]()
    with on_device(model, todo.device), random_state_kept(todo.device):
        measures = Measures.of(todo)
        with options.progress.bar("mending", None, "model") as bar:
            for place in places(options.each_ratio, anchors, options.progress):
                put(model, place.tensors)
                points.append(measures.point(place.name, place.ratio))
                bar.advance(1)
        chosen, why = choose(points, options.retain)
        # Found once more, for all weights at once would be as many models.
        put(model, centre(points[chosen].ratio or 0.0, anchors, Silent()))
        if todo.polish is not None:
            points.append(_polished(options, todo.polish, points[chosen], measures))
            chosen, why = len(points) - 1, f"{why}; then {points[-1].steps:,} steps of training with rehearsal"
    return points, chosen, why


def _polished(options: MendOptions, polish: FinetunePlan, mended: Point, measures: Measures) -> Point:
    """Train the model on from where it is, and measure it.

    Raises:
        RetentionError: if less is kept then than must be.
    """
    steps = finetune(polish).steps
    point = measures.point(f"{mended.name}, polished", mended.ratio, steps)
    kept = least_unchanged(point.retention) or 0.0
    if options.retain is not None and kept < options.retain:
        before = least_unchanged(mended.retention) or 0.0
        raise RetentionError(
            f"{steps:,} steps of polish leave {kept:.1%} of the answers to the probes, and {options.retain:.1%} are to "
            f"be kept: without them it is {before:.1%}. Leave --polish out, or rehearse more (--rehearse)"
        )
    return point


def _write(todo: MendPlan, output: Path, taken: Point) -> None:
    """Write the mended model, with the anchors that have a part in it."""
    loaded, metadata = todo.loaded, todo.loaded.metadata
    own = {anchor.digest for anchor in todo.old}
    how = {"mended": True, **({"polished": taken.steps} if taken.steps else {})}
    added = lineage_of(todo.old, [taken.ratio or 0.0] * len(todo.old))
    added = [{**entry, **how} if entry["sha256"] in own else entry for entry in added]
    lineage = distinct([*metadata.lineage, *added])
    save = save_state_dict if loaded.checkpoint is None else loaded.checkpoint.save
    save(output, loaded.model, replace(metadata, lineage=lineage), overwrite=todo.options.overwrite)
