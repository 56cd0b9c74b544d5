"""Weights as safetensors: one file, or shards with an index (`model.safetensors.index.json`) as the Hub has them.

What ewc-ft knows of the model is one more text in the file's metadata (of the first shard); the rest of it is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ewc_finetune.checkpoint.checkpoint import ModelMetadata, SingleFile
from ewc_finetune.checkpoint.formats.weights import Weights, merged
from ewc_finetune.errors import CheckpointError
from ewc_finetune.storage.atomic import sha256
from ewc_finetune.storage.checksums import check_tensor, read_checksums
from ewc_finetune.storage.lazy_tensors import write_tensors

RECORD = "ewc_ft"


class SafetensorsFile(Weights, SingleFile):
    """Weights in one safetensors file."""

    format = "safetensors"
    ending = ".safetensors"

    def __init__(self, path: Path) -> None:
        state, self._header = read_safetensors(path)
        super().__init__(str(path), sha256(path), ModelMetadata.read_text(self._header.get(RECORD), str(path)), state)

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata) -> None:
        """See `Checkpoint`; names, metadata and tensors that are not the model's stay as they were."""
        header = self._header | {RECORD: metadata.to_text()}
        write_tensors(temporary, path, merged(self.state, self.prefix, state, metadata.head), header)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file; nothing in it is ever executed.

    Raises:
        CheckpointError: if it is no whole safetensors file, or not what was written, by checksums that it has.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            forms = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            checksums = read_checksums(metadata, forms, str(path), CheckpointError)
            tensors = {name: file.get_tensor(name) for name in slices}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({error}). Copy it again from where it came"
        ) from error
    for name, tensor in tensors.items() if checksums is not None else ():
        check_tensor(name, tensor, checksums or {}, str(path), CheckpointError)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors; expected the weights of a model")
    return tensors, metadata
