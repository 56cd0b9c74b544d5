"""Probes: inputs of the old domain with the model's answers to them, and how they lie in an anchor file.

Tensors of the probe number n, from 0: `probe.<n>.inputs`, or `probe.<n>.inputs.<name>` of a dictionary; and
`probe.<n>.outputs`, what the likelihood keeps of the model's outputs (`Likelihood.answers`), a row for each sample. Per
token there is a row for each token that counts, and `probe.<n>.counted`, shape `(samples, tokens)`, says which those
are. What else is known of a probe is in the provenance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor

from ewc_finetune.errors import AnchorError, NonFiniteError
from ewc_finetune.modules.batch import Inputs, count, each
from ewc_finetune.storage.lazy_tensors import TensorFile

_PER_TOKEN = "per-token"  # noqa: S105 - a likelihood


@dataclass(frozen=True)
class Probe:
    """Inputs of a domain, and a model's answers to them.

    Attributes:
        inputs: As the data has them, before the input spec; floating-point ones in half precision where that is enough.
        outputs: What the likelihood keeps of the model's outputs, a row for each sample or token that counts.
        data: The data spec, or what the caller called it.
        split: Of the data.
        likelihood: Its name.
        layout: How the inputs go into the model (`InputSpec.to_json`).
        active: The model's outputs that count; None for all.
        seed: Of the choice of inputs.
        counted: Whether each token counts, shape `(samples, tokens)`; None but for the per-token likelihood.
    """

    inputs: Inputs
    outputs: Tensor
    data: str
    split: str | None
    likelihood: str
    layout: Mapping[str, Any]
    active: tuple[int, ...] | None = None
    seed: int = 0
    counted: Tensor | None = None

    @property
    def samples(self) -> int:
        """How many inputs there are."""
        return count(self.inputs)

    @property
    def record(self) -> dict[str, Any]:
        """What the provenance says of it, in values that JSON has."""
        return {
            "data": self.data,
            "split": self.split,
            "samples": self.samples,
            "likelihood": self.likelihood,
            "layout": dict(self.layout),
            "active": None if self.active is None else list(self.active),
            "seed": self.seed,
        }

    @cached_property
    def _rows(self) -> list[Tensor]:
        """The rows of answers that belong to each sample: its own, or those of its tokens that count."""
        rows = torch.arange(len(self.outputs), device=self.outputs.device)
        return list(torch.split(rows, 1 if self.counted is None else self.counted.sum(dim=1).tolist()))

    def subset(self, samples: Sequence[int] | Tensor) -> Probe:
        """Return the probe of some of its inputs, in this order."""
        # Whole rows are copied at once, which at each step of rehearsal is worth it.
        index = torch.as_tensor(samples, dtype=torch.long, device=self.outputs.device)
        inputs = each(lambda tensor: tensor.index_select(0, index), self.inputs)
        if self.counted is None:
            return replace(self, inputs=inputs, outputs=self.outputs.index_select(0, index))
        rows = torch.cat([self._rows[n] for n in index.tolist()])
        counted = self.counted.index_select(0, index)
        return replace(self, inputs=inputs, outputs=self.outputs.index_select(0, rows), counted=counted)

    def __repr__(self) -> str:
        return f"<Probe of {self.data!r}: {self.samples:,} samples, {self.likelihood}, {self.bytes:,} bytes>"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, by their names behind `probe.<n>.`."""
        named = {"inputs": self.inputs} if isinstance(self.inputs, Tensor) else _behind("inputs.", self.inputs)
        return named | {"outputs": self.outputs} | ({} if self.counted is None else {"counted": self.counted})

    @property
    def bytes(self) -> int:
        """What it takes in the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class ProbeFile(Sequence[Probe]):
    """The probes of an anchor file; each is read when it is asked for, and not kept.

    Args:
        tensors: The file's `probe.` tensors.
        records: What the provenance says of each.
        where: The file, for messages.

    Attributes:
        records: As given.
        tensors: As given.

    Raises:
        AnchorError: if the tensors are not those that the records say; none is read.
    """

    def __init__(self, tensors: TensorFile, records: Sequence[dict[str, Any]], where: str) -> None:
        self.records = list(records)
        self.tensors = tensors
        self._where = where
        groups = [_own(tensors.shapes, n) for n in range(len(records))]
        for n, record in enumerate(records):
            check_shapes(record, groups[n], f"{where}: probe.{n}")
        unclaimed = set(tensors) - {f"{n}.{name}" for n, group in enumerate(groups) for name in group}
        if unclaimed:
            raise AnchorError(
                f"{where}: probe.{min(unclaimed)} belongs to no probe that it names. Make the anchor again"
            )

    def bytes_of(self, n: int) -> int:
        """Return what one of them takes in the file; it is not read."""
        return sum(_own(self.tensors.bytes, n).values())

    @overload
    def __getitem__(self, n: int) -> Probe: ...

    @overload
    def __getitem__(self, n: slice) -> list[Probe]: ...

    def __getitem__(self, n: int | slice) -> Probe | list[Probe]:
        if isinstance(n, slice):
            return [self[number] for number in range(len(self))[n]]
        n = range(len(self))[n]
        record = self.records[n]
        tensors = {name: self.tensors[f"{n}.{name}"] for name in _own(self.tensors.shapes, n)}
        probe = Probe(
            inputs=tensors["inputs"] if "inputs" in tensors else _ahead("inputs.", tensors),
            outputs=tensors["outputs"],
            data=record["data"],
            split=record["split"],
            likelihood=record["likelihood"],
            layout=record["layout"],
            active=None if record["active"] is None else tuple(record["active"]),
            seed=record["seed"],
            counted=tensors.get("counted"),
        )
        check_probe(probe, f"{self._where}: probe.{n}")
        return probe

    def __iter__(self) -> Iterator[Probe]:
        return (self[n] for n in range(len(self)))

    def __len__(self) -> int:
        return len(self.records)


def to_tensors(probes: Sequence[Probe]) -> dict[str, Tensor]:
    """Return the tensors of probes, by their names behind `probe.`."""
    return {f"{n}.{name}": tensor for n, probe in enumerate(probes) for name, tensor in probe.tensors.items()}


def records_of(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """Return what the provenance says of each, without reading it."""
    return probes.records if isinstance(probes, ProbeFile) else [probe.record for probe in probes]


def bytes_of(probes: Sequence[Probe]) -> list[int]:
    """Return what each takes in the file, without reading it."""
    if isinstance(probes, ProbeFile):
        return [probes.bytes_of(n) for n in range(len(probes))]
    return [probe.bytes for probe in probes]


def check_probe(probe: Probe, where: str) -> None:
    """Refuse a probe of which the parts don't belong together, or are no numbers; `where` is its name.

    Raises:
        AnchorError: naming the tensor, what was expected and what was found.
        NonFiniteError: naming the tensor.
    """
    check_shapes(probe.record, {name: tensor.shape for name, tensor in probe.tensors.items()}, where)
    for name, tensor in probe.tensors.items():
        # Data may be infinite where the model can take it; what a model answered may not.
        if tensor.isnan().any() or (name == "outputs" and tensor.isinf().any()):
            raise NonFiniteError(f"{where}.{name} holds NaN or infinity. Make the anchor again")
    if not probe.outputs.is_floating_point():
        raise AnchorError(f"{where}.outputs has type {probe.outputs.dtype}; expected float16 or float32")
    if probe.counted is None:
        return
    if probe.counted.dtype != torch.bool:
        raise AnchorError(f"{where}.counted has type {probe.counted.dtype}; expected bool")
    if int(probe.counted.sum()) != len(probe.outputs):
        raise AnchorError(
            f"{where}: {int(probe.counted.sum())} tokens count, and there are outputs for {len(probe.outputs)}. Make "
            "the anchor again"
        )


def check_shapes(record: Mapping[str, Any], shapes: Mapping[str, torch.Size], where: str) -> None:
    """Check that the tensors of a probe are those that its record says.

    Args:
        record: What the provenance says of it.
        shapes: Of its tensors, by their names behind `where` and a dot.
        where: Its name, for messages.

    Raises:
        AnchorError: naming the tensor, what was expected and what was found.
    """
    samples, names = record["samples"], record["layout"].get("names")
    per_token = record["likelihood"] == _PER_TOKEN
    expected = {"inputs"} if names is None else {f"inputs.{name}" for name in names}
    expected |= {"outputs", "counted"} if per_token else {"outputs"}
    if set(shapes) != expected:
        wrong = min(set(shapes) ^ expected)
        fault = "is there, and should not be" if wrong in shapes else "is missing"
        raise AnchorError(f"{where}.{wrong} {fault}. Make the anchor again")
    if samples < 1:
        raise AnchorError(f"{where} is of {samples} samples; expected at least 1")
    for name, shape in shapes.items():
        if per_token and name == "outputs":
            fits, wanted = len(shape) == 2, "(tokens, classes)"
        elif name == "counted":
            fits, wanted = len(shape) == 2 and shape[0] == samples, f"({samples}, tokens)"
        elif name == "inputs":
            fits = len(shape) == 1 + len(record["layout"]["shape"]) and shape[0] == samples
            wanted = f"({', '.join(map(str, [samples, *record['layout']['shape']]))})"
        else:
            fits, wanted = len(shape) > 0 and shape[0] == samples, f"({samples}, ...)"
        if not fits:
            raise AnchorError(f"{where}.{name} has shape {tuple(shape)}; expected {wanted}. Make the anchor again")
    active = record["active"]
    if active is not None and shapes["outputs"][-1:] != (len(active),):
        raise AnchorError(
            f"{where}.outputs has shape {tuple(shapes['outputs'])}, and {len(active)} outputs are active. Make the "
            "anchor again"
        )


def _own(named: Mapping[str, Any], n: int) -> dict[str, Any]:
    return _ahead(f"{n}.", named)


def _ahead(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {name[len(prefix) :]: value for name, value in named.items() if name.startswith(prefix)}


def _behind(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in named.items()}
