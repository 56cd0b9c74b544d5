"""`sweep`: many fine-tunes that differ in lambda, anchors, penalty form or seed, and the frontier that they make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ewc_finetune.commands.finetune import default_output
from ewc_finetune.specs.options import takes
from ewc_finetune.storage.atomic import beside
from ewc_finetune.sweeps.options import SweepOptions
from ewc_finetune.sweeps.plan import plan
from ewc_finetune.sweeps.run import Sweep, run


@takes(SweepOptions)
def sweep(options: SweepOptions) -> Sweep:
    """Fine-tune with every combination of lambda, anchors, penalty form and seed, and find the frontier.

    Each is a `finetune` of its own. Called again, it makes what is not there yet and goes on with what was stopped; a
    run that fails does not end the others, and is tried again.

    Args:
        options: Model and data as in `finetune` (a module is copied for each run), and by their names those of
            `SweepOptions`, of which `anchors` and `output` must be there.

    Raises:
        EwcError: naming what is wrong with an option, an anchor, the data or the folder; or if every run failed.
    """
    return run(plan(options))


def default_folder(model: str | Path | None, stack: Sequence[str | Path], data: str | Sequence[str]) -> Path:
    """Return where a sweep goes: beside the first stack's newest anchor, named for it and the new data."""
    return beside(default_output(model, stack, data), ".sweep")
