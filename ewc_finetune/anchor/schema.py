"""The file format of anchors: what is in it, and what tells that a file is one.

A safetensors file, format version 1. Tensors: `fisher.<parameter>` (float32), `anchor.<parameter>` and
`buffer.<name>` (as in the checkpoint), and `kfac.<layer>...` (see `kronecker_tensors`). A parameter that is in none of
`fisher.` and `kfac.` is free. If there are probes, `probe.<n>...` too (see `probe_tensors`). Metadata, text to text:
`format`, `format_version`, and `anchor`, a JSON document with the fields of `Provenance`.

Version 2, which is written only where it is needed: with `scale.<parameter>` (float32, shape `()`), the Fisher is its
product with `fisher.<parameter>`, which is in half precision (see `half_precision`); and weights may be in files on
the Hub that the provenance names (see `hub_weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.errors import AnchorError
from ewc_finetune.storage.safetensors_source import FileSource, LocalSource
from ewc_finetune.storage.shards import INDEX, PART, ShardedSource

FORMAT = "ewc-anchor"
FORMAT_VERSION = 2
_GROUPS = ("fisher.", "anchor.", "buffer.", "kfac.", "probe.")


def groups_of(provenance: Provenance) -> tuple[str, ...]:
    """Return what the names of an anchor's tensors begin with."""
    return _GROUPS if provenance.curvature_storage is None else (*_GROUPS, "scale.")


def open_source(path: Path) -> LocalSource:
    """Open the file or files of an anchor, once it is clear that they may be one.

    Raises:
        AnchorError: if there is none, or it cannot be one.
    """
    if not path.is_file():
        raise AnchorError(
            f"there is no anchor at {path}. `ewc-ft consolidate` makes one from a checkpoint; one on the Hub is named "
            "hf://ORG/NAME"
        )
    if path.name.endswith(INDEX):
        return ShardedSource(path)
    _check_is_safetensors(path)
    return FileSource(path)


def _check_is_safetensors(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(9)
    if not head:
        raise AnchorError(f"{path} is empty; expected an anchor. Copy it again, or make it with `ewc-ft consolidate`")
    # A safetensors file begins with the length of its header, which may look like anything, and an opening brace.
    if head[8:9] != b"{" and head[:2] in (b"PK", b"\x80\x02", b"\x80\x04"):
        raise AnchorError(
            f"{path} is a checkpoint that torch.save wrote, not an anchor. `ewc-ft consolidate {path}` makes its anchor"
        )


def check_format(metadata: Mapping[str, str], path: str) -> None:
    """Check that a safetensors file is an anchor, of a version that this one reads.

    Raises:
        AnchorError: saying what it is instead, and what to do.
    """
    if metadata.get("format") == PART:
        raise AnchorError(f"{path} is one part of an anchor. Name the index beside it (...{INDEX})")
    if metadata.get("format") != FORMAT:
        raise AnchorError(
            f"{path} is a safetensors file but not an anchor (no format={FORMAT!r} in its metadata). "
            f"`ewc-ft consolidate {path}` makes the anchor of a model's weights"
        )
    version = metadata.get("format_version", "")
    if not version.isdecimal() or len(version) > 9 or int(version) < 1:
        raise AnchorError(f"{path}: format_version is {version!r}; expected a whole number up to {FORMAT_VERSION}")
    if int(version) > FORMAT_VERSION:
        raise AnchorError(
            f"{path} is an anchor of format version {version}; this ewc-finetune reads up to {FORMAT_VERSION}. "
            "Upgrade with: pip install -U ewc-finetune"
        )
