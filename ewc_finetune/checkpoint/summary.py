"""`inspect` of a checkpoint: its format, its architecture, its weights, and what is unsafe in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ewc_finetune.anchor import describe
from ewc_finetune.checkpoint import verification
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.location import locate, on_this_machine
from ewc_finetune.checkpoint.open import globals_asked_for, load_checkpoint, open_checkpoint
from ewc_finetune.data.columns import columns_of
from ewc_finetune.errors import ArchitectureError, CheckpointError, counted, few
from ewc_finetune.modules.modes import normalisation_layers


@dataclass(frozen=True)
class CheckpointInspection:
    """What `inspect` found in a checkpoint.

    Attributes:
        file: The checkpoint; of one on the Hub, what it was called.
        bytes: Its size.
        format: Name of its format.
        architecture: What its weights are of; None for one that brings its own program, or if it cannot be told.
        reason: Why the architecture cannot be told, or built.
        weights: How many `tensors`, `numbers` and `bytes` there are, by dtype.
        tied: Names that are one tensor.
        normalisation: Layers with running statistics.
        unsafe: What its pickle would import; nothing else is known of it then, unless it is trusted.
        metadata: What ewc-ft knows of it.
        remarks: What a reader should know of it.
        verified: What came of comparing it with its checksums, if that was asked for.
    """

    file: Path | str
    bytes: int
    format: str
    architecture: str | None
    reason: str | None
    weights: dict[str, dict[str, int]]
    tied: list[list[str]]
    normalisation: list[str]
    unsafe: list[str]
    metadata: ModelMetadata
    remarks: tuple[str, ...]
    verified: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        return {
            **{name: value for name, value in vars(self).items() if name != "metadata"},
            "file": str(self.file),
            "record": self.metadata.to_json(),
            "remarks": list(self.remarks),
        }

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What a person wants to know first, each with its name."""
        rows = [
            ("checkpoint", str(self.file)),
            ("format", self.format),
            ("size", f"{self.bytes:,} bytes"),
            ("architecture", self.architecture or self.reason or "its own program"),
            *(
                (
                    dtype,
                    f"{known['numbers']:,} numbers in {counted(known['tensors'], 'tensor')}, {known['bytes']:,} bytes",
                )
                for dtype, known in self.weights.items()
            ),
            ("tied", "; ".join(" and ".join(names) for names in self.tied)),
            ("normalisation", few(self.normalisation)),
            ("likelihood", self.metadata.likelihood or ""),
            ("classes", few(self.metadata.classes or [])),
            ("columns", columns_of(self.metadata.input)),
            ("lineage", "; ".join(map(describe.ancestor, self.metadata.lineage))),
            ("verified", self.verified or ""),
            ("unsafe", f"its pickle asks for {few(self.unsafe)}" if self.unsafe else ""),
        ]
        return [(name, value) for name, value in rows if value] + [("note", remark) for remark in self.remarks]


def inspect_checkpoint(
    file: str | Path, *, architecture: str | None = None, trust_code: bool = False, verify: bool = False
) -> CheckpointInspection:
    """Say what a checkpoint is.

    Args:
        file: The checkpoint.
        architecture: See `open_model`.
        trust_code: See `open_model`.
        verify: Whether to compare all of it with the checksums that it has.

    Raises:
        EwcError: naming what is wrong with the file.
    """
    location = locate(file)
    named = location if isinstance(location, Path) else str(file)
    try:
        checkpoint = load_checkpoint(location, trust_code=trust_code)
    except CheckpointError:
        path = on_this_machine(location)
        unsafe = globals_asked_for(path) if path.is_file() else []
        if not unsafe:
            raise
        size = path.stat().st_size
        reason = "not known, since it was not loaded"
        return CheckpointInspection(named, size, "pickle", None, reason, {}, [], [], unsafe, ModelMetadata(), ())
    path, state = checkpoint.path, checkpoint.state
    failed: str | None = None
    layers: list[str] = []
    try:
        loaded = open_checkpoint(checkpoint, architecture)
        state = loaded.model.state_dict(keep_vars=True)
        layers = list(normalisation_layers(loaded.model))
        architecture = loaded.metadata.architecture
    except ArchitectureError as error:
        architecture, failed = None, str(error)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return CheckpointInspection(
        file=named,
        bytes=_size(path),
        format=checkpoint.format,
        architecture=architecture,
        reason=failed,
        weights=_by_dtype(tensors),
        tied=_tied(tensors),
        normalisation=layers,
        unsafe=globals_asked_for(path) if path.is_file() else [],
        metadata=checkpoint.metadata,
        remarks=checkpoint.remarks,
        verified=verification.verify(path) if verify else None,
    )


def _size(path: Path) -> int:
    return (
        sum(part.stat().st_size for part in path.iterdir() if part.is_file()) if path.is_dir() else path.stat().st_size
    )


def _by_dtype(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Count each tensor once, however many names it has."""
    counts: dict[str, dict[str, int]] = {}
    for tensor in {_key(tensor): tensor for tensor in tensors.values()}.values():
        known = counts.setdefault(
            str(tensor.dtype).removeprefix("torch."), dict.fromkeys(("tensors", "numbers", "bytes"), 0)
        )
        known["tensors"] += 1
        known["numbers"] += tensor.numel()
        known["bytes"] += tensor.numel() * tensor.element_size()
    return counts


def _tied(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    names: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(_key(tensor), []).append(name)
    return [known for known in names.values() if len(known) > 1]


def _key(tensor: Tensor) -> object:
    return (tensor.data_ptr(), tensor.shape) if tensor.numel() else id(tensor)
