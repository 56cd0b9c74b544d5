"""The options of `mend`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ewc_finetune.errors import UsageError
from ewc_finetune.specs.command_options import Computing, Told
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import is_number, option
from ewc_finetune.specs.ranges import read_lambdas

if TYPE_CHECKING:
    from torch import nn

    from ewc_finetune.anchor.anchor import Anchor

RATIOS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Mending:
    """What is mended, and how; see `MendOptions`."""

    GROUP: ClassVar = Group.MENDING

    model: str | Path | nn.Module = option()
    data: Any = option(
        help="The domain that MODEL was fine-tuned on; its training data says what to keep of it, its test split what "
        "was kept.",
        required=True,
        main=True,
        once=True,
        metavar="DATA",
        group=Group.MODEL,
    )
    _: KW_ONLY
    architecture: str | None = option(
        None,
        "What to build for a checkpoint that doesn't say.",
        name="arch",
        metavar="ARCH",
        group=Group.MODEL,
        code="architecture",
    )
    anchors: Anchor | str | Path | Sequence[Anchor | str | Path] = option(
        (),
        "An anchor of what was forgotten; repeatable, oldest first.",
        required=True,
        main=True,
        many=True,
        path="file",
        group=Group.MODEL,
    )
    anchor_of_new: Anchor | str | Path | None = option(
        None, "The anchor of MODEL on DATA.", path="file", main=True, group=Group.MODEL, unless="made now"
    )
    samples: int | None = option(
        None, "Of DATA, for that anchor: a random subset of so many.", least=1, metavar="N", unless="all"
    )
    ratios: float | Sequence[float] = option(
        RATIOS,
        "What the old anchors weigh beside the new one, to try: a number, several (0.1,1,10), or LOW..HIGH:N; "
        "repeatable.",
        name="ratio",
        read=read_lambdas,
        many=True,
        metavar="X",
        main=True,
        unless="0.03,0.1,0.3,1,3,10",
    )
    retain: float | None = option(
        None, "Take the smallest ratio that keeps this share of the answers to the old anchors' probes.", metavar="X",
        main=True, unless="the knee",
    )  # fmt: skip
    polish: int | None = option(
        None,
        "Then train for so many steps on DATA, with old inputs rehearsed.",
        least=1,
        metavar="STEPS",
        main=True,
        unless="no training",
    )
    rehearse: Sequence[Any] = option(
        (),
        "What --polish rehearses: probes (those in the anchors), or data that is like the old; repeatable.",
        read=str,
        many=True,
        metavar="SOURCE",
        main=True,
        unless="probes",
    )
    lr: float | None = option(None, "Learning rate of --polish.", metavar="X", unless="that of finetune, 1e-4")
    eval_on: Sequence[Any] | Mapping[str, Any] | None = option(
        None,
        "A domain to score at each ratio, old ones too; repeatable.",
        name="eval",
        read=str,
        many=True,
        metavar="DATA",
        main=True,
        unless="that of --data",
    )


@dataclass(frozen=True, kw_only=True)
class MendOptions(Computing, Mending, Told):
    """What `mend` is asked for; where to compute is said in `Computing`.

    Each option has its help where it is declared; `Attributes` says what there is to know beside that.

    Attributes:
        model: The model that has forgotten: a module (which is left mended), a checkpoint file or model folder.
        anchors: Anchors of the old domains, or their files, oldest first. Their probes, if they have any, measure what
            is kept.
        anchor_of_new: If it is made now, it has the curvature of the newest old anchor's kind.
        ratios: One alone is taken as it is.
        polish: Steps of a fine-tune (`finetune`, with its defaults and no penalty) that starts from the mended weights.
            Of each probe that is rehearsed a quarter is not, and is all that is measured by, before and after.
        rehearse: As in `finetune`.
    """

    GROUP: ClassVar = Group.OUTPUT

    batch_size: int = option(500, "Samples at once.", least=1, group=Group.COMPUTING)
    plot: str | Path | None = option(
        None, "Draw what each keeps and has learned: a .png, .pdf or .svg.", path="file", main=True
    )
    output: str | Path | None = option(
        None, "The mended model, in the format of MODEL.", short="o", path="any", main=True, unless="named for MODEL"
    )
    overwrite: bool = option(False, "Replace the output and the plot if they exist.", filed=False)

    def check(self) -> None:
        """Check what no declaration says; raises UsageError naming the option, its value and what is expected."""
        for ratio in self._ratios:
            if not is_number(ratio) or ratio <= 0:
                raise UsageError(f"ratio is {ratio}; expected a finite number, more than 0")
        if not self._ratios:
            raise UsageError("there is no ratio to try")

    @property
    def _ratios(self) -> Sequence[float]:
        return self.ratios if isinstance(self.ratios, Sequence) else [self.ratios]

    @property
    def each_ratio(self) -> list[float]:
        """The ratios to try, each once, the smallest first."""
        return sorted(set(self._ratios))
