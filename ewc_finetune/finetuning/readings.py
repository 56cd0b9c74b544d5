"""What is measured of a model while it trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ewc_finetune.choices import MetricName
from ewc_finetune.evaluation.bound_domain import BoundDomain
from ewc_finetune.evaluation.probe import Retention
from ewc_finetune.evaluation.retention import Meter
from ewc_finetune.evaluation.score import Score, score

# Measuring a probe while the model trains may take this share of the training's own time, where going through the model
# forwards takes a third of a step.
_METERING = 0.05 * 3


class Readings:
    """Scores the watched domains, and measures what is kept of the anchors' probes.

    Args:
        model: The model, which is read as it is at the time.
        watched: The domains to score.
        meters: Measure what is kept of each probe.
        batch_size: Samples at once.
        device: The device that the model is on.
        metrics: What is measured of each domain beside loss and accuracy.

    Attributes:
        scores: The latest of the domains.
        retention: The latest of the probes.
        spacing: So many steps lie between two readings of the probes, but for those of evaluations.
    """

    def __init__(
        self,
        model: nn.Module,
        watched: Sequence[BoundDomain],
        meters: Sequence[Meter],
        batch_size: int,
        device: torch.device,
        metrics: Sequence[MetricName] = (),
    ) -> None:
        self.model, self.watched, self.meters = model, watched, meters
        self.batch_size, self.device, self.metrics = batch_size, device, metrics
        self.scores: list[Score] = []
        self.retention: list[Retention] = []
        self.spacing = sum(meter.probe.samples for meter in meters) / (_METERING * batch_size / 2)

    def score(self) -> list[Score]:
        """Score every watched domain."""
        self.scores = [
            score(self.model, bound, self.batch_size, self.device, metrics=self.metrics) for bound in self.watched
        ]
        return self.scores

    def measure(self) -> list[Retention]:
        """Measure what the model has kept of the answers in the probes."""
        self.retention = [meter.read(self.model, self.device, self.batch_size) for meter in self.meters]
        return self.retention
