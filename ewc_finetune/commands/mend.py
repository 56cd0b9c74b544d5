"""`mend`: bring back what a fine-tuned model has forgotten."""

from __future__ import annotations

from pathlib import Path

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.location import local_name
from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.commands.consolidate import plan as plan_consolidation
from ewc_finetune.commands.consolidate import run as run_consolidation
from ewc_finetune.curvature.options import ConsolidateOptions
from ewc_finetune.mending.mended import Mended
from ewc_finetune.mending.options import MendOptions
from ewc_finetune.mending.plan import plan
from ewc_finetune.mending.run import run
from ewc_finetune.specs.options import takes


@takes(MendOptions)
def mend(options: MendOptions) -> Mended:
    """Bring back what a fine-tuned model has forgotten, without training: by anchors of the old domains and of the new.

    The weights are where the anchors' penalties together are least, at one ratio of their strengths after another
    (Matena and Raffel 2022, "Merging models with Fisher-weighted averaging"; for K-FAC anchors Tam et al. 2023,
    "Merging by matching models in task parameter subspaces"). Beside them stand means of the old and the new weights
    (Wortsman et al. 2022, "Robust fine-tuning of zero-shot models").

    With `polish` it is trained on from there for a little, with old inputs rehearsed. If that ends early, the model is
    as it was, and nothing is written.

    Args:
        options: The model, the data it was fine-tuned on and the anchors, and by their names the others of
            `MendOptions`.

    Returns:
        What each ratio keeps and has learned, and which one was taken.

    Raises:
        EwcError: naming what is wrong with the model, an anchor, the data, an option or a file.
        RetentionError: if no ratio keeps what must be kept.
    """
    return run(plan(options), _consolidate)


def _consolidate(options: ConsolidateOptions, model: LoadedModel) -> Anchor:
    return run_consolidation(plan_consolidation(options, model))


def default_output(model: str | Path) -> Path:
    """Return where the mended model goes: beside the one that it is made of, `model.pt` to `model-mended.pt`."""
    name = local_name(model)
    return name.with_name(f"{name.stem}-mended{name.suffix}")
