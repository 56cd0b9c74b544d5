"""Pickled modules (`torch.save(model, path)`): code that runs when it is loaded, for those who trust the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ewc_finetune.anchor import check_model
from ewc_finetune.checkpoint.checkpoint import Record, SingleFile
from ewc_finetune.checkpoint.state_dict import save_object
from ewc_finetune.checkpoint.torchscript import refuse_architecture
from ewc_finetune.files import sha256

_KEY = "_ewc_ft"


class Pickled(SingleFile):
    """A module that was pickled whole.

    Args:
        path: The file.
        module: What it holds.
    """

    format = "pickled module"
    ending = ".pt"

    def __init__(self, path: Path, module: nn.Module) -> None:
        self._module = module
        super().__init__(str(path), sha256(path), Record.read(getattr(module, _KEY, None), str(path)))

    def build(self, architecture: str | None) -> tuple[nn.Module, str | None]:
        """See `Checkpoint`.

        Raises:
            ArchitectureError: if an architecture is named for it.
            NonFiniteError: if a weight is NaN or infinite.
        """
        refuse_architecture(architecture, self.label, "a pickled module")
        check_model(self._module, f"{self.label}: ")
        return self._module.eval(), None

    def write(
        self,
        temporary: Path,
        path: Path,
        model: nn.Module,
        record: Record,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """See `Checkpoint`."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        before = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
        setattr(model, _KEY, record.to_json())
        try:
            for name, tensor in model.cpu().state_dict(keep_vars=True).items():
                tensor.data = tensor.data.to((dtypes or {}).get(name, tensor.dtype))
            save_object(temporary, path, model)
        finally:
            for name, tensor in model.state_dict(keep_vars=True).items():
                tensor.data = tensor.data.to(before[name])
            model.to(device)
