"""The model card of a published anchor: our section and front matter in a README.md that is otherwise people's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ewc_finetune.card_section import BEGIN, END, HUB_NAME, Published, section
from ewc_finetune.errors import StorageError
from ewc_finetune.verbs.inspect import Inspection

__all__ = ["Published", "section", "updated_card"]

LIBRARY = "ewc-finetune"
TAGS = ("ewc", "fisher-information", "continual-learning")

# As the Hub finds it, but that it may be empty.
_FRONT_MATTER = re.compile(
    r"(?P<open>[ \t\r\n]*---(?:\r\n|\r|\n))(?P<text>[\s\S]*?)(?<=[\r\n])---[ \t]*(?:\r\n|\r|\n|\Z)"
)
_UNCLOSED = re.compile(r"[ \t\r\n]*---[\r\n]")
_BREAK = re.compile(r"\r\n|\r|\n")
_LICENSE = re.compile(r"\w[\w.+-]*", re.ASCII)
_BEGIN, _END = (re.compile(mark.replace(" ", r"\s*")) for mark in (BEGIN, END))


@dataclass(frozen=True)
class _Front:
    """What stands between the two lines of dashes.

    Attributes:
        text: As it is.
        values: What YAML reads there, by key.
        node: The same with its places in the text; None if there is nothing.
    """

    text: str
    values: dict[Any, Any]
    node: Any


def updated_card(existing: str | None, found: Inspection, place: Published) -> tuple[str, list[str]]:
    """Return a README.md with our section in it, and remarks on what was left as it is.

    What people wrote stays, byte for byte: of the text only our section is replaced, or added at the end, and in the
    front matter what is missing is added. Applied to its own result it changes nothing.

    Args:
        existing: The README.md that is there, with its own line breaks (`newline=""`); None if there is none.
        found: The anchor.
        place: Where it is put.

    Raises:
        StorageError: if the card has one of the marks of our section without the other, or front matter that is no
            valid YAML.
        UsageError: if the repository or its branch has a name that the Hub does not know.
    """
    text = existing or ""
    bom = text[:1] if text.startswith("\ufeff") else ""
    text = text.removeprefix(bom)
    line_break = _BREAK.search(text)
    eol = line_break.group() if line_break else "\n"
    where = f"the README.md of {place.repository}"
    own = section(found, place).replace("\n", eol)
    front, body, remarks = _with_front_matter(text, place, eol, where)
    body = _with_section(body, own, place, eol, where)
    return bom + front + body, remarks


def _with_section(body: str, own: str, place: Published, eol: str, where: str) -> str:
    """Replace our section, or add it at the end; a card without any text gets a title too."""
    begins, ends = list(_BEGIN.finditer(body)), list(_END.finditer(body))
    if not begins and not ends:
        if not body.strip():
            name = place.repository.rpartition("/")[2].replace("_", r"\_")
            body = f"{body}{eol}# {name}{eol}"
        return f"{body}{_gap(body, eol)}{own}{eol}"
    if len(begins) != 1 or len(ends) != 1 or ends[0].start() < begins[0].end():
        raise StorageError(
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


def _with_front_matter(text: str, place: Published, eol: str, where: str) -> tuple[str, str, list[str]]:
    """Return the front matter with what was missing in it, the text behind it, and remarks."""
    match = _FRONT_MATTER.match(text)
    if match is None and _UNCLOSED.match(text):
        raise StorageError(
            f"{where} begins with --- as front matter does, and no other line --- ends it. Add that line, or write "
            "*** if the first is meant as a rule; nothing was changed"
        )
    front = _read(match.group("text") if match else "", where)
    remarks: list[str] = []
    for key, value in _wanted(place, remarks):
        front = _united(front, value, eol, where, remarks) if key == "tags" else front
        if key not in front.values:
            front = _added(front, key, value, eol, where, remarks)
        elif key != "tags" and value != front.values[key] and not _is_among(value, front.values[key]):
            remarks.append(f"{where} says {key}: {_shown(front.values[key])}, not {value}; it was left as it is")
    if match is None:
        return f"---{eol}{front.text}---{eol}" + (eol if text.strip() else ""), text, remarks
    start, end = match.span("text")
    return text[:start] + front.text + text[end : match.end()], text[match.end() :], remarks


def _wanted(place: Published, remarks: list[str]) -> list[tuple[str, Any]]:
    """Return what the front matter should say; a name that the Hub would refuse the whole card for is left out."""
    wanted: list[tuple[str, Any]] = [("library_name", LIBRARY)]
    for key, value, form in (("base_model", place.base_model, HUB_NAME), ("license", place.license, _LICENSE)):
        if value and form.fullmatch(value):
            wanted.append((key, value))
        elif value:
            remarks.append(f"{value!r:.100} is no {key} that the Hub knows, and was left out of the front matter")
    return [*wanted, ("tags", list(TAGS))]


def _is_among(value: object, values: object) -> bool:
    return isinstance(values, list) and value in values


def _shown(value: object) -> str:
    return "nothing" if value is None else " ".join(str(value).split())[:100]


def _read(text: str, where: str) -> _Front:
    """Read front matter.

    Raises:
        StorageError: if it is no YAML, or not a list of keys with a value each.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise StorageError(
            f"{where} has front matter that is no valid YAML ({reason}). Put right what stands between its first two "
            "lines ---; nothing was changed"
        ) from error
    if values is not None and not isinstance(values, dict):
        raise StorageError(
            f"{where} has front matter that is no list of keys with values, as in `license: mit`, but "
            f"{_shown(values)!r}. Put right what stands between its first two lines ---; nothing was changed"
        )
    names = [key.value for key, _ in node.value] if node is not None else []
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise StorageError(f"{where} has {twice!r} twice in its front matter. Take one out; nothing was changed")
    return _Front(text, values or {}, node)


