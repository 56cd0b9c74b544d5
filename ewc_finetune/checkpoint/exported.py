"""`torch.export` archives (`.pt2`): the graph travels with the weights, and is trained as it was exported."""

from __future__ import annotations

import io
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ewc_finetune.checkpoint.checkpoint import Record
from ewc_finetune.checkpoint.program import RECORD, Program, silent
from ewc_finetune.errors import ArchitectureError, CheckpointError


class Exported(Program):
    """An archive that `torch.export.save` wrote.

    Args:
        path: The file.
    """

    format = "torch.export"
    ending = ".pt2"

    what = "an exported graph"

    def __init__(self, path: Path) -> None:
        extra, self._program = _load(path)
        module = self._program.module()
        # A graph has one mode, and refuses to be asked for another.
        module.train = module.eval = lambda mode=True: module  # type: ignore[method-assign, misc]
        super().__init__(path, module, Record.read_text(extra.get(RECORD), str(path)))

    def build(self, architecture: str | None) -> tuple[nn.Module, str | None]:
        """See `Checkpoint`.

        Raises:
            ArchitectureError: if it was exported in training mode or for one size of batch, has no parameters, or an
                architecture is named for it.
            NonFiniteError: if a weight is NaN or infinite.
        """
        _check_batch(self._program, self.label)
        found = _baked_in(self._program, self.label)
        if found:
            self.remarks += (f"{self.label}: exported in eval mode; {' and '.join(found)}, in training too",)
        return super().build(architecture)

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], record: Record) -> None:
        """See `Checkpoint`."""
        extra, program = _load(self.path)
        with torch.no_grad():
            for name, tensor in program.state_dict.items():
                tensor.copy_(state[name])
        extra[RECORD] = record.to_text()
        buffer = io.BytesIO()
        with silent():
            torch.export.save(program, buffer, extra_files=extra)
        temporary.write_bytes(buffer.getvalue())


def _load(path: Path) -> tuple[dict[str, Any], torch.export.ExportedProgram]:
    extra = {RECORD: ""}
    try:
        with silent():
            program = torch.export.load(path, extra_files=extra)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise CheckpointError(f"{path} is not an exported program that can be read ({reason})") from error
    return extra, program


def _check_batch(program: torch.export.ExportedProgram, label: str) -> None:
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names and isinstance(node.meta.get("val"), torch.Tensor):
            size = node.meta["val"].shape[:1]
            if size and isinstance(size[0], int):
                raise ArchitectureError(
                    f"{label} was exported for batches of exactly {size[0]}. Export it again with a dynamic first "
                    "dimension: dynamic_shapes={0: torch.export.Dim('batch')} for each input"
                )


def _baked_in(program: torch.export.ExportedProgram, label: str) -> list[str]:
    """Say what the export decided for good; refuse what would make it another model at every call."""
    dropouts, norms = 0, 0
    for node in program.graph.nodes:
        name, args = str(node.target), node.args
        if "dropout" in name:
            dropouts += 1
            _refuse_training(len(args) < 3 or bool(args[2]), node.name, label)
        if "batch_norm" in name:
            norms += 1
            _refuse_training("no_training" not in name and bool(args[5]), node.name, label)
        if "scaled_dot_product" in name:
            chance = node.kwargs.get("dropout_p", args[4] if len(args) > 4 else 0)
            _refuse_training(chance > 0, node.name, label)
    said = ["dropout stays off"] if dropouts else []
    return said + (["normalisation statistics stay as they are"] if norms else [])


def _refuse_training(training: bool, node: str, label: str) -> None:
    if training:
        raise ArchitectureError(
            f"{label} was exported in training mode: {node} acts at every call. Export model.eval() instead"
        )
