"""`finetune`: adapt a model to a new domain under the penalty of its anchors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ewc_finetune.checkpoint.location import is_there, local_name
from ewc_finetune.checkpoint.open import ending_of
from ewc_finetune.finetuning.finetuned import Finetuned
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.plan import plan
from ewc_finetune.finetuning.run import run
from ewc_finetune.specs.options import takes
from ewc_finetune.specs.query import in_file_name
from ewc_finetune.storage.atomic import beside


@takes(FinetuneOptions)
def finetune(options: FinetuneOptions) -> Finetuned:
    """Adapt a model to a new domain, held by any number of anchors; without anchors, train it plainly.

    The same seed on the same machine gives the same bytes, be it in one go or resumed.

    Args:
        options: Model and data, and by their names those of `FinetuneOptions` and, for how to train, `Schedule`.

    Raises:
        EwcError: naming what is wrong with the model, an anchor, the data, an option or a file. If the run ends early
            (the loss becomes NaN, say), the state of the last evaluation is kept: see `run`.
    """
    return run(plan(options))


def default_output(model: str | Path | None, anchors: Sequence[str | Path], data: str | Sequence[str]) -> Path:
    """Return where the checkpoint goes: beside the newest anchor, else the model, named for it and the new data."""
    there = model is not None and is_there(model)
    named = local_name(str(model)) if there else Path(str(model).partition("?")[0].replace(":", "-"))
    source = local_name(anchors[-1]) if anchors else named
    stem = beside(source, "").name.removesuffix(".anchor")
    ending = ending_of(model if model is not None and there else anchors[-1] if anchors else source)
    return source.with_name(f"{stem}-{in_file_name(data)}{ending}")
