"""What a model card says of an anchor: Markdown for somebody who knows PyTorch, but not this project.

All that an anchor file says of itself is text by somebody unknown, so it stands in code spans (`code`), where it can be
neither HTML nor Markdown; what stands outside of them is written here, is a number, or is checked to be a Hub name.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ewc_finetune.checkpoint.architecture import BUILTIN, TRANSFORMERS
from ewc_finetune.checkpoint.exported import Exported
from ewc_finetune.checkpoint.hugging_face import HuggingFace
from ewc_finetune.checkpoint.onnx_file import Onnx
from ewc_finetune.checkpoint.pickled import Pickled
from ewc_finetune.checkpoint.safetensors_file import SafetensorsFile
from ewc_finetune.checkpoint.sharded import Sharded
from ewc_finetune.checkpoint.state_dict import StateDict
from ewc_finetune.checkpoint.torchscript import TorchScript
from ewc_finetune.errors import UsageError
from ewc_finetune.provenance import Provenance
from ewc_finetune.verbs.finetune import DEFAULT_LAMBDA
from ewc_finetune.verbs.inspect import Inspection

BEGIN = "<!-- ewc-finetune:begin -->"
END = "<!-- ewc-finetune:end -->"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"\w[\w./-]*", re.ASCII)
_FILE_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
# Longer texts are cut, and of longer lists the first ones are named.
_LONGEST, _NAMED, _PARENTS, _LAYERS = 200, 8, 24, 12
_TIMES = " \N{MULTIPLICATION SIGN} "
# What would end a code span or a table's cell, or could be taken for HTML once somebody copies it.
_LOOKALIKES = str.maketrans(
    {
        "`": "'",
        "|": "\N{BROKEN BAR}",
        "<": "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}",
        ">": "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}",
    }
)
_DATA_FILE = re.compile(r"\.(parquet|jsonl?|csv|txt)$", re.IGNORECASE)
_ABSOLUTE = re.compile(r"[/~\\]|[A-Za-z]:[/\\]")


@dataclass(frozen=True)
class Published:
    """Where an anchor is put, and what only the one who puts it there knows.

    Attributes:
        repository: On the Hub, `org/name`.
        revision: Its branch, if that is not the default one.
        file: The anchor in it, or the index of its shards.
        digest: SHA-256 of the anchor.
        figure: The figure of importance by layer in it.
        license: As the Hub calls it, such as `apache-2.0`.
        base_model: The model on the Hub that the anchor was made from, if it came from there.
        base_revision: The commit of that.
    """

    repository: str
    revision: str | None
    file: str
    digest: str
    figure: str | None = None
    license: str | None = None
    base_model: str | None = None
    base_revision: str | None = None

    @property
    def address(self) -> str:
        """How `--anchors` names it."""
        return f"hf://{self.repository}" + (f"@{self.revision}" if self.revision else "")


# Formats whose program is not in an anchor: how their files end, and the extra of this package that they need.
_PROGRAMS = {
    HuggingFace.format: (HuggingFace.ending, "[transformers]"),
    Onnx.format: (Onnx.ending, "[onnx]"),
    TorchScript.format: (TorchScript.ending, ""),
    Exported.format: (Exported.ending, ""),
    Pickled.format: (Pickled.ending, ""),
}
# Of shards an anchor makes one file.
_SAFETENSORS = (SafetensorsFile.format, Sharded.format)
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
_DIAGONAL = "lambda/2 * sum_i F_i (theta_i - theta*_i)^2"


def section(found: Inspection, place: Published) -> str:
    """Return what a card says of an anchor, from one HTML comment to the other, without a line break at the end.

    Args:
        found: The anchor.
        place: Where it is put.

    Raises:
        UsageError: if the repository or its branch has a name that the Hub does not know.
    """
    if "/" not in place.repository or not HUB_NAME.fullmatch(place.repository):
        raise UsageError(f"{place.repository!r} is no repository on the Hub; expected org/name")
    if place.revision is not None and not _REVISION.fullmatch(place.revision):
        raise UsageError(f"{place.revision!r} is no branch on the Hub; expected letters, digits and . / - _")
    parts = [
        f"{BEGIN}\n<!-- `ewc-ft push` writes what is between these comments anew. Write above or below them. -->",
        f"## The anchor {_name(found.provenance.name)}",
        _introduction(found.provenance),
        *(f"> {warning}" for warning in _warnings(found)),
        _usage(found.provenance, place),
        _facts(found, place),
        _penalty(found.provenance),
        _importance(found.provenance, place),
        _literature(found.provenance),
        END,
    ]
    return "\n\n".join(filter(None, parts))


def code(text: object) -> str:
    """Return text as a code span that is safe wherever it stands, in a table too.

    Backticks, bars and angle brackets become characters that look like them, and whatever cannot be seen a space.
    """
    seen = "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in str(text))
    seen = " ".join(seen.split()).translate(_LOOKALIKES)
    if len(seen) > _LONGEST:
        seen = seen[: _LONGEST - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"
    return f"`{seen or '(no name)'}`"


def without_folders(text: str) -> str:
    """Return a data spec, architecture or file name without the folders that files in it lie in; Hub names stay."""
    head, question, tail = text.partition("?")
    kind, colon, place = head.partition(":") if ":" in head else ("", "", head)
    name, at, revision = place.partition("@")
    on_hub = kind == "hf" and HUB_NAME.fullmatch(name) and not _DATA_FILE.search(name)
    if not on_hub or (at and not _REVISION.fullmatch(revision)):
        place = _last(place)
    options = []
    for option in tail.split("&"):
        key, equals, value = option.partition("=")
        options.append(f"{_last(key)}{equals}{_last(value)}")
    return f"{_last(kind)}{colon}{place}{question}{'&'.join(options)}"


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def _name(text: object) -> str:
    """Return the name of an anchor, which may be anything, but no path."""
    return code(_last(text) if isinstance(text, str) and _ABSOLUTE.match(text) else text)


def _some(texts: Iterable[object], most: int = _NAMED) -> str:
    """Name the first few of many things."""
    every = list(texts)
    more = [f"and {len(every) - most:,} more"] if len(every) > most else []
    return ", ".join([*map(code, every[:most]), *more])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number(value: object) -> str:
    """Return a number of the file as text, or nothing if it is none."""
    return f"{value:g}" if isinstance(value, (int, float)) and abs(value) < 2**63 else ""


def _joined(*parts: str, between: str = ", ") -> str:
    return between.join(filter(None, parts))


def _bytes(size: int) -> str:
    if size < 1e5:
        return f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size} bytes"
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.1f} GB"


def _introduction(origin: Provenance) -> str:
    knows = f"what the model knows of {_name(origin.name)}"
    matters = f"how much it matters to {knows}"
    if origin.curvature == "identity":
        matters = f"the same pull back to {knows}"
    merged = f" It was merged from {len(origin.merged['parents'])} anchors." if origin.merged else ""
    return (
        f"This is an **anchor** for elastic weight consolidation: the weights of a trained PyTorch model and, for each "
        f"weight, {matters}. Fine-tune the model on new data under the anchor's pull, and it holds on to what it knew: "
        f"the anchor stands in for the old data, which is not needed again.{merged}"
    )


def _warnings(found: Inspection) -> list[str]:
    """Say what somebody should know before they take the anchor."""
    said = []
    held = sum(probe["samples"] for probe in found.probes)
    if held:
        said.append(
            f"**This anchor holds {_count(held, 'sample')} of the data as {'it is' if held == 1 else 'they are'}.** "
            f"Whoever has the file has {'it' if held == 1 else 'them'}. `finetune` uses such samples to say how much "
            "of the old behaviour is kept; `ewc-ft merge ANCHOR -o COPY --no-probes` writes a copy without any."
        )
    if found.provenance.lineage:
        said.append(
            f"**Its model was already trained under {_some_lineage(found.provenance.lineage)}.** If you stack it with "
            "an anchor named here, that older domain counts twice in part, unless you add `--lineage latest`."
        )
    return said


def _some_lineage(lineage: Sequence[Mapping[str, Any]]) -> str:
    named = [
        _name(entry["name"]) if entry.get("name") else f"an anchor with SHA-256 {code(str(entry.get('sha256'))[:12])}"
        for entry in lineage
    ]
    more = [f"{len(named) - _NAMED:,} more"] if len(named) > _NAMED else []
    return ", ".join([*named[:_NAMED], *more])


def _usage(origin: Provenance, place: Published) -> str:
    """Return the commands that use the anchor, to be copied as they are but for what is in capitals."""
    architecture, kind = origin.checkpoint.get("architecture"), origin.checkpoint.get("format") or ""
    plain = SafetensorsFile.ending if kind in _SAFETENSORS else StateDict.ending
    ending, extra = _PROGRAMS.get(kind, (plain, ""))
    options, hint = "", ""
    if kind in _PROGRAMS:
        options = f" --model {_model(origin, place)}"
        hint = " `--model` is the model that the anchor was made from, whose program is not in the anchor."
    elif not architecture:
        options = " --arch PACKAGE.MODULE:CLASS"
        hint = " `--arch` is the class of the model, which the anchor does not name."
    elif architecture.partition("?")[0] not in BUILTIN and not architecture.startswith(("torchvision:", TRANSFORMERS)):
        hint = f" The class {code(without_folders(architecture).partition('?')[0])} has to be on the Python path."
    package = f"'ewc-finetune{extra}'" if extra else "ewc-finetune"
    learn = f"`NEW_DATA` is what to learn, such as {_example(origin)}."
    pull = (
        f"`--lambda` says how hard the anchor pulls ({DEFAULT_LAMBDA[origin.curvature]:g} unless given; `auto` looks "
        "for a value), and `ewc-ft finetune --help` lists the rest."
    )
    return f"""### How to use it

