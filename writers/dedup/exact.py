"""Documents with equal keys (hashes of their text or of its words), found partition by partition.

A key is 128 bits; two different texts share one with probability 10^-19 among 10^10 documents. Among equal
keys the winner is the document of the lowest source, then (with `longest_first`) of the longest text, then of
the lowest content rank (writers/documents.py): neither the number of partitions nor names and order of files
change which text stays.

Tasks write KEYS runs, which the exchange sorts by the first half of the key; a partition is a range of these
halves, so all copies of a text meet in one. `find_outcomes` streams a partition: of the key that a batch ends
with it keeps the best document so far, so memory is bounded even if all documents are copies of one.

Tables of keys hold the hash as the fields `high` and `low`, in runs sorted by its first 16 bits. A partition
is a range of those bits, so each run holds the rows of a partition in one piece, and a partition reads those
and little else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.writers.dedup.removals import document_keys, outcomes
from shardkit.writers.dedup.tables import Rows, RowsWriter
from shardkit.writers.exchange import Slice, Table
from shardkit.writers.execution.artifacts import Artifact

__all__ = [
    "KEYS",
    "KEY_DTYPE",
    "LOSER_DTYPE",
    "MAX_PARTITIONS",
    "STORED_DTYPE",
    "WINNER_DTYPE",
    "KeyFile",
    "find_losers",
    "find_outcomes",
    "find_winners",
    "leading_bits",
    "partition_bounds",
    "partition_range",
    "partitions_for",
    "rank_copies",
    "read_key_runs",
    "read_range",
    "repeated",
    "row_batches",
]

KEYS = Table(
    "keys.run",
    np.dtype(
        [
            ("key", "<u8"),  # the first half of the hash, read as a big-endian number; `low` is the second
            ("low", "<u8"),
            ("id", "<u8", (2,)),  # the halves of the content rank, as numbers that sort as it does
            ("bytes", "<i8"),
            ("row", "<u4"),  # in documents.arrow
            ("source", "<i4"),
            ("split", "<i4"),
        ]
    ),
    origin="split",
)

_PEAK_BYTES_PER_ROW_RANKED = 250  # measured where all rows are copies: rows, their order, what is lost


def partition_bounds(partition: int, partitions: int) -> tuple[int, int]:
    """[start, stop) of the keys that belong to a partition."""
    start, stop = (-(-(number << 64) // partitions) for number in (partition, partition + 1))
    return start, stop


def rank_copies(
    rows: npt.NDArray[np.void], *, longest_first: bool = False
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows of KEYS whose key occurs several times, from the winner of each key down, and their winners.

    (indices into `rows`; for each of these the position, among these, of the winner of its key)
    """
    chosen = repeated(rows["key"])
    sizes = [-rows["bytes"][chosen]] if longest_first else []
    ids = rows["id"][chosen]
    by = [ids[:, 1], ids[:, 0], *sizes, *(rows[name][chosen] for name in ("source", "low", "key"))]
    chosen = chosen[np.lexsort(by)]
    is_copy = np.zeros(len(chosen), np.bool_)
    is_copy[1:] = np.diff(rows["key"][chosen]) == 0
    is_copy[1:] &= np.diff(rows["low"][chosen]) == 0
    winners = np.maximum.accumulate(np.where(is_copy, 0, np.arange(len(chosen))))
    return chosen, winners


