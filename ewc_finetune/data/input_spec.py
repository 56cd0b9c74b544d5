"""How samples are presented to a model: nobody writes a transform, and what is assumed is said and recorded."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ewc_finetune.data.columns import Column, read_columns
from ewc_finetune.data.columns import describe as describe_columns
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.transform import Transform
from ewc_finetune.errors import ArchitectureError, DataError, first_line
from ewc_finetune.modules.batch import Batch, Inputs, call, each
from ewc_finetune.modules.devices import random_state_kept
from ewc_finetune.modules.modes import evaluating, unchanged
from ewc_finetune.storage.signals import safe_point


@dataclass(frozen=True)
class InputSpec:
    """The way from a sample of the data to an input of the model.

    Attributes:
        shape: The shape of one sample in the data; `(channels, height, width)` for images; `()` for a dictionary.
        flat: Whether a sample is flattened to a vector.
        bytes_to_unit: Whether samples are bytes, 0 to 255, that become 0 to 1.
        names: Where a sample is a dictionary of tensors: the shape of each.
        transform: What is done to images as they come; what it says of their size is done before they are samples.
        raw: Whether samples are such images; others, which are somebody's inputs already, are not normalised again.
        columns: What was done to the columns of a table before they were samples; none for other data.
        target_unit: What the numbers to predict were divided by, if by anything.
    """

    shape: tuple[int, ...]
    flat: bool
    bytes_to_unit: bool
    names: dict[str, tuple[int, ...]] | None = None
    transform: Transform = field(default_factory=Transform)
    raw: bool = True
    columns: tuple[Column, ...] = ()
    target_unit: float | None = None

    def present(self, samples: Inputs, dtype: torch.dtype) -> Inputs:
        """Turn a batch of samples into inputs of the model, floating-point ones in `dtype`."""
        if not isinstance(samples, Tensor):
            return each(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, samples)
        if self.raw and self.transform.mean is not None:
            samples = samples.to(torch.promote_types(dtype, torch.float32))
            samples = self.transform.normalise(samples / 255 if self.bytes_to_unit else samples).to(dtype)
        elif self.bytes_to_unit:
            samples = samples.to(dtype) / 255
        elif samples.is_floating_point():
            samples = samples.to(dtype)
        return samples.flatten(1) if self.flat else samples

    def describe(self) -> str:
        """Say what is done, for people."""
        if self.names is not None:
            return "a dictionary of " + ", ".join(f"{name} ({_show(shape)})" for name, shape in self.names.items())
        parts = [" x ".join(map(str, self.shape)) or "single numbers"]
        if self.bytes_to_unit:
            parts.append("scaled from 0..255 to 0..1")
        if self.raw:
            parts.append(self.transform.describe_numbers())
        if self.flat:
            parts.append(f"flattened to {math.prod(self.shape)} values")
        parts.append(describe_columns(self.columns))
        return ", ".join(filter(None, parts))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        document: dict[str, Any] = {"shape": list(self.shape), "flat": self.flat, "bytes_to_unit": self.bytes_to_unit}
        if self.names is not None:
            document["names"] = {name: list(shape) for name, shape in self.names.items()}
        if self.columns:
            document["columns"] = [column.to_json() for column in self.columns]
        if self.target_unit not in (None, 1):
            document["target_unit"] = self.target_unit
        return document | self.transform.to_json() | ({} if self.raw else {"raw": False})

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> InputSpec:
        """Return the input spec of which `to_json` made this."""
        names = document.get("names")
        return cls(
            shape=tuple(document["shape"]),
            flat=document["flat"],
            bytes_to_unit=document["bytes_to_unit"],
            names=None if names is None else {name: tuple(shape) for name, shape in names.items()},
            transform=Transform.read(document),
            raw=document.get("raw", True),
            columns=read_columns(document),
            target_unit=document.get("target_unit"),
        )


def find_input_spec(
    model: nn.Module,
    domain: Domain,
    device: torch.device,
    check_outputs: Callable[[Tensor], None],
    recorded: dict[str, Any] | None = None,
) -> tuple[InputSpec, tuple[int, ...]]:
    """Find how a domain's samples go into the model, by trying one: as it is, then flattened.

    Args:
        model: The model, on `device`; tried in eval mode and left as it was.
        domain: The domain that the sample is of.
        device: The device that the model is on.
        check_outputs: Raises a DataError for outputs that the likelihood cannot take.
        recorded: The input spec that the model's checkpoint or anchor carries, to say what would have been right.

    Returns:
        The input spec, and the shape of the model's outputs for one sample.

    Raises:
        DataError: if the sample goes into the model in neither way; the shapes are named.
    """
    sample, name = each(lambda tensor: tensor.to(device), domain.first()), domain.name
    dtype, unit = dtype_of(model), domain.target_unit
    refusals = []
    if isinstance(sample, Tensor):
        shape, as_bytes = tuple(sample.shape[1:]), sample.dtype == torch.uint8
        transform, raw = transform_of(domain, sample)
        ways = (False, True) if len(shape) > 1 else (False,)
        input_specs = [InputSpec(shape, flat, as_bytes, None, transform, raw, domain.columns, unit) for flat in ways]
    else:
        shape = ()
        shapes = {key: tuple(tensor.shape[1:]) for key, tensor in sample.items()}
        input_specs = [InputSpec((), False, False, shapes, target_unit=unit)]
    for input_spec in input_specs:
        try:
            with evaluating(model), unchanged(model), torch.no_grad(), random_state_kept(device):
                outputs = call(model, input_spec.present(sample, dtype))
        except Exception as error:  # noqa: BLE001 - a model may raise anything for an input it can't take
            _refuse_batch_statistics(model, error)
            refusals.append(f"{'flattened' if input_spec.flat else 'as it is'}: {first_line(error)}")
            continue
        try:
            check_outputs(outputs)
        except DataError as error:
            if input_spec is input_specs[-1]:  # nothing is left to try, and the model took the input
                raise
            refusals.append(f"{'flattened' if input_spec.flat else 'as it is'}: {error}"[:200])
            continue
        return input_spec, tuple(outputs.shape[1:])
    names = (recorded or {}).get("names") or {}
    if names and (isinstance(sample, Tensor) or set(names) != set(sample)):
        found = "a single tensor" if isinstance(sample, Tensor) else f"dictionaries of {', '.join(sample)}"
        raise DataError(
            f"{name}: its samples are {found}, and the model takes {', '.join(names)} by name. Of a file of arrays: "
            f"inputs={','.join(names)}"
        )
    described = f"shape {_show(shape)}" if isinstance(sample, Tensor) else input_specs[0].describe()
    wanted = (recorded or {}).get("shape")
    if wanted and list(wanted) != list(shape):
        verb = "have" if isinstance(sample, Tensor) else "are"
        raise DataError(f"{name}: samples {verb} {described}; the model takes {_show(wanted)}.{_advice(wanted)}")
    image = isinstance(sample, Tensor) and sample.ndim == 4
    hint = ". To convert images, add channels=1|3 or size=PIXELS behind the data's question mark" if image else ""
    hint = (_needed(model) if isinstance(sample, Tensor) else "") or hint
    raise DataError(f"{name}: a sample of {described} does not go into the model ({'; '.join(refusals)}){hint}")


def _needed(model: nn.Module) -> str:
    """Say how several inputs are given, where the model needs more than one."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # a program's
        return ""
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if len(needed) < 2:
        return ""
    return (
        f". Its forward takes {', '.join(needed)}: give a dictionary by these names, of a file of arrays by "
        f"npz:FILE?inputs={','.join(needed)}"
    )


