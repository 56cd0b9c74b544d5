"""`torch.export` archives (`.pt2`): the graph travels with the weights, and is trained as it was exported."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.archive import Archive
from ewc_finetune.checkpoint.formats.exported_archive import NotPlainError, read_exported, write_exported
from ewc_finetune.checkpoint.formats.exported_graph import build_graph, sizes_of_inputs
from ewc_finetune.checkpoint.formats.exported_texts import check_texts
from ewc_finetune.checkpoint.formats.program import RECORD, Program, silent
from ewc_finetune.errors import ArchitectureError, CheckpointError, first_line

# The errors that building raises for a document that is not as torch writes it.
_MALFORMED = (
    *(KeyError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError),
    *(RuntimeError, RecursionError, SyntaxError, IndexError),
)


class Exported(Program):
    """An archive that `torch.export.save` wrote, read as data.

    Raises:
        CheckpointError: if it is damaged, or has what could run code.
    """

    format = "torch.export"
    ending = ".pt2"

    what = "an exported graph"

    def __init__(self, archive: Archive) -> None:
        path = archive.path
        try:
            content = read_exported(archive)
            check_texts(content.program)
            self._graph = build_graph(content.program, content.tensors, content.weights)
            self._sizes = sizes_of_inputs(content.program)
        except NotPlainError as error:
            raise NotPlainError(_refusal(path, str(error))) from error
        except _MALFORMED as error:
            raise CheckpointError(f"{path} is not an exported program that can be read ({error!r:.200})") from error
        self._weights, self._extra = content.weights, content.extra
        super().__init__(path, self._graph, ModelMetadata.read_text(self._extra.get(RECORD), str(path)))

    def build(self, architecture: str | None) -> tuple[nn.Module, str | None]:
        """See `Checkpoint`.

        Raises:
            ArchitectureError: if it was exported in training mode or for one size of batch, has no parameters, or an
                architecture is named for it.
            NonFiniteError: if a weight is NaN or infinite.
        """
        _check_batch(self._sizes, self.label)
        decided = _baked_in(self._graph, self.label)
        if decided:
            self.remarks += (f"{self.label}: exported in eval mode; {' and '.join(decided)}, in training too",)
        return super().build(architecture)

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata) -> None:
        """See `Checkpoint`; the program stays as it is, to the byte."""
        write_exported(self.path, temporary, self._weights, state, {**self._extra, RECORD: metadata.to_text()})


class TrustedExport(Exported):
    """An archive that torch is to load, for those who trust it: what is in it may run.

    Raises:
        CheckpointError: if torch cannot load it.
    """

    def __init__(self, path: Path) -> None:
        extra, program = _load(path)
        module = program.module()
        # An exported module has one mode, and raises where another is asked for.
        module.train = module.eval = lambda mode=True: module  # type: ignore[method-assign, misc]
        self._graph = module
        self._sizes = dict(_sizes_of(program))
        Program.__init__(self, path, module, ModelMetadata.read_text(extra.get(RECORD), str(path)))

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata) -> None:
        """See `Checkpoint`."""
        extra, program = _load(self.path)
        with torch.no_grad():
            for name, tensor in program.state_dict.items():
                tensor.copy_(state[name])
        extra[RECORD] = metadata.to_text()
        buffer = io.BytesIO()
        with silent():
            torch.export.save(program, buffer, extra_files=extra)
        temporary.write_bytes(buffer.getvalue())


def open_exported(archive: Archive, trust_code: bool) -> Exported:
    """Read an archive as data; where that cannot be done, let torch load it if that is allowed.

    Raises:
        CheckpointError: see `Exported` and `TrustedExport`.
    """
    try:
        return Exported(archive)
    except NotPlainError:
        if not trust_code:
            raise
        return TrustedExport(archive.path)


def _refusal(path: Path, reason: str) -> str:
    return (
        f"{path} may run code when torch loads it, so it was not loaded: {reason}. Where you have the model, export it "
        "again with torch.export.save of torch 2.8 or later. If you know who made the file, and trust them: "
        "--trust-code"
    )


def _load(path: Path) -> tuple[dict[str, Any], torch.export.ExportedProgram]:
    extra = {RECORD: ""}
    try:
        with silent():
            program = torch.export.load(path, extra_files=extra)
    except Exception as error:
        raise CheckpointError(f"{path} is not an exported program that can be read ({first_line(error)})") from error
    return extra, program


def _sizes_of(program: torch.export.ExportedProgram) -> Iterator[tuple[str, list[int | None]]]:
    """Yield the shapes that the inputs were exported for; None is any size."""
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names and isinstance(node.meta.get("val"), torch.Tensor):
            yield node.name, [size if isinstance(size, int) else None for size in node.meta["val"].shape]


def _check_batch(sizes: dict[str, list[int | None]], label: str) -> None:
    for shape in sizes.values():
        if shape and shape[0] is not None:
            raise ArchitectureError(
                f"{label} was exported for batches of exactly {shape[0]}. Export it again with a dynamic first "
                "dimension: dynamic_shapes={0: torch.export.Dim('batch')} for each input"
            )


def _baked_in(module: fx.GraphModule, label: str) -> list[str]:
    """Say what the export decided for good; refuse what would make it another model at every call."""
    dropouts, norms = 0, 0
    for node in module.graph.nodes:
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
