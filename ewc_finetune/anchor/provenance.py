"""Where an anchor comes from: the JSON document in its file, and the check of one that somebody else wrote."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ewc_finetune.choices import CURVATURE_DTYPES, CURVATURES, KNOWN_ESTIMATORS, LIKELIHOODS
from ewc_finetune.data.columns import is_table_record
from ewc_finetune.data.transform import is_transform
from ewc_finetune.errors import AnchorError
from ewc_finetune.storage.json_fields import (
    Check,
    has,
    is_count,
    is_flag,
    is_number,
    is_object,
    is_text,
    list_of,
    nullable,
    object_of,
    optional,
)


@dataclass(frozen=True)
class Provenance:
    """Where an anchor comes from, in values that JSON has; every field is in the file.

    Attributes:
        name: What to call the domain.
        created: Time of making in ISO 8601, from SOURCE_DATE_EPOCH; None without it, for the same input then gives
            the same bytes.
        versions: Of this package and torch.
        checkpoint: `file`, `sha256`, `format` and `architecture` of the checkpoint, and the `form` that its file had
            the weights in; None where not known.
        data: `spec`, `split`, `size` (of all the data) and `fingerprint` (of the samples used, in order).
        likelihood: Name of the likelihood.
        estimator: Name of the estimator.
        draws: How many labels `sampled` drew for each sample; None for other estimators.
        samples: N, the number of samples that the Fisher is the mean of.
        standard_error: Of the Fisher's `trace` and of each of `layers`' part, relative; None where it is not known.
        batch_size: Matters to the `batched` estimator alone.
        seed: Of the random subset and of the `sampled` labels.
        curvature: `diagonal` (Fisher), `kfac` (Kronecker-factored blocks, and the diagonal where there are none), or
            `identity` (ones: plain L2); what was merged of different ones is `diagonal`.
        kfac: Of each block its `layer`, `weight`, `bias` or None, and whether it is `transposed`, `(inputs, outputs)`.
        constant: What the quadratic is at its centre, by parameter; empty unless it was merged.
        merged: Of a merged anchor: `form` (`offline` or `online`), `gamma`, `lineage` (which weights it pulls to),
            `kfac_sum` (what stands for sums of blocks, if there are any) and `kfac_distance` (how far it is off, by
            layer), `parents`, each with `sha256`, `lambda` and its own `provenance`, and `through`, the digests of
            merged anchors whose parents are among these. None otherwise.
        head: Of a model that was given a new last layer: its `parameters`, and an `id` that is this layer's alone. None
            for the layer that the model was first trained with.
        importance: Of each `layer`: `parameters`, `share` of the trace, `mean` and `max` of the diagonal.
        reduction: `mean`: over samples; N times it is the posterior precision.
        half: Whether the penalty is lambda/2 times the quadratic (always true in version 1).
        excluded: Parameters without curvature, and why.
        normalisation: `statistics` (the policy they were used under) and `layers` (their names).
        lineage: Anchors that the checkpoint was already trained under: `name`, `sha256`, `lambda` of each.
        scores: The checkpoint's own `loss` and `accuracy` on the data of the Fisher.
        input: How samples are presented to the model (`InputSpec`), for whoever uses the anchor next.
        classes: Names of the classes, where they are known.
        probes: Of each probe in the file (`probe_tensors.Probe`): the `data` and `split` that its inputs are of, how
            many `samples`, their `likelihood`, `layout` and `active` outputs (None: all), and the `seed` of their
            choice.
        curvature_storage: Of a diagonal in half precision its `dtype`, and what that costs (`half_precision.Storage`);
            None in float32.
        weights_reference: Of weights that are not in the file but in a repository on the Hub: see `hub_weights`. None
            if all are in the file.
    """

    name: str
    created: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    checkpoint: dict[str, str | None] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    likelihood: str = "categorical"
    estimator: str = "exact"
    draws: int | None = None
    samples: int = 0
    standard_error: dict[str, Any] | None = None
    batch_size: int | None = None
    seed: int = 0
    curvature: str = "diagonal"
    kfac: list[dict[str, Any]] = field(default_factory=list)
    constant: dict[str, float] = field(default_factory=dict)
    merged: dict[str, Any] | None = None
    head: dict[str, Any] | None = None
    importance: list[dict[str, Any]] = field(default_factory=list)
    reduction: str = "mean"
    half: bool = True
    excluded: dict[str, str] = field(default_factory=dict)
    normalisation: dict[str, Any] = field(default_factory=dict)
    lineage: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    input: dict[str, Any] = field(default_factory=dict)
    classes: list[str] | None = None
    probes: list[dict[str, Any]] = field(default_factory=list)
    curvature_storage: dict[str, Any] | None = None
    weights_reference: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document: what came later and is not there is not in it, as before it came."""
        document = asdict(self)
        for name in ("probes", "curvature_storage", "weights_reference"):
            if not document[name]:
                del document[name]
        return document

    @property
    def format_version(self) -> int:
        """The oldest version of the format that has all of it."""
        return 1 if self.curvature_storage is None and self.weights_reference is None else 2


