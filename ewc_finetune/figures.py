"""Figures, drawn without any global state of matplotlib's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ewc_finetune.errors import UsageError
from ewc_finetune.files import atomic_write

FORMATS = ("png", "pdf", "svg")


def draw_run(path: Path, history: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw a run: loss and penalty over the steps, accuracy on every domain at each evaluation.

    Args:
        path: The file to write, in the format that it ends in.
        history: The lines of `metrics.jsonl`.
        title: One line above the figure.
    """
    steps = [line for line in history if "loss" in line]
    scored = [line for line in history if "scores" in line]
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(_plain(title))
    losses, accuracies = figure.subplots(1, 2)
    marker = "o" if len(steps) < 20 else ""
    at = [line["step"] for line in steps]
    losses.plot(at, [line["loss"] for line in steps], marker=marker, label="task loss", color="C0")
    if any(line["penalty"] for line in steps):
        losses.plot(at, [line["penalty"] for line in steps], marker=marker, label="penalty", color="C3")
    losses.set(xlabel="step", ylabel="nats", title="Loss")
    losses.set_ylim(bottom=0)
    if steps:
        losses.legend(frameon=False)
    domains = list(scored[0]["scores"]) if scored else []
    # Where nothing is right or wrong there is still a loss.
    by_accuracy = all(line["scores"][domain]["accuracy"] is not None for line in scored for domain in domains)
    for domain in domains:
        scores = [line["scores"][domain] for line in scored]
        values = [100 * score["accuracy"] if by_accuracy else score["loss"] for score in scores]
        (curve,) = accuracies.plot([line["step"] for line in scored], values, marker="o", label=_plain(domain))
        accuracies.annotate(
            f"{values[-1]:.1f}", (scored[-1]["step"], values[-1]), xytext=(6, -3), textcoords="offset points",
            color=curve.get_color(), fontsize=9,
        )  # fmt: skip
    accuracies.set(xlabel="step (0: before)")
    if by_accuracy:
        accuracies.set(ylabel="accuracy, %", title="Accuracy by domain", ylim=(0, 102))
    else:
        accuracies.set(ylabel="nats", title="Loss by domain")
    accuracies.xaxis.get_major_locator().set_params(integer=True)
    if domains:
        accuracies.legend(frameon=False, loc="lower right")
    for axes in (losses, accuracies):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    save_figure(path, figure)


def _plain(text: str) -> str:
    """Return text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")


def figure_format(path: Path) -> str:
    """Return the format that a figure's file has by its name.

    Raises:
        UsageError: if it is none of `FORMATS`.
    """
    ending = path.suffix[1:].lower()
    if ending not in FORMATS:
        raise UsageError(f"the figure {path} should end in .{', .'.join(FORMATS)}")
    return ending


def save_figure(path: Path, figure: Figure) -> None:
    """Write a figure in the format that its name ends in."""
    with atomic_write(path) as temporary:
        FigureCanvasAgg(figure)
        figure.savefig(temporary, format=figure_format(path), dpi=120)


def draw_importance(path: Path, layers: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw a bar for each layer's share of the curvature, first layer on top.

    Args:
        path: The file to write, in the format that it ends in.
        layers: Of each, `layer` and `share`.
        title: One line above the figure.
    """
    figure = Figure(figsize=(7, 1.2 + 0.28 * len(layers)), layout="constrained")
    axes = figure.subplots()
    names, shares = [layer["layer"] for layer in layers], [100 * layer["share"] for layer in layers]
    bars = axes.barh(range(len(layers)), shares, color="C0")
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.set_yticks(range(len(layers)), map(_plain, names), fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="% of the trace", title=_plain(title), xlim=(0, 1.12 * max(shares, default=1.0)))
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(path, figure)
