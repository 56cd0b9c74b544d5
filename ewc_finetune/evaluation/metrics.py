"""Figures of a model on a domain beside loss and accuracy, taken in batch by batch.

What counts is what counts for the loss: of the outputs those that are active, of tokens those whose label is not -100.
A figure that the samples don't define (R2 of one, AUC where all have one class) is None.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ewc_finetune.choices import METRICS, MetricName, check_choice
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.bernoulli import Bernoulli
from ewc_finetune.likelihood.categorical import hard

if TYPE_CHECKING:
    from torchmetrics import Metric

# Counting takes a table of classes by classes, and ranks every score: too much for the words of a language.
_MOST_CLASSES = 4096


def check_metrics(names: Sequence[str], likelihood: str) -> None:
    """Refuse metrics that do not suit a likelihood, or cannot be taken here.

    Raises:
        UsageError: naming those that do, or what is to be installed.
    """
    if isinstance(names, str):
        raise UsageError(f"metrics is {names!r}; expected a list of names")
    suited = [other for other, likelihoods in METRICS.items() if likelihood in likelihoods]
    for name in names:
        check_choice("metric", name, tuple(METRICS))
        if name not in suited:
            raise UsageError(f"metric {name} does not suit the {likelihood} likelihood, which has {', '.join(suited)}")
    if names and importlib.util.find_spec("torchmetrics") is None:
        raise UsageError(
            f"metric {names[0]} takes a package that is not installed: pip install 'ewc-finetune[metrics]'"
        )


class Metrics:
    """The metrics that are asked for, of one domain.

    Args:
        names: Which, each once; see `METRICS`.
        likelihood: What the outputs mean.
        where: The name of the domain, for messages.
    """

    def __init__(self, names: Sequence[MetricName], likelihood: Likelihood, where: str) -> None:
        self.names, self.likelihood, self.where = tuple(dict.fromkeys(names)), likelihood, where
        self._states: dict[type[_State], _State] = {}

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in one batch.

        Raises:
            DataError: if there are too many classes to count by.
        """
        if not self.names:
            return
        outputs, targets = (part.detach().cpu() for part in self.likelihood.rows(outputs, targets))
        if not len(outputs):  # no token counts
            return
        answers, of_classes = self.likelihood.name == Bernoulli.name, self.likelihood.metric is not None
        if of_classes and not answers and outputs.shape[-1] > _MOST_CLASSES:
            raise DataError(
                f"{self.where}: metrics are taken of up to {_MOST_CLASSES:,} classes, and there are "
                f"{outputs.shape[-1]:,}; leave {', '.join(self.names)} out"
            )
        if answers:  # of any shape, as so many outputs
            outputs, targets = outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)
        for kind in dict.fromkeys(_KINDS[name][0] for name in self.names):
            if kind not in self._states:
                self._states[kind] = kind(answers, outputs.shape[-1])
            self._states[kind].update(outputs.double(), targets)

    def compute(self) -> dict[str, float | None]:
        """Return the figures, by name."""
        found: dict[str, float | None] = {}
        for name in self.names:
            kind, figure = _KINDS[name]
            value = figure(self._states[kind].compute()).item() if kind in self._states else math.nan
            found[name] = value if math.isfinite(value) else None
        return found


