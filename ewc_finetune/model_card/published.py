"""Where an anchor is published, and what only the one who publishes it knows."""

from __future__ import annotations

from dataclasses import dataclass

from ewc_finetune.hub.address import HubAddress
from ewc_finetune.model_card.text import HUB_NAME, REVISION


@dataclass(frozen=True)
class Published:
    """Where an anchor is put, and what only the one who puts it there knows.

    Attributes:
        repository: On the Hub, `org/name`.
        revision: Its branch, if that is not the default one.
        file: The anchor in it, or the index of its shards.
        digest: SHA-256 of the anchor.
        figure: The figure of importance by layer in it.
        license: As the Hub calls it, such as `apache-2.0`.
        base_model: The model on the Hub that the anchor was made from, if it came from there.
        base_revision: The commit of that.
    """

    repository: str
    revision: str | None
    file: str
    digest: str
    figure: str | None = None
    license: str | None = None
    base_model: str | None = None
    base_revision: str | None = None

    @property
    def address(self) -> str:
        """How `--anchors` names it."""
        return str(HubAddress(self.repository, self.revision))

    @property
    def base(self) -> tuple[str, str]:
        """The base model and its revision; empty where they are no names that the Hub may have."""
        name, revision = self.base_model or "", self.base_revision or ""
        if not HUB_NAME.fullmatch(name):
            return "", ""
        return name, revision if REVISION.fullmatch(revision) else ""
