"""`consolidate`: from a trained checkpoint and its data to an anchor."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ewc_finetune._version import __version__
from ewc_finetune.anchor import describe
from ewc_finetune.anchor.anchor import Anchor, validate
from ewc_finetune.anchor.half_precision import rounded
from ewc_finetune.anchor.probe_tensors import Probe
from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.checkpoint.architecture import as_option, builds_by_itself
from ewc_finetune.checkpoint.checkpoint import FROZEN
from ewc_finetune.checkpoint.location import local_name
from ewc_finetune.checkpoint.open import LoadedModel, open_model
from ewc_finetune.checkpoint.weights_reference import refer_to_hub
from ewc_finetune.curvature.fisher import Fisher, compute_fisher
from ewc_finetune.curvature.importance import importance_by_layer
from ewc_finetune.curvature.kronecker_factors import check_rank
from ewc_finetune.curvature.options import ConsolidateOptions
from ewc_finetune.data.augmentation import refuse_augmented
from ewc_finetune.data.domain import Domain, Fingerprint
from ewc_finetune.data.input_spec import feed
from ewc_finetune.data.mixture import drawn, names_together
from ewc_finetune.data.sources import resolve_domains
from ewc_finetune.errors import Mistakes, UsageError, counted
from ewc_finetune.evaluation.bound_domain import BoundDomain, bind
from ewc_finetune.evaluation.chance import say_numbering, warn_at_chance
from ewc_finetune.evaluation.cost import Estimate, estimate_consolidation
from ewc_finetune.evaluation.presenting import presented_together
from ewc_finetune.evaluation.probe import take_probe
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.batch import Batch, count, take
from ewc_finetune.modules.devices import choose_device, on_device, random_state_kept
from ewc_finetune.modules.finite import cpu_copy
from ewc_finetune.modules.modes import normalisation_layers
from ewc_finetune.rehearsal.held_out import LEAST
from ewc_finetune.runs.idle import CONSOLIDATE, say_idle
from ewc_finetune.specs.options import takes
from ewc_finetune.specs.patterns import matching
from ewc_finetune.specs.query import in_file_name, parse
from ewc_finetune.storage.atomic import beside, check_output


@takes(ConsolidateOptions)
def consolidate(options: ConsolidateOptions) -> Anchor:
    """Compute the Fisher of a trained model on its data, and make an anchor of both.

    The model is left exactly as it was. The same seed on the same machine gives the same bytes.

    Args:
        options: Model and data, and by their names the others of `ConsolidateOptions`.

    Returns:
        The anchor, on the CPU.

    Raises:
        EwcError: naming what is wrong with the model, the data, an option or the file.
    """
    return run(plan(options))


@dataclass(frozen=True)
class ConsolidationPlan:
    """What a consolidation will do.

    Attributes:
        options: The options that the command was given.
        loaded: The model.
        excluded: Parameters that get no curvature, each with the reason.
        domains: The data to take curvature of, together.
        likelihood: The likelihood of the model's outputs, those of every head included.
        device: The device to compute on.
        reference: Where the weights are that the anchor refers to, if it does.
    """

    options: ConsolidateOptions
    loaded: LoadedModel
    excluded: dict[str, str]
    domains: list[Domain]
    likelihood: Likelihood
    device: torch.device
    reference: dict[str, Any] | None

    @property
    def limit(self) -> int | None:
        """The number of samples that is asked for."""
        return self.options.samples if isinstance(self.options.samples, int) else None


def plan(options: ConsolidateOptions, opened: LoadedModel | None = None) -> ConsolidationPlan:
    """Open and check everything that a consolidation takes.

    Args:
        options: What the command was given.
        opened: What is known of the model beside it, where that is open already; `options` then has the module.

    Raises:
        EwcError: naming what is wrong with the model, the data, an option or the file.
    """
    mistakes, model, architecture, progress = Mistakes(), options.model, options.architecture, options.progress
    if model is None:
        raise UsageError("there is nothing to consolidate; name a checkpoint, or give a module")
    with mistakes.noted():
        if options.output is not None:
            check_output(Path(options.output), options.overwrite, [model], note=progress.note)
    with mistakes.noted():
        options.check()
        check_rank(options.kfac_rank)
    with mistakes.noted():
        device = choose_device(options.device)
    with mistakes.noted():
        domains = resolve_domains(options.data, "train", options.data_dir, weighted=True)
        for domain in domains:
            refuse_augmented(domain, "consolidate")
    with mistakes.noted():
        loaded = opened or open_model(model, architecture, trust_code=options.trust_code)
        excluded = _excluded(loaded.model, options.exclude)
    mistakes.check()
    say_idle(options, CONSOLIDATE, {}, progress)
    for remark in () if opened else loaded.remarks:  # which were told where it was opened
        progress.note(remark)
    if not isinstance(model, nn.Module) and architecture is not None and not builds_by_itself(architecture):
        progress.note(
            f"{architecture} is no subclass of torch.nn.Module in a module of your own, and a file may name nothing "
            f"else, so say it with the anchor too: {as_option(architecture)}"
        )
    if options.samples == "auto" and not domains[0].indexable:
        progress.note(f"{domains[0].name} comes in an order of its own, in which --samples auto takes it")
    rule = get_likelihood(options.likelihood or loaded.likelihood(domains))
    reference = refer_to_hub(loaded) if options.anchor_weights == "reference" else None
    return ConsolidationPlan(options, loaded, excluded, domains, rule, device, reference)


@dataclass(frozen=True)
class _Matched:
    """A model and its data, before the first batch.

    Attributes:
        bound: The data, as the model takes it.
        chosen: The samples of it that are used.
        parameters: The parameters that get curvature, by name.
        prepared: The seconds that it took to get at the samples.
    """

    bound: BoundDomain
    chosen: Domain
    parameters: dict[str, nn.Parameter]
    prepared: float


@contextmanager
def _match(todo: ConsolidationPlan) -> Iterator[_Matched]:
    """Match model and data; the model is on the plan's device inside the block."""
    loaded, seed, progress = todo.loaded, todo.options.seed, todo.options.progress
    with on_device(loaded.model, todo.device), random_state_kept(todo.device, seed):
        start = time.perf_counter()
        headed = loaded
        if loaded.metadata.classes is None and (names := names_together(todo.domains)) is not None:
            headed = replace(loaded, metadata=replace(loaded.metadata, classes=list(names)))
        domain = drawn(presented_together(todo.domains, headed, progress))
        prepared = time.perf_counter() - start
        say_numbering(domain, loaded, progress)
        bound = bind(loaded, domain, todo.likelihood, todo.device, progress)
        parameters = {n: p for n, p in loaded.model.named_parameters() if n not in todo.excluded}
        yield _Matched(bound, _subset(bound.domain, todo.limit, seed), parameters, prepared)


