"""Weights that an anchor does not hold itself: those of a model on the Hub, at a commit, known by its files' digests.

The record is `weights_reference` in the provenance: the `repository`, the commit that is its `revision`, the SHA-256 of
each of `files`, and of each of `tensors` (the anchor's weights) the `file` and the `name` that it has there, with the
`shape` and `dtype` (as safetensors calls it) that it has in the anchor. Weights that no file has as they are stay in
the anchor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ewc_finetune.errors import AnchorError, HubError
from ewc_finetune.hub.address import HubAddress, checked, is_commit
from ewc_finetune.hub.repository import Promise, look_up
from ewc_finetune.storage.safetensors_source import Entry, FileSource, TensorSource

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}


class Elsewhere:
    """The weights that a record names, fetched when the first one is read.

    Args:
        record: Of the weights.
        label: Whose they are, for messages.

    Raises:
        AnchorError: if the record names what cannot be.
        UsageError: if its repository or a file cannot be named so on the Hub.
    """

    def __init__(self, record: Mapping[str, Any], label: str) -> None:
        self._record = record
        self._label = label
        self._files: dict[str, FileSource] = {}
        for name, known in record["tensors"].items():
            if known["dtype"] not in _DTYPES:
                raise AnchorError(
                    f"{label}: {name} has the type {known['dtype']!r}; expected one of {', '.join(_DTYPES)}"
                )
        self._places = {file: self._place(file) for file in record["files"]}

    def _place(self, file: str) -> HubAddress:
        place = HubAddress(self._record["repository"], self._record["revision"], file)
        if not is_commit(self._record["revision"]):
            raise AnchorError(f"{self._label}: its weights are said to be at {place}, which is no file at a commit")
        return checked(place, str(place))

    def read(self, name: str) -> Tensor:
        """Return a weight.

        Raises:
            HubError: if the weights cannot be had.
            AnchorError: if they are others than the anchor was made with.
        """
        known = self._record["tensors"][name]
        file = self._files.get(known["file"]) or self._fetch(known["file"])
        tensor = file.read(known["name"]) if known["name"] in file.entries else None
        if tensor is None or list(tensor.shape) != known["shape"]:
            raise AnchorError(f"{self._label}: {known['name']} is not in {file.label} as it should be")
        return tensor.to(_DTYPES[known["dtype"]])

    def _fetch(self, file: str) -> FileSource:
        place, expected = self._places[file], self._record["files"][file]
        try:
            there = look_up(place)
            promised = (there.files.get(file) or Promise()).sha256
            if promised not in (None, expected):  # before it is fetched, whatever it is
                raise self._others(place, str(promised), expected)
            fetched = there.fetch(file)
        except HubError as error:
            raise type(error)(f"{self._label} refers to weights on the Hub, which cannot be had: {error}") from error
        if fetched.sha256 != expected:
            raise self._others(place, fetched.sha256, expected)
        return self._files.setdefault(file, FileSource(fetched.path, str(place)))

    def _others(self, place: HubAddress, digest: str, expected: str) -> AnchorError:
        return AnchorError(
            f"{self._label} was made with other weights than those at {place}: their SHA-256 is {digest}, and should "
            f"be {expected}"
        )


class ReferringSource(TensorSource):
    """The tensors of an anchor with the weights that it refers to.

    Args:
        source: Where its own tensors are.
        record: Of the weights that it refers to.

    Raises:
        AnchorError: if the record contradicts the file, or names what cannot be.
    """

    def __init__(self, source: TensorSource, record: Mapping[str, Any]) -> None:
        self._source = source
        self._elsewhere = Elsewhere(record, source.label)
        self.label, self.metadata, self.size, self.header = source.label, source.metadata, source.size, source.header
        entries = dict(source.entries)
        for name, known in record["tensors"].items():
            key = f"anchor.{name}"
            if key in entries:
                raise AnchorError(f"{self.label}: {key} is in the file, and in another too. Make the anchor again")
            entries[key] = Entry(known["dtype"], tuple(known["shape"]), 0, 0)
        self.entries = entries

    def read(self, name: str) -> Tensor:
        """See `TensorSource` and `Elsewhere`."""
        if name in self._source.entries:
            return self._source.read(name)
        return self._elsewhere.read(name.removeprefix("anchor."))


def still_elsewhere(record: Mapping[str, Any], label: str, weights: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Return the record of those weights alone that are what it says; others are to be in the anchor.

    Args:
        record: As it was when the weights were read.
        label: Whose it is, for messages.
        weights: As they are now.

    Returns:
        None if none are, or if what they refer to cannot be had now.
    """
    source = Elsewhere(record, label)
    try:
        tensors = {
            name: known
            for name, known in record["tensors"].items()
            if name in weights and _is_same(weights[name], source.read(name))
        }
    except HubError:
        return None
    used = {known["file"] for known in tensors.values()}
    files = {file: digest for file, digest in record["files"].items() if file in used}
    return {**record, "tensors": tensors, "files": files} if tensors else None


def refer(weights: Mapping[str, Tensor], place: HubAddress, files: Sequence[str]) -> dict[str, Any]:
    """Find weights in files on the Hub, to the bit, under whatever names they have there.

    Args:
        weights: On the CPU.
        place: The repository, at a commit.
        files: Its safetensors files to look into.

    Returns:
        The record of those that were found.

    Raises:
        HubError: if a file cannot be had.
        AnchorError: if none was found in them.
    """
    repository = look_up(place)
    fetched = {file: repository.fetch(file) for file in files}
    sources = {file: FileSource(copy.path, str(place.at(repository.commit, file))) for file, copy in fetched.items()}
    tensors = {}
    for file, source in sources.items():
        for name in weights.keys() & source.entries.keys():
            if _is_same(weights[name], source.read(name)):
                tensors[name] = _known(file, name, weights[name])
    left = {name: weight for name, weight in weights.items() if name not in tensors}
    by_content: dict[object, list[str]] = {}  # of which several may be alike: biases of zeros, say
    for name, weight in left.items():
        by_content.setdefault(_content(weight), []).append(name)
    shapes = {(weight.dtype, weight.shape) for weight in left.values()}
    for file, source in sources.items() if left else ():
        for name, entry in source.entries.items():
            for dtype in {dtype for dtype, shape in shapes if shape == torch.Size(entry.shape)}:
                if entry.kind in _DTYPES:
                    alike = by_content.get(_content(source.read(name).to(dtype)), [])
                    tensors |= {owner: _known(file, name, left[owner]) for owner in alike}
    if not tensors:
        raise AnchorError(f"none of the weights is in {place} as it is, so that there is nothing to refer to")
    used = {known["file"] for known in tensors.values()}
    return {
        "repository": place.repository,
        "revision": repository.commit,
        "files": {file: copy.sha256 for file, copy in fetched.items() if file in used},
        "tensors": dict(sorted(tensors.items())),
    }


def _is_same(weight: Tensor, there: Tensor) -> bool:
    return (
        weight.dtype in _KINDS
        and there.dtype in _KINDS
        and there.shape == weight.shape
        and _content(there.to(weight.dtype)) == _content(weight)
    )


def _content(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Return what is the same for tensors that are the same to the bit."""
    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return tensor.dtype, tensor.shape, hashlib.sha256(data).digest()


def _known(file: str, name: str, weight: Tensor) -> dict[str, Any]:
    return {"file": file, "name": name, "shape": list(weight.shape), "dtype": _KINDS[weight.dtype]}
