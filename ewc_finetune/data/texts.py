"""Texts, with labels or without: the model's own tokenizer makes its inputs of them (`preprocessing`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ewc_finetune.address import Address
from ewc_finetune.choices import Split
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.options import Options
from ewc_finetune.errors import DataError, UsageError


@dataclass
class Texts(Dataset[Any]):
    """Texts by number.

    Attributes:
        texts: One to a sample.
        labels: One to a text, if any: numbers, or several to each.
        length: How many tokens to keep of each; as many as the model takes unless given.
        pack: Join the texts and cut them into samples of so many tokens.
    """

    texts: Sequence[str]
    labels: Tensor | None = None
    length: int | None = None
    pack: int | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[str, Tensor | None]:
        return self.texts[index], None if self.labels is None else self.labels[index]


@dataclass
class TextStream(IterableDataset[Any]):
    """Texts in the order in which they come, from the start each time; see `Texts`."""

    rows: Iterable[Mapping[str, Any]]
    text: str
    target: str | None
    limit: int | None = None
    length: int | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor | None]]:
        for number, row in enumerate(self.rows):
            if number == self.limit:
                return
            yield str(row[self.text]), None if self.target is None else torch.as_tensor(row[self.target])


@dataclass(frozen=True)
class Generated(Dataset[Any]):
    """Samples that a causal language model is to make itself; there are none before it does.

    Attributes:
        count: How many.
        length: How many tokens at most; as many as the model takes unless given.
        seed: Of their draws.
    """

    count: int
    length: int | None
    seed: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise DataError("generated samples are made by a causal language model of transformers alone")


def load_text(address: Address, place: str, split: Split, options: Options) -> Domain:
    """Read a file of texts without labels, one to a line; empty lines are none."""
    if not place:
        raise UsageError(f"{address}: name the file, as in text:corpus.txt")
    path = Path(place).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
        raise DataError(f"{path}, which {address} names, cannot be read ({reason})") from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise DataError(f"{path} has no texts; expected one to a line")
    return Domain(str(address), Texts(found, None, options.length, options.pack))


def load_generated(address: Address, place: str, split: Split, options: Options) -> Domain:
    """Stand for the samples that the model is to generate."""
    if not place.isdecimal() or int(place) < 1:
        raise UsageError(f"{address}: say how many samples to generate, as in generate:1000?length=128")
    return Domain(str(address), Generated(int(place), options.length, options.seed))
