"""Encoders of transformers that become classifiers: their weights under a head that is fresh.

What `AutoModelForSequenceClassification` and `AutoModelForImageClassification` do with a folder that has no head, with
two differences: of the encoder only its pooler may be missing, and what is written is a folder of the classifier.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ewc_finetune.checkpoint.checkpoint import ModelMetadata, cpu_state
from ewc_finetune.checkpoint.formats.safetensors_file import RECORD
from ewc_finetune.checkpoint.formats.transformers_folder import (
    HuggingFace,
    names_of_file,
    read_json,
    require_transformers,
)
from ewc_finetune.checkpoint.formats.transformers_task import classifier_of
from ewc_finetune.errors import ArchitectureError, few
from ewc_finetune.modules.heads import find_head
from ewc_finetune.storage.lazy_tensors import write_tensors

_FILE = "model.safetensors"
# What an encoder may lack: it makes one vector of many, and many are shared without it.
_POOLER = "pooler"


class Encoder(HuggingFace):
    """A model folder whose model is no classifier, opened as one with a fresh head.

    Args:
        folder: The model folder as it is.
    """

    def __init__(self, folder: HuggingFace) -> None:
        super().__init__(folder.folder, folder.weights, folder.file, folder.label)
        self.path, self.address, self.remarks = folder.path, folder.address, folder.remarks

    def _class(self, architecture: str | None) -> Any:
        if architecture is not None:
            return super()._class(architecture)
        name = classifier_of(self._config.model_type)
        if name is None:
            raise ArchitectureError(
                f"{self.label} is a {self._config.model_type}, of which transformers has no classifier of texts or "
                "images. Build the model yourself and pass it to ewc_finetune.finetune as a module"
            )
        return getattr(require_transformers(), name)

    def _accept(self, kind: Any, model: Any, differing: Sequence[str], missing: Sequence[str]) -> None:
        """Refuse weights that differ from the encoder's; its pooler may be fresh, and all that is outside of it."""
        within = f"{model.base_model_prefix}."
        inner = [name for name in missing if name.startswith(within) and not name.startswith(f"{within}{_POOLER}.")]
        super()._accept(kind, model, differing, inner)
        fresh = list(dict.fromkeys(name.removeprefix(within).partition(".")[0] for name in missing))
        self.remarks += (f"{self.label}: a {kind.__name__} is made of it; what is fresh in it: {few(fresh)}",)

    def _check_names(self, model: nn.Module, text: str) -> None:
        state = names_of_file(model, cpu_state(model))
        within = f"{model.base_model_prefix}."
        known = {*state, *(name.removeprefix(within) for name in state)}
        others = [name for name in self.state if name not in known]
        if others:
            self.remarks += (f"{self.label}: {few(others)}: no part of a classifier, left out",)

    def _write(self, folder: Path, model: nn.Module, state: Mapping[str, Tensor], metadata: ModelMetadata) -> None:
        """See `HuggingFace`: all weights of the classifier in one file, and a config that is its own."""
        self._say_classifier(folder / "config.json", model, metadata)
        write_tensors(folder / _FILE, folder / _FILE, state, {"format": "pt", RECORD: metadata.to_text()})

    def _weights_files(self, path: Path) -> list[Path]:
        return [path / _FILE]

    def _say_classifier(self, file: Path, model: Any, metadata: ModelMetadata) -> None:
        names = metadata.classes or [f"LABEL_{n}" for n in range(find_head(model)[1].out_features)]
        said = {
            "architectures": [type(model).__name__],
            "id2label": dict(enumerate(names)),
            "label2id": {name: n for n, name in enumerate(names)},
        }
        file.write_text(json.dumps(read_json(file) | said, indent=2) + "\n", encoding="utf-8")
