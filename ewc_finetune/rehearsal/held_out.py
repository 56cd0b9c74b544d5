"""Which inputs of a probe are rehearsed, and which are left to measure with: what was rehearsed is no meter."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.probe_tensors import Probe
from ewc_finetune.errors import UsageError, counted
from ewc_finetune.modules.batch import Inputs, count, named

# The inputs that are left are this part of all,
_PART = 4
# and at least so many; of a share of unchanged answers, that is steps of 6%.
_LEAST = 16
# No probe with fewer inputs can be rehearsed.
LEAST = 2 * _LEAST
# Of so many inputs a quarter says little.
COARSE = 64


def held_out(probe: Probe, where: str) -> list[int]:
    """Return the numbers of the inputs that are never rehearsed: always the same ones of a probe.

    Raises:
        UsageError: if too few would be left to rehearse; `where` is the anchor.
    """
    if probe.samples < LEAST:
        raise UsageError(
            f"{where}: its probe of {probe.data} has {counted(probe.samples, 'input')}, of which {_LEAST} must stay to "
            f"measure with. Rehearse a probe of at least {LEAST} (ewc-ft consolidate --probe)"
        )
    order = torch.randperm(probe.samples, generator=torch.Generator().manual_seed(probe.seed))
    return sorted(order[: max(_LEAST, probe.samples // _PART)].tolist())


def measured(anchors: Sequence[Anchor], probes_rehearsed: bool) -> list[Anchor]:
    """Return the anchors with what is measured of their probes: all, or where they are rehearsed, what is held out.

    Raises:
        UsageError: if too few would be left to rehearse.
    """
    if not probes_rehearsed:
        return list(anchors)
    return [
        replace(anchor, probes=[probe.subset(held_out(probe, anchor.label)) for probe in anchor.probes])
        for anchor in anchors
    ]


def keys_of(inputs: Inputs) -> list[bytes]:
    """Return a digest of each input, the same for the same values; what only fills up a text has no part in it."""
    tensors = named(inputs)
    mask = tensors.get("attention_mask")

    def key(n: int) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for name, tensor in sorted(tensors.items()):
            filled = mask is not None and tensor.shape[:2] == mask.shape
            row = tensor[n][mask[n].bool()] if filled and mask is not None else tensor[n : n + 1]
            digest.update(f"{name} {tensor.dtype} {tuple(row.shape)}".encode())
            digest.update(_bytes_of(row))
        return digest.digest()

    return [key(n) for n in range(count(inputs))]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
