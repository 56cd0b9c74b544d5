"""`inspect`: what is in an anchor file, and where it came from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ewc_finetune.anchor import Anchor, open_source
from ewc_finetune.block_file import BlockFile, StoredBlock, stored_block
from ewc_finetune.checksums import KEY, verdict
from ewc_finetune.curvature.importance import LayerImportance, importance_by_layer
from ewc_finetune.curvature.storage import describe as describe_storage
from ewc_finetune.errors import AnchorError
from ewc_finetune.figures import draw_importance, figure_format
from ewc_finetune.files import check_output
from ewc_finetune.hub.address import HubAddress, is_address
from ewc_finetune.hub.anchor_files import Peeked, peek
from ewc_finetune.probe_file import ProbeFile, bytes_of, describe, records_of
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.provenance import Provenance
from ewc_finetune.tensor_file import TensorFile, shapes_of

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
        found = [
            ("name", origin.name),
            ("on the Hub", str(self.file) if isinstance(self.file, HubAddress) else ""),
            ("made", " with ".join(filter(None, (origin.created, _versions(origin))))),
            ("size", f"{self.bytes:,} bytes"),
            ("sha256", self.sha256 or ""),
            ("verified", self.verified or ""),
            ("holds", f"{held:,} of {weights:,} weights" + (f", {singly:,} of them singly" if self.blocks else "")),
            ("in blocks", _blocks(self.blocks.values())),
            *((f"  {layer}", _kept(block)) for layer, block in self.blocks.items() if every_layer or few_enough),
            ("model", origin.checkpoint.get("architecture") or "of no recorded architecture"),
            ("checkpoint", " ".join(filter(None, (origin.checkpoint.get("file"), origin.checkpoint.get("sha256"))))),
            ("data", _data(origin)),
            ("curvature", _curvature(origin)),
            ("stored as", "" if origin.curvature_storage is None else describe_storage(origin.curvature_storage)),
            ("elsewhere", _elsewhere(origin)),
            *(("probe", describe(probe, probe["bytes"])) for probe in self.probes),
            ("scores", ", ".join(f"{name} {value:.4f}" for name, value in sorted(origin.scores.items()))),
            ("classes", "" if origin.classes is None else ", ".join(origin.classes)),
            ("normalisation", _normalisation(origin)),
            ("left free", "; ".join(f"{names}: {reason}" for names, reason in origin.left_free(every=every_layer))),
            ("trained under", "; ".join(map(_pulled, origin.lineage))),
        ]
        if origin.merged is not None:
            for number, parent in enumerate(origin.merged["parents"], start=1):
                source = parent["provenance"]
                found.append(
                    (
                        f"parent {number}",
                        f"{source.get('name')}, lambda {parent['lambda']:g}, sha256 {parent['sha256']}"
                        + (f", {parent['hub']}" if parent.get("hub") else ""),
                    )
                )
        return [(name, value) for name, value in found if value] + [("note", remark) for remark in self.remarks]


def inspect(
    file: str | Path | HubAddress,
    *,
    plot: str | Path | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Say what is in an anchor: from its header and eigenvalues, and all of its curvature if it has no importance.

    Of one on the Hub nothing else is fetched, unless it is to be verified.

    Args:
        file: The anchor, or its address on the Hub.
        plot: File to draw the importance of each layer in: `.png`, `.pdf`, `.svg`.
        overwrite: Whether that file may be replaced.
        verify: Whether to read all tensors, and compare them with the checksums that the file has.
        progress: Told what happens.

    Raises:
        EwcError: naming what is wrong with the file.
    """
    progress = progress or Silent()
    file = str(file) if isinstance(file, HubAddress) else file
    if plot is not None:
        figure_format(Path(plot))
        check_output(Path(plot), overwrite, [file], note=progress.note)
    there = _on_the_hub(file) if is_address(file) else None
    source = open_source(Path(file)) if there is None else there.source
    anchor = Anchor.of(source, Path(file)) if there is None else Anchor.of(source, place=there.place)
    origin = anchor.provenance
    if not origin.importance:
        origin = replace(origin, importance=[asdict(layer) for layer in _importance(anchor)])
    blocks = anchor.blocks if isinstance(anchor.blocks, BlockFile) else None
    groups = {"fisher": anchor.fisher, "anchor": anchor.weights, "buffer": anchor.buffers}
    groups["kfac"] = blocks.tensors if blocks else {}
    groups["probe"] = anchor.probes.tensors if isinstance(anchor.probes, ProbeFile) else {}
    sizes = zip(records_of(anchor.probes), bytes_of(anchor.probes), strict=True)
    found = Inspection(
        file=Path(file) if there is None else there.place,
        bytes=source.size,
        tensors={group: _counts(tensors) for group, tensors in groups.items()},
        blocks={} if blocks is None else {layer: stored_block(blocks, layer) for layer in blocks},
        probes=[{**record, "bytes": size} for record, size in sizes],
        provenance=origin,
        remarks=anchor.remarks if there is None else there.remarks + anchor.remarks,
        sha256=None if there is None else there.sha256,
        verified=f"{verdict(KEY in source.metadata)}; sha256 {Anchor.load(file).digest}" if verify else None,
    )
    if plot is not None:
        title = f"{origin.name}: share of the curvature by layer"
        draw_importance(Path(plot), origin.importance, title, overwrite=overwrite)
    return found


