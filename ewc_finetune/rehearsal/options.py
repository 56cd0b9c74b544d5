"""The options of rehearsal, which `finetune` and `sweep` have."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from ewc_finetune.errors import UsageError
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import is_number, option

# What a source is called that is the probes of the anchors.
PROBES = "probes"


@dataclass(frozen=True, kw_only=True)
class Rehearsing:
    """What is rehearsed, and how much; see `Rehearsal`."""

    GROUP: ClassVar = Group.REHEARSAL

    rehearse: Any = option(
        (),
        "Rehearse old inputs beside the new data, towards the old model's own answers: probes (those in the anchors), "
        "or data that is like the old (labels are not looked at); repeatable.",
        read=str,
        many=True,
        metavar="SOURCE",
        main=True,
        code="data",
        setting="method",
    )
    rehearse_weight: float = option(
        1.0,
        "What the rehearsed samples of a step count, all together, beside 1 for the new ones; 0 rehearses nothing, and "
        "measures by what would not be.",
        metavar="X",
        setting="method",
    )
    rehearse_batch: int | None = option(
        None, "Rehearsed samples a step.", least=1, unless="--batch-size", setting="method"
    )
    rehearse_variations: bool = option(
        True,
        "Rehearse what is made of the inputs too: images moved and turned a little, and mixtures of two, "
        "which the anchor's weights answer.",
        setting="method",
    )

    @property
    def rehearses(self) -> bool:
        """Whether anything is rehearsed."""
        return bool(self.sources) and self.rehearse_weight > 0

    @property
    def sources(self) -> list[Any]:
        """What is rehearsed, the probes once at most; one source may stand alone."""
        given = list(self.rehearse) if isinstance(self.rehearse, (list, tuple)) else [self.rehearse]
        first = next((n for n, one in enumerate(given) if is_probes(one)), None)
        return [one for n, one in enumerate(given) if n == first or not is_probes(one)]

    def check_rehearsal(self) -> None:
        """Check what no declaration says.

        Raises:
            UsageError: if the weight is no number from 0 on, or a source is called almost as the probes are.
        """
        if not is_number(self.rehearse_weight) or self.rehearse_weight < 0:
            raise UsageError(f"rehearse weight is {self.rehearse_weight}; expected a finite number, at least 0")
        for source in self.sources:
            if isinstance(source, str) and source != PROBES and get_close_matches(source.lower(), [PROBES], 1, 0.8):
                raise UsageError(f"{source!r} is nothing to rehearse. Did you mean {PROBES!r} (those in the anchors)?")


def is_probes(source: object) -> bool:
    """Whether a source is the probes of the anchors."""
    return isinstance(source, str) and source == PROBES
