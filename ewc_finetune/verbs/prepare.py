"""What every verb does before its work: see that the data and the model suit each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ewc_finetune.data.domain import Domain
from ewc_finetune.data.layout import Layout, dtype_of, find_layout
from ewc_finetune.devices import random_state_kept
from ewc_finetune.likelihood import Likelihood
from ewc_finetune.modes import evaluating
from ewc_finetune.progress import Progress


def prepare(
    model: nn.Module,
    domain: Domain,
    likelihood: Likelihood,
    device: torch.device,
    recorded: dict[str, Any],
    progress: Progress,
) -> Layout:
    """Find how the domain's samples go into the model, say it, and check outputs and labels before any work is done.

    Raises:
        DataError: if samples, outputs or labels don't suit; labels are checked all at once where they are known.
    """
    layout = find_layout(model, domain, device, recorded)
    with evaluating(model), torch.no_grad(), random_state_kept(device):
        outputs = model(layout.present(domain.first().to(device), dtype_of(model)))
    likelihood.check_outputs(outputs, domain.name)
    if domain.labels is not None:
        likelihood.check_targets(domain.labels, tuple(outputs.shape[1:]), domain.name)
    progress.note(f"{domain.name}: samples of {layout.describe()}")
    trained_on = tuple(recorded.get("shape", layout.shape))
    if trained_on != layout.shape:
        progress.note(f"{domain.name}: the model was trained on samples of another shape, {trained_on}")
    return layout
