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
from ewc_finetune.hub.address import HubAddress, is_commit, parse_address
from ewc_finetune.hub.repository import look_up
from ewc_finetune.tensor_source import Entry, FileSource, TensorSource, bytes_of

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KINDS = {dtype: kind for kind, dtype in _DTYPES.items()}


class ReferringSource(TensorSource):
    """The tensors of an anchor with the weights that it refers to, which are fetched when the first one is read.

    Args:
        source: Where its own tensors are.
        record: Of the weights that it refers to.

    Raises:
        AnchorError: if the record contradicts the file, or names what cannot be.
    """

    def __init__(self, source: TensorSource, record: Mapping[str, Any]) -> None:
        self._source = source
        self._record = record
        self._files: dict[str, FileSource] = {}
        self.label, self.metadata, self.size, self.header = source.label, source.metadata, source.size, source.header
        entries = dict(source.entries)
        for name, known in record["tensors"].items():
            key, kind = f"anchor.{name}", known["dtype"]
            if key in entries:
                raise AnchorError(f"{self.label}: {key} is in the file, and in another too. Make the anchor again")
            if kind not in _DTYPES:
                raise AnchorError(f"{self.label}: {key} has the type {kind!r}; expected one of {', '.join(_DTYPES)}")
            entries[key] = Entry(kind, tuple(known["shape"]), 0, 0)
        self.entries = entries
        self._places = {file: self._place(file) for file in record["files"]}

    def _place(self, file: str) -> HubAddress:
        place = HubAddress(self._record["repository"], self._record["revision"], file)
        if not is_commit(self._record["revision"]) or parse_address(str(place)) != place:
            raise AnchorError(f"{self.label}: its weights are said to be at {place}, which is no file at a commit")
        return place

    def read(self, name: str) -> Tensor:
        """See `TensorSource`.

        Raises:
            HubError: if the weights cannot be had.
            AnchorError: if they are others than the anchor was made with.
        """
        if name in self._source.entries:
            return self._source.read(name)
        known = self._record["tensors"][name.removeprefix("anchor.")]
        file = self._files.get(known["file"]) or self._fetch(known["file"])
        tensor = file.read(known["name"]) if known["name"] in file.entries else None
        if tensor is None or list(tensor.shape) != known["shape"]:
            raise AnchorError(f"{self.label}: {known['name']} is not in {file.label} as it should be")
        return tensor.to(_DTYPES[known["dtype"]])

    def _fetch(self, file: str) -> FileSource:
        place = self._places[file]
        try:
            found = look_up(place).fetch(file)
        except HubError as error:
            raise type(error)(f"{self.label} refers to weights on the Hub, which cannot be had: {error}") from error
        if found.sha256 != self._record["files"][file]:
            raise AnchorError(
                f"{self.label} was made with other weights than those at {place}: their SHA-256 is {found.sha256}, and "
                f"should be {self._record['files'][file]}"
            )
        return self._files.setdefault(file, FileSource(found.path, str(place)))


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
    sources = {file: FileSource(found.path, str(place.at(repository.commit, file))) for file, found in fetched.items()}
    tensors = {}
    for file, source in sources.items():
        for name in weights.keys() & source.entries.keys():
            if _is_same(weights[name], source.read(name)):
                tensors[name] = _known(file, name, weights[name])
    left = {name: weight for name, weight in weights.items() if name not in tensors}
    by_content = {_content(weight): name for name, weight in left.items()}
    shapes = {(weight.dtype, weight.shape) for weight in left.values()}
    for file, source in sources.items() if left else ():
        for name, entry in source.entries.items():
            for dtype in {dtype for dtype, shape in shapes if shape == torch.Size(entry.shape)}:
                owner = by_content.get(_content(source.read(name).to(dtype)))
                if owner is not None and entry.kind in _DTYPES:
                    tensors[owner] = _known(file, name, left[owner])
    if not tensors:
        raise AnchorError(f"none of the weights is in {place} as it is, so that there is nothing to refer to")
    used = {known["file"] for known in tensors.values()}
    return {
        "repository": place.repository,
        "revision": repository.commit,
        "files": {file: found.sha256 for file, found in fetched.items() if file in used},
        "tensors": dict(sorted(tensors.items())),
    }


def referred_bytes(record: Mapping[str, Any]) -> int:
    """Return what the weights would take that an anchor only refers to."""
    return sum(bytes_of(Entry(known["dtype"], tuple(known["shape"]), 0, 0)) for known in record["tensors"].values())


def _is_same(weight: Tensor, found: Tensor) -> bool:
    return (
        weight.dtype in _KINDS
        and found.dtype in _KINDS
        and found.shape == weight.shape
        and _content(found.to(weight.dtype)) == _content(weight)
    )


def _content(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Return what is the same for tensors that are the same to the bit."""
    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return tensor.dtype, tensor.shape, hashlib.sha256(data).digest()


def _known(file: str, name: str, weight: Tensor) -> dict[str, Any]:
    return {"file": file, "name": name, "shape": list(weight.shape), "dtype": _KINDS[weight.dtype]}
