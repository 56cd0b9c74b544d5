"""What a penalty holds as a whole, more than one parameter to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from torch import Tensor, nn

from ewc_finetune.errors import UsageError


class Held(ABC):
    """A weight, or a layer's weight and bias, with the quadratic that holds it.

    Attributes:
        name: The name of the weight.
        parameters: The parameters that the pull is on.
    """

    name: str
    parameters: list[nn.Parameter]

    @property
    def trained(self) -> list[nn.Parameter]:
        """Those of the parameters that are trained."""
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    @abstractmethod
    def value(self) -> float:
        """Return the penalty."""

    @abstractmethod
    def trace(self) -> float:
        """Return the trace of `lambda F`."""

    @abstractmethod
    def largest(self) -> float:
        """Return the largest eigenvalue of `lambda F`, or more than that where several anchors hold it."""

    @abstractmethod
    def add(self, scale: float | Tensor = 1.0, only: Collection[int] | None = None) -> None:
        """Add the gradient, times a scale, to those of the parameters; `only` of these ids."""

    def check_rates(self, rates: Sequence[float]) -> None:
        """Refuse an implicit step that cannot be taken with these learning rates, one for each that is trained.

        Raises:
            UsageError: naming the weight.
        """
        raise UsageError(
            f"the proximal form moves weights themselves, and {self.name} is trained through adapters. Use the "
            "gradient form"
        )

    def move(self, lr: float) -> None:
        """Take the implicit step of the penalty with a learning rate."""
        self.check_rates([lr])
