"""Where in the network the importance sits, and which layers moved."""

from __future__ import annotations

from dataclasses import dataclass

from ewc_finetune.anchor.describe import percent
from ewc_finetune.reporting.outcome import Outcome

# Up to so many layers are all shown at first.
MOST = 24
# Of a longer list so many are shown at first, those that matter most.
FIRST = 12


@dataclass(frozen=True)
class Layer:
    """One layer of the model.

    Attributes:
        name: Its name.
        parameters: How many numbers it has.
        share: Its share of the importance, 0 to 1; None where it is not known.
        moved: How far its weights went, relative to their size.
    """

    name: str
    parameters: int
    share: float | None
    moved: float | None


@dataclass(frozen=True)
class Layers:
    """The layers of a run's model, in the model's order."""

    every: tuple[Layer, ...]

    @property
    def first(self) -> tuple[Layer, ...]:
        """Those to look at first: all, or of many the ones with the most importance, or that moved most."""
        if len(self.every) <= MOST:
            return self.every
        ranked = sorted(self.every, key=lambda layer: (-(layer.share or 0.0), -(layer.moved or 0.0)))[:FIRST]
        return tuple(layer for layer in self.every if layer in ranked)

    @property
    def has_share(self) -> bool:
        """Whether there is anything to say of importance."""
        return any(layer.share for layer in self.every)  # plain training has none, and that of lambda 0 is 0

    @property
    def has_moved(self) -> bool:
        """Whether it is known which layers moved."""
        return any(layer.moved is not None for layer in self.every)

    @property
    def largest_share(self) -> float:
        """What the longest bar of importance stands for."""
        return max((layer.share or 0.0 for layer in self.every), default=0.0) or 1.0

    @property
    def largest_move(self) -> float:
        """What the longest bar of movement stands for."""
        return max((layer.moved or 0.0 for layer in self.every), default=0.0) or 1.0

    @property
    def summary(self) -> str:
        """Say where most of the importance is, and what moved most."""
        said = []
        if self.has_share:
            top = max(self.every, key=lambda layer: layer.share or 0.0)
            said.append(f"{top.share or 0.0:.0%} of the importance sits in {top.name}")
        if self.has_moved:
            top = max(self.every, key=lambda layer: layer.moved or 0.0)
            said.append(
                f"{top.name} moved most, by {percent(top.moved)} of its weights\N{RIGHT SINGLE QUOTATION MARK} size"
            )
        return "; ".join(said) + "." if said else ""


def layers_of(outcome: Outcome) -> Layers:
    """Return what is known of each layer: from the run's end or, where it has none, from its anchors alone."""
    rows = outcome.run.document.get("layers")
    if rows is None:
        return Layers(_of_anchors(outcome))
    return Layers(
        tuple(Layer(row["layer"], int(row.get("parameters") or 0), row.get("share"), row.get("moved")) for row in rows)
    )


def _of_anchors(outcome: Outcome) -> tuple[Layer, ...]:
    """Add up the traces that the anchors say their layers have, each times its lambda."""
    traces: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for anchor, strength in zip(outcome.anchors, outcome.strengths, strict=True):
        for row in anchor["provenance"].get("importance") or []:
            name, size = row["layer"], int(row.get("parameters") or 0)
            traces[name] = traces.get(name, 0.0) + strength * (row.get("mean") or 0.0) * size
            sizes[name] = size
    total = sum(traces.values())
    return tuple(Layer(n, sizes[n], trace / total, None) for n, trace in traces.items()) if total > 0 else ()
