"""The page: all that is said of runs, in one file of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ewc_finetune._version import __version__
from ewc_finetune.anchor.describe import percent
from ewc_finetune.reporting.comparison import Group
from ewc_finetune.reporting.figure import Figure
from ewc_finetune.reporting.measures import NOTHING, listed, short
from ewc_finetune.reporting.outcome import Outcome
from ewc_finetune.reporting.section import Section, Table, section_of

# By this a file is known for a report, which may be made anew.
GENERATOR = "ewc-ft report"


@dataclass(frozen=True)
class Part:
    """What the page says of runs on the same new data."""

    heading: str
    sentence: str
    sections: list[Section]
    main: Section
    table: Table
    reading: str
    frontier: Figure | None


def part_of(group: Group) -> Part:
    """Put together what the page says of runs on the same new data."""
    sections = [section_of(outcome, group) for outcome in group.outcomes]
    reading = []
    if group.best:
        reading.append("In bold: the best mean of what was kept and what was learned.")
    if len(group.old) > 1:
        reading.append(f"Kept is the mean over {listed([short(name) for name in group.old])}.")
    if not group.measure.rising:
        reading.append(f"Less {group.measure.name} is better.")
    return Part(
        heading=f"Learning {short(group.main.target)}",
        sentence=group.sentence,
        sections=sections,
        main=next(section for section in sections if section.outcome is group.main),
        table=_table(group),
        reading=" ".join(reading),
        frontier=group.frontier() if len(group.outcomes) > 1 else None,
    )


def render(parts: Sequence[Part], title: str | None) -> str:
    """Return the page.

    Args:
        parts: What it says; the first is what the page is about.
        title: In the browser's tab and above the outcome; by default what the runs learned.
    """
    first = parts[0].main.outcome
    named = title or _named(first)
    count = sum(len(part.sections) for part in parts)
    return _template().render(
        parts=parts,
        title=named,
        kicker=_kicker(named, first, count),
        sentence=parts[0].sentence,
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
    """Return a row for each run: lambda, what was kept and learned, and in what else the runs differ."""
    measure = group.measure
    differing = group.differing()
    columns: dict[str, list[str]] = {
        "Run": [one.label for one in group.outcomes],
        "Lambda": [one.strength if one.held else NOTHING for one in group.outcomes],
        "Kept": [group.retention_text(group.retention(one)) for one in group.outcomes],
        "Learned": [measure.text(one.plasticity(measure)) for one in group.outcomes],
    }
    if len({one.kind for one in group.outcomes if one.held}) > 1:
        columns["Penalty"] = [one.kind for one in group.outcomes]
    columns |= {key: [group.option_text(one, key) for one in group.outcomes] for key in differing}
    if any(not one.finished for one in group.outcomes):
        columns["Status"] = [one.run.document["status"].partition(":")[0] for one in group.outcomes]
    main = group.outcomes.index(group.main) if group.best else None
    return Table(list(columns), [list(row) for row in zip(*columns.values(), strict=True)], main)
