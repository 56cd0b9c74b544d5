"""What came of a run: which domain was new, what was known before and after, and that in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ewc_finetune.errors import UsageError
from ewc_finetune.reporting.measures import Measure, listed, short
from ewc_finetune.runs.record import Run
from ewc_finetune.specs.query import parse

Score = Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        run: Its record.
        label: What to call it among others.
        new: The scored domain that it learned, None where that was not scored.
        old: The other scored domains.
        before: The scores before the first step, by domain.
        after: The last ones.
        epoch: The epoch that the last ones are of, where the run did not finish.
        probes: What the anchors' probes said last.
    """

    run: Run
    label: str
    new: str | None
    old: tuple[str, ...]
    before: dict[str, Score]
    after: dict[str, Score]
    epoch: int | None
    probes: list[dict[str, Any]]

    @property
    def options(self) -> dict[str, Any]:
        """What the run was told."""
        options: dict[str, Any] = self.run.document["options"]
        return options

    @property
    def found(self) -> dict[str, Any]:
        """What that turned out to be."""
        found: dict[str, Any] = self.run.document["found"]
        return found

    @property
    def anchors(self) -> list[dict[str, Any]]:
        """The run's anchors, each with its lambda and provenance."""
        return self.found.get("anchors") or []

    @property
    def strengths(self) -> list[float]:
        """The lambda of each anchor."""
        return [anchor.get("lambda") or 0.0 for anchor in self.anchors]

    @property
    def held(self) -> bool:
        """Whether there was a penalty."""
        return any(self.strengths)

    @property
    def strength(self) -> str:
        """Lambda: one number where all anchors have the same; `plain` without a penalty."""
        if not self.held:
            return "plain"
        texts = [f"{strength:.4g}" for strength in self.strengths]
        return texts[0] if len(set(texts)) == 1 else ", ".join(texts)

    @property
    def kind(self) -> str:
        """What sort of penalty it was."""
        names = {"kfac": "K-FAC", "identity": "L2"}
        kinds = {names.get(anchor["provenance"].get("curvature"), "diagonal Fisher") for anchor in self.anchors}
        return " + ".join(sorted(kinds)) if self.held else "none"

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.run.document["status"] == "finished")

    @property
    def target(self) -> str:
        """The data that was learned."""
        return str((self.found.get("data") or {}).get("spec") or self.options.get("data") or "the new data")

    @property
    def spoken(self) -> dict[str, str]:
        """The names that a sentence has for the scored domains: without options, where that tells them apart."""
        domains = [*self.old, *([self.new] if self.new is not None else [])]
        heads = [domain.partition("?")[0] for domain in domains]
        return {
            domain: short(head if heads.count(head) == 1 else domain)
            for domain, head in zip(domains, heads, strict=True)
        }

    @property
    def unchanged(self) -> float | None:
        """The share of the probes' samples that are answered as before, in %; the mean over the anchors."""
        shares = [probe.get("unchanged") for probe in self.probes]
        known = [share for share in shares if share is not None]
        return 100 * sum(known) / len(known) if known and len(known) == len(shares) else None

    def retention(self, measure: Measure, domains: Sequence[str] | None = None) -> float | None:
        """Return the mean score on the old domains, or on these of them."""
        return measure.mean([measure.of(self.after.get(name)) for name in (self.old if domains is None else domains)])

    def plasticity(self, measure: Measure) -> float | None:
        """Return the score on the new domain."""
        return measure.of(self.after.get(self.new)) if self.new is not None else None


def outcome_of(run: Run) -> Outcome:
    """Read what came of a run, from its end or, where it has none, from as far as it got."""
    document = run.document
    scored = [line for line in run.lines if line.get("scores")]
    before = _by_domain(document.get("before")) or (
        dict(scored[0]["scores"]) if scored and not scored[0].get("step") else {}
    )
    after = _by_domain(document.get("after"))
    epoch = None
    if not after and scored:
        after, epoch = dict(scored[-1]["scores"]), scored[-1].get("epoch")
    told = [line["retention"] for line in run.lines if line.get("retention")]
    domains = list(after or before)
    target = str((document["found"].get("data") or {}).get("spec") or document["options"].get("data") or "")
    new = new_domain(target, domains)
    return Outcome(
        run=run,
        label=run.path.resolve().name.removesuffix(".run"),
        new=new,
        old=tuple(name for name in domains if name != new),
        before=before,
        after=after,
        epoch=epoch,
        probes=document.get("retention") or (told[-1] if told else []),
    )


