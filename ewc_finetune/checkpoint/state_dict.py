"""The `.pt` state dict: what `torch.save(model.state_dict(), path)` writes.

What ewc-ft knows of a model (architecture, input, lineage) rides in the state dict's `_metadata`, the attribute that
torch keeps its own version numbers in: the file stays a plain state dict, for `load_state_dict` and everybody else.
"""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.anchor import Anchor, check_model
from ewc_finetune.checkpoint.architecture import FORMS, build
from ewc_finetune.errors import AnchorError, ArchitectureError, CheckpointError, StorageError
from ewc_finetune.files import atomic_write, sha256
from ewc_finetune.provenance import is_head

FORMAT = "state_dict"
_KEY = "ewc_ft"
FROZEN = "frozen (requires_grad is false)"


@dataclass(frozen=True)
class Record:
    """What ewc-ft wrote into a checkpoint about the model.

    Attributes:
        architecture: The text that builds it.
        input: How samples are presented to it (`Layout`).
        classes: Names of its outputs, where they are known.
        lineage: Anchors whose penalties it was trained under: `name`, `sha256`, `lambda` of each.
        frozen: Parameters that were not to be trained (`requires_grad` was false).
        head: Of a model that was given a new last layer; see `Provenance`.
    """

    architecture: str | None = None
    input: dict[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    lineage: list[dict[str, Any]] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    head: dict[str, Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A trained model as it was found: its tensors by name, and what is known of them.

    Attributes:
        label: What to call it in messages: the file.
        format: The format it is deployed in, and is to be written back in.
        sha256: Digest of the file.
        state: Parameters and buffers, on the CPU.
        record: What ewc-ft knows.
    """

    label: str
    format: str
    sha256: str | None
    state: Mapping[str, Tensor]
    record: Record


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint, or the checkpoint within an anchor; no code in the file is ever run.

    Raises:
        CheckpointError: if the file is missing, empty, no state dict, or asks for code to be run.
        AnchorError: if it is a safetensors file but no anchor.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty; expected a state dict as torch.save writes it")
    if _is_safetensors(path):
        return from_anchor(Anchor.load(path))
    found = _load_tensors(path)
    if not isinstance(found, Mapping) or not found:
        raise CheckpointError(
            f"{path} holds {'an empty' if isinstance(found, Mapping) else 'a'} {type(found).__name__}; expected a "
            "state dict, as torch.save(model.state_dict(), path) writes it"
        )
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: the entry {name!r} is a {type(value).__name__}, not a tensor; expected a plain state dict. "
                "If the weights are one entry of it, save that entry alone: "
                f"torch.save(torch.load({path.name!r}, weights_only=True)[{name!r}], 'weights.pt')"
            )
    return Checkpoint(str(path), FORMAT, sha256(path), found, _read_record(found, path))


def from_anchor(anchor: Anchor) -> Checkpoint:
    """Return the checkpoint that an anchor was made from."""
    origin = anchor.provenance.checkpoint
    if (origin.get("format") or FORMAT) != FORMAT:
        raise AnchorError(f"{anchor.label} comes from a {origin['format']} checkpoint; this version writes {FORMAT}")
    record = Record(
        architecture=origin.get("architecture"),
        input=anchor.provenance.input,
        classes=anchor.provenance.classes,
        lineage=anchor.provenance.lineage,
        frozen=[name for name, reason in anchor.provenance.excluded.items() if reason == FROZEN],
        head=anchor.provenance.head,
    )
    return Checkpoint(anchor.label, FORMAT, origin.get("sha256"), {**anchor.weights, **anchor.buffers}, record)


def build_model(checkpoint: Checkpoint, architecture: str | None = None) -> tuple[nn.Module, str]:
    """Build the model of a checkpoint, on the CPU in eval mode; also return the architecture that it has.

    Args:
        checkpoint: Where the weights come from; they keep their own dtypes.
        architecture: Named by the user; the one that the checkpoint carries unless given.

    Raises:
        ArchitectureError: if none is known or it does not fit, naming the first parameters and both shapes.
        CheckpointError: if weights are integers (quantized), or tied ones contradict each other.
        NonFiniteError: if a weight is NaN or infinite.
    """
    text = architecture or checkpoint.record.architecture
    if text is None:
        raise ArchitectureError(
            f"{checkpoint.label} does not say what architecture its weights belong to. Name it with --arch: {FORMS}"
        )
    model = build(text, trusted=architecture is not None)
    _fit(model, checkpoint, text)
    check_model(model, f"{checkpoint.label}: ")
    for name, parameter in model.named_parameters():
        if name in checkpoint.record.frozen:
            parameter.requires_grad_(False)
    return model.eval(), text


def save_checkpoint(
    path: Path, model: nn.Module, record: Record, dtypes: Mapping[str, torch.dtype] | None = None
) -> None:
    """Write the model as a state dict that carries `record`; the same model gives the same bytes.

    Args:
        path: The file.
        model: On any device.
        record: What is known of it.
        dtypes: Tensors to write in another dtype than they have, by name.

    Raises:
        StorageError: if it cannot be written.
    """
    with atomic_write(path) as temporary:
        write_checkpoint(temporary, path, model, record, dtypes)


def write_checkpoint(
    temporary: Path, path: Path, model: nn.Module, record: Record, dtypes: Mapping[str, torch.dtype] | None = None
) -> None:
    """Write it into a temporary file, which is to be renamed to `path`; see `save_checkpoint`."""
    state = model.state_dict(keep_vars=True)
    metadata = getattr(state, "_metadata", OrderedDict())
    # One copy for each tensor, so that what is tied in the model is one storage in the file too.
    copies = {
        id(value): value.detach().to("cpu", (dtypes or {}).get(name, value.dtype))
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    state = OrderedDict((name, copies.get(id(value), value)) for name, value in state.items())
    state._metadata = metadata  # type: ignore[attr-defined]
    metadata[_KEY] = asdict(record)
    with temporary.open("wb") as file:
        try:
            # To an open file: given a path, torch would write the temporary name into the archive.
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None  # torch's writer hides what the system said
            raise StorageError(f"cannot write {path}: {error}. Nothing was left behind") from error


def _is_safetensors(path: Path) -> bool:
    """Eight bytes of header length, then a JSON object."""
    with path.open("rb") as file:
        head = file.read(9)
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size


def _load_tensors(path: Path) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on old formats are not for the user of this command
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = _globals_asked_for(path)
        if asked:
            raise CheckpointError(
                f"{path} is a pickle that asks for more than tensors ({asked}), which could run any code, so it was "
                "not loaded. Where the model can be built, save its weights alone: torch.save(model.state_dict(), path)"
            ) from error
        raise CheckpointError(f"{path} is not a checkpoint: it is no archive that torch.save wrote") from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read ({reason}); expected a state dict as "
            "torch.save(model.state_dict(), path) writes it, whole"
        ) from error


def _globals_asked_for(path: Path) -> str:
    """List what the pickle would import, as far as torch can tell without running it."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # noqa: BLE001 - only for the message; damaged and legacy files have no list
        return ""
    return ", ".join(sorted(names))


def _read_record(state: Mapping[str, Tensor], path: Path) -> Record:
    metadata = getattr(state, "_metadata", None)
    found = metadata.get(_KEY) if isinstance(metadata, Mapping) else None
    if found is None:
        return Record()
    expected: dict[str, Callable[[Any], bool]] = {
        "architecture": lambda v: v is None or isinstance(v, str),
        "input": lambda v: isinstance(v, dict) and isinstance(v.get("shape", []), list),
        "classes": lambda v: v is None or isinstance(v, list),
        "lineage": lambda v: isinstance(v, list) and all(isinstance(entry, dict) for entry in v),
        "frozen": lambda v: isinstance(v, list),
        "head": is_head,
    }
    known = {key: value for key, value in found.items() if key in expected} if isinstance(found, Mapping) else None
    if known is None or not all(expected[key](value) for key, value in known.items()):
        raise CheckpointError(f"{path}: what ewc-ft wrote into its metadata is damaged: {found!r:.200}")
    return Record(**known)


def _fit(model: nn.Module, checkpoint: Checkpoint, architecture: str) -> None:
    """Load the weights, each in the dtype it has in the checkpoint, or say what does not fit."""
    slots = dict(model.state_dict(keep_vars=True))
    present = {id(slots[name]) for name in checkpoint.state if name in slots}
    problems = []
    for name, value in checkpoint.state.items():
        if name not in slots:
            problems.append(f"{name} {tuple(value.shape)} is in the checkpoint but not in the architecture")
        elif slots[name].shape != value.shape:
            problems.append(
                f"{name} has shape {tuple(value.shape)} in the checkpoint and {tuple(slots[name].shape)} in the "
                "architecture"
            )
    # A tied parameter may be stored under one of its names alone.
    problems += [
        f"{name} {tuple(slot.shape)} is in the architecture but not in the checkpoint"
        for name, slot in slots.items()
        if name not in checkpoint.state and id(slot) not in present
    ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ArchitectureError(
            f"the architecture {architecture} does not fit {checkpoint.label}: {'; '.join(problems[:3])}{more}. "
            "Name the right one with --arch"
        )
    filled: dict[int, str] = {}
    for name, value in checkpoint.state.items():
        slot = slots[name]
        other = filled.setdefault(id(slot), name)
        if other != name and not torch.equal(checkpoint.state[other], value):
            raise CheckpointError(
                f"{checkpoint.label}: {other} and {name} differ, but are one tied parameter in {architecture}"
            )
        if slot.is_floating_point() and not value.is_floating_point():
            raise CheckpointError(
                f"{checkpoint.label}: {name} is {value.dtype}; quantized and integer weights cannot be trained. "
                "Use the checkpoint from before quantization"
            )
        slot.data = slot.data.to(value.dtype)
    model.load_state_dict(checkpoint.state, strict=False)
