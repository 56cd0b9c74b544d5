"""The options of `consolidate`: what curvature is taken, of what, and how it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ewc_finetune.choices import (
    ANCHOR_WEIGHTS,
    CURVATURE_DTYPES,
    CURVATURES,
    ESTIMATORS,
    KFAC_DTYPES,
    KFAC_FORMS,
    LIKELIHOODS,
    AnchorWeights,
    Curvature,
    CurvatureDtype,
    Estimator,
    KfacDtype,
    KfacForm,
    LikelihoodName,
)
from ewc_finetune.errors import UsageError
from ewc_finetune.specs.command_options import Computing, Told
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import check_declared, option

if TYPE_CHECKING:
    from torch import nn

    from ewc_finetune.curvature.kronecker_factors import Rank

DEFAULT_RTOL = 0.02


def _samples(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{text!r} is neither auto nor a number of samples, at least 1")
    return int(text)


def _rank(text: str) -> float | str:
    if text in ("auto", "full"):
        return text
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise UsageError(f"{text!r} is neither auto, full, a share nor a whole number") from None


@dataclass(frozen=True, kw_only=True)
class Storing:
    """How curvature is stored; see `ConsolidateOptions`."""

    GROUP: ClassVar = Group.ANCHOR_SIZE

    kfac_rank: Rank = option(
        "auto",
        "Eigenvectors to keep of each factor: those that hold a share of the trace (below 1), or so many; auto is "
        "0.99, full keeps all.",
        read=_rank,
        metavar="X",
    )
    kfac_dtype: KfacDtype = option(
        "float16",
        "Precision in which kept eigenvectors are stored; factors that are kept whole are in float32.",
        choices=KFAC_DTYPES,
    )
    curvature_dtype: CurvatureDtype = option(
        "float32",
        "Precision in which the diagonal is stored; what half precision costs is said.",
        choices=CURVATURE_DTYPES,
    )


@dataclass(frozen=True)
class Consolidating:
    """What curvature is taken, of what; see `ConsolidateOptions`."""

    GROUP: ClassVar = Group.MODEL

    model: str | Path | nn.Module | None = option()
    data: Any = option(
        help="The data that the model was trained on; repeatable, each with its ?weight=.",
        required=True,
        main=True,
        many=True,
        metavar="DATA",
    )
    _: KW_ONLY
    architecture: str | None = option(
        None,
        "What to build for a checkpoint that doesn't say: package.module:Class, mlp, cnn or torchvision:NAME, with "
        "keyword arguments behind a question mark.",
        name="arch",
        metavar="ARCH",
        main=True,
    )
    output: str | Path | None = option(
        None,
        "The anchor.",
        short="o",
        path="file",
        main=True,
        group=Group.OUTPUT,
        unless="MODEL.anchor.safetensors; of an anchor named for the data too",
    )
    overwrite: bool = option(False, "Replace the output if it exists.", group=Group.OUTPUT)
    curvature: Curvature = option(
        "diagonal",
        "The diagonal of the Fisher; Kronecker-factored blocks for linear layers and convolutions, and the diagonal "
        "for the rest (kfac); or the identity: every parameter counts alike (plain L2).",
        choices=CURVATURES,
        main=True,
        group=Group.CURVATURE,
    )
    kfac_form: KfacForm = option(
        "expand",
        "What kfac does with several positions of a sample: take each for a sample (expand), or put them together.",
        choices=KFAC_FORMS,
        group=Group.CURVATURE,
    )


@dataclass(frozen=True, kw_only=True)
class Estimating:
    """How curvature is estimated; see `ConsolidateOptions`."""

    GROUP: ClassVar = Group.CURVATURE

    anchor_weights: AnchorWeights = option(
        "stored",
        "reference: leave out what a model on the Hub has anyway, at a commit, and have it fetched by its digest.",
        choices=ANCHOR_WEIGHTS,
        group=Group.ANCHOR_SIZE,
    )
    name: str | None = option(
        None,
        "What to call the domain.",
        main=True,
        group=Group.OUTPUT,
        unless="the kind of data, or the file or folder that it is in",
    )
    estimator: Estimator = option(
        "auto",
        "Whose labels the Fisher uses: the model's own in expectation (exact), draws of them (sampled), its best guess "
        "(predicted), the data's (empirical); batched squares the mean of a batch, which is no Fisher but what "
        "published code does. auto is exact for up to 32 outputs, sampled beyond.",
        choices=ESTIMATORS,
        main=True,
    )
    draws: int = option(1, "Labels drawn for each sample.", least=1)
    samples: int | Literal["auto"] | None = option(
        None,
        "Use a random subset of N samples; auto goes on until the standard error of the Fisher's trace is --rtol of "
        "it.",
        read=_samples,
        metavar="N|auto",
        main=True,
        unless="all",
    )
    rtol: float = option(DEFAULT_RTOL, "Where --samples auto stops.", metavar="X")
    rules: bool = option(True, "Use layer rules, where there are any.")
    batch_size: int = option(200, "Samples at once.", least=1, group=Group.COMPUTING)
    likelihood: LikelihoodName | None = option(
        None,
        "How the model's outputs become log p(y | x).",
        choices=LIKELIHOODS,
        wider=True,
        main=True,
        unless="as MODEL was trained, else what a model folder says, else gaussian for real numbers, else categorical",
    )
    exclude: Sequence[str] = option((), "Leave these parameters free; repeatable.", many=True, metavar="GLOB")
    probe: int = option(
        0,
        "Keep N inputs as they are in the anchor, with the model's answers: finetune then says what it keeps of them. "
        "Whoever has the anchor has these inputs.",
        least=0,
        metavar="N",
        main=True,
        group=Group.OUTPUT,
        unless="none",
    )
    seed: int = option(0, "Of the subset, the sampled labels and the probe.", least=0, most=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class ConsolidateOptions(Computing, Estimating, Storing, Consolidating, Told):
    """What `consolidate` is asked for; where to compute is said in `Computing`.

    Each option has its help where it is declared; `Attributes` says what there is to know beside that.

    Attributes:
        model: A module, a checkpoint file or model folder, or `hf:org/name`.
        data: The data it was trained on: a data spec (its train split unless it says), dataset or loader. It needs no
            labels, but for the `empirical` and `batched` estimators.
        output: File to save the anchor to; not saved unless given.
        kfac_form: What `kfac` does with several positions of a sample (tokens, pixels): `expand` takes each for a
            sample of its own, `reduce` puts them together first.
        kfac_rank: Keep the leading eigenvectors of each factor that hold this share of its trace (below 1), or so many,
            and the mean for all others. `auto` is 0.99, `full` keeps the factors whole; so does a share that takes half
            of the eigenvectors or more, for which the factor itself is smaller.
        curvature_dtype: In which the diagonal is stored; in half precision with a scale to each tensor, and what that
            costs is recorded (`half_precision.Storage`).
        anchor_weights: `reference` leaves the weights out that a model on the Hub has as they are, at its commit, in
            safetensors: whoever uses the anchor fetches them from there, by their digest.
        samples: Use a random subset of so many (the first so many of a loader's); all unless given. `auto` goes on, in
            random order, until the standard error of the trace is `rtol` of it, and for 200 samples at least.
        likelihood: How outputs become log p(y | x); unless given the one that `finetune` trained the checkpoint with,
            else what the model's task takes (per-token for language models of transformers, bernoulli for several
            labels), else gaussian where labels are known to be real numbers, else categorical.
        probe: Keep so many inputs as they are in the anchor, with the model's answers to them, by which `finetune` says
            what is kept of them while it trains. Whoever has the anchor has them; none unless given.
        lineage: Anchors that a module was already trained under (`Finetuned.lineage`); a file carries its own.
        head: The head of a module that was given a new last layer (`Finetuned.head`); a file carries its own.
    """

    lineage: Sequence[dict[str, Any]] | None = option(None)
    head: dict[str, Any] | None = option(None)

    def check(self) -> None:
        """Refuse values that can never be right, and options that do not go together.

        Raises:
            UsageError: naming the option, its value and what is expected.
        """
        if type(self.probe) is not int or self.probe < 0:
            raise UsageError(f"probe is {self.probe}; expected a whole number of inputs to keep, 0 for none")
        check_declared(self)
        if self.curvature != "kfac" and (self.kfac_form, self.kfac_rank, self.kfac_dtype) != (
            "expand",
            "auto",
            "float16",
        ):
            raise UsageError(
                f"kfac form, rank and dtype belong to the curvature kfac, and it is {self.curvature}; add --curvature "
                "kfac (curvature='kfac')"
            )
        self._check_sampling()

    def _check_sampling(self) -> None:
        samples, draws, estimator = self.samples, self.draws, self.estimator
        if samples is not None and samples != "auto" and (type(samples) is not int or samples < 1):
            raise UsageError(f"samples is {samples}; expected auto or a whole number, at least 1")
        check_sampling(estimator, draws, samples == "auto")
        if not 0 < self.rtol < 1:
            raise UsageError(f"rtol is {self.rtol:g}; expected more than 0 and less than 1")
        if self.curvature == "identity" and (samples is not None or draws != 1 or estimator != "auto"):
            raise UsageError(
                "the identity is of no samples: estimator, draws and samples belong to the diagonal curvature"
            )


def check_sampling(estimator: Estimator, draws: int, stops: bool) -> None:
    """Refuse draws, and a standard error at which the pass stops, of an estimator that has none.

    Raises:
        UsageError: saying what to do instead.
    """
    if draws > 1 and estimator not in ("sampled", "auto"):
        raise UsageError(f"draws is {draws}, and the {estimator} estimator draws nothing; use sampled")
    if stops and estimator == "batched":
        raise UsageError("the batched estimator has no standard error to stop at; give a number of samples")
