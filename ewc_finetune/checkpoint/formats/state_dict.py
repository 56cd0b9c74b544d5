"""The `.pt` state dict: what `torch.save(model.state_dict(), path)` writes, by itself or within a larger document.

What ewc-ft knows of a model (architecture, input, lineage) rides in the state dict's `_metadata`, the attribute that
torch keeps its own version numbers in: the file stays a plain state dict, for `load_state_dict` and everybody else.
"""

from __future__ import annotations

import reprlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.checkpoint.checkpoint import ModelMetadata, SingleFile, cpu_state
from ewc_finetune.checkpoint.formats.weights import Weights, merged
from ewc_finetune.errors import CheckpointError, StorageError
from ewc_finetune.storage.atomic import atomic_write

# The entries of a larger document that may be the weights, in the order of preference: averaged weights come first, for
# they are those that are deployed.
ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model_state_dict", "model")
_KEY = "ewc_ft"


class StateDict(Weights, SingleFile):
    """A state dict, or a document that has one as an entry (of a trainer, of Lightning's `.ckpt`).

    Args:
        label: See `Checkpoint`.
        sha256: See `Checkpoint`.
        document: What the file holds.
        path: The keys that lead to the state dict in it; none if it is one itself.
        remarks: See `Checkpoint`.
    """

    format = "state_dict"
    ending = ".pt"

    def __init__(
        self,
        label: str,
        sha256: str | None,
        document: Mapping[str, Any],
        path: tuple[str, ...] = (),
        remarks: tuple[str, ...] = (),
    ) -> None:
        state = document
        for key in path:
            state = state[key]
        versions = getattr(state, "_metadata", None)
        metadata = ModelMetadata.read(versions.get(_KEY) if isinstance(versions, Mapping) else None, label)
        super().__init__(label, sha256, metadata, state, remarks)
        self._document = document
        self._path = path
        self.form = f"under {path[0]!r}" if path else None

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata) -> None:
        """See `Checkpoint`; all else that the file held stays as it was."""
        stored = OrderedDict(merged(self.state, self.prefix, state, metadata.head))
        stored._metadata = getattr(self.state, "_metadata", None) or state._metadata  # type: ignore[attr-defined]
        write_state_dict(temporary, path, stored, metadata, self._document, self._path)


def find_state(document: object, label: str) -> tuple[str, ...]:
    """Return the keys that lead to the state dict in what a file holds.

    Raises:
        CheckpointError: if there is none.
    """
    if not isinstance(document, Mapping) or not document:
        raise CheckpointError(
            f"{label} holds {'an empty' if isinstance(document, Mapping) else 'a'} {type(document).__name__}; expected "
            "a state dict, as torch.save(model.state_dict(), path) writes it"
        )
    if _is_state(document):
        return ()
    for key in ENTRIES:
        if _is_state(document.get(key)):
            return (key,)
    name, value = next((n, v) for n, v in document.items() if not isinstance(n, str) or not isinstance(v, Tensor))
    nested = next((key for key, entry in document.items() if _is_state(entry)), None)
    advice = (
        "It has no weights by name; save them: torch.save(model.state_dict(), 'weights.pt')"
        if nested is None
        else f"If the weights are in the entry {nested!r}, save that one alone: "
        f"torch.save(torch.load({Path(label).name!r}, weights_only=True)[{nested!r}], 'weights.pt')"
    )
    raise CheckpointError(
        f"{label}: the entry {reprlib.repr(name)} is a {type(value).__name__}, not a tensor; expected a plain state "
        f"dict, or one under {', '.join(ENTRIES)}. {advice}"
    )


def _is_state(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items())
    )


def save_state_dict(
    path: Path,
    model: nn.Module,
    metadata: ModelMetadata,
    dtypes: Mapping[str, torch.dtype] | None = None,
    *,
    overwrite: bool = True,
) -> None:
    """Write a model as a plain state dict that carries `metadata`; see `Checkpoint.save`."""
    with atomic_write(path, overwrite=overwrite) as temporary:
        write_state_dict(temporary, path, cpu_state(model, dtypes), metadata)


def write_state_dict(
    temporary: Path,
    path: Path,
    state: OrderedDict[str, Any],
    metadata: ModelMetadata,
    document: Mapping[str, Any] | None = None,
    within: tuple[str, ...] = (),
) -> None:
    """Write a state dict that carries `metadata`, within a document where there is one; see `SingleFile.write`.

    Raises:
        StorageError: if it cannot be written.
    """
    state = noted(state, metadata)
    saved: Any = state
    if document is not None and within:
        (key,) = within
        saved = type(document)(document) if isinstance(document, OrderedDict) else dict(document)
        saved[key] = state
    save_object(temporary, path, saved)


def noted(state: Mapping[str, Any], metadata: ModelMetadata) -> OrderedDict[str, Any]:
    """Return a state dict that carries `metadata`, beside the version numbers that it has."""
    carrying = OrderedDict(state)
    known = getattr(state, "_metadata", None) or {}
    carrying._metadata = OrderedDict({**known, _KEY: metadata.to_json()})  # type: ignore[attr-defined]
    return carrying


def save_object(temporary: Path, path: Path, saved: object) -> None:
    """Call `torch.save`.

    Raises:
        StorageError: if it cannot write.
    """
    with temporary.open("wb") as file:
        try:
            # The file is open because torch would write the temporary path's name into the archive.
            torch.save(saved, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None  # torch's writer hides what the system said
            raise StorageError(f"cannot write {path}: {error}. Nothing was left behind") from error
