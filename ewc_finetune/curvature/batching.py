"""Small batches put together: what a batch costs beyond its samples would be most of the pass for a small model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ewc_finetune.errors import DataError
from ewc_finetune.modules.batch import Batch, Inputs, count, named, signature


def gathered(batches: Iterable[Batch], wanted: Callable[[Inputs], int]) -> Iterator[Batch]:
    """Hand on the batches in order, and as one those that follow each other, fit together and are small.

    Args:
        batches: Inputs and labels, or None.
        wanted: Says for inputs how many such samples there should be at once; no more are put together.

    Raises:
        DataError: if a batch has not as many labels as inputs.
    """
    held: list[Batch] = []
    kind: object = None
    together, most = 0, 0
    for inputs, targets in batches:
        size = count(inputs)
        if targets is not None and len(targets) != size:
            raise DataError(f"a batch has {size} inputs and {len(targets)} labels; expected as many")
        if not size:
            continue
        own = (signature(inputs), None if targets is None else (targets.shape[1:], targets.dtype))
        if held and (own != kind or together + size > most):
            yield _joined(held)
            held, together = [], 0
        if own != kind:
            kind, most = own, wanted(inputs)
        held.append((inputs, targets))
        together += size
        if together + size > most:  # another one like this would not fit: don't wait for it
            yield _joined(held)
            held, together = [], 0
    if held:
        yield _joined(held)


def _joined(batches: list[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    parts = [named(inputs) for inputs, _ in batches]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    labels = [targets for _, targets in batches if targets is not None]
    return joined.get("", joined), torch.cat(labels) if labels else None
