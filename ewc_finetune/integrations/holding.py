"""A model that is held by anchors while somebody else's loop trains it: what is added to its gradient.

The loop says when: once for each step of the optimizer, after gradients were summed over micro-batches and processes,
and before they are clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.lineage import lineage_of
from ewc_finetune.checkpoint.pin import fetched_anchors
from ewc_finetune.errors import AnchorMismatchError, UsageError
from ewc_finetune.evaluation.retention import meters
from ewc_finetune.integrations.arguments import EwcArguments
from ewc_finetune.modules.adapters import Adapted, effective_weights
from ewc_finetune.modules.devices import random_state_kept
from ewc_finetune.modules.wrappers import fitting, unwrapped, without
from ewc_finetune.penalty.penalty import Penalty
from ewc_finetune.penalty.quadratic import usual_lambdas
from ewc_finetune.rehearsal.rehearsal import Rehearsal

# A model that is further from an anchor than this part of the anchor's own weights is another model.
_FAR = 0.5


class Holding:
    """A model and what holds it.

    Args:
        model: The model, on its device, before its first step.
        arguments: What it is held by.
        fresh: Whether it should be near the anchor's weights still, which is checked.

    Attributes:
        penalty: The penalty.
        lineage: The anchors that have a part in the model's weights from then on, as a checkpoint records them.

    Raises:
        AnchorMismatchError: if an anchor does not fit the model, or is of other weights.
        UsageError: if there is no anchor, or none that holds what is trained.
    """

    def __init__(self, model: nn.Module, arguments: EwcArguments, *, fresh: bool = True) -> None:
        if not arguments.anchors:
            raise UsageError("there is nothing to be held by; name anchors: EwcArguments(anchors=[...])")
        given, _ = fetched_anchors(list(arguments.anchors))
        anchors = [one if isinstance(one, Anchor) else Anchor.open(one) for one in given]
        rehearses = bool(arguments.rehearse) and arguments.rehearse_weight > 0
        lambdas = usual_lambdas(anchors, rehearses) if arguments.lambdas is None else arguments.lambdas
        self.model = unwrapped(model)
        self.penalty = Penalty(self.model, anchors, lambdas, lineage=arguments.lineage)  # type: ignore[arg-type]
        if self.penalty.pulls and not self.penalty.trained:
            raise UsageError(
                f"nothing that {', '.join(anchor.label for anchor in anchors)} holds is trained, so the penalty would "
                "do nothing: train some of its layers (target_modules of LoRA), or leave the anchor out"
            )
        if fresh:
            _check_near(self.model, anchors[-1])
        self._rehearsal = None
        measured = anchors
        if rehearses:
            self._rehearsal = Rehearsal(
                self.model,
                anchors,
                arguments.rehearse,
                weight=arguments.rehearse_weight,
                batch_size=arguments.rehearse_batch,
                seed=arguments.rehearse_seed,
            )
            measured = list(self._rehearsal.measured)
        self._meters = meters(self.model, measured)
        strengths = lambdas * len(anchors) if len(lambdas) == 1 else lambdas
        self.lineage = lineage_of(anchors, strengths)

    def add(self, scale: float | Tensor = 1.0, step: int = 0) -> None:
        """Add to the model's gradients what the penalty and what is rehearsed ask for.

        Args:
            scale: What the gradients that are there are multiplied by.
            step: The number of the optimizer's step, which seeds what is random in it: every process does the same.
        """
        self.penalty.add_gradient(scale)
        self._rehearse(scale, step)

    def add_for(self, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        """Add the same to the gradients of the parameters that an optimizer has, which are unscaled."""
        self.penalty.add_for(optimizer)
        own = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
        ]
        self._rehearse(1.0, step, own)

    def _rehearse(self, scale: float | Tensor, step: int, only: Sequence[nn.Parameter] | None = None) -> None:
        if self._rehearsal is None:
            return
        device = next(self.model.parameters()).device
        with random_state_kept(device, step), torch.enable_grad():
            loss = self._rehearsal.loss() * scale
            loss.backward(inputs=only)  # type: ignore[no-untyped-call]

    def skip(self, steps: int) -> None:
        """Pass over what so many steps rehearsed, as a run does that is gone on with."""
        if self._rehearsal is not None:
            self._rehearsal.skip(steps)

    def readings(self) -> dict[str, float]:
        """Return the penalty, and what is kept where that is known, by name."""
        kept = self.retention()
        return {"penalty": self.penalty.value()} | ({} if kept is None else {"retention": kept})

    def retention(self) -> float | None:
        """Return the share of the probes' answers that are as they were; None where there are none."""
        device = next(self.model.parameters()).device
        kept = [meter.read(self.model, device).unchanged for meter in self._meters]
        known = [share for share in kept if share is not None]
        return sum(known) / len(known) if known else None


def _check_near(model: nn.Module, anchor: Anchor) -> None:
    """Refuse a model whose weights are others than those that an anchor is of.

    Raises:
        AnchorMismatchError: saying how far they are away.
    """
    named = effective_weights(model)
    held = anchor.held_shapes()
    own = named | without(named, fitting(named, held))
    away = size = 0.0
    for name in held:
        weight: Any = own[name]
        value = (weight.value() if isinstance(weight, Adapted) else weight.detach()).float().cpu()
        centre = anchor.weights[name].float()
        if value.shape == centre.shape:
            away += float((value - centre).square().sum(dtype=torch.float64))
            size += float(centre.square().sum(dtype=torch.float64))
    if away > _FAR**2 * size:
        raise AnchorMismatchError(
            f"the model's weights are not those that {anchor.label} was made of: they are away from them by "
            f"{(away / size) ** 0.5 if size else 1:.0%} of their size. Load the checkpoint that the anchor was made "
            "from, or one trained on from it"
        )