def _on_the_hub(file: str) -> Peeked:
    """Look at an anchor on the Hub."""
    found = peek(file)
    if found is None:
        raise AnchorError(f"{file} is no anchor, which is a safetensors file or the index of several")
    return found


def _counts(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    in_file = tensors.bytes.values() if isinstance(tensors, TensorFile) else ()
    numbers = sum(shape.numel() for shape in shapes_of(tensors).values())
    return {"tensors": len(tensors), "numbers": numbers, "bytes": sum(in_file)}


def _importance(anchor: Anchor) -> list[LayerImportance]:
    return importance_by_layer(anchor.fisher, anchor.blocks.values())


def _kept(block: StoredBlock) -> str:
    """Say what is kept of a layer's factors."""
    return ", ".join(
        f"{side} {factor.rows:,} rows"
        + ("" if factor.whole else f" ({factor.kept:,} eigenvectors with {factor.share:.1%} of the trace)")
        + f", {factor.bytes:,} bytes"
        for side, factor in (("input", block.input), ("output", block.output))
    )


def _pulled(entry: Mapping[str, Any]) -> str:
    """Say which anchor has pulled on the weights, and how hard."""
    place = f", {entry['hub']}" if entry.get("hub") else ""
    return f"{entry.get('name')} (lambda {entry.get('lambda')}{place})"


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
    text = f"{len(pairs)} layers, {taken:,} bytes, {taken / diagonal:.2f} of their diagonal's"
    if taken != whole:
        text += f", {taken / whole:.2f} of whole factors'"
    text += f"; {products / 1e6:,.1f} million products a step"
    return text if products == most else f"{text}, {products / most:.2f} of whole factors'"


def _versions(origin: Provenance) -> str:
    return ", ".join(f"{name} {version}" for name, version in origin.versions.items())


def _data(origin: Provenance) -> str:
    spec = origin.data.get("spec")
    if not spec:
        return ""
    split = origin.data.get("split")
    return f"{spec}{f', {split} split' if split else ''}, {origin.samples:,} of {origin.data.get('size')} samples"


def _curvature(origin: Provenance) -> str:
    if origin.merged is not None:
        form = origin.merged.get("form")
        how = "gamma" if form == "online" else "lineage"
        faded = f", {how} {origin.merged.get(how)}"
        kind = {"identity": "identity, ", "kfac": "K-FAC blocks and diagonal, "}.get(origin.curvature, "")
        stands = origin.merged.get("kfac_sum")
        faded += f", {stands} for sums of blocks" if stands else ""
        off = max((origin.merged.get("kfac_distance") or {}).values(), default=0.0)
        faded += f" (off by up to {off:.0%})" if off else ""
        constant = sum(origin.constant.values())
        return f"{kind}merged {form}{faded}, from {len(origin.merged['parents'])} anchors; constant {constant:.4g}"
    if origin.curvature == "identity":
        return "identity (plain L2)"
    error = (origin.standard_error or {}).get("trace")
    spread = "" if error is None else f", standard error of the trace {error:.1%}"
    kind = "K-FAC blocks and diagonal" if origin.curvature == "kfac" else "diagonal"
    return f"{kind} Fisher, {origin.estimator}, {origin.likelihood} likelihood, {origin.samples:,} samples{spread}"


def _normalisation(origin: Provenance) -> str:
    layers = origin.normalisation.get("layers") or []
    return f"{len(layers)} layers, statistics {origin.normalisation.get('statistics')}" if layers else ""
