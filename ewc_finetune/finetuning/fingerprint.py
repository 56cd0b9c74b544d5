"""What a run is made from, by digests and sizes that tell it from another."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.data.arrays import Arrays
from ewc_finetune.data.domain import Domain, as_bytes
from ewc_finetune.data.table import Table
from ewc_finetune.errors import DataError

# How many samples are read to recognise data that is not in memory.
_LOOKED_AT = 64


def identify(
    start: LoadedModel,
    anchors: Sequence[Anchor],
    trained: Sequence[tuple[Domain, bool]],
    scored: Sequence[tuple[Domain, bool]],
    rehearsed: Sequence[Domain],
) -> dict[str, Any]:
    """Return what tells model, anchors and data of a run from others, each under what to call it.

    Args:
        start: The model, before anything is done to it.
        anchors: Oldest first.
        trained: The new domain and those that are mixed into it, each with whether it comes from a spec, so that it is
            the same whenever it is read.
        scored: The domains to score, likewise.
        rehearsed: Data that is rehearsed.
    """
    (domain, told), *mixed = trained
    return {
        "the model's digest": start.sha256 or _digest_of_weights(start.model),
        **{f"anchor {number}": anchor.digest for number, anchor in enumerate(anchors, 1)},
        "the size of the data": domain.size,
        "the digest of the data": _digest(domain, told),
        **_of_others(mixed, "mixed in"),
        **_of_others(scored, "scored"),
        **_of_others([(other, False) for other in rehearsed], "rehearsed"),
    }


def _of_others(domains: Sequence[tuple[Domain, bool]], use: str) -> dict[str, Any]:
    sizes = {f"the size of {domain.name}, which is {use}": domain.size for domain, _ in domains}
    return sizes | {f"the digest of {domain.name}, which is {use}": _digest(domain, told) for domain, told in domains}


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
    if isinstance(domain.samples, Table):
        return domain.samples.hexdigest()
    if isinstance(domain.samples, (TensorDataset, Arrays)):
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
    # Samples that differ each time they are read (augmented ones, say) cannot be recognised by their contents.
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
