"""What is in an anchor, from its header, in words and numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ewc_finetune.anchor import describe
from ewc_finetune.anchor.kronecker_tensors import StoredBlock
from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.data.columns import columns_of
from ewc_finetune.errors import counted, few
from ewc_finetune.hub.address import HubAddress
from ewc_finetune.storage.lazy_tensors import TensorFile, shapes_of

# More layers in blocks than these are described only where all are asked for.
_MOST = 24


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        file: The anchor; of one on the Hub its address with the commit.
        bytes: Its size.
        tensors: How many `tensors`, `numbers` and `bytes` there are of `fisher`, `kfac`, `anchor` (weights), `buffer`
            and `probe`.
        blocks: Of each layer with a K-FAC block, what is kept of it.
        probes: Of each probe what is known (`Provenance.probes`), and its `bytes`.
        provenance: Where it came from, with the importance of each layer.
        remarks: What a reader should know of the file.
        sha256: Of one on the Hub that is one file, its digest, as the Hub promises it.
        verified: What came of reading all of it, if that was asked for.
    """

    file: Path | HubAddress
    bytes: int
    tensors: dict[str, dict[str, int]]
    blocks: dict[str, StoredBlock]
    probes: list[dict[str, Any]]
    provenance: Provenance
    remarks: tuple[str, ...]
    sha256: str | None = None
    verified: str | None = None

    def __repr__(self) -> str:
        numbers = ", ".join(f"{group} {known['numbers']:,}" for group, known in self.tensors.items())
        return f"<Inspection of {str(self.file)!r}: {self.provenance.name!r}, {self.bytes:,} bytes, {numbers}>"

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        return {
            "file": str(self.file),
            "bytes": self.bytes,
            "tensors": self.tensors,
            "blocks": {layer: asdict(block) for layer, block in self.blocks.items()},
            "probes": self.probes,
            "provenance": asdict(self.provenance),
            "remarks": list(self.remarks),
            "sha256": self.sha256,
            "verified": self.verified,
        }

    @property
    def in_blocks(self) -> int:
        """How many weights are held in blocks."""
        return sum(block.input.rows * block.output.rows for block in self.blocks.values())

    @property
    def curvature_bytes(self) -> int:
        """What the curvature takes in the file, singly and in blocks."""
        return self.tensors["fisher"]["bytes"] + self.tensors["kfac"]["bytes"]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """All that a person wants to know, each with its name."""
        return self.described()

    def described(self, *, every_layer: bool = True) -> list[tuple[str, str]]:
        """Return what a person wants to know first, each with its name.

        Args:
            every_layer: Whether to say of each layer what its block keeps, and of each free parameter that it is free.
        """
        origin = self.provenance
        singly, weights = (self.tensors[group]["numbers"] for group in ("fisher", "anchor"))
        held, few_enough = singly + self.in_blocks, len(self.blocks) <= _MOST
        parents = (origin.merged or {}).get("parents", [])
        free = describe.by_reason(origin.excluded).items()
        found = [
            ("name", origin.name),
            ("on the Hub", str(self.file) if isinstance(self.file, HubAddress) else ""),
            ("made", describe.joined(origin.created, ", ".join(describe.versions(origin.versions)), between=" with ")),
            ("size", f"{self.bytes:,} bytes"),
            ("sha256", self.sha256 or ""),
            ("verified", self.verified or ""),
            ("holds", f"{held:,} of {weights:,} weights" + (f", {singly:,} of them singly" if self.blocks else "")),
            ("in blocks", _blocks(self.blocks.values())),
            *((f"  {layer}", _kept(block)) for layer, block in self.blocks.items() if every_layer or few_enough),
            ("model", origin.checkpoint.get("architecture") or "of no recorded architecture"),
            ("checkpoint", " ".join(filter(None, (origin.checkpoint.get("file"), origin.checkpoint.get("sha256"))))),
            ("data", describe.data(origin.data, origin.samples)),
            ("curvature", _curvature(origin)),
            ("stored as", "" if origin.curvature_storage is None else describe.storage(origin.curvature_storage)),
            ("elsewhere", _elsewhere(origin)),
            *(("probe", describe.probe(probe, probe["bytes"])) for probe in self.probes),
            ("scores", describe.scores(origin.scores)),
            ("classes", "" if origin.classes is None else ", ".join(origin.classes)),
            ("normalisation", describe.normalisation(origin.normalisation)),
            ("left free", "; ".join(f"{', '.join(n) if every_layer else few(n)}: {reason}" for reason, n in free)),
            ("columns", columns_of(origin.input)),
            ("lineage", "; ".join(map(describe.ancestor, origin.lineage))),
            *((f"parent {n}", describe.parent(parent)) for n, parent in enumerate(parents, start=1)),
        ]
        return [(name, value) for name, value in found if value] + [("note", remark) for remark in self.remarks]


def count_parameters(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how many numbers there are, and in how many bytes of the file where they are in one."""
    in_file = tensors.bytes.values() if isinstance(tensors, TensorFile) else ()
    numbers = sum(shape.numel() for shape in shapes_of(tensors).values())
    return {"tensors": len(tensors), "numbers": numbers, "bytes": sum(in_file)}


def _kept(block: StoredBlock) -> str:
    """Say what is kept of a layer's factors."""
    return ", ".join(
        f"{side} {factor.rows:,} rows"
        + ("" if factor.whole else f" ({factor.kept:,} eigenvectors with {factor.share:.1%} of the trace)")
        + f", {factor.bytes:,} bytes"
        for side, factor in (("input", block.input), ("output", block.output))
    )


def _elsewhere(origin: Provenance) -> str:
    """Say which weights are not in the file, and where they are."""
    record = origin.weights_reference
    if record is None:
        return ""
    where = ", ".join(f"{file} (sha256 {digest})" for file, digest in record["files"].items())
    return f"{len(record['tensors'])} tensors of weights, in hf://{record['repository']}@{record['revision']}: {where}"


def _blocks(layers: Collection[StoredBlock]) -> str:
    """Say what blocks take in the file, beside the diagonal of their layers, and in each step of training."""
    if not layers:
        return ""
    pairs = [(block.input, block.output) for block in layers]
    taken = sum(a.bytes + g.bytes for a, g in pairs)
    whole = sum(a.whole_bytes + g.whole_bytes for a, g in pairs)
    diagonal = sum(4 * a.rows * g.rows for a, g in pairs)
    products = sum(block.products for block in layers)
    most = sum((a.rows + g.rows) * a.rows * g.rows for a, g in pairs)
    text = f"{counted(len(pairs), 'layer')}, {taken:,} bytes, {taken / diagonal:.2f} of their diagonal's"
    if taken != whole:
        text += f", {taken / whole:.2f} of whole factors'"
    text += f"; {products / 1e6:,.1f} million products a step"
    return text if products == most else f"{text}, {products / most:.2f} of whole factors'"


def _curvature(origin: Provenance) -> str:
    constant = sum(origin.constant.values())
    return describe.joined(
        describe.curvature(vars(origin)),
        describe.estimate(vars(origin)),
        f"{origin.likelihood} likelihood",
        f"constant {constant:.4g}" if origin.merged else "",
    )
