"""Columns of constant size, gathered from memory maps with no Python per sample.

Every row of such a column is one run of bytes at (start of its shard) + (row) * (stride of its shard). So all
mapped shards are read through one array whose element i is the row that begins i bytes after the lowest map.
Indexing it with byte offsets gathers rows of any shards, in any order, in one call that copies each row once.
(Grouping rows by shard first costs a call per shard and a second copy: 0.65 of a plain gather's rate,
measured; this: 1.0 to 1.1.)

What makes it safe: offsets are computed from (shard, row) here and nowhere else; when a shard is mapped,
shape and type of its rows are checked against the manifest, from which all row numbers come; and what reads
the rows holds the arrays that it reads from, so their maps outlive it whatever is closed meanwhile.

`Gather` copies with one core, or with torch's threads (`index_select`, without Python's lock) where that is
faster: one core copies random rows of 8 KiB at half of the memory's rate, two idle cores at all of it, but
threads that must wait for a core take many times longer. So both ways are timed, the faster one is used, and
the other is tried again, less often each time it loses. Several cores are used only by a loop that does
nothing but read: in a background thread or a forked child, torch's threads would be in the way or missing.
Nothing here imports torch: where the program has not, one core copies.

`OutputMemory` reuses the memory of dead batches. Fresh memory costs a page fault for every 4 KiB, as much as
copying a row into it, and small pages evict one another from a core's cache: on reused large pages,
converting rows is up to 1.4 times as fast. A lent array is taken back when it and everything made from it
(views, tensors, batches) are garbage, and not before, because NumPy and torch keep it alive as the base of
what shows its memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from shardkit.cache.rows import FetchedRows
from shardkit.errors import ShardError
from shardkit.loaders.streams import ReadRows, Streams

if TYPE_CHECKING:
    import torch

__all__ = ["FixedColumn", "FixedRows", "Gather", "OutputMemory"]

_MAX_SPAN = 1 << 62  # NumPy refuses arrays of 2**63 bytes; the one below would have span * row_bytes

_CAST_BYTES = 256 << 10  # gathered, then converted: both fit a core's second-level cache
_SHARED_BYTES = 256 << 10  # smaller gathers end before a second thread has begun
_TRIAL = 6  # gathers
_HOPELESS = 4  # times as slow
_PATIENCE = 256  # gathers until the slower way is tried again
_MOST_PATIENCE = 1 << 16

_FETCHED_ROWS = 256  # of a plan, one by one: less than a second where each of two requests takes 25 ms

_KEPT = 8  # free pieces kept: those beyond were a peak
_LARGE_PAGE = 2 << 20
_SLAB_BYTES = 8 << 20  # carved into pieces
_MIN_BYTES, _MAX_BYTES = 64 << 10, _SLAB_BYTES  # below, malloc reuses memory by itself; above, faults are few

_PROCESS = os.getpid()

_Rows = npt.NDArray[np.generic]
_Bytes = npt.NDArray[np.uint8]


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
        self,
        shape: tuple[int, ...],
        stored: np.dtype[np.generic],
        delivered: np.dtype[np.generic],
        *,
        shared_bytes: int = _SHARED_BYTES,
    ) -> None:
        """`shared_bytes`: smaller gathers are left to one core."""
        self._shared_bytes = shared_bytes
        self._shape, self._stored, self._delivered = shape, stored, delivered
        self._row_bytes = stored.itemsize * prod(shape)
        self._output = OutputMemory()
        self._choice = _Choice()
        self._scratch: torch.Tensor | None = None

    def bind(
        self, lowest: int, span: int, held: list[npt.NDArray[np.generic]]
    ) -> Callable[[npt.NDArray[np.int64]], _Rows]:
        """A function from byte offsets to rows within `span` bytes from address `lowest`.

        The function keeps `held`, the arrays that own the memory, alive.
        """
        places = span - self._row_bytes + 1
        memory = np.asarray(_Stretch(lowest, (places,), (1,), f"|V{self._row_bytes}", held))
        shared = np.asarray(_Stretch(lowest, (places, self._row_bytes), (1, 1), "|u1", held))

        def gather(offsets: npt.NDArray[np.int64]) -> _Rows:
            if not self._may_share(len(offsets)):
                return self._by_one(memory, offsets)
            by_several = self._choice.next()
            start = time.perf_counter()
            rows = self._by_several(shared, offsets) if by_several else self._by_one(memory, offsets)
            self._choice.took(by_several, (time.perf_counter() - start) / len(offsets))
            return rows

        return gather

    def _may_share(self, rows: int) -> bool:
        torch = sys.modules.get("torch")
        return (
            rows * self._row_bytes >= self._shared_bytes
            and torch is not None
            and threading.current_thread() is threading.main_thread()
            and os.getpid() == _PROCESS
            and self._stored.isnative
            and hasattr(torch, self._stored.name)
            and int(torch.get_num_threads()) > 1
        )

    def _by_one(self, memory: npt.NDArray[np.void], offsets: npt.NDArray[np.int64]) -> _Rows:
        if self._stored == self._delivered:
            return memory[offsets].view(self._stored).reshape(-1, *self._shape)
        rows = self._output.lend((len(offsets), *self._shape), self._delivered)
        step = max(1, _CAST_BYTES // self._row_bytes)
        for start in range(0, len(offsets), step):
            piece = memory[offsets[start : start + step]]
            rows[start : start + step] = piece.view(self._stored).reshape(-1, *self._shape)
        return rows

    def _by_several(self, shared: _Bytes, offsets: npt.NDArray[np.int64]) -> _Rows:
        torch = sys.modules["torch"]
        memory, index = torch.from_numpy(shared), torch.from_numpy(offsets)
        shape = (len(offsets), *self._shape)
        rows = self._output.lend(shape, self._delivered)
        if self._stored == self._delivered:
            raw = rows.reshape(len(offsets), -1).view(np.uint8)
            torch.index_select(memory, 0, index, out=torch.from_numpy(raw))
            return rows
        if self._scratch is None or len(self._scratch) < len(offsets):
            self._scratch = torch.empty((len(offsets), self._row_bytes), dtype=torch.uint8)
        scratch = self._scratch[: len(offsets)]
        torch.index_select(memory, 0, index, out=scratch)
        stored = getattr(torch, self._stored.name)
        torch.from_numpy(rows).copy_(scratch.view(stored).reshape(shape))
        return rows


class _Choice:
    """Chooses between one core (0) and several (1), by what both took lately.

    A trial of the other way is a few gathers in a row, because sleeping threads wake slowly; it ends early
    when one takes `_HOPELESS` times as long.
    """

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0]
        self._quicker = 0
        self._patience = _PATIENCE
        self._until_trial = 8
        self._trial: list[float] = []

    def next(self) -> int:
        """0: one core, 1: several."""
        if self._until_trial > 0:
            self._until_trial -= 1
            return self._quicker
        return 1 - self._quicker

    def took(self, way: int, seconds: float) -> None:
        usual = self._seconds[self._quicker]
        if way == self._quicker:
            self._seconds[way] = 0.75 * usual + 0.25 * seconds if usual else seconds
            if self._seconds[1 - way] and self._seconds[way] > 2 * self._seconds[1 - way]:
                self._until_trial = 0  # it has become slow: try the other again
            return
        self._trial.append(seconds)
        is_hopeless = seconds > _HOPELESS * usual and (way == 0 or len(self._trial) > 1)
        if len(self._trial) < _TRIAL and not is_hopeless:
            return
        self._seconds[way] = seconds if is_hopeless else min(self._trial)
        won = self._seconds[way] < usual
        self._patience = _PATIENCE if won else min(2 * self._patience, _MOST_PATIENCE)
        self._until_trial = self._patience
        self._quicker = way if won else self._quicker
        self._trial = []


class _Stretch:
    """Shows NumPy a stretch of address space as overlapping rows: one starts at every byte."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], kind: str, held: list[Any]
    ) -> None:
        self._held = held  # the arrays that own the memory; NumPy keeps this object as the view's base
        # "Writable", because torch warns of arrays that are not; nothing here writes to it.
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": kind,
        }


