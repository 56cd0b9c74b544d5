"""Model folders of Hugging Face's transformers: `config.json` with weights, and what travels along with them.

transformers loads the model, whose modules may have other names than the file; the weights are written back into the
file that they came from (safetensors, shards, a state dict), so that names, dtypes and everything else in it stay as
they were. Nothing in a folder is run: models that bring code of their own are refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.checkpoint.architecture import TRANSFORMERS
from ewc_finetune.checkpoint.checkpoint import Checkpoint, ModelMetadata, cpu_state
from ewc_finetune.checkpoint.formats.transformers_task import CLASSIFIERS, kind_of, task_of_class
from ewc_finetune.checkpoint.formats.weights import Weights
from ewc_finetune.errors import ArchitectureError, CheckpointError, StorageError, few, first_line
from ewc_finetune.modules.devices import random_state_kept
from ewc_finetune.modules.finite import check_model
from ewc_finetune.storage.atomic import atomic_folder, storage_errors

# The names that a folder's weights may have, in the order of preference.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
# Weights in other formats, and what a trainer keeps: they belong to the old model and are not copied to a new one.
_STALE = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|gguf|ot|tflite)|.*\.index\.json|trainer_state\.json"
)
# Numbers of 8 bits that only quantized weights are in.
_EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
# Folders within a folder that are no part of the model.
_APART = re.compile(r"checkpoint-\d+|runs|onnx|\..*|__pycache__")


class HuggingFace(Checkpoint):
    """A model folder, read and written as a whole.

    Args:
        folder: Where it lies.
        weights: What its weights' own file holds.
        file: That file.
        label: What to call it: the folder, or `hf:org/name`.
    """

    format = "hugging face"
    ending = ""

    def __init__(self, folder: Path, weights: Weights, file: Path, label: str) -> None:
        super().__init__(label, weights.sha256, weights.metadata)
        self.folder = folder
        self.weights = weights
        self.file = file
        self.state = weights.state

    @cached_property
    def _config(self) -> Any:
        """The config, as transformers reads it.

        Raises:
            ArchitectureError: if it has no such model, or only by running code from the folder.
            CheckpointError: if the config is damaged.
        """
        transformers = require_transformers()
        try:
            return transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            if "trust_remote_code" in str(error) or "auto_map" in read_json(self.folder / "config.json"):
                raise ArchitectureError(
                    f"{self.label} brings a model class of its own as code, which is not run. Build the model yourself "
                    "and pass it to ewc_finetune.consolidate and finetune as a module"
                ) from error
            raise CheckpointError(f"{self.label}: its config.json cannot be read ({first_line(error)})") from error

    @property
    def classifies(self) -> bool:
        """Whether its config names the class of a classifier; one that names none is not taken for another."""
        named = read_json(self.folder / "config.json").get("architectures") or []
        return kind_of(str(next(iter(named), ""))) in CLASSIFIERS

    def build(self, architecture: str | None) -> tuple[nn.Module, str | None]:
        """See `Checkpoint`.

        Raises:
            ArchitectureError: if the config names no class of transformers, or not the one of its weights: the first
                that differ are named.
            CheckpointError: if weights are quantized, or tied ones contradict each other.
            NonFiniteError: if a weight is NaN or infinite.
        """
        kind = self._class(architecture)
        quantization = getattr(self._config, "quantization_config", None)
        if quantization is not None:
            settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
            raise CheckpointError(
                f"{self.label} is quantized ({settings.get('quant_method', 'unknown method')}); quantized weights "
                "cannot be trained. Use the model from before quantization"
            )
        text = TRANSFORMERS + kind.__name__
        model = self._load(kind)
        self._check_names(model, text)
        check_model(model, f"{self.label}: ")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in self.metadata.frozen)
        model.config.use_cache = False  # the keys and values of earlier tokens serve generation alone
        self.task = task_of_class(kind.__name__, self._config, self.folder)
        self.versions = {"transformers": require_transformers().__version__}
        self.metadata = replace(self.metadata, classes=self.metadata.classes or list(self.task.classes or ()) or None)
        return model.eval(), text

    def _load(self, kind: Any) -> Any:
        """Have transformers load the weights, in the widest dtype that they have."""
        floating = [tensor.dtype for tensor in self.state.values() if tensor.is_floating_point()]
        narrow = next((name for name, tensor in self.state.items() if tensor.dtype in _EIGHT_BITS), None)
        if narrow is not None:
            raise CheckpointError(
                f"{self.label}: {narrow} is {self.state[narrow].dtype}; quantized weights cannot be trained. Use the "
                "model from before quantization"
            )
        widest = functools.reduce(torch.promote_types, floating, floating[0]) if floating else torch.float32
        try:
            with random_state_kept(torch.device("cpu")), _quiet():
                model, loading = kind.from_pretrained(
                    self.folder,
                    dtype=widest,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=".safetensors" in self.file.name,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )
        except Exception as error:
            self._refuse(kind, self._differences(kind))
            raise ArchitectureError(
                f"{self.label}: transformers cannot load it as {kind.__name__} ({first_line(error)})"
            ) from error
        differing = [
            f"{name} has shape {tuple(own)} in the weights and {tuple(wanted)} in the config's model"
            for name, own, wanted in sorted(loading["mismatched_keys"])
        ]
        self._accept(kind, model, differing, sorted(loading["missing_keys"]))
        return model

    def _accept(self, kind: Any, model: Any, differing: Sequence[str], missing: Sequence[str]) -> None:
        """Refuse weights that differ from the config's model, or that are not there."""
        if missing and not differing and all(not name.startswith(f"{model.base_model_prefix}.") for name in missing):
            raise ArchitectureError(
                f"{self.label} has no head for a {kind.__name__}: {few(missing)} is not in the weights. "
                "ewc-ft finetune --head new puts a fresh one on it"
            )
        self._refuse(
            kind, [*differing, *(f"{name} is in the config's model but not in the weights" for name in missing)]
        )

    def _differences(self, kind: Any) -> list[str]:
        """List in what the weights differ from those of the config's model, by the names that files have."""
        try:
            with _quiet(), torch.device("meta"):
                blank = kind(copy.deepcopy(self._config))
                wanted = names_of_file(blank, blank.state_dict())
        except Exception:  # noqa: BLE001 - then it is not this that can be told
            return []
        differing = [
            f"{name} has shape {tuple(self.state[name].shape)} in the weights and {tuple(tensor.shape)} in the "
            "config's model"
            for name, tensor in wanted.items()
            if name in self.state and self.state[name].shape != tensor.shape
        ]
        missing = [name for name in wanted if name not in self.state and name not in (blank._tied_weights_keys or ())]
        return differing + [f"{name} is in the config's model but not in the weights" for name in missing]

    def _refuse(self, kind: Any, problems: Sequence[str]) -> None:
        if problems:
            raise ArchitectureError(
                f"{self.label}: its weights are not those of {kind.__name__} as config.json describes it: "
                f"{few(problems, '; ')}. Copy both from where the model came"
            )

    def _check_names(self, model: nn.Module, text: str) -> None:
        """See that every weight has its place in the file, and say what else is there."""
        state = names_of_file(model, cpu_state(model))
        placed = {tensor.data_ptr() for name, tensor in state.items() if name in self.state}
        lost = [name for name, t in state.items() if name not in self.state and t.data_ptr() not in placed]
        if lost:
            raise ArchitectureError(
                f"{self.label}: {lost[0]} has another name in the file than transformers writes it under. Load it with "
                f"{text.removeprefix(TRANSFORMERS)}.from_pretrained, write it anew with save_pretrained, and start "
                "from that"
            )
        for name, tensor in state.items():
            if name in self.state and tensor.is_floating_point() and not self.state[name].is_floating_point():
                raise CheckpointError(
                    f"{self.label}: {name} is {self.state[name].dtype}; quantized and integer weights cannot be "
                    "trained. Use the model from before quantization"
                )
        others = [name for name in self.state if name not in state]
        if others:
            self.remarks += (f"{self.label}: {few(others)}: none of the model's, kept as it is",)

    def save(
        self,
        path: Path,
        model: nn.Module,
        metadata: ModelMetadata,
        dtypes: Mapping[str, torch.dtype] | None = None,
        *,
        overwrite: bool = True,
    ) -> None:
        """See `Checkpoint`; tokenizer, processor and configs are copied as they are."""
        with atomic_folder(path, overwrite=overwrite) as temporary, storage_errors(path):
            self._copy_travelling(temporary)
            self._write(temporary, model, names_of_file(model, cpu_state(model, dtypes)), metadata)

    def _write(self, folder: Path, model: nn.Module, state: Mapping[str, Tensor], metadata: ModelMetadata) -> None:
        """Write the weights into a folder, and what its config says of classes."""
        own = {name: tensor.to(self.state[name].dtype) for name, tensor in state.items() if name in self.state}
        self._say_classes(folder / "config.json", own, metadata)
        stored = OrderedDict(own)
        stored._metadata = OrderedDict()  # type: ignore[attr-defined]
        self.weights.save_state(folder / self.file.name, stored, metadata)

    def check_folder(self, path: Path) -> None:
        """Refuse to replace a folder that has anything in it but such a model, as it would be lost.

        Raises:
            StorageError: naming it.
        """
        own = {*self._travelling(), *(file.relative_to(path) for file in self._weights_files(path))}
        for file in sorted(path.rglob("*")) if path.is_dir() else ():
            if not file.is_dir() and file.relative_to(path) not in own:
                raise StorageError(
                    f"cannot replace {path}: {file.relative_to(path)} in it is no part of this model, and would be "
                    "lost. Choose another path"
                )

    def _weights_files(self, path: Path) -> list[Path]:
        """Return the files of a folder that `save` writes weights into."""
        return self.weights.outputs(path / self.file.name)

    def _copy_travelling(self, folder: Path) -> None:
        for name in self._travelling():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / name, folder / name)

    def _travelling(self) -> list[Path]:
        """List what goes along: all but weights, and what a trainer or git keeps."""
        return [
            file.relative_to(self.folder)
            for file in sorted(self.folder.rglob("*"))
            if file.is_file()
            and not _STALE.fullmatch(file.name)
            and not any(_APART.fullmatch(part) for part in file.relative_to(self.folder).parts[:-1])
        ]

    def _say_classes(self, file: Path, own: Mapping[str, Tensor], metadata: ModelMetadata) -> None:
        """Let the config of a classifier that was given another head say how many outputs it has, and what they are."""
        known = dict(self._config.id2label or {})
        changed = {len(tensor) for name, tensor in own.items() if tensor.shape != self.state[name].shape}
        outputs = max(changed, default=len(known))
        renewed = metadata.head is not None and metadata.head != self.metadata.head
        if not changed and not renewed:
            return
        names = metadata.classes or [f"LABEL_{n}" if renewed else known.get(n, f"LABEL_{n}") for n in range(outputs)]
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
        file.write_text(json.dumps(read_json(file) | labels, indent=2) + "\n", encoding="utf-8")

    def _class(self, architecture: str | None) -> Any:
        """Return the class of the model: the one that the user names, or the config."""
        transformers = require_transformers()
        named = read_json(self.folder / "config.json").get("architectures") or []
        asked = architecture not in (None, TRANSFORMERS + "auto")
        if asked and not str(architecture).startswith(TRANSFORMERS):
            raise ArchitectureError(
                f"{self.label} is a model of transformers, and --arch {architecture} is none. Leave --arch away, or "
                f"name a class: {TRANSFORMERS}BertForSequenceClassification"
            )
        name = str(architecture).removeprefix(TRANSFORMERS) if asked else next(iter(named), None)
        if name is None:
            raise ArchitectureError(
                f"{self.label}: its config.json does not say what class the model is of (architectures). Name it: "
                f"--arch {TRANSFORMERS}BertForSequenceClassification, say"
            )
        model_class = getattr(transformers, str(name), None) if str(name).isidentifier() else None
        if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
            raise ArchitectureError(
                f"{self.label} is a {name}, which transformers {transformers.__version__} does not have; code that "
                "comes with a model is not run. Try another version of transformers, or pass the model as a module"
            )
        return model_class


