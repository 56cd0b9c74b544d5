"""A checkpoint: a trained model as it was found in a file, and the way back into such a file."""

from __future__ import annotations

import json
import reprlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.anchor.provenance import is_head
from ewc_finetune.data.columns import is_table_record
from ewc_finetune.data.transform import Assumption, is_transform
from ewc_finetune.errors import CheckpointError, UsageError
from ewc_finetune.hub.address import HubAddress
from ewc_finetune.modules.task import ModelTask
from ewc_finetune.storage.atomic import atomic_write
from ewc_finetune.storage.json_fields import Check, has, is_list, is_object, is_text, list_of, nullable, optional

FROZEN = "frozen (requires_grad is false)"


@dataclass(frozen=True)
class ModelMetadata:
    """What ewc-ft wrote into a checkpoint about the model.

    Attributes:
        architecture: The text that builds it.
        input: How samples are presented to it (`InputSpec`).
        classes: Names of its outputs, where they are known.
        lineage: Anchors whose penalties it was trained under: `name`, `sha256`, `lambda` of each; `mended` where it is
            between these and another's, `polished` for how many steps it was trained then.
        frozen: Parameters that were not to be trained (`requires_grad` was false).
        head: The new last layer that the model was given, if it was; see `Provenance`.
        likelihood: How its outputs are meant, where it is known: that of the loss that it was trained with.
    """

    architecture: str | None = None
    input: dict[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    lineage: list[dict[str, Any]] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    head: dict[str, Any] | None = None
    likelihood: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        return asdict(self)

    def to_text(self) -> str:
        """Return the fields as text."""
        return json.dumps(self.to_json(), sort_keys=True)

    @classmethod
    def read(cls, stored: object, where: str) -> ModelMetadata:
        """Read what `to_json` gave; None is empty metadata, and keys of a later version are ignored.

        Raises:
            CheckpointError: if it is damaged.
        """
        if stored is None:
            return cls()
        known = {key: value for key, value in stored.items() if key in _FIELDS} if isinstance(stored, Mapping) else None
        if known is None or not all(_FIELDS[key](value) for key, value in known.items()):
            raise CheckpointError(f"{where}: what ewc-ft wrote into its metadata is damaged: {reprlib.repr(stored)}")
        return cls(**known)

    @classmethod
    def read_text(cls, text: str | bytes | None, where: str) -> ModelMetadata:
        """Read it from JSON; no text is empty metadata.

        Raises:
            CheckpointError: if it is damaged.
        """
        try:
            return cls.read(json.loads(text) if text else None, where)
        except (ValueError, RecursionError):
            return cls.read(text, where)


_FIELDS: dict[str, Check] = {
    "architecture": nullable(is_text),
    "input": lambda value: (
        has(shape=optional(is_list), names=optional(nullable(is_object)))(value)
        and is_transform(value)
        and is_table_record(value)
    ),
    "classes": nullable(is_list),
    "lineage": list_of(is_object),
    "frozen": is_list,
    "head": is_head,
    "likelihood": nullable(is_text),
}


class Checkpoint(ABC):
    """What a file holds of a model; each format has its own.

    Args:
        label: What to call it in messages: its path, or its address on the Hub.
        sha256: Digest of the file.
        metadata: What ewc-ft knows of it.

    Attributes:
        format: Name of the format.
        ending: How its files end.
        remarks: What a reader should know of the file.
        state: Its tensors by name, where it holds weights alone.
        path: Where it is on this machine: its file, the index of several, or its folder.
        address: Where on the Hub it is from, at its commit.
        task: What the model is for, where the format says; known once it is built.
        versions: Versions of the packages, beside torch, that give its tensors their names.
        published: What is done to images for these weights, as whoever published them says.
        form: Where in the file the weights are, or behind what prefix; None for plain weights. Known once it is built.
    """

    format: str
    ending: str
    path: Path
    state: Mapping[str, Tensor] = MappingProxyType({})
    address: HubAddress | None = None
    task: ModelTask | None = None
    form: str | None = None
    published: Assumption | None = None
    versions: Mapping[str, str] = MappingProxyType({})

    def __init__(self, label: str, sha256: str | None, metadata: ModelMetadata, remarks: tuple[str, ...] = ()) -> None:
        self.label = label
        self.sha256 = sha256
        self.metadata = metadata
        self.remarks = remarks

    @abstractmethod
    def build(self, architecture: str | None) -> tuple[nn.Module, str | None]:
        """Return the model, on the CPU in eval mode with its own dtypes, and the architecture that it has.

        Args:
            architecture: Named by the user; what the file says, or its weights show, unless given.
        """

    @abstractmethod
    def save(
        self,
        path: Path,
        model: nn.Module,
        metadata: ModelMetadata,
        dtypes: Mapping[str, torch.dtype] | None = None,
        *,
        overwrite: bool = True,
    ) -> None:
        """Write a model that `build` gave, trained on, in this format; the same model gives the same bytes.

        Args:
            path: The file.
            model: On any device.
            metadata: What is known of it.
            dtypes: Tensors to write in another dtype than they have, by name.
            overwrite: Whether an existing file may be replaced.

        Raises:
            StorageError: if it cannot be written. Nothing is left behind then.
        """

    def outputs(self, path: Path) -> list[Path]:
        """Return all the files that `save` writes for this one."""
        return [path]


class Stateful(Checkpoint):
    """A format that is written from a model's state alone."""

    def save(
        self,
        path: Path,
        model: nn.Module,
        metadata: ModelMetadata,
        dtypes: Mapping[str, torch.dtype] | None = None,
        *,
        overwrite: bool = True,
    ) -> None:
        """See `Checkpoint`."""
        self.save_state(path, cpu_state(model, dtypes), metadata, overwrite=overwrite)

    @abstractmethod
    def save_state(
        self, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata, *, overwrite: bool = True
    ) -> None:
        """Write a model's state (`cpu_state`); see `save`."""


class SingleFile(Stateful):
    """A format of one file to a model."""

    def save_state(
        self, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata, *, overwrite: bool = True
    ) -> None:
        """See `Stateful`."""
        with atomic_write(path, overwrite=overwrite) as temporary:
            self.write(temporary, path, state, metadata)

    @abstractmethod
    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata) -> None:
        """Write a state into a temporary file, which is to be renamed to `path`; see `save_state`."""


def check_ending(path: Path, kind: str, ending: str) -> None:
    """Refuse a file that would be taken for one of another format.

    Raises:
        UsageError: saying what it should end in.
    """
    if (path.suffix == ".safetensors") != (ending == ".safetensors"):
        raise UsageError(f"{path} is to be a checkpoint in the format {kind}; let it end in {ending}")


def cpu_state(model: nn.Module, dtypes: Mapping[str, torch.dtype] | None = None) -> OrderedDict[str, Any]:
    """Return a model's state dict on the CPU, some tensors in another dtype; tied tensors stay tied."""
    state = model.state_dict(keep_vars=True)
    copies = {
        id(value): value.detach().to("cpu", (dtypes or {}).get(name, value.dtype))
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    on_cpu = OrderedDict((name, copies.get(id(value), value)) for name, value in state.items())
    on_cpu._metadata = getattr(state, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return on_cpu
