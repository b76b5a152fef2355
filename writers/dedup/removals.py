"""Which documents of a split were removed as duplicates, and how many documents the others represent.

The stages of duplicate removal commit tables sorted by (split, row, …), one a partition, in each of which the
rows of a split are contiguous and found by binary search. `Removals` reads those of one split; later tasks of
that split depend on their digest, so that one more duplicate redoes only the split that loses it.
`SplitRows` reads them in step with a pass over the split's documents, so that memory does not grow with their
number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.hashing import digest_of, hash_bytes
from shardkit.writers.dedup.resolve import GROUP_SIZES, LOSERS_FILE, WINNERS_FILE
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.execution.artifacts import Artifact

__all__ = [
    "LOSERS_FILE",
    "WINNERS_FILE",
    "Removals",
    "Removed",
    "SplitRows",
    "count_groups",
    "piece_of_split",
]


@dataclass(frozen=True, slots=True)
class Removed:
    """Removed documents and copy counts of one split. Row numbers count over all batches of its file.

    `rows` are int64 row numbers, ascending, by the reason for dropping them; no row has two reasons. `copied`
    and `copies`, int64 each, are the rows that represent more documents than themselves, ascending, and how
    many.
    """

    rows: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    copied: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    copies: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        for rows in (*self.rows.values(), self.copied):
            assert (rows[1:] >= rows[:-1]).all(), "`part` would lose rows"

    def part(self, start: int, count: int) -> Removed:
        """The same for rows [start, start + count), numbered from 0."""
        here = {reason: _between(rows, start, count) for reason, rows in self.rows.items()}
        rows = {reason: self.rows[reason][part] - start for reason, part in here.items()}
        copied = _between(self.copied, start, count)
        return Removed(rows, self.copied[copied] - start, self.copies[copied])


def _between(ascending: npt.NDArray[np.int64], start: int, count: int) -> slice:
    first, last = np.searchsorted(ascending, [start, start + count])
    return slice(first, last)


@dataclass(frozen=True)
class Removals:
    """Folders with tables of losers and winners, by the reason for dropping the losers.

    Where two tables count the copies of a document, the later one is right. If splits were rewritten without
    their losers, `rewritten` has a folder for each, with its own winners.
    """

    folders: Mapping[str, Sequence[Artifact]]
    rewritten: Sequence[Artifact] = ()

    def of_split(self, split: int) -> Removed:
        """The rows of one split."""
        rows: dict[str, npt.NDArray[np.int64]] = {}
        winners: list[npt.NDArray[np.void]] = []
        if self.rewritten:
            winners.append(np.load((self.rewritten[split] / WINNERS_FILE).local(), allow_pickle=False))
        for reason, folders in self.folders.items():
            lost = [_of_split(folder / LOSERS_FILE, split)["row"] for folder in folders]
            rows[reason] = np.sort(np.concatenate([np.zeros(0, np.int64), *lost]))
            winners += [_of_split(folder / WINNERS_FILE, split) for folder in folders]
        return Removed(rows, *_latest(winners))

    def digest(self, split: int) -> str:
        """Digest of `of_split`."""
        removed = self.of_split(split)
        tables = {**removed.rows, "copied": removed.copied, "copies": removed.copies}
        return digest_of({name: hash_bytes(table.tobytes(), ["xxh3_128"]) for name, table in tables.items()})


def _latest(winners: Sequence[npt.NDArray[np.void]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(rows that represent copies, ascending; how many); of several tables the last one counts."""
    rows = np.concatenate([np.zeros(0, np.int64), *(table["row"] for table in winners)])
    copies = np.concatenate([np.zeros(0, np.int64), *(table["copies"] for table in winners)])
    order = np.argsort(rows, kind="stable")
    rows, copies = rows[order], copies[order]
    last = np.append(rows[1:] != rows[:-1], True)[: len(rows)]
    return rows[last], copies[last]


def _of_split(file: Artifact, split: int) -> npt.NDArray[np.void]:
    table: npt.NDArray[np.void] = np.load(file.local(), mmap_mode="r", allow_pickle=False)
    first, last = (
        bisect_left(range(len(table)), wanted, key=lambda row: int(table["split"][row]))
        for wanted in (split, split + 1)
    )
    return np.array(table[first:last])


def count_groups(copies: npt.NDArray[np.int32]) -> list[int]:
    """How many documents represent 1, 2, … documents, in the classes of GROUP_SIZES and above."""
    classes = np.searchsorted(GROUP_SIZES, copies)
    counts: list[int] = np.bincount(classes, minlength=len(GROUP_SIZES) + 1).tolist()
    return counts


_CHUNK_ROWS = 1024  # of each of up to thousands of tables

Piece = tuple[Rows, int, int]  # rows [begin, end) of a table


class SplitRows:
    """The rows of several pieces, each sorted by `row` and then by the fields of `then`."""

    def __init__(self, dtype: npt.DTypeLike, pieces: Iterable[Piece], *, then: Sequence[str] = ()) -> None:
        self._dtype = np.dtype(dtype)
        self._order = (*reversed(then), "row")
        self._cursors = [_Cursor(piece) for piece in pieces if piece[1] < piece[2]]

    def before(self, row: int) -> npt.NDArray[Any]:
        """The next rows, up to but excluding `row`, in order."""
        parts = [part for cursor in self._cursors for part in cursor.take(row)]
        rows = np.concatenate([np.empty(0, self._dtype), *parts])
        ordered: npt.NDArray[Any] = rows[np.lexsort([rows[name] for name in self._order])]
        return ordered


class _Cursor:
    def __init__(self, piece: Piece) -> None:
        self._table, self._next, self._end = piece
        self._held = self._read()

    def _read(self) -> npt.NDArray[Any]:
        start = self._next
        self._next = min(start + _CHUNK_ROWS, self._end)
        return self._table.read(start, self._next)

    def take(self, row: int) -> Iterator[npt.NDArray[Any]]:
        while len(self._held):
            count = int(np.searchsorted(self._held["row"], row))
            yield self._held[:count]
            self._held = self._held[count:]
            if len(self._held):
                return
            self._held = self._read()


def piece_of_split(table: Rows, split: int) -> Piece:
    """The rows of a split in a table that is sorted by `split`."""
    with table:
        begin, end = (
            bisect_left(range(len(table)), number, key=lambda at: int(table.read(at, at + 1)["split"][0]))
            for number in (split, split + 1)
        )
    return table, begin, end
