"""The options of `merge`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ewc_finetune.choices import (
    KFAC_SUMS,
    LINEAGES,
    MERGED_HEADS,
    KfacSum,
    Lineage,
    MergedHead,
)
from ewc_finetune.curvature.options import Storing
from ewc_finetune.specs.command_options import Told
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import option

if TYPE_CHECKING:
    from ewc_finetune.anchor.anchor import Anchor


@dataclass(frozen=True)
class Summing:
    """How anchors become one; see `MergeOptions`."""

    GROUP: ClassVar = Group.PENALTY

    anchors: Anchor | str | Path | Sequence[Anchor | str | Path] = option()
    _: KW_ONLY
    output: str | Path | None = option(
        None, "The merged anchor.", short="o", path="file", required=True, main=True, group=Group.OUTPUT
    )
    lambdas: float | Sequence[float] = option(
        1.0,
        "Strength relative to the others: once for all anchors, or once for each.",
        name="lambda",
        many=True,
        main=True,
        unless="1",
    )
    online: bool = option(False, "The running form: older curvature fades, and the newest weights count.", main=True)
    gamma: float = option(1.0, "What stays of older curvature at each anchor; online.", main=True)
    lineage: Lineage = option(
        "all",
        "Of an anchor that had a part in a newer one: its own weights count, or the newest it had a part in.",
        choices=LINEAGES,
        main=True,
    )
    head: MergedHead = option(
        "shared",
        "expand: the last layer got more outputs from one to the next, and older anchors hold the first ones.",
        choices=MERGED_HEADS,
    )
    kfac_sum: KfacSum = option(
        "factors",
        "What stands for a sum of K-FAC blocks: the block of the weighted sums of their factors, or the nearest one.",
        choices=KFAC_SUMS,
    )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(Storing, Summing, Told):
    """What `merge` is asked for.

    Each option has its help where it is declared; `Attributes` says what there is to know beside that.

    Attributes:
        anchors: Anchors or their files, oldest first; a merged one is an anchor like any other.
        output: File to save the anchor to; not saved unless given.
        lambdas: One for all or one for each, relative to each other: the merged anchor gets a lambda when it is used.
        online: Take the running form instead: `F <- gamma F + lambda_k F_k` from the oldest to the newest, with the
            newest one's weights for the centre (Schwarz et al. 2018, "Progress & compress").
        gamma: How much of the older curvature stays at each newer anchor, 0 to 1; `online` alone.
        lineage: See `sum_quadratics`; offline alone.
        head: `expand` for anchors of which the last layer got more outputs from one to the next: those of fewer
            outputs hold the first ones. What one anchor alone knows of a layer that was replaced is left out anyway.
        kfac_sum: The block for a sum of blocks: that of weighted sums of the `factors`, which keeps the trace, or the
            `nearest` by the Frobenius norm, which may let a small anchor go (see `kronecker_sum.sum_of`).
        kfac_rank: What is kept of its factors, as in `consolidate`, whatever was kept of the parents'.
        probes: Whether to keep the parents' probes, the samples of data in them; those of a parent with another last
            layer than the newest are left out anyway.
        checkpoint: File to write one model for all of them to (`merged_model`), in the format of the newest parent's
            checkpoint; with `online` that is the newest.
    """

    GROUP: ClassVar = Group.OUTPUT

    probes: bool = option(
        True,
        "Keep the samples of data that are in the anchors; without them, an anchor may be shared with anybody.",
        main=True,
    )
    name: str | None = option(None, "What to call the merged anchor.", main=True, unless="the names, joined by +")
    checkpoint: str | Path | None = option(
        None, "Write one model for all of them too: the mean of their weights, by the Fisher.", path="file", main=True
    )
    architecture: str | None = option(
        None, "What to build for that model, if the newest anchor doesn't say.", name="arch", metavar="ARCH"
    )
    overwrite: bool = option(False, "Replace the output and the checkpoint if they exist.")
