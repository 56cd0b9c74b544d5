"""What `finetune` does with a model's head before it trains, and what it records of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import nn

from ewc_finetune.checkpoint.architecture import with_outputs
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.choices import Head
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.draw import are_classes
from ewc_finetune.errors import DataError, counted
from ewc_finetune.modules.batch import tensors
from ewc_finetune.modules.devices import random_state_kept
from ewc_finetune.modules.heads import find_head, replace_head
from ewc_finetune.progress import Progress

# A model with so many times as many outputs as there are classes was hardly made for them.
_FAR_MORE = 4


def give_head(
    start: LoadedModel, head: Head, domain: Domain, seed: int, written: bool, progress: Progress
) -> LoadedModel:
    """Give the model the head that is asked for, and record it.

    Args:
        start: The model, changed in place.
        head: `new` or `expand`.
        domain: Whose labels say how many outputs there must be.
        seed: The seed of the new layer's weights.
        written: Whether the model will be written to a file, and its architecture must say its outputs.
        progress: Is told what becomes of the head.

    Raises:
        ArchitectureError: see `replace_head` and `with_outputs`.
        DataError: if the domain does not say how many classes it has.
    """
    name, layer = find_head(start.model)
    outputs = layer.out_features if head == "expand" else 1
    labels = domain.labels
    if labels is not None and (labels.is_floating_point() or labels.ndim != 1):
        raise DataError(f"{domain.name} has no class for each sample, so it does not say how many outputs to make")
    if labels is not None and len(labels):
        outputs = max(outputs, int(labels.max()) + 1)
    elif head == "new":
        outputs = domain.count_classes()
    else:
        raise DataError(f"{domain.name} does not show its labels beforehand; give a dataset to expand the head for")
    if head == "new":
        say_first_label(domain, progress)
        progress.note(f"head {name}: a new one, with {counted(outputs, 'output')} in the place of {layer.out_features}")
    elif outputs > layer.out_features:
        progress.note(
            f"head {name}: {counted(outputs - layer.out_features, 'more output')} beside the {layer.out_features}"
        )
    else:
        progress.note(f"head {name}: {domain.name} has no label beyond its {outputs} outputs, so none is added")
    metadata = replace(start.metadata, classes=None)  # they are the old head's
    if metadata.architecture is not None and written and outputs != layer.out_features:
        metadata = replace(metadata, architecture=with_outputs(metadata.architecture, outputs))
    with random_state_kept(torch.device("cpu"), seed):
        replace_head(start.model, outputs, keep=head == "expand")
    if head == "new":
        names = head_names((name, layer))
        metadata = replace(
            metadata,
            frozen=[parameter for parameter in metadata.frozen if parameter not in names],
            head={"parameters": list(names), "id": _head_id(start, domain, seed)},
        )
    return replace(start, metadata=metadata)


def say_first_label(domain: Domain, progress: Progress) -> None:
    """Say so where the numbers of a domain's classes do not begin at 0, of which a model gets outputs for nothing."""
    if domain.labels is None or domain.classes is not None or not domain.labels.numel():
        return
    known = sorted(set(domain.labels.flatten().tolist()))
    first = int(known[0])
    if first <= 0:
        return
    named = ",".join(map(str, [*known[:5], *(["..."] if known[5:] else [])]))
    way = f"offset=-{first}" if len(known) == known[-1] - first + 1 else f"labels={named}"
    progress.note(
        f"{domain.name}: its labels begin at {first}, and the model gets outputs for those from 0 on, which no sample "
        f"has; {way} numbers them from 0"
    )


def say_many_outputs(domain: Domain, outputs: tuple[int, ...], progress: Progress) -> None:
    """Say so where a model has far more outputs than there are classes, which then share its first ones."""
    labels = domain.labels
    if labels is None or not are_classes(labels) or not labels.numel() or domain.active is not None:
        return
    classes = int(labels.max()) + 1
    if len(outputs) == 1 and outputs[0] >= _FAR_MORE * classes:
        progress.note(
            f"{domain.name}: its classes become the first {classes:,} of the model's {outputs[0]:,} outputs, whatever "
            "those were before. --head new gives them outputs of their own"
        )


def head_names(head: tuple[str, nn.Linear] | None) -> tuple[str, ...]:
    """Return the names of a head's parameters; none for None."""
    return () if head is None else tuple(f"{head[0]}.{name}" for name, _ in head[1].named_parameters())


def _head_id(start: LoadedModel, domain: Domain, seed: int) -> str:
    """Return what tells one new head from another: what it was put on, for what data, and its seed."""
    digest = hashlib.sha256(repr((start.sha256, start.metadata.lineage, domain.name, domain.size, seed)).encode())
    for tensor in tensors(domain.first()):
        digest.update(repr(tensor.flatten().tolist()).encode())
    return digest.hexdigest()


def class_names(metadata: ModelMetadata, domain: Domain, head: Head) -> list[str] | None:
    """Return the names of the outputs, where all of them are known."""
    if head == "expand":
        return metadata.classes if domain.classes == tuple(metadata.classes or ()) else None
    known = None if domain.classes is None else list(domain.classes)
    if head == "new":
        return None if known is None or domain.labels is None else known[: int(domain.labels.max()) + 1]
    return metadata.classes or known
