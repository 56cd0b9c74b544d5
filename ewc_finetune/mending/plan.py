"""What a mending will do: everything opened and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.compatibility import remarks
from ewc_finetune.anchor.heads import of_one_head
from ewc_finetune.checkpoint.open import LoadedModel, open_model
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.sources import resolve_domain, resolve_domains
from ewc_finetune.errors import AnchorMismatchError, Mistakes, UsageError
from ewc_finetune.evaluation.presenting import informed
from ewc_finetune.finetuning.aims import check_retain
from ewc_finetune.finetuning.plan import Plan as FinetunePlan
from ewc_finetune.mending.options import MendOptions
from ewc_finetune.mending.polish import has_labels, measured, plan_polish
from ewc_finetune.modules.devices import choose_device
from ewc_finetune.penalty.penalty import check_fit
from ewc_finetune.reporting.plots import figure_format
from ewc_finetune.runs.idle import MEND, say_idle
from ewc_finetune.specs.options import check_declared
from ewc_finetune.storage.atomic import check_distinct, check_output


@dataclass(frozen=True)
class MendPlan:
    """What a mending will do.

    Attributes:
        options: The options that the command was given.
        loaded: The model.
        old: The anchors of the old domains, oldest first.
        new: The anchor of the new one; None where it is to be made.
        domain: The new domain.
        scored: The domains to score, of which the first is the new one, if it can be scored.
        has_new: Whether it is.
        device: The device to compute on.
        measured: The old anchors with what is measured of their probes: all, but for what polish rehearses.
        polish: The fine-tune that is to follow; None where none is.
        output: The checkpoint to write.
    """

    options: MendOptions
    loaded: LoadedModel
    old: list[Anchor]
    new: Anchor | None
    domain: Domain
    scored: list[Domain]
    has_new: bool
    device: torch.device
    measured: list[Anchor]
    polish: FinetunePlan | None
    output: Path | None


def plan(options: MendOptions) -> MendPlan:
    """Open and check everything that a mending takes.

    Raises:
        EwcError: naming what is wrong with the model, an anchor, the data, an option or a file.
    """
    check_declared(options)
    mistakes, progress, old = Mistakes(), options.progress, list[Anchor]()
    given = [options.anchors] if isinstance(options.anchors, (Anchor, str, Path)) else list(options.anchors)
    with mistakes.noted():
        options.check()
        if not given:
            raise UsageError("there is nothing to mend by; name the anchors of what was forgotten with --anchors")
    output = None if options.output is None else Path(options.output)
    with mistakes.noted():
        _check_files(options, output, given)
    for item in given:
        with mistakes.noted():
            old.append(item if isinstance(item, Anchor) else Anchor.open(item))
    new = options.anchor_of_new
    with mistakes.noted():
        new = new if new is None or isinstance(new, Anchor) else Anchor.open(new)
    with mistakes.noted():
        device = choose_device(options.device)
    with mistakes.noted():
        domain = resolve_domain(options.data, "train", options.data_dir)
        scored, has_new = _scored(options, domain)
    with mistakes.noted():
        loaded = open_model(options.model, options.architecture, trust_code=options.trust_code)
    mistakes.check()
    loaded = informed(loaded, old)
    named = dict(loaded.model.named_parameters())
    for anchor in [*of_one_head(old, loaded.metadata.head), *([new] if isinstance(new, Anchor) else [])]:
        check_fit(named, anchor, grown="A model whose head was expanded cannot be mended")
    _check_forgot(loaded, old, domain.name)
    alone = len(options.each_ratio) == 1
    if not alone and not any(anchor.probes for anchor in old) and len(scored) <= has_new:
        raise UsageError(
            "nothing tells what is kept: the old anchors have no probes, and no old domain is named with --eval. Name "
            "one, or one --ratio alone"
        )
    check_retain(options.retain, old)
    _check_kinds([*old, *([new] if isinstance(new, Anchor) else [])])
    if isinstance(new, Anchor):
        _check_made_from(new, named)
    for remark in [*loaded.remarks, *(r for anchor in old for r in anchor.remarks), *remarks(old, "all")]:
        progress.note(remark)
    say_idle(options, MEND, {}, progress)
    known = new if isinstance(new, Anchor) else None
    polish = plan_polish(options, loaded, old, domain)
    learned = has_new and has_labels(scored[0], loaded)
    if not alone and options.retain is None and not learned:
        raise UsageError(
            f"nothing tells what was learned of {domain.name}: it has no test split, or no labels. Name it with "
            "--eval too if it has labels, or a share to keep with --retain, or one --ratio alone"
        )
    left = measured(options, old)
    had, others = (sum(probe.samples for one in held for probe in one.probes) for held in (old, left))
    if others < had:
        progress.note(f"what is kept is measured by {others:,} of {had:,} inputs in probes: the others are rehearsed")
    return MendPlan(options, loaded, old, known, domain, scored, has_new, device, left, polish, output)


def _check_files(options: MendOptions, output: Path | None, anchors: Sequence[Anchor | str | Path]) -> None:
    """Check that model and figure can be written, and take nothing away."""
    if options.plot is not None:
        figure_format(Path(options.plot))
    check_distinct({"model": output, "plot": options.plot})
    inputs = [options.model, *anchors, options.anchor_of_new]
    for path in (output, options.plot):
        if path is not None:
            place = Path(path)
            check_output(place, options.overwrite, inputs, folder=place.is_dir(), note=options.progress.note)


def _check_kinds(anchors: list[Anchor]) -> None:
    """Check that all have one kind of curvature: a layer has no centre between a block and a diagonal."""
    kfac, others = ([a.label for a in anchors if (a.provenance.curvature == "kfac") == is_kfac] for is_kfac in (1, 0))
    if kfac and others:
        raise AnchorMismatchError(
            f"{', '.join(kfac)} has K-FAC blocks and {', '.join(others)} has a diagonal, and no weights lie between "
            "the two; mend with anchors of one kind"
        )


def _check_made_from(new: Anchor, named: Mapping[str, Tensor]) -> None:
    """Check that an anchor has the model's weights, as far as its own precision tells them."""
    other = _differing(new.weights, named)
    if other is not None:
        raise AnchorMismatchError(
            f"{new.label} was not made from the model: its {other} is another. Leave --anchor-of-new out, or name the "
            "anchor that consolidate made from this very model"
        )


