"""Formats in which a model's program travels with its weights, so that nothing has to be named for it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn

from ewc_finetune.checkpoint.checkpoint import ModelMetadata, SingleFile
from ewc_finetune.errors import ArchitectureError
from ewc_finetune.modules.finite import check_model
from ewc_finetune.storage.atomic import sha256

# The name of the text beside the program that has the model's metadata.
RECORD = "ewc_ft.json"


class Program(SingleFile):
    """A file that holds a model with its program.

    Attributes:
        what: What such a file is called, in a sentence.
        untrainable: Why it may have no parameters, and what to do.
    """

    what: str
    untrainable = ", so there is nothing to train in it"

    def __init__(self, path: Path, module: nn.Module, metadata: ModelMetadata) -> None:
        flags = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        if any(flags.values()):  # a file that was made under torch.no_grad has no flag set, which means nothing
            frozen = [name for name, trained in flags.items() if not trained]
            metadata = replace(metadata, frozen=list(dict.fromkeys([*metadata.frozen, *frozen])))
        super().__init__(str(path), sha256(path), metadata)
        self.path = path
        self.module = module

    def build(self, architecture: str | None) -> tuple[nn.Module, str | None]:
        """See `Checkpoint`.

        Raises:
            ArchitectureError: if it has no parameters, or an architecture is named for it.
            NonFiniteError: if a weight is NaN or infinite.
        """
        if architecture is not None:
            raise ArchitectureError(f"{self.label} is {self.what}, which has its own program; leave --arch away")
        if not any(True for _ in self.module.parameters()):
            raise ArchitectureError(f"{self.label} has no parameters{self.untrainable}")
        check_model(self.module, f"{self.label}: ")
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name not in self.metadata.frozen)
        return self.module.eval(), None


@contextmanager
def silent() -> Iterator[None]:
    """Keep from the user what torch remarks and logs: interfaces on their way out, tracebacks of a damaged file."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
