"""The runs of a sweep: which there are, and what each is called."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.checkpoint.location import local_name
from ewc_finetune.checkpoint.pin import pinned_anchor
from ewc_finetune.choices import PENALTY_FORMS, PenaltyForm, check_choice
from ewc_finetune.errors import UsageError
from ewc_finetune.penalty.quadratic import spread_lambdas
from ewc_finetune.progress import Progress
from ewc_finetune.storage.atomic import beside

T = TypeVar("T")
Stack = tuple[Anchor | str | Path, ...]


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: The name of its checkpoint and run folder, without ending.
        stack: The name of its stack of anchors.
        anchors: The anchors that hold the run, oldest first.
        strength: Lambda, the same for all of them.
        form: The form of the penalty.
        seed: The seed of the run.
        plain: Whether it is plain fine-tuning: neither a penalty nor rehearsal.
    """

    name: str
    stack: str
    anchors: Stack
    strength: float
    form: PenaltyForm
    seed: int
    plain: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What `finetune` is told of it."""
        return {
            "anchors": list(self.anchors),
            "lambdas": [self.strength],
            "penalty_form": self.form,
            "seed": self.seed,
            **({"retain": None} if self.plain else {}),
        }


def grid(
    stacks: Sequence[Stack],
    lambdas: Sequence[float],
    forms: Sequence[PenaltyForm],
    seeds: Sequence[int],
    plain: bool,
    rehearsed: bool = False,
) -> list[Point]:
    """Return every combination once, a seed after the other, so that each has a frontier as soon as may be.

    Of plain runs there is one for each seed, under the first stack: with the same start. A lambda of 0 is such a run,
    or where old inputs are rehearsed one that is held by these alone, in the first form.
    """
    strengths = _unique(strength for strength in lambdas if strength > 0 or rehearsed)
    points = []
    for seed in _unique(seeds):
        if plain or (0 in lambdas and not rehearsed):
            first = label_of(stacks[0])
            points.append(Point(_name(["plain"], "gradient", seed), first, stacks[0], 0.0, "gradient", seed, True))
        for stack, form, strength in itertools.product(stacks, _unique(forms), strengths):
            if strength == 0 and form != forms[0]:
                continue
            name = _name([label_of(stack), f"lambda-{_number(strength)}"], form, seed)
            points.append(Point(name, label_of(stack), stack, strength, form, seed))
    return points


# A sweep of more runs is taken for a mistake.
_MOST = 10_000


def check_grid(lambdas: Sequence[float] | str, forms: Sequence[str], seeds: Sequence[int], jobs: int) -> None:
    """Refuse what can be no grid.

    Raises:
        UsageError: saying what is wrong, and what is expected.
    """
    if isinstance(lambdas, str):
        raise UsageError(
            f"lambda is {lambdas!r}; a sweep takes a list of numbers, and finetune looks for one with auto"
        )
    if len(lambdas) * len(forms) * len(seeds) > _MOST:
        raise UsageError(f"the sweep has more than {_MOST:,} runs; ask for fewer lambdas, forms or seeds")
    for option, values in (("lambda", lambdas), ("penalty form", forms), ("seed", seeds)):
        if not values:
            raise UsageError(f"the sweep has no {option}; expected at least one")
    for value in lambdas:
        spread_lambdas(value, 1)
    for form in forms:
        check_choice("penalty form", form, PENALTY_FORMS)
    if jobs < 1:
        raise UsageError(f"jobs is {jobs}; expected a whole number, at least 1")


def as_stacks(anchors: Any, progress: Progress) -> list[Stack]:
    """Return the stacks to try, each once; those on the Hub at the commits that they are now.

    Args:
        anchors: An anchor, or several stacks, each an anchor or a sequence of them.
        progress: Is told what a reader should know of these anchors.

    Raises:
        UsageError: if there is none, or two would have the same name.
    """
    given = [anchors] if isinstance(anchors, (Anchor, str, Path)) else list(anchors)
    stacks: dict[tuple[str | int, ...], Stack] = {}
    for item in given:
        given_stack = (item,) if isinstance(item, (Anchor, str, Path)) else item
        stack = tuple(pinned_anchor(anchor, progress) for anchor in given_stack)
        if stack:
            stacks.setdefault(tuple(id(one) if isinstance(one, Anchor) else str(one) for one in stack), stack)
    if not stacks:
        raise UsageError("a sweep tries how strongly anchors should hold, and there is none; name them with --anchors")
    labels: dict[str, Stack] = {}
    for stack in stacks.values():
        other = labels.setdefault(label_of(stack), stack)
        if other is not stack:
            raise UsageError(
                f"the runs of {', '.join(map(_said, other))} and of {', '.join(map(_said, stack))} would have the same "
                "names; give the anchors files of different names (`ewc-ft pull` gives those on the Hub files)"
            )
    return list(stacks.values())


def stack_label(anchors: Iterable[str]) -> str:
    """Return what to call a stack: its files' names, without folder and ending."""
    names = [beside(local_name(anchor), "").name.removesuffix(".anchor") for anchor in anchors]
    return "+".join(re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") for name in names)


def label_of(stack: Stack) -> str:
    """Return what to call a stack."""
    return stack_label(map(_said, stack))


def _said(anchor: Anchor | str | Path) -> str:
    return anchor.label if isinstance(anchor, Anchor) else str(anchor)


def _name(parts: list[str], form: str, seed: int) -> str:
    # Only what is not as usual is said, so that a name stays the same when the sweep grows.
    return "-".join([*parts, *([form] if form != "gradient" else []), *([f"seed-{seed}"] if seed else [])])


def _number(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))
