"""What a fine-tune is asked for, as JSON has it and as a command line says it."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.architecture import names_code as code_of_architecture
from ewc_finetune.checkpoint.location import is_there
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.sources import names_code as code_of_data
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.hub.address import HubAddress
from ewc_finetune.likelihood.objective import names_code as code_of_loss
from ewc_finetune.runs.options_file import to_command, to_text
from ewc_finetune.specs.options import declared, names_of, spoken

# Options that no file may say.
UNSAID = names_of(FinetuneOptions, lambda known: not known.filed)


def asked(options: FinetuneOptions) -> dict[str, Any]:
    """Return the options of a run as JSON has them, by the names of the command line."""
    said = {}
    for one, known in declared(options):
        if known.recorded:
            value = getattr(options, one.name)
            if one.name == "data" and isinstance(value, (list, tuple)) and len(value) == 1:
                value = value[0]
            if known.joined and isinstance(value, (list, tuple)):
                value = ",".join(map(to_text, value))
            many = one.name == "anchors" or (one.name == "lambdas" and value not in (None, "auto"))
            said[spoken(options, one.name)] = _plain(listed(value) if many else value)
    return said


def asked_then(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a run recorded, and of those that there were none of then what they are by default."""
    return {**asked(FinetuneOptions(None, None)), **recorded}


def command_of(options: FinetuneOptions) -> str | None:
    """Return the command line that a run is repeated by; None where it was given what no command line can say."""
    given = [getattr(options, one.name) for one, known in declared(options) if known.recorded]
    return to_command(asked(options), asked(FinetuneOptions(None, None))) if all(map(_is_told, given)) else None


def code_named(options: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the texts among a run's options that name code of somebody's, which is imported and called.

    Args:
        options: The options to look at, by the names of their fields.

    Returns:
        By field: the data, losses and architectures that are `package.module:name`, as they stand there.
    """
    naming = {"architecture": code_of_architecture, "data": code_of_data, "loss": code_of_loss}
    found = {}
    for one, known in declared(FinetuneOptions):
        value = options.get(one.name)
        texts = [text for text in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(text, str)]
        if known.code:
            there = is_there if one.name == "model" else (lambda _: False)
            found[one.name] = [text for text in texts if naming[known.code](text) and not there(text)]
    return {name: texts for name, texts in found.items() if texts}


def _is_told(value: Any) -> bool:
    """Whether a value is one that a command line can say."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_told, value))
    return value is None or isinstance(value, (str, numbers.Real, Path, HubAddress, torch.device))


def listed(value: Any) -> list[Any]:
    """Return what may be given singly as a list, with addresses as texts."""
    values = [value] if isinstance(value, (Anchor, HubAddress, str, Path, numbers.Real)) else list(value)
    return [str(item) if isinstance(item, HubAddress) else item for item in values]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; of what is no text or number, what to call it."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, numbers.Real):  # of numpy
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, (Path, torch.device)):
        return str(value)
    if isinstance(value, (Mapping, list, tuple)):
        return [_plain(item) for item in (value.values() if isinstance(value, Mapping) else value)]
    told = {Anchor: "label", Domain: "name"}.get(type(value))
    return f"a {type(value).__name__}" if told is None else getattr(value, told)
