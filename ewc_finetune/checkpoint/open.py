"""From what a caller has (a path, an architecture, a module) to a model and what is known of it."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.architecture import build, complete
from ewc_finetune.checkpoint.checkpoint import Checkpoint, ModelMetadata
from ewc_finetune.checkpoint.file_format import detect, detected, is_of_anchor
from ewc_finetune.checkpoint.formats.exported import Exported, open_exported
from ewc_finetune.checkpoint.formats.from_anchor import FromAnchor
from ewc_finetune.checkpoint.formats.onnx.file import Onnx
from ewc_finetune.checkpoint.formats.pickled import Pickled
from ewc_finetune.checkpoint.formats.safetensors_file import SafetensorsFile
from ewc_finetune.checkpoint.formats.sharded import Sharded
from ewc_finetune.checkpoint.formats.sidecar import read_sidecar
from ewc_finetune.checkpoint.formats.state_dict import StateDict, find_state
from ewc_finetune.checkpoint.formats.stored_tensors import check_archive
from ewc_finetune.checkpoint.formats.torchscript import TorchScript
from ewc_finetune.checkpoint.formats.transformers_encoder import Encoder
from ewc_finetune.checkpoint.formats.transformers_folder import HuggingFace, weights_file
from ewc_finetune.checkpoint.formats.transformers_task import task_of
from ewc_finetune.checkpoint.formats.unpickling import NoPickleError, check_pickle
from ewc_finetune.checkpoint.formats.weights import Weights
from ewc_finetune.checkpoint.location import Location, fetch, locate, means_model
from ewc_finetune.checkpoint.published import find_published, is_published, transform_of_weights
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.transform import Assumption, Transform
from ewc_finetune.errors import ArchitectureError, CheckpointError, first_line
from ewc_finetune.hub.address import HubAddress
from ewc_finetune.hub.anchor_files import peek
from ewc_finetune.hub.repository import look_up
from ewc_finetune.modules.devices import random_state_kept
from ewc_finetune.modules.finite import check_model
from ewc_finetune.modules.heads import is_headless
from ewc_finetune.modules.task import ModelTask
from ewc_finetune.modules.wrappers import unwrapped
from ewc_finetune.storage.atomic import sha256
from ewc_finetune.storage.written import changed_since_written

_TEXT = re.compile(rb"[\t\n\r\x20-\x7e\x80-\xff]+")
# Formats that are no archives, and in which no code can be: their files are read as they are.
_FILES: Mapping[str, Callable[[Path], Checkpoint]] = {kind.format: kind for kind in (SafetensorsFile, Sharded, Onnx)}
_ENDINGS = {kind.format: kind.ending for kind in (SafetensorsFile, Sharded, TorchScript, Exported, Onnx, HuggingFace)}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for work.

    Attributes:
        model: The module; the caller's own where a module was passed.
        label: What to call it in messages.
        metadata: What is known of it, its architecture included where that is known.
        checkpoint: Where it comes from, and the way back; None for a module, and for fresh weights.
        fresh: Whether its weights are fresh: the model was trained on nothing yet.
    """

    model: nn.Module
    label: str
    metadata: ModelMetadata
    checkpoint: Checkpoint | None = None
    fresh: bool = False

    @property
    def sha256(self) -> str | None:
        """Digest of the checkpoint file."""
        return None if self.checkpoint is None else self.checkpoint.sha256

    @property
    def file(self) -> str | None:
        """Name of the checkpoint file without its folder, or its address on the Hub."""
        if self.checkpoint is None:
            return None
        return Path(self.checkpoint.label).name if self.checkpoint.address is None else self.checkpoint.label

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader should know of the checkpoint."""
        return () if self.checkpoint is None else self.checkpoint.remarks

    @property
    def task(self) -> ModelTask | None:
        """What the model is for, where its checkpoint says, or transformers, for a module of its own."""
        return task_of(self.model) if self.checkpoint is None else self.checkpoint.task

    @property
    def assumption(self) -> Assumption | None:
        """What is done to images unless their data says otherwise; None for fresh weights, which take what comes."""
        known = self.metadata.input
        if known:
            shape = tuple(known.get("shape", ()))[1:]
            return Assumption(Transform.read(known), "record", shape if len(shape) == 2 else None)
        if self.fresh:
            return None
        if self.checkpoint is not None and self.checkpoint.published is not None:
            return self.checkpoint.published
        if self.checkpoint is not None and self.metadata.architecture and not isinstance(self.checkpoint, FromAnchor):
            whose, transform = transform_of_weights(self.metadata.architecture)
            if transform is not None:
                return Assumption(transform, "weights", whose=whose)
        return Assumption(Transform(), "nobody")

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the packages, beside torch, that give its tensors their names."""
        return {} if self.checkpoint is None else self.checkpoint.versions

    def likelihood(self, data: Iterable[Domain]) -> str:
        """Say how its outputs are meant, unless somebody says otherwise: as it was trained, else what its task takes.

        Where neither is known, the labels of the data say it.
        """
        if self.metadata.likelihood is not None:
            return self.metadata.likelihood
        if self.task is not None:
            return self.task.likelihood
        return "gaussian" if any(domain.real_valued for domain in data) else "categorical"

    @property
    def format(self) -> str:
        """The format that it is to be written back in."""
        return StateDict.format if self.checkpoint is None else self.checkpoint.format


