"""Weights that torchvision and timm publish for their architectures: where they are, and how they want their images.

`torchvision:resnet18?weights=DEFAULT` and `timm:resnet18?weights=a1_in1k` name a checkpoint as a path does.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ewc_finetune.checkpoint.architecture import TIMM, TORCHVISION, refuse_weights, require_timm
from ewc_finetune.data.transform import INTERPOLATIONS, Transform
from ewc_finetune.errors import CheckpointError, WrongArchitectureError, first_line, suggest
from ewc_finetune.hub.address import HubAddress, parse_address
from ewc_finetune.specs.query import Address, parse

# Models that take images normalised with ImageNet's mean and std and, with `transform_input`, turn them into images
# normalised with 0.5 and 0.5: (x * 0.229 + 0.485 - 0.5) / 0.5 = (pixel - 0.5) / 0.5. Without it they take the latter.
_TURNING = ("googlenet", "inception_v3")
_DEFAULT = "DEFAULT"
_WEIGHTS = re.compile(rf"({TORCHVISION}|{TIMM})[^?]*\?(.*&)?weights=.*")


@dataclass(frozen=True)
class Published:
    """Weights that somebody publishes.

    Attributes:
        architecture: What they are of.
        whose: What to call them, for people.
        transform: What is done to their images; None where nobody says.
        place: Where they are on the Hub, or the path that torch's own downloads have.
        url: Where they are downloaded from, if that path is not there yet.
    """

    architecture: str
    whose: str
    transform: Transform | None
    place: Path | HubAddress
    url: str | None = None

    def fetch(self) -> Path | HubAddress:
        """Return where they are, downloaded unless they are there already.

        Raises:
            CheckpointError: if they cannot be downloaded.
        """
        if isinstance(self.place, HubAddress) or self.place.exists():
            return self.place
        from torch.hub import HASH_REGEX, download_url_to_file

        known = HASH_REGEX.search(self.place.name)
        try:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            download_url_to_file(str(self.url), str(self.place), known and known.group(1), progress=False)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.whose} cannot be downloaded from {self.url} ({first_line(error)}). Put the file there by hand: "
                f"{self.place}"
            ) from error
        return self.place


def is_published(text: object) -> bool:
    """Whether a text names published weights, as far as its form tells."""
    return isinstance(text, str) and bool(_WEIGHTS.fullmatch(text))


def name_of(text: str) -> str:
    """Return what the architecture of published weights is called."""
    return text.partition("?")[0].partition(":")[2]


def find_published(text: str) -> Published:
    """Find the weights that a text names.

    Raises:
        WrongArchitectureError: if there are none of that name.
        CheckpointError: if timm is not installed.
    """
    address = parse(text)
    options = {key: value for key, value in address.options.items() if key != "weights"}
    refuse_weights(address.head, options)
    if "num_classes" in options:
        raise WrongArchitectureError(
            f"{text}: these weights have classes of their own, whose number is not to be said. finetune --head new "
            "gives the model as many outputs as the new data has classes"
        )
    name, asked = name_of(text), address.options.get("weights", "")
    return (_of_torchvision if text.startswith(TORCHVISION) else _of_timm)(name, asked, options)


def transform_of_weights(architecture: str) -> tuple[str, Transform | None]:
    """Return whose weights an architecture has unless others are named, and what is done to images for them.

    Args:
        architecture: As metadata has it, `torchvision:resnet18?num_classes=10`.

    Returns:
        No transform for an architecture that nobody publishes weights of, or for one that is no classifier of images.
    """
    address = parse(architecture)
    if architecture.startswith(TORCHVISION):
        from torchvision.models import get_model_weights, list_models

        name = name_of(architecture)
        weights = getattr(get_model_weights(name), _DEFAULT, None) if name in list_models() else None
        return f"torchvision's weights of {name}", _torchvision_transform(name, weights, address.options)
    if architecture.startswith(TIMM):
        timm, name = require_timm(), name_of(architecture)
        return f"timm's weights of {name}", _timm_transform(
            timm, timm.get_pretrained_cfg(name, allow_unregistered=True)
        )
    return architecture, None


def _of_torchvision(name: str, asked: str, options: dict[str, str]) -> Published:
    import torch
    from torchvision.models import get_model_weights, list_models

    if name not in list_models():
        raise WrongArchitectureError(f"torchvision has no model {name!r}. {suggest(name, list_models())}")
    known = get_model_weights(name).__members__
    if asked not in known:
        raise WrongArchitectureError(f"torchvision has no weights {asked!r} of {name}. {suggest(asked, known)}")
    weights: Any = known[asked]
    if name in _TURNING:
        options = {"transform_input": "true", **options}
    transform = _torchvision_transform(name, weights, options)
    if transform is None or name.startswith("quantized_"):
        raise WrongArchitectureError(
            f"torchvision's weights of {name} are of no classifier of images whose weights are real numbers, so they "
            "cannot be fine-tuned here"
        )
    classes = len(weights.meta.get("categories") or ())
    architecture = Address(TORCHVISION + name, {**options, **({"num_classes": str(classes)} if classes else {})})
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(weights.url).path).name
    return Published(str(architecture), f"torchvision's weights of {name}", transform, file, weights.url)


def _torchvision_transform(name: str, weights: Any, options: dict[str, str]) -> Transform | None:
    from torchvision.transforms._presets import ImageClassification

    preset = None if weights is None else weights.transforms()
    if not isinstance(preset, ImageClassification):
        return None
    mean, std = tuple(preset.mean), tuple(preset.std)
    if name in _TURNING and options.get("transform_input", "").lower() != "true":
        mean, std = (0.5,), (0.5,)
    (resize,), (crop,) = preset.resize_size, preset.crop_size
    return Transform(resize=resize, crop=(crop, crop), interpolation=preset.interpolation.value, mean=mean, std=std)


def _of_timm(name: str, asked: str, options: dict[str, str]) -> Published:
    timm = require_timm()
    if not timm.is_model(name):
        raise WrongArchitectureError(f"timm has no model {name!r}. {suggest(name, timm.list_models())}")
    tags = (
        [full.partition(".")[2] for full in timm.list_pretrained(f"{name}.*")] if timm.is_model_pretrained(name) else []
    )
    if asked not in (_DEFAULT, *tags):
        raise WrongArchitectureError(f"timm has no weights {asked!r} of {name}. {suggest(asked, [_DEFAULT, *tags])}")
    settings = timm.get_pretrained_cfg(name if asked == _DEFAULT else f"{name}.{asked}")
    if not settings.hf_hub_id:
        raise WrongArchitectureError(f"timm's weights {asked} of {name} are not on the Hub. {suggest(asked, tags)}")
    architecture = Address(TIMM + name, {**options, "num_classes": str(settings.num_classes)})
    place = parse_address(f"hf://{settings.hf_hub_id}/{settings.hf_hub_filename or 'model.safetensors'}")
    return Published(str(architecture), f"timm's weights of {name}", _timm_transform(timm, settings), place)


def _timm_transform(timm: Any, settings: Any) -> Transform | None:
    """Return what timm does to images when it evaluates; None of what is nothing that is known here."""
    if settings is None:
        return None
    known = timm.data.resolve_data_config(pretrained_cfg=settings.to_dict())
    height, width = known["input_size"][1:]
    mode, interpolation = known["crop_mode"], known["interpolation"]
    mean, std = tuple(map(float, known["mean"])), tuple(map(float, known["std"]))
    if mode == "border" or interpolation not in INTERPOLATIONS:
        return Transform(mean=mean, std=std)
    larger = tuple(math.floor(side / known["crop_pct"]) for side in (height, width))
    if mode == "squash":
        return Transform(
            size=(larger[0], larger[1]), crop=(height, width), interpolation=interpolation, mean=mean, std=std
        )
    return Transform(resize=min(larger), crop=(height, width), interpolation=interpolation, mean=mean, std=std)
