"""Texts, with labels or without: the model's own tokenizer makes its inputs of them (`preprocessing`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ewc_finetune.choices import Split
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.options import DataOptions
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.specs.query import Address

# A text, or two that are a pair, such as a question and an answer.
Text = str | tuple[str, str]


@dataclass
class Texts(Dataset[Any]):
    """Texts by number.

    Attributes:
        texts: One to a sample, or one pair.
        labels: One to a text, if any: numbers, or several to each.
        length: How many tokens to keep of each; as many as the model takes unless given.
        pack: Join the texts and cut them into samples of so many tokens.
    """

    texts: Sequence[Text]
    labels: Tensor | None = None
    length: int | None = None
    pack: int | None = None

    @property
    def paired(self) -> bool:
        """Whether samples are pairs of texts."""
        return bool(len(self.texts)) and isinstance(self.texts[0], tuple)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Text, Tensor | None]:
        return _text(self.texts[index], index), None if self.labels is None else self.labels[index]

    def subset(self, indices: Sequence[int]) -> Texts:
        """Return some of them, in this order."""
        labels = None if self.labels is None else self.labels[torch.as_tensor(indices, dtype=torch.long)]
        return replace(self, texts=[self.texts[index] for index in indices], labels=labels)


@dataclass
class TextStream(IterableDataset[Any]):
    """Texts in the order in which they come, from the start each time; see `Texts`. Targets are divided by `unit`."""

    rows: Iterable[Mapping[str, Any]]
    columns: tuple[str, ...]
    target: str | None
    limit: int | None = None
    length: int | None = None
    unit: float | None = None

    @property
    def paired(self) -> bool:
        """Whether samples are pairs of texts."""
        return len(self.columns) > 1

    def __iter__(self) -> Iterator[tuple[Text, Tensor | None]]:
        for number, row in enumerate(self.rows):
            if number == self.limit:
                return
            values = tuple(row[column] for column in self.columns)
            text = _text(values if self.paired else values[0], number)
            label = None if self.target is None else torch.as_tensor(row[self.target])
            yield text, label if label is None or self.unit is None else label / self.unit


@dataclass(frozen=True)
class Generated(Dataset[Any]):
    """Samples that a causal language model is to make itself; there are none before it does.

    Attributes:
        count: How many.
        length: How many tokens at most, a prompt aside; as many as the model takes unless given.
        seed: The seed of what is drawn at random.
        prompts: Requests to answer, in turn; only the answers count then.
        kept: The file that they are read from if it is there, and kept in otherwise; None to keep them nowhere.
    """

    count: int
    length: int | None
    seed: int
    prompts: tuple[str, ...] = ()
    kept: Path | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        raise DataError("generated samples are made by a causal language model of transformers alone")


def as_texts(columns: Sequence[Sequence[str]]) -> Sequence[Text]:
    """Return the texts of one column, or the pairs of two."""
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def _text(value: object, index: int) -> Text:
    if isinstance(value, tuple):
        first, second = (str(_text(part, index)) for part in value)
        return first, second
    if not isinstance(value, str):
        raise DataError(f"sample {index} is a {type(value).__name__} where a text should be: {value!r:.50}")
    return value


def load_text(address: Address, place: str, split: Split, options: DataOptions) -> Domain:
    """Read a file of texts without labels, one to a line; empty lines are none."""
    if not place:
        raise UsageError(f"{address}: name the file, as in text:corpus.txt")
    refuse_split(address, options)
    return Domain(str(address), Texts(_lines(address, place), None, options.length, options.pack))


def _lines(address: Address, place: str) -> list[str]:
    """Return the lines of a file that are not empty."""
    path = Path(place).expanduser()
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8: {error}"
        raise DataError(f"{path}, which {address} names, cannot be read ({reason})") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise DataError(f"{path} has no texts; expected one to a line")
    return texts


def refuse_split(address: Address, options: DataOptions) -> None:
    """Refuse a split of what has none.

    Raises:
        UsageError: saying so.
    """
    if options.split is not None:
        raise UsageError(f"{address}: one file has no splits to choose from; name the file of the other split")


def load_generated(address: Address, place: str, split: Split, options: DataOptions) -> Domain:
    """Stand for the samples that the model is to generate."""
    if not place.isdecimal() or int(place) < 1:
        raise UsageError(f"{address}: say how many samples to generate, as in generate:1000?length=128")
    prompts = () if options.prompts is None else tuple(_lines(address, options.prompts))
    return Domain(str(address), Generated(int(place), options.length, options.seed, prompts))
