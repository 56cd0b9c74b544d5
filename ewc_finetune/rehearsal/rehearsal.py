"""Rehearsal: at each step some old inputs go through the model too, and its answers to them are to stay as they were.

What is added to the loss is `weight * mean_n KL(p_n || q_n)`, with p the old model's predictions for the inputs and q
those of the model as it is now: distillation, of which no label is needed (Li and Hoiem 2017, "Learning without
forgetting"; with inputs of the old domain Buzzega et al. 2020, "Dark experience for general continual learning").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.open import LoadedModel, open_model
from ewc_finetune.errors import UsageError
from ewc_finetune.evaluation.presenting import informed
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.rehearsal.held_out import measured
from ewc_finetune.rehearsal.memory import Memory, Order
from ewc_finetune.rehearsal.options import PROBES, Rehearsing
from ewc_finetune.rehearsal.sources import Teachers, resolve_sources
from ewc_finetune.specs.options import check_declared


class Rehearsal:
    """Draws what is rehearsed, and gives the loss of it, in any training loop.

    >>> rehearsal = Rehearsal(model, anchors, ["probes"])
    >>> loss = cross_entropy(model(inputs), labels) + rehearsal.loss()

    Args:
        model: The model, before it is trained, on its device.
        anchors: One anchor or several, or their files, oldest first; each answers the inputs in its own probes, and the
            newest those of data. Without any, or where that is merged, the model as it is answers those.
        sources: `probes` (those in the anchors, but for the quarter of each that is measured with), a data spec,
            dataset or loader, of which labels are not looked at, or several of these. Each has the same part of a
            batch, one input at the least.
        weight: What all rehearsed samples of a step count together, beside 1 for the new ones.
        batch_size: Inputs a step.
        variations: Whether inputs are rehearsed too that are made of these: images moved and turned, mixtures of two,
            with the answers of the anchor's weights.
        likelihood: What outputs mean; as the anchors say, else `categorical`, unless given.
        seed: The seed that draws the inputs.
        answered: What is rehearsed of these sources, where the old model has answered it already.

    Attributes:
        memories: What is rehearsed.
        measured: The anchors, with what is not rehearsed of their probes: what is kept may be measured by that.

    Raises:
        UsageError: if the anchors have no probe, or one that is too small for both; if there is nothing to rehearse, or
            the weight or batch size is none.
        AnchorMismatchError: if a probe does not go into the model, or an anchor cannot teach it.
        DataError: if data does not go into the model.
    """

    def __init__(
        self,
        model: nn.Module | LoadedModel,
        anchors: Anchor | str | Path | Sequence[Anchor | str | Path] = (),
        sources: Any = PROBES,
        *,
        weight: float = 1.0,
        batch_size: int = 64,
        variations: bool = True,
        likelihood: Likelihood | str | None = None,
        seed: int = 0,
        answered: Sequence[Memory] = (),
    ) -> None:
        asked = Rehearsing(rehearse=sources, rehearse_weight=weight, rehearse_batch=batch_size)
        check_declared(asked)
        asked.check_rehearsal()
        if not asked.sources:
            raise UsageError(f"there is nothing to rehearse: no source is named; {PROBES!r} are those in the anchors")
        given = [anchors] if isinstance(anchors, (Anchor, str, Path)) else list(anchors)
        opened = [anchor if isinstance(anchor, Anchor) else Anchor.open(anchor) for anchor in given]
        if not isinstance(likelihood, Likelihood):
            known = opened[-1].provenance.likelihood if opened else "categorical"
            likelihood = get_likelihood(likelihood or known)
        loaded = informed(open_model(model), opened) if isinstance(model, nn.Module) else model
        domains = resolve_sources(asked.sources, opened)
        self.model, self.weight, self.batch_size = loaded.model, weight, batch_size
        self.measured = measured(opened, None in domains)
        teachers = Teachers(loaded, opened, self.measured, variations)
        self.memories = list(answered)
        for domain in () if answered else domains:
            if domain is None:
                self.memories += [memory for anchor in opened for memory in teachers.probes(anchor)]
            else:
                self.memories.append(teachers.data(domain, likelihood, seed))
        self._generator = torch.Generator().manual_seed(seed)
        self._orders = [Order(memory.probe.samples, self._generator) for memory in self.memories]

    @property
    def each(self) -> int:
        """How many inputs of each source a step takes, where it has as many."""
        return max(1, round(self.batch_size / len(self.memories)))

    def loss(self, forward: nn.Module | None = None) -> Tensor:
        """Draw the next inputs, and return what is to be added to the loss, a scalar to differentiate.

        Args:
            forward: What to call instead of the model, where it is compiled or wrapped.
        """
        parts = [
            memory.divergence(self.model, order.draw(self.each), forward)
            for memory, order in zip(self.memories, self._orders, strict=True)
        ]
        return self.weight * (parts[0] if len(parts) == 1 else torch.stack(parts).mean())

    def skip(self, steps: int) -> None:
        """Draw the inputs of so many steps, and leave them."""
        for _ in range(steps):
            for order in self._orders:
                order.draw(self.each)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on in the same order."""
        return {"generator": self._generator.get_state(), "left": [order.left.clone() for order in self._orders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the order that `state_dict` gave."""
        self._generator.set_state(state["generator"])
        for order, left in zip(self._orders, state["left"], strict=True):
            order.left = left.clone()
