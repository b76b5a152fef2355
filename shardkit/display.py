"""What an object is, for people: `Described` objects print aligned lines, and a table in a notebook.

Names and texts come from files that anybody may have made: markup is escaped, and characters that would
command a terminal or turn the direction of a line are replaced.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

Facts = Sequence[tuple[str, str]]

_MOST_LISTED = 8


class Described:
    """Prints itself as a title and facts."""

    __slots__ = ()

    def describe(self) -> tuple[str, Facts]:
        """Return a title and the (name, value) facts to know."""
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
    """ "1 shard", "1,234 shards"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Names separated by commas; of many the first and a count."""
    rest = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {rest:,} more" if rest > 0 else "")


def printable(text: str) -> str:
    """Text without what would command a terminal, or turn the direction of a line."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def _escaped(text: str) -> str:
    return html.escape(printable(text))
