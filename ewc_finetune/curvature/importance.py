"""Where in a network the importance sits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


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


def importance_by_layer(fisher: Mapping[str, Tensor]) -> list[LayerImportance]:
    """Sum a diagonal Fisher over each layer, in the order of the layers."""
    layers: dict[str, list[Tensor]] = {}
    for name, values in fisher.items():
        layers.setdefault(layer_of(name), []).append(values.double())
    sums = {layer: sum(v.sum().item() for v in parts) for layer, parts in layers.items()}
    trace = sum(sums.values()) or 1.0
    found = []
    for layer, parts in layers.items():
        count = sum(v.numel() for v in parts)
        peak = max((v.max().item() for v in parts if v.numel()), default=0.0)
        found.append(LayerImportance(layer, count, sums[layer] / trace, sums[layer] / max(count, 1), peak))
    return found
