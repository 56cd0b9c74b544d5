"""Options that several commands share, each declared here once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ewc_finetune.choices import DEVICES
from ewc_finetune.progress import Progress, Silent
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import option


@dataclass(frozen=True, kw_only=True)
class Told:
    """What every function has beside the options of its command.

    Attributes:
        progress: Told what happens; nobody is unless given.
    """

    progress: Progress = option(Silent(), recorded=False)


@dataclass(frozen=True, kw_only=True)
class Computing:
    """What every command has that runs a model.

    Attributes:
        trust_code: Whether code in the checkpoint may run (a pickled module), which is never asked for otherwise. On
            the command line also whether code may that a file of options names.
        device: `auto`, `cpu`, `cuda` or `mps`; in Python one of several too, such as `cuda:1`.
        data_dir: Where downloaded data lies.
    """

    GROUP: ClassVar = Group.COMPUTING

    trust_code: bool = option(
        False,
        "Let code in the checkpoint run (a pickled module): only for files whose maker you know and trust.",
        filed=False,
        sound=True,
    )
    device: str = option("auto", "Where to compute.", choices=DEVICES, wider=True, sound=True)
    data_dir: str | Path | None = option(
        None,
        "Where downloaded data lies or goes.",
        path="folder",
        unless="$EWC_FT_DATA, else ~/.cache/ewc-finetune/data",
        sound=True,
    )
