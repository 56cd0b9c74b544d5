"""A few small networks that come with the package, for examples, demos and first steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ewc_finetune.errors import WrongArchitectureError, suggest


def check_options(head: str, arguments: Mapping[str, Any]) -> None:
    """Refuse what is no option of a network here, or no value of it.

    Args:
        head: The network's name.
        arguments: What it is to be built with.

    Raises:
        WrongArchitectureError: naming the option.
    """
    for name, value in arguments.items():
        if name not in _OPTIONS[head]:
            raise WrongArchitectureError(f"{head} has no option {name!r}. {suggest(name, _OPTIONS[head])}")
        fits, expected = _OPTIONS[head][name]
        if not fits(value):
            said = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            raise WrongArchitectureError(f"{head}?{name}={said}: {name} is {said!r}; expected {expected}")


def _is_width(value: Any) -> bool:
    return type(value) is int and value > 0


def _are_widths(value: Any) -> bool:
    return _is_width(value) or (isinstance(value, (list, tuple)) and bool(value) and all(map(_is_width, value)))


_WIDTH = (_is_width, "a whole number, at least 1")
# Of each network the options, and what they may be.
_OPTIONS: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "mlp": {
        "in_features": _WIDTH,
        "hidden": (_are_widths, "whole numbers, each at least 1, joined by commas (hidden=256,128)"),
        "num_classes": _WIDTH,
        "batch_norm": (lambda value: isinstance(value, bool), "True or False"),
    },
    "cnn": {
        "in_channels": _WIDTH,
        "image_size": (lambda value: type(value) is int and value >= 6, "a whole number, at least 6"),
        "num_classes": _WIDTH,
        "dropout": (lambda value: type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1"),
    },
}


class MLP(nn.Module):
    """Fully connected network: linear, batch norm, ReLU for each hidden layer, then a linear head.

    Args:
        in_features: Length of an input; inputs have shape `(batch, in_features)`.
        hidden: Widths of the hidden layers.
        num_classes: Length of the output.
        batch_norm: Whether each hidden linear layer is followed by batch norm.
    """

    def __init__(
        self,
        in_features: int = 784,
        hidden: int | Sequence[int] = (256, 128),
        num_classes: int = 10,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        width = in_features
        for index, wider in enumerate([hidden] if isinstance(hidden, int) else hidden, start=1):
            layers[f"linear{index}"] = nn.Linear(width, wider)
            if batch_norm:
                layers[f"norm{index}"] = nn.BatchNorm1d(wider)
            layers[f"relu{index}"] = nn.ReLU()
            width = wider
        self.body = nn.Sequential(layers)
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of shape `(batch, num_classes)`."""
        logits: Tensor = self.head(self.body(inputs))
        return logits


class CNN(nn.Module):
    """Two 3 by 3 convolutions (32 and 64 maps), max pooling, 128 hidden units.

    Args:
        in_channels: Channels of an image; inputs have shape `(batch, in_channels, image_size, image_size)`.
        image_size: Height and width of an image, at least 6.
        num_classes: Length of the output.
        dropout: Share of hidden units dropped in training.
    """

    def __init__(self, in_channels: int = 1, image_size: int = 28, num_classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        side = (image_size - 4) // 2
        self.conv1 = nn.Conv2d(in_channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(64 * side * side, 128)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape `(batch, num_classes)`."""
        maps = self.conv2(self.conv1(images).relu()).relu()
        logits: Tensor = self.head(self.dropout(self.hidden(self.pool(maps).flatten(1)).relu()))
        return logits
