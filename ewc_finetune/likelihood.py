"""Likelihoods: how a model's outputs become log p(y | x), and how its Fisher looks at the outputs.

The Fisher of the weights is `mean_n J_n^T S_n J_n`, with `J_n` the Jacobian of sample n's outputs by the weights and
`S_n` the Fisher at the outputs. Each estimator is a choice of vectors `s_m` with `S_n = sum_m s_m s_m^T` (exact), or
equal to it in expectation (sampled), or of labels that are not the model's own (predicted, empirical). Everything
above this file needs only those vectors; see Martens 2020, "New insights and perspectives on the natural gradient
method", section 9, and Kunstner et al. 2019 on what the empirical one is not.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ewc_finetune.address import suggest
from ewc_finetune.choices import Estimator
from ewc_finetune.errors import DataError, UsageError


class Likelihood(Protocol):
    """What the rest of the package asks of a likelihood."""

    name: str

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of a batch, in nats, as a scalar that can be differentiated."""

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return how many samples of the batch the model gets right, as a scalar."""

    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Refuse outputs that this likelihood cannot take, naming `where` they came from."""

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Refuse targets that do not go with one sample's outputs of shape `output_shape`."""

    def output_factors(
        self, outputs: Tensor, targets: Tensor | None, estimator: Estimator, generator: torch.Generator
    ) -> Tensor:
        """Return the vectors `s_m` of the module's docstring, shape `(M, *outputs.shape)`, detached.

        `generator` (on the CPU) is drawn from by `sampled` alone. `batched` has the vectors of `empirical`: it differs
        in when the gradients are squared, which is not decided here.
        """


class Categorical:
    """Softmax over classes: outputs are logits of shape `(batch, classes)`, targets are class indices `(batch,)`."""

    name = "categorical"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, mean over the batch, in nats."""
        return functional.cross_entropy(outputs.float() if _is_half(outputs) else outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Count the samples whose largest logit is the target's."""
        return (outputs.argmax(dim=1) == targets).sum()

    def check_outputs(self, outputs: Tensor, where: str) -> None:
        """Check that outputs are logits.

        Raises:
            DataError: naming the shape and type that were found.
        """
        if outputs.ndim != 2 or not outputs.is_floating_point():
            raise DataError(
                f"{where}: the model's outputs have shape {tuple(outputs.shape)} and type {outputs.dtype}; the "
                "categorical likelihood needs logits of shape (batch, classes)"
            )

    def check_targets(self, targets: Tensor, output_shape: tuple[int, ...], where: str) -> None:
        """Check that every target is one of the classes.

        Raises:
            DataError: naming the shape that was found, or the labels beyond the classes and how many they are.
        """
        if targets.ndim != 1 or targets.is_floating_point():
            raise DataError(
                f"{where}: the labels have shape {tuple(targets.shape)} and type {targets.dtype}; the categorical "
                "likelihood needs one integer for each sample"
            )
        (classes,) = output_shape
        beyond = targets[(targets < 0) | (targets >= classes)]
        if beyond.numel():
            found = ", ".join(str(label) for label in sorted(set(beyond.tolist()))[:10])
            raise DataError(
                f"{where}: {beyond.numel()} of {targets.numel()} labels are not among the model's {classes} classes "
                f"(0 to {classes - 1}): found {found}. Choose the classes with ?classes=0-{classes - 1}, or use a "
                "model with more outputs"
            )

    def output_factors(
        self, outputs: Tensor, targets: Tensor | None, estimator: Estimator, generator: torch.Generator
    ) -> Tensor:
        """Gradients of log-softmax by the logits, `e_y - p`, for the estimator's choice of y.

        `exact` has M = classes vectors, `sqrt(p_c) (e_c - p)`, whose outer products sum to `diag(p) - p p^T`;
        every other estimator has M = 1. Computed in float32 for half-precision outputs.

        Raises:
            DataError: if the estimator needs labels and there are none.
        """
        logits = outputs.detach()
        if _is_half(logits):
            logits = logits.float()
        p = logits.softmax(dim=1)
        classes = p.shape[1]
        if estimator == "exact":
            identity = torch.eye(classes, dtype=p.dtype, device=p.device)
            return p.T.sqrt()[:, :, None] * (identity[:, None, :] - p[None])  # (M, batch, classes), M = classes
        if estimator == "sampled":
            # Inverse transform with one uniform number a sample: the draws don't depend on the batch size.
            uniform = torch.rand(len(p), 1, generator=generator, dtype=torch.float64).to(p)
            labels = (p.cumsum(dim=1) < uniform).sum(dim=1).clamp(max=classes - 1)
        elif estimator == "predicted":
            labels = p.argmax(dim=1)
        elif targets is None:
            raise DataError(f"the {estimator} estimator needs labels and this data has none; use exact or sampled")
        else:
            labels = targets
        return (functional.one_hot(labels, classes).to(p.dtype) - p)[None]


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


_LIKELIHOODS: dict[str, Likelihood] = {likelihood.name: likelihood for likelihood in (Categorical(),)}


def get_likelihood(name: str) -> Likelihood:
    """Return the likelihood of that name.

    Raises:
        UsageError: if there is none, listing those that there are.
    """
    if name not in _LIKELIHOODS:
        raise UsageError(f"no likelihood is called {name!r}. {suggest(name, _LIKELIHOODS)}")
    return _LIKELIHOODS[name]
