"""What wraps a model (DataParallel, torch.compile, a trainer's own module), and what it puts before its names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from torch import nn

T = TypeVar("T")

# What wrappers put before names: DataParallel, torch.compile, Lightning and others that keep the model as an attribute;
# PEFT's "base_model.model." is two of them.
PREFIXES = ("module.", "_orig_mod.", "model.", "base_model.")


def prefixes(names: Sequence[str] | Mapping[str, object]) -> Iterator[str]:
    """Go through what may stand before a model's own names: nothing first, then what wrappers put there."""
    yield ""
    for prefix in PREFIXES:
        inner = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if inner:
            yield from (prefix + deeper for deeper in prefixes(inner))


def without(named: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return what has a name behind a prefix, by the rest of the name."""
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def fitting(named: Mapping[str, object], wanted: Collection[str]) -> str:
    """Return the prefix behind which most of the wanted names are; the shortest of those."""
    return max(prefixes(named), key=lambda prefix: len(without(named, prefix).keys() & set(wanted)))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that `torch.nn.DataParallel` and `torch.compile` wrap; any other is itself."""
    while True:
        inner = model.module if isinstance(model, nn.DataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner
