"""Plain tables on stdout that keep their lines whole, on terminals and in files alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["print_columns"]


def print_columns(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> None:
    """A title, a line of column names (none if all are empty) and rows; `left` are the columns set left."""
    lines = [*([columns] if any(columns) else []), *rows]
    widths = [max((len(line[number]) for line in lines), default=0) for number in range(len(columns))]
    text = [title] if title else []
    for line in lines:
        cells = [
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    sys.stdout.write("\n".join(text) + "\n")
