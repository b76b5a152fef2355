"""The parts that all sections of a report are made of: tables of numbers with bars beside them.

A bar only repeats a number of its row, so it is hidden from screen readers. Whatever comes from a recipe or
a corpus goes through `text`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from shardkit.units import format_bytes

__all__ = ["bars", "cell", "facts", "name", "number", "percent", "section", "size", "table", "text"]

# Control characters are not allowed in HTML; those of the direction of writing would turn what follows.
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = dict.fromkeys([*range(32), *range(127, 160), *_DIRECTIONS], " ")
_BREAK = re.compile("(?<=[/_.])(?=[^/_.])")  # where a name may go on in the next line


def text(content: str) -> str:
    """Any text as HTML that shows it, isolated from the direction of what is around it."""
    return escape(content.translate(_CONTROLS))


def cell(content: str) -> str:
    """A cell of text."""
    return f'<td dir="auto">{text(content)}</td>'


def name(content: str) -> str:
    """A cell of a name such as "filter/rule_of_it", which may be broken between its words."""
    return f'<td dir="auto">{"<wbr>".join(text(part) for part in _BREAK.split(content))}</td>'


def number(content: int | str) -> str:
    """A cell of a number, or of a text of ours that has numbers."""
    return f'<td class="n">{content:,}</td>' if isinstance(content, int) else f'<td class="n">{content}</td>'


def bars(whole: float, *parts: tuple[str, float]) -> str:
    """A cell with a bar of (colour class, amount) one after the other; `whole` is the full width."""
    spans = "".join(
        f'<span class="{kind}" style="width:{100 * part / whole:.2f}%"></span>'
        for kind, part in parts
        if whole and part > 0
    )
    return f'<td class="bar" aria-hidden="true">{spans}</td>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """A table, or nothing without rows; in `head`, ">" before a name is of numbers, "|" of bars."""
    if not rows:
        return ""
    names = "".join(_head(column) for column in head)
    lines = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    kind = ' class="one"' if sum(column.startswith("|") for column in head) == 1 else ""
    return (
        f'<div class="wide"><table{kind}><caption>{text(caption)}</caption>'
        f"<thead><tr>{names}</tr></thead><tbody>\n{lines}\n</tbody></table></div>"
    )


def _head(column: str) -> str:
    if column.startswith("|"):
        return f'<th class="bar" scope="col">{text(column[1:])}</th>'
    kind = ' class="n"' if column.startswith(">") else ""
    return f'<th{kind} scope="col">{text(column.removeprefix(">"))}</th>'


def facts(pairs: Mapping[str, str], *, caption: str) -> str:
    """Names and what is said of them."""
    rows = "".join(
        f'<tr><th scope="row">{text(what)}</th><td dir="auto">{text(said)}</td></tr>'
        for what, said in pairs.items()
    )
    return f'<div class="wide"><table class="facts"><caption>{text(caption)}</caption>{rows}</table></div>'


def section(title: str, *parts: str) -> str:
    """A section with an anchor to come to it; nothing if all its parts are empty."""
    if not any(parts):
        return ""
    anchor = title.lower().replace(" ", "-")
    return f'<section id="{anchor}">\n<h2>{title}</h2>\n' + "\n".join(filter(None, parts)) + "\n</section>"


def percent(part: float, whole: float) -> str:
    """ "12.34 %"."""
    return f"{100 * part / whole:.2f} %" if whole else "0.00 %"


def size(count: int) -> str:
    """Bytes that were taken away; of those that were added, that they were."""
    return format_bytes(count) if count >= 0 else f"{format_bytes(-count)} more"
