"""A retention meter without the old data: some inputs are kept with the model's answers, and measured against later.

The divergence is `mean_n KL(p_n || q_n)` in nats, with p the predictions of the model that the probe was taken of and
q those of the model as it is now; of a sequence it is the sum over its tokens. What is kept of p is renormalised after
it was rounded, and so a model's divergence from itself is zero but for that rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ewc_finetune.anchor.probe_tensors import Probe
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.input_spec import InputSpec, dtype_of
from ewc_finetune.errors import AnchorMismatchError, DataError, NonFiniteError, first_line
from ewc_finetune.evaluation.bound_domain import BoundDomain
from ewc_finetune.likelihood.active import Active
from ewc_finetune.likelihood.base import IGNORED, Likelihood
from ewc_finetune.likelihood.categorical import PerToken
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.batch import Batch, Inputs, call, count, each, named, take
from ewc_finetune.modules.devices import out_of_memory, random_state_kept
from ewc_finetune.modules.modes import evaluating, unchanged
from ewc_finetune.modules.precision import wide
from ewc_finetune.storage.signals import safe_point

# Inputs that go through the model at once, unless it is said.
AT_ONCE = 32
# Numbers that are compared at once, in float64.
_COMPARED = 1 << 22


@dataclass(frozen=True)
class Retention:
    """What a model has kept of the answers in a probe.

    Attributes:
        anchor: The anchor that the probe is in.
        data: The spec of the data that its inputs were taken from.
        samples: How many there are.
        divergence: Mean over the inputs of the divergence of the model's predictions from those kept, in nats.
        unchanged: Share of the inputs whose most likely answer is the same (of a sample's tokens or answers, the mean
            share), 0 to 1; None where there is none (gaussian).
    """

    anchor: str
    data: str
    samples: int
    divergence: float
    unchanged: float | None

    @property
    def main(self) -> str:
        """The figures, for people."""
        same = "" if self.unchanged is None else f", {self.unchanged:.1%} unchanged"
        return f"{self.divergence:.4g} nats{same}"


def least_unchanged(retentions: Sequence[Retention]) -> float | None:
    """Return the smallest share of unchanged answers of several probes; None where no probe has any such share."""
    return min((retention.unchanged for retention in retentions if retention.unchanged is not None), default=None)


def take_probe(model: nn.Module, bound: BoundDomain, n: int, seed: int, device: torch.device) -> Probe:
    """Keep some inputs of a domain, and the model's answers to them.

    The model, its mode, its buffers and torch's random state are left as they were.

    Args:
        model: The model, on `device`.
        bound: The domain, as the model takes it.
        n: How many inputs: a random subset where samples can be chosen, the first of a stream or loader; all if there
            are fewer.
        seed: The seed that chooses the inputs.
        device: The device that the model is on.

    Raises:
        DataError: if there is no sample, or samples have shapes that don't go into one tensor.
        NonFiniteError: if the model answers with NaN.
    """
    domain, input_spec, likelihood = bound.domain, bound.input_spec, bound.likelihood
    with _as_it_is(model, device):
        inputs, labels = _choose(domain, n, seed)
        # The answers are those to the inputs as they are kept, rounded.
        inputs = each(_narrow, inputs)
        counted = None
        answers: list[Tensor] = []
        for part, outputs in _run(model, inputs, input_spec, device, AT_ONCE):
            likelihood.check_outputs(outputs, domain.name)
            rows = wide(outputs)
            if likelihood.name == PerToken.name:
                if counted is None:
                    counted = _counted(inputs, labels, outputs, likelihood, domain.name)
                rows = rows[counted[part].to(rows.device)]
            answers.append(likelihood.answers(rows).to("cpu", likelihood.kept))
    kept = torch.cat(answers)
    if not kept.isfinite().all():
        raise NonFiniteError(
            f"{domain.name}: the model answers samples of the probe with NaN or infinity. Check its weights and the "
            "data's values"
        )
    return Probe(
        inputs=inputs,
        outputs=kept,
        data=domain.name,
        split=domain.split,
        likelihood=likelihood.name,
        layout=input_spec.to_json(),
        active=domain.active,
        seed=seed,
        counted=counted,
    )


def measure(
    model: nn.Module, probe: Probe, device: torch.device, *, anchor: str = "", batch_size: int = AT_ONCE
) -> Retention:
    """Measure what a model has kept of the answers in a probe.

    The model, its mode, its buffers and torch's random state are left as they were, and no gradient is taken. A model
    that was given more outputs since is asked for the probabilities of the old ones among all; one that was given
    another head must have the old one in its place (`meters`).

    Args:
        model: The model, on `device`.
        probe: The probe of an anchor.
        device: The device that the model is on.
        anchor: The name of that anchor in messages.
        batch_size: How many inputs to compute at once.

    Raises:
        AnchorMismatchError: if the inputs don't go into the model, or its outputs are not comparable.
        NonFiniteError: if the divergence is not finite.
    """
    where = f"{anchor or 'the anchor'}: its probe of {probe.data}"
    plain = get_likelihood(probe.likelihood)
    likelihood = plain if probe.active is None else Active(plain, probe.active)
    divergence, same, asked, done = 0.0, 0.0, 0, 0
    with _as_it_is(model, device):
        for part, outputs in _asked(model, probe, device, batch_size, where):
            counted = None if probe.counted is None else probe.counted[part]
            if counted is not None and counted.shape != outputs.shape[:2]:
                raise AnchorMismatchError(f"{where} has {counted.shape[1]} tokens, and the model's outputs have not")
            rows = outputs if counted is None else outputs[counted.to(outputs.device)]
            old = probe.outputs[done : done + len(rows)]
            done += len(rows)
            if not likelihood.comparable(old, rows):
                raise AnchorMismatchError(
                    f"{where} has answers of shape {tuple(old.shape[1:])}, and the model's outputs have shape "
                    f"{tuple(rows.shape[1:])}: the anchor was made from another model, or from one with another head"
                )
            nats, share = _compare(likelihood, old, rows, device)
            divergence += nats.sum().item()
            if share is not None:
                hits, some = _by_sample(share, counted)
                same += hits
                asked += some
    divergence /= probe.samples
    if not math.isfinite(divergence):
        raise NonFiniteError(f"{where}: the model's divergence is {divergence}. Check its weights")
    return Retention(anchor, probe.data, probe.samples, divergence, same / asked if asked else None)


@contextmanager
def _as_it_is(model: nn.Module, device: torch.device) -> Iterator[None]:
    with evaluating(model), unchanged(model), random_state_kept(device), torch.no_grad():
        yield


def _run(
    model: nn.Module, inputs: Inputs, input_spec: InputSpec, device: torch.device, batch_size: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield which inputs are of a batch, and the model's outputs for them."""
    for start in range(0, count(inputs), batch_size):
        safe_point()
        part = slice(start, start + batch_size)
        moved = each(lambda tensor: tensor.to(device), take(inputs, part))
        yield part, call(model, input_spec.present(moved, dtype_of(model)))


