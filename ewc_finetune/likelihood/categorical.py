"""One class for each sample, or for each token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ewc_finetune.errors import DataError
from ewc_finetune.likelihood.base import IGNORED, LARGEST_OUTPUT, Likelihood, check_classes, check_probabilities
from ewc_finetune.likelihood.output_fisher import OutputFisher, softmax_fisher
from ewc_finetune.modules.precision import wide


class Categorical(Likelihood):
    """Softmax over classes: outputs are logits of shape `(batch, classes)`, targets are class indices `(batch,)`.

    Targets may also be soft labels: a probability for each class, shape `(batch, classes)`.
    """

    name = "categorical"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        outputs = wide(outputs)
        return functional.cross_entropy(outputs, targets.to(outputs) if targets.is_floating_point() else targets)

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the samples whose largest logit is the target's, or of a soft label that of its likeliest class."""
        return (outputs.argmax(dim=1) == hard(targets)).sum()

    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Check that outputs are logits, one for each class."""
        if outputs.ndim != 2 or not outputs.is_floating_point():
            raise DataError(
                f"{where}: the model's outputs have shape {tuple(outputs.shape)} and type {outputs.dtype}; the "
                "categorical likelihood needs logits of shape (batch, classes)"
            )

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Check that every target is one of the classes, or a probability for each of them."""
        if targets.ndim == 2 and targets.is_floating_point():
            check_probabilities(targets, output_shape[-1], where)
            return
        if targets.ndim != 1 or targets.is_floating_point():
            raise DataError(
                f"{where}: the labels have shape {tuple(targets.shape)} and type {targets.dtype}; the categorical "
                f"likelihood needs one integer for each sample, or probabilities of shape (batch, {output_shape[-1]}). "
                "Numbers to predict go with --likelihood gaussian, several answers of yes and no with bernoulli"
            )
        check_classes(targets, output_shape[-1], where)

    def exact(self, outputs: Tensor) -> OutputFisher:
        """See `softmax_fisher`: at most classes - 1 vectors."""
        return softmax_fisher(outputs.softmax(dim=1))

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`e_y - p`, in which the sum of the others takes the place of `1 - p_y`, which would cancel near certainty."""
        if targets.is_floating_point():
            raise DataError(
                "the labels are probabilities, and this estimator takes one class for each sample; use exact or sampled"
            )
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
        return (outputs - outputs.amax(dim=-1, keepdim=True)).clamp(min=-LARGEST_OUTPUT)

    def divergence(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """`sum_y p (log p - log q)` over the classes that p knows; classes that came later have a part in q alone."""
        p = answers.log_softmax(dim=-1)
        q = outputs.log_softmax(dim=-1).clamp(min=-LARGEST_OUTPUT)[..., : answers.shape[-1]]
        return functional.kl_div(q, p, reduction="none", log_target=True).sum(dim=-1).clamp(min=0)

    def unchanged(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """Whether the largest logit is of a class that no other was likelier than."""
        best = outputs.argmax(dim=-1, keepdim=True)
        known = best < answers.shape[-1]
        as_likely = answers.gather(-1, best.where(known, 0)) == answers.amax(dim=-1, keepdim=True)
        return (known & as_likely)[..., 0].to(answers)

    def comparable(self, answers: Tensor, outputs: Tensor) -> bool:
        """Whether there are logits for all the classes that are kept."""
        return outputs.ndim == 2 and outputs.shape[1] >= answers.shape[1]


def hard(targets: Tensor) -> Tensor:
    """Return class indices: as they are, or of soft labels, shape `(rows, classes)`, the likeliest of each."""
    return targets.argmax(dim=1) if targets.is_floating_point() else targets


class PerToken(Categorical):
    """A categorical for each token of a sequence, which is one sample: log p(y | x) is their sum.

    Outputs are logits of shape `(batch, tokens, classes)`, targets class indices `(batch, tokens)`, in which -100 marks
    tokens that don't count, whatever the estimator. Without targets every token counts.
    """

    name = "per-token"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, summed over the tokens of each sequence that count."""
        logits, labels = wide(outputs).flatten(0, 1), targets.flatten()
        return functional.cross_entropy(logits, labels, reduction="sum") / len(outputs)

    def rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Likelihood`."""
        counted = targets != IGNORED
        return outputs[counted], targets[counted]

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
        check_classes(targets[targets != IGNORED], output_shape[-1], where)

    def draw(self, outputs: Tensor, targets: Tensor | None, generator: torch.Generator) -> Tensor:
        """See `Likelihood`: what fills up a batch takes no random numbers, so that its size does not matter."""
        if targets is None:
            return self.sample(outputs, generator)
        drawn = targets.clone()
        drawn[targets != IGNORED] = self.sample(outputs[targets != IGNORED], generator)
        return drawn

    def counted(self, fisher: OutputFisher, targets: Tensor | None) -> OutputFisher:
        """See `Likelihood`: of a token that is ignored there is nothing."""
        if targets is None or not (ignored := targets == IGNORED).any():
            return fisher
        kept = ~ignored[..., None]
        return OutputFisher(fisher.count, lambda m: fisher[m] * kept, lambda: fisher.squares() * kept)

    def exact(self, outputs: Tensor) -> OutputFisher:
        """Take the vectors of each token by itself, at most classes - 1: given the input, tokens are independent."""
        tokens = outputs.shape[1]
        each = softmax_fisher(outputs.softmax(dim=2).flatten(0, 1))

        def make(m: int) -> Tensor:
            token, k = divmod(m, each.count)
            vector = torch.zeros_like(outputs)
            vector[:, token] = each[k].view_as(outputs)[:, token]
            return vector

        return OutputFisher(tokens * each.count, make, lambda: each.squares().view_as(outputs))

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """`e_y - p` for every token that counts."""
        counted = targets != IGNORED
        return super().output_gradient(outputs, targets.where(counted, 0)).mul_(counted[..., None])
