"""What a model is for, where its checkpoint says: how its outputs are meant, and what makes inputs of raw samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ewc_finetune.choices import LikelihoodName

Task = Literal["text classification", "image classification", "causal language model", "masked language model"]


@dataclass(frozen=True)
class ModelTask:
    """What a model of transformers is for.

    Attributes:
        folder: The folder with its tokenizer or image processor.
        kind: What it does with its inputs; None for one that is not known here, which takes tensors alone.
        likelihood: How its outputs are meant.
        classes: Their names, where the config has any.
        length: How many tokens it can take, where the config says.
        other: What it is for, where that is known and `kind` is None: a task that no data spec has data for.
    """

    folder: Path
    kind: Task | None
    likelihood: LikelihoodName
    classes: tuple[str, ...] | None
    length: int | None
    other: str | None = None
