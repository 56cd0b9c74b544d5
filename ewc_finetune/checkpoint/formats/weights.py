"""Checkpoints of weights alone, by name: the model that they are of is built from an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.checkpoint.architecture import FORMS, build, uninitialised
from ewc_finetune.checkpoint.checkpoint import ModelMetadata, Stateful
from ewc_finetune.checkpoint.torchvision_models import COUNTS, recognise
from ewc_finetune.errors import ArchitectureError, CheckpointError, counted, few
from ewc_finetune.modules.finite import check_model
from ewc_finetune.modules.wrappers import fitting, prefixes, without


class Weights(Stateful):
    """Weights by name.

    Args:
        label: See `Checkpoint`.
        sha256: See `Checkpoint`.
        metadata: See `Checkpoint`.
        state: Parameters and buffers, on the CPU.
        remarks: See `Checkpoint`.

    Attributes:
        prefix: What stands before the model's own names in `state`; known once the model is built.
    """

    def __init__(
        self,
        label: str,
        sha256: str | None,
        metadata: ModelMetadata,
        state: Mapping[str, Tensor],
        remarks: tuple[str, ...] = (),
    ) -> None:
        super().__init__(label, sha256, metadata, remarks)
        self.state = state
        self.prefix = ""

    def build(self, architecture: str | None) -> tuple[nn.Module, str | None]:
        """See `Checkpoint`.

        Raises:
            ArchitectureError: if none is known or it does not fit, naming the first parameters and both shapes.
            CheckpointError: if weights are integers (quantized), or tied ones contradict each other.
            NonFiniteError: if a weight is NaN or infinite.
        """
        text = architecture or self.metadata.architecture
        if text is None:
            text, self.prefix = self._recognised()
            model = _built(text, True, [])
            self.remarks += (f"{self.label}: its weights are those of {text}",)
        else:
            imported: list[str] = []
            model = _built(text, architecture is not None, imported)
            self.remarks += tuple(f"{self.label}: {remark}" for remark in dict.fromkeys(imported))
            self.prefix = fitting(self.state, model.state_dict(keep_vars=True))
        own = without(self.state, self.prefix)
        _fit(model, own, self.label, text)
        if self.prefix:
            rest = len(self.state) - len(own)
            left = f"; {counted(rest, 'tensor')} of other names left alone" if rest else ""
            self.remarks += (f"{self.label}: its names stand behind {self.prefix!r}{left}",)
            self.form = " and ".join(filter(None, (self.form, f"behind {self.prefix!r}")))
        check_model(model, f"{self.label}: ")
        for name, parameter in model.named_parameters():
            if name in self.metadata.frozen:
                parameter.requires_grad_(False)
        return model.eval(), text

    def _recognised(self) -> tuple[str, str]:
        for prefix in prefixes(self.state):
            architecture = recognise({name: tensor.shape for name, tensor in without(self.state, prefix).items()})
            if architecture is not None:
                return architecture, prefix
        raise ArchitectureError(
            f"{self.label} does not say what architecture its weights belong to, and they are none of torchvision's. "
            f"Name it with --arch: {FORMS}"
        )


def _built(text: str, trusted: bool, remarks: list[str]) -> nn.Module:
    """Build a model whose weights will be loaded; what is imported because a file names it is added to the remarks."""
    try:
        with uninitialised():
            return build(text, trusted=trusted, note=remarks.append)
    except ArchitectureError:  # a constructor that computes with its weights may need initialised ones
        return build(text, trusted=trusted, note=remarks.append)


def merged(
    state: Mapping[str, Tensor], prefix: str, trained: Mapping[str, Tensor], head: Mapping[str, Any] | None
) -> dict[str, Tensor]:
    """Return all of a file's weights in its own order, the trained ones in their place, and a head that it had not."""
    weights = {
        name: trained.get(name.removeprefix(prefix), value) if name.startswith(prefix) else value
        for name, value in state.items()
    }
    added = [] if head is None else [name for name in head["parameters"] if name in trained]
    return weights | {prefix + name: trained[name] for name in added}


def _fit(model: nn.Module, state: Mapping[str, Tensor], label: str, architecture: str) -> None:
    """Load the weights, each in the dtype it has in the checkpoint, or say what does not fit."""
    slots = dict(model.state_dict(keep_vars=True))
    lazy = next((name for name, slot in slots.items() if nn.parameter.is_lazy(slot)), None)
    if lazy is not None:
        raise ArchitectureError(
            f"{lazy} of {architecture} has no shape before its first batch; give it one (Linear for LazyLinear)"
        )
    present = {id(slots[name]) for name in state if name in slots}
    problems = []
    for name, value in state.items():
        if name not in slots:
            problems.append(f"{name} {tuple(value.shape)} is in the checkpoint but not in the architecture")
        elif slots[name].shape != value.shape:
            problems.append(
                f"{name} has shape {tuple(value.shape)} in the checkpoint and {tuple(slots[name].shape)} in the "
                "architecture"
            )
    # A tied parameter may be stored under only one of its names.
    problems += [
        f"{name} {tuple(slot.shape)} is in the architecture but not in the checkpoint"
        for name, slot in slots.items()
        if name not in state and id(slot) not in present and not name.endswith(COUNTS)
    ]
    if problems:
        raise ArchitectureError(
            f"the architecture {architecture} does not fit {label}: {few(problems, '; ')}. "
            "Name the right one with --arch"
        )
    filled: dict[int, str] = {}
    for name, value in state.items():
        slot = slots[name]
        other = filled.setdefault(id(slot), name)
        if other != name and not torch.equal(state[other], value):
            raise CheckpointError(f"{label}: {other} and {name} differ, but are one tied parameter in {architecture}")
        if slot.is_floating_point() and not value.is_floating_point():
            raise CheckpointError(
                f"{label}: {name} is {value.dtype}; quantized and integer weights cannot be trained. "
                "Use the checkpoint from before quantization"
            )
        if slot.dtype != value.dtype:
            slot.data = torch.empty_like(slot.data, dtype=value.dtype)
    model.load_state_dict(state, strict=False)
