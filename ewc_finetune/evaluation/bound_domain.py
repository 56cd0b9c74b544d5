"""A domain and a model that suit each other: how its samples go in, and what its outputs mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.input_spec import InputSpec, find_input_spec
from ewc_finetune.errors import ArchitectureError, DataError
from ewc_finetune.evaluation.presenting import say_numbers
from ewc_finetune.likelihood.base import Likelihood, RealValued
from ewc_finetune.likelihood.gaussian import Gaussian
from ewc_finetune.progress import Progress

# Targets of a regression that deviate by more from their mean are remarked on.
_LARGE_DEVIATION = 10.0
# Targets of a regression that are whole numbers, of so many values at most, may be classes.
_FEW_VALUES = 20


@dataclass(frozen=True)
class BoundDomain:
    """A domain as a model takes it.

    Attributes:
        domain: The samples, as they are presented to the model.
        input_spec: How they go in.
        likelihood: What the outputs mean, of those that are active for it.
        outputs: Shape of the model's outputs for one sample.
    """

    domain: Domain
    input_spec: InputSpec
    likelihood: Likelihood
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        """The domain's name."""
        return self.domain.name


def bind(
    loaded: LoadedModel,
    domain: Domain,
    likelihood: Likelihood,
    device: torch.device,
    progress: Progress,
    outputs: int | None = None,
) -> BoundDomain:
    """Find how the domain's samples go into the model, say it, and check outputs and labels before any work is done.

    Args:
        loaded: The model, on `device`; where the data differs from what is known of it, that is said.
        domain: The data, as it is presented to the model.
        likelihood: The likelihood of the model's outputs, those of every head included.
        device: The device that the model is on.
        progress: Is told what is assumed.
        outputs: How many the model must have, where its head was changed.

    Raises:
        ArchitectureError: if the model has another number of outputs.
        DataError: if samples, outputs or labels don't suit, or the data numbers the model's classes otherwise; labels
            are checked all at once where they are known.
    """
    metadata, likelihood = loaded.metadata, domain.likelihood(likelihood)
    input_spec, output_shape = find_input_spec(
        loaded.model, domain, device, lambda outputs: likelihood.check_outputs(outputs, domain.name), metadata.input
    )
    if isinstance(likelihood, RealValued) and output_shape == (1,):
        labels = domain.labels
        column = labels is not None and labels.ndim == 1
        domain = replace(domain, as_columns=True, labels=labels[:, None] if labels is not None and column else labels)
    if outputs is not None and output_shape[-1:] != (outputs,):
        raise ArchitectureError(
            f"the last linear layer of the model was to be its head, with {outputs} outputs, but the model returns "
            f"{tuple(output_shape)}: its outputs come from another layer. List that one last in the module"
        )
    if domain.labels is not None:
        likelihood.check_targets(domain.labels, output_shape, domain.name)
        _say_targets(domain, likelihood, metadata.likelihood is not None, progress)
    for remark in domain.remarks:
        progress.note(f"{domain.name}: {remark}")
    progress.note(f"{domain.name}: samples of {input_spec.describe()}")
    say_numbers(domain, input_spec, progress)
    trained_on = tuple(metadata.input.get("shape", input_spec.shape))
    if trained_on != input_spec.shape:
        progress.note(f"{domain.name}: the model was trained on samples of another shape, {trained_on}")
    if metadata.classes and domain.classes:
        _compare_classes(metadata.classes, domain.classes, domain.name, progress)
    return BoundDomain(domain, input_spec, likelihood, output_shape)


def _say_targets(domain: Domain, likelihood: Likelihood, asked: bool, progress: Progress) -> None:
    """Say so where targets that are predicted as numbers are large, or may be classes and nobody said otherwise."""
    if likelihood.name != Gaussian.name or domain.labels is None or not domain.labels.numel():
        return
    labels = domain.labels.double()
    deviation = float(labels.std(correction=0))
    if deviation > _LARGE_DEVIATION:
        unit = 10 ** round(math.log10(deviation)) * (domain.target_unit or 1)
        way = f"unit={unit:.15g} divides by that, and is kept with the model"
        progress.note(
            f"warning: {domain.name}: its targets deviate by {deviation:,.0f} from their mean, where learning rate and "
            "lambda are meant for about 1. Train on them in a larger unit: "
            + (way if domain.columns else "divide them, wherever this model is used")
        )
    if asked or not domain.real_valued or domain.target_unit is not None or bool((labels != labels.round()).any()):
        return
    different = sorted(set(labels.flatten().tolist()))
    if 2 <= len(different) <= min(_FEW_VALUES, len(labels) // 2):
        said = ",".join(map(str, different[:3])) + ",..." * (len(different) > 3)
        progress.note(
            f"{domain.name}: its targets are whole numbers that are written with decimals ({said}), so they are "
            "predicted as numbers. If each is a class, give whole numbers (1 for 1.0), or name them, of a table: "
            f"labels={said}"
        )


def _compare_classes(model: Sequence[str], data: Sequence[str], name: str, progress: Progress) -> None:
    """Refuse the model's classes under other numbers, and remark on classes of other names."""
    differing = [number for number, pair in enumerate(zip(model, data, strict=False)) if pair[0] != pair[1]]
    if not differing:
        return
    first = differing[0]
    if set(data) <= set(model):
        raise DataError(
            f"{name}: the class {data[first]!r} is number {first} here and {model.index(data[first])} in the model, so "
            "its labels would be taken for another class's. Give the data the model's classes, in their order: "
            f"labels={','.join(model)}"
        )
    progress.note(f"{name}: its classes are not called what the model's are ({data[first]!r} for {model[first]!r})")
