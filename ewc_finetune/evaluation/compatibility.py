"""What every verb does before its work: see that the data and the model suit each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ewc_finetune.checkpoint.checkpoint import Record
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.layout import Layout, find_layout
from ewc_finetune.errors import ArchitectureError, DataError
from ewc_finetune.evaluation.presenting import say_numbers
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.progress import Progress


def prepare(
    model: nn.Module,
    domain: Domain,
    likelihood: Likelihood,
    device: torch.device,
    record: Record,
    progress: Progress,
    outputs: int | None = None,
) -> tuple[Layout, tuple[int, ...]]:
    """Find how the domain's samples go into the model, say it, and check outputs and labels before any work is done.

    Args:
        model: On `device`.
        domain: The data.
        likelihood: Says what outputs and labels it takes.
        device: Where the model is.
        record: What is known of the model; where the data differs from it, that is said.
        progress: Told what is assumed.
        outputs: How many the model must have, where its head was changed.

    Returns:
        The layout, and the shape of the model's outputs for one sample.

    Raises:
        ArchitectureError: if the model has another number of outputs.
        DataError: if samples, outputs or labels don't suit, or the data numbers the model's classes otherwise; labels
            are checked all at once where they are known.
    """
    layout, output_shape = find_layout(
        model, domain, device, lambda outputs: likelihood.check_outputs(outputs, domain.name), record.input
    )
    if outputs is not None and output_shape[-1:] != (outputs,):
        raise ArchitectureError(
            f"the last linear layer of the model was to be its head, with {outputs} outputs, but the model returns "
            f"{tuple(output_shape)}: its outputs come from another layer. List that one last in the module"
        )
    if domain.labels is not None:
        likelihood.check_targets(domain.labels, output_shape, domain.name)
    for remark in domain.remarks:
        progress.note(f"{domain.name}: {remark}")
    progress.note(f"{domain.name}: samples of {layout.describe()}")
    say_numbers(domain, layout, progress)
    trained_on = tuple(record.input.get("shape", layout.shape))
    if trained_on != layout.shape:
        progress.note(f"{domain.name}: the model was trained on samples of another shape, {trained_on}")
    if record.classes and domain.classes:
        _compare_classes(record.classes, domain.classes, domain.name, progress)
    return layout, output_shape


def _compare_classes(model: Sequence[str], data: Sequence[str], name: str, progress: Progress) -> None:
    """Refuse the model's classes under other numbers, and remark on classes of other names."""
    differing = [number for number, pair in enumerate(zip(model, data, strict=False)) if pair[0] != pair[1]]
    if not differing:
        return
    first = differing[0]
    if set(data) <= set(model):
        raise DataError(
            f"{name}: the class {data[first]!r} is number {first} here and {model.index(data[first])} in the model, so "
            "its labels would be taken for another class's. Give the data the model's classes, in their order: "
            f"labels={','.join(model)}"
        )
    progress.note(f"{name}: its classes are not called what the model's are ({data[first]!r} for {model[first]!r})")