def _check_forgot(loaded: LoadedModel, old: Sequence[Anchor], data: str) -> None:
    """Refuse a model that has the very weights and buffers of all old anchors: it has learned nothing since."""
    state = loaded.model.state_dict()
    if not any(_differing(one.weights, state) or _differing(one.buffers, state) for one in old):
        raise AnchorMismatchError(
            f"{loaded.label} has the very weights of {' and '.join(one.label for one in old)}: nothing is forgotten, "
            f"and there is nothing to mend. Name the model that was fine-tuned on {data} since"
        )


def _differing(kept: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str | None:
    """Return the first tensor that an anchor has otherwise than a model, as far as its own precision tells them."""
    for name in (name for name in kept if name in state):
        one, other = kept[name], state[name].detach().cpu()
        narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        if not torch.equal(one.to(narrow), other.to(narrow)):
            return name
    return None


def _scored(options: MendOptions, train: Domain) -> tuple[list[Domain], bool]:
    """Return the domains to score, the new one first where it is scored; and whether it is."""
    data = options.data
    others = [] if options.eval_on is None else resolve_domains(options.eval_on, "test", options.data_dir)
    if isinstance(data, str) and train.split is not None:
        new = [resolve_domain(data, "test", options.data_dir)]
    else:
        named = isinstance(data, str)
        new = [other for other in others if other.samples is train.samples or (named and other.name == train.name)]
    names = {one.name for one in new}
    return new + [other for other in others if other.name not in names], bool(new)
