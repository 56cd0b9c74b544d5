"""A model's score on a domain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ewc_finetune.choices import MetricName
from ewc_finetune.data.input_spec import feed
from ewc_finetune.errors import DataError, NonFiniteError
from ewc_finetune.evaluation.bound_domain import BoundDomain
from ewc_finetune.evaluation.metrics import Metrics
from ewc_finetune.modules.batch import call
from ewc_finetune.modules.modes import evaluating
from ewc_finetune.progress import Bar

# Beyond this loss in nats the perplexity, its exponential, overflows float64.
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class Score:
    """A model's score on one domain.

    Attributes:
        domain: The data spec.
        samples: How many samples were scored.
        loss: Mean negative log-likelihood, in nats.
        accuracy: Share of samples that the model gets right, 0 to 1 (of a sample's tokens or answers, the mean share);
            None where nothing is right or wrong (gaussian).
        perplexity: For the per-token likelihood, e to the mean loss of a token; None for the others.
        metrics: The other figures that were asked for, by name (`METRICS`); None where the samples don't define one.
    """

    domain: str
    samples: int
    loss: float
    accuracy: float | None
    perplexity: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict, hash=False)

    @property
    def main(self) -> str:
        """The figure to look at first, for people."""
        if self.perplexity is not None:
            return f"perplexity {self.perplexity:.2f}"
        return f"{self.accuracy:.4f}" if self.accuracy is not None else f"loss {self.loss:.4f}"


@torch.no_grad()
def score(
    model: nn.Module,
    bound: BoundDomain,
    batch_size: int,
    device: torch.device,
    bar: Bar | None = None,
    metrics: Sequence[MetricName] = (),
) -> Score:
    """Score the model on one domain, in eval mode; it is left in the mode it was in.

    Args:
        model: The model.
        bound: The domain, as the model takes it.
        batch_size: Samples at once.
        device: The device that the model is on.
        bar: Told of the samples.
        metrics: What is measured beside loss and accuracy, which suits the likelihood (`check_metrics`).

    Raises:
        DataError: if the domain has no labels, labels that the model has no outputs for, or too many classes for a
            metric.
        NonFiniteError: if the loss is not finite.
    """
    domain, likelihood = bound.domain, bound.likelihood
    samples, loss, right, tokens = 0, 0.0, 0.0, 0
    measured = Metrics(metrics, likelihood, domain.name)
    with evaluating(model):
        for inputs, labels in feed(domain.batches(batch_size), bound.input_spec, model, device):
            if labels is None:
                raise DataError(f"{domain.name} has no labels, and a score needs them")
            outputs = call(model, inputs)
            if domain.labels is None:
                likelihood.check_targets(labels, tuple(outputs.shape[1:]), domain.name)
            loss += likelihood.loss(outputs, labels).item() * len(labels)
            right += likelihood.right(outputs, labels).item()
            measured.update(outputs, labels)
            samples += len(labels)
            tokens += likelihood.count_tokens(labels) or 0
            if bar is not None:
                bar.advance(len(labels))
    if samples == 0:
        raise DataError(f"{domain.name} has no samples")
    if not math.isfinite(loss):
        raise NonFiniteError(f"{domain.name}: the model's loss is {loss}. Check its weights and the data's values")
    accuracy = right / samples if likelihood.metric is not None else None
    perplexity = math.exp(min(loss / tokens, _LARGEST_EXPONENT)) if tokens else None
    return Score(domain.name, samples, loss / samples, accuracy, perplexity, measured.compute())
