"""Columns of constant size, gathered from memory maps with no Python per sample.

Every row of such a column is one run of bytes at (start of its shard) + (row) * (stride of its shard). So all
mapped shards are read as one stretch of memory. Most rows begin at multiples of a unit from some origin on:
shards are mapped at whole pages and have headers of one size, so the unit is a page, a whole row if there is
one shard, and a few hundred bytes in tars. `np.take` copies such rows unit by unit straight into memory that
the caller chose. Rows that lie apart from this grid (of the last, shorter shard, whose header is shorter,
too) are gathered by the addresses of their first bytes, which NumPy does only into memory of its own.
(Grouping rows by shard first costs a call per shard and a second copy: 0.65 of a plain gather's rate.)

What makes it safe: offsets are computed from (shard, row) here and nowhere else; when a shard is mapped,
shape and type of its rows are checked against the manifest, from which all row numbers come; and what reads
the rows holds the arrays that it reads from, so their maps outlive it whatever is closed meanwhile.

What makes it fast is where the copies go: rows to convert into a piece of scratch memory that stays in a
core's second-level cache, all others to their final place, both on large pages that are used again
(`OutputMemory`). A copy's target must not begin less than a cache line behind its source within their pages:
AMD's processors then copy at a third of their rate (measured: 6.4 instead of 2.1 microseconds a row of 16
KiB). What `malloc` returns does so by chance.

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
from math import gcd, prod
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from shardkit.cache.rows import FetchedRows
from shardkit.errors import ShardError
from shardkit.loaders.streams import ReadRows, Streams

__all__ = ["FixedColumn", "FixedRows", "Gather", "OutputMemory"]

_MAX_SPAN = 1 << 62  # NumPy refuses arrays of 2**63 bytes; the one below would have span * row_bytes

_SCRATCH_BYTES = 512 << 10  # gathered, then converted: half of a core's second-level cache
_LEAST_UNIT = 256  # bytes; smaller copies take longer than a second copy of the whole rows
_CACHE_LINE = 64

_FETCHED_ROWS = 256  # of a plan, one by one: less than a second where each of two requests takes 25 ms

_LARGE_PAGE = 2 << 20
_ARENA_BYTES = 512 << 20  # of addresses, not of memory: twice what is prefetched
_MIN_BYTES, _MAX_BYTES = 64 << 10, 8 << 20  # below, malloc reuses memory by itself; above, faults are few

_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)

_Rows = npt.NDArray[np.generic]
_Bytes = npt.NDArray[np.uint8]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FixedColumn:
    """A column of constant size: its name in each stream, shape of a row, types as stored and delivered."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stored: np.dtype[np.generic]
    delivered: np.dtype[np.generic]


