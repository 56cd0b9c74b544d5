"""What the page says of one run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from ewc_finetune.reporting.comparison import PLAIN, Group, frontier_chart, frontier_figure
from ewc_finetune.reporting.figure import Figure, draw_losses, draw_scores, styles
from ewc_finetune.reporting.layers import Layers, layers_of
from ewc_finetune.reporting.measures import ACCURACY, LOSS, NOTHING, PERPLEXITY, Measure, measure_of, signed
from ewc_finetune.reporting.outcome import Outcome, new_domain, sentence
from ewc_finetune.reporting.plots import Curve
from ewc_finetune.reporting.provenance import Fact, Origin, origins, run_facts


@dataclass(frozen=True)
class KeyFigure:
    """One of the few large numbers.

    Attributes:
        label: What it is.
        value: The number, with its unit.
        note: What it was before, or what else belongs to it.
        style: Its colour.
        unit: Behind the number.
    """

    label: str
    value: str
    note: str = ""
    style: str = ""
    unit: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar of a domain: its length is a share of the longest, and None where there is a number alone."""

    name: str
    share: float | None
    style: str
    text: str
    change: str = ""


@dataclass(frozen=True)
class Table:
    """A table: its first column is words, the others are numbers, and one row may stand out."""

    header: list[str]
    rows: list[list[str]]
    main: int | None = None


@dataclass(frozen=True)
class DomainBars:
    """A domain's bars: before, after, plain."""

    name: str
    role: str
    bars: list[Bar]


@dataclass(frozen=True)
class Section:
    """What the page says of one run; see the template for where."""

    outcome: Outcome
    title: str
    sentence: str
    key_figures: list[KeyFigure]
    domains: list[DomainBars]
    domains_reading: str
    probes: list[DomainBars]
    scores: Table | None
    unmeasured: str
    unlike_plain: str
    figures: list[Figure]
    frontier: Figure | None
    no_frontier: str
    layers: Layers
    origins: list[Origin]
    facts: list[Fact]
    again: list[str]


def section_of(outcome: Outcome, group: Group) -> Section:
    """Put together what the page says of a run."""
    measure, plain = group.measure, group.plain_for(outcome)
    frontier = _trials(outcome)
    return Section(
        outcome=outcome,
        title=_title(outcome),
        sentence=sentence(outcome, plain, measure),
        key_figures=_key_figures(outcome, group),
        domains=_domains(outcome, plain, measure),
        domains_reading="" if measure.rising else f"Less {measure.name} is better.",
        probes=_probes(outcome),
        scores=_scores(outcome),
        unmeasured=_unmeasured(outcome),
        unlike_plain=_unlike(group, outcome),
        figures=[figure for figure in (draw_scores(outcome, plain, measure), draw_losses(outcome)) if figure],
        frontier=frontier if len(group.outcomes) == 1 else None,
        no_frontier=_no_frontier(outcome) if len(group.outcomes) == 1 and frontier is None else "",
        layers=layers_of(outcome),
        origins=origins(outcome),
        facts=run_facts(outcome),
        again=_again(outcome),
    )


