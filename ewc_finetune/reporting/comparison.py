"""Runs on the same new data beside each other: which of them is plain, which is best, and the frontier they make."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ewc_finetune.reporting.charts import Curve, linear_axis, scatter
from ewc_finetune.reporting.figure import Figure
from ewc_finetune.reporting.measures import Measure, measure_of, short
from ewc_finetune.reporting.outcome import Outcome, data_key, said_of, sentence
from ewc_finetune.specs.options import Setting

_COLOURS = ("k0", "k2", "k3", "k4", "k5")


@dataclass(frozen=True)
class Group:
    """Runs that learned the same data.

    Attributes:
        outcomes: What came of each, in the order of the runs.
        measure: What they are compared by.
        old: The old domains that all of them were scored on, as far as they were on any.
        main: The run to look at first: the best held one.
        best: Whether it was found to be the best of several.
        settings: Options that change what a run learns, beside its anchors and lambda.
    """

    outcomes: tuple[Outcome, ...]
    measure: Measure
    old: tuple[str, ...]
    main: Outcome
    best: bool
    settings: Mapping[str, Setting]

    def retention(self, outcome: Outcome) -> float | None:
        """Return what a run kept: its mean score on the old domains, or what the probes say where none was scored."""
        return outcome.retention(self.measure, self.old) if self.old else outcome.unchanged

    @property
    def retention_unit(self) -> str:
        """What `retention` is in."""
        if not self.old:
            return "probes answered as before, %"
        return self.measure.on("retention", "the old domain" if len(self.old) == 1 else "old domains")

    def retention_text(self, value: float | None) -> str:
        """Return a retention with its unit."""
        return self.measure.text(value) if self.old or value is None else f"{value:.1f}%"

    def plain_for(self, outcome: Outcome) -> Outcome | None:
        """Return the plain run to compare with: of several, the one whose training was most like this one's."""
        plain = [one for one in self.outcomes if not one.held and one.after and one.finished]
        if not outcome.held or not plain:
            return None
        return max(plain, key=lambda one: -len(self._unlike(one, outcome)))

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        plain = self.plain_for(self.main)
        if not self.best:
            return sentence(self.main, plain, self.measure)
        said = said_of(self.main, self.measure)
        beside = sentence(self.main, plain, self.measure).partition(said)[2] if plain else "."
        held = sum(one.held for one in self.outcomes)
        kinds = len({one.kind for one in self.outcomes if one.held}) > 1
        name = f"{self.main.kind} at lambda {self.main.strength}" if kinds else f"lambda {self.main.strength}"
        return f"Of {held} held runs, {name} has the best mean of old and new: it {said}{beside}"

    def differing(self) -> list[str]:
        """Return the options in which the runs differ, beside anchors and lambda."""
        return [key for key in self.settings if len({self._option(one, key) for one in self.outcomes}) > 1]

    def unlike_plain(self, outcome: Outcome) -> list[str]:
        """Return the options of training in which a run differs from the plain one beside it."""
        plain = self.plain_for(outcome)
        return [] if plain is None else self._unlike(plain, outcome)

    def _unlike(self, one: Outcome, other: Outcome) -> list[str]:
        of_training = [name for name, setting in self.settings.items() if setting.of_training]
        return [name for name in of_training if self._option(one, name) != self._option(other, name)]

    def _option(self, outcome: Outcome, key: str) -> str:
        """Return what an option of a run was; one that there was none of then was what it is by default."""
        options, default = outcome.options, self.settings[key].default
        value = outcome.found.get("norm_stats") if key == "norm-stats" else options.get(key, default)
        return json.dumps(value, sort_keys=True)

    def option_text(self, outcome: Outcome, key: str) -> str:
        """Return the value of an option, as a table has it."""
        text = self._option(outcome, key)
        return short("default" if text == "null" else text.strip('"'))

    def frontier(self) -> Figure | None:
        """Draw retention against plasticity, a point for each run; None where fewer than two have both."""
        sets: dict[str, list[tuple[float, float, Outcome]]] = {}
        for one in self.outcomes:
            kept, learned = self.retention(one), one.plasticity(self.measure)
            if kept is not None and learned is not None:
                sets.setdefault(one.kind if one.held else "plain fine-tuning", []).append((learned, kept, one))
        points = [point for found in sets.values() for point in found]
        if len(points) < 2:
            return None
        chosen = next(((x, y) for x, y, one in points if one is self.main), None) if len(points) > 2 else None
        curves, colours = [], iter(_COLOURS)
        for name, found in sets.items():
            plain = name == "plain fine-tuning"
            found.sort(key=lambda point: sum(point[2].strengths))
            style = "plain" if plain else next(colours, "k0")
            strengths = [one.strength for _, _, one in found]
            curves.append(
                Curve(
                    f"{name}, by lambda" if not plain else name,
                    style,
                    [(x, y) for x, y, _ in found],
                    strengths,
                    joined=not plain and len(set(strengths)) == len(strengths),
                )
            )
        return draw_frontier(
            curves, self.measure, self.retention_unit, self.measure.on("plasticity", "the new domain"), chosen,
            rising=self.measure.rising or not self.old,
        )  # fmt: skip


