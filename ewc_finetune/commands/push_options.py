"""The options of `push`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ewc_finetune.specs.command_options import Told
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import option

if TYPE_CHECKING:
    from ewc_finetune.anchor.anchor import Anchor


@dataclass(frozen=True)
class PushOptions(Told):
    """What `push` is asked for.

    Each option has its help where it is declared; `Attributes` says what there is to know beside that.

    Attributes:
        anchor: The anchor, or its file.
        repository: `ORG/NAME`; made unless it is there.
        max_shard_size: Bytes, or a text such as `5GB`.
    """

    GROUP: ClassVar = Group.HUB

    anchor: Anchor | str | Path = option()
    repository: str = option()
    _: KW_ONLY
    private: bool = option(False, "If the repository is made, let nobody else see it.", main=True)
    revision: str | None = option(
        None, "Push to this branch, made unless it is there.", metavar="BRANCH", main=True, unless="main"
    )
    create_pr: bool = option(False, "Open a pull request instead of changing the branch.", main=True)
    message: str | None = option(None, "Of the commit.", metavar="TEXT", main=True, unless="Anchor NAME")
    license: str | None = option(
        None, "For the card, as the Hub calls it (apache-2.0).", metavar="ID", main=True, unless="none"
    )
    probes: bool | None = option(
        None, "Whether the samples of data in the anchor go along; must be said if there are any.", main=True
    )
    # The Hub cuts models at this size too.
    max_shard_size: int | str = option("5GB", "Cut a larger anchor into parts.", read=str, metavar="SIZE")
