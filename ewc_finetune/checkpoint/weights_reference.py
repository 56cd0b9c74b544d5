"""A checkpoint's weights as the Hub has them, so that an anchor may refer to them instead of holding them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ewc_finetune.anchor.hub_weights import refer
from ewc_finetune.checkpoint.formats.transformers_folder import HuggingFace
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.errors import UsageError
from ewc_finetune.hub.anchor_files import fetch_with_parts
from ewc_finetune.hub.repository import look_up
from ewc_finetune.modules.finite import cpu_copy

_ENDINGS = (".safetensors", ".safetensors.index.json")


def refer_to_hub(loaded: LoadedModel) -> dict[str, Any]:
    """Find the weights of a model in the files on the Hub that it came from; see `reference.refer`.

    Raises:
        UsageError: if it does not come from there, or in another format.
    """
    checkpoint = loaded.checkpoint
    place = None if checkpoint is None else checkpoint.address
    if place is not None and isinstance(checkpoint, HuggingFace):
        place = replace(place, file=checkpoint.file.name)
    if place is None or place.file is None:
        raise UsageError(
            f"{loaded.label} does not come from the Hub, so that an anchor cannot refer to its weights; name the model "
            "as hf:org/name or hf://org/name/FILE, or leave --anchor-weights reference out"
        )
    if not place.file.endswith(_ENDINGS):
        raise UsageError(
            f"{loaded.label} has its weights in {place.file}; an anchor can refer to safetensors files alone. Leave "
            "--anchor-weights reference out"
        )
    fetched = fetch_with_parts(look_up(place), place.file)
    folder = place.file.rpartition("/")[0]
    files = [f"{folder}/{name}" if folder else name for name in fetched.parts] or [place.file]
    weights = cpu_copy(dict(loaded.model.named_parameters()))
    return refer(weights, place, files)
