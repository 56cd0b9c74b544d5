"""The figures of one run: its losses and its scores, in its folder and, with legend and reading, on the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ewc_finetune.reporting.measures import Measure, listed, measure_of
from ewc_finetune.reporting.outcome import Outcome
from ewc_finetune.reporting.plots import Axis, Chart, Curve, Point, draw_charts, to_svg

Lines = Sequence[Mapping[str, Any]]

# A scale is logarithmic where the largest number is so many times the smallest.
_WIDE = 30.0
# Beyond so many domains a plain run's curves would only be in the way.
_MOST_BESIDE = 4
# The style of the new domain, and those of the old ones.
_NEW = "k1"
_OLD = ("k0", "k2", "k3", "k4", "k5")


# Where a line of the log stands on the axis below; None where that is not known.
Place = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True)
class Figure:
    """A figure as the page has it.

    Attributes:
        heading: What stands above it.
        drawing: The SVG.
        legend: The style of each curve, and its name.
        reading: How to read it.
    """

    heading: str
    drawing: Markup
    legend: list[tuple[str, str]] = field(default_factory=list)
    reading: str = ""


def style_of(number: int) -> str:
    """Return the style of an old domain, or of one of several curves; dashed where colours come again."""
    return _OLD[number % len(_OLD)] + (" again" if number >= len(_OLD) else "")


def styles(outcome: Outcome) -> dict[str, str]:
    """Return the style of each domain: one for the new, others for the old."""
    new = {} if outcome.new is None else {outcome.new: _NEW}
    return new | {name: style_of(n) for n, name in enumerate(outcome.old)}


def draw_run(path: Path, history: Lines, title: str) -> None:
    """Draw a run; see `run_charts`.

    Args:
        path: The file to write, in the format that it ends in.
        history: The lines of `metrics.jsonl`.
        title: One line above the figure.
    """
    draw_charts(path, run_charts(history), title)


def run_charts(history: Lines) -> list[Chart]:
    """Return the charts of a run: loss and penalty over the steps, the score on every domain at each evaluation."""
    scores = [score for line in history for score in (line.get("scores") or {}).values()]
    domains = dict.fromkeys(domain for line in history for domain in line.get("scores") or {})
    measure = measure_of(scores)
    curves = _scores(
        history, {name: style_of(n) for n, name in enumerate(domains)}, measure, lambda line: line.get("step")
    )
    charts = [_losses(history)]
    if curves:
        charts.append(Chart("", curves, Axis("step (0: before)", whole=True), Axis(measure.unit)))
    return [chart for chart in charts if chart]


def draw_losses(outcome: Outcome) -> Figure | None:
    """Draw task loss and penalty over the steps; None where no step was logged."""
    chart = _losses(outcome.run.lines)
    if chart is None:
        return None
    return Figure(chart.title, to_svg(chart), [(curve.style, curve.name) for curve in chart.curves])


def draw_scores(outcome: Outcome, plain: Outcome | None, measure: Measure) -> Figure | None:
    """Draw the score on every domain, or what its probes say, over the epochs; a plain run's are dashed."""
    curves = _scores(outcome.run.lines, styles(outcome), measure, _by_epoch(outcome.run.lines))
    label = measure.unit
    if measure.rising and (unchanged := _unchanged(outcome)):
        curves, label = curves + unchanged, "%"
    beside = []
    if plain is not None and len(styles(outcome)) <= _MOST_BESIDE:
        dashed = {name: f"{style} beside" for name, style in styles(outcome).items()}
        beside = _scores(plain.run.lines, dashed, measure, _by_epoch(plain.run.lines))
    every = curves + beside
    if not curves or all(len(curve.points) < 2 for curve in every):
        return None
    values = [value for curve in every for _, value in curve.points]
    far_apart = measure.rising and max(values) - min(values) > 40
    heading = f"{measure.unit.partition(',')[0].capitalize()} over the epochs"
    x, y = Axis("epoch (0: before)", whole=True), Axis(label, holds=(0, 100) if far_apart else ())
    legend = [(curve.style, curve.name) for curve in curves]
    return Figure(heading, to_svg(Chart(heading, every, x, y)), legend, "Dashed: plain fine-tuning." if beside else "")


def _losses(lines: Lines) -> Chart | None:
    """Return task loss and penalty over the steps, on a scale that shows both."""
    logged = [line for line in lines if "loss" in line and line.get("step") is not None]
    losses = [(line["step"], line["loss"]) for line in logged if line["loss"] is not None]
    penalties = [(line["step"], line["penalty"]) for line in logged if line.get("penalty")]
    rehearsed = [(line["step"], line["rehearsed"]) for line in logged if line.get("rehearsed")]
    curves = [
        Curve("task loss", _NEW, losses),
        Curve("penalty", _OLD[0], penalties),
        Curve("rehearsed", _OLD[1], rehearsed),
    ]
    curves = [curve for curve in curves if curve.points]
    values = [value for curve in curves for _, value in curve.points]
    if not values:
        return None
    positive = [value for value in values if value > 0]
    log = min(values) >= 0 and bool(positive) and max(positive) > _WIDE * min(positive)
    if log:
        curves = [Curve(c.name, c.style, [point for point in c.points if point[1] > 0]) for c in curves]
    beside = [name for name, points in (("penalty", penalties), ("rehearsal", rehearsed)) if points]
    title = f"{listed(['Loss', *beside])} over the steps"
    y = Axis("nats, log scale" if log else "nats", log=log, holds=() if log else (0,))
    return Chart(title, curves, Axis("step", whole=True, holds=(0,)), y)


def _scores(lines: Lines, of: Mapping[str, str], measure: Measure, at: Place) -> list[Curve]:
    """Return the scores on domains, which are in these styles, each line at its place."""
    curves = []
    for domain, style in of.items():
        scored = [(at(line), measure.of(line["scores"].get(domain))) for line in lines if line.get("scores")]
        points = [(x, value) for x, value in scored if x is not None and value is not None]
        if points:
            curves.append(Curve(f"{domain} {measure.text(points[-1][1])}", style, points))
    return curves


def _by_epoch(lines: Lines) -> Place:
    """Return what places a line among the epochs: by its step, for not all readings are at the end of an epoch."""
    last = max(
        (line for line in lines if line.get("step") and line.get("epoch")), key=lambda line: line["step"], default=None
    )
    if last is None:
        return lambda line: line.get("epoch")
    return lambda line: None if line.get("step") is None else line["step"] * last["epoch"] / last["step"]


def _unchanged(outcome: Outcome) -> list[Curve]:
    """Return how the share of probes that are answered as before went, an anchor a curve."""
    curves: dict[str, list[Point]] = {}
    place = _by_epoch(outcome.run.lines)
    for line in outcome.run.lines:
        for probe in line.get("retention") or []:
            x = place(line)
            if probe.get("unchanged") is not None and x is not None:
                name = str(probe.get("data") or probe.get("anchor") or "an anchor")
                curves.setdefault(name, []).append((x, 100 * probe["unchanged"]))
    return [
        Curve(f"probes of {name} answered as before {points[-1][1]:.1f}%", style_of(len(outcome.old) + n), points)
        for n, (name, points) in enumerate(curves.items())
    ]
