"""The words that an option may take, where the command line finds them without importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from ewc_finetune.errors import UsageError, suggest

Estimator = Literal["auto", "exact", "sampled", "empirical", "predicted", "batched"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
# The estimators that an anchor may name: those that `auto` chooses from, `none` for a curvature that is no Fisher, and
# `mixed` for one that was merged of several.
KNOWN_ESTIMATORS = (*(name for name in ESTIMATORS if name != "auto"), "none", "mixed")

LikelihoodName = Literal["categorical", "per-token", "bernoulli", "gaussian"]
LIKELIHOODS: tuple[LikelihoodName, ...] = get_args(LikelihoodName)

OptimizerName = Literal["sgd", "adam", "adamw"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)

PenaltyForm = Literal["gradient", "proximal"]
PENALTY_FORMS: tuple[PenaltyForm, ...] = get_args(PenaltyForm)

Lineage = Literal["all", "latest"]
LINEAGES: tuple[Lineage, ...] = get_args(Lineage)

Head = Literal["shared", "new", "expand"]
HEADS: tuple[Head, ...] = get_args(Head)

# What a merge does with heads; one that was replaced (`new`) is left out anyway.
MergedHead = Literal["shared", "expand"]
MERGED_HEADS: tuple[MergedHead, ...] = get_args(MergedHead)

Curvature = Literal["diagonal", "kfac", "identity"]
CURVATURES: tuple[Curvature, ...] = get_args(Curvature)

KfacForm = Literal["expand", "reduce"]
KFAC_FORMS: tuple[KfacForm, ...] = get_args(KfacForm)

KfacSum = Literal["factors", "nearest"]
KFAC_SUMS: tuple[KfacSum, ...] = get_args(KfacSum)

KfacDtype = Literal["float16", "float32"]
KFAC_DTYPES: tuple[KfacDtype, ...] = get_args(KfacDtype)

CurvatureDtype = Literal["float32", "bfloat16", "float16"]
CURVATURE_DTYPES: tuple[CurvatureDtype, ...] = get_args(CurvatureDtype)

AnchorWeights = Literal["stored", "reference"]
ANCHOR_WEIGHTS: tuple[AnchorWeights, ...] = get_args(AnchorWeights)

NormStats = Literal["frozen", "update"]
NORM_STATS: tuple[NormStats, ...] = get_args(NormStats)

Decay = Literal["constant", "cosine", "linear"]
DECAYS: tuple[Decay, ...] = get_args(Decay)

Amp = Literal["bf16", "fp16"]
AMPS: tuple[Amp, ...] = get_args(Amp)

MetricName = Literal["mae", "rmse", "r2", "f1", "balanced-accuracy", "auc"]
# The likelihoods that each metric suits.
METRICS: dict[MetricName, tuple[LikelihoodName, ...]] = {
    "mae": ("gaussian",),
    "rmse": ("gaussian",),
    "r2": ("gaussian",),
    "f1": ("categorical", "per-token", "bernoulli"),
    "balanced-accuracy": ("categorical", "per-token", "bernoulli"),
    "auc": ("categorical", "per-token", "bernoulli"),
}

# Which state a run ends with.
Keep = Literal["last", "best"]
KEEPS: tuple[Keep, ...] = get_args(Keep)

DeviceName = Literal["auto", "cpu", "cuda", "mps"]
DEVICES: tuple[DeviceName, ...] = get_args(DeviceName)

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a word that is not among the choices.

    Raises:
        UsageError: naming the option and the nearest choice.
    """
    if value not in choices:
        raise UsageError(f"{option} is {value!r}. {suggest(str(value), choices)}")


# Options by the names that they had once, which the command line and run folders still take.
OLD_WORDS = {"trust-pickle": "trust-code"}


DEFAULT_LAMBDA = {"diagonal": 100.0, "identity": 100.0, "kfac": 10.0}
# Where old inputs are rehearsed, the penalty has less to do: lambda is this part of it.
BESIDE_REHEARSAL = 0.1
