"""The checkpoint that an anchor was made from: its weights, in the format that they came in."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.checkpoint import FROZEN, ModelMetadata, SingleFile
from ewc_finetune.checkpoint.formats.safetensors_file import RECORD, SafetensorsFile
from ewc_finetune.checkpoint.formats.sharded import Sharded
from ewc_finetune.checkpoint.formats.state_dict import StateDict, write_state_dict
from ewc_finetune.checkpoint.formats.weights import Weights
from ewc_finetune.errors import AnchorError
from ewc_finetune.storage.lazy_tensors import write_tensors

_WITHOUT_PROGRAM = (StateDict.format, SafetensorsFile.format, Sharded.format)


class FromAnchor(Weights, SingleFile):
    """The weights in an anchor, written as a plain state dict or as one safetensors file.

    Args:
        anchor: Where they are.

    Raises:
        AnchorError: if they came with a program of their own, which an anchor does not have.
    """

    def __init__(self, anchor: Anchor) -> None:
        origin = anchor.provenance.checkpoint
        source = origin.get("format") or StateDict.format
        if source not in _WITHOUT_PROGRAM:
            raise AnchorError(
                f"{anchor.label} comes from a checkpoint in the format {source}, whose program it does not have. Name "
                f"the checkpoint too: --model {origin.get('file') or 'FILE'} (evaluate takes it in the anchor's place)"
            )
        self.format = StateDict.format if source == StateDict.format else SafetensorsFile.format
        self.ending = StateDict.ending if source == StateDict.format else SafetensorsFile.ending
        metadata = ModelMetadata(
            architecture=origin.get("architecture"),
            input=anchor.provenance.input,
            classes=anchor.provenance.classes,
            lineage=anchor.provenance.lineage,
            frozen=[name for name, reason in anchor.provenance.excluded.items() if reason == FROZEN],
            head=anchor.provenance.head,
            likelihood=anchor.provenance.likelihood,
        )
        state = {**anchor.weights, **anchor.buffers}
        remarks = anchor.remarks
        if origin.get("form"):
            remarks += (
                f"{anchor.label}: its checkpoint had the weights {origin['form']}, beside what an anchor does not "
                f"keep; what is written has them alone. To keep the rest: --model {origin.get('file') or 'FILE'}",
            )
        super().__init__(anchor.label, origin.get("sha256"), metadata, state, remarks)
        self.address = anchor.place

    def write(self, temporary: Path, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata) -> None:
        """See `Checkpoint`."""
        if self.format == StateDict.format:
            write_state_dict(temporary, path, state, metadata)
        else:
            write_tensors(temporary, path, state, {"format": "pt", RECORD: metadata.to_text()})
