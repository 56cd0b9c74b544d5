"""A domain: samples, what is known of them, and a way to walk through them in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ewc_finetune.data.arrays import Arrays
from ewc_finetune.data.columns import Column
from ewc_finetune.data.draw import Part, draw_parts
from ewc_finetune.data.transform import Assumption, Transform
from ewc_finetune.errors import DataError, counted, first_line
from ewc_finetune.likelihood.active import Active
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.modules.batch import Batch, Inputs, count, is_inputs, named, take

# The largest label of classes of which most may have no sample.
_MANY_CLASSES = 100
# The keys of labels in batches that are dictionaries.
_LABELS = ("labels", "label")


@dataclass(frozen=True)
class Domain:
    """One domain's samples.

    Attributes:
        name: The data spec, or what the caller calls it.
        samples: A map-style dataset of `(input, label)`, or an iterable of whole batches such as a DataLoader. The
            label may be missing, and an input may be a dictionary of tensors, whose `labels` is then the label.
        classes: Names of the classes, where they are known.
        labels: All labels, where they are known without reading every sample.
        split: Which split the samples are, where the data has splits.
        active: The model's outputs that count for these samples; all unless given.
        collate: Makes a batch of single samples, where they are not tensors of one shape; torch's own unless given.
        numbering: How labels that are names came to their numbers, for people; None where they are numbers by
            themselves.
        transform: What a data spec says is done to its images; None where they come from no spec.
        assumed: What is done to them where that says nothing; None where that is not known.
        unit: Whether they are numbers that nobody has normalised yet, as bytes are once they are 0 to 1.
        augment: What is done to its images at random each time that they are trained on.
        remarks: What a reader should know of how the samples were chosen.
        columns: What was done to the columns of a table; none for other data.
        target_unit: What numbers to predict are divided by, where data or model say it.
        as_columns: Whether one label to a sample is given as `(n, 1)`, for a model with one real output.
        weight: How often each sample is to be taken in an epoch, in the mean, where it is mixed with others; see
            `mixture`. Once unless given.
        parts: The domains that were mixed, of which each walk draws its own share; none where nothing was.
    """

    name: str
    samples: Dataset[Any] | Iterable[Any]
    classes: tuple[str, ...] | None = None
    labels: Tensor | None = None
    split: str | None = None
    active: tuple[int, ...] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    numbering: str | None = None
    transform: Transform | None = None
    assumed: Assumption | None = None
    unit: bool = False
    augment: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    target_unit: float | None = None
    as_columns: bool = False
    weight: float | None = None
    parts: tuple[Part, ...] = ()

    @property
    def real_valued(self) -> bool:
        """Whether its labels are known, and are one real number to each sample."""
        labels = self.labels
        return labels is not None and labels.is_floating_point() and tuple(labels.shape[1:]) in ((), (1,))

    @property
    def indexable(self) -> bool:
        """Whether any sample can be had by its number, so that batch size and order are ours to choose."""
        return _is_map_style(self.samples)

    @property
    def read_singly(self) -> bool:
        """Whether samples are read one by one, rather than cut from tensors in memory or taken in batches."""
        return self.indexable and not (isinstance(self.samples, (TensorDataset, Arrays)) and self.collate is None)

    @property
    def size(self) -> int | None:
        """The number of samples, of one walk; None where it is not known before they have been read."""
        if self.parts:
            return sum(part.drawn for part in self.parts)
        counted = self.samples.dataset if isinstance(self.samples, DataLoader) else self.samples
        return len(cast("Sized", counted)) if _is_map_style(counted) else None

    def is_raw(self, samples: Tensor) -> bool:
        """Whether some of the samples are images as they come; others are somebody's inputs already."""
        return samples.ndim == 4 and (samples.dtype == torch.uint8 or (self.unit and samples.is_floating_point()))

    def likelihood(self, likelihood: Likelihood) -> Likelihood:
        """Return the likelihood of these samples' labels: of the active outputs, where not all are."""
        return likelihood if self.active is None else Active(likelihood, self.active)

    def count_classes(self, *, dense: bool = False) -> int:
        """Return how many classes there are.

        Args:
            dense: Whether labels with large gaps between them are refused, for they hardly are numbers of classes.

        Raises:
            DataError: if neither names nor labels say it.
        """
        if self.classes is not None:
            return len(self.classes)
        if self.labels is None or not len(self.labels):
            raise DataError(
                f"{self.name} has no labels that say how many classes there are. Name them (target=NAME of tables, "
                "arrays and datasets), or build the model and pass it as a module"
            )
        if self.labels.ndim == 2:  # a probability, or an answer of yes and no, for each
            return self.labels.shape[1]
        least, most = int(self.labels.min()), int(self.labels.max())
        # To count the different ones takes a while where there are many samples.
        if least < 0 or (dense and most > _MANY_CLASSES and 2 * len(set(self.labels.tolist())) < most):
            different = len(set(self.labels.tolist()))
            raise DataError(
                f"{self.name}: its labels are {counted(different, 'different whole number')} from {least:,} to "
                f"{most:,}, which number no classes from 0. If they are to be predicted as numbers: --likelihood "
                "gaussian; if each is a class: labels= names all of them, in the order of the outputs"
            )
        return most + 1

    def count_batches(self, batch_size: int) -> int | None:
        """Return how many batches one walk has, or None where it is not known."""
        if self.indexable:
            return -(-(self.size or 0) // batch_size)
        try:
            return len(self.samples)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def labelled(self) -> bool:
        """Whether samples come with labels, by the first of them."""
        if self.labels is not None:
            return True
        first = self.subset([0]) if self.indexable and self.size else self
        return next((labels for _, labels in first.batches(1)), None) is not None

    def first(self) -> Inputs:
        """Return one input as a batch of one.

        Raises:
            DataError: if there is no sample.
        """
        for inputs, _ in self.batches(1):
            return take(inputs, slice(1))
        raise DataError(f"{self.name} has no samples")

    def subset(self, indices: Sequence[int]) -> Domain:
        """Return the domain of the samples at these indices, in this order."""
        labels = None if self.labels is None else self.labels[torch.as_tensor(indices, dtype=torch.long)]
        samples: Dataset[Any]
        if hasattr(self.samples, "subset"):
            samples = self.samples.subset(indices)
        elif isinstance(self.samples, TensorDataset):
            chosen = torch.as_tensor(indices, dtype=torch.long)
            samples = TensorDataset(*(tensor[chosen] for tensor in self.samples.tensors))
        else:
            samples = Subset(self.samples, indices)  # type: ignore[arg-type]
        return replace(self, samples=samples, labels=labels, parts=())

    def batches(
        self, batch_size: int, shuffle: torch.Generator | None = None, *, workers: int = 0, skip: int = 0
    ) -> Iterator[Batch]:
        """Walk through the samples once.

        Args:
            batch_size: Samples to a batch; the last may be smaller. A caller's own batches stay as they are.
            shuffle: Draws the order; in the order they have unless given, or where they are not indexable.
            workers: Processes that read ahead, where samples are not in memory or the caller's own batches.
            skip: Batches to leave out at the start, unread where that can be.

        Raises:
            DataError: if samples are not tensors, or don't have one shape.
        """
        if isinstance(self.samples, (TensorDataset, Arrays)) and not self.read_singly:
            # Whole batches are cut from the tensors: no loader, no collating of single samples.
            tensors, order = self.samples.tensors, self._order(shuffle)
            put = self.samples.named if isinstance(self.samples, Arrays) else list[Tensor]
            for start in range(skip * batch_size, self.size or 0, batch_size):
                if order is None:
                    yield self._read(put([tensor[start : start + batch_size] for tensor in tensors]))
                else:  # twice as fast as by brackets
                    chosen = order[start : start + batch_size]
                    yield self._read(put([tensor.index_select(0, chosen) for tensor in tensors]))
            return
        try:
            for batch in self._loader(batch_size, shuffle, workers, skip):
                yield self._read(batch)
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"the samples of {self.name} cannot be put into batches: {first_line(error)}. Samples must be tensors "
                "of one shape; for images of several sizes add ?size=PIXELS"
            ) from error

    def _order(self, shuffle: torch.Generator | None) -> Tensor | None:
        """Return the numbers of the samples of one walk; None for all, as they come."""
        if self.parts:
            return draw_parts(self.parts, shuffle)
        return None if shuffle is None else torch.randperm(self.size or 0, generator=shuffle)

    def _loader(self, batch_size: int, shuffle: torch.Generator | None, workers: int, skip: int) -> Iterable[Any]:
        samples: Any = self.samples
        # With a generator of its own, a loader takes nothing from torch's global one.
        own: dict[str, Any] = {"generator": torch.Generator(), "collate_fn": self.collate, "num_workers": workers}
        if isinstance(samples, IterableDataset):
            if workers:  # each would read the whole stream
                raise DataError(f"{self.name} is a stream, which only one process can read; leave --workers out")
            return islice(DataLoader(samples, batch_size, **own), skip, None)
        if not self.indexable:
            return islice(samples, skip, None)
        drawn_order = self._order(shuffle)
        order = range(len(samples)) if drawn_order is None else drawn_order.tolist()
        if workers and shuffle is not None:
            # Workers draw other random numbers in each epoch and take turns at the samples, so a run that goes on in
            # the middle of an epoch gets the same samples only if all before them are read again.
            drawn = torch.randint(2**62, (), generator=shuffle.clone_state())  # which leaves the order of what follows
            own["generator"].manual_seed(int(drawn))
            return islice(DataLoader(samples, batch_sampler=_batched(order, batch_size), **own), skip, None)
        return DataLoader(samples, batch_sampler=_batched(order[skip * batch_size :], batch_size), **own)

    def _read(self, batch: Any) -> Batch:
        inputs, labels = _parts(batch)
        if not is_inputs(inputs) or not (labels is None or isinstance(labels, Tensor)):
            parts = batch if isinstance(batch, (tuple, list)) else [batch]
            raise DataError(
                f"a batch of {self.name} is ({', '.join(map(_kind, parts))}); expected (inputs, labels) or inputs "
                "alone, where inputs are a tensor or a dictionary of tensors and labels a tensor. Several inputs are a "
                "dictionary, by the names of the model's arguments: ({'left': a, 'right': b}, labels)"
            )
        inputs = inputs if isinstance(inputs, Tensor) else dict(inputs)
        if labels is not None and self.as_columns and labels.ndim == 1:
            labels = labels[:, None]
        return inputs, labels if labels is None or labels.is_floating_point() else labels.long()