class _State(ABC):
    """What is to be known of the batches so far.

    Args:
        answers: Whether outputs are answers of yes or no, rather than classes.
        outputs: How many there are.
    """

    @abstractmethod
    def __init__(self, answers: bool, outputs: int) -> None: ...

    @abstractmethod
    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in one batch; outputs are float64, and both are on the CPU."""

    @abstractmethod
    def compute(self) -> Tensor:
        """Return what the figures are made of."""


class _Errors(_State):
    """Mean absolute and mean squared error over all samples and outputs, shape `(2,)`."""

    def __init__(self, answers: bool, outputs: int) -> None:
        from torchmetrics import MeanAbsoluteError, MeanSquaredError

        self.both = [kind().set_dtype(torch.float64) for kind in (MeanAbsoluteError, MeanSquaredError)]

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        for metric in self.both:
            metric.update(outputs, targets.to(outputs))

    def compute(self) -> Tensor:
        return torch.stack([metric.compute() for metric in self.both])


class _Explained(_State):
    """The coefficient of determination of each output; NaN of a single sample.

    By sums of squares about the first target, so that little of them cancels. That of torchmetrics takes sums below
    1e-4 for zero, which targets of small numbers have.
    """

    def __init__(self, answers: bool, outputs: int) -> None:
        self.samples = 0
        self.about: Tensor | None = None
        self.sum = self.squares = self.residuals = torch.zeros(())

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        outputs, targets = (part.flatten(1) if part.ndim > 1 else part[:, None] for part in (outputs, targets.double()))
        self.about = targets[0] if self.about is None else self.about
        away = targets - self.about
        self.samples += len(targets)
        self.sum = self.sum + away.sum(dim=0)
        self.squares = self.squares + away.square().sum(dim=0)
        self.residuals = self.residuals + (outputs - targets).square().sum(dim=0)

    def compute(self) -> Tensor:
        if self.samples < 2:
            return torch.full_like(self.sum, math.nan)
        total = self.squares - self.sum.square() / self.samples
        constant = torch.where(self.residuals > 0, 0.0, 1.0)  # as scikit-learn has it
        return torch.where(total > 0, 1 - self.residuals / total, constant.to(total))


class _Counts(_State):
    """True and false positives, true and false negatives, shape `(outputs, sides, 4)`.

    A class has one side; an answer has two, in the second of which no is what is looked for.
    """

    def __init__(self, answers: bool, outputs: int) -> None:
        from torchmetrics.classification import BinaryStatScores, MulticlassStatScores, MultilabelStatScores

        self.answers = answers
        self.counts: Metric
        if not answers:
            self.counts = MulticlassStatScores(max(outputs, 2), average=None)
        else:
            self.counts = BinaryStatScores() if outputs == 1 else MultilabelStatScores(outputs, average=None)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        if self.answers:
            # As whole numbers, for what lies between 0 and 1 would be taken for probabilities, batch by batch.
            self.counts.update((outputs > 0).long(), (targets > 0.5).long())
        else:
            self.counts.update(outputs.argmax(dim=1), hard(targets))

    def compute(self) -> Tensor:
        counts: Tensor = self.counts.compute().reshape(-1, 1, 5)[..., :4].double()
        return torch.cat([counts, counts[..., [2, 3, 0, 1]]], dim=1) if self.answers else counts


class _Ranks(_State):
    """The area under the ROC curve of each class against the others, or of each output; NaN where all are on one side.

    It goes by the order of all samples, so that every score is kept: four bytes for each sample and output.
    """

    def __init__(self, answers: bool, outputs: int) -> None:
        self.answers = answers
        self.scores: list[Tensor] = []
        self.targets: list[Tensor] = []

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        # Of a class log p, which tells sure answers from one another where p rounds to 1.
        self.scores.append((outputs if self.answers else outputs.log_softmax(dim=1)).float())
        self.targets.append(targets > 0.5 if self.answers else hard(targets))

    def compute(self) -> Tensor:
        from torchmetrics.functional.classification import binary_auroc

        scores, targets = torch.cat(self.scores), torch.cat(self.targets)
        areas = []
        for number, score in enumerate(scores.T):
            real = targets[:, number] if self.answers else targets == number
            # Places in the order, for scores outside of 0 to 1 would be taken for logits.
            places = score.unique(return_inverse=True)[1].double() / len(score)
            one_sided = bool(real.all() or not real.any())
            areas.append(math.nan if one_sided else binary_auroc(places, real.long()).item())
        return torch.tensor(areas)


def _f1(counts: Tensor) -> Tensor:
    """The mean over the classes (outputs) of which there is any label or answer."""
    tp, fp, _, fn = counts[:, 0].T
    found: Tensor = 2 * tp / (2 * tp + fp + fn)
    return found.nanmean()


def _balanced_accuracy(counts: Tensor) -> Tensor:
    """The mean over the classes that are a label of the share that is found; of an output the mean of yes and no."""
    tp, _, _, fn = counts.unbind(-1)
    return (tp / (tp + fn)).nanmean(dim=1).nanmean()


_KINDS: dict[str, tuple[type[_State], Callable[[Tensor], Tensor]]] = {
    "mae": (_Errors, lambda both: both[0]),
    "rmse": (_Errors, lambda both: both[1].sqrt()),
    "r2": (_Explained, Tensor.mean),
    "f1": (_Counts, _f1),
    "balanced-accuracy": (_Counts, _balanced_accuracy),
    "auc": (_Ranks, Tensor.nanmean),
}
