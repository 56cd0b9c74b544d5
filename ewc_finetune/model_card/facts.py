"""The table of all that is known of an anchor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from ewc_finetune.anchor.half_precision import describe
from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.anchor.summary import Inspection
from ewc_finetune.data.transform import Transform, is_transform
from ewc_finetune.model_card.published import Published
from ewc_finetune.model_card.text import (
    code,
    code_of,
    counted,
    joined,
    labelled,
    last_part,
    name_of,
    number_of,
    place_of,
    some,
)

# How many anchors that it comes from have a row or line each, and how many classes are named.
_PARENTS, _CLASSES = 24, 12
_CURVATURES = {
    "diagonal": "diagonal of the Fisher information: a number for each weight",
    "identity": "identity: every weight counts alike (plain L2)",
    "kfac": "Fisher information in Kronecker-factored blocks (K-FAC)",
}
_ESTIMATORS = {
    "exact": "exact: the expectation over the labels that the model itself predicts",
    "sampled": "sampled: labels drawn from the model's own predictions",
    "predicted": "predicted: the label that the model finds most likely, so it is blind to the model's doubts",
    "empirical": "empirical: the labels of the data, so it is near zero where the model is right",
    "batched": "batched: the labels of the data, and the mean gradient of each batch is squared, which is no Fisher",
    "mixed": "mixed: those of the anchors it was merged from differ",
}
_LIKELIHOODS = {
    "categorical": "categorical: a softmax over the classes",
    "per-token": "per-token: a softmax over the vocabulary at each token; a sequence is one sample",
    "bernoulli": "bernoulli: each output is a yes or no of its own",
    "gaussian": "gaussian: outputs are means, of unit variance",
}


def facts(found: Inspection, place: Published) -> str:
    """Return the table; what is not known has no row."""
    origin = found.provenance
    rows = [
        ("Base model", _base_model(origin, place)),
        ("Architecture", _architecture(origin)),
        ("Weights", _weights(found)),
        ("Data", _data(origin.data)),
        ("Fingerprint of the samples used", code_of(origin.data.get("fingerprint"))),
        ("Input", _input(origin.input)),
        ("Classes", f"{len(origin.classes):,}: {some(origin.classes, most=_CLASSES)}" if origin.classes else ""),
        ("Scores of the model on the data", _scores(origin.scores)),
        ("Curvature", _curvature(found)),
        ("Stored as", "" if origin.curvature_storage is None else describe(origin.curvature_storage)),
        ("Estimator", _estimator(origin)),
        ("Samples", _samples(origin)),
        ("Likelihood", _LIKELIHOODS.get(origin.likelihood) or code(origin.likelihood)),
        ("Normalisation", _normalisation(origin)),
        ("Left free", _left_free(origin.excluded)),
        ("Last layer", _head(origin)),
        ("Trained before under", some(origin.lineage, _pulled, most=_PARENTS, between="<br>")),
        *_parents(origin),
        *(("Probe", _probe(probe)) for probe in found.probes[:_PARENTS]),
        ("File", f"{code(last_part(place.file))}, {_size(found.bytes)} ({found.bytes:,} bytes)"),
        ("SHA-256", code(place.digest)),
        ("Made with", _made(origin)),
        ("Licence", code_of(place.license)),
    ]
    return "### What is known of it\n\n| | |\n|---|---|\n" + "\n".join(f"| {n} | {v} |" for n, v in rows if v)


def _base_model(origin: Provenance, place: Published) -> str:
    base, revision = place.base
    weights = labelled("SHA-256 of the weights", code_of(origin.checkpoint.get("sha256")))
    if not base:
        return joined(place_of(origin.checkpoint.get("file")), weights)
    url = f"https://huggingface.co/{base}"
    commit = f" at revision [{code(revision[:12])}]({url}/tree/{revision})" if revision else ""
    return joined(f"[{code(base)}]({url}){commit}", weights)


def _architecture(origin: Provenance) -> str:
    kind = labelled("checkpoint format", code_of(origin.checkpoint.get("format")))
    return joined(place_of(origin.checkpoint.get("architecture")), kind)


def _weights(found: Inspection) -> str:
    every, singly = found.tensors["anchor"]["numbers"], found.tensors["fisher"]["numbers"]
    held = singly + found.in_blocks
    text = f"{every:,}, " + ("all of them held" if held == every else f"of which {held:,} are held and the others free")
    elsewhere = found.provenance.weights_reference
    if elsewhere is None:
        return text
    files, place = some(sorted(elsewhere["files"])), code(f"{elsewhere['repository']}@{elsewhere['revision']}")
    return f"{text}. What they are is not in the file: they are fetched from {files} of {place}, and checked"


def _data(data: Mapping[str, Any]) -> str:
    split, size = data.get("split"), data.get("size")
    return joined(
        place_of(data.get("spec")),
        f"{code(split)} split" if isinstance(split, str) and split else "",
        counted(size, "sample") if _is_count(size) else "",
    )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _input(layout: Mapping[str, Any]) -> str:
    names, shape = layout.get("names"), layout.get("shape")
    if isinstance(names, dict):
        return "by name: " + some(sorted(names))
    if not shape:
        return ""
    return joined(
        " \N{MULTIPLICATION SIGN} ".join(map(str, shape)),
        "bytes, scaled from 0..255 to 0..1" if layout.get("bytes_to_unit") is True else "",
        _normalised(layout),
        "flattened" if layout.get("flat") is True else "",
    )


def _normalised(layout: Mapping[str, Any]) -> str:
    """Say what is done to the numbers in images; a file may say anything."""
    return Transform.read(layout).describe_numbers() if is_transform(layout) and layout.get("raw", True) else ""


def _scores(scores: Mapping[str, float]) -> str:
    return joined(*(_score(name, value) for name, value in sorted(scores.items())))


def _score(name: str, value: float) -> str:
    if name == "accuracy":
        return f"accuracy {100 * value:.2f}%"
    return f"{name if name in ('loss', 'perplexity') else code(name)} {value:.4g}"


def _curvature(found: Inspection) -> str:
    origin, singly = found.provenance, found.tensors["fisher"]["numbers"]
    said = _CURVATURES[origin.curvature]
    if found.blocks:
        layers = "one layer" if len(found.blocks) == 1 else f"{len(found.blocks):,} layers"
        rest = f", and a diagonal for the other {singly:,} weights" if singly else ""
        said += f": {layers} with {found.in_blocks:,} weights{rest}"
    return f"{said}; {_merged(origin.merged)}" if origin.merged else said


def _merged(merged: Mapping[str, Any]) -> str:
    """Say how anchors were merged, and how far the result is off."""
    gamma, distance = number_of(merged.get("gamma")), merged.get("kfac_distance")
    how = f"merged in the running form, gamma {gamma}" if merged.get("form") == "online" and gamma else "merged"
    distances = distance.values() if isinstance(distance, dict) else ()
    off = max((value for value in distances if isinstance(value, float)), default=0.0)
    return how + (f"; blocks stand for sums that they are off by up to {off:.0%}" if off else "")


def _estimator(origin: Provenance) -> str:
    if origin.estimator == "none":
        return ""
    drawn = f", {number_of(origin.draws)} for each sample (seed {origin.seed})" if origin.draws else ""
    batch = f" (batches of {origin.batch_size:,})" if origin.estimator == "batched" and origin.batch_size else ""
    return _ESTIMATORS[origin.estimator] + drawn + batch


def _samples(origin: Provenance) -> str:
    if not origin.samples:
        return ""
    error = (origin.standard_error or {}).get("trace")
    spread = "" if error is None else f", standard error of the trace {100 * error:.2g}%"
    return f"N = {origin.samples:,}{spread}"


def _normalisation(origin: Provenance) -> str:
    layers, policy = origin.normalisation.get("layers"), origin.normalisation.get("statistics")
    if not layers:
        return ""
    return joined(code(policy) if isinstance(policy, str) else "", f"running statistics of {some(layers)}", between=" ")


def _left_free(excluded: Mapping[str, str]) -> str:
    """Return the parameters without curvature, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(excluded.items()):
        by_reason.setdefault(reason, []).append(name)
    return some(
        sorted(by_reason),
        lambda reason: f"{some(by_reason[reason])}: {code(reason)}",
        left="for {:,} more reasons, others",
        between="<br>",
    )


