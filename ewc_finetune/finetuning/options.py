"""The options of a fine-tune, each declared here and nowhere else (those that say how to train in `schedule`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ewc_finetune.choices import (
    HEADS,
    LIKELIHOODS,
    LINEAGES,
    PENALTY_FORMS,
    Head,
    LikelihoodName,
    Lineage,
    PenaltyForm,
)
from ewc_finetune.errors import UsageError
from ewc_finetune.evaluation.options import Measuring
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.rehearsal.options import Rehearsing
from ewc_finetune.specs.command_options import Computing, Told
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import option

if TYPE_CHECKING:
    from torch import nn

    from ewc_finetune.anchor.anchor import Anchor

# The share of the plain run's accuracy that may be lost.
DEFAULT_TOLERANCE = 0.02


def _strength(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is neither auto nor a number") from None


@dataclass(frozen=True)
class Starting:
    """What is adapted, and to what; see `FinetuneOptions`."""

    GROUP: ClassVar = Group.MODEL

    model: str | Path | nn.Module | None = option(
        help="Start from this checkpoint, or from fresh weights of an architecture (mlp, cnn, torchvision:NAME, "
        "timm:NAME, package.module:Class).",
        read=str,
        metavar="MODEL",
        main=True,
        unless="the newest anchor's weights",
        code="architecture",
    )
    data: Any = option(
        help="The new domain; repeatable: others are mixed in, each with its ?weight=.",
        required=True,
        main=True,
        many=True,
        metavar="DATA",
        code="data",
    )
    _: KW_ONLY
    architecture: str | None = option(
        None, "What to build for a checkpoint that doesn't say.", name="arch", metavar="ARCH", code="architecture"
    )


@dataclass(frozen=True, kw_only=True)
class Held:
    """How the model is held; see `FinetuneOptions`."""

    GROUP: ClassVar = Group.PENALTY

    anchors: Anchor | str | Path | Sequence[Anchor | str | Path] = option(
        (),
        "An anchor to be held by; repeatable, oldest first. Without any it is plain training.",
        many=True,
        path="file",
        metavar="FILE",
        main=True,
        varied=True,
    )
    lambdas: float | Sequence[float] | Literal["auto"] | None = option(
        None,
        "Strength of the penalty: once for all anchors, or once for each; auto looks for the largest within "
        "--tolerance, in five short runs.",
        name="lambda",
        read=_strength,
        many=True,
        alone="auto",
        main=True,
        metavar="X|auto",
        unless="100; 10 for anchors of K-FAC; a tenth beside --rehearse",
        varied=True,
    )
    tolerance: float = option(
        DEFAULT_TOLERANCE,
        "Of --lambda auto: the share of plain fine-tuning's accuracy on the new domain that may be lost.",
        metavar="X",
    )
    penalty_form: PenaltyForm = option(
        "gradient",
        "Add the penalty's gradient to the loss's, or take its exact implicit step after each of the optimizer's, "
        "which is stable at any lambda.",
        choices=PENALTY_FORMS,
        varied=True,
        setting="method",
    )


@dataclass(frozen=True, kw_only=True)
class Adapting(Measuring):
    """What else a run and the runs of a sweep have; see `FinetuneOptions`."""

    GROUP: ClassVar = Group.TRAINING

    lineage: Lineage = option(
        "all",
        "Of an anchor that had a part in a newer one: pull to its own weights all the same, or to the newest it had a "
        "part in.",
        choices=LINEAGES,
        group=Group.PENALTY,
        setting="method",
    )
    head: Head = option(
        "shared",
        "Share the last layer with the old domains; take a new one for the new domain's classes; or expand it by "
        "outputs for new labels.",
        choices=HEADS,
        main=True,
        group=Group.MODEL,
        setting="method",
    )
    freeze: Sequence[str] = option((), "Parameters not to train (features.*); repeatable.", many=True, metavar="GLOB")
    likelihood: LikelihoodName | None = option(
        None,
        "How outputs become the loss.",
        choices=LIKELIHOODS,
        wider=True,
        unless="the anchors', else as the model was trained, else what a model folder says, else gaussian for real "
        "numbers, else categorical",
        setting="method",
    )
    eval_on: Sequence[Any] | Mapping[str, Any] | None = option(
        None,
        "A domain to score before training and at each evaluation; repeatable.",
        name="eval",
        read=str,
        many=True,
        metavar="DATA",
        main=True,
        group=Group.SCORES,
        unless="the new one",
        code="data",
    )
    eval_new: Any = option(
        None,
        "What to score as the new domain, where its test split is other data.",
        read=str,
        metavar="DATA",
        group=Group.SCORES,
        unless="of what is scored, that which is the same data as the new domain",
        code="data",
    )
    select_on: Sequence[Any] = option(
        (),
        "A domain whose score says which state, or which lambda of auto, is the best; repeatable.",
        read=str,
        many=True,
        metavar="DATA",
        group=Group.SCORES,
        unless="the new one",
        code="data",
    )
    retain: float | None = option(
        None,
        "The share of the answers to the anchors' probes that must stay as they were: what lambda auto looks for; a "
        "run that falls below it is stopped.",
        metavar="X",
        group=Group.PENALTY,
        sound=True,
    )
    tensorboard: bool = option(
        False, "Write the log for TensorBoard too, into the run folder.", group=Group.SCORES, sound=True
    )


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(Computing, Adapting, Schedule, Rehearsing, Held, Starting, Told):
    """What `finetune` is asked for; where to compute is said in `Computing`.

    Each option has its help where it is declared; `Attributes` says what there is to know beside that.

    Attributes:
        data: The new domain: a data spec (its train split unless it says), dataset or loader. Or several, a list or a
            dict by name: the first is the new domain, and others are mixed into it, old data say. Of each an epoch has
            as many samples as `weight=` in its spec says (0.1: a tenth of them, drawn anew), all unless it does.
        model: A module (trained in place, left in eval mode without gradients), a checkpoint file or model folder,
            `hf:org/name`, `hf://org/name/file`, or an architecture such as `mlp` (fresh weights). None starts from the
            weights of the last anchor.
        anchors: Anchors, their files, or their addresses on the Hub (`hf://org/name`), oldest first.
        lambdas: Strength of the penalty, one for all or one for each anchor; unless given 10 for those of K-FAC and 100
            for others, and a tenth of that where old inputs are rehearsed. `auto` looks for the largest that costs the
            new domain no more than `tolerance`, in five runs of half as many epochs, on samples that are held out of
            it; see `search_lambda`.
        head: Whose the outputs are: `shared` by all domains; `new` replaces the last layer by a fresh one for the new
            domain's classes (the old one stays in the anchor, see `evaluate`); `expand` adds outputs for labels that
            the model has none for, and holds the old ones.
        eval_on: Domains to score before training and at each evaluation, a list of specs or datasets or a dict of such
            by name (specs mean their test split unless they say); the test split of `data` unless given, of each that
            has one.
        eval_new: The domain to score as the new one, beside those of `eval_on` or among them: a spec (its test split
            unless it says) or dataset. Unless given it is that of them which is the same data as the new domain.
        select_on: Of these, or beside them, the domains whose mean score, with the new one's if it is scored, says
            which state is the best. `auto` then looks for the lambda with the best mean score over them and what is
            held out of the new domain.
        retain: The share of the answers to the anchors' probes (`consolidate --probe`) that must stay as they were:
            `auto` looks for the smallest lambda that keeps it, in up to seven short runs, and goes no further if none
            does. A run that has less of them, and no more for three evaluations, is stopped; one that ends with less
            is refused.
        rehearse: What goes through the model beside the new data, to keep its old answers: `probes`, data specs,
            datasets or loaders. Of each probe a quarter is not rehearsed, and is what `retain` and the log go by.
        output: Checkpoint to write, in the format of the one that the run starts from (fresh weights and modules
            as a state dict); beside it goes the run folder, of the same name with `.run`.
        resume: Folder of a run that was stopped, to go on with; everything else as it was then, but for options that
            only say how or how long.

    Raises:
        UsageError: if an option of training has a value that it cannot have.
    """

    GROUP: ClassVar = Group.OUTPUT

    output: str | Path | None = option(
        None,
        "The new checkpoint; the run folder goes beside it.",
        short="o",
        path="any",
        main=True,
        unless="named for the anchor and the data",
    )
    overwrite: bool = option(False, "Replace the output and its run folder if they exist.", filed=False, sound=True)
    resume: str | Path | None = option(None, recorded=False)
    seed: int = option(
        0,
        "Of fresh weights, sample order and dropout.",
        least=0,
        most=2**63 - 1,
        group=Group.TRAINING,
        varied=True,
        setting="training",
    )
