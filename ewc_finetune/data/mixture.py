"""Several domains as one: each epoch has of each what its weight says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from ewc_finetune.data.domain import Domain
from ewc_finetune.data.draw import Part
from ewc_finetune.data.input_spec import transform_of
from ewc_finetune.data.numbering import BY_NAME
from ewc_finetune.data.preprocessing import Ids
from ewc_finetune.data.texts import Texts
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.modules.batch import Inputs, named


def mixed(domains: Sequence[Domain]) -> Domain:
    """Return one domain of several, each walk through which draws of each what its weight says.

    Args:
        domains: As they are presented to the model; a single one without a weight is returned as it is.

    Raises:
        UsageError: if one has no samples by number, or they say what only one can.
        DataError: if their samples or labels are not alike.
    """
    first = domains[0]
    if len(domains) == 1 and first.weight is None:
        return first
    for domain in domains:
        if not domain.indexable:
            raise UsageError(
                f"{domain.name} is a stream or loader, which has no samples by number to draw from; to be mixed or "
                "weighted, data must be files, arrays, tables or a dataset with a length"
            )
        if not domain.size:
            raise DataError(f"{domain.name} has no samples")
    for other in domains[1:]:
        _check_alike(first, other)
    parts = tuple(Part(one.name, one.size or 0, 1.0 if one.weight is None else one.weight) for one in domains)
    labels = [domain.labels for domain in domains if domain.labels is not None]
    own = tuple(f"{one.name}: {remark}" for one in domains for remark in one.remarks)
    said = f"each epoch has {', '.join(map(str, parts))}"
    return replace(
        first,
        name=" + ".join(domain.name for domain in domains),
        samples=_joined(domains),
        labels=torch.cat(labels) if len(labels) == len(domains) else None,
        classes=first.classes if all(one.classes == first.classes for one in domains) else None,
        remarks=(*own, said),
        weight=None,
        parts=parts,
    )


def names_together(domains: Sequence[Domain]) -> tuple[str, ...] | None:
    """Return the names of several domains' classes where only the alphabet has numbered them, each once."""
    named = [domain.classes for domain in domains if domain.numbering == BY_NAME and domain.classes]
    return tuple(dict.fromkeys(name for classes in named for name in classes)) if len(domains) > 1 and named else None


def _joined(domains: Sequence[Domain]) -> Dataset[Any]:
    """Return the samples of all, one domain's after the other's; in memory, if all of them are."""
    samples: list[Any] = [domain.samples for domain in domains]
    if len(samples) == 1:
        return samples[0]  # type: ignore[no-any-return]
    if all(isinstance(one, TensorDataset) and len(one.tensors) == len(samples[0].tensors) for one in samples):
        return TensorDataset(*map(torch.cat, zip(*(one.tensors for one in samples), strict=True)))
    return _Joined(samples)


class _Joined(ConcatDataset[Any]):
    """Samples of several datasets, their labels all tensors."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)  # type: ignore[no-untyped-call]
        if isinstance(sample, (tuple, list)) and len(sample) == 2 and sample[1] is not None:
            return sample[0], torch.as_tensor(sample[1])
        return sample


def _check_alike(first: Domain, other: Domain) -> None:
    """Refuse to mix what goes into a model in another way, or what counts differently there."""
    both = f"{first.name} and {other.name} cannot be mixed"
    if first.augment != other.augment or first.active != other.active:
        option = "augment" if first.augment != other.augment else "active"
        raise UsageError(f"{both}, for they say {option}= differently; it is of a whole batch. Say the same of both")
    texts = [_as_texts(one.samples) for one in (first, other)]
    if None not in texts and texts[0] != texts[1]:
        raise UsageError(
            f"{both}, for their texts become inputs differently; say text=, length= and pack= alike of both"
        )
    if first.target_unit != other.target_unit or first.columns != other.columns:
        option = "unit" if first.target_unit != other.target_unit else "standardise, missing or onehot"
        raise UsageError(f"{both}, for the numbers of one are not those of the other ({option}=); say the same of both")
    samples, others = first.first(), other.first()
    if _kind(samples) != _kind(others) or (first.collate is None) != (other.collate is None):
        image = isinstance(samples, Tensor) and samples.ndim == 4
        hint = ". size= and channels= behind the question mark make images alike" if image else ""
        raise DataError(f"{both}: a sample is {_said(samples)} of the first, and {_said(others)} of the other{hint}")
    if isinstance(samples, Tensor) and isinstance(others, Tensor):
        numbers = [transform_of(first, samples), transform_of(other, others)]
        if len({(transform.mean, transform.std, raw) for transform, raw in numbers}) > 1:
            told = [(raw and transform.describe_numbers()) or "as they come" for transform, raw in numbers]
            raise DataError(
                f"{both}, for the numbers of the first are {told[0]}, and the other's {told[1]}. Say the same mean= "
                "and std= of both"
            )
    _check_labels(first, other, both)


def _check_labels(first: Domain, other: Domain, both: str) -> None:
    if first.labelled != other.labelled:
        without = other if first.labelled else first
        raise DataError(f"{both}, for {without.name} has no labels")
    labels, others = first.labels, other.labels
    if labels is not None and others is not None and _kind_of_labels(labels) != _kind_of_labels(others):
        raise DataError(f"{both}, for the labels of one are classes and the other's numbers, or of another shape")
    if first.classes is None or other.classes is None or first.classes == other.classes:
        return
    own = {name: number for number, name in enumerate(first.classes)}
    crossed = any(own.get(name, number) != number for number, name in enumerate(other.classes))
    # Names of a dataset from Python were numbered by nobody knows what.
    by_itself = any(one.numbering == BY_NAME or one.transform is None for one in (first, other))
    if crossed or by_itself:
        raise DataError(
            f"{both}, for their classes have different names and would have the same numbers. Give the names of all "
            "classes in one order to both (labels=), or the model outputs for both (finetune --head expand)"
        )


def _as_texts(samples: Any) -> Any:
    """Return what is said of how texts become inputs, which is one for a batch; None of other samples."""
    if isinstance(samples, Ids):
        return "packed"
    return (samples.length, samples.paired) if isinstance(samples, Texts) else None


def _kind_of_labels(labels: Tensor) -> Any:
    return labels.is_floating_point(), labels.shape[1:]


def _kind(inputs: Inputs) -> Any:
    """Return what samples must have in common to be put into one batch."""
    if isinstance(inputs, Tensor):
        return inputs.dtype, inputs.shape[1:]
    return {name: (tensor.dtype, tensor.ndim) for name, tensor in named(inputs).items()}


def _said(inputs: Inputs) -> str:
    if isinstance(inputs, Tensor):
        return f"{' x '.join(map(str, inputs.shape[1:])) or 'one number'} ({str(inputs.dtype).removeprefix('torch.')})"
    return f"a dictionary of {', '.join(named(inputs))}"