class FixedRows:
    """Reads columns of constant size, which are the same in all streams."""

    def __init__(self, streams: Streams, columns: Mapping[str, FixedColumn]) -> None:
        """`columns`: by the name under which a batch has them."""
        self._streams = streams
        self._columns = {name: _MappedColumn(streams, column) for name, column in columns.items()}

    def open_rows(self, shard: npt.NDArray[np.int32], row: npt.NDArray[np.int64]) -> tuple[ReadRows, bool]:
        """As `Source.open_rows`; maps the shards that are needed. ShardError if one is damaged."""
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
        """Of remote streams: (rows that were fetched one by one, by shard; whether to plan for less).

        Less, so that a batch does not wait for shards of later ones, nor for the rows of too many. A few rows
        of shards that find no room are no reason: that lasts, and plans of one batch each cost the most.
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
                is_late |= not all(map(reader.shards.has_no_room, missing))
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

    def __init__(self, streams: Streams, column: FixedColumn) -> None:
        self._streams = streams
        self._column = column
        self._row_bytes = column.stored.itemsize * prod(column.shape)
        self._gather = Gather(column.shape, column.stored, column.delivered)
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
        starts, strides = self._starts[used], self._strides[used]
        ends = starts + strides * np.fromiter(map(len, held), np.int64, len(held))
        if int(ends.max() - starts.min()) * self._row_bytes >= _MAX_SPAN:
            return _reader_by_shard(maps, self._column, shard, row)
        addresses = self._starts[shard] + row * self._strides[shard]
        return self._gather.bind(starts, ends, strides, addresses, held)

    def _fetched(self, number: int, some: FetchedRows) -> npt.NDArray[np.generic]:
        """The column in the rows that were fetched one by one; never mistaken for the shard's map later."""
        before, name = 0, self._column.names[self._streams.stream_of(number)]
        for column in self._streams.infos[number].columns:
            if column.name == name:
                break
            before += column.size or 0
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
        info, name = self._streams.infos[number], self._column.names[self._streams.stream_of(number)]
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
        self, shape: tuple[int, ...], stored: np.dtype[np.generic], delivered: np.dtype[np.generic]
    ) -> None:
        self.shape, self.stored, self.delivered = shape, stored, delivered
        self.row_bytes = stored.itemsize * prod(shape)
        # Made before shards are mapped: Linux maps from the top down, so that they lie below it.
        self.memory = OutputMemory()

    def bind(
        self, starts: _Ints, ends: _Ints, strides: _Ints, addresses: _Ints, held: list[_Rows]
    ) -> Callable[[int, int], _Rows]:
        """A function from (low, high) to the rows at `addresses[low:high]`.

        `starts`, `ends`, `strides`: of the shards, in bytes; `held`: the arrays that own their memory.
        """
        lowest = int(starts.min())
        anywhere = _runs(lowest, int(ends.max()), self.row_bytes, 1, held)
        unit = gcd(self.row_bytes, *strides.tolist())
        if unit and ((starts - lowest) % unit).any():
            unit = gcd(unit, mmap.PAGESIZE)
        if unit < _LEAST_UNIT:
            return _Reader(self, anywhere, addresses - lowest, None, None, np.arange(len(addresses))).read
        on_grid = self._largest_class(starts, ends, unit)
        origin, end = int(starts[on_grid].min()), int(ends[on_grid].max())
        places, apart = (addresses - origin) // unit, None
        if not on_grid.all():
            is_apart = (places * unit + origin != addresses) | (addresses < origin) | (addresses >= end)
            apart = np.flatnonzero(is_apart)
            places[apart] = 0
        grid = _runs(origin, end, unit, unit, held)
        return _Reader(self, anywhere, addresses - lowest, grid, places, apart).read

    def _largest_class(self, starts: _Ints, ends: _Ints, unit: int) -> npt.NDArray[np.bool_]:
        """Most shards whose rows begin at multiples of `unit` from one origin on.

        All on one side of the memory that is lent: NumPy copies twice if source and target might overlap.
        """
        first, last = self.memory.bounds
        is_around = int(starts.min()) < last and first < int(ends.max())
        classes = starts % unit * 2 + (starts >= first if is_around else 0)
        values, counts = np.unique(classes, return_counts=True)
        chosen: npt.NDArray[np.bool_] = classes == values[counts.argmax()]
        return chosen


