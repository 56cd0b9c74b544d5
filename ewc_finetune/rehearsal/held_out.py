"""Which inputs of a probe are rehearsed, and which are left to measure with: what was rehearsed is no meter."""

from __future__ import annotations

from dataclasses import replace

import torch

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.anchor.probe_tensors import Probe
from ewc_finetune.errors import UsageError, counted

# The inputs that are left are this part of all,
_PART = 4
# and at least so many; of a share of unchanged answers, that is steps of 6%.
_LEAST = 16
# Of so many inputs a quarter says little.
COARSE = 64


def held_out(probe: Probe, where: str) -> list[int]:
    """Return the numbers of the inputs that are never rehearsed: always the same ones of a probe.

    Raises:
        UsageError: if too few would be left to rehearse; `where` is the anchor.
    """
    if probe.samples < 2 * _LEAST:
        raise UsageError(
            f"{where}: its probe of {probe.data} has {counted(probe.samples, 'input')}, of which {_LEAST} must stay to "
            f"measure with. Rehearse a probe of at least {2 * _LEAST} (ewc-ft consolidate --probe)"
        )
    order = torch.randperm(probe.samples, generator=torch.Generator().manual_seed(probe.seed))
    return sorted(order[: max(_LEAST, probe.samples // _PART)].tolist())


def with_held_out(anchor: Anchor) -> Anchor:
    """Return an anchor with what is never rehearsed of its probes.

    Raises:
        UsageError: if too few would be left to rehearse.
    """
    return replace(anchor, probes=[probe.subset(held_out(probe, anchor.label)) for probe in anchor.probes])