def cost(todo: ConsolidationPlan) -> Estimate:
    """Take the Fisher of a few batches, and say what all of it will need.

    Raises:
        EwcError: if model and data do not suit each other.
    """
    options = todo.options
    with _match(todo) as matched:
        _probes(todo, matched)
        tried = None if options.curvature == "identity" else matched.chosen
        size = None if options.samples == "auto" else _count(matched.chosen, todo.limit)
        place = None if options.output is None else Path(options.output)
        return estimate_consolidation(
            partial(_fisher, todo, matched), tried, options.batch_size, size, matched.prepared, todo.device, place
        )


def _fisher(todo: ConsolidationPlan, matched: _Matched, batches: Iterable[Batch], **more: Any) -> Fisher:
    options, model = todo.options, todo.loaded.model
    return compute_fisher(
        model,
        feed(batches, matched.bound.input_spec, model, todo.device),
        likelihood=matched.bound.likelihood,
        estimator=options.estimator,
        kfac=options.kfac_form if options.curvature == "kfac" else None,
        parameters=matched.parameters,
        draws=options.draws,
        rules=options.rules,
        **more,
    )


def run(todo: ConsolidationPlan) -> Anchor:
    """Compute the Fisher, and make the anchor.

    Raises:
        EwcError: if model and data do not suit each other, or the file cannot be written.
    """
    options, loaded, progress = todo.options, todo.loaded, todo.options.progress
    fingerprint = Fingerprint()
    with _match(todo) as matched:
        probes = _probes(todo, matched)
        fisher_pass = _measured(todo, matched, fingerprint)
        progress.note(fisher_pass.path)
        accuracy = fisher_pass.scores.get("accuracy")
        warn_at_chance(matched.bound, loaded, accuracy, fisher_pass.samples, progress, own=True)
        fisher, storage = rounded(
            {n: value.float().cpu() for n, value in fisher_pass.values.items()}, options.curvature_dtype
        )
        blocks = {block.layer: block.stored(options.kfac_rank, options.kfac_dtype) for block in fisher_pass.blocks}
        provenance = replace(
            _provenance(todo, matched, fisher_pass, fingerprint),
            importance=[asdict(layer) for layer in importance_by_layer(fisher, blocks.values(), matched.parameters)],
            curvature_storage=None if storage is None else storage.to_json(),
            weights_reference=todo.reference,
        )
        anchor = Anchor(
            weights=cpu_copy(dict(loaded.model.named_parameters())),
            fisher=fisher,
            buffers=cpu_copy(_persistent_buffers(loaded.model)),
            provenance=provenance,
            blocks=blocks,
            probes=probes,
        )
    validate(anchor)
    return anchor if options.output is None else anchor.save(options.output, overwrite=options.overwrite)


