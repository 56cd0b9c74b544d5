"""Runs on the same new data beside each other: which of them is plain, which is best, and the frontier they make."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ewc_finetune.reporting.figure import Figure, style_of
from ewc_finetune.reporting.measures import NOTHING, Measure, measure_of, short
from ewc_finetune.reporting.outcome import Outcome, how_held, sentence
from ewc_finetune.reporting.plots import Axis, Chart, Curve, Point, to_svg
from ewc_finetune.specs.options import Setting
from ewc_finetune.specs.query import data_key

PLAIN = "plain fine-tuning"
PROBES = "probes answered as before, %"


@dataclass(frozen=True)
class Group:
    """Runs that learned the same data under the same likelihood.

    Attributes:
        outcomes: What came of each, in the order of the runs.
        measure: What they are compared by.
        old: The old domains that all of them were scored on, as far as they were on any.
        main: The run to look at first: the best held one, or of several seeds the middle one of the best.
        best: Whether it was found to be the best of several, not counting those that differ from it in the seed alone.
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
            return PROBES
        return self.measure.on("retention", "the old domain" if len(self.old) == 1 else "old domains")

    def retention_text(self, value: float | None) -> str:
        """Return a retention with its unit."""
        return self.measure.text(value) if self.old or value is None else f"{value:.1f}%"

    def plain_for(self, outcome: Outcome) -> Outcome | None:
        """Return the plain run to compare with: of several, the one most like this one in start and training."""
        plain = [one for one in self.outcomes if not one.held and one.after and one.finished]
        if not outcome.held or not plain:
            return None
        return max(plain, key=lambda one: (one.start == outcome.start, -len(self._unlike(one, outcome))))

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        plain, seeds = self.plain_for(self.main), self.seeds_of(self.main)
        held = [one for one in self.outcomes if one.held]
        middle = f"seed {self.main.options.get('seed')}"
        if not self.best:
            start = f"{how_held(self.main)}, {middle} as the middle one of {len(seeds)}" if len(seeds) > 1 else ""
            if not start and len(held) > 1:
                start = f"{how_held(self.main)} ({self.main.label}, one of {len(held)} held runs)"
            return sentence(self.main, plain, self.measure, start)
        name = f"lambda {self.main.strength}"
        if len({one.kind for one in held}) > 1:
            name = f"{self.main.kind} at {name}"
        alike = [one for one in held if (one.kind, one.strength) == (self.main.kind, self.main.strength)]
        if len(alike) > len(seeds):
            name += f" ({self.main.label})"
        start = f"Of {len(held)} held runs, {name} has the best mean of old and new"
        if len(seeds) > 1:
            start += f" over {len(seeds)} seeds, {middle} in the middle of them"
        return sentence(self.main, plain, self.measure, start)

    def seeds_of(self, outcome: Outcome) -> list[Outcome]:
        """Return the finished runs that differ from one in the seed alone, that one among them."""
        key = _but_for_the_seed(outcome, self.settings)
        found = [one for one in self.outcomes if one.finished and _but_for_the_seed(one, self.settings) == key]
        seeds = {json.dumps(one.options.get("seed")) for one in found}
        return found if len(seeds) == len(found) else [outcome]

    @property
    def several_seeds(self) -> list[list[Outcome]]:
        """The runs that differ in the seed alone, as far as there are several."""
        found = {id(seeds[0]): seeds for one in self.outcomes if len(seeds := self.seeds_of(one)) > 1}
        return list(found.values())

    @property
    def other_old(self) -> list[str]:
        """The old domains that not all of the runs were scored on which were scored on any."""
        return list(dict.fromkeys(name for one in self.outcomes for name in one.old if name not in self.old))

    @property
    def steps(self) -> list[int]:
        """The numbers of steps that the finished runs took, each once, in order."""
        return sorted({round(one.run.document.get("steps") or 0) for one in self.outcomes if one.finished})

    def spread(self, values: Sequence[float | None], *, kept: bool) -> str:
        """Return the mean of retentions, or of what was learned, with the standard deviation."""
        numbers = [value for value in values if value is not None]
        if len(numbers) < len(values):
            return NOTHING
        mean = statistics.fmean(numbers) if kept and not self.old else self.measure.mean(numbers)
        text = self.retention_text(mean) if kept else self.measure.text(mean)
        return f"{text} ± {statistics.stdev(numbers):{'.1f' if text.endswith('%') else '.3g'}}"

    def differing(self) -> list[str]:
        """Return the options in which the runs differ, beside anchors and lambda."""
        return [key for key in self.settings if len({self._option(one, key) for one in self.outcomes}) > 1]

    def unlike_plain(self, outcome: Outcome) -> list[str]:
        """Return in what a run differs from the plain one beside it: options of training, and what it started from."""
        plain = self.plain_for(outcome)
        return [] if plain is None else self._unlike(plain, outcome)

    def _unlike(self, one: Outcome, other: Outcome) -> list[str]:
        of_training = [name for name, setting in self.settings.items() if setting.of_training]
        differing = [name for name in of_training if self._option(one, name) != self._option(other, name)]
        start = ["the model that it started from"] if one.start != other.start else []
        return [*start, *(["data"] if one.target != other.target else []), *differing]

    def _option(self, outcome: Outcome, key: str) -> str:
        """Return what an option of a run was; one that there was none of then was what it is by default."""
        return _option(outcome, key, self.settings)

    def option_text(self, outcome: Outcome, key: str) -> str:
        """Return the value of an option, as a table has it."""
        value = json.loads(self._option(outcome, key))
        if isinstance(value, list):
            return short(", ".join(map(str, value)) or NOTHING)
        return short("default" if value is None else value if isinstance(value, str) else json.dumps(value))

    def frontier(self) -> Figure | None:
        """Draw retention against plasticity, a point for each run; None where fewer than two have both."""
        sets: dict[str, list[tuple[Point, Outcome]]] = {}
        for one in self.outcomes:
            kept, learned = self.retention(one), one.plasticity(self.measure)
            if kept is not None and learned is not None:
                sets.setdefault(one.kind if one.held else PLAIN, []).append(((learned, kept), one))
        chosen = next((point for found in sets.values() for point, one in found if one is self.main), None)
        curves = []
        for name, found in sets.items():
            found.sort(key=lambda pair: sum(pair[1].strengths))
            points, strengths = [point for point, _ in found], [one.strength for _, one in found]
            if name == PLAIN:
                curves.append(Curve(name, "plain", points, strengths, joined=False))
            else:
                style = style_of(sum(curve.name != PLAIN for curve in curves))
                joined = len(set(strengths)) == len(strengths)
                curves.append(Curve(f"{name}, by lambda", style, points, strengths, joined))
        count = sum(len(curve.points) for curve in curves)
        if count < 2:
            return None
        ring = chosen if count > 2 else None
        return frontier_figure(frontier_chart(curves, self.measure, self.retention_unit, "the new domain", ring))


