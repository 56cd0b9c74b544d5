"""TorchScript archives, scripted or traced: the program travels with the weights, and is trained as it is."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from ewc_finetune.checkpoint.checkpoint import Record
from ewc_finetune.checkpoint.program import RECORD, Program, silent
from ewc_finetune.errors import CheckpointError


class TorchScript(Program):
    """An archive that `torch.jit.save` wrote.

    Args:
        path: The file.
    """

    format = "torchscript"
    ending = ".pt"

    what = "a TorchScript archive"
    untrainable = (
        ": torch.jit.freeze made its weights constants, which nothing can train. Use the archive from before it was "
        "frozen"
    )

    def __init__(self, path: Path) -> None:
        extra, module = _load(path)
        super().__init__(path, module, Record.read_text(extra.get(RECORD), str(path)))

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], record: Record) -> None:
        """See `Checkpoint`."""
        extra, module = _load(self.path)  # the program as it was, its mode included
        module.load_state_dict(state)
        extra[RECORD] = record.to_text()
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