```sh
pip install {package}
ewc-ft finetune --anchors {place.address}{options} --data NEW_DATA --output adapted{ending}
```

{learn}{hint} {pull}

From Python, on a `torch.nn.Module` that has the weights to start from, and a dataset or loader:

```python
import ewc_finetune

anchor = ewc_finetune.Anchor.open("{place.address}")
ewc_finetune.finetune(model, new_data, anchors=anchor)  # in place
```"""


def _model(origin: Provenance, place: Published) -> str:
    """Return what to write behind `--model`: nothing of it may be more than a name to a shell."""
    base, revision = _base(place)
    if base and origin.checkpoint.get("format") == HuggingFace.format:
        return f"hf:{base}" + (f"@{revision}" if revision else "")
    file = origin.checkpoint.get("file") or ""
    return file if _FILE_NAME.fullmatch(file) else "MODEL"


def _base(place: Published) -> tuple[str, str]:
    """Return the model on the Hub and its revision, as far as they are names that the Hub may have."""
    base, revision = place.base_model or "", place.base_revision or ""
    if not HUB_NAME.fullmatch(base):
        return "", ""
    return base, revision if _REVISION.fullmatch(revision) else ""


def _example(origin: Provenance) -> str:
    if origin.likelihood == "per-token":
        return "`text:new.txt` or `hf:ORG/DATASET`"
    if len(origin.input.get("shape", [])) == 3:
        return "`imagefolder:photos/` or `npz:new.npz`"
    return "`csv:new.csv?target=label` or `hf:ORG/DATASET`"


def _facts(found: Inspection, place: Published) -> str:
    """Return the table of all that is known."""
    origin = found.provenance
    rows = [
        ("Base model", _base_model(origin, place)),
        ("Architecture", _architecture(origin)),
        ("Weights", _weights(found)),
        ("Data", _data(origin.data)),
        ("Fingerprint of the samples used", code(origin.data["fingerprint"]) if origin.data.get("fingerprint") else ""),
        ("Input", _input(origin.input)),
        ("Classes", "" if not origin.classes else f"{len(origin.classes):,}: {_some(origin.classes, 12)}"),
        ("Scores of the model on the data", _scores(origin.scores)),
        ("Curvature", _curvature(found)),
        ("Estimator", _estimator(origin)),
        ("Samples", _samples(origin)),
        ("Likelihood", _LIKELIHOODS.get(origin.likelihood) or code(origin.likelihood)),
        ("Normalisation", _normalisation(origin)),
        ("Left free", _left_free(origin.excluded)),
        ("Last layer", _head(origin)),
        ("Trained before under", "<br>".join(map(_pulled, origin.lineage[:_PARENTS])) + _rest(origin.lineage)),
        *_parents(origin),
        *(("Probe", _probe(probe)) for probe in found.probes[:_PARENTS]),
        ("File", f"{code(_last(place.file))}, {_bytes(found.bytes)} ({found.bytes:,} bytes)"),
        ("SHA-256", code(place.digest)),
        ("Made with", _made(origin)),
        ("Licence", code(place.license) if place.license else ""),
    ]
    return "### What is known of it\n\n| | |\n|---|---|\n" + "\n".join(f"| {n} | {v} |" for n, v in rows if v)


def _base_model(origin: Provenance, place: Published) -> str:
    base, revision = _base(place)
    file, digest = origin.checkpoint.get("file"), origin.checkpoint.get("sha256")
    weights = f"SHA-256 of the weights {code(digest)}" if digest else ""
    if not base:
        return _joined(code(without_folders(file)) if file else "", weights)
    url = f"https://huggingface.co/{base}"
    commit = f" at revision [{code(revision[:12])}]({url}/tree/{revision})" if revision else ""
    return _joined(f"[{code(base)}]({url}){commit}", weights)


def _architecture(origin: Provenance) -> str:
    architecture, kind = origin.checkpoint.get("architecture"), origin.checkpoint.get("format")
    return _joined(
        code(without_folders(architecture)) if architecture else "",
        f"checkpoint format {code(kind)}" if kind else "",
    )


def _weights(found: Inspection) -> str:
    every, singly = found.tensors["anchor"]["numbers"], found.tensors["fisher"]["numbers"]
    held = singly + found.in_blocks
    return f"{every:,}, " + ("all of them held" if held == every else f"of which {held:,} are held and the others free")


def _data(data: Mapping[str, Any]) -> str:
    spec, split, size = data.get("spec"), data.get("split"), data.get("size")
    return _joined(
        code(without_folders(spec)) if isinstance(spec, str) and spec else "",
        f"{code(split)} split" if isinstance(split, str) and split else "",
        _count(size, "sample") if _is_count(size) and isinstance(size, int) else "",
    )


def _input(layout: Mapping[str, Any]) -> str:
    names = layout.get("names")
    if isinstance(names, dict):
        return "by name: " + _some(sorted(names))
    shape = layout.get("shape")
    if not shape:
        return ""
    return _joined(
        _TIMES.join(map(str, shape)),
        "bytes, scaled from 0..255 to 0..1" if layout.get("bytes_to_unit") is True else "",
        "flattened" if layout.get("flat") is True else "",
    )


def _scores(scores: Mapping[str, float]) -> str:
    return _joined(
        *(
            f"accuracy {100 * value:.2f}%"
            if name == "accuracy"
            else f"{name if name in ('loss', 'perplexity') else code(name)} {value:.4g}"
            for name, value in sorted(scores.items())
        )
    )


def _curvature(found: Inspection) -> str:
    origin, singly = found.provenance, found.tensors["fisher"]["numbers"]
    said = _CURVATURES[origin.curvature]
    if found.blocks:
        layers = "one layer" if len(found.blocks) == 1 else f"{len(found.blocks):,} layers"
        rest = f", and a diagonal for the other {singly:,} weights" if singly else ""
        said += f": {layers} with {found.in_blocks:,} weights{rest}"
    if not origin.merged:
        return said
    form, gamma = origin.merged.get("form"), _number(origin.merged.get("gamma"))
    how = f"merged in the running form, gamma {gamma}" if form == "online" and gamma else "merged"
    off = max((v for v in _values(origin.merged.get("kfac_distance")) if isinstance(v, float)), default=0.0)
    return f"{said}; {how}" + (f"; blocks stand for sums that they are off by up to {off:.0%}" if off else "")


def _values(value: object) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _estimator(origin: Provenance) -> str:
    if origin.estimator == "none":
        return ""
    drawn = f", {_number(origin.draws)} for each sample (seed {origin.seed})" if origin.draws else ""
    batch = f" (batches of {origin.batch_size:,})" if origin.estimator == "batched" and origin.batch_size else ""
    return _ESTIMATORS[origin.estimator] + drawn + batch


def _samples(origin: Provenance) -> str:
    if not origin.samples:
        return ""
    error = (origin.standard_error or {}).get("trace")
    spread = "" if error is None else f", standard error of the trace {100 * error:.2g}%"
    return f"N = {origin.samples:,}{spread}"


def _normalisation(origin: Provenance) -> str:
    layers = origin.normalisation.get("layers") or []
    if not layers:
        return ""
    policy = origin.normalisation.get("statistics")
    return _joined(
        code(policy) if isinstance(policy, str) else "", f"running statistics of {_some(layers)}", between=" "
    )


def _left_free(excluded: Mapping[str, str]) -> str:
    """Return the parameters without curvature, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(excluded.items()):
        by_reason.setdefault(reason, []).append(name)
    reasons = sorted(by_reason)
    more = f"<br>for {len(reasons) - _NAMED:,} more reasons, others" if len(reasons) > _NAMED else ""
    return "<br>".join(f"{_some(by_reason[reason])}: {code(reason)}" for reason in reasons[:_NAMED]) + more