def row_batches(keys: Slice, memory_bytes: int) -> Iterator[npt.NDArray[np.void]]:
    """The rows of a partition in order, in batches that take a quarter of the memory while they are ranked.

    A third is for what is read ahead. A batch may end anywhere, also within a key.
    """
    most = max(1, memory_bytes // 4 // _PEAK_BYTES_PER_ROW_RANKED)
    for rows, _ in keys.stream(memory_bytes // 3):
        for start in range(0, len(rows), most):
            yield rows[start : start + most]


def find_outcomes(keys: Slice, memory_bytes: int) -> Iterator[npt.NDArray[np.void]]:
    """Rows of removals.OUTCOMES, in any order: the losers of a partition, and its winners with copies."""
    carried = np.empty(0, KEYS.dtype)
    represents = np.empty(0, np.int64)  # documents, by each of the carried rows
    for batch in row_batches(keys, memory_bytes):
        rows = np.concatenate([carried, batch])
        copies = np.ones(len(rows), np.int64)
        copies[: len(carried)] = represents
        chosen, winners = rank_copies(rows)
        is_lost = winners != np.arange(len(chosen))
        lost = rows[chosen[is_lost]]
        yield outcomes(document_keys(lost["split"], lost["row"]), bytes=lost["bytes"])
        np.add.at(copies, chosen[winners[is_lost]], copies[chosen[is_lost]])
        is_open = rows["key"] == rows["key"][-1]  # the next batch may have more of this key
        is_open[chosen[is_lost]] = False
        copies[chosen[is_lost]] = 0
        yield _winners(rows, copies, ~is_open)
        carried, represents = rows[is_open], copies[is_open]
    yield _winners(carried, represents, np.ones(len(carried), np.bool_))


def _winners(
    rows: npt.NDArray[np.void], copies: npt.NDArray[np.int64], complete: npt.NDArray[np.bool_]
) -> npt.NDArray[np.void]:
    several = np.flatnonzero(complete & (copies > 1))
    found = rows[several]
    return outcomes(document_keys(found["split"], found["row"]), copies=copies[several])


MAX_PARTITIONS = 1 << 16


def leading_bits(high: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint16]:
    """uint16[n]: what runs are sorted by; NumPy sorts 16 bits in linear time."""
    return (high >> np.uint64(48)).astype(np.uint16)


def partition_range(partition: int, partitions: int) -> tuple[int, int]:
    """[first, last) of the leading bits that belong to a partition."""
    if not 0 <= partition < partitions <= MAX_PARTITIONS:
        raise ValueError(f"partition {partition} of {partitions}: at most {MAX_PARTITIONS:,} partitions")
    first, last = (-(-(number << 16) // partitions) for number in (partition, partition + 1))
    return first, last


def read_range(table: Rows, begin: int, end: int, bits: tuple[int, int]) -> npt.NDArray[Any]:
    """The rows of the run [begin, end) whose leading bits are in [first, last)."""
    first, last = bits
    count = end - begin
    # Hashes are spread evenly, so a range lies where its share of the run is, give or take: mostly one read.
    margin = 2 * int(count**0.5) + 1  # four standard deviations at most
    start = max(0, (count * first >> 16) - margin)
    stop = min(count, (count * last >> 16) + margin)
    while True:
        rows = table.read(begin + start, begin + stop)
        found = leading_bits(rows["high"])
        if start > 0 and found[0] >= first:
            start = max(0, 2 * start - stop)
        elif stop < count and found[-1] < last:
            stop = min(count, 2 * stop - start)
        else:
            edges = np.searchsorted(found.astype(np.int64), [first, last])
            return rows[int(edges[0]) : int(edges[1])]


def repeated(high: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Indices of the values that occur more than once: usually few, and all that must be sorted fully."""
    order: npt.NDArray[np.int64] = np.argsort(high)
    high = high[order]
    same = high[1:] == high[:-1]
    shared = np.zeros(len(high), np.bool_)
    shared[1:] |= same
    shared[:-1] |= same
    return order[shared]


# Bytes of keys and ids are kept as made, big-endian when read as numbers; `id` is the content rank.
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

RUN_ROWS = 1 << 18  # sorted in 30 MB; only a file's last run is shorter

_PEAK_BYTES_PER_ROW = 150  # measured: 145 where most rows have a copy, 120 where none has

_DOCUMENT = [("id", "u1", (16,)), ("bytes", "<i8"), ("source", "<i4")]

STORED_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), *_DOCUMENT, ("place", "<u4")])  # place in the run

_ROW_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), *_DOCUMENT, ("split", "<i4"), ("row", "<i8")])


class KeyFile:
    """A file of keys, written in the order of documents: the n-th row is the n-th document."""

    def __init__(self, path: Path) -> None:
        self._file = RowsWriter(path, STORED_DTYPE)
        self._run = np.empty(RUN_ROWS, STORED_DTYPE)
        self._pending = 0

    def write(self, keys: npt.NDArray[np.void]) -> None:
        """Append rows of KEY_DTYPE."""
        assert keys.dtype == KEY_DTYPE
        while len(keys):
            part, keys = np.split(keys, [RUN_ROWS - self._pending])
            run = self._run[self._pending : self._pending + len(part)]
            numbers = np.ascontiguousarray(part["key"]).view(">u8")
            run["high"], run["low"] = numbers[:, 0], numbers[:, 1]
            for name, *_ in _DOCUMENT:
                run[name] = part[name]
            self._pending += len(part)
            if self._pending == RUN_ROWS:
                self._write_run()

    def _write_run(self) -> None:
        run = self._run[: self._pending]
        run["place"] = np.arange(len(run))
        self._file.write(run[np.argsort(leading_bits(run["high"]), kind="stable")])
        self._pending = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            self._write_run()


def partitions_for(documents: int, memory_bytes: int) -> int:
    """Partitions that keep one within half of a memory budget."""
    return min(max(1, -(-documents * _PEAK_BYTES_PER_ROW * 2 // memory_bytes)), MAX_PARTITIONS)


def read_key_runs(path: Artifact) -> Iterator[npt.NDArray[np.void]]:
    """The rows of a file of keys as KEY_DTYPE in the order of documents, a run at a time."""
    table = Rows(path, STORED_DTYPE)
    for start in range(0, len(table), RUN_ROWS):
        stored = table.read(start, min(start + RUN_ROWS, len(table)))
        keys = np.empty(len(stored), KEY_DTYPE)
        numbers = np.stack([stored["high"], stored["low"]], axis=1)
        keys["key"][stored["place"]] = numbers.astype(">u8").view(np.uint8)
        for name, *_ in _DOCUMENT:
            keys[name][stored["place"]] = stored[name]
        yield keys


def find_losers(
    keys_paths: Sequence[Artifact],
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
    bits = partition_range(partition, partitions)
    parts = [np.empty(0, _ROW_DTYPE)]
    for split, path in enumerate(keys_paths):
        for rows in _partition_rows(path, bits):
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
    chosen = repeated(rows["high"])
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


def _partition_rows(path: Artifact, bits: tuple[int, int]) -> Iterator[npt.NDArray[np.void]]:
    """_ROW_DTYPE rows of a partition, run by run; `split` is still to be set."""
    with Rows(path, STORED_DTYPE) as table:
        for start in range(0, len(table), RUN_ROWS):
            stored = read_range(table, start, min(start + RUN_ROWS, len(table)), bits)
            if int(stored["place"].max(initial=0)) >= min(RUN_ROWS, len(table) - start):
                raise BuildError(f"{path}: names a document beyond its run; make it again")
            rows = np.empty(len(stored), _ROW_DTYPE)
            for name in ("high", "low", "id", "bytes", "source"):
                rows[name] = stored[name]
            rows["row"] = stored["place"] + np.int64(start)
            yield rows


def _order(
    rows: npt.NDArray[np.void], chosen: npt.NDArray[np.int64], longest_first: bool
) -> npt.NDArray[np.int64]:
    """The order of rows[chosen] by key, those of one key from the winner down."""
    ids = rows["id"][chosen].view(">u8")
    sizes = [-rows["bytes"][chosen]] if longest_first else []
    by = [ids[:, 1], ids[:, 0], *sizes, *(rows[name][chosen] for name in ("source", "low", "high"))]
    order: npt.NDArray[np.int64] = np.lexsort(by)
    return order
