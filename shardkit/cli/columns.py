"""Plain tables on stdout that keep their lines whole, on terminals and in files alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from shardkit.cli.output import escaped

__all__ = ["print_columns"]


def print_columns(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)
) -> None:
    """A title, a line of column names (none if all are empty) and rows; `left` are the columns set left."""
    shown = [*([columns] if any(columns) else []), *rows]
    lines = [[escaped(cell) for cell in line] for line in shown]
    widths = [max((len(line[number]) for line in lines), default=0) for number in range(len(columns))]
    text = [escaped(title)] if title else []
    for line in lines:
        cells = [
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    sys.stdout.write("\n".join(text) + "\n")
