"""HTML parts of all sections of a report: tables of numbers with bars, and the style sheet.

A bar only repeats a number of its row, so it is hidden from screen readers. All text from a recipe or a
corpus goes through `text`. The style is light or dark by the preference of the reader's system, and fits
print.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from shardkit.units import format_bytes

# HTML forbids control characters; characters for the writing direction would reverse all text after them.
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))

_CONTROLS = dict.fromkeys([*range(32), *range(127, 160), *_DIRECTIONS], " ")

_BREAK = re.compile("(?<=[/_.])(?=[^/_.])")  # places where a name may break into the next line


def text(content: str) -> str:
    """Escape text for HTML; replace control characters and those that change the writing direction."""
    return escape(content.translate(_CONTROLS))


def cell(content: str) -> str:
    """Render a table cell with text, which is escaped."""
    return f'<td dir="auto">{text(content)}</td>'


def name(content: str) -> str:
    """Render a cell with a name such as "filter/rule_of_it", which may break after "/", "_" and "."."""
    return f'<td dir="auto">{"<wbr>".join(text(part) for part in _BREAK.split(content))}</td>'


def number(content: int | str) -> str:
    """Render a cell with a number, or with formatted numbers, which are not escaped."""
    return f'<td class="n">{content:,}</td>' if isinstance(content, int) else f'<td class="n">{content}</td>'


def bars(whole: float, *parts: tuple[str, float]) -> str:
    """Render a cell with a bar. `parts` are its segments (color class, amount); `whole` fills the cell."""
    spans = "".join(
        f'<span class="{kind}" style="width:{100 * part / whole:.2f}%"></span>'
        for kind, part in parts
        if whole and part > 0
    )
    return f'<td class="bar" aria-hidden="true">{spans}</td>'


def more(content: str) -> str:
    """Render a cell with a formatted number, which is hidden on narrow screens."""
    return f'<td class="n more">{content}</td>'


def tiles(*pairs: tuple[str, str]) -> str:
    """Render the key figures of a page as boxes, from pairs (figure, label)."""
    shown = "".join(f"<div><strong>{text(figure)}</strong>{text(what)}</div>" for figure, what in pairs)
    return f'<div class="tiles">{shown}</div>'


def counted(count: int, whole: int, most: int, kind: str = "other") -> list[str]:
    """Render three cells: `count`, its share of `whole`, and its bar; a bar of `most` fills its cell."""
    return [number(count), number(percent(count, whole)), bars(most, (kind, count))]


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """Render a table of cells; "" if it has no rows.

    A prefix in `head` marks the type of column: ">" numbers, ">>" numbers hidden on narrow screens, "|" bars.
    """
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
    kind = ' class="n more"' if column.startswith(">>") else ' class="n"' if column.startswith(">") else ""
    return f'<th{kind} scope="col">{text(column.lstrip(">"))}</th>'


def facts(pairs: Mapping[str, str], *, caption: str) -> str:
    """Render a table with a row per pair of name and value."""
    rows = "".join(
        f'<tr><th scope="row">{text(what)}</th><td dir="auto">{text(said)}</td></tr>'
        for what, said in pairs.items()
    )
    return f'<div class="wide"><table class="facts"><caption>{text(caption)}</caption>{rows}</table></div>'


def section(title: str, *parts: str) -> str:
    """Render a section with a title and an anchor for links; "" if all of `parts` are empty."""
    if not any(parts):
        return ""
    anchor = title.lower().replace(" ", "-")
    return f'<section id="{anchor}">\n<h2>{title}</h2>\n' + "\n".join(filter(None, parts)) + "\n</section>"


def percent(part: float, whole: float) -> str:
    """Format the share of `part` in `whole`, such as "12.34%"."""
    return f"{100 * part / whole:.2f}%" if whole else "0.00%"


def size(count: int) -> str:
    """Format a number of removed bytes; a negative number means added bytes, such as "5.2 MB more"."""
    return format_bytes(count) if count >= 0 else f"{format_bytes(-count)} more"


_DARK = """
color-scheme: dark; --paper: #14181f; --ink: #dde3ea; --muted: #9aa7b5; --line: #2d3540; --panel: #1c222b;
--read: #7b8794; --kept: #48a578; --lost: #d9a441; --bad: #fc8181; --other: #63b3ed;
"""

STYLE = (
    """
:root { color-scheme: light;
--paper: #fff; --ink: #1c2430; --muted: #566270; --line: #e3e7ed; --panel: #f4f6f8;
--read: #7b8794; --kept: #2f855a; --lost: #d69e2e; --bad: #c53030; --other: #2b6cb0;
}
@media screen and (prefers-color-scheme: dark) { :root {"""
    + _DARK
    + """} }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; } p { margin: .5rem 0; max-width: 50rem; }
nav { display: flex; flex-wrap: wrap; gap: .1rem 1rem; } nav a { color: inherit; }
p.note { color: var(--muted); font-size: 14px; }
code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--panel); padding: .8rem; white-space: pre-wrap; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
caption { text-align: left; color: var(--muted); font-size: 14px; padding: .2rem 0; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
td[dir] { min-width: 8rem; } th { font-weight: 600; }
tbody tr + tr > *, thead + tbody tr > *, .facts tr > * { border-top: 1px solid var(--line); }
thead th { vertical-align: bottom; font-size: 13px; }
td.n, th.n { width: 1%; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts th { width: 12rem; } td.text, td.place { font-size: 13px; } td.place { width: 24%; }
td.bar, th.bar { width: 18%; min-width: 7rem; padding-right: 1rem; }
.one td.bar { width: 34%; }
td.bar { padding-top: .5rem; line-height: 0; white-space: nowrap; }
.bar span { display: inline-block; height: .75rem; min-width: 1px; max-width: 100%; }
.bar span.gap { min-width: 0; }
.bar span, .key span { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.key span { display: inline-block; width: .75rem; height: .75rem; margin: 0 .3rem 0 .8rem; }
span.read { background: var(--read); } span.kept { background: var(--kept); }
span.other { background: var(--other); } span.dropped { background: var(--lost); }
span.quarantined { background: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem;
margin: 1rem 0; }
.tiles div { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem;
padding: .6rem .8rem; }
.tiles strong { display: block; font-size: 1.4rem; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; margin: .5rem 0; color: var(--muted); }
@media screen and (max-width: 640px) { body { margin: 1rem auto; padding: 0 .8rem; font-size: 14px; }
.tiles { grid-template-columns: 1fr 1fr; } .tiles strong { font-size: 1.1rem; }
td.bar, th.bar, td.more, th.more, td.place { display: none; }
td, th { padding-right: .5rem; } td[dir] { min-width: 5rem; } .facts th { width: 7rem; } }
@media print { body { max-width: none; margin: 0; font-size: 11px; } nav { display: none; }
caption, p.note, thead th, td.text, td.place { font-size: 11px; }
.wide { overflow: visible; } tr { break-inside: avoid; } h2, h3, caption { break-after: avoid; } }
"""
)