def _measured(todo: ConsolidationPlan, matched: _Matched, fingerprint: Fingerprint) -> Fisher:
    """Take the Fisher of all samples that are used."""
    options = todo.options
    if options.curvature == "identity":
        return _identity(matched.parameters)
    # Whoever may stop at any sample must have met them in no particular order.
    order = torch.Generator().manual_seed(options.seed) if options.samples == "auto" else None
    batches = _taken(matched.chosen.batches(options.batch_size, order), todo.limit, fingerprint)
    with options.progress.bar("Fisher", _count(matched.chosen, todo.limit), "sample") as bar:
        return _fisher(
            todo,
            matched,
            batches,
            rtol=options.rtol if options.samples == "auto" else None,
            generator=torch.Generator().manual_seed(options.seed),
            bar=bar,
            note=options.progress.note,
        )


def _provenance(todo: ConsolidationPlan, matched: _Matched, fisher: Fisher, fingerprint: Fingerprint) -> Provenance:
    options, loaded, domain = todo.options, todo.loaded, matched.bound.domain
    lineage, head = options.lineage, options.head
    return Provenance(
        name=options.name or "+".join(map(_name_of, todo.domains)),
        created=_created(),
        versions={"ewc_finetune": __version__, "torch": torch.__version__, **loaded.versions},
        checkpoint={
            "file": loaded.file,
            "sha256": loaded.sha256,
            "format": loaded.format,
            "architecture": loaded.metadata.architecture,
            "form": None if loaded.checkpoint is None else loaded.checkpoint.form,
        },
        data={
            "spec": domain.name,
            "split": domain.split,
            "size": domain.size,
            "fingerprint": fingerprint.hexdigest() if fisher.samples else None,
        },
        likelihood=todo.likelihood.name,
        estimator="none" if options.curvature == "identity" else fisher.estimator,
        curvature=options.curvature,
        draws=options.draws if fisher.estimator == "sampled" else None,
        samples=fisher.samples,
        standard_error=None if fisher.standard_error is None else asdict(fisher.standard_error),
        batch_size=options.batch_size,
        seed=options.seed,
        excluded=todo.excluded,
        normalisation={"statistics": "frozen", "layers": list(normalisation_layers(loaded.model))},
        lineage=loaded.metadata.lineage if lineage is None else list(lineage),
        scores=fisher.scores,
        input=matched.bound.input_spec.to_json(),
        head=loaded.metadata.head if head is None else head,
        classes=loaded.metadata.classes if domain.classes is None else list(domain.classes),
    )


