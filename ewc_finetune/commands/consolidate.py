"""`consolidate`: from a trained checkpoint and its data to an anchor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ewc_finetune._version import __version__
from ewc_finetune.anchor.anchor import Anchor, validate
from ewc_finetune.anchor.half_precision import rounded
from ewc_finetune.anchor.probe_tensors import Probe, describe
from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.checkpoint.architecture import builds_by_itself
from ewc_finetune.checkpoint.checkpoint import FROZEN
from ewc_finetune.checkpoint.location import place_of
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.checkpoint.weights_reference import refer_to_hub
from ewc_finetune.choices import (
    ANCHOR_WEIGHTS,
    CURVATURE_DTYPES,
    CURVATURES,
    ESTIMATORS,
    KFAC_DTYPES,
    KFAC_FORMS,
    AnchorWeights,
    Curvature,
    CurvatureDtype,
    Estimator,
    KfacDtype,
    KfacForm,
    LikelihoodName,
    check_choice,
)
from ewc_finetune.curvature.fisher import Fisher, compute_fisher
from ewc_finetune.curvature.importance import importance_by_layer
from ewc_finetune.curvature.kronecker_factors import Rank, check_rank
from ewc_finetune.data.domain import Batch, Domain, Fingerprint
from ewc_finetune.data.layout import Layout, feed
from ewc_finetune.data.sources import resolve_domain
from ewc_finetune.errors import Mistakes, UsageError
from ewc_finetune.evaluation.chance import say_numbering, warn_at_chance
from ewc_finetune.evaluation.compatibility import prepare
from ewc_finetune.evaluation.cost import Estimate, estimate_consolidation
from ewc_finetune.evaluation.presenting import presented
from ewc_finetune.evaluation.probe import take_probe
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.batch import count, take
from ewc_finetune.modules.devices import choose_device, on_device, random_state_kept
from ewc_finetune.modules.finite import cpu_copy
from ewc_finetune.modules.modes import normalisation_layers
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.runs.idle import CONSOLIDATE, say_idle
from ewc_finetune.specs.patterns import matching
from ewc_finetune.specs.query import parse
from ewc_finetune.storage.atomic import beside, check_output

DEFAULT_RTOL = 0.02


def consolidate(
    model: str | Path | nn.Module,
    data: Any,
    *,
    architecture: str | None = None,
    trust_code: bool = False,
    name: str | None = None,
    curvature: Curvature = "diagonal",
    kfac_form: KfacForm = "expand",
    kfac_rank: Rank = "auto",
    kfac_dtype: KfacDtype = "float16",
    curvature_dtype: CurvatureDtype = "float32",
    anchor_weights: AnchorWeights = "stored",
    estimator: Estimator = "auto",
    draws: int = 1,
    samples: int | Literal["auto"] | None = None,
    rtol: float = DEFAULT_RTOL,
    rules: bool = True,
    batch_size: int = 200,
    likelihood: LikelihoodName | None = None,
    exclude: Sequence[str] = (),
    lineage: Sequence[dict[str, Any]] | None = None,
    head: dict[str, Any] | None = None,
    probe: int = 0,
    device: str = "auto",
    seed: int = 0,
    data_dir: str | Path | None = None,
    output: str | Path | None = None,
    overwrite: bool = False,
    before_start: Callable[[Estimate], None] | None = None,
    progress: Progress | None = None,
) -> Anchor:
    """Compute the Fisher of a trained model on its data, and make an anchor of both.

    The model is left exactly as it was. The same seed on the same machine gives the same bytes.

    Args:
        model: A module, a checkpoint file or model folder, or `hf:org/name`.
        data: The data it was trained on: a data spec (its train split unless it says), dataset or loader. It needs no
            labels, but for the `empirical` and `batched` estimators.
        architecture: What to build for a checkpoint that doesn't carry it; recorded in the anchor.
        trust_code: Whether code in the checkpoint may run (a pickled module), which is never asked for otherwise.
        name: What to call the domain; unless given the kind of data, or the file or folder that it is in.
        curvature: `diagonal` is the Fisher's; `kfac` takes Kronecker-factored blocks for the weights of linear maps and
            convolutions, and the diagonal for the rest; `identity` counts every parameter alike (plain L2): the data
            then only shows how samples go into the model.
        kfac_form: What `kfac` does with several positions of a sample (tokens, pixels): `expand` takes each for a
            sample of its own, `reduce` puts them together first.
        kfac_rank: Keep the leading eigenvectors of each factor that hold this share of its trace (below 1), or so many,
            and the mean for all others. `auto` is 0.99, `full` keeps the factors whole; so does a share that takes half
            of the eigenvectors or more, for which the factor itself is smaller.
        kfac_dtype: In which the kept eigenvectors are stored.
        curvature_dtype: In which the diagonal is stored; in half precision with a scale to each tensor, and what that
            costs is recorded (`storage.Storage`).
        anchor_weights: `reference` leaves the weights out that a model on the Hub has as they are, at its commit, in
            safetensors: whoever uses the anchor fetches them from there, by their digest.
        estimator: Whose labels the Fisher uses; `exact` is the expectation over the model's own predictions, `sampled`
            draws from them. `auto` is exact for up to 32 outputs and sampled beyond.
        draws: How many labels `sampled` draws for each sample.
        samples: Use a random subset of so many (the first so many of a loader's); all unless given. `auto` goes on, in
            random order, until the standard error of the trace is `rtol` of it, and for 200 samples at least.
        rtol: See `samples`.
        rules: Whether to use layer rules, which are fast; without them each parameter takes the fallback.
        batch_size: Samples at once; matters to the result for `batched` alone.
        likelihood: How outputs become log p(y | x); unless given the one that `finetune` trained the checkpoint with,
            else what the model's task takes (per-token for language models of transformers, bernoulli for several
            labels), else categorical.
        exclude: Patterns (`head.*`) of parameters to leave free.
        lineage: Anchors that a module was already trained under (`Finetuned.lineage`); a file carries its own.
        head: Of a module that was given a new last layer (`Finetuned.head`); likewise.
        probe: Keep so many inputs as they are in the anchor, with the model's answers to them, by which `finetune` says
            what is kept of them while it trains. Whoever has the anchor has them; none unless given.
        device: `auto`, `cpu`, `cuda` or `mps`.
        seed: Of the subset, of the labels of `sampled` and of the inputs that are kept.
        data_dir: Where downloaded data lies.
        output: File to save the anchor to; not saved unless given.
        overwrite: Whether an existing file may be replaced.
        before_start: Called with what the pass will need before it starts, for which a few batches are tried; what it
            raises ends it. See `dry_run`.
        progress: Told what happens.

    Returns:
        The anchor, on the CPU.

    Raises:
        EwcError: naming what is wrong with the model, the data, an option or the file.
    """
    given = locals()
    progress = progress or Silent()
    mistakes = Mistakes()
    with mistakes.noted():
        if output is not None:
            check_output(Path(output), overwrite, [model], note=progress.note)
    with mistakes.noted():
        _check_words(curvature, estimator, curvature_dtype, anchor_weights)
        _check_kfac(curvature, kfac_form, kfac_rank, kfac_dtype)
        _check_sampling(curvature, estimator, draws, samples, rtol)
        _check_counts(probe, batch_size)
    with mistakes.noted():
        where = choose_device(device)
    with mistakes.noted():
        domain = resolve_domain(data, "train", data_dir)
    with mistakes.noted():
        opened = open_model(model, architecture, trust_code=trust_code)
        excluded = _excluded(opened.model, exclude)
    mistakes.check()
    say_idle(consolidate, CONSOLIDATE, given, progress)
    for remark in opened.remarks:
        progress.note(remark)
    if not isinstance(model, nn.Module) and architecture is not None and not builds_by_itself(architecture):
        progress.note(
            f"{architecture} is no subclass of torch.nn.Module in a module of your own, and a file may name nothing "
            "else: give --arch again with the anchor"
        )
    reference = refer_to_hub(opened) if anchor_weights == "reference" else None
    likelihood_name = likelihood or opened.likelihood
    rule = domain.likelihood(get_likelihood(likelihood_name))
    limit = samples if isinstance(samples, int) else None
    # Whoever may stop at any sample must have met them in no particular order.
    order = torch.Generator().manual_seed(seed) if samples == "auto" else None
    if order is not None and not domain.indexable:
        progress.note(f"{domain.name} comes in an order of its own, in which --samples auto takes it")
    fingerprint = Fingerprint()
    with on_device(opened.model, where), random_state_kept(where, seed):
        start = time.perf_counter()
        domain = presented(domain, opened, progress)
        prepared = time.perf_counter() - start
        chosen = _subset(domain, limit, seed)
        say_numbering(domain, opened, progress)
        layout, outputs = prepare(opened.model, domain, rule, where, opened.record, progress)
        probes = _probes(opened.model, domain, layout, rule, probe, seed, where, progress)
        parameters = {n: p for n, p in opened.model.named_parameters() if n not in excluded}
        take_fisher = partial(
            compute_fisher,
            opened.model,
            likelihood=rule,
            estimator=estimator,
            kfac=kfac_form if curvature == "kfac" else None,
            parameters=parameters,
            draws=draws,
            rules=rules,
        )
        if before_start is not None:
            tried = None if curvature == "identity" else chosen
            size = None if samples == "auto" else _count(domain, limit)

            def run(batches: Iterable[Batch]) -> object:
                return take_fisher(feed(batches, layout, opened.model, where))

            place = None if output is None else Path(output)
            before_start(estimate_consolidation(run, tried, batch_size, size, prepared, where, place))
        if curvature == "identity":
            found = _identity(parameters)
        else:
            with progress.bar("Fisher", _count(domain, limit), "sample") as bar:
                found = take_fisher(
                    feed(_taken(chosen.batches(batch_size, order), limit, fingerprint), layout, opened.model, where),
                    rtol=rtol if samples == "auto" else None,
                    generator=torch.Generator().manual_seed(seed),
                    bar=bar,
                    note=progress.note,
                )
        progress.note(found.path)
        warn_at_chance(
            domain, opened, layout, outputs, rule, found.scores.get("accuracy"), found.samples, progress, own=True
        )
        fisher, storage = rounded({n: value.float().cpu() for n, value in found.values.items()}, curvature_dtype)
        blocks = {block.layer: block.stored(kfac_rank, kfac_dtype) for block in found.blocks}
        provenance = Provenance(
            name=name or _name_of(domain),
            created=_created(),
            versions={"ewc_finetune": __version__, "torch": torch.__version__, **opened.versions},
            checkpoint={
                "file": opened.file,
                "sha256": opened.sha256,
                "format": opened.format,
                "architecture": opened.record.architecture,
                "form": None if opened.checkpoint is None else opened.checkpoint.form,
            },
            data={
                "spec": domain.name,
                "split": domain.split,
                "size": domain.size,
                "fingerprint": fingerprint.hexdigest() if found.samples else None,
            },
            likelihood=likelihood_name,
            estimator="none" if curvature == "identity" else found.estimator,
            curvature=curvature,
            draws=draws if found.estimator == "sampled" else None,
            samples=found.samples,
            standard_error=None if found.standard_error is None else asdict(found.standard_error),
            batch_size=batch_size,
            seed=seed,
            excluded=excluded,
            importance=[asdict(layer) for layer in importance_by_layer(fisher, blocks.values(), parameters)],
            normalisation={"statistics": "frozen", "layers": list(normalisation_layers(opened.model))},
            lineage=opened.record.lineage if lineage is None else list(lineage),
            scores=found.scores,
            input=layout.to_json(),
            head=opened.record.head if head is None else head,
            classes=opened.record.classes if domain.classes is None else list(domain.classes),
            curvature_storage=None if storage is None else storage.to_json(),
            weights_reference=reference,
        )
        anchor = Anchor(
            weights=cpu_copy(dict(opened.model.named_parameters())),
            fisher=fisher,
            buffers=cpu_copy(_persistent_buffers(opened.model)),
            provenance=provenance,
            blocks=blocks,
            probes=probes,
        )
    validate(anchor)
    return anchor if output is None else anchor.save(output, overwrite=overwrite)


def _probes(
    model: nn.Module,
    domain: Domain,
    layout: Layout,
    likelihood: Likelihood,
    n: int,
    seed: int,
    device: torch.device,
    progress: Progress,
) -> tuple[Probe, ...]:
    """Take the probe that is asked for, and say what that means."""
    if n == 0:
        return ()
    found = take_probe(model, domain, layout, likelihood, n, seed, device)
    if found.samples < n:
        progress.note(
            f"{domain.name} has {found.samples:,} samples, and all are kept: fewer than the {n:,} of the probe"
        )
    progress.note(f"the anchor holds {describe(found.record, found.bytes)}: whoever has the anchor has them")
    return (found,)


def _name_of(domain: Domain) -> str:
    """Return what to call a domain: its kind, or what is behind the colon, a file or folder without its path."""
    kind, _, place = parse(domain.name).head.partition(":")
    return Path(place).stem or kind if kind != "generate" else kind


def default_output(model: str | Path) -> Path:
    """Return where the anchor of a checkpoint goes: beside it, `model.pt` to `model.anchor.safetensors`."""
    return beside(place_of(model), ".anchor.safetensors")


def _check_kfac(curvature: Curvature, kfac_form: str, kfac_rank: Rank, kfac_dtype: str) -> None:
    check_choice("kfac form", kfac_form, KFAC_FORMS)
    if curvature != "kfac" and (kfac_form, kfac_rank, kfac_dtype) != ("expand", "auto", "float16"):
        raise UsageError(
            f"kfac form, rank and dtype belong to the curvature kfac, and it is {curvature}; add --curvature kfac "
            "(curvature='kfac')"
        )
    check_rank(kfac_rank)
    check_choice("kfac dtype", kfac_dtype, KFAC_DTYPES)


def _check_words(curvature: str, estimator: str, curvature_dtype: str, anchor_weights: str) -> None:
    check_choice("curvature", curvature, CURVATURES)
    check_choice("estimator", estimator, ESTIMATORS)
    check_choice("curvature dtype", curvature_dtype, CURVATURE_DTYPES)
    check_choice("anchor weights", anchor_weights, ANCHOR_WEIGHTS)


def _check_counts(probe: int, batch_size: int) -> None:
    if type(probe) is not int or probe < 0:
        raise UsageError(f"probe is {probe}; expected a whole number of inputs to keep, 0 for none")
    if batch_size < 1:
        raise UsageError(f"batch size is {batch_size}; expected at least 1")


def _check_sampling(curvature: str, estimator: str, draws: int, samples: object, rtol: float) -> None:
    if samples is not None and samples != "auto" and (type(samples) is not int or samples < 1):
        raise UsageError(f"samples is {samples}; expected auto or a whole number, at least 1")
    if type(draws) is not int or draws < 1:
        raise UsageError(f"draws is {draws}; expected a whole number, at least 1")
    if draws > 1 and estimator not in ("sampled", "auto"):
        raise UsageError(f"draws is {draws}, and the {estimator} estimator draws nothing; use sampled")
    if not 0 < rtol < 1:
        raise UsageError(f"rtol is {rtol:g}; expected more than 0 and less than 1")
    if samples == "auto" and estimator == "batched":
        raise UsageError("the batched estimator has no standard error to stop at; give a number of samples")
    if curvature == "identity" and (samples is not None or draws != 1 or estimator != "auto"):
        raise UsageError("the identity is of no samples: estimator, draws and samples belong to the diagonal curvature")


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
