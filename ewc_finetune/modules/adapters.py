"""Weights of a model of PEFT as they count in its forward pass: what adapters add to them included."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.errors import UsageError

# Where PEFT keeps what it has put something around.
_BASE, _COPIES, _ORIGINAL = "base_layer", "modules_to_save", "original_module"


@dataclass(frozen=True)
class LowRank:
    """What one LoRA adapter adds to a weight: `scale * B A` (Hu et al. 2022, "LoRA"), as a matrix.

    Attributes:
        layer: The layer of PEFT, which knows the scale.
        adapter: The adapter's name.
        b: B, `(rows, rank)` but for further dimensions of size 1.
        a: A, `(rank, columns)`, of a convolution with its columns in several dimensions.
        turned: Whether the weight is stored the other way round, so that `(B A)^T` is added.
    """

    layer: Any
    adapter: str
    b: nn.Parameter
    a: nn.Parameter
    turned: bool

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return float(self.layer.scaling[self.adapter])

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return U and V, of which what is added is the product."""
        b, a = self.b.detach().flatten(1).to(dtype), self.a.detach().flatten(1).to(dtype)
        return (a.T * self.scale, b.T) if self.turned else (b * self.scale, a)

    def add(self, u: Tensor, v: Tensor, only: Collection[int] | None) -> None:
        """Add to the gradients of B and A, by those of U and V; `only` where these ids are."""
        b, a = (v.T, u.T * self.scale) if self.turned else (u * self.scale, v)
        for parameter, gradient in ((self.b, b), (self.a, a)):
            add_to(parameter, gradient, only)


@dataclass(frozen=True)
class Adapted:
    """A weight with what the active adapters add to it.

    Attributes:
        base: The weight by itself.
        parts: What is added, of low rank.
        layer: The layer of PEFT; what it adds is asked of it (`get_delta_weight`) where that is not of low rank.
        adapters: The names of the active adapters.
    """

    base: nn.Parameter
    parts: tuple[LowRank, ...]
    layer: Any
    adapters: tuple[str, ...]

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return self.base.shape

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the adapters that add to it."""
        found: list[nn.Parameter] = []
        for adapter in self.adapters:
            for name in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
                held = getattr(self.layer, name, {})
                if adapter in held:
                    own = held[adapter]
                    found += [own] if isinstance(own, nn.Parameter) else [own.weight]
        return found

    @property
    def requires_grad(self) -> bool:
        """Whether any of those is trained."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return U and V, whose product is all that is added, the weight's first dimension being its rows."""
        each = [part.factors(dtype) for part in self.parts]
        return torch.cat([u for u, _ in each], dim=1), torch.cat([v for _, v in each])

    def add(self, u: Tensor, v: Tensor, only: Collection[int] | None) -> None:
        """Add to the adapters' gradients, by those of U and V."""
        start = 0
        for part in self.parts:
            rank = part.a.shape[0]
            part.add(u[:, start : start + rank], v[start : start + rank], only)
            start += rank

    @torch.no_grad()
    def value(self) -> Tensor:
        """Return the weight as it counts."""
        return self.base.detach() + self.delta().to(self.base.dtype)

    def delta(self) -> Tensor:
        """Return what is added, in the shape of the weight, with the graph that leads to the adapters."""
        added = [self.layer.get_delta_weight(adapter) for adapter in self.adapters]
        return torch.stack(added).sum(dim=0) if len(added) > 1 else added[0]


def add_to(parameter: nn.Parameter, gradient: Tensor, only: Collection[int] | None = None) -> None:
    """Add to a parameter's gradient, if it is trained, and `only` if its id is there."""
    if not parameter.requires_grad or (only is not None and id(parameter) not in only):
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    parameter.grad.add_(gradient.reshape(parameter.shape))


def effective_weights(model: nn.Module) -> dict[str, nn.Parameter | Adapted]:
    """Return a model's weights by the names that they have without adapters, each as it counts in the forward pass.

    Those of the adapters themselves are not among them. A model without adapters has its parameters.

    Raises:
        UsageError: naming an adapter that is merged, not linear in what it trains, or of a kind that is not known.
    """
    if "peft" not in sys.modules:
        return dict(model.named_parameters())
    found, known = dict[str, nn.Parameter | Adapted](), set[int]()
    for name, weight in _weights(model, ""):
        own = id(weight.base if isinstance(weight, Adapted) else weight)
        if own not in known:  # of tied ones the first name is the parameter's
            known.add(own)
            found[name] = weight
    return found


