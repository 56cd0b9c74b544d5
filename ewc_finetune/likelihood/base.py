"""What every likelihood has: log p(y | x) of a model's outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ewc_finetune.choices import Estimator
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.likelihood.output_fisher import OutputFisher
from ewc_finetune.modules.precision import wide

# The label of a token that doesn't count, as in torch's cross-entropy.
IGNORED = -100
# The largest answer that is kept: half precision has none beyond it.
LARGEST_OUTPUT = torch.finfo(torch.float16).max
# How far from 1 the sum of probabilities may be: that of 1,000 classes in half precision is.
_SLACK = 1e-3


class Likelihood(ABC):
    """What the rest of the package asks of a likelihood. Outputs and targets have the batch in front.

    Attributes:
        name: The name on the command line.
        metric: What `right` counts, for people: None where nothing is right or wrong.
        kept: The dtype in which `answers` are kept.
    """

    name: str
    metric: str | None = "accuracy"
    kept: torch.dtype = torch.float16

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the batch of the negative log-likelihood, in nats, as a scalar to differentiate."""

    def counting(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs that count, and targets numbered among them; of the same samples and tokens."""
        return outputs, targets

    def rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs and targets that count, with one answer to a row: a sample's, or a token's."""
        return self.counting(outputs, targets)

    @abstractmethod
    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return, as a scalar, the sum over the batch of the share of each sample that the model gets right."""

    @abstractmethod
    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Refuse outputs that this likelihood cannot take.

        Raises:
            DataError: naming `where` they came from, their shape and type.
        """

    @abstractmethod
    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Refuse targets that do not go with outputs whose shape for one sample is `output_shape`.

        Raises:
            DataError: naming `where` they came from, and what was found.
        """

    @abstractmethod
    def exact(self, outputs: Tensor) -> OutputFisher:
        """Return vectors whose outer products sum to `S_n`; `outputs` are float32 or wider."""

    @abstractmethod
    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the gradient of log p(y | outputs) by the outputs, for the targets y."""

    @abstractmethod
    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw targets from the model's own distribution; `generator` is on the CPU.

        Sample n's draw depends on those before it, not on how samples are batched.
        """

    @abstractmethod
    def answers(self, outputs: Tensor) -> Tensor:
        """Return what says p(y | outputs) and stays finite in the dtype `kept`; `outputs` are float32 or wider.

        NaN stays NaN. The first dimension is samples, or the tokens of any samples.
        """

    @abstractmethod
    def divergence(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """Return the Kullback-Leibler divergence KL(p || q) in nats for each row, summed over its answers.

        Args:
            answers: What is kept of p, in float64; see `answers`.
            outputs: The outputs that say q, in float64, which `comparable` has found to go with them.
        """

    def unchanged(self, answers: Tensor, outputs: Tensor) -> Tensor | None:
        """Return for each row the share of its answers, 0 to 1, whose most likely value is still one for `answers`.

        None where there is no most likely value to compare.
        """
        return None

    def comparable(self, answers: Tensor, outputs: Tensor) -> bool:
        """Whether the outputs are of as many answers as are kept; both have the batch or tokens in front."""
        return answers.shape[1:] == outputs.shape[1:]

    def count_tokens(self, targets: Tensor) -> int | None:
        """Return how many tokens these targets are of; None where a sample is no sequence of tokens."""
        return None

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the most likely targets.

        Raises:
            UsageError: where their gradient is zero for every sample, and with it the Fisher.
        """
        raise UsageError(f"the predicted estimator is zero for the {self.name} likelihood; use exact or sampled")

    def output_fisher(
        self, outputs: Tensor, targets: Tensor | None, estimator: Estimator, generator: torch.Generator, draws: int = 1
    ) -> OutputFisher:
        """Return the Fisher at the outputs for the estimator's choice of y, detached.

        `batched` has the vectors of `empirical`: it differs in when the gradients are squared, which is not decided
        here.

        Args:
            outputs: The model's.
            targets: The data's, where there are any.
            estimator: Whose targets are used; not `auto`.
            generator: What `sampled` draws with, on the CPU.
            draws: How many targets `sampled` draws for each sample.

        Raises:
            DataError: if the estimator needs targets and there are none.
        """
        outputs = wide(outputs.detach())
        if estimator == "exact":
            return self.counted(self.exact(outputs), targets)
        if estimator == "sampled":
            # For each sample all of its draws, one sample after the other.
            repeated = outputs.repeat_interleave(draws, dim=0)
            known = None if targets is None else targets.repeat_interleave(draws, dim=0)
            drawn = self.output_gradient(repeated, self.draw(repeated, known, generator)) / math.sqrt(draws)
            drawn = torch.unflatten(drawn, 0, (len(outputs), draws))
            fisher = OutputFisher(draws, lambda m: drawn[:, m], lambda: drawn.square().sum(dim=1))
            return self.counted(fisher, targets)
        if estimator == "predicted":
            labels = self.predict(outputs)
        elif targets is not None:
            labels = targets
        else:
            raise DataError(f"the {estimator} estimator needs labels and this data has none; use exact or sampled")
        vector = self.output_gradient(outputs, labels)
        return self.counted(OutputFisher(1, lambda _: vector, vector.square), targets)

    def draw(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        """Draw targets where the known ones say that there are any; see `sample`."""
        return self.sample(outputs, generator)

    def counted(self, fisher: OutputFisher, targets: Tensor | None) -> OutputFisher:
        """Return it without what the targets say does not count."""
        return fisher


class RealValued(Likelihood):
    """A likelihood of outputs in any shape, whose targets have the same."""

    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Check that outputs are numbers."""
        if not outputs.is_floating_point() or outputs.numel() == 0:
            raise DataError(
                f"{where}: the model's outputs have shape {tuple(outputs.shape)} and type {outputs.dtype}; the "
                f"{self.name} likelihood needs real numbers"
            )

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Check that targets have the shape of the outputs."""
        if tuple(targets.shape[1:]) != tuple(output_shape):
            raise DataError(
                f"{where}: the targets have shape {tuple(targets.shape)}; the {self.name} likelihood needs the shape "
                f"of the outputs, ({', '.join(['batch', *map(str, output_shape)])}). Class labels go with categorical"
            )


def check_classes(targets: Tensor, classes: int, where: str) -> None:
    """Refuse targets that are no numbers of these classes."""
    if not targets.numel():
        return
    least, most = targets.aminmax()
    if least < 0 or most >= classes:
        beyond = targets[(targets < 0) | (targets >= classes)]
        found = ", ".join(str(label) for label in sorted(set(beyond.tolist()))[:10])
        if classes == 1:
            way = "A model with one output predicts a number: --likelihood gaussian, or bernoulli for yes and no"
        elif least > 0 and most - least < classes:
            way = f"If they are numbered from {int(least)}, offset=-{int(least)} numbers them from 0"
        else:
            way = f"Choose the classes with ?classes=0-{classes - 1}, or use a model with more outputs"
        raise DataError(
            f"{where}: {beyond.numel()} of {targets.numel()} labels are not among the model's {classes} classes "
            f"(0 to {classes - 1}): found {found}. {way}"
        )


def check_probabilities(targets: Tensor, classes: int, where: str) -> None:
    """Refuse soft labels that are no probabilities of these classes.

    Raises:
        DataError: naming the sample, and what was found.
    """
    if targets.shape[1] != classes:
        raise DataError(
            f"{where}: the labels have shape {tuple(targets.shape)}, and the model has {classes} classes; expected a "
            "probability for each class"
        )
    rows = targets.double()
    wrong = ~((rows >= 0).all(dim=1) & ((rows.sum(dim=1) - 1).abs() <= _SLACK))
    if wrong.any():
        row = rows[wrong][0]
        found = f"{row.min().item():g} is among them" if (row < 0).any() else f"they sum to {row.sum().item():g}"
        raise DataError(
            f"{where}: {int(wrong.sum())} of {len(rows)} soft labels are no probabilities (of the first, {found}); "
            "expected numbers from 0 that sum to 1 for each sample. Numbers of other kinds go with --likelihood "
            "gaussian or bernoulli"
        )
