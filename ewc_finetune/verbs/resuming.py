"""Going on with a run that was stopped: what may have changed since, and what may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ewc_finetune._version import __version__
from ewc_finetune.config import differences
from ewc_finetune.errors import UsageError
from ewc_finetune.progress import Progress
from ewc_finetune.run_folder import versions
from ewc_finetune.runs import Run
from ewc_finetune.schedule import Schedule

# What does not change where the weights go, or only by rounding.
SOUND = {"log-every", "device", "workers", "data-dir", "overwrite", "tensorboard", "retain", "trust-pickle", "output"}


def check_options(run: Run, options: Mapping[str, Any], schedule: Schedule, progress: Progress) -> None:
    """Refuse to go on with other options than the run was started with, but for those that only say how or how long.

    Raises:
        UsageError: listing what differs.
    """
    sound = SOUND if schedule.needs_total else {*SOUND, "epochs"}
    found = differences(options, run.document["options"])
    wrong = [text for name, text in found.items() if name not in sound]
    if wrong:
        raise UsageError(
            f"the run {run.path} cannot go on with other options: {'; '.join(wrong)}. Leave them out, or start "
            "another run with another --output"
        )
    for text in found.values():
        progress.note(f"going on with another option: {text}")
    now, then = versions(), run.document.get("versions", {})
    if then.get("ewc_finetune") != __version__:
        raise UsageError(
            f"the run {run.path} was started by ewc-finetune {then.get('ewc_finetune')}, and this is {__version__}; "
            "go on with that one, or start another run"
        )
    for name in now:
        if now[name] != then.get(name):
            progress.note(
                f"{name} was {then.get(name)}, is {now[name]}: the run goes on, and may not end with the same bytes"
            )


def check_found(run: Run, found: Mapping[str, Any]) -> None:
    """Refuse to go on where model, anchors or data are others than the run was started with.

    Raises:
        UsageError: listing what differs.
    """
    then = run.document.get("found")
    if then is None:  # it was stopped before it knew
        return
    wrong = differences(identities(found), identities(then))
    if wrong:
        raise UsageError(
            f"the run {run.path} cannot go on, for its files have changed: {'; '.join(wrong.values())}. Put them back, "
            "or start another run"
        )


def identities(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells model, anchors and data from others."""
    anchors = {f"anchor {number}": anchor["sha256"] for number, anchor in enumerate(found["anchors"], 1)}
    scored = {f"the size of {data['spec']}": data["size"] for data in found["eval"]}
    data = found["data"]
    return {
        "the model's digest": found["checkpoint"]["sha256"],
        "its parameters": found["parameters"],
        **anchors,
        f"the size of {data['spec']}": data["size"],
        f"the digest of {data['spec']}": data["digest"],
        **scored,
    }