def _probes(todo: ConsolidationPlan, matched: _Matched) -> tuple[Probe, ...]:
    """Take the probe that is asked for, and say what that means."""
    n, domain, progress = todo.options.probe, matched.bound.domain, todo.options.progress
    if n == 0:
        return ()
    probe = take_probe(todo.loaded.model, matched.bound, n, todo.options.seed, todo.device)
    if probe.samples < n:
        progress.note(
            f"{domain.name} has {probe.samples:,} samples, and all are kept: fewer than the {n:,} of the probe"
        )
    if probe.samples < LEAST:
        progress.note(
            f"a probe of {counted(probe.samples, 'input')} is to measure with alone: one that is rehearsed has {LEAST}"
        )
    progress.note(f"the anchor holds {describe.probe(probe.record, probe.bytes)}: whoever has the anchor has them")
    return (probe,)


def _name_of(domain: Domain) -> str:
    """Return what to call a domain: its kind, or what is behind the colon, a file or folder without its path."""
    kind, _, place = parse(domain.name).head.partition(":")
    return Path(place).stem or kind if kind != "generate" else kind


def default_output(model: str | Path, data: str | Sequence[str]) -> Path:
    """Return where the anchor of a checkpoint goes: beside it, `model.pt` to `model.anchor.safetensors`.

    That of an anchor's own weights is named for the data too: `a.anchor.safetensors` to `a-digits.anchor.safetensors`.
    """
    place = local_name(model)
    stem = place.name.removesuffix(".anchor.safetensors")
    if stem != place.name:
        place = place.with_name(f"{stem}-{in_file_name(data)}")
    return beside(place, ".anchor.safetensors")


def _identity(parameters: Mapping[str, torch.Tensor]) -> Fisher:
    """Return ones in the place of a Fisher, of no samples."""
    ones = {name: torch.ones(p.shape) for name, p in parameters.items()}
    return Fisher(ones, [], 0, {}, "exact", None, "curvature: the identity, for which no gradient is taken")


def _excluded(model: nn.Module, patterns: Sequence[str]) -> dict[str, str]:
    """Return the parameters without curvature, each with the reason."""
    names = [name for name, _ in model.named_parameters()]
    excluded = {name: FROZEN for name, p in model.named_parameters() if not p.requires_grad}
    for pattern in patterns:
        excluded |= dict.fromkeys(matching(names, pattern, "--exclude"), f"--exclude {pattern}")
    if len(excluded) == len(names):
        raise UsageError("no parameter is left to compute a Fisher for: all are frozen or excluded")
    return excluded


def _subset(domain: Domain, samples: int | None, seed: int) -> Domain:
    """Choose a random subset where samples can be chosen; in the order of the data, so that files are read in turn."""
    if samples is None or not domain.indexable or domain.size is None or samples >= domain.size:
        return domain
    order = torch.randperm(domain.size, generator=torch.Generator().manual_seed(seed))
    return domain.subset(order[:samples].sort().values.tolist())


def _count(domain: Domain, samples: int | None) -> int | None:
    return min((count for count in (domain.size, samples) if count is not None), default=None)


def _taken(batches: Iterable[Batch], samples: int | None, fingerprint: Fingerprint) -> Iterator[Batch]:
    """Pass on batches until so many samples are taken, and take their fingerprint."""
    left = samples
    for batch_inputs, batch_labels in batches:
        inputs = take(batch_inputs, slice(left))
        labels = None if batch_labels is None else batch_labels[:left]
        fingerprint.update(inputs, labels)
        yield inputs, labels
        if left is not None:
            left -= count(inputs)
            if left == 0:
                return


def _persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict has: parameters and temporary buffers are not among them."""
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _created() -> str | None:
    """Return the time in SOURCE_DATE_EPOCH; no clock without it, for the same input is to give the same bytes."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
    return (
        datetime.fromtimestamp(int(epoch), timezone.utc).isoformat() if epoch.isdecimal() and len(epoch) < 12 else None
    )
