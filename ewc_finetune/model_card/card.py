"""The whole README.md of a published anchor: our section in what is otherwise people's own text."""

from __future__ import annotations

import re
from dataclasses import replace

from ewc_finetune.anchor.summary import Inspection
from ewc_finetune.errors import HubError
from ewc_finetune.model_card.front_matter import LINE_BREAK, with_front_matter
from ewc_finetune.model_card.published import Published
from ewc_finetune.model_card.section import BEGIN, END, section

_BEGIN = re.compile(BEGIN.replace(" ", r"\s*"))
_END = re.compile(END.replace(" ", r"\s*"))


def updated_card(existing: str | None, found: Inspection, place: Published) -> tuple[str, list[str]]:
    """Return a README.md with our section in it, and remarks on what was left as it is.

    What people wrote stays, byte for byte: of the text only our section is replaced, or added at the end, and in the
    front matter what is missing is added. Applied to its own result it changes nothing.

    Args:
        existing: The README.md that is there, with its own line breaks (`newline=""`); None if there is none.
        found: The anchor.
        place: Where it is put.

    Raises:
        HubError: if the card has one of the marks of our section without the other, front matter that is no valid
            YAML, or another licence than `place`.
        UsageError: if the repository or its branch has a name that the Hub does not know.
    """
    text = existing or ""
    bom = text[:1] if text.startswith("\ufeff") else ""
    text = text.removeprefix(bom)
    line_break = LINE_BREAK.search(text)
    eol = line_break.group() if line_break else "\n"
    where = f"the README.md of {place.repository}"
    front, body, remarks, license_ = with_front_matter(text, place, eol, where)
    own = section(found, replace(place, license=license_)).replace("\n", eol)
    return bom + front + _with_section(body, own, place, eol, where), remarks


def _with_section(body: str, own: str, place: Published, eol: str, where: str) -> str:
    """Replace our section, or add it at the end; a card without any text gets a title too."""
    begins, ends = list(_BEGIN.finditer(body)), list(_END.finditer(body))
    if not begins and not ends:
        if not body.strip():
            name = place.repository.rpartition("/")[2].replace("_", r"\_")
            body = f"{body}{eol}# {name}{eol}"
        return f"{body}{_gap(body, eol)}{own}{eol}"
    if len(begins) != 1 or len(ends) != 1 or ends[0].start() < begins[0].end():
        raise HubError(
            f"{where} has the mark {BEGIN} {_times(len(begins))} and the mark {END} {_times(len(ends))}; expected each "
            "once, in this order, around the section that push writes. Put them right by hand, or take out the section "
            "with its marks to have a new one at the end; nothing was changed"
        )
    return body[: begins[0].start()] + own + body[ends[0].end() :]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _gap(text: str, eol: str) -> str:
    """Return what is missing for an empty line behind the text."""
    if text.endswith(2 * eol):
        return ""
    return eol if text.endswith(eol) else 2 * eol
