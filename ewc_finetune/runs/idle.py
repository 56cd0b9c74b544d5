"""Options that were given and do nothing, for want of another one: said in a line each, never passed over in silence.

What can never be right is refused where it is checked. What is listed here is only of no use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ewc_finetune.progress import Progress
from ewc_finetune.specs.options import spoken

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Idle:
    """When an option does nothing.

    Attributes:
        option: Name of the argument.
        when: Whether it does nothing beside these options.
        why: The reason, in words; options stand in it by their names in braces.
    """

    option: str
    when: Callable[[Options], bool]
    why: str


def _unheld(options: Options) -> bool:
    return not options["anchors"]


def _unrehearsed(options: Options) -> bool:
    return not options["rehearse"]


def _weightless(options: Options) -> bool:
    return bool(options["rehearse"]) and options["rehearse_weight"] == 0


_WEIGHTLESS = "--rehearse-weight 0 rehearses nothing"
_NOTHING_REHEARSED = "without --rehearse nothing is rehearsed"


def _whole_factors(options: Options) -> bool:
    return bool(options["kfac_rank"] == "full")


_WHOLE = Idle("kfac_dtype", _whole_factors, "factors that are kept whole (--kfac-rank full) are in float32")

FINETUNE = (
    Idle("momentum", lambda o: o["optimizer"] != "sgd", "only sgd has one, and the optimizer is {optimizer}"),
    Idle("lambdas", _unheld, "without --anchors there is no penalty"),
    Idle("penalty_form", _unheld, "without --anchors there is no penalty"),
    Idle("lineage", lambda o: len(o["anchors"]) < 2, "it is for several anchors that pull together"),
    Idle("tolerance", lambda o: o["lambdas"] != "auto", "it is for --lambda auto"),
    Idle(
        "tolerance",
        lambda o: bool(o["lambdas"] == "auto" and (o["retain"] is not None or o["select_on"])),
        "--lambda auto goes by --retain or --select-on",
    ),
    Idle(
        "select_on",
        lambda o: not (o["keep"] == "best" or o["patience"] or o["lambdas"] == "auto"),
        "it chooses for --keep best, --patience or --lambda auto; its data is only scored",
    ),
    Idle("rehearse_weight", _unrehearsed, _NOTHING_REHEARSED),
    Idle("rehearse_batch", _unrehearsed, _NOTHING_REHEARSED),
    Idle("rehearse_variations", _unrehearsed, _NOTHING_REHEARSED),
    Idle("rehearse_batch", _weightless, _WEIGHTLESS),
    Idle("rehearse_variations", _weightless, _WEIGHTLESS),
    Idle("workers", lambda o: not o["read"], "the data is in memory, or comes in batches of its own"),
    Idle("norm_stats", lambda o: not o["normalised"], "the model has no normalisation layers"),
    Idle("metrics", lambda o: not o["scored"], "no domain is scored"),
    Idle("tensorboard", lambda o: o["output"] is None, "without an output there is no run folder to write to"),
)
CONSOLIDATE = (
    Idle("rtol", lambda o: o["samples"] != "auto", "it is for --samples auto"),
    Idle("rules", lambda o: o["curvature"] == "identity", "no gradient is taken for the curvature identity"),
    _WHOLE,
)
MERGE = (
    Idle("lineage", lambda o: len(o["anchors"]) < 2, "it is for several anchors"),
    Idle("gamma", lambda o: len(o["anchors"]) < 2, "it is for several anchors"),
    _WHOLE,
)


MEND = (
    Idle("rehearse", lambda o: o["polish"] is None, "it is for --polish"),
    Idle("lr", lambda o: o["polish"] is None, "it is for --polish"),
)


def say_idle(options: Any, idle: tuple[Idle, ...], facts: Mapping[str, Any], progress: Progress) -> None:
    """Say which options do nothing, of those that are not as they are by default.

    Args:
        options: The options of a command.
        idle: When each option does nothing, and what there is to say of it then.
        facts: What else is to be known: whether samples are `read` one by one, whether the model is `normalised` by any
            layer, and whether any domain is `scored`.
        progress: Is told which options do nothing.
    """
    defaults = {one.name: one.default for one in fields(options)}
    known = {**{name: getattr(options, name) for name in defaults}, **facts}
    for row in idle:
        value, default = known[row.option], defaults[row.option]
        given = value is not None if default is None else value != default
        nothing = isinstance(value, (list, tuple)) and not value
        if given and not nothing and row.when(known):
            name = f"no-{spoken(options, row.option)}" if default is True else spoken(options, row.option)
            progress.note(f"--{name} does nothing: {row.why.format_map(known)}")