def open_model(
    model: str | Path | nn.Module, architecture: str | None = None, *, trust_code: bool = False, new_head: bool = False
) -> LoadedModel:
    """Open a checkpoint (or the one within an anchor), or take a module as it is.

    Args:
        model: The checkpoint, or a module; a wrapped module (`DataParallel`, say) is unwrapped.
        architecture: What to build for them; what the file carries, or the weights show, unless given. For a module it
            is only recorded.
        trust_code: Whether code in the file may run.
        new_head: Whether it is to be given a new head, so that an encoder of transformers has none yet.

    Raises:
        CheckpointError, ArchitectureError, AnchorError, NonFiniteError: see `load_checkpoint` and `Checkpoint.build`.
    """
    if isinstance(model, nn.Module):
        model = unwrapped(model)
        check_model(model, "the model's ")
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        return LoadedModel(model, type(model).__name__, ModelMetadata(architecture=architecture, frozen=frozen))
    checkpoint = load_checkpoint(model, trust_code=trust_code)
    if new_head and isinstance(checkpoint, HuggingFace) and not checkpoint.classifies:
        checkpoint = Encoder(checkpoint)
    loaded = open_checkpoint(checkpoint, architecture)
    if is_headless(loaded.model) and not new_head:
        raise ArchitectureError(
            f"{loaded.label} is a {type(loaded.model).__name__} without classes, whose outputs are no predictions. "
            "ewc-ft finetune --head new makes a classifier of it"
        )
    return loaded


def open_checkpoint(checkpoint: Checkpoint, architecture: str | None = None) -> LoadedModel:
    """Build the model of a checkpoint that is already read."""
    module, text = checkpoint.build(architecture)
    return LoadedModel(module, checkpoint.label, replace(checkpoint.metadata, architecture=text), checkpoint)


def open_fresh(architecture: str, sample_shape: tuple[int, ...], num_classes: int, seed: int) -> LoadedModel:
    """Build an architecture with fresh weights for data of this shape and so many classes.

    Raises:
        ArchitectureError: see `build`.
    """
    text = complete(architecture, sample_shape, num_classes)
    with random_state_kept(torch.device("cpu"), seed):
        return LoadedModel(build(text, trusted=True), text, ModelMetadata(architecture=text), fresh=True)


def load_checkpoint(place: str | Location, *, trust_code: bool = False) -> Checkpoint:
    """Read a checkpoint, or the checkpoint within an anchor, in whatever format it is.

    Args:
        place: The file, the index of a sharded one, a model folder of transformers, `hf:org/name` for such a folder on
            the Hub, or `hf://org/name[@revision][/file]` for a file there or the repository's anchor, or published
            weights (`torchvision:resnet18?weights=DEFAULT`).
        trust_code: Whether code in the file may run: a pickled module's, or that of a program which may do more than
            compute. None runs otherwise.

    Raises:
        CheckpointError: if the file is missing, empty or damaged, holds no model, or asks for code to be run.
        AnchorError: if it is an anchor that is damaged, or has weights without their program.
        HubError: if it cannot be had from the Hub.
    """
    if isinstance(place, str) and is_published(place):
        return _load_published(place)
    location = locate(place)
    if isinstance(location, Path):
        checkpoint = _load_path(location, trust_code, str(location))
        checkpoint.path = location
        checkpoint.remarks += changed_since_written(location, checkpoint.sha256)
        return checkpoint
    repository = look_up(location)
    path, anchor = fetch(repository)
    if anchor is not None:
        checkpoint = FromAnchor(Anchor.of_hub(anchor))
    else:
        address = replace(location.at(repository.commit), is_model=location.file is None)
        checkpoint = _load_path(path, trust_code, str(address))
        checkpoint.label, checkpoint.address = str(address), address
        checkpoint.remarks += repository.remarks
    checkpoint.path = path
    return checkpoint


def _load_published(text: str) -> Checkpoint:
    known = find_published(text)
    checkpoint = load_checkpoint(known.fetch())
    checkpoint.metadata = replace(checkpoint.metadata, architecture=known.architecture)
    if known.transform is not None:
        checkpoint.published = Assumption(known.transform, "weights", whose=known.whose)
    return checkpoint


