"""What `run.json` says of a run: what was asked for, and what that turned out to be."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ewc_finetune.anchor import Anchor
from ewc_finetune.checkpoint.opening import Opened
from ewc_finetune.config import spoken
from ewc_finetune.data.domain import Domain, as_bytes
from ewc_finetune.errors import DataError
from ewc_finetune.hub.address import HubAddress
from ewc_finetune.likelihood import Likelihood
from ewc_finetune.schedule import Schedule
from ewc_finetune.verbs.lambda_search import Search
from ewc_finetune.verbs.setup import Setup

# Of samples that are not in memory, so many are looked at to know them again.
_LOOKED_AT = 64


def defaults() -> dict[str, Any]:
    """Return what `finetune` does unless it is told otherwise, by the names of the command line."""
    return asked_by(None, None, {})


def asked_by(model: Any, data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `finetune(model, data, **options)` is asked for, as it records it itself.

    Raises:
        UsageError: if an option of training has a value that it cannot have.
    """
    from ewc_finetune.verbs.finetune import finetune

    plain = {
        name: parameter.default
        for name, parameter in inspect.signature(finetune).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    training = {field.name for field in fields(Schedule)}
    own = {name: value for name, value in options.items() if name not in training}
    schedule = Schedule(**{name: value for name, value in options.items() if name in training})
    return asked({**plain, **own, "model": model, "data": data}, schedule)


def asked(arguments: Mapping[str, Any], schedule: Schedule) -> dict[str, Any]:
    """Return the options of a run as JSON has them, by the names of the command line."""
    unsaid = {"resume", "before_start", "progress", "training"}
    given = {name: value for name, value in {**arguments, **asdict(schedule)}.items() if name not in unsaid}
    given["anchors"] = listed(given["anchors"])
    if given["lambdas"] not in (None, "auto"):
        given["lambdas"] = listed(given["lambdas"])
    return {spoken(name): _plain(value) for name, value in given.items()}


def is_told(value: Any) -> bool:
    """Whether a value is one that a command line can say."""
    if isinstance(value, (list, tuple)):
        return all(map(is_told, value))
    return value is None or isinstance(value, (str, int, float, Path))


def listed(value: Any) -> list[Any]:
    """Return what may be given singly as a list, with addresses as texts."""
    values = [value] if isinstance(value, (Anchor, HubAddress, str, Path, int, float)) else list(value)
    return [str(item) if isinstance(item, HubAddress) else item for item in values]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; of what is no text or number, what to call it."""
    if value is None or isinstance(value, (str, int, float, Path)):
        return str(value) if isinstance(value, Path) else value
    if isinstance(value, Anchor):
        return value.label
    if isinstance(value, Domain):
        return value.name
    if isinstance(value, Mapping):
        return [_plain(item) for item in value.values()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"a {type(value).__name__}"


def found(
    job: Setup,
    anchors: Sequence[Anchor],
    strengths: Sequence[float],
    likelihood: Likelihood,
    schedule: Schedule,
    search: Search | None,
    identities: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what the options of a run turned out to be; `identities` is what `identify` gave."""
    start, domain = job.start, job.domain
    return {
        "model": start.label,
        "checkpoint": {"sha256": start.sha256, "architecture": start.record.architecture},
        "parameters": sum(parameter.numel() for parameter in start.model.parameters()),
        "anchors": [
            {
                "file": anchor.label,
                "sha256": anchor.digest,
                "hub": None if anchor.place is None else str(anchor.place),
                "lambda": strength,
                "provenance": asdict(anchor.provenance),
            }
            for anchor, strength in zip(anchors, strengths, strict=True)
        ],
        "data": {
            "spec": domain.name,
            "split": domain.split,
            "size": domain.size,
            "digest": identities["the digest of the data"],
        },
        "eval": [{"spec": d.name, "split": d.split, "size": d.size} for d, _ in job.watched],
        "input": job.layout.to_json(),
        "likelihood": likelihood.name,
        "norm_stats": schedule.norm_stats,
        "lambda_search": None if search is None else search.to_json(),
        "identities": dict(identities),
    }


def identify(
    start: Opened,
    anchors: Sequence[Anchor],
    domain: Domain,
    scored: Sequence[Domain],
    told: bool,
    specs: Sequence[str | None],
) -> dict[str, Any]:
    """Return what tells model, anchors and data of a run from others, each under what to call it.

    Args:
        start: The model, before anything is done to it.
        anchors: Oldest first.
        domain: The new domain.
        scored: The domains to score.
        told: Whether the new domain comes from a spec, so that it is the same whenever it is read.
        specs: Of the domains to score the spec, where they have one.
    """
    return {
        "the model's digest": start.sha256 or _digest_of_weights(start.model),
        **{f"anchor {number}": anchor.digest for number, anchor in enumerate(anchors, 1)},
        "the size of the data": domain.size,
        "the digest of the data": _digest(domain, told),
        **{f"the size of {other.name}, which is scored": other.size for other in scored},
        **{
            f"the digest of {other.name}, which is scored": _digest(other, spec is not None)
            for other, spec in zip(scored, specs, strict=True)
        },
    }


def _digest_of_weights(model: nn.Module) -> str:
    digest = hashlib.sha256(repr(model).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        if isinstance(tensor, Tensor):
            digest.update(as_bytes(tensor))
    return digest.hexdigest()


def _digest(domain: Domain, told: bool) -> str | None:
    """Return a digest of all samples that are in memory; of others' labels, and of some samples from all over."""
    size = domain.size or 0
    if not domain.indexable or not size:
        return None
    digest = hashlib.sha256()
    if isinstance(domain.samples, TensorDataset):
        for tensor in domain.samples.tensors:
            digest.update(as_bytes(tensor))
        return digest.hexdigest()
    if domain.labels is not None:
        digest.update(as_bytes(domain.labels))
    elif not told:
        return None
    samples: Any = domain.samples
    chosen = sorted({size * k // _LOOKED_AT for k in range(_LOOKED_AT)}) if told else []
    looks = [_digest_of(samples, chosen) for _ in range(2)]
    # What is drawn anew whenever it is read, as augmented samples are, tells nothing.
    return digest.hexdigest() + (looks[0] if looks[0] == looks[1] else "")


def _digest_of(samples: Any, chosen: Sequence[int]) -> str:
    """Return a digest of some samples."""
    digest = hashlib.sha256()
    for n in chosen:
        with contextlib.suppress(DataError):  # images of several sizes, say, which are made alike later
            _take_in(digest, samples[n])
    return digest.hexdigest()


def _take_in(digest: Any, value: Any) -> None:
    """Update a digest by a sample; what is neither tensor nor text nor number in it has no part."""
    if isinstance(value, Tensor):
        digest.update(as_bytes(value))
    elif isinstance(value, (str, int, float, bool)):
        digest.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for name, item in value.items():
            _take_in(digest, name)
            _take_in(digest, item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _take_in(digest, item)
