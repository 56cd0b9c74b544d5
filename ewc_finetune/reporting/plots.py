"""Figures, drawn without any global state of matplotlib's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from ewc_finetune.errors import UsageError
from ewc_finetune.storage.atomic import atomic_write

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


def save_figure(path: Path, figure: Figure, *, overwrite: bool = True) -> None:
    """Write a figure in the format that its name ends in."""
    with atomic_write(path, overwrite=overwrite) as temporary:
        FigureCanvasAgg(figure)
        figure.savefig(temporary, format=figure_format(path), dpi=120)


def draw_importance(path: Path, layers: Sequence[Mapping[str, Any]], title: str, *, overwrite: bool = True) -> None:
    """Draw a bar for each layer's share of the curvature, first layer on top.

    Args:
        path: The file to write, in the format that it ends in.
        layers: Of each, `layer` and `share`.
        title: One line above the figure.
        overwrite: Whether a file that is there may be replaced.
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
    save_figure(path, figure, overwrite=overwrite)


@dataclass(frozen=True)
class FrontierPoint:
    """One point of a frontier.

    Attributes:
        learned: Its place from left to right.
        kept: Its place from bottom to top.
        label: What stands beside it.
        deviations: How far runs with other seeds lie from it, likewise: a standard deviation; 0 of one run.
    """

    learned: float
    kept: float
    label: str
    deviations: tuple[float, float] = (0.0, 0.0)


def draw_frontier(
    path: Path,
    curves: Mapping[str, Sequence[FrontierPoint]],
    plain: FrontierPoint | None,
    knee: tuple[FrontierPoint, str] | None,
    labels: tuple[str, str],
    falling: tuple[bool, bool],
    title: str,
) -> None:
    """Draw what is kept against what is learned, the better of both up and to the right.

    Args:
        path: The file to write, in the format that it ends in.
        curves: By name, the points of each in the order in which they are joined.
        plain: The run without a penalty.
        knee: The point to mark, and what to say there.
        labels: Of the axes: what is learned, what is kept.
        falling: Whether less is better of each.
        title: One line above the figure.
    """
    figure = Figure(figsize=(7.5, 5.5), layout="constrained")
    axes = figure.subplots()
    drawn: list[tuple[str, Sequence[FrontierPoint], dict[str, Any]]]
    drawn = [(name, points, {"marker": "o"}) for name, points in curves.items()]
    if plain is not None:
        drawn.append(("plain fine-tuning", [plain], {"marker": "s", "color": "0.4", "linestyle": "none"}))
    for name, points, style in drawn:
        x, y = [point.learned for point in points], [point.kept for point in points]
        (line,) = axes.plot(x, y, label=_plain(name), markersize=5, **style)
        spread = [point.deviations for point in points]
        if any(map(any, spread)):
            axes.errorbar(
                x, y, xerr=[d[0] for d in spread], yerr=[d[1] for d in spread], fmt="none", ecolor=line.get_color(),
                elinewidth=0.8, capsize=2, alpha=0.6,
            )  # fmt: skip
        for point in points:
            if knee is not None and point is knee[0]:
                continue  # its label says more
            axes.annotate(
                point.label, (point.learned, point.kept), xytext=(-5, -11), textcoords="offset points", ha="right",
                fontsize=8, color=line.get_color(),
            )  # fmt: skip
    axes.margins(0.14)
    axes.set(xlabel=_plain(labels[0]), ylabel=_plain(labels[1]), title=_plain(title))
    for turn, invert in zip(falling, (axes.invert_xaxis, axes.invert_yaxis), strict=True):
        if turn:
            invert()
    if knee is not None:
        at, said = knee
        axes.plot([at.learned], [at.kept], "o", markersize=14, fillstyle="none", color="black", markeredgewidth=1.6)
        left, right = axes.get_xlim()
        on_the_right = (at.learned - left) / (right - left) > 0.5
        axes.annotate(
            _plain(said), (at.learned, at.kept), xytext=(8 if on_the_right else -8, 12), textcoords="offset points",
            ha="right" if on_the_right else "left", fontweight="bold",
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )  # fmt: skip
    if drawn:
        axes.legend(frameon=False, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    save_figure(path, figure)
