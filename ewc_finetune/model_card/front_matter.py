"""A card's front matter, the YAML that the Hub reads: what is missing is added, and what people wrote stays."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ewc_finetune.errors import HubError, UsageError
from ewc_finetune.model_card.published import Published
from ewc_finetune.model_card.text import HUB_NAME

LIBRARY = "ewc-finetune"
TAGS = ("ewc", "fisher-information", "continual-learning")
LINE_BREAK = re.compile(r"\r\n|\r|\n")

# As the Hub finds it, but that it may be empty.
_FRONT_MATTER = re.compile(r"[ \t\r\n]*---(?:\r\n|\r|\n)(?P<text>[\s\S]*?)(?<=[\r\n])---[ \t]*(?:\r\n|\r|\n|\Z)")
_UNCLOSED = re.compile(r"[ \t\r\n]*---[\r\n]")
_LICENSE = re.compile(r"\w[\w.+-]*", re.ASCII)


def with_front_matter(text: str, place: Published, eol: str, where: str) -> tuple[str, str, list[str], str | None]:
    """Return the front matter with what was missing in it, and the text behind it.

    Also return remarks on what was left as it is, and the licence that the front matter now says.

    Args:
        text: The card.
        place: Where the anchor is put.
        eol: The line break of the card.
        where: The card, for messages.

    Raises:
        HubError: if there is front matter that has no end, is no valid YAML, or says another licence than `place`.
        UsageError: if the licence is none that the Hub could know.
    """
    match = _FRONT_MATTER.match(text)
    if match is None and _UNCLOSED.match(text):
        raise HubError(
            f"{where} begins with --- as front matter does, and no other line --- ends it. Add that line, or write "
            "*** if the first is meant as a rule; nothing was changed"
        )
    wanted, remarks = _wanted(place)
    editor = _Editor(_read(match["text"] if match else "", where), eol, where, remarks)
    for key, value in wanted.items():
        editor.say(key, value)
    editor.tag(TAGS)
    edited, said = editor.front.text, editor.front.values.get("license")
    license_ = said if isinstance(said, str) else None
    if place.license is not None and license_ != place.license and "license" in editor.front.values:
        raise HubError(
            f"{where} says license: {_shown(said)}, not {place.license}. Change it there, or leave --license out; "
            "nothing was changed"
        )
    license_ = license_ or place.license
    if match is None:
        return f"---{eol}{edited}---{eol}" + (eol if text.strip() else ""), text, remarks, license_
    start, end = match.span("text")
    return text[:start] + edited + text[end : match.end()], text[match.end() :], remarks, license_


def _wanted(place: Published) -> tuple[dict[str, str], list[str]]:
    """Return what the front matter should say, and remarks on names that the Hub would refuse the whole card for."""
    wanted, remarks = {"library_name": LIBRARY}, []
    if place.base_model and HUB_NAME.fullmatch(place.base_model):
        wanted["base_model"] = place.base_model
    elif place.base_model:
        name = f"{place.base_model!r:.100}"
        remarks.append(f"{name} is no base_model that the Hub knows, and was left out of the front matter")
    if place.license is not None and not _LICENSE.fullmatch(place.license):
        raise UsageError(
            f"{place.license!r:.100} is no licence that the Hub knows; expected its name there, apache-2.0"
        )
    if place.license is not None:
        wanted["license"] = place.license
    return wanted, remarks


@dataclass(frozen=True)
class _Front:
    """What stands between the two lines of dashes.

    Attributes:
        text: As it is.
        values: What YAML reads there, by key.
        nodes: The values with their places in the text, by key.
        column: Where the keys begin in their lines.
    """

    text: str
    values: dict[Any, Any]
    nodes: dict[str, Any]
    column: int


def _read(text: str, where: str) -> _Front:
    """Read front matter.

    Raises:
        HubError: if it is no YAML, or not a list of keys with a value each.
    """
    import yaml  # type: ignore[import-untyped]

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        # Before the values are made, which writes what YAML merges (`<<`) into the node.
        pairs = [(key.value, value) for key, value in node.value] if isinstance(node, yaml.MappingNode) else []
        values = {} if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise HubError(
            f"{where} has front matter that is no valid YAML ({reason}). Put right what stands between its first two "
            "lines ---; nothing was changed"
        ) from error
    if values is not None and not isinstance(values, dict):
        raise HubError(
            f"{where} has front matter that is no list of keys with values, as in `license: mit`, but "
            f"{_shown(values)!r}. Put right what stands between its first two lines ---; nothing was changed"
        )
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise HubError(f"{where} has {twice!r} twice in its front matter. Take one out; nothing was changed")
    return _Front(text, values or {}, dict(pairs), 0 if node is None else node.start_mark.column)


@dataclass
class _Editor:
    """Adds to front matter, and takes back what would change anything else.

    Attributes:
        front: As it is by now.
        eol: The line break of the card.
        where: The card, for messages.
        remarks: Grows by what was left as it is.
    """

    front: _Front
    eol: str
    where: str
    remarks: list[str]

    def say(self, key: str, value: str) -> None:
        """Add a key at the end, unless it is there with a value of its own."""
        there = self.front.values.get(key)
        if key not in self.front.values:
            self._append([f"{key}: {_scalar(value)}"], key, value)
        elif value != there and not _is_among(value, there):
            self.remarks.append(f"{self.where} says {key}: {_shown(there)}, not {value}; it was left as it is")

    def tag(self, tags: Sequence[str]) -> None:
        """Add the tags that are missing to those that are there, in the style that they are in."""
        if "tags" not in self.front.values:
            self._append(["tags:", *(f"- {tag}" for tag in tags)], "tags", list(tags))
            return
        there, node = self.front.values["tags"], self.front.nodes.get("tags")
        missing = [tag for tag in tags if not _is_among(tag, there)]
        if not missing:
            return
        is_list = node is not None and (isinstance(there, list) or (there is None and not node.value))
        text = _insert(self.front.text, node, missing, self.eol) if is_list else None
        self._replace(text, "tags", [*(there if isinstance(there, list) else []), *missing])

    def _append(self, lines: Sequence[str], key: str, value: object) -> None:
        """Add lines at the end, as the others are indented."""
        added = "".join(f"{' ' * self.front.column}{line}{self.eol}" for line in lines)
        self._replace(self.front.text + added, key, value)

    def _replace(self, text: str | None, key: str, value: Any) -> None:
        """Take the new text if it says what it should and nothing else; otherwise tell people to do it themselves."""
        wanted = {**self.front.values, key: value}
        with suppress(HubError, RecursionError):  # lists that hold themselves cannot be compared
            edited = None if text is None else _read(text, self.where)
            if edited is not None and edited.values == wanted and list(edited.values) == list(wanted):
                self.front = edited
                return
        said = value if isinstance(value, str) else f"[{', '.join(map(str, value))}]"
        self.remarks.append(
            f"{self.where} has front matter that push cannot edit safely; add {key}: {said} to it by hand"
        )


def _insert(text: str, node: Any, missing: Sequence[str], eol: str) -> str:
    """Write items at the end of a YAML list, or behind a key that has nothing."""
    last = (node.value[-1] if node.value else node).end_mark.index
    if getattr(node, "flow_style", False):
        at = last if node.value else last - 1
        return text[:at] + (", " if node.value else "") + ", ".join(missing) + text[at:]
    line_end = LINE_BREAK.search(text, last)
    at = line_end.end() if line_end else len(text)
    indent = " " * (node.start_mark.column if node.value else 0)
    return text[:at] + "".join(f"{indent}- {tag}{eol}" for tag in missing) + text[at:]


def _is_among(value: object, values: object) -> bool:
    return isinstance(values, list) and value in values


def _shown(value: object) -> str:
    return "nothing" if value is None else " ".join(str(value).split())[:100]


def _scalar(text: str) -> str:
    """Return text as YAML, quoted where it would be taken for something else."""
    import yaml

    return text if yaml.safe_load(text) == text else json.dumps(text)
