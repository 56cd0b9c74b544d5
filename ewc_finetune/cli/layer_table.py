"""The table of layers behind `consolidate`, `merge` and `inspect`: where in the network the importance sits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.errors import counted

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer

# More layers than these are put together in blocks, and of more blocks than these the lightest are one row.
MOST = 24
_HEADERS = ("parameters", "share of curvature")


def layer_table(printer: Printer, origin: Provenance) -> None:
    """Print a row for each layer, or with many a row for each block of the network, the heaviest first."""
    layers = origin.importance
    if printer.verbose or len(layers) <= MOST:
        errors = (origin.standard_error or {}).get("layers", {})
        printer.table(
            ["layer", *_HEADERS, "error", "mean", "max"], [_row(layer, errors.get(layer["layer"])) for layer in layers]
        )
        return
    blocks = by_block(layers)
    shown, rest = (blocks, []) if len(blocks) <= MOST else (blocks[: MOST - 1], blocks[MOST - 1 :])
    if rest:
        shown = [*shown, _together(f"{len(rest)} more", rest)]
    printer.table(
        ["block", "layers", *_HEADERS, "mean", "max"],
        [[block["layer"], f"{block['layers']:,}", *_figures(block), *_spread(block)] for block in shown],
    )
    printer.note(
        f"{counted(len(layers), 'layer')}, put together by block, the heaviest first; --verbose has a row for each"
    )


def by_block(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put the layers of each block together, and return the blocks, the one with the largest share first."""
    members: dict[str, list[Mapping[str, Any]]] = {}
    for layer in layers:
        members.setdefault(block_of(layer["layer"]), []).append(layer)
    blocks = [_together(name, parts) for name, parts in members.items()]
    return sorted(blocks, key=lambda block: -float(block["share"]))


def block_of(layer: str) -> str:
    """Return the block that a layer is in: `model.layers.3` of `model.layers.3.mlp.up_proj`.

    It ends with the first number in the name, or without any with the second word.
    """
    words = layer.split(".")
    number = next((n for n, word in enumerate(words) if word.isdecimal()), 1)
    return ".".join(words[: number + 1])


def _together(name: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    size = sum(part["parameters"] for part in parts)
    return {
        "layer": name,
        "layers": sum(part.get("layers", 1) for part in parts),
        "parameters": size,
        "share": sum(part["share"] for part in parts),
        "mean": sum(part["mean"] * part["parameters"] for part in parts) / max(size, 1),
        "max": max(part["max"] for part in parts),
    }


def _row(layer: Mapping[str, Any], error: float | None) -> list[str]:
    return [layer["layer"], *_figures(layer), "-" if error is None else f"{error:.1%}", *_spread(layer)]


def _figures(part: Mapping[str, Any]) -> list[str]:
    return [f"{part['parameters']:,}", f"{part['share']:.1%}"]


def _spread(part: Mapping[str, Any]) -> list[str]:
    return [f"{part['mean']:.2e}", f"{part['max']:.2e}"]
