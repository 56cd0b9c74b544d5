"""Which of torchvision's models a checkpoint's weights are of: told by their names and shapes."""

from __future__ import annotations

import hashlib
import inspect
import json
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_T = TypeVar("_T")
# The buffer in which a batch norm counts its batches.
COUNTS = "num_batches_tracked"
# The classes of torchvision's classifiers unless they are told otherwise.
_DEFAULT_CLASSES = 1000
# The models that have each set of names, by its digest: to build all of them would take half a minute.
_TABLE = Path(__file__).with_name("torchvision_names.json")


def recognise(shapes: Mapping[str, torch.Size]) -> str | None:
    """Return the architecture of weights with these shapes, `torchvision:resnet18?num_classes=10`, or None.

    A model is taken for its own if all its names are there and all shapes too, but for the layers with an output for
    each class, of which there may be any number.
    """
    from torchvision.models import get_model_builder, list_models

    installed = list_models()
    for name in _table().get(digest(shapes), []):
        if name not in installed:
            continue
        own = {key: tensor.shape for key, tensor in build_empty(get_model_builder(name)).state_dict().items()}
        classes = _classes(_without_counts(own), _without_counts(shapes))
        if classes is not None:
            return f"torchvision:{name}?num_classes={classes}"
    return None


def digest(names: Mapping[str, Any]) -> str:
    """Return what stands for a set of names in the table."""
    return hashlib.sha256("\n".join(sorted(_without_counts(names))).encode()).hexdigest()[:16]


def _without_counts(names: Mapping[str, _T]) -> dict[str, _T]:
    """Leave out what files from before torch 0.4.1 don't have."""
    return {name: value for name, value in names.items() if not name.endswith(COUNTS)}


def build_empty(builder: Any) -> nn.Module:
    """Build a model of torchvision whose weights take no memory."""
    known = inspect.signature(builder).parameters
    with _WithoutMemory(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # two models warn of how they initialise their weights, which have no memory here
        model: nn.Module = builder(**{key: None for key in ("weights", "weights_backbone") if key in known})
    return model


def _classes(own: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size]) -> int | None:
    """Return how many classes the weights have, None if they are not of this model."""
    if own.keys() != shapes.keys():
        return None
    differing = {name for name in own if own[name] != shapes[name]}
    outputs = {(own[name][:1], shapes[name][:1]) for name in differing}
    if any(own[name][1:] != shapes[name][1:] for name in differing) or len(outputs) > 1:
        return None
    if outputs:
        ((before, after),) = outputs
        return int(after[0]) if before == (_DEFAULT_CLASSES,) else None
    return _DEFAULT_CLASSES


class _WithoutMemory(TorchFunctionMode):
    """Makes parameters on the meta device; unlike under `torch.device("meta")`, numbers can still be computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@cache
def _table() -> dict[str, list[str]]:
    table: dict[str, list[str]] = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table


def make_table() -> str:
    """Return the table for the torchvision that is installed, as the text of its file."""
    from torchvision import models

    table: dict[str, list[str]] = {}
    for name in models.list_models(module=models):
        names = build_empty(models.get_model_builder(name)).state_dict()
        table.setdefault(digest(names), []).append(name)
    return json.dumps(dict(sorted(table.items())), indent=1) + "\n"