def read_provenance(text: str | None, path: str) -> tuple[Provenance, list[str]]:
    """Parse and check the document of an anchor file; also return the keys that this version does not know.

    Raises:
        AnchorError: naming the key, what it says and what was expected.
    """
    try:
        document = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise AnchorError(f"{path}: the metadata `anchor` is not a JSON document ({error})") from error
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        raise AnchorError(f"{path}: the metadata `anchor` must be a JSON object with a name")
    if _is_deep(document):
        raise AnchorError(
            f"{path}: the metadata `anchor` holds values more than {_DEEPEST} deep within one another, which no anchor "
            "does. Make the anchor again"
        )
    known = {f.name for f in fields(Provenance)}
    for key, value in document.items():
        if key in _EXPECTED and not _EXPECTED[key][0](value):
            raise AnchorError(f"{path}: in the metadata, {key} is {value!r:.100}; expected {_EXPECTED[key][1]}")
    return Provenance(**{key: value for key, value in document.items() if key in known}), sorted(set(document) - known)


# Values within one another: the records of parents, of probes and of layers take fewer than ten.
_DEEPEST = 100


def _is_deep(value: Any, left: int = _DEEPEST) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return left == 0 or any(_is_deep(item, left - 1) for item in inner)


_is_shape = list_of(is_count)
_is_numbers = nullable(object_of(is_number))
_is_lineage = list_of(has(sha256=optional(nullable(is_text))))
# What is known of a new last layer, or None.
is_head = nullable(has(id=is_text, parameters=list_of(is_text)))
_is_parent = has(sha256=nullable(is_text), provenance=has(lineage=optional(_is_lineage)), **{"lambda": is_number})


_is_names = optional(nullable(object_of(_is_shape)))


def _is_input(value: Any) -> bool:
    form = has(shape=optional(_is_shape), raw=optional(is_flag), names=_is_names)
    return form(value) and is_transform(value) and is_table_record(value)


def _is_layout(value: Any) -> bool:
    form = has(shape=_is_shape, flat=is_flag, bytes_to_unit=is_flag, raw=optional(is_flag), names=_is_names)
    return form(value) and is_transform(value) and is_table_record(value)


def _is_active(value: Any) -> bool:
    return value is None or (_is_shape(value) and bool(value) and value == sorted(set(value)))


def _is_digest(value: Any) -> bool:
    return is_text(value) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_reference(value: Any) -> bool:
    weight = has(file=is_text, name=is_text, dtype=is_text, shape=_is_shape)
    form = has(repository=is_text, revision=is_text, files=object_of(_is_digest), tensors=object_of(weight))
    return form(value) and all(weight["file"] in value["files"] for weight in value["tensors"].values())


# What each field of the document must be, in code and in words.
_EXPECTED: dict[str, tuple[Check, str]] = {
    "created": (nullable(is_text), "a time"),
    "versions": (object_of(is_text), "an object of texts"),
    "checkpoint": (object_of(nullable(is_text)), "an object of texts"),
    "data": (is_object, "an object"),
    "likelihood": (is_text, "a name"),
    "estimator": (lambda v: v in KNOWN_ESTIMATORS, f"one of {', '.join(KNOWN_ESTIMATORS)}"),
    "draws": (nullable(is_count), "a number of draws"),
    "samples": (is_count, "a number of samples"),
    "standard_error": (
        nullable(has(trace=optional(nullable(is_number)), layers=optional(object_of(nullable(is_number))))),
        "an object with a trace and layers",
    ),
    "batch_size": (nullable(is_count), "a number of samples"),
    "seed": (is_number, "a number"),
    "curvature": (lambda v: v in CURVATURES, f"one of {', '.join(CURVATURES)}, which this version reads"),
    "kfac": (
        list_of(has(layer=is_text, weight=is_text, bias=nullable(is_text), transposed=is_flag)),
        "a list of layers, each with weight, bias and transposed",
    ),
    "constant": (object_of(is_number), "an object of numbers"),
    "head": (is_head, "an object with parameters and an id"),
    "merged": (
        nullable(
            has(parents=list_of(_is_parent), through=optional(list_of(is_text)), kfac_distance=optional(_is_numbers))
        ),
        "an object with parents, each with sha256, lambda, provenance",
    ),
    "importance": (
        list_of(has(layer=is_text, parameters=is_number, share=is_number, mean=is_number, max=is_number)),
        "a list of layers, each with parameters, share, mean and max",
    ),
    "reduction": (lambda v: v == "mean", "'mean', the only one of format version 1"),
    "half": (lambda v: v is True, "true: the penalty is lambda/2 times the quadratic"),
    "excluded": (object_of(is_text), "an object of reasons"),
    "normalisation": (has(layers=optional(list_of(is_text))), "an object with layers"),
    "lineage": (_is_lineage, "a list of objects"),
    "scores": (object_of(is_number), "an object of numbers"),
    "input": (
        _is_input,
        "an object with a shape, and perhaps what is done to images (size, crop, mean, std) or to columns",
    ),
    "classes": (nullable(list_of(is_text)), "a list of names"),
    "probes": (
        list_of(
            has(
                data=is_text,
                split=nullable(is_text),
                samples=is_count,
                likelihood=lambda v: v in LIKELIHOODS,
                layout=_is_layout,
                active=_is_active,
                seed=is_number,
            )
        ),
        f"a list of objects, each with data, split, samples, a likelihood ({', '.join(LIKELIHOODS)}), layout, active "
        "and seed",
    ),
    "curvature_storage": (
        nullable(has(dtype=lambda v: v in CURVATURE_DTYPES[1:], error=is_number, raised=is_count)),
        f"an object with a dtype ({', '.join(CURVATURE_DTYPES)}), error and raised",
    ),
    "weights_reference": (nullable(_is_reference), "an object with repository, revision, files and tensors"),
}
