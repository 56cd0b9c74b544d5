"""`inspect`: what is in an anchor file, and where it came from."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.kronecker_tensors import BlockFile, stored_block
from ewc_finetune.anchor.probe_tensors import ProbeFile, bytes_of, records_of
from ewc_finetune.anchor.schema import open_source
from ewc_finetune.anchor.summary import Inspection, count_parameters
from ewc_finetune.curvature.importance import LayerImportance, importance_by_layer
from ewc_finetune.errors import AnchorError
from ewc_finetune.hub.address import HubAddress, is_address, parse_address
from ewc_finetune.hub.anchor_files import Peeked, peek
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.reporting.plots import draw_importance, figure_format
from ewc_finetune.storage.atomic import check_output
from ewc_finetune.storage.checksums import KEY, verdict


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
    there = _on_the_hub(parse_address(file)) if is_address(file) else None
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
        tensors={group: count_parameters(tensors) for group, tensors in groups.items()},
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


def _on_the_hub(address: HubAddress) -> Peeked:
    """Look at an anchor on the Hub."""
    peeked = peek(address)
    if peeked is None:
        raise AnchorError(f"{address} is no anchor, which is a safetensors file or the index of several")
    return peeked


def _importance(anchor: Anchor) -> list[LayerImportance]:
    return importance_by_layer(anchor.fisher, anchor.blocks.values())
