"""Weights as safetensors: one file, or shards with an index (`model.safetensors.index.json`) as the Hub has them.

What ewc-ft knows of the model is one more text in the file's metadata (of the first shard); the rest of it is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ewc_finetune.checkpoint.checkpoint import Record, SingleFile, cpu_state
from ewc_finetune.checkpoint.weights import Weights, merged
from ewc_finetune.errors import CheckpointError, StorageError
from ewc_finetune.files import sha256
from ewc_finetune.tensor_file import sort_metadata

RECORD = "ewc_ft"


class SafetensorsFile(Weights, SingleFile):
    """Weights in one safetensors file.

    Args:
        path: The file.
    """

    format = "safetensors"
    ending = ".safetensors"

    def __init__(self, path: Path) -> None:
        state, self.metadata = read_safetensors(path)
        super().__init__(str(path), sha256(path), Record.read_text(self.metadata.get(RECORD), str(path)), state)

    def write(
        self,
        temporary: Path,
        path: Path,
        model: nn.Module,
        record: Record,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """See `Checkpoint`; names, metadata and tensors that are not the model's stay as they were."""
        state = merged(self.state, self.prefix, cpu_state(model, dtypes))
        write_safetensors(
            temporary, path, state, self.metadata | {RECORD: json.dumps(record.to_json(), sort_keys=True)}
        )


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file; nothing in it is ever executed.

    Raises:
        CheckpointError: if it is no whole safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}). Copy it again from where it came"
        ) from error
    if not found:
        raise CheckpointError(f"{path} holds no tensors; expected the weights of a model")
    return found, metadata


def write_safetensors(temporary: Path, path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors; those that share memory are written under each of their names.

    Raises:
        StorageError: if they cannot be written.
    """
    separate = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        separate[name] = tensor.contiguous() if tensor.data_ptr() not in seen else tensor.clone().contiguous()
        seen.add(tensor.data_ptr())
    try:
        save_file(separate, temporary, dict(metadata))
    except SafetensorError as error:
        full = "No space" in str(error)
        reason = "the disk is full. Nothing was left behind" if full else str(error)
        raise StorageError(f"cannot write {path}: {reason}") from error
    if metadata:
        sort_metadata(temporary)
