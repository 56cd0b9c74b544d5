"""Going on with a run that was stopped: what may have changed since, and what may not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ewc_finetune._version import __version__
from ewc_finetune.errors import UsageError
from ewc_finetune.finetuning.options import FinetuneOptions
from ewc_finetune.finetuning.request import UNSAID, asked, asked_then
from ewc_finetune.progress import Progress
from ewc_finetune.runs.folder import versions
from ewc_finetune.runs.options_file import differences
from ewc_finetune.runs.record import Run
from ewc_finetune.specs.options import names_of
from ewc_finetune.storage.atomic import beside

# Options that may change when a run goes on: it ends as it would have, but for rounding and random numbers.
SOUND = names_of(FinetuneOptions, lambda known: known.sound)


def check_options(run: Run, options: FinetuneOptions, progress: Progress) -> None:
    """Refuse to go on with other options than the run was started with, but for those that only say how or how long.

    Raises:
        UsageError: listing what differs.
    """
    sound = SOUND if options.needs_total else {*SOUND, "epochs"}
    if options.lambdas == "auto":  # what is looked for, and for how long
        sound = sound - {"epochs", "retain"}
    then = asked_then(run.document["options"])
    changed = differences({**asked(options), "output": then["output"]}, then)
    wrong = [text for name, text in changed.items() if name not in sound]
    if wrong:
        raise UsageError(
            f"the run {run.path} cannot go on with other options: {'; '.join(wrong)}. Leave them out, or start "
            "another run with another --output"
        )
    for text in (text for name, text in changed.items() if name not in UNSAID):
        progress.note(f"going on with another option: {text}")
    now, then = versions(), run.document.get("versions") or {}
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


def check_identities(run: Run, identities: Mapping[str, Any]) -> None:
    """Refuse to go on where model, anchors or data are others than the run was started with (`fingerprint.identify`).

    Raises:
        UsageError: listing what differs.
    """
    wrong = differences(identities, run.document.get("identities") or {})
    if wrong:
        raise UsageError(
            f"the run {run.path} cannot go on, for its files have changed: {'; '.join(wrong.values())}. Put them back, "
            "or start another run"
        )


def output_of(run: Run, asked: str | Path | None) -> Path:
    """Return where the checkpoint of a run goes that is taken up: beside its folder, wherever that is now.

    Args:
        run: The run.
        asked: The output that was asked for, if any.

    Raises:
        UsageError: if that is another place, or the folder is called otherwise than it was.
    """
    recorded = run.document["options"].get("output")
    place = run.path.absolute().parent / Path(str(recorded)).name
    if recorded is None or beside(place, ".run").resolve() != run.path.resolve():
        raise UsageError(f"the run folder {run.path} was called otherwise for its output {recorded}; call it so again")
    if asked is not None and str(asked) != str(recorded) and Path(asked).resolve() != place.resolve():
        raise UsageError(f"the run {run.path} goes on to its own output, {place}; leave --output out")
    own = Path(str(recorded))
    return own if own.resolve() == place.resolve() else place


def check_left(epochs: int, reached: int) -> None:
    """Refuse to end a run before where it is.

    Raises:
        UsageError: naming the epochs.
    """
    if epochs < reached:
        raise UsageError(f"the run is in epoch {reached} already, and --epochs is {epochs}; ask for as many or more")
