"""The options of `evaluate`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ewc_finetune.choices import LIKELIHOODS, LikelihoodName
from ewc_finetune.specs.command_options import Computing, Told
from ewc_finetune.specs.options import option

if TYPE_CHECKING:
    from torch import nn

    from ewc_finetune.anchor.anchor import Anchor


@dataclass(frozen=True)
class Scoring:
    """What is scored, and on what; see `EvaluateOptions`."""

    model: str | Path | nn.Module = option()
    data: Any = option(help="A domain to score on; repeatable.", required=True, many=True, metavar="DATA")
    _: KW_ONLY
    architecture: str | None = option(
        None, "What to build for a checkpoint that doesn't say.", name="arch", metavar="ARCH"
    )
    likelihood: LikelihoodName | None = option(
        None,
        "How the model's outputs become log p(y | x).",
        choices=LIKELIHOODS,
        wider=True,
        unless="as MODEL was trained, else what a model folder says, else gaussian for real numbers, else categorical",
    )
    head: Anchor | str | Path | None = option(
        None,
        "Take the last layer from this anchor, where MODEL was fine-tuned with a new one.",
        path="file",
        metavar="ANCHOR",
    )
    batch_size: int = option(500, "Samples at once.", least=1)


@dataclass(frozen=True)
class EvaluateOptions(Computing, Scoring, Told):
    """What `evaluate` is asked for; where to compute is said in `Computing`.

    Each option has its help where it is declared; `Attributes` says what there is to know beside that.

    Attributes:
        model: A module (left as it was), a checkpoint file or model folder, `hf:org/name`, or an anchor file.
        data: A data spec, dataset or loader; or a list of specs or datasets; or a dict of such, by name. Specs mean
            their test split unless they say.
        likelihood: How outputs become log p(y | x); unless given as in `consolidate`, and of an anchor its own.
    """
