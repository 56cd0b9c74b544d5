"""`pull`: an anchor from the Hub, as a file of one's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.location import local_name
from ewc_finetune.errors import AnchorError
from ewc_finetune.hub.address import MODEL, HubAddress, parse_address
from ewc_finetune.hub.anchor_files import fetch_anchor
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.storage.atomic import atomic_write, beside, check_output


@dataclass(frozen=True)
class Pulled:
    """What `pull` wrote.

    Attributes:
        path: The anchor, in one file.
        place: Where it came from, at a commit.
        bytes: Its size.
        digest: Its SHA-256: that of the file that was pushed.
    """

    path: Path
    place: HubAddress
    bytes: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        return {"anchor": str(self.path), "hub": str(self.place), "bytes": self.bytes, "sha256": self.digest}


def pull(
    place: str | HubAddress,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Pulled:
    """Fetch an anchor from the Hub for good, as the one file that it was when it was pushed.

    It comes through the cache of the Hub's client. Memory does not grow with the anchor.

    Args:
        place: `hf://ORG/NAME[@REVISION][/FILE]`, or the same without what stands before `ORG`.
        output: Where it goes; `NAME.anchor.safetensors` in this folder unless given.
        overwrite: Whether an existing file may be replaced.
        progress: Told what a reader should know of the anchor.

    Raises:
        HubError: if there is none there, it cannot be had, or it is not what was promised.
        AnchorError: if it is damaged, or of a newer format.
        StorageError: if the file cannot be written.
    """
    progress = progress or Silent()
    address = place if isinstance(place, HubAddress) else parse_address(place.removeprefix(MODEL).removeprefix("//"))
    path = default_output(str(address)) if output is None else Path(output)
    check_output(path, overwrite, note=progress.note)
    progress.note(f"fetching {address}")
    fetched = fetch_anchor(str(address))
    anchor = Anchor.of_hub(fetched)
    for remark in anchor.remarks:
        progress.note(remark)
    if anchor.provenance.weights_reference is not None:
        progress.note(f"{fetched.place}: its weights are not in it; they are fetched from the Hub when it is used")
    digest, size = hashlib.sha256(), 0
    with atomic_write(path, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        for block in fetched.source.as_one_file():
            digest.update(block)
            size += file.write(block)
        if digest.hexdigest() != fetched.digest:
            raise AnchorError(f"{fetched.place} has changed in the cache while it was copied. Run the command again")
    return Pulled(path, fetched.place, size, fetched.digest)


def default_output(address: str) -> Path:
    """Return where an anchor goes that is pulled: into this folder, called as its repository or file is."""
    place = local_name(address)
    return place if place.name.endswith(".safetensors") else beside(place, ".anchor.safetensors")