class OutputMemory:
    """Lends arrays and reuses their memory. Threads may share it."""

    def __init__(self) -> None:
        # Every change is one atomic step of a dict or deque: the garbage collector may come in between.
        self._free: deque[_Bytes] = deque(maxlen=_KEPT)
        self._lent: dict[int, tuple[weakref.ref[_Bytes], _Bytes]] = {}
        self._slab: _Bytes = np.empty(0, dtype=np.uint8)

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        """An array of arbitrary content that belongs to the caller until it dies."""
        count = prod(shape) * dtype.itemsize
        if not _MIN_BYTES <= count <= _MAX_BYTES:
            return np.empty(shape, dtype)
        piece = self._take(count)
        # Through a memoryview: what is made from `lent` then refers to `lent`, not to the piece under it.
        lent = np.frombuffer(piece.data, dtype=np.uint8)
        reference = weakref.ref(lent, self._take_back)
        self._lent[id(reference)] = (reference, piece)
        return lent[:count].view(dtype).reshape(shape)

    def converted(self, rows: _Rows, dtype: np.dtype[np.generic]) -> _Rows:
        """`rows` in another type, in an array that is lent; `rows` themselves if they have that type."""
        if rows.dtype == dtype and rows.flags.c_contiguous:
            return rows
        lent = self.lend(rows.shape, dtype)
        lent[...] = rows
        return lent

    def _take_back(self, died: weakref.ref[_Bytes]) -> None:
        self._free.append(self._lent.pop(id(died))[1])

    def _take(self, count: int) -> _Bytes:
        try:
            piece = self._free.pop()
        except IndexError:
            return self._carve(count)
        return piece if len(piece) >= count else self._carve(count)

    def _carve(self, count: int) -> _Bytes:
        slab = self._slab
        if len(slab) < count:
            slab = _large_pages(_SLAB_BYTES)
        rounded = min(len(slab), -(-count // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._slab = slab[rounded:]
        return slab[:rounded]


def _large_pages(count: int) -> _Bytes:
    """`count` bytes of zeros, on large pages if the system has them."""
    memory = mmap.mmap(-1, count + _LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % _LARGE_PAGE
    return whole[start : start + count]