def _weights(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Parameter | Adapted]]:
    """Go through the weights of a module, which has this name without adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(module, BaseTunerLayer):
        yield from _of_layer(module, name)
        return
    if isinstance(module, AuxiliaryTrainingWrapper):
        yield from _weights(_active_copy(module, name), name)
        return
    start = f"{name}." if name else ""
    yield from ((start + own, parameter) for own, parameter in module.named_parameters(recurse=False))
    for own, child in module.named_children():
        yield from _weights(child, start + own)


def _active_copy(wrapper: Any, name: str) -> nn.Module:
    """Return the module that counts, of the original and its trained copies.

    Raises:
        UsageError: if it is trained in another way than whole.
    """
    if not hasattr(wrapper, _COPIES):
        raise UsageError(f"{name} is trained as {type(wrapper).__name__}, which a penalty does not know; {_KNOWN}")
    copies = getattr(wrapper, _COPIES)
    active = [adapter for adapter in wrapper.active_adapters if adapter in copies]
    module: nn.Module = copies[active[0]] if active and not wrapper.disable_adapters else wrapper.original_module
    return module


def _of_layer(layer: Any, name: str) -> Iterator[tuple[str, nn.Parameter | Adapted]]:
    """Go through the weights of a layer that has adapters.

    Raises:
        UsageError: see `effective_weights`.
    """
    from peft.tuners.lora.layer import LoraLayer

    kind = type(layer).__name__
    if not isinstance(layer, LoraLayer):
        raise UsageError(f"{name} has an adapter of the kind {kind}, which a penalty does not know; {_KNOWN}")
    if layer.merged:
        raise UsageError(f"the adapters of {name} are merged into its weight; call unmerge_adapter() first")
    own = {"MultiheadAttention": "in_proj_weight", "ParamWrapper": getattr(layer, "parameter_name", "")}
    adapted = own.get(kind, "weight")
    active = [] if layer.disable_adapters else [one for one in layer.active_adapters if one in layer.scaling]
    for adapter in active:
        _check_linear(layer, adapter, name)
    for below, weight in _weights(layer.base_layer, name):
        if below != f"{name}.{adapted}" or not active:
            yield below, weight
            continue
        if isinstance(weight, Adapted):
            raise UsageError(f"{below} has adapters within adapters, which a penalty does not know; {_KNOWN}")
        if weight.requires_grad:
            raise UsageError(f"{below} is trained itself, beside its adapters; freeze it, or leave them out")
        if not weight.is_floating_point():
            raise UsageError(
                f"{below} is quantized ({weight.dtype}), and a penalty needs its numbers; load the model unquantized"
            )
        yield below, Adapted(weight, tuple(_low_rank(layer, kind, active)), layer, tuple(active))


_KNOWN = "it knows LoRA on linear layers, embeddings, convolutions, attention and parameters, and modules_to_save"


def _check_linear(layer: Any, adapter: str, name: str) -> None:
    """Refuse an adapter that makes of the layer none with another weight, linear in what is trained.

    Raises:
        UsageError: naming it.
    """
    variant = getattr(layer, "lora_variant", {}).get(adapter)
    if variant is not None or layer.use_dora.get(adapter):
        kind = "DoRA" if layer.use_dora.get(adapter) else type(variant).__name__
        raise UsageError(
            f"the adapter {adapter!r} of {name} is {kind}, whose weight is not linear in what it trains; {_KNOWN}. "
            "Take plain LoRA, or rsLoRA"
        )
    if layer.lora_bias.get(adapter):
        raise UsageError(f"the adapter {adapter!r} of {name} has a bias of its own (lora_bias); leave that out")
    if getattr(layer.get_base_layer(), "groups", 1) > 1:
        raise UsageError(
            f"{name} is a convolution in groups, whose adapters see all channels: what they add is no change of its "
            "weight. Leave it out of target_modules"
        )


def _low_rank(layer: Any, kind: str, adapters: Sequence[str]) -> Iterator[LowRank]:
    """Go through what the adapters add, where it is of low rank; nothing where it is not."""
    if kind == "ParamWrapper":
        return
    for adapter in adapters:
        if kind == "Embedding":
            yield LowRank(layer, adapter, layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter], True)
        else:
            turned = bool(getattr(layer, "fan_in_fan_out", False))
            yield LowRank(layer, adapter, layer.lora_B[adapter].weight, layer.lora_A[adapter].weight, turned)
