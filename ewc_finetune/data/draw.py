"""Which samples are taken where fewer are wanted than there are: the same ones whenever it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The seed of every draw: a spec names the same samples whenever it is read.
_SEED = 0


@dataclass(frozen=True)
class Part:
    """One of the domains that are mixed.

    Attributes:
        name: The domain's name.
        samples: How many it has.
        weight: How often each of them is taken in an epoch, in the mean.
    """

    name: str
    samples: int
    weight: float

    @property
    def drawn(self) -> int:
        """How many samples an epoch has of it; one at least."""
        return max(1, round(self.samples * self.weight))

    def __str__(self) -> str:
        if self.drawn == self.samples:
            return f"all {self.samples:,} of {self.name}"
        more = f"{self.weight:g} times the {self.samples:,}"
        return f"{more if self.weight > 1 else f'{self.drawn:,} of {self.samples:,}'} of {self.name}"


def draw_parts(parts: Sequence[Part], shuffle: torch.Generator | None) -> Tensor:
    """Draw an epoch of what is mixed: of each part what its weight says, all samples as often as may be.

    Args:
        parts: The parts, whose samples are numbered one part after the other.
        shuffle: Draws them, and their order; they are always the same, in the order of the data, unless given.
    """
    generator = torch.Generator().manual_seed(_SEED) if shuffle is None else shuffle
    start, chosen = 0, []
    for part in parts:
        times, more = divmod(part.drawn, part.samples)
        chosen += [torch.arange(start, start + part.samples)] * times
        if more:
            chosen.append(start + torch.randperm(part.samples, generator=generator)[:more])
        start += part.samples
    drawn = torch.cat(chosen)
    return drawn.sort().values if shuffle is None else drawn[torch.randperm(len(drawn), generator=shuffle)]


def are_classes(labels: Tensor | None) -> bool:
    """Whether labels are known, and are one class for each sample."""
    return labels is not None and labels.ndim == 1 and not labels.is_floating_point()


def draw_evenly(n: int, size: int, labels: Tensor | None) -> Tensor:
    """Draw `n` of `size` samples: as many of each class as of the others, where there are classes (`are_classes`).

    A class that has too few gives all it has, and the others give more. A smaller draw is part of a larger one.

    Returns:
        Their indices, in the order of the data.
    """
    order = torch.randperm(size, generator=torch.Generator().manual_seed(_SEED))
    if labels is not None and are_classes(labels):
        # The first of every class go before the second of any.
        grouped, by_class = labels[order].sort(stable=True)
        places = torch.arange(size)
        begins = torch.cat([torch.ones(1, dtype=torch.bool), grouped[1:] != grouped[:-1]])
        ranks = torch.empty_like(order)
        ranks[by_class] = places - (places * begins).cummax(0).values
        order = order[ranks.argsort(stable=True)]
    return order[:n].sort().values


def describe_draw(n: int, size: int, labels: Tensor | None, drawn: Tensor) -> str:
    """Say what `draw_evenly` drew, for people."""
    how = "at random"
    if labels is not None and are_classes(labels):
        classes, drawn_classes = len(set(labels.tolist())), len(set(labels[drawn].tolist()))
        missed = f", of which {classes - drawn_classes:,} get none" if drawn_classes < classes else ""
        how = f"evenly from {classes:,} classes{missed}"
    return f"limit={n} draws {n:,} of {size:,} samples {how}, always the same; first={n} takes the first"