def _head(origin: Provenance) -> str:
    if origin.head is None or not origin.head["parameters"]:
        return ""
    return f"{some(origin.head['parameters'])} took the place of the one that the model was first trained with"


def _pulled(entry: Mapping[str, Any]) -> str:
    return joined(
        name_of(entry["name"]) if entry.get("name") else "",
        labelled("lambda", number_of(entry.get("lambda"))),
        labelled("SHA-256", code_of(entry.get("sha256"))),
        code_of(entry.get("hub")),
    )


def _parents(origin: Provenance) -> list[tuple[str, str]]:
    """Return the anchors that it was merged from, a row for each."""
    every = origin.merged["parents"] if origin.merged else []
    rows = [(f"Merged from ({n})", _parent(parent)) for n, parent in enumerate(every[:_PARENTS], start=1)]
    left = len(every) - _PARENTS
    return [*rows, *([("Merged from", f"{left:,} more")] if left > 0 else [])]


def _parent(parent: Mapping[str, Any]) -> str:
    source = parent["provenance"]
    name, data, samples = (source.get(key) for key in ("name", "data", "samples"))
    return joined(
        name_of(name) if name else "",
        f"lambda {number_of(parent['lambda'])}",
        labelled("data", _data(data) if isinstance(data, dict) else ""),
        f"N = {samples:,}" if _is_count(samples) else "",
        labelled("SHA-256", code_of(parent.get("sha256"))),
    )


def _probe(probe: Mapping[str, Any]) -> str:
    whose = _data({"spec": probe["data"], "split": probe["split"]})
    taken = f"with the model's answers to {'it' if probe['samples'] == 1 else 'them'} ({_size(probe['bytes'])})"
    return f"**{counted(probe['samples'], 'sample')} of the data in the file:** {joined(whose, taken)}"


def _size(size: int) -> str:
    """Return a number of bytes in a unit that people use."""
    if size < 1e5:
        return f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size} bytes"
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"


def _made(origin: Provenance) -> str:
    versions = some(f"{name} {version}" for name, version in sorted(origin.versions.items()))
    return joined(versions, labelled("at", code_of(origin.created)))