def transform_of(domain: Domain, sample: Tensor) -> tuple[Transform, bool]:
    """Return what is done to a domain's images, and whether that is what a sample is.

    Raises:
        DataError: if the data says what cannot be done to it.
    """
    said = domain.transform or Transform()
    if said.mean is not None:
        channels = sample.shape[1] if sample.ndim == 4 else None
        if channels is None or not (sample.dtype == torch.uint8 or sample.is_floating_point()):
            raise DataError(
                f"{domain.name}: mean and std are of images, and a sample is {sample.dtype} of shape "
                f"{_show(tuple(sample.shape[1:]))}; expected channels x height x width, bytes or floats"
            )
        if len(said.mean) not in (1, channels) or len(said.std or ()) not in (1, channels):
            raise DataError(
                f"{domain.name}: mean and std have three numbers, and its images {channels} channels. Say one number, "
                "or add channels=3"
            )
    known = Transform() if domain.assumed is None else domain.assumed.transform
    raw = domain.is_raw(sample)
    if raw and known.mean is not None and len(known.mean) not in (1, sample.shape[1]):
        known = replace(known, mean=None, std=None)
    transform = said.completed(known).effective()
    return transform, raw or said.mean is not None or transform.mean is None


def _refuse_batch_statistics(model: nn.Module, error: Exception) -> None:
    """Name the modules that cannot take a single sample, if that is what the model failed for."""
    names = [name for name, module in model.named_modules() if getattr(module, "track_running_stats", True) is False]
    if names and "more than 1" in str(error):
        raise ArchitectureError(
            f"{', '.join(names)}: without running statistics, normalisation takes those of the batch, and a single "
            "sample has none. Give it running statistics (track_running_stats=True), or use group or layer norm"
        ) from error


def feed(batches: Iterable[Batch], input_spec: InputSpec, model: nn.Module, device: torch.device) -> Iterator[Batch]:
    """Bring batches of samples to the device, presented as the model wants them."""
    dtype = dtype_of(model)
    for samples, labels in batches:
        safe_point()
        moved = each(lambda tensor: tensor.to(device), samples)
        yield input_spec.present(moved, dtype), None if labels is None else labels.to(device)


def dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _show(shape: Any) -> str:
    return " x ".join(map(str, shape)) or "()"


def _advice(wanted: list[int]) -> str:
    if len(wanted) != 3 or wanted[0] not in (1, 3):
        return ""
    return f" To convert them, add size={wanted[1]}x{wanted[2]}&channels={wanted[0]} behind the data's question mark"
