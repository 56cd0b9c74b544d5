"""Likelihoods: how a model's outputs become log p(y | x), and how its Fisher looks at the outputs.

The Fisher of the weights is `mean_n J_n^T S_n J_n`, with `J_n` the Jacobian of sample n's outputs by the weights and
`S_n` the Fisher at the outputs. Each estimator is a choice of vectors `s_m` with `S_n = sum_m s_m s_m^T` (exact), or
equal to it in expectation (sampled), or of labels that are not the model's own (predicted, empirical). Everything
above this file needs only those vectors; see Martens 2020, "New insights and perspectives on the natural gradient
method", section 9, and Kunstner et al. 2019 on what the empirical one is not.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from ewc_finetune.address import suggest
from ewc_finetune.choices import Estimator
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.factors import Factors, diagonal_factors, softmax_factors
from ewc_finetune.precision import wide

IGNORED = -100  # the label of a token that doesn't count, as in torch's cross-entropy
_LARGEST = torch.finfo(torch.float16).max


class Likelihood(ABC):
    """What the rest of the package asks of a likelihood. Outputs and targets have the batch in front.

    Attributes:
        name: As on the command line.
        metric: What `right` counts, for people: None where nothing is right or wrong.
        kept: The dtype in which `answers` are kept.
    """

    name: str
    metric: str | None = "accuracy"
    kept: torch.dtype = torch.float16

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean over the batch of the negative log-likelihood, in nats, as a scalar to differentiate."""

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
    def exact(self, outputs: Tensor) -> Factors:
        """Return vectors whose outer products sum to `S_n`; `outputs` are float32 or wider."""

    @abstractmethod
    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
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

    def factors(
        self,
        outputs: Tensor,
        targets: Tensor | None,
        estimator: Estimator,
        generator: torch.Generator,
        draws: int = 1,
    ) -> Factors:
        """Return the vectors `s_m` of the module's docstring for the estimator's choice of y, detached.

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
        return self.counted(self._factors(wide(outputs.detach()), targets, estimator, generator, draws), targets)

    def draw(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        """Draw targets where the known ones say that there are any; see `sample`."""
        return self.sample(outputs, generator)

    def counted(self, factors: Factors, targets: Tensor | None) -> Factors:
        """Return the vectors without what the targets say does not count."""
        return factors

    def _factors(
        self, outputs: Tensor, targets: Tensor | None, estimator: Estimator, generator: torch.Generator, draws: int
    ) -> Factors:
        if estimator == "exact":
            return self.exact(outputs)
        if estimator == "sampled":
            # For each sample all of its draws, one sample after the other.
            repeated = outputs.repeat_interleave(draws, dim=0)
            known = None if targets is None else targets.repeat_interleave(draws, dim=0)
            drawn = self.score(repeated, self.draw(repeated, known, generator)) / math.sqrt(draws)
            drawn = torch.unflatten(drawn, 0, (len(outputs), draws))
            return Factors(draws, lambda m: drawn[:, m], lambda: drawn.square().sum(dim=1))
        if estimator == "predicted":
            vector = self.score(outputs, self.predict(outputs))
        elif targets is None:
            raise DataError(f"the {estimator} estimator needs labels and this data has none; use exact or sampled")
        else:
            vector = self.score(outputs, targets)
        return Factors(1, lambda _: vector, vector.square)


class Categorical(Likelihood):
    """Softmax over classes: outputs are logits of shape `(batch, classes)`, targets are class indices `(batch,)`."""

    name = "categorical"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return functional.cross_entropy(wide(outputs), targets)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the samples whose largest logit is the target's."""
        return (outputs.argmax(dim=1) == targets).sum()

    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Check that outputs are logits, one for each class."""
        if outputs.ndim != 2 or not outputs.is_floating_point():
            raise DataError(
                f"{where}: the model's outputs have shape {tuple(outputs.shape)} and type {outputs.dtype}; the "
                "categorical likelihood needs logits of shape (batch, classes)"
            )

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Check that every target is one of the classes."""
        if targets.ndim != 1 or targets.is_floating_point():
            raise DataError(
                f"{where}: the labels have shape {tuple(targets.shape)} and type {targets.dtype}; the categorical "
                "likelihood needs one integer for each sample"
            )
        _check_classes(targets, output_shape[-1], where)

    def exact(self, outputs: Tensor) -> Factors:
        """See `softmax_factors`: at most classes - 1 vectors."""
        return softmax_factors(outputs.softmax(dim=1))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`e_y - p`, in which the sum of the others takes the place of `1 - p_y`, which would cancel near certainty."""
        others = outputs.softmax(dim=-1).scatter_(-1, targets[..., None], 0)
        rest = others.sum(dim=-1, keepdim=True)
        return others.neg_().scatter_(-1, targets[..., None], rest)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw by the inverse transform, with one uniform number to a sample."""
        p = outputs.softmax(dim=-1)
        uniform = torch.rand((*p.shape[:-1], 1), generator=generator, dtype=torch.float64).to(p)
        return (p.cumsum(dim=-1) < uniform).sum(dim=-1).clamp(max=p.shape[-1] - 1)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the class of the largest logit."""
        return outputs.argmax(dim=-1)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return log p up to a constant, which is 0 for the likeliest class: half precision is finest there."""
        return (outputs - outputs.amax(dim=-1, keepdim=True)).clamp(min=-_LARGEST)

    def divergence(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """`sum_y p (log p - log q)` over the classes that p knows; classes that came later have a part in q alone."""
        p = answers.log_softmax(dim=-1)
        q = self.answers(outputs).log_softmax(dim=-1)[..., : answers.shape[-1]]
        return (p.exp() * (p - q)).sum(dim=-1).clamp(min=0)

    def unchanged(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """Whether the largest logit is of a class that no other was likelier than."""
        best = outputs.argmax(dim=-1, keepdim=True)
        known = best < answers.shape[-1]
        as_likely = answers.gather(-1, best.where(known, 0)) == answers.amax(dim=-1, keepdim=True)
        return (known & as_likely)[..., 0].to(answers)

    def comparable(self, answers: Tensor, outputs: Tensor) -> bool:
        """Whether there are logits for all the classes that are kept."""
        return outputs.ndim == 2 and outputs.shape[1] >= answers.shape[1]


class PerToken(Categorical):
    """A categorical for each token of a sequence, which is one sample: log p(y | x) is their sum.

    Outputs are logits of shape `(batch, tokens, classes)`, targets class indices `(batch, tokens)`, in which -100 marks
    tokens that don't count, whatever the estimator. Without targets every token counts.
    """

    name = "per-token"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy: for each sequence its sum over the tokens that count."""
        return functional.cross_entropy(wide(outputs).flatten(0, 1), targets.flatten(), reduction="sum") / len(outputs)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum over the sequences of the share of their tokens, of those that count, that have the largest logit."""
        counted = targets != IGNORED
        right = (outputs.argmax(dim=2) == targets) & counted
        return (right.sum(dim=1) / counted.sum(dim=1).clamp(min=1)).sum()

    def count_tokens(self, targets: Tensor) -> int:
        """Count those that are not ignored."""
        return int((targets != IGNORED).sum())

    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Check that outputs are logits, one for each class and token."""
        if outputs.ndim != 3 or not outputs.is_floating_point():
            raise DataError(
                f"{where}: the model's outputs have shape {tuple(outputs.shape)} and type {outputs.dtype}; the "
                "per-token likelihood needs logits of shape (batch, tokens, classes)"
            )

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Check that there is a class for every token."""
        if tuple(targets.shape[1:]) != tuple(output_shape[:1]) or targets.is_floating_point():
            raise DataError(
                f"{where}: the labels have shape {tuple(targets.shape)} and type {targets.dtype}; the per-token "
                f"likelihood needs integers of shape (batch, {output_shape[0]}), one for each token"
            )
        _check_classes(targets[targets != IGNORED], output_shape[-1], where)

    def draw(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        """See `Likelihood`: what fills up a batch takes no random numbers, so that its size does not matter."""
        if targets is None:
            return self.sample(outputs, generator)
        drawn = targets.clone()
        drawn[targets != IGNORED] = self.sample(outputs[targets != IGNORED], generator)
        return drawn

    def counted(self, factors: Factors, targets: Tensor | None) -> Factors:
        """See `Likelihood`: of a token that is ignored there is nothing."""
        if targets is None or not (ignored := targets == IGNORED).any():
            return factors
        kept = ~ignored[..., None]
        return Factors(factors.count, lambda m: factors[m] * kept, lambda: factors.squares() * kept)

    def exact(self, outputs: Tensor) -> Factors:
        """Those of each token by itself, at most classes - 1: given the input, tokens are independent."""
        tokens = outputs.shape[1]
        each = softmax_factors(outputs.softmax(dim=2).flatten(0, 1))

        def make(m: int) -> Tensor:
            token, k = divmod(m, each.count)
            vector = torch.zeros_like(outputs)
            vector[:, token] = each[k].view_as(outputs)[:, token]
            return vector

        return Factors(tokens * each.count, make, lambda: each.squares().view_as(outputs))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`e_y - p` for every token that counts."""
        counted = targets != IGNORED
        return super().score(outputs, targets.where(counted, 0)).mul_(counted[..., None])


class Bernoulli(Likelihood):
    """Independent yes-or-no answers: outputs are logits of any shape, targets 0 or 1 (or between) in that shape."""

    name = "bernoulli"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Binary cross-entropy, summed over a sample's answers."""
        outputs = wide(outputs)
        return functional.binary_cross_entropy_with_logits(outputs, targets.to(outputs), reduction="sum") / len(outputs)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum over the samples of the share of their answers that are on the right side."""
        return (
            ((outputs > 0) == (targets > 0.5)).flatten(1).float().mean(dim=1).sum()
            if outputs.ndim > 1
            else ((outputs > 0) == (targets > 0.5)).sum()
        )

    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Check that outputs are numbers."""
        _check_real(self.name, outputs, where)

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Check that targets lie between 0 and 1, in the shape of the outputs."""
        _check_shape(self.name, targets, output_shape, where)
        if targets.numel() and not 0 <= targets.min() <= targets.max() <= 1:
            raise DataError(
                f"{where}: targets run from {targets.min():g} to {targets.max():g}; the bernoulli likelihood needs "
                "them between 0 and 1"
            )

    def exact(self, outputs: Tensor) -> Factors:
        """`S_n` is diagonal, `p (1 - p)`: one vector to an answer."""
        return diagonal_factors(outputs.sigmoid() * (-outputs).sigmoid())

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`y - p`, written so that nothing cancels near certainty."""
        y = targets.to(outputs)
        return y * (-outputs).sigmoid() - (1 - y) * outputs.sigmoid()

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw with one uniform number to an answer."""
        p = outputs.sigmoid()
        return (torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p) < p).to(p)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the more likely answers."""
        return (outputs > 0).to(outputs)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the logits, which say log p and log(1 - p) alike."""
        return outputs.clamp(-_LARGEST, _LARGEST)

    def divergence(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """`p (log p - log q) + (1 - p) (log(1 - p) - log(1 - q))`, summed over the answers."""
        a, b = answers, self.answers(outputs)
        yes = a.sigmoid() * (functional.logsigmoid(a) - functional.logsigmoid(b))
        no = (-a).sigmoid() * (functional.logsigmoid(-a) - functional.logsigmoid(-b))
        return (yes + no).reshape(len(a), -1).sum(dim=1).clamp(min=0)

    def unchanged(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """Return the share of answers on the same side; one that was on neither may be on any."""
        same = (answers == 0) | ((answers > 0) == (outputs > 0))
        return same.reshape(len(same), -1).to(answers).mean(dim=1)


class Gaussian(Likelihood):
    """Regression with unit variance: outputs of any shape are means, targets have that shape."""

    name = "gaussian"
    metric = None
    kept = torch.float32  # half precision would be too coarse for means that are large beside the unit variance

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Half the squared error, summed over a sample's outputs, and the constant `log(2 pi) / 2` for each."""
        outputs = wide(outputs)
        constant = 0.5 * math.log(2 * math.pi) * outputs[0].numel()
        return 0.5 * (outputs - targets.to(outputs)).square().sum() / len(outputs) + constant

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Nothing is right or wrong here."""
        return outputs.new_tensor(math.nan)

    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Check that outputs are numbers."""
        _check_real(self.name, outputs, where)

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Check that targets have the shape of the outputs."""
        _check_shape(self.name, targets, output_shape, where)

    def exact(self, outputs: Tensor) -> Factors:
        """`S_n` is the identity: one vector to an output."""
        return diagonal_factors(torch.ones_like(outputs))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`y - f(x)`."""
        return targets.to(outputs) - outputs

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Add a normal number to each output, by the inverse transform: `randn` draws in blocks."""
        uniform = torch.rand(outputs.shape, generator=generator, dtype=torch.float64)
        normal: Tensor = torch.special.ndtri(uniform.clamp(min=1e-300))
        return outputs + normal.to(outputs)

    def answers(self, outputs: Tensor) -> Tensor:
        """Return the means."""
        return outputs

    def divergence(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """Half the squared distance of the means."""
        return 0.5 * (answers - outputs).reshape(len(answers), -1).square().sum(dim=1)


def _check_real(name: str, outputs: Tensor, where: str) -> None:
    if not outputs.is_floating_point() or outputs.numel() == 0:
        raise DataError(
            f"{where}: the model's outputs have shape {tuple(outputs.shape)} and type {outputs.dtype}; the {name} "
            "likelihood needs real numbers"
        )


def _check_shape(name: str, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
    if tuple(targets.shape[1:]) != tuple(output_shape):
        raise DataError(
            f"{where}: the targets have shape {tuple(targets.shape)}; the {name} likelihood needs the shape of the "
            f"outputs, ({', '.join(['batch', *map(str, output_shape)])}). Class labels go with categorical"
        )


def _check_classes(targets: Tensor, classes: int, where: str) -> None:
    if not targets.numel():
        return
    least, most = targets.aminmax()
    if least < 0 or most >= classes:
        beyond = targets[(targets < 0) | (targets >= classes)]
        found = ", ".join(str(label) for label in sorted(set(beyond.tolist()))[:10])
        raise DataError(
            f"{where}: {beyond.numel()} of {targets.numel()} labels are not among the model's {classes} classes "
            f"(0 to {classes - 1}): found {found}. Choose the classes with ?classes=0-{classes - 1}, or use a "
            "model with more outputs"
        )


_LIKELIHOODS: dict[str, Likelihood] = {
    likelihood.name: likelihood for likelihood in (Categorical(), PerToken(), Bernoulli(), Gaussian())
}


def get_likelihood(name: str) -> Likelihood:
    """Return the likelihood of that name.

    Raises:
        UsageError: if there is none, listing those that there are.
    """
    if name not in _LIKELIHOODS:
        raise UsageError(f"no likelihood is called {name!r}. {suggest(name, _LIKELIHOODS)}")
    return _LIKELIHOODS[name]
