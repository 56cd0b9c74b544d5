"""Which layers a run moved, beside how much they were held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.curvature.importance import layer_of
from ewc_finetune.penalty.penalty import Penalty


@dataclass
class Movement:
    """What became of one layer.

    Attributes:
        layer: Name of the module that the parameters belong to.
        parameters: How many weights it has.
        share: Its share of the trace of all anchors' `lambda F`, 0 to 1; None without anchors.
        moved: How far its weights went, in root mean square, relative to what they were.
        penalty: The layer's part of the penalty, in nats.
    """

    layer: str
    parameters: int = 0
    share: float | None = None
    moved: float = 0.0
    penalty: float = 0.0


def movements(model: nn.Module, start: Mapping[str, Tensor], penalty: Penalty | None) -> list[dict[str, Any]]:
    """Return a `Movement` for each layer, in the model's order, as JSON has it.

    Args:
        model: The model as the run left it.
        start: Its parameters before the run, by name; those of another shape (a new head) have no way to measure.
        penalty: The penalty of the anchors that held the run.
    """
    layers: dict[str, Movement] = {}
    ways: dict[str, tuple[float, float]] = {}
    for name, parameter in model.named_parameters():
        layer = layers.setdefault(layer_of(name), Movement(layer_of(name)))
        layer.parameters += parameter.numel()
        before = start.get(name)
        if before is not None and before.shape == parameter.shape:
            now, then = parameter.detach().to("cpu", torch.float64), before.to(torch.float64)
            way, length = ways.get(layer.layer, (0.0, 0.0))
            change = (now - then).square().sum().item()
            ways[layer.layer] = way + change, length + then.square().sum().item()
    for name, (way, length) in ways.items():
        layers[name].moved = math.sqrt(way / length) if length else float(way > 0)
    parts = {} if penalty is None else penalty.parts()
    total = sum(trace for _, trace in parts.values()) or 1.0
    for name, (value, trace) in parts.items():
        layer = layers[layer_of(name)]
        layer.penalty += value
        layer.share = (layer.share or 0.0) + trace / total
    if penalty is not None:
        for layer in layers.values():
            layer.share = layer.share or 0.0
    return [asdict(layer) for layer in layers.values()]