def as_domain(data: object, name: str = "data") -> Domain:
    """Make a domain of what a caller has: a domain, a dataset, or an iterable of batches.

    Raises:
        DataError: if it is none of these, or can be walked through only once.
    """
    if isinstance(data, Domain):
        return data
    if _is_map_style(data):
        labels = data.tensors[1] if isinstance(data, TensorDataset) and len(data.tensors) == 2 else None
        classes = getattr(data, "classes", None)
        return Domain(name, data, classes=None if classes is None else tuple(map(str, classes)), labels=labels)
    if isinstance(data, Iterator):
        raise DataError(f"{name} is a generator, which can be read only once; pass a DataLoader, dataset or list")
    if isinstance(data, Iterable):
        return Domain(name, data)
    raise DataError(f"{name} is a {type(data).__name__}; expected a data spec, a dataset or a loader of batches")


def _batched(order: Sequence[int], batch_size: int) -> BatchSampler:
    return BatchSampler(order, batch_size, drop_last=False)


def _kind(part: Any) -> str:
    if isinstance(part, Mapping):
        return "{" + ", ".join(f"{name}: {type(value).__name__}" for name, value in part.items()) + "}"
    if isinstance(part, (tuple, list)):
        return f"({', '.join(type(value).__name__ for value in part[:4])}{', ...' if len(part) > 4 else ''})"
    return type(part).__name__


