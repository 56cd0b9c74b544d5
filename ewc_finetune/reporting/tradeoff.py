"""The runs of a sweep beside each other: their means over seeds, the frontier that these make, and its knee."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ewc_finetune.reporting.comparison import PLAIN, Group, frontier_chart, group_of
from ewc_finetune.reporting.figure import style_of
from ewc_finetune.reporting.frontier import knee, pareto
from ewc_finetune.reporting.measures import NOTHING
from ewc_finetune.reporting.outcome import Outcome
from ewc_finetune.reporting.plots import Chart, Curve, Point, draw_charts

# What a point is marked with.
KNEE = "knee"
BEST = "best mean"
ON = "on the frontier"


@dataclass(frozen=True)
class Row:
    """One run.

    Attributes:
        name: The name of its checkpoint and run folder, without ending.
        stack: What its anchors are called.
        strength: Lambda.
        form: The form of the penalty.
        seed: The seed of the run.
        status: `finished`, `failed: ...`, `waiting`, or what its run folder says.
        outcome: What came of it, once it is finished.
        plain: Whether it is plain fine-tuning.
    """

    name: str
    stack: str
    strength: float
    form: str
    seed: int
    status: str
    outcome: Outcome | None = None
    plain: bool = False

    @property
    def place(self) -> tuple[str, str, float]:
        """What runs share that differ in their seed alone; plain ones have no stack."""
        return ("", "", 0.0) if self.plain else (self.stack, self.form, self.strength)


@dataclass(frozen=True)
class SeedStatistics:
    """Retention or plasticity over runs that differ in their seed alone.

    Attributes:
        mean: Their mean, in the unit that it is shown in.
        deviation: Their standard deviation; None of a single run.
    """

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Position:
    """Runs that differ in their seed alone, as one point.

    Attributes:
        stack: What their anchors are called; nothing of plain runs.
        form: The form of the penalty; nothing of plain runs.
        strength: Lambda; 0 of plain runs.
        rows: The runs, finished or not.
        retention: What they kept; None unless one is finished.
        plasticity: What they learned; None unless one is finished.
        mean: The mean of retention and plasticity; None where they are not in one unit.
    """

    stack: str
    form: str
    strength: float
    rows: tuple[Row, ...]
    retention: SeedStatistics | None
    plasticity: SeedStatistics | None
    mean: float | None

    @property
    def plain(self) -> bool:
        """Whether they are plain fine-tuning."""
        return not self.stack

    @property
    def point(self) -> Point | None:
        """Where it lies on the frontier: what was learned and what was kept."""
        return (self.plasticity.mean, self.retention.mean) if self.plasticity and self.retention else None

    @property
    def deviations(self) -> Point:
        """The standard deviations of both; 0 of a single run."""
        found = (figure and figure.deviation for figure in (self.plasticity, self.retention))
        across, along = (deviation or 0.0 for deviation in found)
        return across, along

    @property
    def finished(self) -> int:
        """How many of the runs are."""
        return sum(row.outcome is not None for row in self.rows)


@dataclass(frozen=True)
class Tradeoff:
    """What a sweep has found so far.

    Attributes:
        rows: A run each.
        positions: The points that they make, plain first, then by stack, form and lambda.
        marks: What is to be said of each of these.
        knee: Which of them is the knee, if there is one.
        group: What the finished runs are compared by; None while there is none.
    """

    rows: tuple[Row, ...]
    positions: tuple[Position, ...]
    marks: tuple[tuple[str, ...], ...]
    knee: int | None
    group: Group | None

    def headers(self) -> list[str]:
        """Return the heads of the table's columns."""
        return ["", *(["seeds"] if self._several_seeds else []), "lambda", "retention", "plasticity", "mean", ""]

    def lines(self) -> list[list[str]]:
        """Return the table's lines, a point each."""
        lines = []
        for position, marks in zip(self.positions, self.marks, strict=True):
            failed = sum(row.status.startswith("failed") for row in position.rows)
            said = [*marks, *([f"{failed} of {len(position.rows)} failed"] if failed else [])]
            lines.append(
                [
                    self.curve(position),
                    *([str(position.finished)] if self._several_seeds else []),
                    "-" if position.plain else f"{position.strength:g}",
                    self._text(position.retention, kept=True),
                    self._text(position.plasticity, kept=False),
                    NOTHING if position.mean is None or self.group is None else self.group.measure.text(position.mean),
                    ", ".join(said),
                ]
            )
        return lines

    def curve(self, position: Position) -> str:
        """Return what tells a point's curve from the others."""
        if position.plain:
            return "plain"
        forms = {p.form for p in self.positions if not p.plain}
        return f"{position.stack}, {position.form}" if len(forms) > 1 else position.stack

    def said(self, row: Row) -> str:
        """Say in a few words what came of a finished run."""
        if row.outcome is None or self.group is None:
            return row.status
        kept, learned = self.group.retention(row.outcome), row.outcome.plasticity(self.group.measure)
        return f"retention {self.group.retention_text(kept)}, plasticity {self.group.measure.text(learned)}"

    @property
    def _several_seeds(self) -> bool:
        return len({row.seed for row in self.rows}) > 1

    def _text(self, found: SeedStatistics | None, *, kept: bool) -> str:
        if found is None or self.group is None:
            return NOTHING
        text = self.group.retention_text(found.mean) if kept else self.group.measure.text(found.mean)
        if found.deviation is None:
            return text
        return f"{text} ± {found.deviation:{'.1f' if text.endswith('%') else '.3g'}}"

    def to_csv(self) -> str:
        """Return a line for each run, in the units of `run.json`."""
        domains = list(dict.fromkeys(d for row in self.rows if row.outcome for d in row.outcome.after))
        measure = self.group.measure.name if self.group else "score"
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(
            ["run", "status", "anchors", "lambda", "penalty form", "seed", "retention", "plasticity"]
            + [f"{measure} on {domain} {when}" for domain in domains for when in ("before", "after")]
            + ["steps", "seconds", "folder"]
        )
        for row in self.rows:
            figures = self._figures(row)
            scores = [figures[when].get(domain) for domain in domains for when in ("before", "after")]
            writer.writerow(
                [row.name, row.status, row.stack, row.strength, row.form, row.seed]
                + [figures[name] for name in ("retention", "plasticity")]
                + scores
                + [figures[name] for name in ("steps", "seconds", "folder")]
            )
        return text.getvalue()

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has, in the units of `run.json`."""
        return {
            "measure": self.group.measure.name if self.group else None,
            "retention_of": self.group.retention_unit if self.group else None,
            "knee": None if self.knee is None else self._place(self.positions[self.knee]),
            "points": [
                {
                    **self._place(position),
                    "seeds": [row.seed for row in position.rows],
                    "runs": [row.name for row in position.rows],
                    **self._unscaled("retention", position.retention, self._kept_scale),
                    **self._unscaled("plasticity", position.plasticity, self._scale),
                    "mean": _unscaled(position.mean, self._scale),
                    "marks": list(marks),
                }
                for position, marks in zip(self.positions, self.marks, strict=True)
            ],
            "runs": [
                {
                    "run": row.name,
                    "status": row.status,
                    **self._place(row),
                    "seed": row.seed,
                    **self._figures(row),
                }
                for row in self.rows
            ],
        }

    @property
    def outcomes(self) -> list[Outcome]:
        """What came of the finished runs."""
        return [row.outcome for row in self.rows if row.outcome is not None]

    @property
    def _scale(self) -> float:
        return self.group.measure.scale if self.group else 1.0

    @property
    def _kept_scale(self) -> float:
        return self._scale if self.group and self.group.old else 100.0

    @staticmethod
    def _place(of: Row | Position) -> dict[str, Any]:
        return {"anchors": of.stack or None, "penalty_form": of.form or None, "lambda": of.strength}

    @staticmethod
    def _unscaled(name: str, found: SeedStatistics | None, scale: float) -> dict[str, float | None]:
        mean, deviation = (None, None) if found is None else (found.mean, found.deviation)
        return {name: _unscaled(mean, scale), f"{name}_deviation": _unscaled(deviation, scale)}

    def _figures(self, row: Row) -> dict[str, Any]:
        """Return what is known of one run."""
        outcome, group = row.outcome, self.group
        if outcome is None or group is None:
            return dict.fromkeys(("retention", "plasticity", "steps", "seconds", "folder")) | {
                "before": {},
                "after": {},
            }
        kept, learned = group.retention(outcome), outcome.plasticity(group.measure)
        document = outcome.run.document
        return {
            "retention": _unscaled(kept, self._kept_scale),
            "plasticity": _unscaled(learned, self._scale),
            "before": {name: score.get(group.measure.name) for name, score in outcome.before.items()},
            "after": {name: score.get(group.measure.name) for name, score in outcome.after.items()},
            "steps": document.get("steps"),
            "seconds": document.get("seconds"),
            "folder": str(outcome.run.path),
        }

    def draw(self, path: Path, title: str) -> None:
        """Draw the frontier, if a point is known."""
        chart = self.chart()
        if chart is not None:
            draw_charts(path, [chart], title)

    def chart(self) -> Chart | None:
        """Return the frontier, if a point is known."""
        names: dict[str, list[Position]] = {}
        for position in self.positions:
            if position.point:
                names.setdefault(PLAIN if position.plain else self.curve(position), []).append(position)
        if not names or self.group is None:
            return None
        bend = None if self.knee is None else self.positions[self.knee]
        curves: list[Curve] = []
        for name, found in names.items():
            style = "plain" if name == PLAIN else style_of(sum(curve.name != PLAIN for curve in curves))
            labels = [("knee: lambda " if p is bend else "") + f"{p.strength:g}" for p in found]
            points, deviations = [p.point for p in found if p.point], [p.deviations for p in found]
            curves.append(Curve(name, style, points, labels, name != PLAIN, deviations))
        chosen = None if bend is None else bend.point
        return frontier_chart(curves, self.group.measure, self.group.retention_unit, "the new domain", chosen)


def _unscaled(value: float | None, scale: float) -> float | None:
    return None if value is None else float(f"{value / scale:.12g}")


def trade_off(rows: Sequence[Row]) -> Tradeoff:
    """Put the runs of a sweep beside each other."""
    done = [row.outcome for row in rows if row.outcome is not None]
    group = group_of(done, {}) if done else None
    places: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        places.setdefault(row.place, []).append(row)
    positions = [_position(*place, places[place], group) for place in sorted(places)]
    front, bend = _frontier(positions, group)
    best = _best(positions, group)
    marks = [
        tuple(mark for mark, here in ((KNEE, n == bend), (BEST, n == best), (ON, n in front)) if here)
        for n in range(len(positions))
    ]
    return Tradeoff(tuple(rows), tuple(positions), tuple(marks), bend, group)


def _position(stack: str, form: str, strength: float, rows: Sequence[Row], group: Group | None) -> Position:
    rows = sorted(rows, key=lambda row: row.seed)
    done = [row.outcome for row in rows if row.outcome is not None]
    kept = learned = mean = None
    if group is not None and done:
        kept = _statistics([group.retention(one) for one in done], group, kept=True)
        learned = _statistics([one.plasticity(group.measure) for one in done], group, kept=False)
        if kept and learned and (group.old or group.measure.scale == 100):
            mean = group.measure.mean([kept.mean, learned.mean])
    return Position(stack, form, strength, tuple(rows), kept, learned, mean)


def _statistics(values: Sequence[float | None], group: Group, *, kept: bool) -> SeedStatistics | None:
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    shares = kept and not group.old  # of probes
    mean = statistics.fmean(numbers) if shares else group.measure.mean(numbers)
    return None if mean is None else SeedStatistics(mean, statistics.stdev(numbers) if len(numbers) > 1 else None)


def _frontier(positions: Sequence[Position], group: Group | None) -> tuple[set[int], int | None]:
    """Return which points are on the frontier, and which is its knee."""
    if group is None:
        return set(), None
    known: Mapping[int, tuple[float, float]] = {
        n: (
            group.measure.good(position.plasticity.mean),
            group.measure.good(position.retention.mean) if group.old else position.retention.mean,
        )
        for n, position in enumerate(positions)
        if position.retention and position.plasticity
    }
    at, points = list(known), list(known.values())
    bend = knee(points)
    return {at[n] for n in pareto(points)}, None if bend is None else at[bend]


def _best(positions: Sequence[Position], group: Group | None) -> int | None:
    """Return which point has the best mean of both figures."""
    known = {n: position.mean for n, position in enumerate(positions) if position.mean is not None}
    if group is None or len(known) < 2:
        return None
    measure = group.measure
    return max(known, key=lambda n: measure.good(known[n]))
