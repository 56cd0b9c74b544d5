"""Tables as HTML, which notebooks show; whatever stands in them is escaped, for names come from strangers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup


def html_table(headers: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Markup:
    """Return a small table, with its caption above it; nothing without rows."""
    lines = [_row("td", row) for row in rows]
    if not lines:
        return Markup("")
    above = Markup("<caption>{}</caption>").format(caption) if caption else Markup("")
    head = Markup("<thead>{}</thead>").format(_row("th", headers)) if any(headers) else Markup("")
    return Markup("<table>{}{}<tbody>{}</tbody></table>").format(above, head, Markup("").join(lines))


def _row(cell: str, texts: Sequence[str]) -> Markup:
    cells = Markup("").join(Markup(f"<{cell}>{{}}</{cell}>").format(text) for text in texts)  # noqa: S704 - two tags
    return Markup("<tr>{}</tr>").format(cells)
