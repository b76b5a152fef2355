"""Gathers columns of constant size from memory maps, without Python code per sample.

Every row of such a column is one run of bytes at (start of its shard) + (row) * (stride of its shard). So all
mapped shards are read through one array whose element i is the row that begins i bytes after the lowest map.
Indexing it with byte offsets gathers rows of any shards, in any order, in one call. (Grouping rows by shard
first takes one call per shard and a second copy. It reaches 0.65 of the rate of a plain NumPy gather; this
method reaches 1.0 to 1.1.)

Three things make it safe: offsets are computed from (shard, row) in this module only; when a shard is mapped,
shape and type of its rows are checked against the manifest, which is the source of all row numbers; and a
reader of rows holds the arrays that it reads from, so their maps stay valid even if a dataset is closed.

Rows that are converted, or that another process reads, are gathered piece by piece and written to reused
memory while the piece is in a core's cache. Other rows stay where NumPy gathered them: a copy into reused
memory costs 0.3 to 0.7 microseconds for a row of 16 KiB, and pays only where `malloc` has returned the memory
of earlier batches to the system.

`OutputMemory` reuses the memory of garbage-collected batches. Fresh memory costs a page fault for every
4 KiB, as much as copying a row into it. The memory of an array is reused only when the array and everything
made from it (views, tensors, batches) are garbage, because NumPy and torch keep the array alive as the base
of all objects that share its memory.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import cast
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from shardkit.cache.rows import FetchedRows
from shardkit.datasets.opened import ShardReader
from shardkit.errors import ShardError
from shardkit.formats.rows import RowShard, decode_together
from shardkit.loaders.streams import ReadRows, Streams

_MAX_SPAN = 1 << 62  # limit of span * row_bytes: NumPy refuses arrays of 2**63 bytes

_PIECE_BYTES = 256 << 10  # rows converted at a time; they and their converted copy fit a core's L2 cache

# If a plan fetches more single rows than this, the next plans are shorter. Fetching 256 takes under a second
# if each row takes two requests of 25 ms.
_FETCHED_ROWS = 256

_LARGE_PAGE = 2 << 20  # size of a large page of memory, in bytes
_ARENA_BYTES = 512 << 20  # address space reserved, not memory used: twice the default of prefetch_bytes
# Sizes of arrays whose memory is reused here: malloc reuses smaller ones itself; larger ones have few faults.
_MIN_BYTES, _MAX_BYTES = 64 << 10, 8 << 20
_MAX_SHARED_BYTES = 128 << 20  # in shared memory, larger arrays too: the alternative is a new shared file

_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANON | getattr(mmap, "MAP_NORESERVE", 0)

_Rows = npt.NDArray[np.generic]
_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FixedColumn:
    """A column of constant size: its name, the shape of a row, its stored and delivered dtypes."""

    name: str
    shape: tuple[int, ...]
    stored: np.dtype[np.generic]
    delivered: np.dtype[np.generic]


class FixedRows:
    """Reads columns of constant size that have the same layout in all streams."""

    def __init__(self, streams: Streams, columns: Mapping[str, FixedColumn], output: OutputMemory) -> None:
        """`columns`: columns by their name in the batch. `output`: memory that rows are written to."""
        self._streams = streams
        self._columns = {name: _MappedColumn(streams, column, output) for name, column in columns.items()}

    def open_rows(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> tuple[ReadRows, bool]:
        """Map the shards of these rows: see `Source.open_rows`. Raises ShardError if a shard is damaged."""
        # Row numbers become memory addresses, so one outside its shard would read foreign memory.
        if not ((row >= 0) & (row < self._streams.shard_samples[shard])).all():
            raise IndexError("a planned row is outside its shard")
        used = np.unique(shard)
        fetched, is_late = self._first_rows(used, shard, row)
        decoded = self._decode([number for number in used.tolist() if number not in fetched])
        readers = {
            name: column.reader(shard, row, used, fetched, decoded) for name, column in self._columns.items()
        }
        return lambda low, high: {name: read(low, high) for name, read in readers.items()}, is_late

    def _decode(self, numbers: Sequence[int]) -> dict[int, ShardReader]:
        """Decode the columns of shards of row files in threads; other formats are mapped as they are."""
        streams, columns = self._streams, list(self._columns.values())
        are_decoded = [dataset.manifest.format == "row_files" for dataset in streams.datasets]
        if not any(are_decoded):
            return {}
        wanted = [n for n in numbers if are_decoded[streams.stream_of(n)]]
        opened = {n: streams.shard(n) for n in wanted if not all(column.has_map(n) for column in columns)}
        decode_together([cast(RowShard, shard) for shard in opened.values()], [c.name for c in columns])
        return opened

    def _first_rows(
        self, used: npt.NDArray[np.int32], shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]
    ) -> tuple[dict[int, FetchedRows], bool]:
        """Return rows fetched one by one, by their remote shard, and whether the next plan should be shorter.

        With short plans a batch does not wait for shards or single rows of later batches. A few rows of
        shards that do not fit the cache, or that no lane of this machine needs, do not shorten plans: such
        rows come throughout a run, and plans of one batch each are the most expensive.
        """
        streams, is_late = self._streams, False
        found: dict[int, FetchedRows] = {}
        if not any(streams.readers):
            return found, is_late
        needed, firsts = {}, {}
        for stream, _, numbers in streams.split(used):
            if (reader := streams.readers[stream]) is not None:
                firsts[reader] = streams.first_shard(stream)
                missing = streams.use(stream, numbers.tolist())
                needed[reader] = missing, partial(_rows_of, shard, row, firsts[reader])
                is_late |= not all(map(reader.reads_singly, missing))
        for reader, rows in streams.run.first_rows(needed).items():
            found |= {firsts[reader] + number: fetched for number, fetched in rows.items()}
        return found, is_late or sum(len(fetched.rows) for fetched in found.values()) > _FETCHED_ROWS


def _rows_of(
    shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64], first: int, number: int
) -> npt.NDArray[np.int64]:
    rows: npt.NDArray[np.int64] = row[shard == first + number]
    return rows


class _MappedColumn:
    """The memory maps of one column, with the address and stride of the rows of each shard."""

    def __init__(self, streams: Streams, column: FixedColumn, output: OutputMemory) -> None:
        self._streams = streams
        self._column = column
        self.name = column.name
        self._row_bytes = column.stored.itemsize * prod(column.shape)
        self._gather = Gather(column.shape, column.stored, column.delivered, output)
        shards = len(streams.infos)
        self._starts = np.zeros(shards, dtype=np.int64)
        self._strides = np.zeros(shards, dtype=np.int64)
        # Maps of the last plan, by shard, for reuse by the next plan. References are weak, so that maps end
        # with the readers that hold them, and a closed loader leaves no map open.
        self._maps: WeakValueDictionary[int, npt.NDArray[np.generic]] = WeakValueDictionary()
        self._partial: set[int] = set()  # shards whose entry in `_maps` has only some of their rows

    def reader(
        self,
        shard: npt.NDArray[np.int32],
        row: npt.NDArray[np.int64],
        used: npt.NDArray[np.int32],
        fetched: Mapping[int, FetchedRows],
        opened: Mapping[int, ShardReader],
    ) -> Callable[[int, int], npt.NDArray[np.generic]]:
        """Return a function (low, high) that reads planned rows low to high - 1. Their numbers must be valid.

        `used`: the distinct shards of the rows. `fetched`: by shard, rows that were fetched one by one.
        `opened`: shards that are open already.
        """
        numbers = used.tolist()
        # Drops the maps of shards that this plan does not use; their dataset keeps recent shards open.
        maps = {n: self._fetched(n, fetched[n]) if n in fetched else self._map(n, opened) for n in numbers}
        self._maps = WeakValueDictionary(maps)
        held = list(maps.values())
        if fetched:
            row = row.copy()
        for number, some in fetched.items():
            which = shard == number
            row[which] = np.searchsorted(some.rows, row[which])
        if not held:
            return lambda low, high: np.empty((0, *self._column.shape), self._column.delivered)
        lowest = int(self._starts[used].min())
        highest = max(int(self._starts[n]) + len(m) * int(self._strides[n]) for n, m in maps.items())
        offsets = self._starts[shard] - lowest + row * self._strides[shard]
        span = highest - lowest
        if span * self._row_bytes >= _MAX_SPAN:
            return _reader_by_shard(maps, self._column, shard, row)
        gather = self._gather.bind(lowest, span, held)
        return lambda low, high: gather(offsets[low:high])

    def _fetched(self, number: int, some: FetchedRows) -> npt.NDArray[np.generic]:
        """Return the column of rows that were fetched one by one; mark the shard as only partly mapped."""
        stream = self._streams.stream_of(number)
        columns = self._streams.datasets[stream].columns_of(number - self._streams.first_shard(stream))
        place = next(place for place, column in enumerate(columns) if column.name == self._column.name)
        before = sum(column.size or 0 for column in columns[:place])
        values = some.data[:, before : before + self._row_bytes].view(self._column.stored)
        self._starts[number] = values.__array_interface__["data"][0]
        self._strides[number] = values.strides[0]
        self._partial.add(number)
        return values.reshape(len(values), *self._column.shape)

    def has_map(self, number: int) -> bool:
        """Return whether all rows of a shard are mapped by the last plan."""
        return number in self._maps and number not in self._partial

    def _map(self, number: int, opened: Mapping[int, ShardReader]) -> npt.NDArray[np.generic]:
        mapped = self._maps.get(number)
        if mapped is not None and number not in self._partial:
            return mapped
        self._partial.discard(number)
        info, name = self._streams.infos[number], self._column.name
        reader = opened[number] if number in opened else self._streams.shard(number)
        rows = reader.fixed_rows(name)
        expected = (info.samples, *self._column.shape)
        if rows is None or rows.shape != expected or rows.dtype != self._column.stored:
            found = "not of constant size" if rows is None else f"{rows.dtype}{list(rows.shape)}"
            raise ShardError(
                self._streams.where(number),
                f"column {name!r} is {found}, expected {self._column.stored}{list(expected)}",
            )
        # Expected strides within a row, from an array of one row, as NumPy gives empty arrays strides of 0.
        inner = np.empty((1, *self._column.shape), dtype=rows.dtype).strides[1:]
        if rows.strides[1:] != inner or rows.strides[0] < 0:
            rows = np.ascontiguousarray(rows)
        self._starts[number] = rows.__array_interface__["data"][0]
        self._strides[number] = rows.strides[0]
        return rows


def _reader_by_shard(
    maps: Mapping[int, npt.NDArray[np.generic]],
    column: FixedColumn,
    shard: npt.NDArray[np.int32],
    row: npt.NDArray[np.int64],
) -> Callable[[int, int], npt.NDArray[np.generic]]:
    """Return a function that reads shard by shard, for maps too far apart in memory for one array."""

    def read(low: int, high: int) -> npt.NDArray[np.generic]:
        rows = np.empty((high - low, *column.shape), dtype=column.delivered)
        for number in np.unique(shard[low:high]).tolist():
            which = np.flatnonzero(shard[low:high] == number)
            rows[which] = maps[number][row[low:high][which]]
        return rows

    return read


class Gather:
    """Gathers rows of one shape and type and converts them to another type."""

    def __init__(
        self,
        shape: tuple[int, ...],
        stored: np.dtype[np.generic],
        delivered: np.dtype[np.generic],
        output: OutputMemory,
    ) -> None:
        self._shape, self._stored, self._delivered = shape, stored, delivered
        self._row_bytes = stored.itemsize * prod(shape)
        self._piece = max(1, _PIECE_BYTES // max(1, self._row_bytes))  # number of rows per piece
        self._output = output

    def bind(self, lowest: int, span: int, held: list[_Rows]) -> Callable[[_Ints], _Rows]:
        """Return a function that gathers rows at byte offsets from address `lowest`, within `span` bytes.

        The function keeps `held`, the arrays that own the memory, alive.
        """
        memory = np.asarray(_Stretch(lowest, span - self._row_bytes + 1, self._row_bytes, held))

        def gather(offsets: _Ints) -> _Rows:
            if self._stored == self._delivered and not self._output.is_shared:
                return memory[offsets].view(self._stored).reshape(-1, *self._shape)
            rows = self._output.lend((len(offsets), *self._shape), self._delivered)
            for start in range(0, len(offsets), self._piece):
                piece = memory[offsets[start : start + self._piece]]
                rows[start : start + self._piece] = piece.view(self._stored).reshape(-1, *self._shape)
            return rows

        return gather


class _Stretch:
    """Presents a range of addresses to NumPy as overlapping rows, one starting at every byte."""

    def __init__(self, address: int, count: int, row_bytes: int, held: list[_Rows]) -> None:
        self._held = held  # the arrays that own the memory; NumPy keeps this object as the view's base
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": (count,),
            "strides": (1,),
            "typestr": f"|V{row_bytes}",
        }


class OutputMemory:
    """Lends arrays and reuses their memory. Thread-safe.

    Pieces have sizes of powers of two and come from one range of addresses. The system provides memory only
    for pieces that are used, and gets it back when this object and all lent arrays are garbage.
    """

    def __init__(self) -> None:
        self._arena = _large_pages(_ARENA_BYTES)
        self.is_shared = False
        """Whether another process sees the lent memory; rows should then be written into it directly."""
        self._carved = 0
        self._carving = threading.Lock()
        # Only `_carved` needs the lock. All other changes are single atomic dict or list operations, because
        # garbage collection, which calls `_take_back`, may interrupt any code.
        self._free: defaultdict[int, list[_Bytes]] = defaultdict(list)
        self._lent: dict[int, tuple[weakref.ref[_Bytes], _Bytes, int]] = {}

    def share(self, arena: _Bytes) -> None:
        """Lend pieces of `arena`, memory shared with another process. Call this before the first `lend`."""
        assert not self._carved
        self._arena, self.is_shared = arena, True

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> _Rows:
        """Return an uninitialized array; its memory is reused after the array is garbage."""
        count = prod(shape) * dtype.itemsize
        size = 1 << (count - 1).bit_length()
        most = _MAX_SHARED_BYTES if self.is_shared else _MAX_BYTES
        piece = self._take(size) if _MIN_BYTES <= count <= most else None
        if piece is None:
            return np.empty(shape, dtype)
        # From a memoryview, so that views of `lent` have `lent` as their base, not `piece`.
        lent = np.frombuffer(piece.data, dtype=np.uint8)
        reference = weakref.ref(lent, self._take_back)
        self._lent[id(reference)] = (reference, piece, size)
        return np.ndarray(shape, dtype, buffer=lent)

    def converted(self, rows: _Rows, dtype: np.dtype[np.generic]) -> _Rows:
        """Return `rows` converted to `dtype` in a lent array, or `rows` itself if the dtype is the same."""
        if rows.dtype == dtype and rows.flags.c_contiguous:
            return rows
        lent = self.lend(rows.shape, dtype)
        lent[...] = rows
        return lent

    def _take_back(self, died: weakref.ref[_Bytes]) -> None:
        _, piece, size = self._lent.pop(id(died))
        self._free[size].append(piece)

    def _take(self, size: int) -> _Bytes | None:
        """Return the piece of this size that was freed last, or a new one; None if the arena is full."""
        try:
            return self._free[size].pop()
        except IndexError:
            with self._carving:
                start, self._carved = self._carved, self._carved + size
            piece = self._arena[start : start + size]
            return piece if len(piece) == size else None


def _large_pages(count: int) -> _Bytes:
    """Return `count` bytes of zeros, on large pages if available; empty if addresses cannot be reserved."""
    try:
        memory = mmap.mmap(-1, count + _LARGE_PAGE, flags=_RESERVE)
    except OSError:  # the process has a limit on address space (ulimit -v)
        return np.empty(0, dtype=np.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % _LARGE_PAGE
    return whole[start : start + count]
