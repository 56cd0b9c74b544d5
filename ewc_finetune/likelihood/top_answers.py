"""Answers over large vocabularies in little space: the likeliest ones, and what is left for the others together.

The divergence is that between the two models' distributions over `k + 1` events: each of the k likeliest tokens, and
any other. It is never more than that over the whole vocabulary (by the log sum inequality).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ewc_finetune.likelihood.categorical import PerToken
from ewc_finetune.modules.precision import wide

# The logarithm of a probability is at least this, so that it is finite where there are no others.
_LEAST = -1e4


class TopAnswers(PerToken):
    """The per-token likelihood, of which only the k likeliest classes are kept.

    What is kept of a token has shape `(k + 1, 2)`: class and log p of each, and at last -1 and log p of any other.

    Args:
        k: How many classes are kept.
    """

    kept = torch.float32

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def answers(self, outputs: Tensor) -> Tensor:
        """Return classes and log p of the k likeliest, and log p of any other."""
        log_p = outputs.log_softmax(dim=-1)
        likeliest = log_p.topk(min(self.k, outputs.shape[-1]))
        classes = torch.cat([likeliest.indices, likeliest.indices.new_full((len(outputs), 1), -1)], dim=-1)
        return torch.stack([classes.to(outputs), _with_others(log_p, likeliest.indices)], dim=-1)

    def divergence(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """`sum_y p (log p - log q)` over the classes that are kept, and the others as one."""
        classes, p = answers[:, :-1, 0].long(), answers[..., 1]
        q = _with_others(wide(outputs).log_softmax(dim=-1), classes)
        return (p.exp() * (p - q)).sum(dim=-1).clamp(min=0)

    def unchanged(self, answers: Tensor, outputs: Tensor) -> Tensor:
        """Return 1 for each token whose likeliest class is the one that was, else 0."""
        return (outputs.argmax(dim=-1) == answers[:, 0, 0]).to(answers)

    def comparable(self, answers: Tensor, outputs: Tensor) -> bool:
        """Whether there are logits for all the classes that are kept."""
        return outputs.ndim == 2 and bool((answers[..., 0] < outputs.shape[1]).all())


def _with_others(log_p: Tensor, classes: Tensor) -> Tensor:
    """Return log p of some classes, and behind it that of all others together: their sum, for `1 - p` would cancel."""
    others = log_p.scatter(-1, classes, -math.inf).logsumexp(dim=-1, keepdim=True).clamp(min=_LEAST)
    return torch.cat([log_p.gather(-1, classes), others], dim=-1)
