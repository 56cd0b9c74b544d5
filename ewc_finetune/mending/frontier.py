"""The frontier between old and new: where the model is tried, and how it is measured there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import foreign_head
from ewc_finetune.evaluation.bound_domain import BoundDomain, bind
from ewc_finetune.evaluation.presenting import presented
from ewc_finetune.evaluation.retention import Meter, meters
from ewc_finetune.evaluation.score import score
from ewc_finetune.finetuning.best_state import merit
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.mending.plan import MendPlan
from ewc_finetune.mending.point import Point
from ewc_finetune.penalty.merged_model import merged_model
from ewc_finetune.progress import Progress, Silent

# How far the plain means lie on the way from the old weights to the new ones.
_WAY = {
    0.0: "the old weights",
    0.25: "25% of the way",
    0.5: "50% of the way",
    0.75: "75% of the way",
    1.0: "the new weights",
}


@dataclass(frozen=True)
class Place:
    """Weights to try.

    Attributes:
        name: What to call the place.
        ratio: What the old anchors weigh beside the new one there; None of a plain mean of the weights.
        tensors: Parameters and buffers by name.
    """

    name: str
    ratio: float | None
    tensors: dict[str, Tensor]


def places(ratios: Sequence[float], anchors: Sequence[Anchor], progress: Progress) -> Iterator[Place]:
    """Go through what is tried: the centre at each ratio and, of several ratios, plain means of the weights."""
    *old, new = anchors
    for ratio in ratios:
        yield Place(f"{ratio:g} to 1", ratio, centre(ratio, anchors, progress))
    foreign = foreign_head(old[-1], new.provenance.head)
    for share, name in _WAY.items() if len(ratios) > 1 else ():
        before = old[-1].weights
        weights = {
            name: value if name in foreign or name not in before else before[name].lerp(value.to(before[name]), share)
            for name, value in new.weights.items()
        }
        yield Place(name, None, {**weights, **_statistics([old[-1], new], [1 - share, share])})


def centre(ratio: float, anchors: Sequence[Anchor], progress: Progress) -> dict[str, Tensor]:
    """Return one model for all anchors, the old ones at so many times the strength of the newest."""
    strengths = [ratio] * (len(anchors) - 1) + [1.0]
    return {**merged_model(anchors, strengths, progress), **_statistics(anchors, strengths)}


def _statistics(anchors: Sequence[Anchor], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the newest anchor's buffers; of those in floating point that moved (running statistics) the weighted mean.

    Statistics that are of layers' inputs under other weights are no better known than so.
    """
    *_, newest = anchors
    found = dict(newest.buffers)
    for name, value in newest.buffers.items():
        each = [anchor.buffers.get(name) for anchor in anchors]
        known = [(share, one) for share, one in zip(shares, each, strict=True) if one is not None and share]
        moved = any(one.shape == value.shape and not torch.equal(one.to(value), value) for _, one in known)
        if moved and value.is_floating_point():
            total = sum(share for share, _ in known)
            mean = torch.stack([share / total * one.double() for share, one in known]).sum(dim=0)
            found[name] = mean.to(value)
    return found


def put(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give the model these parameters and buffers; what is not among them stays."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in tensors:
            tensor.detach().copy_(tensors[name])


@dataclass(frozen=True)
class Measures:
    """What the model is measured by, the same at every place.

    Attributes:
        model: The model, on `device`.
        domains: Those that are scored, the new one first where it is among them.
        has_new: Whether it is.
        probes: Measure what is kept of the old anchors' probes.
        batch_size: Samples at once.
        device: The device that the model is on.
    """

    model: nn.Module
    domains: list[BoundDomain]
    has_new: bool
    probes: list[Meter]
    batch_size: int
    device: torch.device

    @classmethod
    def of(cls, todo: MendPlan) -> Measures:
        """Return what a plan measures by, for its model, which is on the plan's device."""
        loaded, device = todo.loaded, todo.device
        rule = get_likelihood(todo.old[-1].provenance.likelihood)
        bound = [bind(loaded, presented(domain, loaded, Silent()), rule, device, Silent()) for domain in todo.scored]
        probes = meters(loaded.model, todo.measured, loaded.metadata.head)
        return cls(loaded.model, bound, todo.has_new, probes, todo.options.batch_size, device)

    def point(self, name: str, ratio: float | None, steps: int = 0) -> Point:
        """Measure the model as it is."""
        scores = tuple(score(self.model, bound, self.batch_size, self.device) for bound in self.domains)
        retention = tuple(probe.read(self.model, self.device) for probe in self.probes)
        old = {one.domain for one in scores[int(self.has_new) :]}
        known = [one.unchanged for one in retention if one.unchanged is not None]
        # Regressions have no answers that stay the same.
        known = known or [-one.divergence for one in retention]
        kept = merit(scores, old) if old else sum(known) / len(known) if known else None
        learned = merit(scores, {scores[0].domain}) if self.has_new else None
        return Point(name, ratio, scores, retention, kept, learned, steps)