def _key_figures(outcome: Outcome, group: Group) -> list[KeyFigure]:
    measure, plain = group.measure, group.plain_for(outcome)
    kept, learned = outcome.retention(measure), outcome.plasticity(measure)
    figures = []
    if kept is not None:
        before = measure.mean([measure.of(outcome.before.get(name)) for name in outcome.old])
        where = outcome.spoken[outcome.old[0]] if len(outcome.old) == 1 else f"{len(outcome.old)} old domains"
        note = _was(measure, before, kept)
        figures.append(KeyFigure(f"Kept: {measure.name} on {where}", measure.text(kept), note, "k0"))
    elif outcome.unchanged is not None:
        figures.append(KeyFigure("Kept: probes answered as before", f"{outcome.unchanged:.1f}%", "", "k0"))
    elif outcome.probes and outcome.probes[0].get("divergence") is not None:
        most = max(probe.get("divergence") or 0.0 for probe in outcome.probes)
        figures.append(KeyFigure("Kept: change on the probes", f"{most:.2g} nats", "0 is no change", "k0"))
    if learned is not None:
        name = str(outcome.new)
        note = _was(measure, measure.of(outcome.before.get(name)), learned)
        figures.append(
            KeyFigure(f"Learned: {measure.name} on {outcome.spoken[name]}", measure.text(learned), note, "k1")
        )
    if plain is not None and kept is not None:
        beside, at = plain.retention(measure, outcome.old), plain.plasticity(measure)
        if beside is not None:
            change = measure.change(at, learned)
            note = f"learned: {change}" if change else ""
            value, _, unit = measure.change(beside, kept).partition(" ")
            figures.append(KeyFigure("Kept, against plain fine-tuning", value, note, unit=unit))
    if any(outcome.strengths):
        searched = "found by search" if outcome.options.get("lambda") == "auto" else ""
        note = searched or (f"{len(outcome.anchors)} anchors" if len(outcome.anchors) > 1 else outcome.kind)
        figures.append(KeyFigure("Lambda", outcome.strength, note))
    return figures + _effort(outcome)


def _title(outcome: Outcome) -> str:
    strength = f"lambda {outcome.strength}" if any(outcome.strengths) else ""
    rehearsed = "rehearsed" if outcome.rehearsed else ""
    return ", ".join(filter(None, (strength, rehearsed))) or "without a penalty"


def _effort(outcome: Outcome) -> list[KeyFigure]:
    steps, seconds = outcome.run.document.get("steps"), outcome.run.document.get("seconds")
    last = max((line.get("step") or 0 for line in outcome.run.lines), default=0)
    steps = last if steps is None else steps
    return [KeyFigure("Steps", f"{steps:,.0f}", "" if seconds is None else _duration(seconds))] if steps else []


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s of training"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min of training" if minutes < 100 else f"{hours:.1f} h of training"


def _was(measure: Measure, before: float | None, after: float) -> str:
    return "" if before is None else f"{measure.text(before)} before, {measure.change(before, after)}"


def _domains(outcome: Outcome, plain: Outcome | None, measure: Measure) -> list[DomainBars]:
    colours = styles(outcome)
    names = [*outcome.old, *([outcome.new] if outcome.new is not None else [])]
    sources = [("before", outcome.before), ("after", outcome.after)]
    if outcome.epoch:
        sources[1] = (f"epoch {outcome.epoch}", outcome.after)
    sources += [("plain", plain.after)] if plain is not None else []
    values = {(name, label): measure.of(scores.get(name)) for name in names for label, scores in sources}
    most = 100.0 if measure is ACCURACY else max((abs(v) for v in values.values() if v is not None), default=1.0)
    found = []
    for name in names:
        bars = []
        for label, _ in sources:
            value = values[name, label]
            if value is None and label == "plain":
                continue
            style = {"before": f"{colours[name]} was", "plain": "plain"}.get(label, colours[name])
            change = measure.change(values[name, "before"], value) if label != "before" else ""
            bars.append(Bar(label, (value or 0.0) / (most or 1.0), style, measure.text(value), change))
        found.append(DomainBars(name, "new" if name == outcome.new else "old", bars))
    return found


def _probes(outcome: Outcome) -> list[DomainBars]:
    found = []
    for probe in outcome.probes:
        share, divergence = probe.get("unchanged"), probe.get("divergence")
        samples = f"{probe['samples']:,} samples" if isinstance(probe.get("samples"), int) else ""
        name = str(probe.get("data") or probe.get("anchor") or "an anchor")
        bars = []
        if share is not None:
            bars.append(Bar("as before", share, "k0", f"{100 * share:.1f}%"))
        if divergence is not None:
            bars.append(Bar("divergence", None, "", f"{signed(f'{divergence:.3g}')} nats"))
        found.append(DomainBars(name, samples, bars))
    return found