def _head(origin: Provenance) -> str:
    if origin.head is None or not origin.head["parameters"]:
        return ""
    return f"{_some(origin.head['parameters'])} took the place of the one that the model was first trained with"


def _pulled(entry: Mapping[str, Any]) -> str:
    strength = _number(entry.get("lambda"))
    return _joined(
        _name(entry["name"]) if entry.get("name") else "",
        f"lambda {strength}" if strength else "",
        f"SHA-256 {code(entry['sha256'])}" if entry.get("sha256") else "",
    )


def _rest(entries: Sequence[object]) -> str:
    return f"<br>and {len(entries) - _PARENTS:,} more" if len(entries) > _PARENTS else ""


def _parents(origin: Provenance) -> list[tuple[str, str]]:
    """Return the anchors that it was merged from, a row for each."""
    every = origin.merged["parents"] if origin.merged else []
    rows = []
    for number, parent in enumerate(every[:_PARENTS], start=1):
        source = parent["provenance"]
        name, data, samples = (source.get(key) for key in ("name", "data", "samples"))
        said = _joined(
            _name(name) if name else "",
            f"lambda {_number(parent['lambda'])}",
            f"data {known}" if (known := _data(data if isinstance(data, dict) else {})) else "",
            f"N = {samples:,}" if _is_count(samples) else "",
            f"SHA-256 {code(parent['sha256'])}" if parent.get("sha256") else "",
        )
        rows.append((f"Merged from ({number})", said))
    left = len(every) - _PARENTS
    return [*rows, *([("Merged from", f"{left:,} more")] if left > 0 else [])]