def _asked(
    model: nn.Module, probe: Probe, device: torch.device, batch_size: int, where: str
) -> Iterator[tuple[slice, Tensor]]:
    """Yield as `_run` does; a file may say anything of its inputs, and a model raise anything for them."""
    batches = _run(model, probe.inputs, InputSpec.read(probe.layout), device, batch_size)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:
            if out_of_memory(error):
                raise
            raise AnchorMismatchError(f"{where} does not go into the model: {first_line(error)}") from error
        if batch is None:
            return
        yield batch


def _compare(
    likelihood: Likelihood, answers: Tensor, outputs: Tensor, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return the divergence of each row, and the share of its answers that are unchanged, in float64 on the CPU."""
    at = torch.device("cpu") if device.type == "mps" else device  # which has no float64
    size = max(1, _COMPARED // max(1, outputs[:1].numel()))
    nats, shares = [torch.zeros(0, dtype=torch.float64)], []
    for start in range(0, len(answers), size):
        part = slice(start, start + size)
        pair = answers[part].to(at).double(), outputs[part].to(at).double()
        nats.append(likelihood.divergence(*pair).cpu())
        shares.append(likelihood.unchanged(*pair))
    known = [share.cpu() for share in shares if share is not None]
    return torch.cat(nats), torch.cat(known) if known else None


def _by_sample(shares: Tensor, counted: Tensor | None) -> tuple[float, int]:
    """Return the sum over samples of their mean share, and of how many samples: of those with a token that counts."""
    if counted is None:
        return shares.sum().item(), len(shares)
    tokens = counted.sum(dim=1)
    owners = counted.nonzero()[:, 0]
    sums = torch.zeros(len(counted), dtype=shares.dtype).index_add_(0, owners, shares)
    return (sums / tokens.clamp(min=1)).sum().item(), int((tokens > 0).sum())


def _choose(domain: Domain, n: int, seed: int) -> Batch:
    """Return some samples as one batch."""
    size = domain.size
    if domain.indexable and size is not None and n < size:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        domain = domain.subset(order[:n].sort().values.tolist())
    batches: list[Batch] = []
    left = n
    for inputs, labels in domain.batches(n):
        batches.append((take(inputs, slice(left)), None if labels is None else labels[:left]))
        left -= count(batches[-1][0])
        if left == 0:
            break
    if left == n:
        raise DataError(f"{domain.name} has no samples")
    return batches[0] if len(batches) == 1 else _joined(batches, domain.name)


def _joined(batches: Sequence[Batch], name: str) -> Batch:
    """Put batches together; where they have an attention mask, shorter ones are filled up."""
    parts = [named(inputs) for inputs, _ in batches]
    labels = [labels for _, labels in batches if labels is not None]
    masks = [part["attention_mask"] for part in parts if "attention_mask" in part]
    try:
        joined = {key: _concatenated([part[key] for part in parts], masks, None) for key in parts[0]}
        targets = _concatenated(labels, masks, IGNORED) if len(labels) == len(batches) else None
    except (KeyError, RuntimeError) as error:
        raise DataError(
            f"the batches of {name} do not go into one probe: {first_line(error)}. Samples of several "
            "lengths need an attention_mask beside them"
        ) from error
    return joined.get("", joined), targets


def _concatenated(tensors: Sequence[Tensor], masks: Sequence[Tensor], filler: float | None) -> Tensor:
    """Put tensors together, those with a number for each token filled up; with what fills them up already, or 0."""
    if len(masks) < len(tensors) or any(t.shape[:2] != m.shape for t, m in zip(tensors, masks, strict=True)):
        return torch.cat(list(tensors))
    if filler is None:
        real = [tensor[mask == 0] for tensor, mask in zip(tensors, masks, strict=True) if tensor.ndim == 2]
        filler = next((values[0].item() for values in real if len(values)), 0)
    longest = max(mask.shape[1] for mask in masks)
    return torch.cat(
        [functional.pad(t, (*[0] * (2 * t.ndim - 4), 0, longest - t.shape[1]), value=filler) for t in tensors]
    )


def _counted(inputs: Inputs, labels: Tensor | None, outputs: Tensor, likelihood: Likelihood, name: str) -> Tensor:
    """Return which tokens count, shape `(samples, tokens)`: those with a label, else those that are no filling."""
    shape = (count(inputs), outputs.shape[1])
    mask = None if isinstance(inputs, Tensor) else inputs.get("attention_mask")
    if labels is not None:
        likelihood.check_targets(labels, tuple(outputs.shape[1:]), name)
        counted = labels != IGNORED
    elif mask is not None and mask.shape == shape:
        counted = mask != 0
    else:
        counted = torch.ones(shape, dtype=torch.bool)
    if not counted.any():
        raise DataError(f"{name}: no token counts in the {len(counted)} samples of the probe; keep more of them")
    return counted.cpu()


def _narrow(tensor: Tensor) -> Tensor:
    """Return numbers in half precision, if that is enough for them, else in float32; on the CPU."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    whole, half = tensor.float(), tensor.half()
    # Far smaller numbers than the largest may vanish; numbers that are all small may not, nor large ones turn infinite.
    least = 1e-4 * whole.where(whole.isfinite(), 0).abs().max().item()
    return half if torch.allclose(half.float(), whole, rtol=1e-3, atol=least, equal_nan=True) else whole
