"""What a model is held by in somebody's training loop, as a dataclass that argument parsers and YAML take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

# Typing's own forms: `transformers.HfArgumentParser` reads these annotations on every Python.


@dataclass
class EwcArguments:
    """What the model is held by.

    Attributes:
        anchors: The anchors, their files, or their addresses on the Hub, oldest first.
        lambdas: Strength of the penalty, one for all or one for each anchor; unless given 10 for those of K-FAC and 100
            for others, and a tenth of that where old inputs are rehearsed.
        lineage: See `Penalty`.
        rehearse: What goes through the model at each step beside the new data, to keep its old answers: `probes`, data
            specs, datasets or loaders; see `Rehearsal`.
        rehearse_weight: What the rehearsed samples of a step count together, beside 1 for the new ones.
        rehearse_batch: How many inputs are rehearsed a step.
        rehearse_seed: The seed that draws them.
    """

    anchors: list[str] = field(
        default_factory=list, metadata={"help": "An anchor to be held by; several, oldest first."}
    )
    lambdas: Optional[list[float]] = field(  # noqa: UP045 - see above
        default=None, metadata={"help": "Strength of the penalty: one for all anchors, or one for each."}
    )
    lineage: str = field(
        default="all", metadata={"help": "all or latest: what anchors with a part in newer ones pull to."}
    )
    rehearse: list[str] = field(
        default_factory=list, metadata={"help": "Old inputs to rehearse: probes (those in the anchors), or data specs."}
    )
    rehearse_weight: float = field(default=1.0, metadata={"help": "What rehearsed samples count beside the new ones."})
    rehearse_batch: int = field(default=8, metadata={"help": "Rehearsed samples a step."})
    rehearse_seed: int = field(default=0, metadata={"help": "Seed that draws rehearsed samples."})
