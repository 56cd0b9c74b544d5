"""Our section of a card: what an anchor is, in Markdown for somebody who knows PyTorch, but not this project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ewc_finetune.anchor.describe import joined
from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.anchor.summary import Inspection
from ewc_finetune.errors import UsageError, counted
from ewc_finetune.model_card.facts import facts
from ewc_finetune.model_card.importance import importance
from ewc_finetune.model_card.published import Published
from ewc_finetune.model_card.text import HUB_NAME, REVISION, code, name_of, some
from ewc_finetune.model_card.usage import usage

BEGIN = "<!-- ewc-finetune:begin -->"
END = "<!-- ewc-finetune:end -->"
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
    if place.revision is not None and not REVISION.fullmatch(place.revision):
        raise UsageError(f"{place.revision!r} is no branch on the Hub; expected letters, digits and . / - _")
    origin = found.provenance
    parts = [
        f"{BEGIN}\n<!-- `ewc-ft push` writes what is between these comments anew. Write above or below them. -->",
        f"## The anchor {name_of(origin.name)}",
        _introduction(origin),
        *(f"> {warning}" for warning in _warnings(found)),
        usage(origin, place),
        facts(found, place),
        _penalty(origin),
        "" if origin.curvature == "identity" else importance(origin.importance, place.figure),
        _literature(origin),
        END,
    ]
    return joined(*parts, between="\n\n")


def _introduction(origin: Provenance) -> str:
    knows = f"what the model knows of {name_of(origin.name)}"
    matters = f"how much it matters to {knows}"
    if origin.curvature == "identity":
        matters = f"the same pull back to {knows}"
    merged = f" It was merged from {counted(len(origin.merged['parents']), 'anchor')}." if origin.merged else ""
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
            f"**This anchor holds {counted(held, 'sample')} of the data as {'it is' if held == 1 else 'they are'}.** "
            f"Whoever has the file has {'it' if held == 1 else 'them'}. `finetune` uses such samples to say how much "
            "of the old behaviour is kept; `ewc-ft merge ANCHOR -o COPY --no-probes` writes a copy without any."
        )
    if found.provenance.lineage:
        named = some(found.provenance.lineage, _ancestor, left="{:,} more")
        said.append(
            f"**Its model was already trained under {named}.** If you stack it with an anchor named here, that older "
            "domain counts twice in part, unless you add `--lineage latest`."
        )
    return said


def _ancestor(entry: Mapping[str, Any]) -> str:
    if entry.get("name"):
        return name_of(entry["name"])
    return f"an anchor with SHA-256 {code(str(entry.get('sha256'))[:12])}"


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
    text = joined("The half is part of it.", letters, of_samples, between=" ")
    return f"### What it adds to the loss\n\n```text\n{formula}\n```\n\n{text}"


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
