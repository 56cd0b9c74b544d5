"""Where in a network the importance sits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ewc_finetune.curvature.kronecker_block import Block


@dataclass(frozen=True)
class LayerImportance:
    """One layer's part of the Fisher.

    Attributes:
        layer: Name of the module that the parameters belong to.
        parameters: How many weights the layer has.
        share: Its share of the sum of the whole diagonal (the trace), 0 to 1.
        mean: Mean of its diagonal.
        max: Largest value of its diagonal.
    """

    layer: str
    parameters: int
    share: float
    mean: float
    max: float


def layer_of(parameter: str) -> str:
    """Return the name of the module that a parameter belongs to; the parameter's own if that is the model itself."""
    return parameter.rpartition(".")[0] or parameter


def importance_by_layer(
    fisher: Mapping[str, Tensor], blocks: Iterable[Block] = (), order: Iterable[str] = ()
) -> list[LayerImportance]:
    """Sum the diagonal of a Fisher over each layer.

    Args:
        fisher: The diagonal by parameter, where there is one.
        blocks: The blocks of the other layers.
        order: Parameters in the order that the layers are wanted in; as they come otherwise.
    """
    layers: dict[str, list[tuple[int, float, float]]] = {}  # of each part its size, sum and largest
    for block in blocks:
        diagonal = block.diagonal()
        part = (diagonal.numel(), block.trace, diagonal.max().item())
        layers.setdefault(layer_of(block.weight), []).append(part)
    for name, values in fisher.items():
        part = (values.numel(), values.sum(dtype=torch.float64).item(), values.max().item() if values.numel() else 0.0)
        layers.setdefault(layer_of(name), []).append(part)
    sums = {layer: sum(total for _, total, _ in parts) for layer, parts in layers.items()}
    trace = sum(sums.values()) or 1.0
    importance = []
    for layer, parts in layers.items():
        count = sum(size for size, _, _ in parts)
        peak = max(largest for _, _, largest in parts)
        importance.append(LayerImportance(layer, count, sums[layer] / trace, sums[layer] / max(count, 1), peak))
    place = {layer_of(name): number for number, name in enumerate(order)}
    return sorted(importance, key=lambda layer: place.get(layer.layer, len(place)))
