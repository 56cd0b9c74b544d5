"""`dry_run`: what a command would need, without doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ewc_finetune.evaluation.cost import Estimate


class _Checked(Exception):  # noqa: N818 - no error: it carries the estimate out of a verb
    def __init__(self, estimate: Estimate) -> None:
        self.estimate = estimate


def dry_run(verb: Callable[..., object], *arguments: Any, **options: Any) -> Estimate:
    """Do what `consolidate`, `finetune` or `sweep` does up to its first step, try a few batches, and write nothing.

    Models are left as they were.

    Args:
        verb: One of the three.
        arguments: Its arguments.
        options: Likewise.

    Raises:
        EwcError: as the verb would.
    """

    def stop(estimate: Estimate) -> None:
        raise _Checked(estimate)

    try:
        verb(*arguments, before_start=stop, **options)
    except _Checked as checked:
        return checked.estimate
    raise TypeError(f"{verb} went on after its start")
