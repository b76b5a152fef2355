"""Readable representations: `Described` objects print as aligned lines, and as a table in a notebook.

Names and texts come from untrusted files: HTML is escaped, and characters that control a terminal or change
the text direction are replaced.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

Facts = Sequence[tuple[str, str]]

_MOST_LISTED = 8


class Described:
    """An object whose representation is a title and a list of facts."""

    __slots__ = ()

    def describe(self) -> tuple[str, Facts]:
        """Return a title and (name, value) pairs to show."""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, facts = self.describe()
        width = max((len(name) for name, _ in facts), default=0)
        lines = [f"  {name:<{width}}  {printable(value)}" for name, value in facts]
        return "\n".join([printable(title), *lines])

    def _repr_html_(self) -> str:
        title, facts = self.describe()
        left = "style='text-align:left'"
        rows = "".join(
            f"<tr><th {left}>{_escaped(name)}</th><td {left}>{_escaped(value)}</td></tr>"
            for name, value in facts
        )
        return f"<table><caption {left}>{_escaped(title)}</caption>{rows}</table>"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 shard", "1,234 shards"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Join names with commas; of more than eight, name the first eight and count the rest."""
    rest = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {rest:,} more" if rest > 0 else "")


def printable(text: str) -> str:
    """Replace characters that control a terminal or change the text direction by U+FFFD."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _escaped(text: str) -> str:
    return html.escape(printable(text))