def _probe(probe: Mapping[str, Any]) -> str:
    whose = _data({"spec": probe["data"], "split": probe["split"]})
    taken = f"with the model's answers to {'it' if probe['samples'] == 1 else 'them'} ({_bytes(probe['bytes'])})"
    return f"**{_count(probe['samples'], 'sample')} of the data in the file:** {_joined(whose, taken)}"


def _made(origin: Provenance) -> str:
    versions = _some(f"{name} {version}" for name, version in sorted(origin.versions.items()))
    return _joined(versions, f"at {code(origin.created)}" if origin.created else "")


def _penalty(origin: Provenance) -> str:
    """Say what is added to the loss: the formula, and what its letters stand for."""
    formula, letters = _DIAGONAL, "`theta*` are the weights in the anchor."
    of_samples = (
        "`F` is the mean over samples of the squared gradient of one sample's log-likelihood, per sample and never per "
        "batch, so `N F` is the posterior precision."
    )
    if origin.curvature == "identity":
        formula, of_samples = "lambda/2 * sum_i (theta_i - theta*_i)^2", ""
    if origin.curvature == "kfac":
        formula = f"lambda/2 * sum_layers <D, G D A>  +  {_DIAGONAL}"
        letters += (
            " In a layer with a block, `D` is how far its weight is from the anchor's, the bias being one more column; "
            "`A` is the mean of `a a^T` over what went into the layer, and `G` that of `g g^T` over the gradients that "
            "came back. The second sum is over all other weights."
        )
    if origin.merged:
        of_samples = "The curvature is the sum of those of the anchors it was merged from, each times its lambda."
    text = _joined("The half is part of it.", letters, of_samples, between=" ")
    return f"### What it adds to the loss\n\n```text\n{formula}\n```\n\n{text}"


