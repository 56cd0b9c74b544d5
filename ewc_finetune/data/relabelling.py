"""The same samples with other numbers of their classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from ewc_finetune.data.arrays import Arrays
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.hugging_face import ImageColumn
from ewc_finetune.data.images import ImageFiles
from ewc_finetune.data.numbering import BY_NAME
from ewc_finetune.data.table import Table
from ewc_finetune.data.texts import Texts
from ewc_finetune.errors import DataError, few


def numbered_as(domain: Domain, names: Sequence[str] | None) -> Domain:
    """Give labels that are names the numbers that the model has for them, where only the alphabet has numbered them.

    Args:
        domain: The data.
        names: Of the model's outputs, in their order; None where they are not known. Data that has none of these names
            stays as it is.

    Raises:
        DataError: if it has some of the names, and others that are none of them.
    """
    if domain.numbering != BY_NAME or domain.labels is None or not domain.classes or not names:
        return domain
    strangers = [name for name in domain.classes if name not in names]
    if domain.classes == tuple(names) or len(strangers) == len(domain.classes):
        return domain
    if strangers:
        raise DataError(
            f"{domain.name}: {few([repr(name) for name in strangers])} is no class of the model's, which are "
            f"{few(list(names))}. Leave such samples out, or give the model outputs for them (finetune --head expand, "
            "or --head new)"
        )
    number = {name: n for n, name in enumerate(names)}
    numbers = torch.tensor([number[name] for name in domain.classes])
    return relabelled(domain, numbers[domain.labels], tuple(names))


def relabelled(domain: Domain, labels: Tensor, classes: tuple[str, ...] | None) -> Domain:
    """Return a domain with other labels, one to a sample, and the names of their classes where these are known."""
    samples = domain.samples
    renumbered: Dataset[Any] | None = None
    if isinstance(samples, Table):
        renumbered = samples.with_labels(labels)
    elif isinstance(samples, (Texts, ImageColumn, Arrays)):
        renumbered = replace(samples, labels=labels)
    elif isinstance(samples, ImageFiles):
        paths = [path for path, _ in samples.files]
        renumbered = replace(samples, files=list(zip(paths, labels.tolist(), strict=True)))
    elif isinstance(samples, TensorDataset):
        renumbered = TensorDataset(samples.tensors[0], labels)
    if renumbered is None:
        raise TypeError(f"{type(samples).__name__} has no labels of its own")
    return replace(domain, samples=renumbered, labels=labels, classes=classes)
