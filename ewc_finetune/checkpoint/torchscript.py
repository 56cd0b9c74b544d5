"""TorchScript archives, scripted or traced: the program travels with the weights, and is trained as it is."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ewc_finetune.anchor import check_model
from ewc_finetune.checkpoint.checkpoint import Record, SingleFile, cpu_state
from ewc_finetune.errors import ArchitectureError, CheckpointError
from ewc_finetune.files import sha256

_KEY = "ewc_ft.json"


class TorchScript(SingleFile):
    """An archive that `torch.jit.save` wrote.

    Args:
        path: The file.
    """

    format = "torchscript"
    ending = ".pt"

    def __init__(self, path: Path) -> None:
        extra, self._module = _load(path)
        self._path = path
        super().__init__(str(path), sha256(path), Record.read_text(extra.get(_KEY), str(path)))

    def build(self, architecture: str | None) -> tuple[nn.Module, str | None]:
        """See `Checkpoint`.

        Raises:
            ArchitectureError: if it has no parameters (a frozen archive), or one is named for it.
            NonFiniteError: if a weight is NaN or infinite.
        """
        refuse_architecture(architecture, self.label, "a TorchScript archive")
        module = self._module
        if not any(True for _ in module.parameters()):
            raise ArchitectureError(
                f"{self.label} has no parameters: torch.jit.freeze made its weights constants, which nothing can "
                "train. Use the archive from before it was frozen"
            )
        check_model(module, f"{self.label}: ")
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in self.record.frozen)
        return module.eval(), None

    def write(
        self,
        temporary: Path,
        path: Path,
        model: nn.Module,
        record: Record,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """See `Checkpoint`."""
        extra, module = _load(self._path)  # the program as it was, its mode included
        module.load_state_dict(cpu_state(model, dtypes))
        extra[_KEY] = json.dumps(record.to_json(), sort_keys=True)
        with silent():
            # Into memory: given a path, torch would write the temporary name into the archive.
            temporary.write_bytes(module.save_to_buffer(_extra_files=extra))


def _load(path: Path) -> tuple[dict[str, Any], torch.jit.ScriptModule]:
    with zipfile.ZipFile(path) as archive:
        names = [name.partition("/extra/")[2] for name in archive.namelist() if "/extra/" in name]
    extra = dict.fromkeys(names, "")
    try:
        with silent():
            module: torch.jit.ScriptModule = torch.jit.load(  # type: ignore[no-untyped-call]
                str(path), map_location="cpu", _extra_files=extra
            )
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise CheckpointError(f"{path} is not a whole TorchScript archive ({reason})") from error
    return extra, module


def refuse_architecture(architecture: str | None, label: str, what: str) -> None:
    """Refuse an architecture for a file that brings its own program.

    Raises:
        ArchitectureError: saying so.
    """
    if architecture is not None:
        raise ArchitectureError(f"{label} is {what}, which has its own program; leave --arch away")


@contextmanager
def silent() -> Iterator[None]:
    """Keep torch's remarks on an interface that is on its way out from the user, who has the file all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
