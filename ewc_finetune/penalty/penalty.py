"""The elastic penalty of a stack of anchors on a model, in any training loop.

`lambda/2 * sum_i F_i (theta_i - theta*_i)^2` (Kirkpatrick et al. 2017, equation 3), summed over the anchors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.choices import PENALTY_FORMS, Lineage, PenaltyForm, check_choice
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.errors import AnchorMismatchError, UsageError
from ewc_finetune.modules.wrappers import fitting, without
from ewc_finetune.penalty.kronecker_penalty import HeldLayer
from ewc_finetune.penalty.quadratic import spread_lambdas, sum_quadratics

# Tensors are worked on in pieces of so many numbers: on the CPU what is made on the way stays near the cache, on an
# accelerator they are as many as one fused call should take.
_CPU_PIECE = 1 << 20
_ACCELERATOR_PIECE = 1 << 26


class Penalty:
    """Pulls a model's parameters back to the anchors, in any training loop.

    With an optimizer it needs no line in the loop; each step of the optimizer counts once, however many backward passes
    it sums up, and `torch.amp.GradScaler` may scale the loss:

    >>> Penalty(model, anchor, 100.0).attach(optimizer)

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
        named = dict(model.named_parameters())
        parameters = named | without(named, fitting(named, stacked[-1].held_shapes() if stacked else ()))
        for anchor in stacked:
            check_fit(parameters, anchor, growing)
        quadratic = sum_quadratics(stacked, strengths, lineage, growing=growing)
        self.form = form
        self._handles: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()
        self._constant = math.fsum(quadratic.constant.values())
        self._held = {
            name: _Held(p, quadratic.curvature[name], quadratic.centre[name])
            for name, p in parameters.items()
            if name in quadratic.curvature
        }
        layers: dict[tuple[str, ...], list[tuple[Block, Tensor]]] = {}
        for block, centre in quadratic.blocks:
            layers.setdefault(block.names, []).append((block, centre))
        self._layers = [
            HeldLayer(parts, parameters[names[0]], *(parameters[name] for name in names[1:]))
            for names, parts in layers.items()
        ]
        if form == "proximal":
            for layer in self._layers:
                if layer.trained:
                    layer.check_rates([0.0] * len(layer.trained))
        known = self._held.keys() | {name for names in layers for name in names}
        held = {id(parameters[name]) for name in known}
        self.free = tuple(name for name, p in named.items() if p.requires_grad and id(p) not in held)
        self._anchors = tuple(anchor.provenance.name for anchor in stacked)

    def __repr__(self) -> str:
        numbers = sum(held.centre.numel() for held in self._held.values())
        layers = f", {len(self._layers)} layers in K-FAC blocks" if self._layers else ""
        names = ", ".join(map(repr, self._anchors))
        return f"<Penalty of {names}: {self.form} form, {numbers:,} parameters one by one{layers}>"

    def attach(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Apply the penalty at every step of an optimizer, to the parameters that this optimizer has.

        In the gradient form it is added right before the step: after the loss's gradients are unscaled and clipped. In
        the proximal form it follows the step, with the learning rate that each parameter's group has then.

        A wrapper that keeps the optimizer as its `optimizer`, as Accelerate's and Lightning's do, may skip steps while
        gradients accumulate; it is the steps of the one within that count.

        Returns:
            A handle whose `remove()` ends it.

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

        def add() -> None:
            # A fused optimizer unscales by itself, after this.
            scale = getattr(optimizer, "grad_scale", None)
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            _add(*self._of(optimizer), 1.0 if scale is None else scale, own)

        def before(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
            if not closures:
                add()
                return None
            # The gradients are not there before the closure has been called.
            (closure,) = closures

            def with_penalty() -> Any:
                loss = closure()
                add()
                return loss

            def replaced(value: Any) -> Any:
                return with_penalty if value is closure else value

            return (args[0], *map(replaced, args[1:])), {key: replaced(value) for key, value in kwargs.items()}

        def after(_: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            overflowed = getattr(optimizer, "found_inf", None)
            if overflowed is None or not overflowed:
                singly, layers = self._rates(optimizer)
                _move(singly)
                for layer, lr in layers:
                    layer.move(lr)

        if self.form == "gradient":
            handle = optimizer.register_step_pre_hook(before)
        else:
            handle = optimizer.register_step_post_hook(after)
        self._handles[optimizer] = handle
        return handle

    def add_gradient(self, loss_scale: float | Tensor = 1.0) -> None:
        """Add the penalty's gradient, `lambda F (theta - theta*)`, to every parameter's `.grad`.

        Call it once for each optimizer step, after the last backward pass and before clipping; no graph is made.

        Args:
            loss_scale: What the gradients that are there are multiplied by, where they are not unscaled yet.
        """
        _add(list(self._held.values()), self._layers, loss_scale)

    def proximal_step(self, lr: float) -> None:
        """Move every parameter by the implicit step of the penalty: `theta* + (theta - theta*) / (1 + lr lambda F)`.

        That is the minimum of the penalty plus `|theta - theta'|^2 / (2 lr)`, with theta' the parameter as the
        optimizer's step left it; call it once after each.
        """
        _move([(held, lr) for held in self._held.values()])
        for layer in self._layers:
            layer.move(lr)

    def value(self) -> float:
        """Return the penalty, summed in float64 (float32 on mps), the constant of a stack included."""
        singly = sum(held.value() for held in self._held.values())
        return self._constant + singly + sum(layer.value() for layer in self._layers)

    def parts(self) -> dict[str, tuple[float, float]]:
        """Return the penalty and the trace of `lambda F` by parameter, those of a K-FAC block under its weight."""
        singly = {
            name: (held.value(), held.curvature.sum(dtype=_wide(held.curvature)).item())
            for name, held in self._held.items()
        }
        blocks = {
            layer.blocks[0].weight: (layer.value(), sum(block.trace for block in layer.blocks))
            for layer in self._layers
        }
        return singly | blocks

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
                # Of several anchors the sum is at least as large as the largest of all together.
                peaks[layer.blocks[0].weight] = sum(block.largest() for block in layer.blocks)
        name = max(peaks, key=peaks.__getitem__, default="")
        return name, peaks.get(name, 0.0)

    def _of(self, optimizer: torch.optim.Optimizer) -> tuple[list[_Held], list[HeldLayer]]:
        """Return what is held of the parameters of an optimizer, singly and in blocks."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return (
            [held for held in self._held.values() if id(held.parameter) in own],
            [layer for layer in self._layers if any(id(p) in own for p in layer.parameters)],
        )

    def _rates(
        self, optimizer: torch.optim.Optimizer
    ) -> tuple[list[tuple[_Held, float]], list[tuple[HeldLayer, float]]]:
        """Return the same, each with the learning rate that it has there."""
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        singly, layers = self._of(optimizer)
        found = []
        for layer in layers:
            own = [rates[id(p)] for p in layer.trained if id(p) in rates]
            if own:
                layer.check_rates(own)
                found.append((layer, own[0]))
        return [(held, rates[id(held.parameter)]) for held in singly], found


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


class _Held:
    """One parameter and its quadratic, in pieces: views of so many rows.

    Attributes:
        parameter: The model's own.
        curvature: `lambda F`, in the dtype of the centre.
        centre: `theta*`, in the parameter's dtype or a wider one.
    """

    def __init__(self, parameter: nn.Parameter, curvature: Tensor, centre: Tensor) -> None:
        self.parameter = parameter
        # float32 for half-precision weights, float64 for those.
        self.centre = centre.to(parameter.device, torch.promote_types(parameter.dtype, centre.dtype))
        self.curvature = curvature.to(self.centre)
        self._rows = max(1, _piece(parameter.device) // max(1, math.prod(parameter.shape[1:])))
        self._length = len(self.centre) if self.centre.ndim else None
        self._fixed = list(zip(self._cut(self.curvature), self._cut(self.centre), strict=True))

    def _cut(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return torch.split(tensor, self._rows) if tensor.ndim and len(tensor) > self._rows else (tensor,)

    def _known(self, tensor: Tensor) -> Tensor:
        """Return the rows that the anchors know."""
        return tensor if self._length is None or len(tensor) == self._length else tensor[: self._length]

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Go through views of the parameter as it is now, its curvature and its centre."""
        held = self._known(self.parameter.detach())
        for theta, (curvature, centre) in zip(self._cut(held), self._fixed, strict=True):
            yield theta, curvature, centre

    def gradients(self) -> tuple[Tensor, ...]:
        """Return views of the parameter's gradient, in the same pieces; made if there is none."""
        parameter = self.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
        return self._cut(self._known(parameter.grad))

    def value(self) -> float:
        """Return this parameter's part of the penalty."""
        total = 0.0
        for theta, curvature, centre in self.pieces():
            difference = theta.to(centre.dtype) - centre
            wide = _wide(centre)
            total += 0.5 * (curvature.to(wide) * difference.to(wide).square_()).sum().item()
        return total


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the widest dtype that sums may be taken in where this tensor is."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


@torch.no_grad()
def _add(
    singly: Sequence[_Held], layers: Sequence[HeldLayer], scale: float | Tensor, only: Collection[int] | None = None
) -> None:
    trained = (held for held in singly if held.parameter.requires_grad)
    pieces = ((*piece, g) for held in trained for piece, g in zip(held.pieces(), held.gradients(), strict=True))
    for thetas, curvatures, centres, gradients in _together(pieces):
        pull = torch._foreach_sub(_as(thetas, centres), centres)
        torch._foreach_mul_(pull, curvatures)
        if isinstance(scale, Tensor) or scale != 1:
            torch._foreach_mul_(pull, scale)
        torch._foreach_add_(gradients, pull)
    for layer in layers:
        layer.add(scale, only)


@torch.no_grad()
def _move(every: Sequence[tuple[_Held, float]]) -> None:
    trained = ((held, lr) for held, lr in every if held.parameter.requires_grad)
    pieces = ((*piece, lr) for held, lr in trained for piece in held.pieces())
    for thetas, curvatures, centres, rates in _together(pieces):
        # The share of the way to the centre, x / (1 + x), and not 1 - 1 / (1 + x), in which a small x would be lost.
        share = torch._foreach_mul(curvatures, rates)
        torch._foreach_div_(share, torch._foreach_add(share, 1.0))
        moved = _as(thetas, centres)
        torch._foreach_lerp_(moved, centres, share)
        if moved is not thetas:
            torch._foreach_copy_(thetas, moved)


def _together(pieces: Iterable[tuple[Any, ...]]) -> Iterator[list[list[Any]]]:
    """Put pieces together for one fused call each, as many as make one large one; lists of what they consist of."""
    group: list[tuple[Any, ...]] = []
    size = 0
    for piece in pieces:
        if group and (size + piece[0].numel() > _piece(piece[0].device) or _kind(piece) != _kind(group[0])):
            yield [list(part) for part in zip(*group, strict=True)]
            group, size = [], 0
        group.append(piece)
        size += piece[0].numel()
    if group:
        yield [list(part) for part in zip(*group, strict=True)]


def _kind(piece: tuple[Any, ...]) -> tuple[torch.device, torch.dtype, torch.dtype]:
    return piece[0].device, piece[0].dtype, piece[1].dtype


def _as(tensors: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Return the tensors in the dtype of the others: float32 for half-precision weights."""
    return tensors if tensors[0].dtype == others[0].dtype else [tensor.to(others[0].dtype) for tensor in tensors]


def _piece(device: torch.device) -> int:
    return _CPU_PIECE if device.type == "cpu" else _ACCELERATOR_PIECE


def check_fit(
    parameters: Mapping[str, nn.Parameter],
    anchor: Anchor,
    growing: Collection[str] = (),
) -> None:
    """Check that the model has every parameter that the anchor holds, in the same shape.

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
        grown = name in growing and own[1:] == shape[1:] and own[0] >= shape[0]
        if own != shape and not grown:
            head = own[1:] == shape[1:]
            raise AnchorMismatchError(
                f"{anchor.label} does not fit the model: {name} has shape {tuple(shape)} in the anchor and "
                f"{tuple(own)} in the model"
                + (". Where the new domain has classes of its own, give it --head new or expand" if head else "")
            )