def frontier_chart(curves: Sequence[Curve], measure: Measure, kept: str, where: str, chosen: Point | None) -> Chart:
    """Return what is kept against what is learned, the better of both up and to the right.

    Args:
        curves: Points of (learned, kept), with lambdas for labels.
        measure: The measure of what is learned, and of what is kept unless that is a share of probes.
        kept: What is kept, with its unit.
        where: What is learned.
        chosen: The point that gets a ring.
    """
    count, learned = sum(len(curve.points) for curve in curves), measure.on("plasticity", where)
    limits = (0.0, 100.0) if measure.rising else None
    x = Axis(learned, falling=not measure.rising, limits=limits)
    y = Axis(kept, falling=not measure.rising and kept != PROBES, limits=limits)
    return Chart(f"Frontier of {count} runs: {kept}, against {learned}", curves, x, y, chosen)


def frontier_figure(chart: Chart, before: str = "", ring: str = "the run shown in detail") -> Figure:
    """Draw a frontier, and say how to read it.

    Args:
        chart: The frontier.
        before: What is said first.
        ring: What the chosen point is.
    """
    reading = f"{before}Up keeps more, right learns more; the numbers are lambda."
    if chart.x.falling or chart.y.falling:
        reading += " Axes run so that less, which is better, lies up and to the right."
    if chart.chosen is not None:
        reading += f" The ring is {ring}."
    return Figure("Frontier", to_svg(chart), [(curve.style, curve.name) for curve in chart.curves], reading)


def grouped(outcomes: Sequence[Outcome], settings: Mapping[str, Setting]) -> list[Group]:
    """Put runs together that can be compared; groups with a penalty to look at come first.

    Args:
        outcomes: What came of each run.
        settings: Options that change what a run learns, beside its anchors and lambda.
    """
    groups: dict[Any, list[Outcome]] = {}
    for outcome in outcomes:
        same_data = data_key(outcome.target, ("split", "augment"))
        groups.setdefault((same_data, outcome.found.get("likelihood")), []).append(outcome)
    found = [group_of(group, settings) for group in groups.values()]
    return sorted(found, key=lambda group: not any(one.held for one in group.outcomes))


def group_of(outcomes: Sequence[Outcome], settings: Mapping[str, Setting]) -> Group:
    """Compare runs that learned the same data; see `grouped`."""
    measure = measure_of([score for one in outcomes for score in (*one.before.values(), *one.after.values())])
    scored = [set(one.old) for one in outcomes if one.old]
    common = set.intersection(*scored) if scored else set()
    old = tuple(name for name in next((one.old for one in outcomes if one.old), ()) if name in common)
    held = [one for one in outcomes if one.held]
    sets: dict[str, list[tuple[float, Outcome]]] = {}
    for one in held:
        kept = one.retention(measure, old) if old else one.unchanged
        learned = one.plasticity(measure)
        if kept is None or learned is None or not one.finished or (not old and measure.scale != 100):
            continue
        good = measure.good(kept) + measure.good(learned)
        sets.setdefault(_but_for_the_seed(one, settings), []).append((good, one))
    main = next(iter([one for one in held if one.finished] or held or outcomes))
    others = 0
    if sets:
        # Of several seeds their mean counts, and the one in the middle stands for them: not the luckiest.
        best = max(sets.values(), key=lambda found: statistics.fmean(good for good, _ in found))
        main = sorted(best, key=lambda pair: pair[0])[(len(best) - 1) // 2][1]
        others = len(held) - len(best)
    return Group(tuple(outcomes), measure, old, main, others > 0, settings)


def _option(outcome: Outcome, key: str, settings: Mapping[str, Setting]) -> str:
    value = outcome.options.get(key, settings[key].default)
    return json.dumps(outcome.found.get("norm_stats") if key == "norm-stats" else value, sort_keys=True)


def _but_for_the_seed(outcome: Outcome, settings: Mapping[str, Setting]) -> str:
    """Return what runs have in common that differ in the seed alone; of plain ones anchors have no part in it."""
    anchors = [anchor.get("sha256") for anchor in outcome.anchors] if outcome.held else []
    options = [_option(outcome, key, settings) for key in settings if key != "seed"]
    return json.dumps(
        [outcome.kind, outcome.strength, anchors, outcome.target, options, outcome.run.document.get("steps")]
    )
