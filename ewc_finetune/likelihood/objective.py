"""What training makes small: the likelihood's loss with smoothed labels, weights or focus, or a loss of one's own.

It is of training alone. The curvature, the penalty and all scores stay those of the likelihood.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ewc_finetune.errors import DataError, EwcError, NonFiniteError, UsageError, few, first_line
from ewc_finetune.likelihood.base import IGNORED, Likelihood
from ewc_finetune.likelihood.bernoulli import Bernoulli
from ewc_finetune.likelihood.categorical import Categorical, PerToken
from ewc_finetune.modules.precision import wide
from ewc_finetune.specs.importing import find, value_of, working_directory_on_path
from ewc_finetune.specs.query import parse

Loss = Callable[[Tensor, Tensor], Tensor]
# The likelihoods whose loss each option changes.
_TAKEN_BY = {
    "label_smoothing": (Categorical.name, PerToken.name),
    "class_weights": (Categorical.name, PerToken.name),
    "focal": (Categorical.name, PerToken.name, Bernoulli.name),
}


@dataclass(frozen=True)
class Objective:
    """How the loss of training differs from the likelihood's; not at all unless something is given.

    Attributes:
        label_smoothing: The share of each label that is spread evenly over all classes (Szegedy et al. 2016).
        class_weights: What the loss of each class is multiplied by, one number for each of the model's outputs; or
            `balanced`, which is still to be counted.
        focal: Gamma of the focal loss (Lin et al. 2017, equation 4): the loss of an answer of probability p is
            multiplied by (1 - p)^gamma.
        own: A function of outputs and targets in the place of all that, which returns the mean over the batch.
        name: What to call that function.
    """

    label_smoothing: float = 0.0
    class_weights: Sequence[float] | Literal["balanced"] | None = None
    focal: float = 0.0
    own: Loss | None = None
    name: str = ""

    def __str__(self) -> str:
        """Say it in words; nothing where it is the likelihood's."""
        weights = self.class_weights
        parts = [
            f"the loss {self.name}" if self.own is not None else "",
            f"labels smoothed by {self.label_smoothing:g}" if self.label_smoothing else "",
            f"class weights {_numbers(weights)}" if weights is not None else "",
            f"focal loss of gamma {self.focal:g}" if self.focal else "",
        ]
        return ", ".join(filter(None, parts))

    def bound(self, likelihood: Likelihood, classes: int) -> Loss:
        """Return the loss of training for these outputs: a scalar to differentiate, the mean over the batch.

        Args:
            likelihood: The outputs' likelihood, which knows those that count.
            classes: How many outputs there are to an answer.

        Raises:
            UsageError: if there are more or fewer class weights.
        """
        weights = self.class_weights
        if weights is not None and len(weights) != classes:
            raise UsageError(
                f"there are {len(weights)} class weights, and the model has {classes} outputs; expected one for each"
            )
        if self.own is not None:
            return _Checked(self.own, self.name, likelihood)
        if not str(self):
            return likelihood.loss
        return functools.partial(self._mean, likelihood)

    def _mean(self, likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sum the losses of all answers, by the number of samples: however they are batched, each counts alike."""
        samples = len(outputs)
        weights, smoothing = None, self.label_smoothing
        if self.class_weights is not None:
            weights, _ = likelihood.counting(torch.tensor(self.class_weights, dtype=torch.float64), targets)
        outputs, targets = likelihood.rows(outputs, targets)
        outputs = wide(outputs)
        weights = None if weights is None else weights.to(outputs)
        if likelihood.name == Bernoulli.name:
            yes, no = (_focused(functional.logsigmoid(sign * outputs), self.focal) for sign in (1, -1))
            y = targets.to(outputs)
            return (y * yes + (1 - y) * no).sum() / samples
        targets = targets.to(outputs) if targets.is_floating_point() else targets
        if self.focal == 0:
            total = functional.cross_entropy(outputs, targets, weights, reduction="sum", label_smoothing=smoothing)
            return total / samples
        # The loss of every class, if it were the label.
        each = _focused(outputs.log_softmax(dim=1), self.focal)
        each = each if weights is None else each * weights
        soft = targets.is_floating_point()
        total = (targets * each).sum() if soft else each.gather(1, targets[:, None]).sum()
        if smoothing:
            total = (1 - smoothing) * total + smoothing * each.mean(dim=1).sum()
        return total / samples


def _focused(log_p: Tensor, gamma: float) -> Tensor:
    """Return `-(1 - p)^gamma log p`."""
    # Where p rounds to 1, a root of 0 would have no gradient.
    return -(-log_p.expm1()).clamp(min=torch.finfo(log_p.dtype).tiny).pow(gamma) * log_p


class _Checked:
    """A loss of the user's own, seen to be one."""

    def __init__(self, function: Loss, name: str, likelihood: Likelihood) -> None:
        self.function, self.name, self.likelihood, self.known = function, name, likelihood, False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what it gives for the outputs that count, in float32 or wider.

        Raises:
            EwcError: if it fails.
            UsageError: if it gives no scalar with a gradient.
            NonFiniteError: if the first one, or its gradient, is not finite.
        """
        outputs, targets = self.likelihood.counting(wide(outputs), targets)
        try:
            loss: Any = self.function(outputs, targets)
        except Exception as error:
            raise EwcError(
                f"the loss {self.name} failed with {type(error).__name__}: {first_line(error)}. It was given "
                f"{_kind('outputs', outputs)} and {_kind('targets', targets)}"
            ) from error
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            found = _kind("a tensor", loss) if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(f"the loss {self.name} gave {found}; expected a scalar, the mean over the batch")
        if not self.known:
            self._check(loss, outputs)
            self.known = True
        return loss

    def _check(self, loss: Tensor, outputs: Tensor) -> None:
        gradient = None
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        if gradient is None:
            raise UsageError(
                f"the loss {self.name} has no gradient by the outputs: nothing would be learned. It must be made of "
                "them by operations of torch, without detach, item or argmax"
            )
        if not (loss.isfinite() and gradient.isfinite().all()):
            what = "" if not loss.isfinite() else ", and its gradient is not finite"
            raise NonFiniteError(f"the loss {self.name} is {loss.item():g} on the first batch{what}")


def objective_of(options: Any, likelihood: str) -> Objective:
    """Return what the options of a training ask for.

    Args:
        options: Has `loss`, `class_weights`, `focal` and `label_smoothing`.
        likelihood: Name of the likelihood.

    Raises:
        UsageError: if an option is of another likelihood's loss, or of none beside a loss of one's own; if there is no
            such loss.
    """
    for option, takers in _TAKEN_BY.items():
        value = getattr(options, option)
        if not value:
            continue
        said = option.replace("_", " ") + (" are " if option.endswith("s") else " is ") + _numbers(value)
        if options.loss is not None:
            raise UsageError(
                f"{said}, and --loss takes the place of the loss that it would change; leave one of them out"
            )
        if likelihood not in takers:
            raise UsageError(f"{said}, and the {likelihood} likelihood has none; it is for {' and '.join(takers)}")
    own, name = _named(options.loss)
    return Objective(options.label_smoothing, options.class_weights or None, options.focal, own, name)


def _named(loss: str | Loss | None) -> tuple[Loss | None, str]:
    """Return the function that is meant, and its name; importing it is for whoever named it to have allowed."""
    if loss is None:
        return None, ""
    if not isinstance(loss, str):
        return loss, getattr(loss, "__name__", type(loss).__name__)
    address, code = parse(loss), names_code(loss)
    if code is None:
        raise UsageError(
            f"loss is {loss!r}; expected package.module:function, which takes outputs and targets and returns the mean "
            "over the batch (torch.nn.functional:huber_loss, say)"
        )
    with working_directory_on_path(first=True):
        function = find(code, "loss", UsageError)
    if isinstance(function, type) or not callable(function):
        raise UsageError(
            f"{loss} is {'a class' if isinstance(function, type) else type(function).__name__}; expected "
            "a function of outputs and targets"
        )
    arguments = {key: value_of(text) for key, text in address.options.items()}
    return functools.partial(function, **arguments) if arguments else function, loss


def names_code(loss: str) -> str | None:
    """Return the `module:function` that a loss would import, if it is one."""
    head = parse(loss).head
    module, colon, name = head.partition(":")
    return head if colon and all(part.isidentifier() for part in [*module.split("."), *name.split(".")]) else None


def balanced(targets: Sequence[Tensor], classes: int, where: str, times: Sequence[float] = ()) -> list[float]:
    """Return a weight for each class that is the inverse of how often it is a label, with a mean of 1 over the labels.

    A class that is no label has the weight 1. Soft labels count as the shares that they are.

    Args:
        targets: All targets, class indices or soft labels.
        classes: How many classes there are.
        where: The name of the data, for messages.
        times: How often each part of the targets counts; once unless given.

    Raises:
        DataError: if there is none.
    """
    counts = torch.zeros(classes, dtype=torch.float64)
    for part, often in zip(targets, times or [1.0] * len(targets), strict=True):
        soft = part.is_floating_point()
        own = part.double().sum(dim=0) if soft else part[part != IGNORED].bincount(minlength=classes)
        counts += often * own
    there = counts > 0
    if not there.any():
        raise DataError(f"{where} has no labels to balance by")
    each = counts.sum() / there.sum()
    return torch.where(there, each / counts, 1.0).tolist()


def _numbers(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return few([f"{number:.4g}" for number in value])
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(what: str, tensor: Tensor) -> str:
    return f"{what} of shape {tuple(tensor.shape)} and type {tensor.dtype}"