def new_domain(target: str, domains: Sequence[str]) -> str | None:
    """Return the domain that is of the data `target`: in another split, or more samples of it."""
    for loose in (("split",), ("split", "limit", "first")):
        for domain in domains:
            if data_key(domain, loose) == data_key(target, loose):
                return domain
    return None


def data_key(spec: str, loose: Sequence[str] = ("split",)) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return what two specs of the same data have in common."""
    try:
        address = parse(spec)
    except UsageError:
        return spec, frozenset()  # what a Python caller calls it
    return address.head, frozenset(item for item in address.options.items() if item[0] not in loose)


def sentence(outcome: Outcome, plain: Outcome | None, measure: Measure) -> str:
    """Say in one sentence what came of a run, beside plain fine-tuning where that was run."""
    start = _start(outcome)
    said = said_of(outcome, measure)
    if plain is not None and said and outcome.old:
        said += f"; {_beside(outcome, plain, measure)}"
    if not said:
        scored = "nothing was scored" if not outcome.after else f"{short(outcome.target)} was not scored"
        if not outcome.finished:
            return f"{start}, and {scored}."
        return f"{start} was trained on {short(outcome.target)}; {scored}."
    return f"{start}{'; until then it' if not outcome.finished else ''} {said}."


def _start(outcome: Outcome) -> str:
    status = outcome.run.document["status"]
    if not outcome.finished:
        state, _, why = status.partition(": ")
        when = f" after epoch {outcome.epoch}" if outcome.epoch else " before its first epoch was done"
        if state == "failed":
            return f"The run failed{when}" + (f" ({short(why.partition('. ')[0], 120).rstrip('.')})" if why else "")
        return (
            f"The run was interrupted{when}"
            if state == "interrupted"
            else f"The run is still going, or was killed,{when}"
        )
    if outcome.held:
        return f"Held at lambda {listed(outcome.strength.split(', '))}, the model"
    fresh = not (outcome.found.get("checkpoint") or {}).get("sha256") and not outcome.old
    return "The model" if fresh else "Plainly fine-tuned, the model"


def said_of(outcome: Outcome, measure: Measure) -> str:
    """Say what was kept and what was learned, as what follows the model's name; empty where nothing was scored."""
    pieces = []
    if outcome.old:
        pieces.append(_kept(outcome, measure))
    elif outcome.unchanged is not None:
        domains = listed([short(str(probe.get("data") or "an anchor")) for probe in outcome.probes])
        pieces.append(f"answers {outcome.unchanged:.1f}% of the probes of {domains} as before")
    learned = outcome.plasticity(measure)
    if learned is not None:
        pieces.append(_learned(outcome, measure, learned))
    said = " and ".join(pieces)
    if said and outcome.held and not outcome.old and not outcome.probes:
        said += "; what it kept of the old was not measured"
    return said


def _kept(outcome: Outcome, measure: Measure) -> str:
    before = measure.mean([measure.of(outcome.before.get(name)) for name in outcome.old])
    mean = outcome.retention(measure)
    if len(outcome.old) > 2:
        of, where = "on average ", f"{len(outcome.old)} old domains"
        values = measure.text(mean)
    else:
        of, where = "", listed([outcome.spoken[name] for name in outcome.old])
        values = listed([measure.text(measure.of(outcome.after.get(name))) for name in outcome.old])
        before = before if len(outcome.old) == 1 else None
    if measure.rising:
        was = f" (before: {measure.text(before)})" if before is not None else ""
        return f"kept {of}{values} {measure.name} on {where}{was}"
    was = f" (from {measure.text(before)})" if before is not None else ""
    return f"ended with {of}a {measure.name} of {values} on {where}{was}"


def _learned(outcome: Outcome, measure: Measure, learned: float) -> str:
    name = outcome.spoken[str(outcome.new)]
    before = measure.of(outcome.before.get(str(outcome.new)))
    was = f" (from {measure.text(before)})" if before is not None and not measure.rising else ""
    if measure.rising:
        return f"learned {name} to {measure.text(learned)}"
    lead = "" if outcome.old else f"ended with a {measure.name} of "
    return f"{lead}{measure.text(learned)} on {name}{was}"


def _beside(outcome: Outcome, plain: Outcome, measure: Measure) -> str:
    kept, learned = plain.retention(measure, outcome.old), plain.plasticity(measure)
    if kept is None:
        return f"plain fine-tuning learned {measure.text(learned)}"
    if measure.rising:
        return f"plain fine-tuning kept {measure.text(kept)} and learned {measure.text(learned)}"
    return f"plain fine-tuning ended at {measure.text(kept)} and {measure.text(learned)}"


def _by_domain(scores: Sequence[Score] | None) -> dict[str, Score]:
    return {str(score["domain"]): score for score in scores or []}
