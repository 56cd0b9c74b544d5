"""The options of `evaluate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ewc_finetune.choices import LIKELIHOODS, METRICS, LikelihoodName, MetricName
from ewc_finetune.specs.command_options import Computing, Told
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import option

if TYPE_CHECKING:
    from torch import nn

    from ewc_finetune.anchor.anchor import Anchor


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """What is measured on each domain beside loss and accuracy.

    Attributes:
        metrics: Of regressions (gaussian) `mae`, `rmse` and `r2`, the mean over the outputs; of classes and answers
            `f1`, `balanced-accuracy` and `auc` (of a class against the others), means over classes or outputs. They
            take the package torchmetrics, `pip install 'ewc-finetune[metrics]'`. None where the samples don't define
            it.
    """

    GROUP: ClassVar = Group.SCORES

    metrics: Sequence[MetricName] = option(
        (),
        "A figure to score by beside loss and accuracy; repeatable.",
        name="metric",
        many=True,
        choices=tuple(METRICS),
    )


@dataclass(frozen=True)
class Scoring:
    """What is scored, and on what; see `EvaluateOptions`."""

    GROUP: ClassVar = Group.MODEL

    model: str | Path | nn.Module = option()
    data: Any = option(help="A domain to score on; repeatable.", required=True, main=True, many=True, metavar="DATA")
    _: KW_ONLY
    architecture: str | None = option(
        None, "What to build for a checkpoint that doesn't say.", name="arch", metavar="ARCH", main=True
    )
    likelihood: LikelihoodName | None = option(
        None,
        "How the model's outputs become log p(y | x).",
        choices=LIKELIHOODS,
        wider=True,
        main=True,
        unless="as MODEL was trained, else what a model folder says, else gaussian for real numbers, else categorical",
    )
    head: Anchor | str | Path | None = option(
        None,
        "Take the last layer from this anchor, where MODEL was fine-tuned with a new one.",
        path="file",
        metavar="ANCHOR",
        main=True,
    )
    batch_size: int = option(500, "Samples at once.", least=1, main=True, group=Group.COMPUTING)


@dataclass(frozen=True)
class EvaluateOptions(Computing, Measuring, Scoring, Told):
    """What `evaluate` is asked for; where to compute is said in `Computing`.

    Each option has its help where it is declared; `Attributes` says what there is to know beside that.

    Attributes:
        model: A module (left as it was), a checkpoint file or model folder, `hf:org/name`, or an anchor file.
        data: A data spec, dataset or loader; or a list of specs or datasets; or a dict of such, by name. Specs mean
            their test split unless they say.
        likelihood: How outputs become log p(y | x); unless given as in `consolidate`, and of an anchor its own.
    """
