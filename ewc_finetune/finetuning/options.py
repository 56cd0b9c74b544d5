"""The options of a fine-tune, as they are recorded and compared."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.data.domain import Domain
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.hub.address import HubAddress
from ewc_finetune.runs.options_file import spoken


def defaults() -> dict[str, Any]:
    """Return what `finetune` does unless it is told otherwise, by the names of the command line."""
    return asked_by(None, None, {})


def asked_by(model: Any, data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `finetune(model, data, **options)` is asked for, as it records it itself.

    Raises:
        UsageError: if an option of training has a value that it cannot have.
    """
    from ewc_finetune.commands.finetune import finetune

    plain = {
        name: parameter.default
        for name, parameter in inspect.signature(finetune).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    training = {field.name for field in fields(Schedule)}
    own = {name: value for name, value in options.items() if name not in training}
    schedule = Schedule(**{name: value for name, value in options.items() if name in training})
    return asked({**plain, **own, "model": model, "data": data}, schedule)


def asked(arguments: Mapping[str, Any], schedule: Schedule) -> dict[str, Any]:
    """Return the options of a run as JSON has them, by the names of the command line."""
    unsaid = {"resume", "before_start", "progress", "training"}
    given = {name: value for name, value in {**arguments, **asdict(schedule)}.items() if name not in unsaid}
    given["anchors"] = listed(given["anchors"])
    if given["lambdas"] not in (None, "auto"):
        given["lambdas"] = listed(given["lambdas"])
    return {spoken(name): _plain(value) for name, value in given.items()}


def is_told(value: Any) -> bool:
    """Whether a value is one that a command line can say."""
    if isinstance(value, (list, tuple)):
        return all(map(is_told, value))
    return value is None or isinstance(value, (str, int, float, Path))


def listed(value: Any) -> list[Any]:
    """Return what may be given singly as a list, with addresses as texts."""
    values = [value] if isinstance(value, (Anchor, HubAddress, str, Path, int, float)) else list(value)
    return [str(item) if isinstance(item, HubAddress) else item for item in values]


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; of what is no text or number, what to call it."""
    if value is None or isinstance(value, (str, int, float, Path)):
        return str(value) if isinstance(value, Path) else value
    if isinstance(value, Anchor):
        return value.label
    if isinstance(value, Domain):
        return value.name
    if isinstance(value, Mapping):
        return [_plain(item) for item in value.values()]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return f"a {type(value).__name__}"