def _importance(origin: Provenance, place: Published) -> str:
    """Return the figure and the table of where in the network the importance sits."""
    layers = origin.importance
    if not layers:
        return ""
    ranked = sorted(range(len(layers)), key=lambda number: (-layers[number]["share"], number))
    top = layers[ranked[0]]
    most = f"{code(top['layer'])} has the most, {100 * top['share']:.1f}%"
    shown = [layers[number] for number in sorted(ranked[:_LAYERS])]
    rows = [_layer(code(layer["layer"]), [layer]) for layer in shown]
    rest = [layers[number] for number in sorted(ranked[_LAYERS:])]
    if rest:
        rows.append(_layer(f"{_count(len(rest), 'other layer')}", rest))
    figure = ""
    if place.figure:
        figure = f"![Bars of each layer's share of the curvature's trace; {most}]({quote(place.figure)})\n\n"
    return (
        f"### Where the importance sits\n\n{figure}Of the trace of the curvature, {most}.\n\n"
        "| Layer | Weights | Share of the trace | Mean | Largest |\n|---|--:|--:|--:|--:|\n" + "\n".join(rows)
    )


def _layer(name: str, layers: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for one layer, or for several together."""
    weights = sum(layer["parameters"] for layer in layers)
    share = sum(layer["share"] for layer in layers)
    mean = sum(layer["mean"] * layer["parameters"] for layer in layers) / (weights or 1)
    return f"| {name} | {weights:,.0f} | {100 * share:.1f}% | {mean:.3g} | {max(x['max'] for x in layers):.3g} |"


def _literature(origin: Provenance) -> str:
    papers = [
        "J. Kirkpatrick et al. 2017, Overcoming catastrophic forgetting in neural networks, "
        "[arXiv:1612.00796](https://arxiv.org/abs/1612.00796)"
    ]
    if origin.curvature == "kfac":
        papers.append(
            "J. Martens and R. Grosse 2015, Optimizing neural networks with Kronecker-factored approximate curvature, "
            "[arXiv:1503.05671](https://arxiv.org/abs/1503.05671)"
        )
    return "Literature: " + "; ".join(papers) + "."
