"""The options of a sweep, beside those that its runs have from `finetuning.options`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ewc_finetune.choices import PENALTY_FORMS, PenaltyForm
from ewc_finetune.errors import UsageError
from ewc_finetune.finetuning.options import Adapting, FinetuneOptions, Starting
from ewc_finetune.finetuning.schedule import Schedule
from ewc_finetune.rehearsal.options import Rehearsing
from ewc_finetune.specs.command_options import Computing, Told
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import option
from ewc_finetune.specs.ranges import read_lambdas, read_seeds

if TYPE_CHECKING:  # which is made of torch
    from ewc_finetune.sweeps.grid import Point

DEFAULT_LAMBDAS = (1.0, 10.0, 100.0, 1000.0, 10000.0)


def _stack(text: str) -> tuple[str, ...]:
    # A comma may also be a part of a file's name.
    with contextlib.suppress(OSError):  # a name that is too long is no file's
        if Path(text).exists():
            return (text,)
    names = tuple(text.split(","))
    if not all(names):
        raise UsageError(f"{text!r} has an empty name in it; expected anchors joined by commas")
    return names


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What the runs of a sweep differ in; see `SweepOptions`."""

    GROUP: ClassVar = Group.GRID

    anchors: Any = option(
        (),
        "A stack to try: an anchor, or several that pull together, joined by commas, oldest first. Repeat it to "
        "compare stacks, such as anchors of other curvatures; each is tried with every lambda.",
        read=_stack,
        many=True,
        metavar="FILE[,FILE]",
        main=True,
    )
    lambdas: Sequence[float] = option(
        DEFAULT_LAMBDAS,
        "Strengths to try: a number, several (1,10,100), or LOW..HIGH:N, which are N values evenly spaced in "
        "logarithms; repeatable. Each is that of all anchors of a stack.",
        name="lambda",
        read=read_lambdas,
        many=True,
        metavar="X",
        main=True,
        unless="1..10000:5",
    )
    penalty_forms: Sequence[PenaltyForm] = option(
        ("gradient",),
        "A form of the penalty to try; repeatable.",
        name="penalty-form",
        many=True,
        choices=PENALTY_FORMS,
        unless="gradient",
    )
    seeds: Sequence[int] = option(
        (0,),
        "Seeds whose mean each point is: a number, several (0,1,2), or 0..4; repeatable.",
        name="seed",
        read=read_seeds,
        many=True,
        metavar="N",
        main=True,
        unless="0",
    )
    plain: bool = option(True, "Make a run without penalty or rehearsal too, for each seed.", unless="yes")
    jobs: int = option(1, "Runs at a time, in as many processes.", least=1, metavar="N")
    discard: bool = option(False, "Remove the checkpoints in the end, but for those of the knee and of the best mean.")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Computing, Adapting, Schedule, Rehearsing, Grid, Starting, Told):
    """What `sweep` is asked for.

    Each option has its help where it is declared; `Attributes` says what there is to know beside that.

    Attributes:
        anchors: The stacks to try: each an anchor, or a sequence of anchors that pull together, oldest first.
        seeds: Each point is tried with all of them, and is their mean.
        jobs: How many runs at a time. More than one are commands of their own, which share this one's threads, and need
            model, data and anchors that have names: files, specs, addresses.
        discard: Whether to remove the checkpoints in the end, but for those of the knee and of the best mean.

    The others are those of `FinetuneOptions`, and of its runs. `eval_on` names an old domain and the new one, unless
    the anchors have probes; of data without a spec the new one is that of the same name, else the last.

    Raises:
        UsageError: if an option of training has a value that it cannot have.
    """

    GROUP: ClassVar = Group.OUTPUT

    output: str | Path | None = option(
        None,
        "The folder of the sweep.",
        short="o",
        path="any",
        metavar="FOLDER",
        main=True,
        unless="named for the first anchor and the data, with .sweep",
    )
    overwrite: bool = option(
        False, "Replace runs in the folder that were made with other options.", filed=False, sound=True
    )

    def of_run(self, point: Point, **own: Any) -> FinetuneOptions:
        """Return the options of one of its runs.

        Args:
            point: Where in the grid it is.
            own: Further options in which it differs from the others.
        """
        parts = (Told, Starting, Schedule, Rehearsing, Adapting, Computing)
        shared = {one.name: getattr(self, one.name) for part in parts for one in fields(part)}
        if self.sources and point.plain:
            # What the others are compared with rehearses nothing, and is measured by the same inputs as they are.
            shared["rehearse_weight"] = 0.0
        return FinetuneOptions(**{**shared, **point.options, **own})
