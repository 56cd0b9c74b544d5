"""Where an anchor comes from: the JSON document in its file, and the check of one that somebody else wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ewc_finetune.anchor.describe import is_number
from ewc_finetune.choices import CURVATURE_DTYPES, CURVATURES, KNOWN_ESTIMATORS, LIKELIHOODS
from ewc_finetune.data.transform import is_transform
from ewc_finetune.errors import AnchorError


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
        weights_reference: Of weights that are not in the file but in a repository on the Hub: see `reference`. None if
            all are in the file.
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


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_importance(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(layer, dict)
        and isinstance(layer.get("layer"), str)
        and all(is_number(layer.get(key)) for key in ("parameters", "share", "mean", "max"))
        for layer in value
    )


def _is_kfac(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(record, dict)
        and isinstance(record.get("layer"), str)
        and isinstance(record.get("weight"), str)
        and _is_text_or_none(record.get("bias", 0))
        and isinstance(record.get("transposed"), bool)
        for record in value
    )


def _is_merged(value: Any) -> bool:
    parents = value.get("parents") if isinstance(value, dict) else None
    return (
        isinstance(parents, list)
        and all(
            isinstance(parent, dict)
            and _is_text_or_none(parent.get("sha256", 0))
            and is_number(parent.get("lambda"))
            and isinstance(parent.get("provenance"), dict)
            and _is_lineage(parent["provenance"].get("lineage", []))
            for parent in parents
        )
        and _is_texts(value.get("through", []))
        and _is_numbers_or_none(value.get("kfac_distance"))
    )


def _is_numbers_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(map(is_number, value.values())))


def is_head(value: Any) -> bool:
    """Whether a value is what is known of a new last layer, or None."""
    return value is None or (
        isinstance(value, dict) and isinstance(value.get("id"), str) and _is_texts(value.get("parameters"))
    )


def _is_dict_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(check(item) for item in value.values())


def _is_input(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("shape", []), list)
        and all(map(_is_count, value.get("shape", [])))
        and is_transform(value)
        and isinstance(value.get("raw", True), bool)
    )


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_layout(value: Any) -> bool:
    names = value.get("names") if isinstance(value, dict) else None
    return (
        isinstance(value, dict)
        and _is_shape(value.get("shape"))
        and isinstance(value.get("flat"), bool)
        and isinstance(value.get("bytes_to_unit"), bool)
        and is_transform(value)
        and isinstance(value.get("raw", True), bool)
        and (names is None or (isinstance(names, dict) and all(map(_is_shape, names.values()))))
    )


def _is_active(value: Any) -> bool:
    return value is None or (_is_shape(value) and bool(value) and value == sorted(set(value)))


def _is_probes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(probe, dict)
        and _is_text(probe.get("data"))
        and _is_text_or_none(probe.get("split", 0))
        and _is_count(probe.get("samples"))
        and probe.get("likelihood") in LIKELIHOODS
        and _is_layout(probe.get("layout"))
        and _is_active(probe.get("active", 0))
        and is_number(probe.get("seed"))
        for probe in value
    )


def _is_error(value: Any) -> bool:
    def known(number: Any) -> bool:
        return number is None or is_number(number)

    layers = value.get("layers", {}) if isinstance(value, dict) else None
    return value is None or (
        isinstance(layers, dict) and known(value.get("trace")) and all(map(known, layers.values()))
    )


def _is_lineage(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, dict) and _is_text_or_none(i.get("sha256")) for i in value)


def _is_storage(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.get("dtype") in CURVATURE_DTYPES[1:]
        and is_number(value.get("error"))
        and _is_count(value.get("raised"))
    )


def _is_reference(value: Any) -> bool:
    files, tensors = (value.get("files"), value.get("tensors")) if isinstance(value, dict) else (None, None)
    return value is None or (
        _is_text(value.get("repository"))
        and _is_text(value.get("revision"))
        and isinstance(files, dict)
        and all(isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest) for digest in files.values())
        and isinstance(tensors, dict)
        and all(
            isinstance(known, dict)
            and _is_text(known.get("file"))
            and known["file"] in files
            and _is_text(known.get("name"))
            and _is_text(known.get("dtype"))
            and _is_shape(known.get("shape"))
            for known in tensors.values()
        )
    )


# What each field of the document must be, in code and in words.
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "created": (_is_text_or_none, "a time"),
    "versions": (_is_dict_of(_is_text), "an object of texts"),
    "checkpoint": (_is_dict_of(_is_text_or_none), "an object of texts"),
    "data": (lambda v: isinstance(v, dict), "an object"),
    "likelihood": (_is_text, "a name"),
    "estimator": (lambda v: v in KNOWN_ESTIMATORS, f"one of {', '.join(KNOWN_ESTIMATORS)}"),
    "draws": (lambda v: v is None or _is_count(v), "a number of draws"),
    "samples": (_is_count, "a number of samples"),
    "standard_error": (_is_error, "an object with a trace and layers"),
    "batch_size": (lambda v: v is None or _is_count(v), "a number of samples"),
    "seed": (is_number, "a number"),
    "curvature": (lambda v: v in CURVATURES, f"one of {', '.join(CURVATURES)}, which this version reads"),
    "kfac": (_is_kfac, "a list of layers, each with weight, bias and transposed"),
    "constant": (_is_dict_of(is_number), "an object of numbers"),
    "head": (is_head, "an object with parameters and an id"),
    "merged": (lambda v: v is None or _is_merged(v), "an object with parents, each with sha256, lambda, provenance"),
    "importance": (_is_importance, "a list of layers, each with parameters, share, mean and max"),
    "reduction": (lambda v: v == "mean", "'mean', the only one of format version 1"),
    "half": (lambda v: v is True, "true: the penalty is lambda/2 times the quadratic"),
    "excluded": (_is_dict_of(_is_text), "an object of reasons"),
    "normalisation": (lambda v: isinstance(v, dict) and _is_texts(v.get("layers", [])), "an object with layers"),
    "lineage": (_is_lineage, "a list of objects"),
    "scores": (_is_dict_of(is_number), "an object of numbers"),
    "input": (_is_input, "an object with a shape, and perhaps what is done to images (size, crop, mean, std)"),
    "classes": (lambda v: v is None or _is_texts(v), "a list of names"),
    "probes": (
        _is_probes,
        f"a list of objects, each with data, split, samples, a likelihood ({', '.join(LIKELIHOODS)}), layout, active "
        "and seed",
    ),
    "curvature_storage": (_is_storage, f"an object with a dtype ({', '.join(CURVATURE_DTYPES)}), error and raised"),
    "weights_reference": (_is_reference, "an object with repository, revision, files and tensors"),
}
