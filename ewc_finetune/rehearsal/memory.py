"""What is rehearsed of one source: inputs in memory, with the answers that the old model has for them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.anchor.probe_tensors import Probe
from ewc_finetune.data.input_spec import InputSpec, dtype_of
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.modules.batch import call, each
from ewc_finetune.modules.heads import head_in_place
from ewc_finetune.modules.precision import wide
from ewc_finetune.rehearsal.held_out import COARSE


@dataclass(frozen=True)
class Memory:
    """Inputs of an old domain, and what the old model answers to them.

    Attributes:
        teacher: Whose answers they are: the anchor, or the model before it was trained.
        probe: The inputs with the answers; first those that were given, then those that were made of them.
        likelihood: How answers and outputs are compared.
        head: The last layer that answers, where the model has another; None otherwise.
        held_out: The numbers of the anchor's inputs that are not among these, for they are measured with.
        given: How many of the inputs are as they were given.
        size: How many there were to take them from, where that is known.
        left_out: How many were left out, for they are among those that are measured with.
    """

    teacher: str
    probe: Probe
    likelihood: Likelihood
    head: nn.Linear | None = None
    held_out: tuple[int, ...] = ()
    given: int = 0
    size: int | None = None
    left_out: int = 0

    @property
    def variations(self) -> int:
        """How many inputs were made of those that were given."""
        return self.probe.samples - self.given

    @cached_property
    def _spec(self) -> InputSpec:
        return InputSpec.read(self.probe.layout)

    def to_json(self) -> dict[str, Any]:
        """Return what a run records of it, in values that JSON has."""
        return {
            "teacher": self.teacher,
            "data": self.probe.data,
            "samples": self.given,
            "variations": self.variations,
            "held_out": list(self.held_out),
            "left_out": self.left_out,
        }

    def __str__(self) -> str:
        of = "" if self.size in (None, self.given) else f" of {self.size:,}"
        made = f", with {self.variations:,} variations of them" if self.variations else ""
        top = f", of whose answers the {self.likelihood.k} likeliest are kept" if hasattr(self.likelihood, "k") else ""
        text = f"{self.given:,}{of} inputs of {self.probe.data} are rehearsed{made}, answered by {self.teacher}{top}"
        if self.held_out:
            coarse = ": too few to tell small losses" if len(self.held_out) + self.given < COARSE else ""
            text += f"; what is kept is measured by the other {len(self.held_out)}{coarse}"
        if self.left_out:
            text += f"; {self.left_out:,} are left out, for what is kept is measured by them"
        return text

    def divergence(self, model: nn.Module, samples: Tensor, forward: nn.Module | None = None) -> Tensor:
        """Return the mean over some inputs of the divergence of the model's predictions from the answers, in nats.

        It is a scalar to differentiate, in float32 or wider; of a sequence it is the sum over the tokens that count.

        Args:
            model: The model that is trained.
            samples: Numbers of the inputs.
            forward: What to call instead, where the model is compiled.
        """
        batch = _trimmed(self.probe.subset(samples))
        device = next(model.parameters()).device
        with contextlib.nullcontext() if self.head is None else head_in_place(model, self.head):
            inputs = self._spec.present(each(lambda t: t.to(device), batch.inputs), dtype_of(model))
            outputs = call(model if forward is None or self.head is not None else forward, inputs)
        rows = outputs if batch.counted is None else outputs[batch.counted.to(device)]
        return self.likelihood.divergence(wide(batch.outputs.to(device)), wide(rows)).sum() / len(samples)


def _trimmed(probe: Probe) -> Probe:
    """Return the probe without the tokens that only fill up, where all its texts are shorter than others of it were."""
    mask = None if isinstance(probe.inputs, Tensor) else probe.inputs.get("attention_mask")
    if mask is None or probe.counted is None or mask.shape != probe.counted.shape:
        return probe
    used = mask.any(dim=0).nonzero()
    longest = int(used.max()) + 1 if len(used) else 1
    if longest == mask.shape[1]:
        return probe

    def trim(tensor: Tensor) -> Tensor:
        return tensor[:, :longest] if tensor.shape[:2] == mask.shape else tensor

    return replace(probe, inputs=each(trim, probe.inputs), counted=trim(probe.counted))


class Order:
    """The order in which a memory is gone through: all of it, drawn anew each time.

    Args:
        size: How many inputs there are.
        generator: What draws, on the CPU.
    """

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self.size, self.generator = size, generator
        self.left = torch.empty(0, dtype=torch.long)

    def draw(self, n: int) -> Tensor:
        """Return the numbers of the next inputs, no more than there are, no two the same."""
        n = min(n, self.size)
        drawn, self.left = self.left[:n], self.left[n:]
        if len(drawn) < n:
            order = torch.randperm(self.size, generator=self.generator)
            more = order[torch.isin(order, drawn, invert=True)][: n - len(drawn)]
            self.left = order[torch.isin(order, more, invert=True)]
            drawn = torch.cat([drawn, more])
        return drawn