def weights_file(folder: Path, label: str) -> Path:
    """Return the file of a model folder that has the weights, or the index of several.

    Raises:
        CheckpointError: if there is none, saying what there is.
    """
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{label} is an adapter, not a model. Merge it first: model.merge_and_unload().save_pretrained(FOLDER)"
        )
    if (folder / "pytorch_model.bin.index.json").is_file():
        raise CheckpointError(
            f"{label} has its weights in several pickles (pytorch_model.bin.index.json). Save it as safetensors: load "
            "it with transformers' from_pretrained, and save_pretrained(FOLDER)"
        )
    raise CheckpointError(f"{label} has no weights: expected one of {', '.join(_WEIGHTS)} beside config.json")


def require_transformers() -> Any:
    """Import transformers, of which most people need nothing.

    Raises:
        CheckpointError: if it isn't installed, saying how it is.
    """
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            "models of Hugging Face need transformers; install it: pip install 'ewc-finetune[transformers]'"
        ) from error
    return transformers


def read_json(path: Path) -> dict[str, Any]:
    """Read a config.

    Raises:
        CheckpointError: if it is no JSON object.
    """
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}; expected the config of a model")
    return config


def names_of_file(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state by the names, and in the parts, that files of the model have: not always those of its modules."""
    from transformers.core_model_loading import revert_weight_conversion

    renamed: dict[str, Tensor] = revert_weight_conversion(model, dict(state))
    return renamed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the bars and reports of transformers back: what is wrong is said here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
