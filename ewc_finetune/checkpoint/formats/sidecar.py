"""What ewc-ft knows of a model whose files others write: a file of its own in the model's folder."""

from __future__ import annotations

from pathlib import Path

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.errors import CheckpointError
from ewc_finetune.storage.atomic import atomic_write

NAME = "ewc_finetune.json"
# A longer file is none that was written here.
_LONGEST = 16 << 20


def write_sidecar(folder: Path, metadata: ModelMetadata) -> None:
    """Write what is known of a model into its folder.

    Raises:
        StorageError: if the file cannot be written.
    """
    with atomic_write(folder / NAME) as temporary:
        temporary.write_text(metadata.to_text(), encoding="utf-8")


def read_sidecar(folder: Path) -> ModelMetadata:
    """Read it; empty metadata where there is no such file.

    Raises:
        CheckpointError: if it cannot be read, or is damaged.
    """
    path = folder / NAME
    try:
        if not path.is_file():
            return ModelMetadata()
        if path.stat().st_size > _LONGEST:
            raise CheckpointError(f"{path} is too long to be what ewc-ft wrote of the model; take it out")
        return ModelMetadata.read_text(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
