"""The table of all that is known of an anchor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ewc_finetune.anchor import describe
from ewc_finetune.anchor.describe import joined, labelled
from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.anchor.summary import Inspection
from ewc_finetune.data.transform import Transform, is_transform
from ewc_finetune.errors import counted
from ewc_finetune.model_card.published import Published
from ewc_finetune.model_card.text import code, code_of, last_part, name_of, place_of, some

# So many anchors that it comes from have a row or line each.
_PARENTS = 24
# So many classes are named.
_CLASSES = 12
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
# How the texts of the file are quoted that say what the data was, or what an anchor is called and where it is.
_DATA = {"spec": place_of, "split": code_of}
_ANCHOR = {"name": name_of, "sha256": code_of, "hub": code_of}


def facts(found: Inspection, place: Published) -> str:
    """Return the table; what is not known has no row."""
    origin = found.provenance
    rows = [
        ("Base model", _base_model(origin, place)),
        ("Architecture", _architecture(origin)),
        ("Weights", _weights(found)),
        ("Data", describe.data(_quoted(origin.data, **_DATA))),
        ("Fingerprint of the samples used", code_of(origin.data.get("fingerprint"))),
        ("Input", _input(origin.input)),
        ("Classes", f"{len(origin.classes):,}: {some(origin.classes, most=_CLASSES)}" if origin.classes else ""),
        (
            "Scores of the model on the data",
            _scores(origin.scores),
        ),
        ("Curvature", _curvature(found)),
        ("Stored as", "" if origin.curvature_storage is None else describe.storage(origin.curvature_storage)),
        ("Estimator", _estimator(origin)),
        ("Samples", _samples(origin)),
        ("Likelihood", _LIKELIHOODS.get(origin.likelihood) or code(origin.likelihood)),
        ("Normalisation", _normalisation(origin)),
        ("Left free", _left_free(origin.excluded)),
        ("Last layer", _head(origin)),
        ("Trained before under", some(origin.lineage, _ancestor, most=_PARENTS, between="<br>")),
        *_parents(origin),
        *(("Probe", _probe(probe)) for probe in found.probes[:_PARENTS]),
        ("File", f"{code(last_part(place.file))}, {describe.size(found.bytes)} ({found.bytes:,} bytes)"),
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
    known = ("accuracy", "loss", "perplexity")
    return describe.scores({name if name in known else code(name): value for name, value in scores.items()})


def _curvature(found: Inspection) -> str:
    origin, singly = found.provenance, found.tensors["fisher"]["numbers"]
    said = _CURVATURES[origin.curvature]
    if found.blocks:
        layers = "one layer" if len(found.blocks) == 1 else f"{len(found.blocks):,} layers"
        rest = f", and a diagonal for the other {singly:,} weights" if singly else ""
        said += f": {layers} with {found.in_blocks:,} weights{rest}"
    merged = _quoted(origin.merged, form=code_of, lineage=code_of, kfac_sum=code_of)
    return joined(said, describe.merging(merged), between="; ")


def _estimator(origin: Provenance) -> str:
    if origin.estimator == "none":
        return ""
    drawn = f", {origin.draws:,} for each sample (seed {origin.seed})" if origin.draws else ""
    batch = f" (batches of {origin.batch_size:,})" if origin.estimator == "batched" and origin.batch_size else ""
    return _ESTIMATORS[origin.estimator] + drawn + batch


def _samples(origin: Provenance) -> str:
    if not origin.samples:
        return ""
    return joined(f"N = {origin.samples:,}", describe.standard_error(vars(origin)))


def _normalisation(origin: Provenance) -> str:
    layers, policy = origin.normalisation.get("layers"), origin.normalisation.get("statistics")
    if not layers:
        return ""
    return joined(code(policy) if isinstance(policy, str) else "", f"running statistics of {some(layers)}", between=" ")


def _left_free(excluded: Mapping[str, str]) -> str:
    """Return the parameters without curvature, by the reason."""
    by_reason = describe.by_reason(dict(sorted(excluded.items())))
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


def _ancestor(entry: Mapping[str, Any]) -> str:
    return describe.ancestor(_quoted(entry, **_ANCHOR))


def _parents(origin: Provenance) -> list[tuple[str, str]]:
    """Return the anchors that it was merged from, a row for each."""
    every = origin.merged["parents"] if origin.merged else []
    rows = [(f"Merged from ({n})", _parent(parent)) for n, parent in enumerate(every[:_PARENTS], start=1)]
    left = len(every) - _PARENTS
    return [*rows, *([("Merged from", f"{left:,} more")] if left > 0 else [])]


def _parent(parent: Mapping[str, Any]) -> str:
    origin = parent["provenance"]
    known = {
        "name": origin.get("name") and name_of(origin["name"]),
        "data": _quoted(origin.get("data"), **_DATA),
        "samples": origin.get("samples"),
    }
    return describe.parent({**_quoted(parent, **_ANCHOR), "provenance": known})


def _probe(probe: Mapping[str, Any]) -> str:
    whose = describe.data(_quoted({"spec": probe["data"], "split": probe["split"]}, **_DATA))
    taken = f"with the model's answers to {'it' if probe['samples'] == 1 else 'them'} ({describe.size(probe['bytes'])})"
    return f"**{counted(probe['samples'], 'sample')} of the data in the file:** {joined(whose, taken)}"


def _made(origin: Provenance) -> str:
    versions = some(describe.versions(origin.versions))
    return joined(versions, labelled("at", code_of(origin.created)))


def _quoted(record: object, **quote: Callable[[object], str]) -> dict[str, Any]:
    """Return what the file says of something with these texts quoted, each in its way."""
    known = record if isinstance(record, dict) else {}
    return {**known, **{key: quoted(known[key]) for key, quoted in quote.items() if known.get(key)}}