class _Reader:
    """Reads the rows of one plan."""

    def __init__(
        self,
        gather: Gather,
        anywhere: npt.NDArray[np.void],
        offsets: _Ints,
        grid: npt.NDArray[np.void] | None,
        places: _Ints | None,
        apart: _Ints | None,
    ) -> None:
        """Row i is `anywhere[offsets[i]]`, and begins at `grid[places[i]]` unless i is in `apart`."""
        self._gather, self._anywhere, self._offsets, self._apart = gather, anywhere, offsets, apart
        self._grid, self._places = grid, places
        self._tile = max(1, _SCRATCH_BYTES // max(1, gather.row_bytes))
        self._scratch: _Rows | None = None
        self._shift = 0
        if grid is not None:
            self._units = np.arange(gather.row_bytes // grid.itemsize)
            align = gcd(grid.itemsize, mmap.PAGESIZE)
            if 0 < -int(grid.__array_interface__["data"][0]) % align < _CACHE_LINE < align:
                self._shift = _CACHE_LINE

    def read(self, low: int, high: int) -> _Rows:
        """Rows `low` to `high`, in memory that is lent."""
        gather = self._gather
        is_copied = gather.stored == gather.delivered
        shape = (high - low, *gather.shape)
        rows = gather.memory.lend(shape, gather.delivered, self._shift if is_copied else 0)
        if self._grid is not None and is_copied:
            self._copy(low, high, rows)
        elif self._grid is not None:
            if self._scratch is None:
                scratch = (self._tile, *gather.shape)
                self._scratch = gather.memory.lend(scratch, gather.stored, self._shift)
            for first in range(low, high, self._tile):
                last = min(first + self._tile, high)
                stored = self._scratch[: last - first]
                self._copy(first, last, stored)
                rows[first - low : last - low] = stored
        if self._apart is not None:
            first, last = np.searchsorted(self._apart, (low, high)).tolist()
            for start in range(first, last, self._tile):
                which = self._apart[start : min(start + self._tile, last)]
                found = self._anywhere[self._offsets[which]]
                rows[which - low] = found.view(gather.stored).reshape(-1, *gather.shape)
        return rows

    def _copy(self, low: int, high: int, target: _Rows) -> None:
        """Copy rows as they are stored, unit by unit."""
        assert self._grid is not None
        assert self._places is not None
        places = self._places[low:high]
        if len(self._units) > 1:
            places = (places[:, None] + self._units).reshape(-1)
        self._grid.take(places, out=target.reshape(-1).view(self._grid.dtype), mode="clip")


def _runs(first: int, end: int, run_bytes: int, step: int, held: list[_Rows]) -> npt.NDArray[np.void]:
    """The addresses from `first` to `end` as runs of bytes, each `step` bytes behind the one before."""
    return np.asarray(_Shown(first, (end - first - run_bytes) // step + 1, run_bytes, step, held))


class _Shown:
    """Shows NumPy runs of bytes at an address, and keeps the arrays that own them alive."""

    def __init__(self, address: int, count: int, run_bytes: int, step: int, held: list[_Rows]) -> None:
        self._held = held  # NumPy keeps this object as the base of the array
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": (count,),
            "strides": (step,),
            "typestr": f"|V{run_bytes}",
        }


class OutputMemory:
    """Lends arrays and reuses their memory. Threads may share it.

    Pieces have sizes of powers of two and come from one stretch of addresses; the system gives it memory
    where pieces are used, and has it back when the object and all that is lent are gone.
    """

    def __init__(self) -> None:
        self._arena = _large_pages(_ARENA_BYTES)
        self._carved = 0
        self._carving = threading.Lock()
        # Every other change is one atomic step of a dict or list: the garbage collector may come in between.
        self._free: defaultdict[int, list[_Bytes]] = defaultdict(list)
        self._lent: dict[int, tuple[weakref.ref[_Bytes], _Bytes, int]] = {}

    @property
    def bounds(self) -> tuple[int, int]:
        """The addresses between which all that is lent lies, except arrays that are too small or large."""
        first = int(self._arena.__array_interface__["data"][0])
        return first, first + len(self._arena)

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], shift: int = 0) -> _Rows:
        """An array of arbitrary content that belongs to the caller until it dies.

        It begins at a page, or `shift` (at most a cache line) bytes behind.
        """
        count = prod(shape) * dtype.itemsize
        size = 1 << (count - 1).bit_length()
        piece = self._take(size) if _MIN_BYTES <= count <= _MAX_BYTES else None
        if piece is None:
            return np.empty(shape, dtype)
        # Through a memoryview: what is made from `lent` then refers to `lent`, not to the piece under it.
        lent = np.frombuffer(piece.data, dtype=np.uint8)
        reference = weakref.ref(lent, self._take_back)
        self._lent[id(reference)] = (reference, piece, size)
        return lent[shift : shift + count].view(dtype).reshape(shape)

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
                start, self._carved = self._carved, self._carved + size + mmap.PAGESIZE
                piece = self._arena[start : start + size + _CACHE_LINE]
            return piece if len(piece) == size + _CACHE_LINE else None


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
