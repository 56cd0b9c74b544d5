"""How a domain's samples become inputs of a model that was loaded: as itself, its metadata or its weights say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.data.columns import describe, read_columns
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.hugging_face import ImageColumn
from ewc_finetune.data.images import ImageFiles
from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.data.mixture import mixed
from ewc_finetune.data.preprocessing import preprocessed
from ewc_finetune.data.relabelling import numbered_as, relabelled
from ewc_finetune.data.table import Table
from ewc_finetune.data.texts import Texts, TextStream
from ewc_finetune.data.transform import Assumption, Transform
from ewc_finetune.errors import UsageError, few
from ewc_finetune.progress import Progress


def informed(loaded: LoadedModel, anchors: Sequence[Anchor]) -> LoadedModel:
    """Return the model with what its anchors know of its data and its head, if it was passed in and knows nothing."""
    if not anchors or loaded.metadata.input:
        return loaded
    origin = anchors[-1].provenance
    return replace(
        loaded, metadata=replace(loaded.metadata, input=origin.input, classes=origin.classes, head=origin.head)
    )


def presented(domain: Domain, loaded: LoadedModel, progress: Progress) -> Domain:
    """Return a domain whose batches are what the model takes, but for the input spec, which one sample shows.

    Raises:
        DataError: see `preprocessed` and `numbered_as`.
        UsageError: if the data says what the model's own image processor says.
    """
    domain = _in_unit(numbered_as(domain, loaded.metadata.classes), loaded, progress)
    if isinstance(domain.samples, Table):
        return as_inputs(domain, loaded, progress)
    encoded = preprocessed(domain, loaded.task, loaded.model, loaded.label)
    if encoded is not domain:
        if domain.transform is not None and domain.transform.mean is not None:
            raise UsageError(
                f"{domain.name}: the image processor of {loaded.label} says how images are normalised "
                "(preprocessor_config.json); leave mean and std out, or change it there"
            )
        return encoded
    assumption = loaded.assumption
    if assumption is None:
        return domain
    # Numbers of a spec are as the model's own were: normalised here, if those were.
    own = loaded.metadata.input
    alike = assumption.transform.mean is not None and own.get("bytes_to_unit") is False and own.get("raw", True)
    domain = replace(domain, assumed=assumption, unit=domain.unit or (alike and domain.transform is not None))
    return _reshaped(domain, assumption, progress)


def presented_together(domains: Sequence[Domain], loaded: LoadedModel, progress: Progress) -> Domain:
    """Return what several domains make together (`mixed`), whose batches are what the model takes.

    Where nothing is known of the model, it takes the columns of the first, and the unit of its targets.

    Raises:
        DataError: see `presented` and `mixed`.
        UsageError: likewise.
    """
    first, *others = domains
    several = [presented(first, loaded, progress)]
    known = loaded.metadata
    own = dict(known.input)
    if several[0].columns and not read_columns(own):
        own["columns"] = [column.to_json() for column in several[0].columns]
    if several[0].target_unit is not None:
        own.setdefault("target_unit", several[0].target_unit)
    loaded = replace(loaded, metadata=replace(known, input=own))
    return mixed([*several, *(presented(other, loaded, progress) for other in others)])


def _in_unit(domain: Domain, loaded: LoadedModel, progress: Progress) -> Domain:
    """Return a domain whose numbers to predict are divided as the model's own were, unless its data says by what."""
    recorded = loaded.metadata.input.get("target_unit")
    if recorded is None:
        return domain
    if domain.target_unit is not None:
        if domain.target_unit != recorded:
            progress.note(
                f"{domain.name}: its targets are divided by {domain.target_unit:,g}; the model's own were by "
                f"{recorded:,g}"
            )
        return domain
    domain, samples = replace(domain, target_unit=recorded), domain.samples
    if domain.classes is not None or not (isinstance(samples, TextStream) or domain.labels is not None):
        return domain
    # What comes from no spec, or as arrays, is somebody's targets already, like his inputs.
    if domain.transform is None or not isinstance(samples, (Table, Texts, TextStream, ImageColumn)):
        progress.note(f"{domain.name}: its targets stay as they are; the model's own were divided by {recorded:,g}")
        return domain
    progress.note(
        f"{domain.name}: its targets are divided by {recorded:,g}, as the model's own were; unit= says another"
    )
    if isinstance(samples, TextStream):
        return replace(domain, samples=replace(samples, unit=recorded))
    return relabelled(domain, cast("Tensor", domain.labels) / recorded, None)