def _added(front: _Front, key: str, value: Any, eol: str, where: str, remarks: list[str]) -> _Front:
    """Add a key at the end, as the others are indented."""
    indent = " " * (front.node.start_mark.column if front.node is not None else 0)
    lines = [f"{key}: {_scalar(value)}"] if isinstance(value, str) else [f"{key}:", *(f"- {item}" for item in value)]
    text = front.text + "".join(f"{indent}{line}{eol}" for line in lines)
    return _checked(front, text, key, value, where, remarks)


def _scalar(text: str) -> str:
    """Return text as YAML, quoted where it would be taken for something else."""
    import yaml

    return text if yaml.safe_load(text) == text else json.dumps(text)


def _united(front: _Front, tags: Sequence[str], eol: str, where: str, remarks: list[str]) -> _Front:
    """Add the tags that are missing to those that are there, in the style that they are in."""
    there = front.values.get("tags")
    missing = [tag for tag in tags if there is None or not _is_among(tag, there)]
    if "tags" not in front.values or not missing:
        return front
    node = next(value for key, value in front.node.value if key.value == "tags")
    wanted = [*(there if isinstance(there, list) else []), *missing]
    is_list = isinstance(there, list) or (there is None and not node.value)
    return _checked(front, _insert(front.text, node, missing, eol) if is_list else None, "tags", wanted, where, remarks)


def _insert(text: str, node: Any, missing: Sequence[str], eol: str) -> str:
    """Write items at the end of a YAML list, or behind a key that has nothing."""
    last = (node.value[-1] if node.value else node).end_mark.index
    if getattr(node, "flow_style", False):
        at = last if node.value else last - 1
        return text[:at] + (", " if node.value else "") + ", ".join(missing) + text[at:]
    line_end = _BREAK.search(text, last)
    at = line_end.end() if line_end else len(text)
    indent = " " * (node.start_mark.column if node.value else 0)
    return text[:at] + "".join(f"{indent}- {tag}{eol}" for tag in missing) + text[at:]


def _checked(front: _Front, text: str | None, key: str, value: Any, where: str, remarks: list[str]) -> _Front:
    """Return the front matter with the new text if that says what it should and nothing else; otherwise say so."""
    wanted: Mapping[Any, Any] = {**front.values, key: value}
    try:
        edited = None if text is None else _read(text, where)
    except StorageError:
        edited = None
    if edited is not None and edited.values == wanted and list(edited.values) == list(wanted):
        return edited
    said = value if isinstance(value, str) else f"[{', '.join(map(str, value))}]"
    remarks.append(f"{where} has front matter that push cannot edit safely; add {key}: {said} to it by hand")
    return front
