"""The options of `evaluate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from ewc_finetune.choices import DEVICES, LIKELIHOODS, LikelihoodName
from ewc_finetune.specs.options import option

if TYPE_CHECKING:
    from torch import nn

    from ewc_finetune.anchor.anchor import Anchor


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What `evaluate` is asked for.

    Attributes:
        model: A module (left as it was), a checkpoint file or model folder, `hf:org/name`, or an anchor file.
        data: A data spec, dataset or loader; or a list of specs or datasets; or a dict of such, by name. Specs mean
            their test split unless they say.
        architecture: What to build for a checkpoint that doesn't carry it.
        likelihood: How outputs become log p(y | x); unless given as in `consolidate`, and of an anchor its own.
        head: An anchor whose last layer takes the place of the model's, where that was fine-tuned with a new one.
        batch_size: Samples at once.
        trust_code: Whether code in the checkpoint may run (a pickled module).
        device: `auto`, `cpu`, `cuda` or `mps`.
        data_dir: Where downloaded data lies.
    """

    model: str | Path | nn.Module = option("")
    data: Any = option(None, "A domain to score on; repeatable.", required=True, many=True, metavar="DATA")
    architecture: str | None = option(
        None, "What to build for a checkpoint that doesn't say.", name="arch", metavar="ARCH"
    )
    likelihood: LikelihoodName | None = option(
        None,
        "How the model's outputs become log p(y | x).",
        choices=LIKELIHOODS,
        unless="as MODEL was trained, else what a model folder says, else categorical",
    )
    head: Anchor | str | Path | None = option(
        None,
        "Take the last layer from this anchor, where MODEL was fine-tuned with a new one.",
        path="file",
        metavar="ANCHOR",
    )
    batch_size: int = option(500, "Samples at once.", least=1)
    trust_code: bool = option(
        False, "Let code in the checkpoint run (a pickled module): only for files whose maker you know and trust."
    )
    device: str = option("auto", "Where to compute.", choices=DEVICES)
    data_dir: str | Path | None = option(
        None,
        "Where downloaded data lies or goes.",
        path="folder",
        unless="$EWC_FT_DATA, else ~/.cache/ewc-finetune/data",
    )


class EvaluateArgs(TypedDict, total=False):
    """The arguments of `evaluate` beside model and data, for type checkers; see `EvaluateOptions`."""

    architecture: str | None
    likelihood: LikelihoodName | None
    head: Anchor | str | Path | None
    batch_size: int
    trust_code: bool
    device: str
    data_dir: str | Path | None
