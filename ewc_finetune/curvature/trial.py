"""The model run for two samples, each alone and both together: what it does with its parameters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ewc_finetune.curvature.call_recorder import Call, CallRecorder, Signature
from ewc_finetune.errors import ArchitectureError, DataError
from ewc_finetune.modules.batch import Inputs, call, count, each, take, tensors
from ewc_finetune.modules.devices import out_of_memory, random_state
from ewc_finetune.modules.precision import wide


@dataclass(frozen=True)
class ForwardPass:
    """What one run of the model showed.

    Attributes:
        outputs: The model's outputs, which autograd can differentiate.
        calls: Each call with a rule: its signature, a copy of its output, and the call.
        recorder: What saw them.
        mutates: Whether the model changed its own inputs in place.
    """

    outputs: Tensor
    calls: list[tuple[Signature, Tensor, Call]]
    recorder: CallRecorder
    mutates: bool


@dataclass(frozen=True)
class Trial:
    """What the model did with two samples.

    Attributes:
        samples: The two.
        singles: The runs with one of them.
        together: The run with both.
        repeated: Embeddings that were looked up for each sample; see `CallRecorder`.
    """

    samples: Inputs
    singles: list[ForwardPass]
    together: ForwardPass
    repeated: frozenset[str] = frozenset()


def try_two_samples(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Inputs) -> Trial:
    """Run the model for the first and the last of these samples.

    Raises:
        ArchitectureError: if the model draws random numbers, or a sample's outputs depend on the other one.
        DataError: if the first dimension of the outputs is not the batch.
    """
    samples = _two_samples(inputs)
    device = tensors(samples)[0].device
    state = torch.cat(random_state(device))
    trial = _try(model, parameters, samples)
    if not torch.equal(state, torch.cat(random_state(device))):
        raise ArchitectureError(
            "the model draws random numbers in eval mode: a sample has no gradient of its own then. Let what is "
            "random depend on self.training"
        )
    _check_independence(model, trial.together.outputs, [single.outputs for single in trial.singles])
    return trial


def with_repeated_lookups(model: nn.Module, parameters: Mapping[str, Tensor], trial: Trial) -> Trial:
    """Return the trial with embeddings looked up for each sample that the model looks up once for all of them.

    It is the same trial where there are none, or the model's outputs would be others.
    """
    repeated = frozenset(
        name
        for n, (signature, output, _) in enumerate(trial.together.calls)
        if signature[0] == "embedding"
        and all(n < len(single.calls) and single.calls[n][1].shape == output.shape for single in trial.singles)
        for name in signature[1]
    )
    if not repeated:
        return trial
    try:
        again = _try(model, parameters, trial.samples, repeated)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        if out_of_memory(error):
            raise
        return trial
    before, after = trial.together.outputs, again.together.outputs
    rounding = torch.finfo(after.dtype).eps ** 0.5
    same = before.shape == after.shape and torch.allclose(after, before, rtol=rounding, atol=rounding)
    return again if same else trial


def _two_samples(inputs: Inputs) -> Inputs:
    """Return two samples that differ: the first and the last, else the first and itself turned round."""

    def turned(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:1], tensor[:1].flip(-1) if tensor.ndim > 1 else tensor[:1]])

    if count(inputs) > 1:
        two = take(inputs, [0, count(inputs) - 1])
        if any(not torch.equal(tensor[0], tensor[1]) for tensor in tensors(two)):
            return two
    return each(turned, inputs)


def _try(
    model: nn.Module, parameters: Mapping[str, Tensor], samples: Inputs, repeated: frozenset[str] = frozenset()
) -> Trial:
    singles = [_run(model, parameters, take(samples, slice(n, n + 1)), repeated) for n in range(2)]
    return Trial(samples, singles, _run(model, parameters, samples, repeated), repeated)


def _run(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Inputs, repeated: frozenset[str]) -> ForwardPass:
    calls: list[tuple[Signature, Tensor, Call]] = []
    # The output is copied, for what comes next may change it in place.
    recorder = CallRecorder(
        model,
        parameters,
        lambda made: calls.append((made.signature, made.output.detach().clone(), made)),
        repeated=repeated,
        batch=count(inputs),
    )
    copy = each(torch.clone, inputs)
    with recorder.running(name_modules=True), warnings.catch_warnings():
        warnings.filterwarnings("error", "None of the inputs have requires_grad=True")
        try:
            outputs = call(model, copy)
        except UserWarning as error:
            raise ArchitectureError(
                "the model recomputes its activations with a checkpoint that autograd does not see through; use "
                "torch.utils.checkpoint(..., use_reentrant=False), or none"
            ) from error
    return ForwardPass(outputs, calls, recorder, mutates=any(tensor._version for tensor in tensors(copy)))


def _check_independence(model: nn.Module, together: Tensor, singles: list[Tensor]) -> None:
    """Refuse a model for which a sample's gradient is not defined, since the rest of its batch has a say."""
    if together.ndim == 0 or len(together) != 2 or any(single.ndim == 0 or len(single) != 1 for single in singles):
        raise DataError(
            f"2 samples went in and outputs of shape {tuple(together.shape)} came out; the first dimension must be "
            "the batch"
        )
    if any(single.shape[1:] != together.shape[1:] for single in singles):
        seen = f"shape {tuple(singles[0].shape[1:])} alone and {tuple(together.shape[1:])} with another"
    else:
        alone = torch.cat([single.detach() for single in singles])
        rounding = 1e-4 if together.dtype in (torch.float32, torch.float64) else 5e-2
        difference = wide(together.detach() - alone).abs().max().item()
        scale = wide(together.detach()).abs().max().clamp(min=1e-6).item()
        if not difference > rounding * scale:  # NaN is reported with the outputs of all samples
            return
        seen = f"they differ by {difference:.2g}, where the largest is {scale:.2g}"
    layers = [name for name, m in model.named_modules() if getattr(m, "track_running_stats", True) is False]
    hint = f"it has normalisation without running statistics: {', '.join(layers)}; " if layers else ""
    raise ArchitectureError(
        f"the model's outputs for a sample change with the other samples of its batch ({hint}{seen}); the Fisher is "
        "made of single samples' gradients, which such a model does not have"
    )
