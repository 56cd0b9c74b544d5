"""The elastic penalty of a stack of anchors on a model, in any training loop.

`lambda/2 * sum_i F_i (theta_i - theta*_i)^2` (Kirkpatrick et al. 2017, equation 3), summed over the anchors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.choices import PENALTY_FORMS, Lineage, PenaltyForm, check_choice
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.errors import AnchorMismatchError, UsageError, counted
from ewc_finetune.modules.adapters import Adapted, effective_weights
from ewc_finetune.modules.wrappers import fitting, without
from ewc_finetune.penalty.diagonal_penalty import HeldParameter, add_gradients, move
from ewc_finetune.penalty.held import Held
from ewc_finetune.penalty.kronecker_penalty import HeldLayer
from ewc_finetune.penalty.low_rank_penalty import HeldLowRankLayer, HeldProduct
from ewc_finetune.penalty.quadratic import spread_lambdas, sum_quadratics


class Penalty:
    """Pulls a model's parameters back to the anchors, in any training loop.

    With an optimizer it needs no line in the loop; each step of the optimizer counts once, however many backward passes
    it sums up, and `torch.amp.GradScaler` may scale the loss:

    >>> attached = Penalty(model, anchor, 100.0).attach(optimizer)

    It then pulls until `attached.remove()`, or the end of a block; `attached.penalty.value()` is for a log:

    >>> with Penalty(model, anchor, 100.0).attach(optimizer) as attached:
    ...     train(model, optimizer, log=attached.penalty.value)

    A penalty is a context manager too: at the end of its block it leaves every optimizer that it is attached to.

    Where its gradient is to be clipped together with the loss's, add it by hand instead, after `scaler.unscale_`:

    >>> penalty = Penalty(model, anchor, 100.0)
    >>> loss.backward()
    >>> penalty.add_gradient()
    >>> torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    >>> optimizer.step()

    The summed quadratic is all that it keeps: two tensors for each parameter, however many anchors there are, but for
    K-FAC blocks, of which it keeps every anchor's.

    Args:
        model: The model that is trained, on its device; also wrapped, by DataParallel or torch.compile, say.
        anchors: One anchor or several, or their files, oldest first. Files are read one tensor at a time.
        lambdas: One strength for all or one for each anchor, 0 or above.
        form: `gradient` adds `lambda F (theta - theta*)` to the gradient, and the optimizer does with it what it does
            with gradients. `proximal` leaves the gradient alone and moves the parameters after the optimizer's step,
            by the implicit step of the penalty: stable at any lambda, and decoupled from the optimizer as AdamW
            decouples weight decay. It is exact, but that of several K-FAC blocks on one layer is solved by conjugate
            gradients, to three digits.
        lineage: See `sum_quadratics`.
        growing: Parameters that may have more rows than the anchors know, which hold the first ones then.

    Attributes:
        free: Trained parameters that no anchor holds.
        pulls: Whether any lambda is more than 0.

    Raises:
        UsageError: for lambdas that are negative, not finite, or of the wrong number; for the proximal form of a K-FAC
            block of which weight or bias is frozen.
        AnchorMismatchError: if an anchor does not fit the model, or another anchor.
    """

    def __init__(
        self,
        model: nn.Module,
        anchors: Anchor | str | Path | Sequence[Anchor | str | Path],
        lambdas: float | Sequence[float],
        form: PenaltyForm = "gradient",
        lineage: Lineage = "all",
        *,
        growing: Collection[str] = (),
    ) -> None:
        check_choice("penalty form", form, PENALTY_FORMS)
        given = [anchors] if isinstance(anchors, (Anchor, str, Path)) else list(anchors)
        stacked = [anchor if isinstance(anchor, Anchor) else Anchor.open(anchor) for anchor in given]
        strengths = spread_lambdas(lambdas, len(stacked))
        named = effective_weights(model)
        parameters = named | without(named, fitting(named, stacked[-1].held_shapes() if stacked else ()))
        for anchor in stacked:
            check_fit(parameters, anchor, growing)
        quadratic = sum_quadratics(stacked, strengths, lineage, growing=growing)
        self.form = form
        self.pulls = any(strengths)
        self._handles: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()
        self._constant = math.fsum(quadratic.constant.values())
        self._held: dict[str, HeldParameter] = {}
        self._layers: list[Held] = []
        for name, weight in parameters.items():
            if name not in quadratic.curvature:
                continue
            if isinstance(weight, Adapted):
                held = HeldProduct(name, weight, quadratic.curvature[name], quadratic.centre[name])
                self._layers.append(held)
            else:
                self._held[name] = HeldParameter(weight, quadratic.curvature[name], quadratic.centre[name])
        layers: dict[tuple[str, ...], list[tuple[Block, Tensor]]] = {}
        for block, centre in quadratic.blocks:
            layers.setdefault(block.names, []).append((block, centre))
        self._layers += [
            _held_by_blocks(parts, [parameters[name] for name in names]) for names, parts in layers.items()
        ]
        if form == "proximal":
            for layer in self._layers:
                if layer.trained:
                    layer.check_rates([0.0] * len(layer.trained))
        pulled = {id(p) for layer in self._layers for p in layer.parameters}
        pulled |= {id(held.parameter) for held in self._held.values()}
        self.free = tuple(name for name, p in model.named_parameters() if p.requires_grad and id(p) not in pulled)
        self._anchors = tuple(anchor.provenance.name for anchor in stacked)

    def __repr__(self) -> str:
        numbers = sum(held.centre.numel() for held in self._held.values())
        layers = f", {counted(len(self._layers), 'layer')} in K-FAC blocks" if self._layers else ""
        names = ", ".join(map(repr, self._anchors))
        return f"<Penalty of {names}: {self.form} form, {numbers:,} parameters one by one{layers}>"

    def __enter__(self) -> Penalty:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.remove()

    @property
    def trained(self) -> bool:
        """Whether anything that it holds is trained."""
        return any(held.parameter.requires_grad for held in self._held.values()) or any(
            layer.trained for layer in self._layers
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer, *, alone: bool = True) -> None:
        """Check that its gradient can be added by hand before each of an optimizer's steps.

        Args:
            optimizer: The optimizer.
            alone: Whether it is the only one, and must have some of the parameters.

        Raises:
            UsageError: if a penalty is attached to it already, or it has none of the parameters.
        """
        optimizer = _innermost(optimizer)
        hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
        if any(isinstance(getattr(hook, "__self__", None), Penalty) for hook in hooks):
            raise UsageError("a penalty is attached to this optimizer already; once more it would count twice")
        if alone and not any(self._of(optimizer)) and (self._held or self._layers):
            raise UsageError("the optimizer has none of the parameters that the penalty holds")

    def attach(self, optimizer: torch.optim.Optimizer) -> Attached:
        """Apply the penalty at every step of an optimizer, to the parameters that this optimizer has.

        In the gradient form it is added right before the step: after the loss's gradients are unscaled and clipped. In
        the proximal form it follows the step, with the learning rate that each parameter's group has then.

        A wrapper that keeps the optimizer as its `optimizer`, as Accelerate's and Lightning's do, may skip steps while
        gradients accumulate; it is the steps of the one within that count.

        Returns:
            A handle whose `remove()` ends it, as the end of its `with` block does; its `penalty` is this one.

        Raises:
            UsageError: if it is no optimizer of torch, nor has one within; if this is attached to it already, or it has
                none of the parameters; in the proximal form, if it takes many steps in one (LBFGS), or weight and bias
                of a K-FAC block have other learning rates in it.
        """
        optimizer = _innermost(optimizer)
        known = self._handles.get(optimizer)
        if known is not None and known.id in (known.hooks_dict_ref() or ()):
            raise UsageError("the penalty is attached to this optimizer already; once more it would count twice")
        if isinstance(optimizer, torch.optim.LBFGS) and self.form == "proximal":
            raise UsageError("LBFGS takes many steps in one, without the penalty: use the gradient form")
        if self.form == "proximal":
            self._rates(optimizer)
        if not any(self._of(optimizer)) and (self._held or self._layers):
            raise UsageError("the optimizer has none of the parameters that the penalty holds")
        if self.form == "gradient":
            handle = optimizer.register_step_pre_hook(self._before_step)
        else:
            handle = optimizer.register_step_post_hook(self._after_step)
        self._handles[optimizer] = handle
        return Attached(self, handle)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Add the gradient, or where the step is given a closure have that add it: gradients are there after it."""
        closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
        if not closures:
            self.add_for(optimizer)
            return None
        (closure,) = closures

        def with_penalty() -> Any:
            loss = closure()
            self.add_for(optimizer)
            return loss

        def replaced(value: Any) -> Any:
            return with_penalty if value is closure else value

        return (args[0], *map(replaced, args[1:])), {key: replaced(value) for key, value in kwargs.items()}

    def add_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Add the penalty's gradient to those of an optimizer's parameters, right before its step."""
        # A fused optimizer unscales by itself, after this.
        scale = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if scale is None else scale
        singly, layers = self._of(optimizer)
        add_gradients(singly, scale)
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for layer in layers:
            layer.add(scale, own)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        overflowed = getattr(optimizer, "found_inf", None)
        if overflowed is None or not overflowed:
            singly, layers = self._rates(optimizer)
            move(singly)
            for layer, lr in layers:
                layer.move(lr)

    def add_gradient(self, loss_scale: float | Tensor = 1.0) -> None:
        """Add the penalty's gradient, `lambda F (theta - theta*)`, to every parameter's `.grad`.

        Call it once for each optimizer step, after the last backward pass and before clipping; no graph is made.

        Args:
            loss_scale: What the gradients that are there are multiplied by, where they are not unscaled yet.
        """
        add_gradients(self._held.values(), loss_scale)
        for layer in self._layers:
            layer.add(loss_scale)

    def proximal_step(self, lr: float) -> None:
        """Move every parameter by the implicit step of the penalty: `theta* + (theta - theta*) / (1 + lr lambda F)`.

        That is the minimum of the penalty plus `|theta - theta'|^2 / (2 lr)`, with theta' the parameter as the
        optimizer's step left it; call it once after each.
        """
        move([(held, lr) for held in self._held.values()])
        for layer in self._layers:
            layer.move(lr)

    def value(self) -> float:
        """Return the penalty, summed in float64 (float32 on mps), the constant of a stack included."""
        singly = sum(held.value() for held in self._held.values())
        return self._constant + singly + sum(layer.value() for layer in self._layers)

    def parts(self) -> dict[str, tuple[float, float]]:
        """Return the penalty and the trace of `lambda F` by parameter, those of a K-FAC block under its weight."""
        singly = {name: (held.value(), held.trace()) for name, held in self._held.items()}
        return singly | {layer.name: (layer.value(), layer.trace()) for layer in self._layers}

    def largest_curvature(self) -> tuple[str, float]:
        """Return the largest `lambda F` and the parameter that has it.

        Gradient descent on the penalty alone overshoots further with every step once its learning rate times this
        passes 2 (with momentum m, 2 (1 + m)).
        """
        peaks = {
            name: held.curvature.max().item()
            for name, held in self._held.items()
            if held.curvature.numel() and held.parameter.requires_grad
        }
        for layer in self._layers:
            if layer.trained:
                peaks[layer.name] = layer.largest()
        name = max(peaks, key=peaks.__getitem__, default="")
        return name, peaks.get(name, 0.0)

    def _of(self, optimizer: torch.optim.Optimizer) -> tuple[list[HeldParameter], list[Held]]:
        """Return what is held of the parameters of an optimizer, singly and in blocks."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return (
            [held for held in self._held.values() if id(held.parameter) in own],
            [layer for layer in self._layers if any(id(p) in own for p in layer.parameters)],
        )

    def _rates(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[list[tuple[HeldParameter, float]], list[tuple[Held, float]]]:
        """Return the same, each with the learning rate that it has there."""
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        singly, layers = self._of(optimizer)
        moving = []
        for layer in layers:
            own = [rates[id(p)] for p in layer.trained if id(p) in rates]
            if own:
                layer.check_rates(own)
                moving.append((layer, own[0]))
        return [(held, rates[id(held.parameter)]) for held in singly], moving


@dataclass(frozen=True)
class Attached:
    """A penalty that pulls at every step of an optimizer, until it is removed or its `with` block ends.

    Attributes:
        penalty: The penalty.
    """

    penalty: Penalty
    _handle: RemovableHandle

    def remove(self) -> None:
        """End it; once more does nothing."""
        self._handle.remove()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _held_by_blocks(parts: list[tuple[Block, Tensor]], weights: list[nn.Parameter | Adapted]) -> Held:
    """Return a layer that blocks hold, of its weight and, if they have it, its bias."""
    weight, *bias = weights
    plain = [one for one in bias if isinstance(one, nn.Parameter)]
    if isinstance(weight, Adapted):
        return HeldLowRankLayer(parts, weight, plain[0] if plain else None)
    return HeldLayer(parts, weight, *plain)


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that takes the steps.

    Raises:
        UsageError: if there is none that tells of them.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UsageError(
            f"{type(optimizer).__name__} does not tell of its steps as the optimizers of torch.optim do; attach the "
            "penalty to the one within it, or call add_gradient() before each step (proximal_step(lr) after it)"
        )
    return optimizer


def check_fit(
    parameters: Mapping[str, nn.Parameter | Adapted],
    anchor: Anchor,
    growing: Collection[str] = (),
    grown: str = "Where the new domain has classes of its own, give it --head new or expand",
) -> None:
    """Check that the model has every parameter that the anchor holds, in the same shape.

    Args:
        parameters: The model's, by name.
        anchor: The anchor.
        growing: Parameters that may have more rows than the anchor holds.
        grown: What to say where another parameter has more or fewer.

    Raises:
        AnchorMismatchError: naming the anchor, the parameter and both shapes.
    """
    for name, shape in anchor.held_shapes().items():
        if name not in parameters:
            raise AnchorMismatchError(
                f"{anchor.label} does not fit the model: it holds {name} {tuple(shape)}, which the model "
                "does not have. Start from the checkpoint that the anchor was made from, or one trained on from it"
            )
        own = parameters[name].shape
        may_grow = name in growing and own[0] >= shape[0]
        if own != shape and not (may_grow and own[1:] == shape[1:]):
            raise AnchorMismatchError(
                f"{anchor.label} does not fit the model: {name} has shape {tuple(shape)} in the anchor and "
                f"{tuple(own)} in the model" + (f". {grown}" if own[1:] == shape[1:] else "")
            )