def _scores(outcome: Outcome) -> Table | None:
    """Return all that was scored: domain, samples, and each measure before and after."""
    both = [*outcome.before.values(), *outcome.after.values()]
    measures = [m for m in (ACCURACY, PERPLEXITY, LOSS) if any(m.of(score) is not None for score in both)]
    if not measures:
        return None
    metrics = list(dict.fromkeys(name for score in both for name in score.get("metrics") or {}))
    names = [*(m.name.capitalize() for m in measures), *metrics]
    header = ["Domain", "Samples", *(f"{shown} {when}" for shown in names for when in ("before", "after"))]
    rows = []
    for name in dict.fromkeys([*outcome.old, *([outcome.new] if outcome.new else [])]):
        samples = (outcome.after.get(name) or outcome.before.get(name) or {}).get("samples")
        row = [name, NOTHING if samples is None else f"{samples:,}"]
        for measure in measures:
            for scores in (outcome.before, outcome.after):
                row.append(measure.text(measure.of(scores.get(name))))
        for metric in metrics:
            for scores in (outcome.before, outcome.after):
                value = ((scores.get(name) or {}).get("metrics") or {}).get(metric)
                row.append(NOTHING if value is None else signed(f"{value:.4g}"))
        rows.append(row)
    return Table(header, rows)


def _unmeasured(outcome: Outcome) -> str:
    if outcome.old or not outcome.anchors:
        return ""
    if outcome.probes:
        return (
            "No old domain was scored, so retention is what the probes in the anchors say: how far the answers to them "
            "are those that were kept. To score one, name it with --eval."
        )
    return (
        "What the model kept of the old was not measured. Name old data with --eval where there is some, or put probes "
        "into the anchor with consolidate --probe."
    )


def _unlike(group: Group, outcome: Outcome) -> str:
    names = group.unlike_plain(outcome)
    return f"The plain run differs in {', '.join(names)} too, beside the penalty." if names else ""


def _trials(outcome: Outcome) -> Figure | None:
    """Draw the frontier of a search for lambda: each trial on the samples held out, and on the old domains."""
    trials = (outcome.found.get("lambda_search") or {}).get("trials") or []
    watched = [score for trial in trials for score in trial.get("watched") or []]
    if not watched or len(trials) < 2:
        return None
    measure = measure_of([*(trial["score"] for trial in trials), *watched])
    new = outcome.new or new_domain(outcome.target, [score["domain"] for score in watched])
    plain: list[tuple[float, float]] = []
    tried: list[tuple[float, tuple[float, float]]] = []
    for trial in trials:
        learned = measure.of(trial["score"])
        kept = measure.mean([measure.of(s) for s in trial.get("watched") or [] if s["domain"] != new])
        if learned is None or kept is None:
            continue
        if trial.get("lambda") is None:
            plain.append((learned, kept))
        else:
            tried.append((trial["lambda"], (learned, kept)))
    if len(tried) + len(plain) < 2:
        return None
    tried.sort()
    taken = (outcome.found["lambda_search"]).get("lambda")
    chosen = next((point for strength, point in tried if strength == taken), None)
    curves = [
        Curve("trials of the search", "k0", [p for _, p in tried], [f"{s:.3g}" for s, _ in tried]),
        Curve(PLAIN, "plain", plain, ["plain"] * len(plain), joined=False),
    ]
    curves = [curve for curve in curves if curve.points]
    chart = frontier_chart(curves, measure, measure.on("retention", "the old"), "held-out samples", chosen)
    return frontier_figure(chart, "The short runs of the search for lambda. ", "the lambda that was taken")


def _no_frontier(outcome: Outcome) -> str:
    if not outcome.held:
        return ""
    return (
        "One run is one point of the frontier of retention and plasticity. For more of it, report several runs "
        "together (other lambdas, and 0), or search with --lambda auto and name old data with --eval."
    )


def _again(outcome: Outcome) -> list[str]:
    """Return the command in pieces, between which a line may end."""
    document: dict[str, Any] = outcome.run.document
    command = document.get("command")
    if not command:
        return []
    folder = document.get("folder")
    start = f"cd {shlex.quote(folder)}\n" if folder else ""
    return re.split(" (?=--)", start + str(command))
