"""Weights in several safetensors files with an index of which has which, as the Hub has large models."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.safetensors_file import RECORD, read_safetensors
from ewc_finetune.checkpoint.formats.weights import Weights, merged
from ewc_finetune.errors import CheckpointError, UsageError
from ewc_finetune.storage.atomic import atomic_writes, sha256, storage_errors
from ewc_finetune.storage.lazy_tensors import write_tensors

_INDEX = ".safetensors.index.json"


class Sharded(Weights):
    """The weights that an index names; it is the file that is read and written, its shards lie beside it.

    Args:
        path: The index.
    """

    format = "sharded safetensors"
    ending = _INDEX

    def __init__(self, path: Path) -> None:
        self._index: dict[str, Any] = json.loads(path.read_bytes())
        self._shards: list[tuple[str, dict[str, str]]] = []
        self._others: dict[str, dict[str, Tensor]] = {}  # tensors that the index does not name
        state: dict[str, Tensor] = {}
        shards = self._index["weight_map"].values()
        if not all(isinstance(name, str) for name in shards):
            raise CheckpointError(f"{path} is damaged: its weight_map should name a file for each tensor")
        for name in sorted(set(shards)):
            if Path(name).name != name:
                raise CheckpointError(f"{path} names a shard {name!r}, which is no file beside it")
            if not (path.parent / name).is_file():
                raise CheckpointError(f"{path} names {name}, which is not beside it. Copy all of its files")
            tensors, header = read_safetensors(path.parent / name)
            self._shards.append((name, header))
            self._others[name] = {n: t for n, t in tensors.items() if n not in self._index["weight_map"]}
            state |= tensors
        missing = [name for name in self._index["weight_map"] if name not in state]
        if missing:
            raise CheckpointError(f"{path}: {missing[0]} is not in the file that should have it. Copy all files again")
        state = {name: state[name] for name in self._index["weight_map"]}
        text = self._shards[0][1].get(RECORD) if self._shards else None
        super().__init__(
            str(path),
            _digest(path, [name for name, _ in self._shards]),
            ModelMetadata.read_text(text, str(path)),
            state,
        )

    def outputs(self, path: Path) -> list[Path]:
        """See `Checkpoint`."""
        if not path.name.endswith(_INDEX):
            raise UsageError(f"the output {path} is an index of shards; let it end in {_INDEX}")
        stem, count = path.name.removesuffix(_INDEX), len(self._shards)
        return [
            *(path.with_name(f"{stem}-{n:05}-of-{count:05}.safetensors") for n in range(1, count + 1)),
            path,
        ]

    def save_state(
        self, path: Path, state: OrderedDict[str, Any], metadata: ModelMetadata, *, overwrite: bool = True
    ) -> None:
        """See `Stateful`; every tensor stays in the shard that it was in."""
        tensors = merged(self.state, self.prefix, state, metadata.head)
        *shards, index = self.outputs(path)
        names = {name: shard.name for (name, _), shard in zip(self._shards, shards, strict=True)}
        places = {tensor: names[shard] for tensor, shard in self._index["weight_map"].items()}
        weight_map = {tensor: places.get(tensor, shards[-1].name) for tensor in tensors}
        with atomic_writes([*shards, index], overwrite=overwrite) as temporaries:
            for number, ((before, header), shard) in enumerate(zip(self._shards, shards, strict=True)):
                own = self._others[before] | {
                    name: tensors[name] for name, place in weight_map.items() if place == shard.name
                }
                known = {RECORD: metadata.to_text()} if number == 0 else {}
                with storage_errors(shard):
                    write_tensors(temporaries[number], shard, own, header | known)
            with storage_errors(index):
                text = json.dumps({**self._index, "weight_map": weight_map}, indent=2)
                temporaries[-1].write_text(text + "\n", encoding="utf-8")


def _digest(index: Path, shards: Sequence[str]) -> str:
    """Return a digest of the index and all of its shards."""
    parts = [sha256(index), *(sha256(index.parent / name) for name in shards)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
