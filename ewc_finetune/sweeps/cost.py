"""What a sweep will need: the runs that are left, one after another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from ewc_finetune.evaluation.cost import Estimate
from ewc_finetune.storage.atomic import beside
from ewc_finetune.sweeps.folder import DOCUMENT, FIGURE, TABLE
from ewc_finetune.sweeps.plan import SweepPlan, what_is_left


def cost(swept: SweepPlan) -> Estimate:
    """Return what the runs that are left will need.

    Raises:
        EwcError: see `what_is_left`.
    """
    todo, folder, looks = what_is_left(swept).todo, swept.folder, swept.looks
    left = {job.name: Path(str(job.options.output)) for job in todo}
    each = [looks[point.stack, point.form] for point in swept.points if point.name in left]
    steps = [look.work["steps"] for look in each]
    seconds = [look.seconds for look in each]
    most: Counter[str] = Counter()
    for look in looks.values():
        for where, size in look.memory.items():
            most[where] = max(most[where], (size or 0) * max(1, min(swept.options.jobs, len(todo))))
    return Estimate(
        work={"runs": len(todo), "steps": None if None in steps else sum(n for n in steps if n is not None)},
        seconds=None if None in seconds else sum(s for s in seconds if s is not None),
        memory={where: size or None for where, size in most.items()},
        files=(
            *(path for output in left.values() for path in (output, beside(output, ".run"))),
            *(folder.path / name for name in (TABLE, DOCUMENT, FIGURE)),
        ),
    )
