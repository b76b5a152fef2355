"""Look-ups in provenance tables, read whole and filtered: what fast ones are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

__all__ = ["documents_at", "lines_of", "rows_of"]


@dataclass(frozen=True)
class Line:
    """One line of the tables."""

    shard: int
    row: int
    token_start: int
    token_end: int
    document_id: bytes
    document_start: int
    copies: int
    source: int
    file: str
    record: int
    id: str | None
    url: str | None
    metadata: str | None


@lru_cache(maxsize=4)
def lines_of(dataset: Path) -> list[Line]:
    """All of them."""
    lines: list[dict[str, Any]] = []
    for path in sorted((dataset / "provenance").glob("*.parquet")):
        lines += pq.read_table(path).to_pylist()
    return [Line(**line) for line in lines]


def documents_at(dataset: Path, shard: int, row: int, token: int | None = None) -> list[Line]:
    """The documents in a row of a shard, or the one that holds token `token`."""
    found = [line for line in lines_of(dataset) if (line.shard, line.row) == (shard, row)]
    if token is not None:
        found = [line for line in found if line.token_start <= token < line.token_end]
    return sorted(found, key=lambda line: line.token_start)


def rows_of(dataset: Path, document_id: bytes) -> list[Line]:
    """Return the lines of a document that say where its tokens are, in its order."""
    found = [line for line in lines_of(dataset) if line.document_id == document_id]
    return sorted(found, key=lambda line: line.document_start)
