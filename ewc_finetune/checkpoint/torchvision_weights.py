"""How torchvision's own weights of an architecture want their images."""

from __future__ import annotations

from ewc_finetune.data.transform import Transform
from ewc_finetune.specs.query import parse

_PREFIX = "torchvision:"
# Models that take images normalised with ImageNet's mean and std and, with `transform_input`, turn them into images
# normalised with 0.5 and 0.5: (x * 0.229 + 0.485 - 0.5) / 0.5 = (pixel - 0.5) / 0.5. Without it they take the latter.
_TURNING = ("googlenet", "inception_v3")


def transform_of_weights(architecture: str) -> tuple[str, Transform | None]:
    """Return what torchvision calls an architecture, and what it does to images for the default weights of it.

    Args:
        architecture: As metadata has it, `torchvision:resnet18?num_classes=10`.

    Returns:
        No transform for an architecture that is not torchvision's, or no classifier of images.
    """
    if not architecture.startswith(_PREFIX):
        return architecture, None
    from torchvision.models import get_model_weights, list_models
    from torchvision.transforms._presets import ImageClassification

    address = parse(architecture)
    name = address.head.removeprefix(_PREFIX)
    if name not in list_models():
        return name, None
    weights = getattr(get_model_weights(name), "DEFAULT", None)
    preset = None if weights is None else weights.transforms()
    if not isinstance(preset, ImageClassification):
        return name, None
    mean, std = tuple(preset.mean), tuple(preset.std)
    if name in _TURNING and address.options.get("transform_input", "").lower() != "true":
        mean, std = (0.5,), (0.5,)
    (resize,), (crop,) = preset.resize_size, preset.crop_size
    return name, Transform(
        resize=resize, crop=(crop, crop), interpolation=preset.interpolation.value, mean=mean, std=std
    )
