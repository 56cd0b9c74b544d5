"""Pickled modules (`torch.save(model, path)`): code that runs when it is loaded, for those who trust the file."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.program import Program
from ewc_finetune.checkpoint.formats.state_dict import save_object

_KEY = "_ewc_ft"


class Pickled(Program):
    """A module that was pickled whole."""

    format = "pickled module"
    ending = ".pt"
    what = "a pickled module"

    def __init__(self, path: Path, module: nn.Module) -> None:
        super().__init__(path, module, ModelMetadata.read(getattr(module, _KEY, None), str(path)))

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata) -> None:
        """See `Checkpoint`."""
        setattr(self.module, _KEY, metadata.to_json())
        # The module itself is pickled, and has the tensors of the state while it is.
        tensors = {n: t for n, t in self.module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
        before = {name: tensor.data for name, tensor in tensors.items()}
        try:
            for name, tensor in tensors.items():
                tensor.data = state[name]
            save_object(temporary, path, self.module)
        finally:
            for name, tensor in tensors.items():
                tensor.data = before[name]
