"""`mend`: bring back what a fine-tuned model has forgotten, without training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.compatibility import remarks
from ewc_finetune.anchor.heads import foreign_head, of_one_head
from ewc_finetune.anchor.lineage import distinct, lineage_of
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.checkpoint.location import local_name
from ewc_finetune.checkpoint.open import LoadedModel, open_model
from ewc_finetune.choices import LikelihoodName
from ewc_finetune.commands.consolidate import plan as plan_consolidation
from ewc_finetune.commands.consolidate import run as run_consolidation
from ewc_finetune.commands.mend_options import MendOptions
from ewc_finetune.curvature.options import ConsolidateOptions
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.sources import resolve_domain, resolve_domains
from ewc_finetune.errors import Mistakes, RetentionError, UsageError
from ewc_finetune.evaluation.bound_domain import bind
from ewc_finetune.evaluation.presenting import informed, presented
from ewc_finetune.evaluation.probe import Retention, least_unchanged
from ewc_finetune.evaluation.retention import meters
from ewc_finetune.evaluation.score import Score, score
from ewc_finetune.finetuning.best_state import merit
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.devices import choose_device, on_device, random_state_kept
from ewc_finetune.penalty.merging import merged_weights, sum_blocks
from ewc_finetune.penalty.penalty import check_fit
from ewc_finetune.penalty.quadratic import sum_quadratics
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.reporting.frontier import knee
from ewc_finetune.reporting.plots import Axis, Chart, Curve, draw_charts, figure_format
from ewc_finetune.specs.options import check_declared, takes
from ewc_finetune.storage.atomic import check_output

# How far the plain means beside it lie on the way from the old weights to the new ones.
_WAY = (0.0, 0.25, 0.5, 0.75, 1.0)


@takes(MendOptions)
def mend(options: MendOptions) -> Mended:
    """Bring back what a fine-tuned model has forgotten, without training: by anchors of the old domains and of the new.

    The weights are where the anchors' penalties together are least, at one ratio of their strengths after another
    (Matena and Raffel 2022, "Merging models with Fisher-weighted averaging"; for K-FAC anchors Tam et al. 2023,
    "Merging by matching models in task parameter subspaces"). Beside them stand means of the old and the new weights
    (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").

    Args:
        options: The model, the data it was fine-tuned on and the anchors, and by their names the others of
            `MendOptions`.

    Returns:
        What each ratio keeps and has learned, and which one was taken.

    Raises:
        EwcError: naming what is wrong with the model, an anchor, the data, an option or a file.
        RetentionError: if no ratio keeps what must be kept.
    """
    return run(plan(options))


@dataclass(frozen=True)
class Point:
    """The model at one place between old and new.

    Attributes:
        name: Of the place.
        ratio: What the old anchors weigh beside the new one there; None of a plain mean of the weights.
        scores: On the domains that are scored.
        retention: What it keeps of the old anchors' probes.
    """

    name: str
    ratio: float | None
    scores: tuple[Score, ...]
    retention: tuple[Retention, ...]


@dataclass(frozen=True)
class Mended:
    """What `mend` found.

    Attributes:
        model: The mended model, in eval mode.
        points: The model at every ratio, and at the plain means of the weights.
        chosen: Which of these was taken.
        why: How it was chosen.
        kept: What the model keeps at each of the points, 0 to 1: the mean score on old domains, else the mean share of
            unchanged answers to probes; None where nothing tells.
        learned: What it has learned: the score on the new domain; None where it has none.
        output: The checkpoint that was written.
    """

    model: nn.Module
    points: tuple[Point, ...]
    chosen: int
    why: str
    kept: tuple[float | None, ...]
    learned: tuple[float | None, ...]
    output: Path | None

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        return {
            "output": None if self.output is None else str(self.output),
            "chosen": self.points[self.chosen].name,
            "why": self.why,
            "points": [
                {**asdict(point), "kept": kept, "learned": learned}
                for point, kept, learned in zip(self.points, self.kept, self.learned, strict=True)
            ],
        }


@dataclass(frozen=True)
class MendPlan:
    """What a mending will do.

    Attributes:
        options: The options that the command was given.
        loaded: The model.
        old: The anchors of the old domains, oldest first.
        new: The anchor of the new one; None where it is to be made.
        domain: The new domain.
        scored: The domains to score, of which the first is the new one, if it can be scored.
        has_new: Whether it is.
        device: The device to compute on.
        output: The checkpoint to write.
    """

    options: MendOptions
    loaded: LoadedModel
    old: list[Anchor]
    new: Anchor | None
    domain: Domain
    scored: list[Domain]
    has_new: bool
    device: torch.device
    output: Path | None


def plan(options: MendOptions) -> MendPlan:
    """Open and check everything that a mending takes.

    Raises:
        EwcError: naming what is wrong with the model, an anchor, the data, an option or a file.
    """
    check_declared(options)
    mistakes, progress, old = Mistakes(), options.progress, list[Anchor]()
    given = [options.anchors] if isinstance(options.anchors, (Anchor, str, Path)) else list(options.anchors)
    with mistakes.noted():
        options.check()
        if not given:
            raise UsageError("there is nothing to mend by; name the anchors of what was forgotten with --anchors")
    output = None if options.output is None else Path(options.output)
    with mistakes.noted():
        if options.plot is not None:
            figure_format(Path(options.plot))
        for path in (output, options.plot):
            if path is not None:
                inputs = [options.model, *given]
                check_output(Path(path), options.overwrite, inputs, folder=Path(path).is_dir(), note=progress.note)
    for item in given:
        with mistakes.noted():
            old.append(item if isinstance(item, Anchor) else Anchor.open(item))
    new = options.anchor_of_new
    with mistakes.noted():
        new = new if new is None or isinstance(new, Anchor) else Anchor.open(new)
    with mistakes.noted():
        device = choose_device(options.device)
    with mistakes.noted():
        domain = resolve_domain(options.data, "train", options.data_dir)
        scored, has_new = _scored(options, domain)
    with mistakes.noted():
        loaded = open_model(options.model, None, trust_code=options.trust_code)
    mistakes.check()
    loaded = informed(loaded, old)
    named = dict(loaded.model.named_parameters())
    for anchor in [*of_one_head(old, loaded.metadata.head), *([new] if isinstance(new, Anchor) else [])]:
        check_fit(named, anchor)
    alone = len(options.ratios) == 1
    if not alone and not any(anchor.probes for anchor in old) and len(scored) <= has_new:
        raise UsageError(
            "nothing tells what is kept: the old anchors have no probes, and no old domain is named with --eval. Name "
            "one, or one --ratio alone"
        )
    if options.retain is not None and not any(anchor.probes for anchor in old):
        raise UsageError("--retain goes by the probes in the old anchors, and there is none in them")
    for remark in [*loaded.remarks, *(r for anchor in old for r in anchor.remarks), *remarks(old, "all")]:
        progress.note(remark)
    known = new if isinstance(new, Anchor) else None
    return MendPlan(options, loaded, old, known, domain, scored, has_new, device, output)


def _scored(options: MendOptions, train: Domain) -> tuple[list[Domain], bool]:
    """Return the domains to score, the new one first where it is scored; and whether it is."""
    data = options.data
    others = [] if options.eval_on is None else resolve_domains(options.eval_on, "test", options.data_dir)
    if isinstance(data, str) and train.split is not None:
        new = [resolve_domain(data, "test", options.data_dir)]
    else:
        new = [other for other in others if other.samples is train.samples]
    names = {one.name for one in new}
    return new + [other for other in others if other.name not in names], bool(new)


def run(todo: MendPlan) -> Mended:
    """Go through the ratios, take one, and write the model.

    Raises:
        EwcError: if model, anchors and data do not suit each other.
        RetentionError: if no ratio keeps what must be kept.
    """
    options, loaded, progress = todo.options, todo.loaded, todo.options.progress
    new = todo.new or _consolidated(todo)
    anchors = of_one_head([*todo.old, new], loaded.metadata.head)
    start = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items() if isinstance(tensor, Tensor)}
    points = []
    try:
        with on_device(loaded.model, todo.device), random_state_kept(todo.device):
            measured = _measuring(todo)
            with progress.bar("mending", None, "model") as bar:
                for name, ratio, weights in _places(options.ratios, anchors, progress):
                    _put(loaded.model, weights)
                    points.append(Point(name, ratio, *measured()))
                    bar.advance(1)
        kept, learned = [_kept(todo, point) for point in points], [_learned(todo, point) for point in points]
        chosen, why = _choice(options, points, kept, learned)
        # Found once more, for all weights at once would be as many models.
        _put(loaded.model, _centre(points[chosen].ratio or 0.0, anchors, Silent()))
    except BaseException:
        loaded.model.load_state_dict(start, strict=False)
        raise
    loaded.model.eval()
    if options.plot is not None:
        draw_charts(
            Path(options.plot), [_chart(points, kept, learned, chosen)], "Between old and new, without training"
        )
    if todo.output is not None:
        metadata = loaded.metadata
        lineage = distinct([*metadata.lineage, *lineage_of(todo.old, [points[chosen].ratio or 0.0] * len(todo.old))])
        save = save_state_dict if loaded.checkpoint is None else loaded.checkpoint.save
        save(todo.output, loaded.model, replace(metadata, lineage=lineage), overwrite=options.overwrite)
    return Mended(loaded.model, tuple(points), chosen, why, tuple(kept), tuple(learned), todo.output)


def default_output(model: str | Path) -> Path:
    """Return where the mended model goes: beside the one that it is made of, `model.pt` to `model-mended.pt`."""
    name = local_name(model)
    return name.with_name(f"{name.stem}-mended{name.suffix}")


def _consolidated(todo: MendPlan) -> Anchor:
    """Make the anchor of the model on the new domain, with curvature of the kind that the newest old one has."""
    options, old = todo.options, todo.old[-1].provenance
    curvature: Literal["diagonal", "kfac"] = "kfac" if old.curvature == "kfac" else "diagonal"
    asked = ConsolidateOptions(
        options.model, todo.domain, samples=options.samples, curvature=curvature, device=options.device,
        data_dir=options.data_dir, trust_code=options.trust_code, progress=options.progress,
        likelihood=cast("LikelihoodName", old.likelihood),
    )  # fmt: skip
    return run_consolidation(plan_consolidation(asked))


def _places(
    ratios: Sequence[float], anchors: Sequence[Anchor], progress: Progress
) -> Iterator[tuple[str, float | None, dict[str, Tensor]]]:
    """Go through what is tried: its name, the ratio, and the weights."""
    *old, new = anchors
    for ratio in sorted(ratios):
        yield f"{ratio:g} to 1", ratio, _centre(ratio, anchors, progress)
    foreign = foreign_head(old[-1], new.provenance.head)
    for share in _WAY if len(ratios) > 1 else ():
        weights = {
            name: value if name in foreign else old[-1].weights[name].lerp(value.to(old[-1].weights[name]), share)
            for name, value in new.weights.items()
        }
        name = {0.0: "the old weights", 1.0: "the new weights"}.get(share, f"{share:.0%} of the way")
        yield name, None, weights


def _centre(ratio: float, anchors: Sequence[Anchor], progress: Progress) -> dict[str, Tensor]:
    """Return the weights where the anchors pull least, the old ones at so many times the strength of the newest."""
    strengths = [ratio] * (len(anchors) - 1) + [1.0]
    # Of the sum only the centre is wanted, so that any block may stand for it.
    total, _ = sum_blocks(sum_quadratics(anchors, strengths), anchors, lambda blocks: blocks[-1], progress)
    return merged_weights(anchors, total)


def _put(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.detach().copy_(weights[name])


def _measuring(todo: MendPlan) -> Any:
    """Return what measures the model as it is: its scores, and what it keeps of the probes."""
    loaded, device, options = todo.loaded, todo.device, todo.options
    rule = get_likelihood(todo.old[-1].provenance.likelihood)
    bound = [bind(loaded, presented(domain, loaded, Silent()), rule, device, Silent()) for domain in todo.scored]
    probes = meters(loaded.model, todo.old, loaded.metadata.head)

    def measured() -> tuple[tuple[Score, ...], tuple[Retention, ...]]:
        scores = tuple(score(loaded.model, one, options.batch_size, device) for one in bound)
        return scores, tuple(probe.read(loaded.model, device) for probe in probes)

    return measured


def _kept(todo: MendPlan, point: Point) -> float | None:
    """Return the mean score on the old domains, else the mean share of unchanged answers to the probes."""
    old = {score.domain for score in point.scores[int(todo.has_new) :]}
    if old:
        return merit(point.scores, old)
    known = [kept.unchanged for kept in point.retention if kept.unchanged is not None]
    return sum(known) / len(known) if known else None


def _learned(todo: MendPlan, point: Point) -> float | None:
    return merit(point.scores, {point.scores[0].domain}) if todo.has_new else None


def _choice(
    options: MendOptions, points: Sequence[Point], kept: Sequence[float | None], learned: Sequence[float | None]
) -> tuple[int, str]:
    """Return which point to take, and why."""
    centres = [n for n, point in enumerate(points) if point.ratio is not None]
    if options.retain is not None:
        for n in centres:
            if (least_unchanged(points[n].retention) or 0.0) >= options.retain:
                return n, f"the smallest ratio that keeps {options.retain:.1%} of the answers to every probe"
        best = max(centres, key=lambda n: least_unchanged(points[n].retention) or 0.0)
        raise RetentionError(
            f"no ratio keeps {options.retain:.1%} of the answers to the probes: the best, {points[best].ratio:g}, "
            f"keeps {least_unchanged(points[best].retention) or 0.0:.1%}. Try larger ones (--ratio), or K-FAC anchors"
        )
    if len(centres) == 1:
        return centres[0], "the only ratio"
    known = [(n, one, other) for n in centres if (one := learned[n]) is not None and (other := kept[n]) is not None]
    bend = knee([(one, other) for _, one, other in known])
    if bend is not None:
        return known[bend][0], "the knee: farthest beyond the line between the ends of the frontier"
    if known:
        return max(known, key=lambda of: of[1] + of[2])[0], "the best mean of what is kept and learned"
    return max(centres, key=lambda n: kept[n] or 0.0), "what keeps most; nothing tells what was learned"


def _chart(
    points: Sequence[Point], kept: Sequence[float | None], learned: Sequence[float | None], chosen: int
) -> Chart:
    """Return what each point keeps against what it has learned."""
    drawn = {
        n: (one, other)
        for n in range(len(points))
        if (one := learned[n]) is not None and (other := kept[n]) is not None
    }
    centres = [n for n in drawn if points[n].ratio is not None]
    plain = [n for n in drawn if points[n].ratio is None]
    curves = [
        Curve(
            "centres of the anchors, by ratio",
            "k0",
            [drawn[n] for n in centres],
            [f"{points[n].ratio:g}" for n in centres],
        ),
        Curve("means of the weights", "plain", [drawn[n] for n in plain], [points[n].name for n in plain]),
    ]
    curves = [curve for curve in curves if curve.points]
    return Chart("Kept against learned", curves, Axis("learned"), Axis("kept"), drawn.get(chosen))