def as_inputs(domain: Domain, loaded: LoadedModel, progress: Progress) -> Domain:
    """Return a table's rows as inputs: as the model's own were, as far as that is recorded.

    Raises:
        DataError: see `Table.columns` and `Table.encoded`.
    """
    table = cast("Table", domain.samples)
    recorded = read_columns(loaded.metadata.input)
    columns = table.columns(recorded)
    inputs = table.encoded(columns)
    if not recorded:
        if any(one.mean is not None for one in columns) and not loaded.fresh:
            progress.note(
                f"{domain.name}: standardised by its own mean and deviation, for nothing is recorded of the model's. "
                "If it was trained on other numbers, these are not its inputs"
            )
        return replace(domain, samples=inputs, columns=columns)
    more = [name for name in table.names if name not in {column.name for column in columns}]
    if more:
        target = "" if domain.labels is not None else ". If the target is among them, name it with target="
        progress.note(f"{domain.name}: left out, for the model was not trained on them: {few(more)}{target}")
    # Whatever a file calls them, for later data they are called what they were in training.
    columns = tuple(replace(now, name=then.name) for now, then in zip(columns, recorded, strict=True))
    if columns == recorded:
        progress.note(f"{domain.name}: its columns become inputs as the model's own did")
    else:
        was, now = (describe(ones) or "as they come" for ones in (recorded, columns))
        progress.note(f"{domain.name}: the model's own columns were: {was}; these are: {now}")
    return replace(domain, samples=inputs, columns=columns)


def _reshaped(domain: Domain, assumption: Assumption, progress: Progress) -> Domain:
    """Resize and crop images as the model is used to, where their data says nothing of it."""
    known, samples = assumption.transform, domain.samples
    if not known.reshapes or (domain.transform is not None and domain.transform.reshapes):
        return domain
    if isinstance(samples, (ImageFiles, ImageColumn)):
        domain = replace(domain, samples=replace(samples, options=replace(samples.options, transform=known)))
    elif (
        isinstance(samples, TensorDataset)
        and assumption.source == "record"
        and domain.is_raw(samples.tensors[0])
        and tuple(samples.tensors[0].shape[-2:]) != assumption.shape
    ):
        images, *labels = samples.tensors
        images = torch.cat([known.reshape(part) for part in torch.split(images, 4096)])
        domain = replace(domain, samples=TensorDataset(images, *labels))
    else:
        return domain
    why = "as the model's own were" if assumption.source == "record" else f"as {assumption.whose} were trained"
    progress.note(f"{domain.name}: {known.describe_shape()}, {why}; say resize=, crop= or size= for another shape")
    return domain


def say_numbers(domain: Domain, input_spec: InputSpec, progress: Progress) -> None:
    """Say what was assumed of the numbers in images, and how to say otherwise."""
    assumption, said = domain.assumed, domain.transform
    if assumption is None or len(input_spec.shape) != 3 or input_spec.names is not None:
        return
    known, numbers = assumption.transform.effective(), input_spec.transform.describe_numbers()
    if not input_spec.raw:
        progress.note(
            f"{domain.name}: its images are no bytes, so they go in as they are; bytes would be "
            f"{known.describe_numbers()}"
        )
    elif said is not None and said.mean is not None:
        if assumption.source == "record" and (known.mean, known.std) != (
            input_spec.transform.mean,
            input_spec.transform.std,
        ):
            before = known.describe_numbers() or "from 0 to 1"
            progress.note(f"{domain.name}: the model's own images were {before}; these are {numbers or 'from 0 to 1'}")
    elif assumption.source == "weights":
        progress.note(
            f"{domain.name}: images are {numbers or 'from 0 to 1'}, as {assumption.whose} were trained. If this "
            "checkpoint was trained otherwise, say so behind the data's question mark: mean=0&std=1 for images from "
            "0 to 1"
        )
    elif known.mean is not None and input_spec.transform.mean is None:
        progress.note(
            f"{domain.name}: images go in from 0 to 1: the model's own were {known.describe_numbers()}, which does not "
            f"go with {input_spec.shape[0]} channels. Say channels=, or mean= and std="
        )
    elif assumption.source == "nobody" and domain.unit | input_spec.bytes_to_unit:
        progress.note(
            f"{domain.name}: images go in from 0 to 1, for nothing says what the model was trained on. If they were "
            "normalised then, say so behind the data's question mark: mean=imagenet&std=imagenet, or the numbers"
        )


def say_anchors(anchors: Sequence[Anchor], input_spec: InputSpec, progress: Progress) -> None:
    """Say which anchors are of images or columns with other numbers than go in now: of another function, that is."""
    for anchor in anchors:
        theirs = anchor.provenance.input
        columns, unit = read_columns(theirs), theirs.get("target_unit") or 1
        if theirs and unit != (input_spec.target_unit or 1):
            progress.note(
                f"{anchor.label} was made with targets divided by {unit:,g}, and here they are divided by "
                f"{input_spec.target_unit or 1:,g}: its curvature is of another function"
            )
        if columns and input_spec.columns and columns != input_spec.columns:
            progress.note(
                f"{anchor.label} was made with other columns, or by other numbers of theirs: its curvature is of "
                "another function of them"
            )
        before, now = Transform.read(theirs).describe_numbers(), input_spec.transform.describe_numbers()
        raw = theirs.get("raw", True) and input_spec.raw
        if raw and len(theirs.get("shape", [])) == len(input_spec.shape) == 3 and before != now:
            progress.note(
                f"{anchor.label} was made with images {before or 'from 0 to 1'}, and here they are "
                f"{now or 'from 0 to 1'}: its curvature is of another function of them"
            )
