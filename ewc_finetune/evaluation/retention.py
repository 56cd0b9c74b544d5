"""What a model that is being trained keeps of its old domains, by the probes in their anchors."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import foreign_head, head_of
from ewc_finetune.anchor.probe_tensors import Probe
from ewc_finetune.evaluation.probe import AT_ONCE, Retention, measure
from ewc_finetune.modules.heads import head_in_place


@dataclass(frozen=True)
class Meter:
    """A probe in memory, to be measured again and again while a model is trained.

    Attributes:
        anchor: The name of the anchor that the probe is of.
        probe: The probe.
        head: The anchor's last layer, where the model has another; None otherwise.
    """

    anchor: str
    probe: Probe
    head: nn.Linear | None = None

    def read(self, model: nn.Module, device: torch.device, batch_size: int = AT_ONCE) -> Retention:
        """Measure the model, with the anchor's head in its place if it has another; see `measure`."""
        with contextlib.nullcontext() if self.head is None else head_in_place(model, self.head):
            return measure(model, self.probe, device, anchor=self.anchor, batch_size=batch_size)


def meters(model: nn.Module, anchors: Sequence[Anchor], head: Mapping[str, Any] | None = None) -> list[Meter]:
    """Read the probes of anchors, in their order; none where they have none.

    Args:
        model: The model to measure.
        anchors: The anchors, each with the head that it was made with.
        head: The model's head (`Provenance.head`).

    Raises:
        AnchorError: if a probe cannot be used.
        AnchorMismatchError: if an anchor with another head than the model has no layer for its place.
        NonFiniteError: if a probe holds NaN.
    """
    made = []
    for anchor in anchors:
        if anchor.probes:
            layer = head_of(anchor, model) if foreign_head(anchor, head) else None
            made += [Meter(anchor.label, probe, layer) for probe in anchor.probes]
    return made
