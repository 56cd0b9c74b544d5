"""What a fine-tune will do: everything opened, checked and decided before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.architecture import BUILTIN, FORMS, looks_like_architecture, torchvision_meant
from ewc_finetune.checkpoint.formats.from_anchor import FromAnchor
from ewc_finetune.checkpoint.location import is_there
from ewc_finetune.checkpoint.open import LoadedModel, open_checkpoint, open_fresh, open_model
from ewc_finetune.checkpoint.pin import fetched_anchors, pinned_model
from ewc_finetune.choices import DEFAULT_LAMBDA, LikelihoodName
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.mixture import names_together
from ewc_finetune.data.sources import items_of, resolve_domain, resolve_domains
from ewc_finetune.data.table import Table
from ewc_finetune.data.texts import Texts, TextStream
from ewc_finetune.errors import CheckpointError, Mistakes, UsageError
from ewc_finetune.evaluation.metrics import check_metrics
from ewc_finetune.evaluation.presenting import informed
from ewc_finetune.finetuning.aims import Aim, aim_of
from ewc_finetune.finetuning.best_state import selecting
from ewc_finetune.finetuning.fingerprint import identify
from ewc_finetune.finetuning.head import say_first_label
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.outputs import check_outputs
from ewc_finetune.finetuning.request import listed
from ewc_finetune.finetuning.resume import check_options, output_of
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.objective import Objective, objective_of
from ewc_finetune.likelihood.registry import get_likelihood
from ewc_finetune.modules.devices import choose_device, random_state_kept
from ewc_finetune.modules.modes import normalisation_layers
from ewc_finetune.penalty.quadratic import spread_lambdas, usual_lambdas
from ewc_finetune.progress import Progress
from ewc_finetune.rehearsal.memory import Memory
from ewc_finetune.rehearsal.options import is_probes
from ewc_finetune.rehearsal.sources import resolve_sources
from ewc_finetune.reporting.outcome import new_domain
from ewc_finetune.runs.idle import FINETUNE, say_idle
from ewc_finetune.runs.record import Run, read_run, recover_run
from ewc_finetune.specs.options import check_declared
from ewc_finetune.specs.query import PARTS, data_key, without

# What data is called that has no name.
_UNNAMED = re.compile(r"data( \d+)?( \(\d+\))?")


@dataclass(frozen=True)
class Plan:
    """What a fine-tune will do.

    Attributes:
        options: The options that the command was given, with addresses on the Hub pinned to the commit that they name
            now.
        schedule: How to train, with what was left open decided.
        start: The model.
        fresh: Whether its weights are.
        anchors: Oldest first.
        strengths: The lambda of each; where one is looked for, its multiple of that.
        domain: The new domain.
        others: Domains that are mixed into it.
        rehearsed: The data of each source to rehearse; None for the probes of the anchors.
        scored: The domains to score.
        specs: The spec of each that has one.
        new: The name of the one that is the new domain; None where that is not scored.
        chosen: Of these, the names of those that say which state is the best; None where nothing asks.
        aim: What a search for lambda is to look for.
        likelihood: What the model's outputs mean.
        objective: What training makes small.
        device: The device to compute on.
        output: The checkpoint to write.
        overwrite: Whether what is there may be replaced.
        earlier: The run to go on with.
        answered: What is rehearsed, where the old model has answered it for another run of the same; empty otherwise.
    """

    options: FinetuneOptions
    schedule: Schedule
    start: LoadedModel
    fresh: bool
    anchors: list[Anchor]
    strengths: list[float]
    domain: Domain
    others: list[Domain]
    rehearsed: list[Domain | None]
    scored: list[Domain]
    specs: list[str | None]
    new: str | None
    chosen: tuple[str, ...] | None
    aim: Aim
    likelihood: Likelihood
    objective: Objective
    device: torch.device
    output: Path | None
    overwrite: bool
    earlier: Run | None
    answered: Sequence[Memory] = ()

    def identify(self) -> dict[str, Any]:
        """Return what the run is made from, by digests and sizes; to be asked before anything is done to it."""
        told = [isinstance(item, str) for item in items_of(self.options.data)]
        rehearsed = [domain for domain in self.rehearsed if domain is not None]
        trained = [*zip([self.domain, *self.others], told, strict=True)]
        scored = [*zip(self.scored, [spec is not None for spec in self.specs], strict=True)]
        return identify(self.start, self.anchors, trained, scored, rehearsed)


def plan(options: FinetuneOptions, opened: LoadedModel | None = None) -> Plan:
    """Open and check everything that a fine-tune takes; what is wrong is said all at once, as far as it can be known.

    Args:
        options: What the command was given.
        opened: What is known of the model beside it, where that is open already; `options` then has the module.

    Raises:
        EwcError: naming what is wrong with the model, an anchor, the data, an option or a file.
    """
    progress = options.progress
    given, told = fetched_anchors(listed(options.anchors))
    options = replace(options, model=pinned_model(options.model, progress), anchors=told)
    output, earlier = None if options.output is None else Path(options.output), None
    if options.resume is not None:
        recover_run(Path(options.resume), progress.note)
        earlier = read_run(Path(options.resume))
        output = output_of(earlier, options.output)
        check_options(earlier, options, progress)
    mistakes = Mistakes()
    anchors: list[Anchor] = []
    for item in given:
        with mistakes.noted():
            anchors.append(item if isinstance(item, Anchor) else Anchor.open(item))
    with mistakes.noted():
        domain, *others = resolve_domains(options.data, "train", options.data_dir, weighted=True)
    if not mistakes.found:
        with mistakes.noted():
            start, fresh = (opened, False) if opened else _open_start(options, anchors, [domain, *others])
    loaded, overwrite = not mistakes.found, options.overwrite
    with mistakes.noted():
        if output is not None:
            inputs = [options.model, *given]
            overwrite = check_outputs(output, start if loaded else None, overwrite, inputs, earlier, progress)
    with mistakes.noted():
        check_declared(options)
    with mistakes.noted():
        device = choose_device(options.device)
    with mistakes.noted():
        strengths = _strengths(options, len(given), anchors)
    with mistakes.noted():
        rehearsed = _rehearsed(options, anchors if len(anchors) == len(given) else None)
    if loaded:
        with mistakes.noted():
            rule = get_likelihood(_likelihood_of(options.likelihood, anchors, start, domain))
            with mistakes.noted():
                objective = objective_of(options, rule.name)
            with mistakes.noted():
                check_metrics(options.metrics, rule.name)
        with mistakes.noted():
            scored, specs, new, chosen, aim = _measured(options, [domain, *others], anchors)
    mistakes.check()
    schedule = replace(options, norm_stats=options.norm_stats or ("update" if fresh else "frozen"))
    layers = normalisation_layers(start.model)
    facts = {"read": domain.read_singly, "normalised": bool(layers), "scored": bool(scored)}
    say_idle(options, FINETUNE, facts, progress)
    start = informed(start, anchors)
    return Plan(
        options, schedule, start, fresh, anchors, strengths, domain, others, rehearsed, scored, specs, new, chosen,
        aim, rule, objective, device, output, overwrite, earlier,
    )  # fmt: skip


def _strengths(options: FinetuneOptions, given: int, anchors: Sequence[Anchor]) -> list[float]:
    """Return lambda of each anchor; of so many that are given, not all need have been opened for one to be wrong."""
    lambdas = options.lambdas
    if lambdas == "auto":
        least = min((DEFAULT_LAMBDA[anchor.provenance.curvature] for anchor in anchors), default=1.0)
        return [DEFAULT_LAMBDA[anchor.provenance.curvature] / least for anchor in anchors]
    if lambdas is None:
        return usual_lambdas(anchors, options.rehearses)
    # Without anchors a lambda does nothing, but a wrong one is still an error.
    return spread_lambdas(lambdas, given or 1)[:given]


def _rehearsed(options: FinetuneOptions, anchors: Sequence[Anchor] | None) -> list[Domain | None]:
    """Return the data of each source to rehearse; None for the probes of the anchors.

    `anchors` is None where one of them is not to be had, so that nothing is known of their probes.
    """
    options.check_rehearsal()
    if options.head == "new" and options.sources and not options.anchors:
        raise UsageError("with --head new the old head answers what is rehearsed; name --anchors, which keep it")
    if options.rehearses and any(_same_data(source, items_of(options.data)[0]) for source in options.sources):
        options.progress.note(
            "the new data is rehearsed too: the old model's answers to it are to stay, which holds learning back "
            "(learning without forgetting). Rehearse data that is like the old, where there is any"
        )
    # Of what is not rehearsed only the probes have a part in the run: it is measured by them.
    sources = [one for one in options.sources if options.rehearses or is_probes(one)]
    return resolve_sources(sources, anchors, options.data_dir)


def _same_data(one: Any, other: Any) -> bool:
    if isinstance(one, str) and isinstance(other, str):
        return data_key(one, PARTS) == data_key(other, PARTS)
    return one is other


def _open_start(
    options: FinetuneOptions, anchors: Sequence[Anchor], domains: Sequence[Domain]
) -> tuple[LoadedModel, bool]:
    """Open what the run starts from; also return whether its weights are fresh."""
    model, architecture = options.model, options.architecture
    if model is None:
        if not anchors:
            raise UsageError("there is nothing to start from; name --anchors, or a --model for plain training")
        return open_checkpoint(FromAnchor(anchors[-1]), architecture), False
    if isinstance(model, nn.Module) or is_there(model):
        with random_state_kept(torch.device("cpu"), options.seed):  # of which an encoder's fresh layers are drawn
            new_head = options.head == "new"
            return open_model(model, architecture, trust_code=options.trust_code, new_head=new_head), False
    if not looks_like_architecture(str(model)):
        raise CheckpointError(
            f"there is no checkpoint at {model}, and it names no architecture either: {FORMS}; a model folder on the "
            f"Hub is hf:ORG/NAME.{torchvision_meant(str(model))}"
        )
    if architecture is not None:
        raise UsageError(f"--model {model} is an architecture already; --arch says what a checkpoint file holds")
    shape, outputs = _sample_shape(domains[0], str(model)), _count_outputs(options, domains)
    return open_fresh(str(model), shape, outputs, options.seed), True


def _count_outputs(options: FinetuneOptions, domains: Sequence[Domain]) -> int:
    """Return how many outputs fresh weights need: one to a class, or to a number that is predicted."""
    domain, labels = domains[0], domains[0].labels
    numbers = options.likelihood in ("gaussian", "bernoulli") or (options.likelihood is None and domain.real_valued)
    if numbers and labels is not None and labels.ndim <= 2:
        return 1 if labels.ndim == 1 else labels.shape[1]
    outputs = [one.count_classes(dense=isinstance(one.samples, Table)) for one in domains]
    say_first_label(domain, options.progress)
    return max(*outputs, len(names_together(domains) or ()))


def _sample_shape(domain: Domain, architecture: str) -> tuple[int, ...]:
    if isinstance(domain.samples, (Texts, TextStream)):
        raise UsageError(
            f"{domain.name} has texts, and {architecture.partition('?')[0]} takes none: name a model folder of "
            "transformers, which has a tokenizer (--model FOLDER/ or hf:ORG/NAME). Columns of numbers need no text="
        )
    sample = domain.first()
    if isinstance(sample, torch.Tensor):
        return tuple(sample.shape[1:])
    if architecture.partition("?")[0] in BUILTIN:
        raise UsageError(
            f"{domain.name} has several inputs ({', '.join(sample)}), and {architecture.partition('?')[0]} takes one; "
            "name a module of your own that takes them: --model package.module:Class"
        )
    return ()


def _likelihood_of(asked: LikelihoodName | None, anchors: Sequence[Anchor], start: LoadedModel, domain: Domain) -> str:
    """Name the likelihood: as asked for, else the anchors', else the model's own (`LoadedModel.likelihood`).

    Raises:
        UsageError: if another is asked for than the anchors'.
    """
    known = anchors[-1].provenance.likelihood if anchors else asked or start.likelihood([domain])
    if asked is not None and asked != known:
        raise UsageError(
            f"likelihood is {asked}, and {anchors[-1].label} was made with {known}; a penalty goes with the loss that "
            "its curvature is of"
        )
    return known


def _measured(
    options: FinetuneOptions, domains: Sequence[Domain], anchors: Sequence[Anchor]
) -> tuple[list[Domain], list[str | None], str | None, tuple[str, ...] | None, Aim]:
    """Return the domains to score with their specs, the new one's name, those that choose a state, a search's aim."""
    scored, specs = _scored(options, domains, anchors, options.progress)
    if options.eval_new is None:
        new = _new_among(scored, specs, domains[0], items_of(options.data)[0])
    else:
        scored, (new,) = _also_scored(scored, specs, [options.eval_new], options.data_dir)
    scored, names = _also_scored(scored, specs, options.select_on, options.data_dir)
    chosen = None
    if options.keeps_best or options.patience is not None:
        chosen = tuple(selecting(new, names))
    return scored, specs, new, chosen, aim_of(options, names, anchors)


def _new_among(scored: Sequence[Domain], specs: Sequence[str | None], domain: Domain, data: Any) -> str | None:
    """Return the name of the scored domain that is the new one: by its spec, or where it has none by a name of its own.

    Names that were only given to tell data apart say nothing.
    """
    if isinstance(data, str):
        known = [spec or "" for spec in specs]
        found = new_domain(data, known)
        return None if found is None else scored[known.index(found)].name
    named = _UNNAMED.fullmatch(domain.name) is None
    return next(
        (one.name for one in scored if one.samples is domain.samples or (named and one.name == domain.name)), None
    )


def _scored(
    options: FinetuneOptions, domains: Sequence[Domain], anchors: Sequence[Anchor], progress: Progress
) -> tuple[list[Domain], list[str | None]]:
    """Return the domains to score, and the spec of each that has one.

    They are those asked for, else the test splits of what is trained on; the new domain's not, where it is named.
    """
    eval_on, data_dir, head = options.eval_on, options.data_dir, options.head
    if head == "new" and anchors:
        progress.note(
            "domains are scored with the new head; for an old one's: ewc-ft evaluate CHECKPOINT --head ANCHOR"
        )
    if eval_on is not None:
        scored = _as_they_come(resolve_domains(eval_on, "test", data_dir))
        return _named_apart(scored), [item if isinstance(item, str) else None for item in items_of(eval_on)]
    domain, given = domains[0], [*zip(domains, items_of(options.data), strict=True)]
    specs = [without(item, "weight") for one, item in given if isinstance(item, str) and one.split is not None]
    if options.eval_new is not None:
        specs = specs if domain.split is None else specs[1:]
    scored = _as_they_come([resolve_domain(spec, "test", data_dir) for spec in specs])
    if not scored and options.eval_new is None:
        held = "; test=0.2 behind its question mark holds a fifth of it out" * isinstance(domain.samples, Table)
        progress.note(
            f"{domain.name} has no test split, so nothing is scored; --eval-new names other data for it{held}"
        )
    elif anchors and head != "new" and len(scored) == 1:
        progress.note(
            f"only {scored[0].name} is scored; where old data is at hand, --eval OLD --eval-new NEW shows what stays"
        )
    return _named_apart(scored), [*specs]


def _also_scored(
    scored: Sequence[Domain], specs: list[str | None], others: Sequence[Any], data_dir: str | Path | None
) -> tuple[list[Domain], list[str]]:
    """Return the domains to score with others among them, and the names of these; `specs` grows alike."""
    every, names = list(scored), []
    for item in others:
        if isinstance(item, str) and item in specs:
            names.append(every[specs.index(item)].name)
            continue
        (domain,) = _as_they_come(resolve_domains([item], "test", data_dir))
        same = [other.name for other in every if other.samples is domain.samples]
        if not same:
            every = _named_apart([*every, domain])
            specs.append(item if isinstance(item, str) else None)
        names += same[:1] or [every[-1].name]
    return every, names


def _as_they_come(domains: Sequence[Domain]) -> list[Domain]:
    """Return domains to score, which are never augmented, nor named as if they were."""
    return [replace(one, name=without(one.name, "augment"), augment=()) if one.augment else one for one in domains]


def _named_apart(domains: Sequence[Domain]) -> list[Domain]:
    """Return domains of which no two have the same name: later ones are numbered."""
    named: list[Domain] = []
    for domain in domains:
        names, name, number = {other.name for other in named}, domain.name, 2
        while name in names:
            name, number = f"{domain.name} ({number})", number + 1
        named.append(replace(domain, name=name) if name != domain.name else domain)
    return named
