"""Tables on disk with the scores of documents by id. Stage `scores` writes them; `scores` filters read them.

A table is cut into parts by ranges of its keys; each part is a folder with

    scores.npy  rows (key, low, values), sorted: the halves of xxh3-128 of the id, and a float64 per column
    index.npy   the key of every BLOCK_ROWS-th row

A lookup holds the index of all parts (8 bytes per BLOCK_ROWS rows: 63 MB for a billion documents), finds the
block of each id there, and reads the blocks that a batch needs, each once. So memory does not grow with the
scores, a batch costs at most one small read per document, and the order of files and documents does not
matter. Two of n ids share their hash, so that one gets the other's scores, with probability n^2 / 2^129.
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
    """Return the dtype of table rows with this number of scores per document."""
    return np.dtype([("key", "<u8"), ("low", "<u8"), ("values", "<f8", (columns,))])


def id_keys(ids: pa.LargeStringArray) -> npt.NDArray[np.uint64]:
    """Return the halves of the hashes of ids, uint64[2, n]: the keys, and the fields `low`."""
    return text_digests(ids).view(">u8").astype(np.uint64).T


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """The parts of a table, and the first key of each; `content` is the digest of all parts."""

    parts: tuple[Artifact, ...]
    starts: tuple[int, ...]
    columns: int
    content: str

    def open(self) -> OpenScores:
        """Read the indexes; if the table is in a store, its parts are copied to this machine once."""
        return OpenScores(self)


class OpenScores:
    """An open score table, which implements `ScoreLookup`; it holds no open file between calls."""

    def __init__(self, table: ScoreTable) -> None:
        self._columns = table.columns
        self._starts = np.array(table.starts, np.uint64)
        for part in table.parts:
            (part / SCORES_FILE).local()
        self._parts = [RowFile(part / SCORES_FILE) for part in table.parts]
        self._indexes = [Rows(part / INDEX_FILE, "<u8").read() for part in table.parts]

    def __call__(self, ids: Sequence[str | None]) -> npt.NDArray[np.float64]:
        """Return the scores of n ids, float64[n, columns], with NaN where the table has no row."""
        found = np.full((len(ids), self._columns), np.nan)
        known = [number for number, one in enumerate(ids) if one is not None]
        found[known] = self.find(*id_keys(pa.array([ids[number] for number in known], pa.large_string())))
        return found

    def find(self, keys: npt.NDArray[np.uint64], lows: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
        """Return the scores of ids by the halves `keys` and `lows` of their hashes; NaN for unknown ids."""
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
        """Return the rows of all blocks of part `number` that may contain the keys, in order."""
        index, part = self._indexes[number], self._parts[number]
        if not part.rows:
            return np.empty(0, part.dtype)
        # The rows of a key may begin in the block before the block that begins with this key.
        first, last = (np.searchsorted(index, keys, side=side) - 1 for side in ("left", "right"))
        blocks = np.unique(np.maximum(np.concatenate([first, last]), 0))
        rows = (blocks[:, None] * BLOCK_ROWS + np.arange(BLOCK_ROWS)).reshape(-1)
        found: npt.NDArray[np.void] = part.read(rows[rows < part.rows]).reshape(-1)
        return found


def _places(
    rows: npt.NDArray[np.void], keys: npt.NDArray[np.uint64], lows: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the index in `rows` of each (key, low), int64[n], and whether such a row exists, bool[n]."""
    stored = np.append(rows["key"], np.uint64(0))  # a sentinel, so that the index after the last is valid
    others = np.append(rows["low"], np.uint64(0))
    at = np.searchsorted(stored[:-1], keys)
    while True:
        same = (at < len(rows)) & (stored[at] == keys)
        wrong = same & (others[at] != lows)
        if not wrong.any():
            return at, same
        at = at + wrong
