"""Where in the network the importance sits: a figure, and a table of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ewc_finetune.errors import counted
from ewc_finetune.model_card.text import code

# So many layers have a row, or a bar, each: those with the largest shares.
_LAYERS = 12
_BARS = 24


def importance(layers: Sequence[Mapping[str, Any]], figure: str | None) -> str:
    """Return the figure and the table.

    Args:
        layers: What is known of each (`Provenance.importance`).
        figure: The figure's file in the repository.
    """
    if not layers:
        return ""
    shown, rest = _split(layers, _LAYERS)
    top = max(shown, key=lambda layer: float(layer["share"]))
    most = f"{code(top['layer'])} has the most, {100 * top['share']:.1f}%"
    rows = [_row(code(layer["layer"]), [layer]) for layer in shown]
    if rest:
        rows.append(_row(counted(len(rest), "other layer"), rest))
    image = f"![Bars of each layer's share of the curvature's trace; {most}]({quote(figure)})\n\n" if figure else ""
    return (
        f"### Where the importance sits\n\n{image}Of the trace of the curvature, {most}.\n\n"
        "| Layer | Weights | Share of the trace | Mean | Largest |\n|---|--:|--:|--:|--:|\n" + "\n".join(rows)
    )


def largest(layers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the layers that a figure has room for, and the others as one."""
    shown, rest = _split(layers, _BARS)
    others = {"layer": counted(len(rest), "other layer"), "share": sum(layer["share"] for layer in rest)}
    return [*shown, others] if rest else shown


def _split(layers: Sequence[Mapping[str, Any]], count: int) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the layers with the largest shares, and the others, each in their order."""
    ranked = sorted(range(len(layers)), key=lambda number: (-layers[number]["share"], number))
    first, others = ([layers[number] for number in sorted(part)] for part in (ranked[:count], ranked[count:]))
    return first, others


def _row(name: str, layers: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for one layer, or for several together."""
    weights = sum(layer["parameters"] for layer in layers)
    share = sum(layer["share"] for layer in layers)
    mean = sum(layer["mean"] * layer["parameters"] for layer in layers) / (weights or 1)
    return f"| {name} | {weights:,.0f} | {100 * share:.1f}% | {mean:.3g} | {max(x['max'] for x in layers):.3g} |"
