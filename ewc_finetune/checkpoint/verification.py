"""Whether a checkpoint's files are as they were written, as far as their formats let that be told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ewc_finetune.checkpoint.file_format import detect, detected
from ewc_finetune.checkpoint.formats.safetensors_file import read_safetensors
from ewc_finetune.storage.checksums import KEY, verdict
from ewc_finetune.storage.shards import parts_named


def verify(path: Path) -> str:
    """Read a checkpoint whole, compare it with all checksums that it has, and say what that tells.

    Args:
        path: The file, the index of several, or a model folder.

    Raises:
        CheckpointError: naming what is not as it was written.
    """
    told = {file.name: _verify_file(file) for file in _files(path)}
    if len(set(told.values())) == 1:
        each = "each of its files: " if len(told) > 1 else ""
        return each + next(iter(told.values()))
    return "; ".join(f"{name}: {text}" for name, text in told.items())


def _files(path: Path) -> Sequence[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".bin"))
    if detect(path) == "sharded safetensors":
        return [path.parent / name for name in parts_named(path, str(path))]
    return [path]


def _verify_file(path: Path) -> str:
    with detected(path) as (kind, archive):
        if archive is not None:
            archive.verify()
            return verdict(archive.has_checksums)
    return verdict(kind == "safetensors" and KEY in read_safetensors(path)[1])
