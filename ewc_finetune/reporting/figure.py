"""A figure as the page has it: a drawing, what its colours mean, and how to read it; and the figures of one run."""

from __future__ import annotations

from dataclasses import dataclass, field

from markupsafe import Markup

from ewc_finetune.reporting.charts import Axis, Curve, line_chart, linear_axis, log_axis
from ewc_finetune.reporting.measures import Measure
from ewc_finetune.reporting.outcome import Outcome
from ewc_finetune.runs.record import Run

# A scale is logarithmic where the largest number is so many times the smallest.
_WIDE = 30.0
# Beyond so many domains a plain run's curves would only be in the way.
_MOST_BESIDE = 4
_NEW, _OLD = "k1", ("k0", "k2", "k3", "k4", "k5")


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


def styles(outcome: Outcome) -> dict[str, str]:
    """Return the style of each domain: one for the new, others for the old; dashed where colours come again."""
    found = {name: _OLD[n % len(_OLD)] + (" again" if n >= len(_OLD) else "") for n, name in enumerate(outcome.old)}
    return found if outcome.new is None else {outcome.new: _NEW} | found


def draw_losses(run: Run) -> Figure | None:
    """Draw task loss and penalty over the steps, on a scale that shows both; None where no step was logged."""
    lines = [line for line in run.lines if "loss" in line and line.get("step") is not None]
    losses = [(line["step"], line["loss"]) for line in lines if line["loss"] is not None]
    penalties = [(line["step"], line["penalty"]) for line in lines if line.get("penalty")]
    curves = [Curve("task loss", "k1", losses)] if losses else []
    curves += [Curve("penalty", "k0", penalties)] if penalties else []
    values = [value for curve in curves for _, value in curve.points]
    if not values:
        return None
    positive = [value for value in values if value > 0]
    log = min(values) >= 0 and bool(positive) and max(positive) > _WIDE * min(positive)
    if log:
        curves = [Curve(c.name, c.style, [point for point in c.points if point[1] > 0]) for c in curves]
    label = "nats, log scale" if log else "nats"
    y = log_axis(label, positive) if log else linear_axis(label, values, zero=True)
    x = linear_axis("step", [step for curve in curves for step, _ in curve.points], whole=True, zero=True)
    title = "Loss and penalty over the steps" if penalties else "Loss over the steps"
    legend = [(curve.style, curve.name) for curve in curves]
    return Figure(title, line_chart(curves, x, y, title), legend)


def draw_scores(outcome: Outcome, plain: Outcome | None, measure: Measure) -> Figure | None:
    """Draw the score on every domain, or what its probes say, over the epochs; a plain run's are dashed."""
    colours = styles(outcome)
    curves = [
        Curve(f"{name} {measure.text(points[-1][1])}", style, points)
        for name, style in colours.items()
        if (points := _scores(outcome.run, name, measure))
    ]
    scored = len(curves)
    if measure.rising:
        curves += _unchanged(outcome, len(outcome.old))
    shown = len(curves)
    if plain is not None and len(colours) <= _MOST_BESIDE:
        curves += [
            Curve("plain", f"{style} beside", points)
            for name, style in colours.items()
            if (points := _scores(plain.run, name, measure))
        ]
    if not shown or all(len(curve.points) < 2 for curve in curves):
        return None
    values = [value for curve in curves for _, value in curve.points]
    label = measure.unit.partition(",")[0]
    x = linear_axis("epoch (0: before)", [epoch for curve in curves for epoch, _ in curve.points], whole=True)
    heading = f"{label.capitalize()} over the epochs"
    reading = "Dashed: plain fine-tuning." if len(curves) > shown else ""
    legend = [(curve.style, curve.name) for curve in curves[:shown]]
    y = (
        _percent(measure.unit if shown == scored else "%", values)
        if measure.rising
        else linear_axis(measure.unit, values)
    )
    return Figure(heading, line_chart(curves, x, y, heading), legend, reading)


def _percent(label: str, values: list[float]) -> Axis:
    """Return an axis of shares: all of it where they are far apart."""
    if max(values) - min(values) > 40:
        return Axis(label, 0.0, 100.0, [(value, str(value)) for value in range(0, 101, 20)])
    return linear_axis(label, values)


def _scores(run: Run, domain: str, measure: Measure) -> list[tuple[float, float]]:
    values = [(line.get("epoch"), measure.of(line["scores"].get(domain))) for line in run.lines if line.get("scores")]
    return [(epoch, value) for epoch, value in values if epoch is not None and value is not None]


def _unchanged(outcome: Outcome, taken: int) -> list[Curve]:
    """Return how the share of probes that are answered as before went, an anchor a curve."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for line in outcome.run.lines:
        for probe in line.get("retention") or []:
            if probe.get("unchanged") is not None and line.get("epoch") is not None:
                name = str(probe.get("data") or probe.get("anchor") or "an anchor")
                curves.setdefault(name, []).append((line["epoch"], 100 * probe["unchanged"]))
    return [
        Curve(f"probes of {name} answered as before {points[-1][1]:.1f}%", _OLD[(taken + n) % len(_OLD)], points)
        for n, (name, points) in enumerate(curves.items())
    ]
