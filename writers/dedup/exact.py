"""Documents with equal keys (hashes of their text or of its words), found partition by partition.

A key is 128 bits; two different texts share one with probability 10^-19 among 10^10 documents. Keys are
divided among partitions by their leading bits, so all copies of a text meet in one partition, whose rows
alone are held in memory (`partitions_for` tells how many partitions a memory budget needs). Files of keys
are written in runs sorted by key, of which a partition reads its own slices only. Among equal keys the winner
is the document of the lowest source, then (if so wanted) of the longest text, then of the lowest document id:
a property of the documents, so neither the number of partitions nor the order of files changes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError

__all__ = [
    "KEY_DTYPE",
    "LOSER_DTYPE",
    "WINNER_DTYPE",
    "KeyFile",
    "find_losers",
    "find_winners",
    "partitions_for",
    "read_keys",
]

# Bytes of keys and ids are kept as made, big-endian when read as numbers.
KEY_DTYPE = np.dtype([("key", "u1", (16,)), ("id", "u1", (16,)), ("bytes", "<i8"), ("source", "<i4")])
LOSER_DTYPE = np.dtype(
    [
        ("split", "<i4"),
        ("row", "<i8"),
        ("bytes", "<i8"),
        ("winner_split", "<i4"),  # the document with the same key that stays
        ("winner_row", "<i8"),
    ]
)
WINNER_DTYPE = np.dtype([("split", "<i4"), ("row", "<i8"), ("copies", "<i4")])  # copies: itself included

_HEADER_BYTES = 256  # room for any row count, so that it can be written last
_RUN_ROWS = 1 << 18  # a run is sorted in 25 MB; every run but a file's last one is as long
_STORED_DTYPE = np.dtype([*KEY_DTYPE.descr, ("place", "<u4")])  # place: the row's number in its run
_PEAK_BYTES_PER_ROW = 140  # measured: 136 where most rows have a copy, 120 where none has
_MAX_PARTITIONS = 1 << 16
_ROW_DTYPE = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("id", "u1", (16,)),
        ("row", "<i8"),
        ("bytes", "<i8"),
        ("source", "<i4"),
        ("split", "<i4"),
    ]
)


class KeyFile:
    """A file of keys, written in the order of documents: the n-th row is the n-th document.

    On disk it is a .npy file whose number of rows is written last, in runs sorted by key.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(bytes(_HEADER_BYTES))
        self._run = np.empty(_RUN_ROWS, _STORED_DTYPE)
        self._pending = 0
        self._rows = 0

    def write(self, keys: npt.NDArray[np.void]) -> None:
        """Append rows of KEY_DTYPE."""
        assert keys.dtype == KEY_DTYPE
        for start in range(0, len(keys), _RUN_ROWS):
            self._add(keys[start : start + _RUN_ROWS])

    def _add(self, keys: npt.NDArray[np.void]) -> None:
        room = _RUN_ROWS - self._pending
        for part in (keys[:room], keys[room:]):
            run = self._run[self._pending : self._pending + len(part)]
            for name in KEY_DTYPE.names or ():
                run[name] = part[name]
            self._pending += len(part)
            if self._pending == _RUN_ROWS:
                self._write_run()

    def _write_run(self) -> None:
        run = self._run[: self._pending]
        run["place"] = np.arange(len(run))
        # Only partitions, which are ranges of leading bits, must lie together.
        order = np.argsort(_leading_bits(run), kind="stable")
        self._file.write(run[order].tobytes())
        self._rows += len(run)
        self._pending = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            self._write_run()
            self._file.seek(0)
            self._file.write(_header(self._rows))


