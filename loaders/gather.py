"""Columns of constant size, gathered from memory maps with no Python per sample.

Every row of such a column is one run of bytes at (start of its shard) + (row) * (stride of its shard). So all
mapped shards are read through one array whose element i is the row that begins i bytes after the lowest map.
Indexing it with byte offsets gathers rows of any shards, in any order, in one call.
(Grouping rows by shard first costs a call per shard and a second copy: 0.65 of a plain gather's rate,
measured; this: 1.0 to 1.1.)

What makes it safe: offsets are computed from (shard, row) here and nowhere else; when a shard is mapped,
shape and type of its rows are checked against the manifest, from which all row numbers come; and what reads
the rows holds the arrays that it reads from, so their maps outlive it whatever is closed meanwhile.

Rows that are converted, or that another process reads, are gathered piece by piece and written to reused
memory while a core's cache holds the piece. Other rows stay where NumPy gathered them: a copy into reused
memory costs 0.3 to 0.7 microseconds for a row of 16 KiB, and pays only where `malloc` has returned the memory
of earlier batches to the system.

`OutputMemory` reuses the memory of dead batches. Fresh memory costs a page fault for every 4 KiB, as much as
copying a row into it. A lent array is taken back when it and everything made from it (views, tensors,
batches) are garbage, and not before, because NumPy and torch keep it alive as the base of what shows its
memory.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from shardkit.cache.rows import FetchedRows
from shardkit.errors import ShardError
from shardkit.loaders.streams import ReadRows, Streams

_MAX_SPAN = 1 << 62  # NumPy refuses arrays of 2**63 bytes; the one below would have span * row_bytes

_PIECE_BYTES = 256 << 10  # gathered, then converted: both fit a core's second-level cache

_FETCHED_ROWS = 256  # of a plan, one by one: less than a second where each of two requests takes 25 ms

_LARGE_PAGE = 2 << 20
_ARENA_BYTES = 512 << 20  # of addresses, not of memory: twice the default of prefetch_bytes
_MIN_BYTES, _MAX_BYTES = 64 << 10, 8 << 20  # below, malloc reuses memory by itself; above, faults are few

_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANON | getattr(mmap, "MAP_NORESERVE", 0)

_Rows = npt.NDArray[np.generic]
_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FixedColumn:
    """A column of constant size: its name, shape of a row, types as stored and delivered."""

    name: str
    shape: tuple[int, ...]
    stored: np.dtype[np.generic]
    delivered: np.dtype[np.generic]


class FixedRows:
    """Reads columns of constant size, which are the same in all streams."""

    def __init__(self, streams: Streams, columns: Mapping[str, FixedColumn], output: OutputMemory) -> None:
        """`columns`: by the name under which a batch has them. `output`: where rows are written."""
        self._streams = streams
        self._columns = {name: _MappedColumn(streams, column, output) for name, column in columns.items()}

    def open_rows(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> tuple[ReadRows, bool]:
        """Map the shards of these rows, as `Source.open_rows` needs. ShardError if one is damaged."""
        # Offsets become addresses, so a row that its shard does not have must never get further than this.
        if not ((row >= 0) & (row < self._streams.shard_samples[shard])).all():
            raise IndexError("a planned row is beyond the end of its shard")
        used = np.unique(shard)
        fetched, is_late = self._first_rows(used, shard, row)
        readers = {name: column.reader(shard, row, used, fetched) for name, column in self._columns.items()}
        return lambda low, high: {name: read(low, high) for name, read in readers.items()}, is_late

    def _first_rows(
        self, used: npt.NDArray[np.int32], shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]
    ) -> tuple[dict[int, FetchedRows], bool]:
        """Return (rows of remote streams fetched one by one, by shard; whether to plan for less).

        Less, so that a batch does not wait for shards of later ones, nor for the rows of too many. A few rows
        of shards that find no room, or that no lane of this machine needs, are no reason: that lasts, and
        plans of one batch each cost the most.
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
    """The maps of one column and where in memory their rows are."""

    def __init__(self, streams: Streams, column: FixedColumn, output: OutputMemory) -> None:
        self._streams = streams
        self._column = column
        self._row_bytes = column.stored.itemsize * prod(column.shape)
        self._gather = Gather(column.shape, column.stored, column.delivered, output)
        shards = len(streams.infos)
        self._starts = np.zeros(shards, dtype=np.int64)
        self._strides = np.zeros(shards, dtype=np.int64)
        # Of the last plan, for reuse by the next. Weak, so that maps end with the readers that hold them: a
        # closed loader leaves none behind.
        self._maps: WeakValueDictionary[int, npt.NDArray[np.generic]] = WeakValueDictionary()
        self._partial: set[int] = set()  # of the maps, those that hold some rows only

    def reader(
        self,
        shard: npt.NDArray[np.int32],
        row: npt.NDArray[np.int64],
        used: npt.NDArray[np.int32],
        fetched: Mapping[int, FetchedRows],
    ) -> Callable[[int, int], npt.NDArray[np.generic]]:
        """A reader of checked rows; `used` are their shards, of which some have their rows in `fetched`."""
        numbers = used.tolist()
        # Drops the maps of shards that this plan does not touch; their dataset keeps the recent ones open.
        maps = {n: self._fetched(n, fetched[n]) if n in fetched else self._map(n) for n in numbers}
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
        """The column in the rows that were fetched one by one; never mistaken for the shard's map later."""
        stream = self._streams.stream_of(number)
        columns = self._streams.datasets[stream].columns_of(number - self._streams.first_shard(stream))
        place = next(place for place, column in enumerate(columns) if column.name == self._column.name)
        before = sum(column.size or 0 for column in columns[:place])
        values = some.data[:, before : before + self._row_bytes].view(self._column.stored)
        self._starts[number] = values.__array_interface__["data"][0]
        self._strides[number] = values.strides[0]
        self._partial.add(number)
        return values.reshape(len(values), *self._column.shape)

    def _map(self, number: int) -> npt.NDArray[np.generic]:
        mapped = self._maps.get(number)
        if mapped is not None and number not in self._partial:
            return mapped
        self._partial.discard(number)
        info, name = self._streams.infos[number], self._column.name
        rows = self._streams.shard(number).fixed_rows(name)
        expected = (info.samples, *self._column.shape)
        if rows is None or rows.shape != expected or rows.dtype != self._column.stored:
            found = "none of constant size" if rows is None else f"{rows.dtype}{list(rows.shape)}"
            raise ShardError(
                self._streams.where(number),
                f"column {name!r} is {found}, expected {self._column.stored}{list(expected)}",
            )
        # Of one row, not of none: NumPy gives all arrays without elements the strides 0.
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
    """Read shard by shard, for maps that are too far apart in memory for one array."""

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
        self._piece = max(1, _PIECE_BYTES // max(1, self._row_bytes))  # rows
        self._output = output

    def bind(self, lowest: int, span: int, held: list[_Rows]) -> Callable[[_Ints], _Rows]:
        """A function from byte offsets to rows within `span` bytes from address `lowest`.

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
    """Shows NumPy a stretch of address space as overlapping rows: one starts at every byte."""

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
    """Lends arrays and reuses their memory. Threads may share it.

    Pieces have sizes of powers of two and come from one stretch of addresses; the system gives it memory
    where pieces are used, and has it back when the object and all that is lent are gone.
    """

    def __init__(self) -> None:
        self._arena = _large_pages(_ARENA_BYTES)
        self.is_shared = False
        """Whether another process sees what is lent, so that rows should be written there at once."""
        self._carved = 0
        self._carving = threading.Lock()
        # Every other change is one atomic step of a dict or list: the garbage collector may come in between.
        self._free: defaultdict[int, list[_Bytes]] = defaultdict(list)
        self._lent: dict[int, tuple[weakref.ref[_Bytes], _Bytes, int]] = {}

    def share(self, arena: _Bytes) -> None:
        """Lend pieces of `arena` from now on, which another process sees. Nothing may have been lent yet."""
        assert not self._carved
        self._arena, self.is_shared = arena, True

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> _Rows:
        """An array of arbitrary content that belongs to the caller until it dies."""
        count = prod(shape) * dtype.itemsize
        size = 1 << (count - 1).bit_length()
        piece = self._take(size) if _MIN_BYTES <= count <= _MAX_BYTES else None
        if piece is None:
            return np.empty(shape, dtype)
        # Through a memoryview: what is made from `lent` then refers to `lent`, not to the piece under it.
        lent = np.frombuffer(piece.data, dtype=np.uint8)
        reference = weakref.ref(lent, self._take_back)
        self._lent[id(reference)] = (reference, piece, size)
        return np.ndarray(shape, dtype, buffer=lent)

    def converted(self, rows: _Rows, dtype: np.dtype[np.generic]) -> _Rows:
        """`rows` in another type, in an array that is lent; `rows` themselves if they have that type."""
        if rows.dtype == dtype and rows.flags.c_contiguous:
            return rows
        lent = self.lend(rows.shape, dtype)
        lent[...] = rows
        return lent

    def _take_back(self, died: weakref.ref[_Bytes]) -> None:
        _, piece, size = self._lent.pop(id(died))
        self._free[size].append(piece)

    def _take(self, size: int) -> _Bytes | None:
        """The piece of this size that was freed last, or a new one; None if there is no room."""
        try:
            return self._free[size].pop()
        except IndexError:
            with self._carving:
                start, self._carved = self._carved, self._carved + size
            piece = self._arena[start : start + size]
            return piece if len(piece) == size else None


def _large_pages(count: int) -> _Bytes:
    """`count` bytes of zeros, on large pages if the system has them; none if it gives no such addresses."""
    try:
        memory = mmap.mmap(-1, count + _LARGE_PAGE, flags=_RESERVE)
    except OSError:  # a limit on addresses (ulimit -v)
        return np.empty(0, dtype=np.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % _LARGE_PAGE
    return whole[start : start + count]
