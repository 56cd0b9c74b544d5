"""Whether a score can be told from guessing; and where it cannot, what to suspect first."""

from __future__ import annotations

import math

import torch

from ewc_finetune.checkpoint.open import LoadedModel
from ewc_finetune.data.domain import Domain
from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.data.numbering import AS_LISTED
from ewc_finetune.evaluation.bound_domain import BoundDomain
from ewc_finetune.likelihood.categorical import Categorical
from ewc_finetune.progress import Progress

# A score counts as better than guessing if guesses are as good in no more than this share of trials.
_RISK = 0.01
# The fewest samples that say anything: of fewer, three right answers in four could be guesses among two classes.
_ENOUGH = 30
# The most classes that a message lists.
_LISTED = 20


def at_chance(accuracy: float, samples: int, classes: int) -> bool:
    """Whether guessing one of so many classes, all alike, is as often right in more than 1% of all trials.

    The binomial tail `P(X >= accuracy * samples)`, X of `samples` trials at `1 / classes`; never with too few samples
    to tell, or a single class.
    """
    if samples < _ENOUGH or classes < 2:
        return False
    n = torch.tensor(float(samples), dtype=torch.float64)
    right = torch.arange(round(accuracy * samples), samples + 1, dtype=torch.float64)
    logs = torch.lgamma(n + 1) - torch.lgamma(right + 1) - torch.lgamma(n - right + 1)
    logs += right * math.log(1 / classes) + (n - right) * math.log1p(-1 / classes)
    return logs.logsumexp(0).exp().item() > _RISK


def warn_at_chance(
    bound: BoundDomain, loaded: LoadedModel, accuracy: float | None, samples: int, progress: Progress, *, own: bool
) -> None:
    """Warn of a score that cannot be told from guessing.

    Args:
        bound: The domain; likelihoods of other outputs than a class for each sample are not guessed at.
        loaded: The model.
        accuracy: The score; None where there is none.
        samples: Which it is of.
        progress: Is told the warning.
        own: Whether the model should know this data: of others that is said only where something is to be suspected.
    """
    domain = bound.domain
    classes = bound.outputs[-1] if domain.active is None else len(domain.active)
    if bound.likelihood.name != Categorical.name or accuracy is None or not at_chance(accuracy, samples, classes):
        return
    suspects = _suspects(domain, loaded, bound.input_spec)
    if not suspects and not own:
        return
    suspects = suspects or ["whether this is data that the model was trained for, with its labels"]
    progress.note(
        f"warning: {domain.name}: accuracy {accuracy:.4f} on {samples:,} samples cannot be told from guessing one of "
        f"{classes:,} classes. Suspect first {'; then '.join(suspects)}"
    )


def _suspects(domain: Domain, loaded: LoadedModel, input_spec: InputSpec) -> list[str]:
    """Return what is most likely wrong, the likeliest first."""
    suspects = []
    assumption, said = domain.assumed, domain.transform is not None and domain.transform.mean is not None
    image = len(input_spec.shape) == 3 and input_spec.raw and (input_spec.bytes_to_unit or domain.unit)
    if image and assumption is not None and (said or assumption.source != "record"):
        numbers = input_spec.transform.describe_numbers() or "from 0 to 1"
        suspects.append(
            f"how images go in ({numbers}): the data options mean= and std= say otherwise, and resize= and crop="
        )
    if is_numbering_unknown(domain, loaded):
        suspects.append(
            f"the numbers of its classes, {domain.numbering}: labels= names them in the order of the model's outputs"
        )
    return suspects


def is_numbering_unknown(domain: Domain, loaded: LoadedModel) -> bool:
    """Whether labels are names, and nothing says which of the model's outputs is called how."""
    names = () if loaded.task is None else loaded.task.classes or ()
    known = loaded.metadata.classes or tuple(domain.classes or ()) == tuple(names)
    return domain.classes is not None and domain.numbering is not None and not known and not loaded.fresh


def say_numbering(domain: Domain, loaded: LoadedModel, progress: Progress) -> None:
    """Say which number each class has, where that is a guess."""
    if not is_numbering_unknown(domain, loaded) or domain.classes is None:
        return
    shown = [f"{n} {name}" for n, name in enumerate(domain.classes[:_LISTED])]
    more = len(domain.classes) - len(shown)
    progress.note(
        f"{domain.name}: the model has no names of its outputs, so labels are numbered {domain.numbering}: "
        f"{', '.join(shown)}{f' and {more:,} more' if more else ''}"
        + (
            ". If its outputs are in another order, name them in that one: "
            f"labels={','.join(reversed(domain.classes[:3]))}{',...' if len(domain.classes) > 3 else ''}"
            if domain.numbering != AS_LISTED
            else ""
        )
    )
