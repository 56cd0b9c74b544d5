"""The diagonal Fisher of a model on data: one pass, the mean over samples of squared per-sample gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ewc_finetune.choices import ESTIMATORS, Estimator, check_choice
from ewc_finetune.curvature.per_sample import Engine, batch_mean, one_at_a_time, vectorised
from ewc_finetune.devices import random_state_kept
from ewc_finetune.errors import ArchitectureError, DataError, NonFiniteError
from ewc_finetune.likelihood import Likelihood
from ewc_finetune.modes import evaluating
from ewc_finetune.progress import Bar

# Per-sample gradients larger than this leave the cache, or the allocator's reuse of memory, and cost twice the time.
_CPU_BYTES = 24 << 20
_ACCELERATOR_BYTES = 1 << 30


@dataclass(frozen=True)
class DiagonalFisher:
    """What one pass over the data found.

    Attributes:
        values: The diagonal by parameter name, in the parameter's shape; float64 (float32 on mps).
        samples: How many samples were seen (N).
        scores: `loss` (mean negative log-likelihood of the labels, nats) and `accuracy`; empty without labels.
        path: How the gradients were taken, for people.
    """

    values: dict[str, Tensor]
    samples: int
    scores: dict[str, float]
    path: str


def diagonal_fisher(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor | None]],
    likelihood: Likelihood,
    estimator: Estimator,
    *,
    parameters: Mapping[str, Tensor] | None = None,
    generator: torch.Generator | None = None,
    bar: Bar | None = None,
) -> DiagonalFisher:
    """Compute the diagonal Fisher information, `F_i = mean_n E_y[(d log p(y | x_n) / d theta_i)^2]`.

    What stands for E_y is the estimator's choice (Kirkpatrick et al. 2017, section 2). The model is used in eval mode
    and left exactly as it was: modes, statistics, gradients, flags, random state.

    Args:
        model: Maps a batch of inputs to outputs, each sample by itself.
        batches: Inputs and labels (or None) on the model's device. `batched` squares the mean of each as it comes.
        likelihood: Turns outputs into log p(y | x).
        estimator: Whose labels are used.
        parameters: Those to differentiate by; all that require a gradient unless given.
        generator: Source of `sampled` labels, on the CPU; seeded with 0 unless given.
        bar: Told of every chunk of samples.

    Raises:
        UsageError: for an unknown estimator.
        ArchitectureError: if a sample's outputs depend on the other samples of its batch.
        DataError: if there is no sample, or outputs or labels do not suit the likelihood.
        NonFiniteError: if the model's outputs, or the Fisher, hold NaN or infinity.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    if parameters is None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
    wide = torch.float32 if device.type == "mps" else torch.float64
    totals = {name: torch.zeros(p.shape, dtype=wide, device=device) for name, p in parameters.items()}
    engine: Engine = batch_mean if estimator == "batched" else vectorised
    path = "one gradient a batch" if estimator == "batched" else "per-sample gradients, vectorised (torch.func)"
    limit = None if estimator == "batched" else _chunk_size(parameters, device)
    samples, loss, correct, labelled = 0, 0.0, 0, True

    with evaluating(model), random_state_kept(device):
        for batch_inputs, batch_targets in batches:
            if samples == 0 and len(batch_inputs) > 1:
                _check_independence(model, batch_inputs[:2])
            step = limit or max(len(batch_inputs), 1)
            for start in range(0, len(batch_inputs), step):
                inputs = batch_inputs[start : start + step]
                targets = None if batch_targets is None else batch_targets[start : start + step]
                outputs = _forward(model, inputs, targets, likelihood, samples)
                if targets is None:
                    labelled = False
                else:
                    loss += likelihood.loss(outputs, targets).item() * len(inputs)
                    correct += int(likelihood.correct(outputs, targets))
                factors = likelihood.output_factors(outputs, targets, estimator, generator)
                if engine is vectorised and samples == 0 and (refusal := _refusal(model, parameters, inputs, factors)):
                    engine = one_at_a_time
                    path = f"per-sample gradients, one sample at a time (torch.func refused: {refusal})"
                for name, squares in engine(model, parameters, inputs, factors).items():
                    totals[name] += squares
                samples += len(inputs)
                if bar is not None:
                    bar.advance(len(inputs))
    if samples == 0:
        raise DataError("there is not one sample in the data, and no Fisher without one")
    values = {name: total.div_(samples) for name, total in totals.items()}
    for name, value in values.items():
        if not value.isfinite().all():
            raise NonFiniteError(
                f"the Fisher of {name} holds NaN or infinity: gradients overflow there. "
                "Check the weights and the scale of the inputs, or consolidate in float32"
            )
    scores = {"loss": loss / samples, "accuracy": correct / samples} if labelled else {}
    return DiagonalFisher(values, samples, scores, path)


def _chunk_size(parameters: Mapping[str, Tensor], device: torch.device) -> int:
    """How many samples' gradients of the largest parameter fit the budget."""
    largest = max((p.numel() for p in parameters.values()), default=1)
    budget = _CPU_BYTES if device.type == "cpu" else _ACCELERATOR_BYTES
    return max(1, min(512, budget // (4 * largest)))


def _refusal(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor, factors: Tensor) -> str | None:
    """Say why `vmap` cannot follow this model (data-dependent control flow, say), or None when it can."""
    try:
        vectorised(model, parameters, inputs[:1], factors[:, :1])
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        return str(error).strip().partition("\n")[0][:200]
    return None


@torch.no_grad()
def _forward(model: nn.Module, inputs: Tensor, targets: Tensor | None, likelihood: Likelihood, seen: int) -> Tensor:
    """Return the model's outputs, once outputs and targets are known to suit; `seen` samples came before these."""
    outputs = model(inputs)
    where = f"samples {seen} to {seen + len(inputs) - 1}"
    if not isinstance(outputs, Tensor):
        raise DataError(f"{where}: the model returned a {type(outputs).__name__}; one tensor of outputs is expected")
    if outputs.ndim == 0 or len(outputs) != len(inputs):
        raise DataError(
            f"{where}: {len(inputs)} samples went in and outputs of shape {tuple(outputs.shape)} came out; "
            "the first dimension must be the batch"
        )
    if not outputs.isfinite().all():
        bad = (~outputs.isfinite().reshape(len(inputs), -1).all(dim=1)).nonzero()[0].item()
        raise NonFiniteError(
            f"{where}: the model's outputs for sample number {bad} of these hold NaN or infinity. "
            "Check the weights and that sample's input"
        )
    likelihood.check_outputs(outputs, where)
    if targets is not None:
        likelihood.check_targets(targets, tuple(outputs.shape[1:]), where)
    return outputs


@torch.no_grad()
def _check_independence(model: nn.Module, two: Tensor) -> None:
    """Refuse a model for which a sample's gradient is not defined, since the rest of its batch has a say."""
    together, alone = model(two), model(two[:1])
    if not isinstance(together, Tensor) or not isinstance(alone, Tensor) or together.shape[1:] != alone.shape[1:]:
        return  # what is wrong here is said elsewhere
    rounding = 1e-4 if together.dtype in (torch.float32, torch.float64) else 5e-2
    if (together[0] - alone[0]).abs().max() > rounding * together.abs().max().clamp(min=1e-6):
        layers = [name for name, m in model.named_modules() if getattr(m, "track_running_stats", True) is False]
        hint = f" (it has normalisation without running statistics: {', '.join(layers)})" if layers else ""
        raise ArchitectureError(
            f"the model's outputs for a sample change with the other samples of its batch{hint}; the Fisher is made of "
            "single samples' gradients, which such a model does not have"
        )