def draw_frontier(
    curves: Sequence[Curve],
    measure: Measure,
    kept: str,
    learned: str,
    chosen: tuple[float, float] | None,
    *,
    rising: bool,
    before: str = "",
    ring: str = "the run shown in detail",
) -> Figure:
    """Draw what is kept against what is learned, the better of both up and to the right.

    Args:
        curves: Points of (learned, kept), with lambdas for labels.
        measure: Of what is learned.
        kept: What is kept, with its unit.
        learned: What is learned, with its unit.
        chosen: The point that is shown in detail.
        rising: Whether more is better of what is kept.
        before: What is said first of how to read it.
        ring: What the chosen point is.
    """
    points = [point for curve in curves for point in curve.points]
    share = (0.0, 100.0) if measure.rising else (-math.inf, math.inf)
    x = linear_axis(learned, [p[0] for p in points], most=4, falling=not measure.rising, room=0.06, limits=share)
    y = linear_axis(kept, [p[1] for p in points], most=5, falling=not rising, room=0.03, limits=share)
    legend = [(curve.style, curve.name) for curve in curves]
    reading = f"{before} " if before else ""
    reading += "Up keeps more, right learns more; the numbers are lambda."
    if not (measure.rising and rising):
        reading += " Axes run so that less, which is better, lies up and to the right."
    if chosen is not None:
        reading += f" The ring is {ring}."
    title = f"Frontier of {len(points)} runs: {kept}, against {learned}"
    return Figure("Frontier", scatter(curves, x, y, title, chosen), legend, reading)


def grouped(outcomes: Sequence[Outcome], settings: Mapping[str, Setting]) -> list[Group]:
    """Put runs on the same new data together; groups with a penalty to look at come first.

    Args:
        outcomes: What came of each run.
        settings: See `Group`.
    """
    groups: dict[Any, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(data_key(outcome.target), []).append(outcome)
    found = [_group(group, settings) for group in groups.values()]
    return sorted(found, key=lambda group: not any(one.held for one in group.outcomes))


def _group(outcomes: Sequence[Outcome], settings: Mapping[str, Setting]) -> Group:
    measure = measure_of([score for one in outcomes for score in (*one.before.values(), *one.after.values())])
    scored = [set(one.old) for one in outcomes if one.old]
    common = set.intersection(*scored) if scored else set()
    old = tuple(name for name in next((one.old for one in outcomes if one.old), ()) if name in common)
    held = [one for one in outcomes if one.held]
    best, most = None, 0.0
    for one in held:
        kept = one.retention(measure, old) if old else one.unchanged
        learned = one.plasticity(measure)
        if kept is None or learned is None or not one.finished or (not old and measure.scale != 100):
            continue
        good = measure.good(kept) + measure.good(learned)
        if best is None or good > most:
            best, most = one, good
    main = best or next(iter([one for one in held if one.finished] or held or outcomes))
    return Group(tuple(outcomes), measure, old, main, best is not None and len(held) > 1, settings)
