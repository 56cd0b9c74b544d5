"""The digest that a run recorded of the file it wrote, in the folder beside it."""

from __future__ import annotations

import json
from pathlib import Path

from ewc_finetune.storage.atomic import beside

_LARGEST = 100 << 20


def changed_since_written(path: Path, digest: str | None) -> tuple[str, ...]:
    """Return a remark where the run that wrote a file recorded another digest of it; none where there is no record.

    Args:
        path: The file; beside it may lie the run's folder.
        digest: The digest of the file as it is now.
    """
    record = beside(path, ".run") / "run.json"
    try:
        if record.stat().st_size > _LARGEST:
            return ()
        document = json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):
        return ()
    written = document.get("written") if isinstance(document, dict) else None
    if digest is None or not isinstance(written, dict) or written.get("file") != path.name:
        return ()
    if written.get("sha256") in (None, digest):
        return ()
    return (f"{path} is not what the run {record.parent} wrote: it was changed, replaced or damaged since",)
