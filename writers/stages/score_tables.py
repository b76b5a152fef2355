"""Scores of documents by id, on disk: what stage `scores` makes of score files, and filters look up.

A table is cut into parts by the range of its keys; each part is a folder with

    scores.npy  rows (key, low, values), sorted: the halves of xxh3-128 of the id, and a float64 per column
    index.npy   the key of every BLOCK_ROWS-th row

A lookup holds the index of all parts (8 bytes for each BLOCK_ROWS rows: 63 MB for a billion documents), finds
the block of each id there, and reads the blocks that a batch needs, each once. So memory does not grow with
the scores, a batch costs at most one small read for each of its documents, and it does not matter which order
files or documents are in. That two of n ids share their hash, so that one has the other's scores, has a
probability of n^2 / 2^129.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.writers.dedup.tables import RowFile, Rows
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.rows.documents import text_digests

SCORES_FILE = "scores.npy"
INDEX_FILE = "index.npy"
BLOCK_ROWS = 128


def score_dtype(columns: int) -> np.dtype[np.void]:
    """The type of rows with so many scores."""
    return np.dtype([("key", "<u8"), ("low", "<u8"), ("values", "<f8", (columns,))])


def id_keys(ids: pa.LargeStringArray) -> npt.NDArray[np.uint64]:
    """uint64[2, n]: the keys of ids, and what tells those of equal keys apart."""
    return text_digests(ids).view(">u8").astype(np.uint64).T


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """The parts of a table, and the first key of each; `content` names what is in them."""

    parts: tuple[Artifact, ...]
    starts: tuple[int, ...]
    columns: int
    content: str

    def open(self) -> OpenScores:
        """Read the indexes; of a table in a store, the parts are fetched to this machine once."""
        return OpenScores(self)


class OpenScores:
    """Finds scores; a `ScoreLookup`. Holds no open file between calls."""

    def __init__(self, table: ScoreTable) -> None:
        self._columns = table.columns
        self._starts = np.array(table.starts, np.uint64)
        for part in table.parts:
            (part / SCORES_FILE).local()
        self._parts = [RowFile(part / SCORES_FILE) for part in table.parts]
        self._indexes = [Rows(part / INDEX_FILE, "<u8").read() for part in table.parts]

    def __call__(self, ids: Sequence[str | None]) -> npt.NDArray[np.float64]:
        """float64[n, columns]: the scores of n ids, NaN where there is no row."""
        found = np.full((len(ids), self._columns), np.nan)
        known = [number for number, one in enumerate(ids) if one is not None]
        found[known] = self.find(*id_keys(pa.array([ids[number] for number in known], pa.large_string())))
        return found

    def find(self, keys: npt.NDArray[np.uint64], lows: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
        """The same for `id_keys`."""
        found = np.full((len(keys), self._columns), np.nan)
        owners = np.searchsorted(self._starts, keys, side="right") - 1
        for number in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == number)
            rows = self._near(number, keys[mine])
            if len(rows):
                at, has = _places(rows, keys[mine], lows[mine])
                found[mine[has]] = rows["values"][at[has]]
        return found

    def _near(self, number: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """The rows of all blocks in which the keys may be, in order."""
        index, part = self._indexes[number], self._parts[number]
        if not part.rows:
            return np.empty(0, part.dtype)
        # Rows of equal keys may begin in the block before the one that begins with the key.
        first, last = (np.searchsorted(index, keys, side=side) - 1 for side in ("left", "right"))
        blocks = np.unique(np.maximum(np.concatenate([first, last]), 0))
        rows = (blocks[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).reshape(-1)
        found: npt.NDArray[np.void] = part.read(rows[rows < part.rows]).reshape(-1)
        return found


def _places(
    rows: npt.NDArray[np.void], keys: npt.NDArray[np.uint64], lows: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """(row of each key and low, whether there is one)."""
    stored = np.append(rows["key"], np.uint64(0))  # one more, so that the place after the last can be read
    others = np.append(rows["low"], np.uint64(0))
    at = np.searchsorted(stored[:-1], keys)
    while True:
        same = (at < len(rows)) & (stored[at] == keys)
        wrong = same & (others[at] != lows)
        if not wrong.any():
            return at, same
        at = at + wrong
