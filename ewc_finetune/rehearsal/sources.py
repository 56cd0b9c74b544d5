"""From what is asked for (probes, data) to what is rehearsed: inputs with the old model's answers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.heads import foreign_head, head_of
from ewc_finetune.anchor.probe_tensors import Probe, records_of
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.data.augmentation import refuse_augmented
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.data.sources import resolve_domain
from ewc_finetune.errors import UsageError
from ewc_finetune.evaluation.bound_domain import BoundDomain, bind
from ewc_finetune.evaluation.presenting import presented
from ewc_finetune.evaluation.probe import measure, take_probe
from ewc_finetune.likelihood.active import Active
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.categorical import PerToken
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.likelihood.top_answers import TopAnswers
from ewc_finetune.modules.batch import tensors
from ewc_finetune.modules.heads import head_in_place
from ewc_finetune.progress import Silent
from ewc_finetune.rehearsal.held_out import held_out, keys_of
from ewc_finetune.rehearsal.memory import Memory
from ewc_finetune.rehearsal.options import PROBES, is_probes
from ewc_finetune.rehearsal.teacher import as_anchored
from ewc_finetune.rehearsal.variations import varied

# Of larger data so many inputs are kept in memory,
_MOST_KEPT = 10_000
# or as many as take so many bytes.
_BYTES_KEPT = 1 << 30
# Of vocabularies above four times this only so many answers are kept, the likeliest ones.
_TOP = 64


def resolve_sources(
    sources: Sequence[Any], anchors: Sequence[Anchor] | None, data_dir: str | Path | None = None
) -> list[Domain | None]:
    """Return the data of each source; None for the probes of the anchors, of which nothing is known if these are None.

    Raises:
        UsageError: if there is no probe to rehearse.
        DataError: if data cannot be had.
    """
    probes = [is_probes(source) for source in sources]
    if any(probes) and anchors is not None and not any(records_of(anchor.probes) for anchor in anchors):
        raise UsageError(
            "there is no probe to rehearse in the anchors: ewc-ft consolidate --probe N keeps one while the old data "
            "is at hand. Without it, rehearse data that is like the old, or any public data: --rehearse DATA"
        )
    domains = [
        None if is_probes else resolve_domain(source, "train", data_dir)
        for source, is_probes in zip(sources, probes, strict=True)
    ]
    for domain in domains:
        if domain is not None:
            refuse_augmented(domain, "rehearsal")
    return domains


@dataclass(frozen=True)
class Teachers:
    """Who answers what is rehearsed.

    Attributes:
        loaded: The model that is to be trained, on its device, with the head that it is trained with.
        anchors: Oldest first. Each answers the inputs in its own probes; data is answered by the newest, or without any
            by the model as it is, as where the newest has the centre of several, which is no model's weights.
        measured: The anchors with what is measured of their probes, which is never rehearsed, wherever it comes from.
        varied: Whether variations of the inputs are rehearsed too, where there can be any.
    """

    loaded: LoadedModel
    anchors: Sequence[Anchor]
    measured: Sequence[Anchor]
    varied: bool = True

    @property
    def model(self) -> nn.Module:
        """The model alone."""
        return self.loaded.model

    @property
    def device(self) -> torch.device:
        """The device that it is on."""
        return next(self.model.parameters()).device

    def layer(self, anchor: Anchor) -> nn.Linear | None:
        """Return the last layer that answers for an anchor, where it is another than the model's."""
        return head_of(anchor, self.model) if foreign_head(anchor, self.loaded.metadata.head) else None

    @property
    def _of_data(self) -> Anchor | None:
        """The anchor that answers data; None where the model does."""
        newest = self.anchors[-1] if self.anchors else None
        if newest is None or self.layer(newest) is not None:
            return newest
        return None if (newest.provenance.merged or {}).get("form") == "offline" else newest

    @cached_property
    def _measured(self) -> frozenset[bytes]:
        return frozenset(key for anchor in self.measured for probe in anchor.probes for key in keys_of(probe.inputs))

    def _unmeasured(self, probe: Probe) -> Probe:
        """Return a probe without the inputs that are measured with.

        Raises:
            UsageError: if none is left.
        """
        left = [n for n, key in enumerate(keys_of(probe.inputs)) if key not in self._measured]
        if not left:
            raise UsageError(
                f"nothing of {probe.data} can be rehearsed: all of it is in the probes that what is kept is measured "
                f"by. Rehearse {PROBES!r}, of which a part is left to measure with, or other data"
            )
        return probe if len(left) == probe.samples else probe.subset(left)

    def probes(self, anchor: Anchor) -> list[Memory]:
        """Return what is rehearsed of an anchor's probes.

        Raises:
            UsageError: if a probe is too small to be measured with too.
            AnchorMismatchError: if a probe does not go into the model.
        """
        memories = []
        for probe in anchor.probes:
            left = held_out(probe, anchor.label)
            ours = self._unmeasured(probe.subset(sorted(set(range(probe.samples)) - set(left))))
            plain, layer = get_likelihood(probe.likelihood), self.layer(anchor)
            likelihood = plain if probe.active is None else Active(plain, probe.active)
            with contextlib.nullcontext() if layer is None else head_in_place(self.model, layer):
                measure(self.model, ours.subset([0]), self.device, anchor=anchor.label)  # refuses what does not go in
            more = None
            if anchor.provenance.merged is None:  # a merged one's answers are several models'
                with as_anchored(self.model, anchor):
                    more = self._variations(ours, likelihood)
            memories.append(
                Memory(
                    anchor.label,
                    _joined(ours, more),
                    likelihood,
                    layer,
                    held_out=tuple(left),
                    given=ours.samples,
                    size=probe.samples,
                    left_out=probe.samples - len(left) - ours.samples,
                )
            )
        return memories

    def data(self, domain: Domain, likelihood: Likelihood, seed: int) -> Memory:
        """Return what is rehearsed of data, of which labels are not looked at.

        Args:
            domain: The data.
            likelihood: The likelihood of the model's outputs.
            seed: The seed that chooses among more inputs than are kept.

        Raises:
            AnchorMismatchError: if the anchor cannot teach the model.
            DataError: if the data does not go into the model.
            UsageError: if all of it is measured with.
        """
        anchor = self._of_data
        with contextlib.nullcontext() if anchor is None else as_anchored(self.model, anchor):
            asked = replace(presented(domain, self.loaded, Silent()), labels=None)
            bound = bind(self.loaded, asked, likelihood, self.device, Silent())
            if likelihood.name == PerToken.name and bound.outputs[-1] > 4 * _TOP:
                top = TopAnswers(_TOP)
                bound = replace(bound, likelihood=top if domain.active is None else Active(top, domain.active))
            taken = take_probe(self.model, bound, _fitting(bound.domain), seed, self.device)
            probe = self._unmeasured(taken)
            more = self._variations(probe, bound.likelihood)
        return Memory(
            "the model as it was" if anchor is None else anchor.label,
            _joined(probe, more),
            bound.likelihood,
            None if anchor is None else self.layer(anchor),
            given=probe.samples,
            size=domain.size,
            left_out=taken.samples - probe.samples,
        )

    def _variations(self, probe: Probe, likelihood: Likelihood) -> Probe | None:
        """Return inputs like those of a probe, with the answers that the model has now; None where there are none."""
        if not self.varied or probe.counted is not None:
            return None
        spec, generator = InputSpec.read(probe.layout), torch.Generator().manual_seed(probe.seed)
        inputs = varied(probe.inputs, spec, generator, probe.outputs[0].nbytes)
        if inputs is None:
            return None
        domain = Domain(probe.data, TensorDataset(inputs), active=probe.active)
        return take_probe(self.model, BoundDomain(domain, spec, likelihood, ()), len(inputs), 0, self.device)


def _fitting(domain: Domain) -> int:
    """Return how many inputs of a domain are kept."""
    size = sum(tensor.nbytes for tensor in tensors(domain.first()))
    return max(1, min(domain.size or _MOST_KEPT, _MOST_KEPT, _BYTES_KEPT // max(1, size)))


def _joined(probe: Probe, more: Probe | None) -> Probe:
    if more is None or not isinstance(probe.inputs, Tensor) or not isinstance(more.inputs, Tensor):
        return probe
    inputs, outputs = torch.cat([probe.inputs, more.inputs]), torch.cat([probe.outputs, more.outputs])
    return replace(probe, inputs=inputs, outputs=outputs)