def _parts(batch: Any) -> tuple[Any, Any]:
    """Take a batch apart into inputs and labels, whatever they are."""
    if isinstance(batch, (tuple, list)):
        inputs, labels = (*batch, None)[:2] if 1 <= len(batch) <= 2 else (None, None)
    else:
        inputs, labels = batch, None
    if labels is None and isinstance(inputs, Mapping):
        labels = next((inputs[name] for name in _LABELS if name in inputs), None)
        inputs = {name: value for name, value in inputs.items() if name not in _LABELS}
    return inputs, labels


def _is_map_style(data: Any) -> TypeGuard[Dataset[Any]]:
    """Whether it has samples by number; lists and loaders hold batches."""
    batched = (DataLoader, IterableDataset, list, tuple, str, dict)
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, batched)


class Fingerprint:
    """Digest of the samples that pass by, in order, whatever size the batches have."""

    def __init__(self) -> None:
        self._inputs = hashlib.sha256()
        self._labels = hashlib.sha256()
        self._described = False

    def update(self, inputs: Inputs, labels: Tensor | None) -> None:
        """Take in one batch, as it was before any preprocessing."""
        tensors = named(inputs)
        mask = tensors.get("attention_mask")
        if not self._described:
            for name, tensor in tensors.items():
                shape = tuple(tensor.shape[1:]) if mask is None else ()
                self._inputs.update(f"{name}{tensor.dtype}{shape}".encode())
            self._described = True
        if isinstance(inputs, Tensor):
            self._inputs.update(as_bytes(inputs))
            if labels is not None:
                self._labels.update(as_bytes(labels))
            return
        # Sample by sample: neither the size of the batches matters nor what fills up the shorter samples of one.
        for n in range(count(inputs)):
            for tensor in tensors.values():
                self._inputs.update(as_bytes(_unmasked(tensor[n], mask, n)))
            if labels is not None:
                self._labels.update(as_bytes(_unmasked(labels[n], mask, n)))

    def hexdigest(self) -> str:
        """Return the digest of inputs and labels together."""
        return hashlib.sha256(self._inputs.digest() + self._labels.digest()).hexdigest()


def _unmasked(sample: Tensor, mask: Tensor | None, n: int) -> Tensor:
    return sample if mask is None or mask[n].shape != sample.shape else sample[mask[n] != 0]


def as_bytes(tensor: Tensor) -> Any:
    """Return what a tensor holds, for a digest."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
