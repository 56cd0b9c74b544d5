"""Ways to the sum of squared per-sample gradients: ours, the two slow ones, and the libraries that have one.

Each takes a model (in eval mode) and a case, and returns a function of one batch that does the work and returns
nothing; what it computes is the empirical Fisher's diagonal, up to the constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from models import EXACT, LOOP_EXACT, Case
from torch import Tensor, nn
from torch.nn import functional

from ewc_finetune.choices import Estimator
from ewc_finetune.curvature import fallback
from ewc_finetune.curvature.fisher import compute_fisher
from ewc_finetune.likelihood.registry import get_likelihood

Batches = Iterable[tuple[Tensor, Tensor]]
Run = Callable[[Batches], object]


def plain(model: nn.Module, case: Case) -> Run:
    """One forward and one backward pass: the unit of all figures."""
    likelihood = get_likelihood(case.likelihood)

    def run(batches: Batches) -> None:
        for inputs, targets in batches:
            model.zero_grad(set_to_none=True)
            likelihood.loss(model(inputs), targets).backward()

    return run


def ours(model: nn.Module, case: Case) -> Run:
    """The whole pass as anyone calls it, with its checks, scores and standard errors."""
    return lambda batches: compute_fisher(model, batches, get_likelihood(case.likelihood), "empirical")


def ours_exact(model: nn.Module, case: Case) -> Run:
    """The same with the exact estimator."""
    return lambda batches: compute_fisher(model, batches, get_likelihood(case.likelihood), "exact")


def loop(model: nn.Module, case: Case) -> Run:
    """One sample after the other."""
    return _by_fallback(model, case, fallback.one_at_a_time, None)


def loop_exact(model: nn.Module, case: Case) -> Run:
    """One sample after the other, and one class after the other."""
    return _by_fallback(model, case, fallback.one_at_a_time, None, "exact")


def vmap(model: nn.Module, case: Case) -> Run:
    """`torch.func`, in chunks of the size that was fastest here."""
    return _by_fallback(model, case, fallback.vectorised, fallback.chunk_size(dict(model.named_parameters())))


def _by_fallback(
    model: nn.Module, case: Case, way: fallback.Fallback, step: int | None, estimator: Estimator = "empirical"
) -> Run:
    parameters = dict(model.named_parameters())
    likelihood = get_likelihood(case.likelihood)

    def run(batches: Batches) -> None:
        for inputs, targets in batches:
            with torch.no_grad():
                outputs = model(inputs)
            fisher = likelihood.output_fisher(outputs, targets, estimator, torch.Generator())
            for start in range(0, len(inputs), step or len(inputs)):
                part = slice(start, start + (step or len(inputs)))
                way(model, parameters, inputs[part], fisher.vectors(part))

    return run


def backpack(model: nn.Module, case: Case) -> Run:
    """BackPACK's sum of squared gradients."""
    from backpack import backpack as extensions
    from backpack import extend
    from backpack.extensions import SumGradSquared

    extended = extend(model, use_converter=case.converter)
    loss = extend(nn.CrossEntropyLoss(reduction="sum"))

    def run(batches: Batches) -> None:
        for inputs, targets in batches:
            with extensions(SumGradSquared()):
                loss(extended(inputs), targets).backward()

    return run


def nngeometry(model: nn.Module, case: Case) -> Run:
    """NNGeometry's diagonal of J^T J, where J is of the log-likelihood."""
    from nngeometry.backend import TorchHooksJacobianBackend
    from nngeometry.layercollection import LayerCollection
    from nngeometry.object import PMatDiag
    from torch.utils.data import DataLoader, TensorDataset

    layers = LayerCollection.from_model(model)

    def log_likelihood(inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = model(inputs)
        if outputs.ndim == 3:
            outputs = outputs.transpose(1, 2)
        each = -functional.cross_entropy(outputs, targets, reduction="none")
        return each.reshape(len(inputs), -1).sum(dim=1, keepdim=True)

    def run(batches: Batches) -> None:
        for inputs, targets in batches:
            loader = DataLoader(TensorDataset(inputs, targets), batch_size=len(inputs))
            backend = TorchHooksJacobianBackend(model=model, function=log_likelihood, layer_collection=layers)
            PMatDiag(generator=backend, examples=loader)

    return run


def opacus(model: nn.Module, case: Case) -> Run:
    """Opacus' per-sample gradients, squared and summed; its hooks work in training mode only."""
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="sum").train()
    likelihood = get_likelihood(case.likelihood)

    def run(batches: Batches) -> None:
        for inputs, targets in batches:
            (likelihood.loss(wrapped(inputs), targets) * len(inputs)).backward()
            for parameter in wrapped.parameters():
                parameter.grad_sample.square().sum(dim=0)
            wrapped.zero_grad(set_to_none=True)

    return run


# Those that take so long that a batch in each of two turns must do.
SLOW = {"loop over samples", LOOP_EXACT, "vmap"}
METHODS = {
    "ewc-finetune": ours,
    EXACT: ours_exact,
    "loop over samples": loop,
    LOOP_EXACT: loop_exact,
    "vmap": vmap,
    "BackPACK": backpack,
    "NNGeometry": nngeometry,
    "Opacus": opacus,
}
