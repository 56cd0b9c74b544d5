"""The models that the benchmarks run, with batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.models import resnet18

from ewc_finetune.checkpoint.builtin_models import MLP

EXACT, LOOP_EXACT = "ewc-finetune, exact", "loop over samples and classes"


@dataclass(frozen=True)
class Case:
    """One model with its data.

    Attributes:
        build: Makes the model.
        batch: Samples at once.
        draw: Makes inputs and labels for so many samples.
        first: Batches that are not timed: in them a pass makes its plan, and compares more often than later.
        batches: How many are timed together, after these.
        likelihood: Name of the likelihood.
        without: Methods that would take too long: the exact ones for a language model, which has too many classes.
        converter: Whether BackPACK must convert the model's graph, which it does not see through otherwise.
    """

    build: Callable[[], nn.Module]
    batch: int
    draw: Callable[[int], tuple[Tensor, Tensor]]
    first: int
    batches: int
    likelihood: str = "categorical"
    without: tuple[str, ...] = ()
    converter: bool = False

    def takes(self, method: str) -> bool:
        """Whether a method is run on this model."""
        return method not in self.without


class LanguageModel(nn.Module):
    """A causal transformer: 4 layers, 256 wide, 4 heads, 128 tokens of a vocabulary of 1,000."""

    def __init__(self, vocabulary: int = 1000, width: int = 256, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every token's successor, shape `(batch, tokens, vocabulary)`."""
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device).expand_as(tokens)
        hidden = self.token(tokens) + self.place(places)
        return self.head(self.layers(hidden, mask=self.mask[:length, :length], is_causal=True))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _resnet() -> nn.Module:
    """ResNet-18 with the stem that is usual for images of 32 by 32: no stride and no pooling."""
    model = resnet18(weights=None, num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def _images(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda samples: (torch.randn(samples, *shape), torch.randint(0, 10, (samples,)))


CASES = {
    "MLP": Case(
        lambda: MLP(in_features=784, hidden=(256, 128), num_classes=10, batch_norm=True), 200, _images(784), 32, 24
    ),
    "CNN": Case(_cnn, 64, _images(1, 28, 28), 8, 7),
    "ResNet-18": Case(_resnet, 32, _images(3, 32, 32), 4, 3, without=(LOOP_EXACT,), converter=True),
    "LM": Case(
        LanguageModel,
        16,
        lambda samples: (torch.randint(0, 1000, (samples, 128)), torch.randint(0, 1000, (samples, 128))),
        4,
        3,
        "per-token",
        without=(EXACT, LOOP_EXACT),
    ),
}
