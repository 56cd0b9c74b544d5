"""`--lambda auto`: looking for the right strength of the penalty with a few short runs.

The procedure of De Lange et al. 2021 ("A continual learning survey: defying forgetting in classification tasks",
TPAMI): a plain run shows what plasticity is to be had, then the largest lambda is looked for whose run stays within a
tolerance of it. The new domain alone decides, on samples that are held out; the old data is not needed. Where theirs
halves lambda from a maximum that is known to be stable, this starts from the lambda at which the penalty of the plain
run's weights is as much as that run gained, and goes from there by factors and then by bisection.

Where there is more to go by, there are two other aims: the smallest lambda that keeps a share of the answers to the
anchors' probes, and the one with the best mean score over domains that the user names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ewc_finetune.data.domain import Domain
from ewc_finetune.errors import RetentionError, UsageError
from ewc_finetune.finetuning.aims import Aim, Best, Trial
from ewc_finetune.progress import Progress

# Short runs under the penalty; with the plain one they are five.
RUNS = 4
# Further short runs around the best one, where none of them will do or the one that does is a large step from the rest.
_MORE = 2
# The first lambda that is tried, as a share of the one at which the plain run's weights would cost what they gained.
_FIRST = 1 / 8
# The share of the new domain's samples that is held out to choose by.
_HELD_OUT = 0.1
# The most samples that are held out.
_MOST_HELD_OUT = 5_000


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        strength: The lambda that won.
        met: Whether its run was good enough; else it is the best or the nearest that was tried.
        aim: The aim of the search, in words.
        trials: All runs, in the order in which they were made.
    """

    strength: float
    met: bool
    aim: str
    trials: tuple[Trial, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all of it in values that JSON has."""
        trials = [trial.to_json() for trial in self.trials]
        return {"lambda": self.strength, "met": self.met, "aim": self.aim, "trials": trials}


def search_lambda(run: Callable[[float | None], Trial], aim: Aim, progress: Progress) -> Search:
    """Look for a lambda with short runs: a plain one, and four that are held, or six where four are not enough.

    Args:
        run: Makes a short run with a lambda, or plainly for None.
        aim: The aim of the search.
        progress: Is told of every run.

    Raises:
        RetentionError: if none keeps what must be kept.
    """
    progress.note(f"lambda auto: looking for {aim}")
    plain = run(None)
    trials = [plain]
    progress.note(f"lambda auto: plainly the new domain gets to {_results(plain)}")
    gained = plain.before.loss - plain.score.loss
    at_cost = gained / plain.distance if gained > 0 and plain.distance > 0 else math.nan
    strength = _FIRST * at_cost if math.isfinite(at_cost) else 1.0
    while len(trials) <= RUNS or (len(trials) <= RUNS + _MORE and aim.gives_hope(trials[1:])):
        trial = aim.judge(run(strength), trials)
        trials.append(trial)
        progress.note(f"lambda auto: {strength:.3g} gets to {_results(trial)}{aim.verdict(trial)}")
        strength = aim.next(trials[1:])
    winner = aim.winner(trials[1:])
    refusal = aim.refusal(winner)
    if refusal is not None:
        raise RetentionError(refusal)
    chosen = winner.strength or 0.0
    if winner.within or isinstance(aim, Best):
        progress.note(f"lambda auto: {chosen:.3g}, of {len(trials) - 1} that were tried {aim}")
    else:
        progress.note(
            f"lambda auto: none that was tried is {aim}; the nearest, {chosen:.3g}, is taken. Give a number to "
            "--lambda, or ask for less"
        )
    return Search(chosen, winner.within or isinstance(aim, Best), str(aim), tuple(trials))


def split(domain: Domain, seed: int) -> tuple[Domain, Domain]:
    """Hold samples out of a domain: return what is trained on, and what is chosen by.

    Raises:
        UsageError: if its samples cannot be had by number, or are too few.
    """
    size = domain.size or 0
    held = min(int(size * _HELD_OUT), _MOST_HELD_OUT)
    if not domain.indexable or held < 1:
        raise UsageError(
            f"{domain.name} has no samples by number, or fewer than 10, so none can be held out to choose a lambda by; "
            "give a number to --lambda"
        )
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
    return domain.subset(sorted(order[held:])), replace(
        domain.subset(sorted(order[:held])), name="held out", weight=None
    )


def _results(trial: Trial) -> str:
    beside = [f"{score.domain} {score.main}" for score in trial.watched]
    beside += [f"probe of {kept.data} {kept.main}" for kept in trial.retention]
    return trial.score.main + (f" ({', '.join(beside)})" if beside else "")