def _load_path(path: Path, trust_code: bool, label: str) -> Checkpoint:
    """Read what lies on this machine; `label` is what to call a folder."""
    with detected(path) as (kind, archive):
        if kind == "anchor":
            return FromAnchor(Anchor.open(path))
        if kind == HuggingFace.format:
            return _load_folder(path, label)
        if kind in _FILES:
            return _FILES[kind](path)
        if archive is not None:
            if kind == Exported.format:  # its reader verifies each member that it reads
                return open_exported(archive, trust_code)
            check_archive(archive, trust_code)
            if kind == TorchScript.format:
                return TorchScript(archive, trust_code)
        elif not trust_code:
            _check_bare_pickle(path)
    return _load_pickled(path, trust_code)


def _load_pickled(path: Path, trust_code: bool) -> Checkpoint:
    """Read what torch.save wrote, whose pickles were found to ask for no more work than a checkpoint takes."""
    document = _unpickle(path, trust_code)
    if isinstance(document, nn.Module):
        return Pickled(path, document)
    keys = find_state(document, str(path))
    remarks = (f"{path}: its weights are under {keys[0]!r}; the rest of the file is kept as it is",) if keys else ()
    return StateDict(str(path), sha256(path), document, keys, remarks)


def is_anchor(place: str | Location) -> bool:
    """Whether a file, or what an address on the Hub means, is an anchor rather than a checkpoint.

    Raises:
        CheckpointError: if there is no such file.
        HubError: if it cannot be had.
    """
    location = locate(place)
    if isinstance(location, Path):
        return detect(location) == "anchor"
    if location.is_model:
        return False
    if location.file is None:
        return not means_model(look_up(location))
    peeked = peek(location)
    return peeked is not None and is_of_anchor(peeked.source.metadata)


def _load_folder(folder: Path, label: str) -> HuggingFace:
    file = weights_file(folder, label)
    weights = load_checkpoint(file)
    if not isinstance(weights, Weights):
        raise CheckpointError(f"{file} is in the format {weights.format}; expected weights by name")
    if weights.metadata == ModelMetadata():
        weights.metadata = read_sidecar(folder)
    return HuggingFace(folder, weights, file, label)


def ending_of(place: str | Location) -> str:
    """Return how files end that are in the format of this one, or of what an anchor was made from."""
    if isinstance(place, str) and is_published(place):
        place = find_published(place).place
    location = locate(place)
    if isinstance(location, HubAddress):
        if location.is_model or means_model(repository := look_up(location)):
            return HuggingFace.ending
        location = fetch(repository)[0]
    if not location.exists():
        return StateDict.ending
    kind: str | None = detect(location)
    if kind == "anchor":
        kind = Anchor.open(location, digest=False).provenance.checkpoint.get("format")
        kind = SafetensorsFile.format if kind == Sharded.format else kind  # FromAnchor writes one file for shards
    return _ENDINGS.get(str(kind), StateDict.ending)


def _check_bare_pickle(path: Path) -> None:
    try:
        check_pickle(path)
    except NoPickleError as error:
        raise _no_checkpoint(path) from error


def _unpickle(path: Path, trusted: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on old formats are not for the user of this command
            return torch.load(path, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        asked = globals_asked_for(path)
        if asked:
            raise CheckpointError(
                f"{path} is a pickle that asks for more than tensors ({', '.join(asked)}), which could run any code, "
                "so it was not loaded. Where the model can be built, save its weights alone: "
                "torch.save(model.state_dict(), path). If you know who made the file, and trust them: --trust-code"
            ) from error
        raise _no_checkpoint(path) from error
    except (RuntimeError, OSError, EOFError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint that can be read ({first_line(error)}); expected a state dict as "
            "torch.save(model.state_dict(), path) writes it, whole"
        ) from error
    except Exception as error:  # a file that is no pickle may raise anything
        raise _no_checkpoint(path) from error


def _no_checkpoint(path: Path) -> CheckpointError:
    """Return the error of a file that is none."""
    with path.open("rb") as file:
        start = file.read(256)
    what = "it is a text" if _TEXT.fullmatch(start) else "it is no archive that torch.save wrote"
    return CheckpointError(
        f"{path} is not a checkpoint: {what}; expected a state dict as torch.save(model.state_dict(), path) writes it, "
        "whole"
    )


def globals_asked_for(path: Path) -> list[str]:
    """List what a pickle would import, as far as torch can tell without running it."""
    try:
        check_pickle(path)
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001 - damaged, legacy and excessive files, and those that are no pickles, have no list
        return []