def partitions_for(documents: int, memory_bytes: int) -> int:
    """Partitions that keep one within half of a memory budget."""
    return min(max(1, -(-documents * _PEAK_BYTES_PER_ROW * 2 // memory_bytes)), _MAX_PARTITIONS)


def read_keys(path: Path) -> npt.NDArray[np.void]:
    """All rows of a file of keys, KEY_DTYPE in the order of documents."""
    with path.open("rb") as file:
        stored = _read_stored(file, 0, _count_rows(file))
    keys = np.empty(len(stored), KEY_DTYPE)
    rows = stored["place"] + np.arange(len(stored)) // _RUN_ROWS * _RUN_ROWS
    for name in KEY_DTYPE.names or ():
        keys[name][rows] = stored[name]
    return keys


def find_losers(
    keys_paths: Sequence[Path],
    partition: int,
    partitions: int,
    *,
    longest_first: bool = False,
    sources: Sequence[int | None] | None = None,
) -> npt.NDArray[np.void]:
    """LOSER_DTYPE rows, sorted by (split, row), of the partition's documents whose text another one keeps.

    `split` is the position in `keys_paths`, `row` the row in that file as written. `sources[split]`, unless
    None, counts as the source of all documents of that file; files that may hold the same ids (of other
    corpora) need one each, or the winner among those is open.
    """
    if not 0 <= partition < partitions <= _MAX_PARTITIONS:
        raise ValueError(f"partition {partition} of {partitions}: at most {_MAX_PARTITIONS:,} partitions")
    parts = [np.empty(0, _ROW_DTYPE)]
    for split, path in enumerate(keys_paths):
        for rows in _partition_rows(path, partition, partitions):
            rows["split"] = split
            if sources is not None and sources[split] is not None:
                rows["source"] = sources[split]
            parts.append(rows)
    losers = _losers_of(parts, longest_first)
    ordered: npt.NDArray[np.void] = losers[np.lexsort((losers["row"], losers["split"]))]
    return ordered


def _losers_of(parts: list[npt.NDArray[np.void]], longest_first: bool) -> npt.NDArray[np.void]:
    """LOSER_DTYPE rows, unsorted, of a partition's rows of _ROW_DTYPE; empties `parts`."""
    rows = np.concatenate(parts)
    parts.clear()
    chosen = _repeated(rows["high"])
    chosen = chosen[_order(rows, chosen, longest_first)]
    lost = np.zeros(len(chosen), np.bool_)
    lost[1:] = np.diff(rows["high"][chosen]) == 0
    lost[1:] &= np.diff(rows["low"][chosen]) == 0
    winners = np.maximum.accumulate(np.where(lost, 0, np.arange(len(chosen))))[lost]
    losers = np.empty(len(winners), LOSER_DTYPE)
    for name in ("split", "row", "bytes"):
        losers[name] = rows[name][chosen[lost]]
    for name in ("split", "row"):
        losers[f"winner_{name}"] = rows[name][chosen[winners]]
    return losers


def find_winners(losers: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """WINNER_DTYPE rows, sorted by (split, row): the documents that losers of one partition lost to.

    All copies of a text are in one partition, so no winner occurs in another one.
    """
    order = np.lexsort((losers["winner_row"], losers["winner_split"]))
    split, row = losers["winner_split"][order], losers["winner_row"][order]
    begins = np.ones(len(losers), np.bool_)
    begins[1:] = (split[1:] != split[:-1]) | (row[1:] != row[:-1])
    starts = np.flatnonzero(begins)
    winners = np.empty(len(starts), WINNER_DTYPE)
    winners["split"], winners["row"] = split[starts], row[starts]
    winners["copies"] = 1 + np.diff(starts, append=len(losers))
    return winners


def _partition_rows(path: Path, partition: int, partitions: int) -> Iterator[npt.NDArray[np.void]]:
    """_ROW_DTYPE rows of the partition, run by run; `split` is still to be set."""
    low, high = (-(-(number << 16) // partitions) for number in (partition, partition + 1))
    with path.open("rb") as file:
        count = _count_rows(file)
        for start in range(0, count, _RUN_ROWS):
            stored = _read_range(file, start, min(_RUN_ROWS, count - start), low, high)
            numbers = np.ascontiguousarray(stored["key"]).view(">u8")
            rows = np.empty(len(stored), _ROW_DTYPE)
            rows["high"], rows["low"] = numbers[:, 0], numbers[:, 1]
            for name in ("id", "bytes", "source"):
                rows[name] = stored[name]
            rows["row"] = stored["place"] + np.int64(start)
            yield rows


def _read_range(file: BinaryIO, start: int, count: int, low: int, high: int) -> npt.NDArray[np.void]:
    """The rows of a run of `count` rows from row `start` whose first 16 bits are in [low, high)."""
    # Keys are hashes, so a range lies where its share of the run is, give or take: most often one read.
    margin = 4 * int(count**0.5) + 1
    first = max(0, (count * low >> 16) - margin)
    last = min(count, (count * high >> 16) + margin)
    while True:
        stored = _read_stored(file, start + first, last - first)
        bits = _leading_bits(stored) >> np.uint64(48)
        if first > 0 and bits[0] >= low:
            first = max(0, 2 * first - last)
        elif last < count and bits[-1] < high:
            last = min(count, 2 * last - first)
        else:
            begin, end = np.searchsorted(bits, np.array([low, high], np.uint64))
            return stored[int(begin) : int(end)]


def _read_stored(file: BinaryIO, first: int, count: int) -> npt.NDArray[np.void]:
    """Rows as they lie in the file; read, not mapped: pages of a map would count as this process's memory."""
    file.seek(_HEADER_BYTES + first * _STORED_DTYPE.itemsize)
    stored = np.fromfile(file, _STORED_DTYPE, count)
    assert len(stored) == count, file.name
    return stored


def _count_rows(file: BinaryIO) -> int:
    """The number of rows; BuildError if they are not those that the header tells."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    rows, rest = divmod(size - _HEADER_BYTES, _STORED_DTYPE.itemsize)
    if rest or file.read(_HEADER_BYTES) != _header(rows):
        raise BuildError(f"{file.name}: not a whole file of keys; remove the work folder and build again")
    return rows


def _header(rows: int) -> bytes:
    fields = {"descr": _STORED_DTYPE.descr, "fortran_order": False, "shape": (rows,)}
    text = repr(fields).encode().ljust(_HEADER_BYTES - 11) + b"\n"
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    assert len(header) == _HEADER_BYTES
    return header


def _leading_bits(stored: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """uint64[n]: the first halves of the keys."""
    return np.ascontiguousarray(stored["key"][:, :8]).view(">u8")[:, 0].astype(np.uint64)


def _repeated(high: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Indices of the values that occur more than once: usually few, and all that must be sorted fully."""
    order: npt.NDArray[np.int64] = np.argsort(high)
    high = high[order]
    same = high[1:] == high[:-1]
    shared = np.zeros(len(high), np.bool_)
    shared[1:] |= same
    shared[:-1] |= same
    return order[shared]


def _order(
    rows: npt.NDArray[np.void], chosen: npt.NDArray[np.int64], longest_first: bool
) -> npt.NDArray[np.int64]:
    """The order of rows[chosen] by key, those of one key from the winner down."""
    ids = [
        np.ascontiguousarray(rows["id"][chosen, 8 * half : 8 * half + 8]).view(">u8")[:, 0] for half in (1, 0)
    ]
    sizes = [-rows["bytes"][chosen]] if longest_first else []
    by = [*ids, *sizes, *(rows[name][chosen] for name in ("source", "low", "high"))]
    order: npt.NDArray[np.int64] = np.lexsort(by)
    return order
