"""The page: all that is said of runs, in one file of HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ewc_finetune._version import __version__
from ewc_finetune.anchor.describe import percent
from ewc_finetune.reporting.comparison import Group
from ewc_finetune.reporting.figure import Figure
from ewc_finetune.reporting.measures import NOTHING, listed, short
from ewc_finetune.reporting.outcome import Outcome
from ewc_finetune.reporting.section import Section, Table, section_of
from ewc_finetune.specs.query import without

# By this a file is known for a report, which may be made anew.
GENERATOR = "ewc-ft report"
# The headline names no more kinds of runs than these.
_MOST = 4
# Likelihoods that a heading doesn't name.
_PLAIN = ("categorical", None)


@dataclass(frozen=True)
class Part:
    """What the page says of runs that can be compared."""

    heading: str
    sentence: str
    sections: list[Section]
    main: Section
    table: Table
    reading: str
    frontier: Figure | None


def part_of(group: Group) -> Part:
    """Put together what the page says of runs that can be compared."""
    sections = [section_of(outcome, group) for outcome in group.outcomes]
    learned, likelihood = short(without(group.main.target, "augment")), group.main.found.get("likelihood")
    learned += f" ({likelihood})" if likelihood not in _PLAIN else ""
    reading = []
    if group.best:
        reading.append("In bold: the best mean of what was kept and what was learned.")
    if len(group.old) > 1:
        reading.append(f"Kept is the mean over {listed([short(name) for name in group.old])}.")
    if group.other_old:
        probed = any(one.unchanged is not None for one in group.outcomes)
        kept = listed([short(name) for name in group.old]) or ("the anchors' probes" if probed else "no old data")
        others = listed([short(name) for name in group.other_old])
        reading.append(f"Not all of the runs were scored on {others}, so what was kept is compared on {kept}.")
    if group.several_seeds:
        reading.append("Runs that differ in the seed alone have a mean, with the standard deviation behind ±.")
    if len(group.steps) > 1:
        reading.append(
            f"The runs are of unequal length ({group.steps[0]:,} to {group.steps[-1]:,} steps), so that they differ in "
            "more than how they were held."
        )
    if not group.measure.rising:
        reading.append(f"Less {group.measure.name} is better.")
    return Part(
        heading=f"Learning {learned}",
        sentence=group.sentence,
        sections=sections,
        main=next(section for section in sections if section.outcome is group.main),
        table=_table(group),
        reading=" ".join(reading),
        frontier=group.frontier() if len(group.outcomes) > 1 else None,
    )


def headline(parts: Sequence[Part]) -> str:
    """Return the outcome in one sentence; of runs that cannot be compared, how many there are of each kind."""
    if len(parts) == 1:
        return parts[0].sentence
    kinds = [f"{len(part.sections)} {part.heading[0].lower()}{part.heading[1:]}" for part in parts[:_MOST]]
    others = sum(len(part.sections) for part in parts[_MOST:])
    said = listed([*kinds, *([f"{others} others"] if others else [])])
    count = sum(len(part.sections) for part in parts)
    return f"{count} runs of {len(parts)} kinds, each compared with its own kind alone: {said}."


def render(parts: Sequence[Part], title: str | None) -> str:
    """Return the page.

    Args:
        parts: What it says.
        title: In the browser's tab and above the outcome; by default what the runs learned.
    """
    first = parts[0].main.outcome
    named = title or (_named(first) if len(parts) == 1 else f"Fine-tunes of {len(parts)} kinds")
    count = sum(len(part.sections) for part in parts)
    return _template().render(
        parts=parts,
        title=named,
        kicker=_kicker(named, first, count),
        sentence=headline(parts),
        generator=GENERATOR,
        version=__version__,
        sources=first.run.path.resolve().name if count == 1 else f"{count} run folders",
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("ewc_finetune.reporting", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=StrictUndefined,
    )  # fmt: skip
    environment.globals.update(percent=percent)
    return environment.get_template("page.html.jinja")


def _named(outcome: Outcome) -> str:
    old = [short(str((anchor["provenance"]).get("name") or "an anchor")) for anchor in outcome.anchors]
    if outcome.held:
        return f"Fine-tuning on {short(outcome.target)}, anchored to {listed(old)}"
    return f"Training on {short(outcome.target)}"


def _kicker(title: str, outcome: Outcome, count: int) -> str:
    day = str(outcome.run.document.get("started") or "")[:10]
    return " \N{MIDDLE DOT} ".join(filter(None, (title, f"{count} runs" if count > 1 else outcome.label, day)))


def _table(group: Group) -> Table:
    """Return a row for each run: lambda, what was kept and learned, and in what else the runs differ.

    Runs that differ in the seed alone have a row of their mean too, behind the last of them.
    """
    columns: dict[str, Callable[[Outcome], str]] = {
        "Run": lambda one: one.label,
        "Lambda": lambda one: one.strength if one.held else NOTHING,
        "Kept": lambda one: group.retention_text(group.retention(one)),
        "Learned": lambda one: group.measure.text(one.plasticity(group.measure)),
    }
    if len({one.kind for one in group.outcomes if one.held}) > 1:
        columns["Penalty"] = lambda one: one.kind
    if len({one.target for one in group.outcomes}) > 1:
        columns["Data"] = lambda one: short(one.target)
    if len({str(one.start.get("architecture")) for one in group.outcomes}) > 1:
        columns["Model"] = lambda one: short(str(one.start.get("architecture") or NOTHING))
    if len(group.steps) > 1:
        columns["Steps"] = lambda one: f"{one.run.document.get('steps') or 0:,.0f}"
    for key in group.differing():
        columns[key] = partial(group.option_text, key=key)
    if any(not one.finished for one in group.outcomes):
        columns["Status"] = lambda one: one.run.document["status"].partition(":")[0]
    rows, main = list[list[str]](), None
    for one in group.outcomes:
        rows.append([text(one) for text in columns.values()])
        seeds = group.seeds_of(one)
        shown = one
        if len(seeds) > 1:
            if one is not seeds[-1]:
                continue
            kept = group.spread([group.retention(seed) for seed in seeds], kept=True)
            learned = group.spread([seed.plasticity(group.measure) for seed in seeds], kept=False)
            own = {"Run": f"mean of {len(seeds)} seeds", "Kept": kept, "Learned": learned, "seed": NOTHING}
            rows.append([own.get(name) or text(one) for name, text in columns.items()])
            shown = group.main if group.main in seeds else one
        if group.best and shown is group.main:
            main = len(rows) - 1
    return Table(list(columns), rows, main)
