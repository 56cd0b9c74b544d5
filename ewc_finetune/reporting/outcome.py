"""What came of a run: which domain was new, what was known before and after, and that in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ewc_finetune.reporting.measures import Measure, listed, short
from ewc_finetune.runs.record import Run
from ewc_finetune.specs.query import PARTS, data_key

Score = Mapping[str, Any]
# The mean is said of more old domains than these.
_MOST = 2


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
    def start(self) -> dict[str, Any]:
        """The checkpoint that it started from: its digest and architecture, as far as they are known."""
        return self.found.get("checkpoint") or {}

    @property
    def strengths(self) -> list[float]:
        """The lambda of each anchor."""
        return [anchor.get("lambda") or 0.0 for anchor in self.anchors]

    @property
    def rehearsed(self) -> bool:
        """Whether old inputs were rehearsed."""
        return any(memory.get("samples") != 0 for memory in self.found.get("rehearsed") or [])

    @property
    def held(self) -> bool:
        """Whether there was a penalty, or rehearsal."""
        return any(self.strengths) or self.rehearsed

    @property
    def strength(self) -> str:
        """Lambda: one number where all anchors have the same; `plain` without a penalty."""
        if not self.held:
            return "plain"
        texts = [f"{strength:.4g}" for strength in self.strengths] or ["0"]
        return texts[0] if len(set(texts)) == 1 else ", ".join(texts)

    @property
    def kind(self) -> str:
        """How it was held: the sorts of its anchors, and whether by rehearsal."""
        names = {"kfac": "K-FAC", "identity": "L2"}
        kinds = {names.get(anchor["provenance"].get("curvature"), "diagonal Fisher") for anchor in self.anchors}
        parts = [*(sorted(kinds) if any(self.strengths) else []), *(["rehearsal"] if self.rehearsed else [])]
        return " + ".join(parts) or "none"

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
    found = document["found"]
    new = found["new"] if found.get("new") in domains else new_domain(target, domains)
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
    """Return the domain that is of the data `target`: in another split, as it comes, or more samples of it."""
    for loose in (("split", "weight"), ("split", "weight", "augment"), PARTS):
        for domain in domains:
            if data_key(domain, loose) == data_key(target, loose):
                return domain
    return None


def sentence(outcome: Outcome, plain: Outcome | None, measure: Measure, start: str = "") -> str:
    """Say what came of a run: each score before and after, plain fine-tuning's beside it, and what is not known.

    Args:
        outcome: What came of the run.
        plain: What came of plain fine-tuning, where that was run.
        measure: What they are compared by.
        start: What is said first; by default how the run was held, or why it is not finished.
    """
    changes = [change for names in _averaged(outcome) if (change := _change(outcome, plain, measure, names))]
    known = [f"{measure.name} went {listed(changes)}"] if changes else []
    if not outcome.old and outcome.unchanged is not None:
        domains = listed([short(str(probe.get("data") or "an anchor")) for probe in outcome.probes])
        known.insert(0, f"{outcome.unchanged:.1f}% of the probes of {domains} are answered as before")
    said = [", and ".join(known)] if known else []
    if not outcome.after:
        said.append("nothing was scored")
    elif outcome.new is None:
        said.append(f"{short(outcome.target)} was not scored")
    if outcome.after and outcome.held and not outcome.old and not outcome.probes:
        said.append("what it kept of the old was not measured")
    return f"{start or how_held(outcome)}: {'; '.join(said)}."


def how_held(outcome: Outcome) -> str:
    """Say how a run was held or, where it did not finish, why and how far it got."""
    if outcome.finished and not any(outcome.strengths):
        return "Held by rehearsal" if outcome.rehearsed else "Trained without a penalty"
    if outcome.finished:
        beside = ", with rehearsal" if outcome.rehearsed else ""
        return f"Held at lambda {listed(outcome.strength.split(', '))}{beside}"
    state, _, why = outcome.run.document["status"].partition(": ")
    ended = {"failed": "failed", "interrupted": "was interrupted"}.get(state, "is still going, or was killed,")
    reason = f" ({short(why.partition('. ')[0], 120).rstrip('.')})" if why else ""
    when = f"after epoch {outcome.epoch}" if outcome.epoch else "before its first epoch was done"
    return f"The run {ended} {when}{reason}"


def _averaged(outcome: Outcome) -> list[tuple[str, ...]]:
    """Return the domains whose scores are said, those together that are averaged: old ones, if they are many."""
    old = [(name,) for name in outcome.old] if len(outcome.old) <= _MOST else [outcome.old]
    return [*old, *([(outcome.new,)] if outcome.new is not None else [])]


def _change(outcome: Outcome, plain: Outcome | None, measure: Measure, names: Sequence[str]) -> str:
    """Say how the score on a domain, or the mean over several, changed; nothing where it is not known."""
    before, after, beside = (
        measure.mean([measure.of(scores.get(name)) for name in names])
        for scores in (outcome.before, outcome.after, plain.after if plain else {})
    )
    if after is None:
        return ""
    where = f"on {outcome.spoken[names[0]]}" if len(names) == 1 else f"in the mean over {len(names)} domains"
    role = "new" if names[0] == outcome.new else "old"
    against = "" if beside is None else f"; plain fine-tuning: {measure.text(beside)}"
    since = "" if before is None else f"from {measure.text(before)} "
    return f"{since}to {measure.text(after)} {where} ({role}{against})"


def _by_domain(scores: Sequence[Score] | None) -> dict[str, Score]:
    return {str(score["domain"]): score for score in scores or []}
