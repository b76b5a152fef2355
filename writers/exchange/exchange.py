"""The exchange: moves rows between splits, from the tasks that write them to the tasks that read them.

A *run* is one file of rows sorted by a uint64 key. Each map task writes one (`RunWriter`), `exchange` merges
many runs into few, and a reduce task reads one range of keys of these few runs (`Slice`). It is the
sorted-string table of an LSM tree, without updates:

    map      one run per task                      RunWriter: sorts in memory, spills, merges its own spills
    merge    64 runs -> one, cut into key ranges   one task per range of about 1 GiB; repeated for many runs
    reduce   a range of keys of <= 64 runs         Slice.read, Slice.stream

Without merging, R tasks that read S runs need S x R requests, which is the limit of other designs. A merge
level reads and writes all bytes once more, in large requests, and divides the number of runs by 64; it is
skipped if readers get large pieces, or few. So requests grow with the bytes, not with S x R.

Guarantees: a reader sees the rows of its range in the order (key, number of the map task, order of writing),
for any merges. The merges, their names and their bytes depend only on the runs and `Limits`, never on
workers. Reading and merging take bounded memory at any size. The format of runs is in sorted_runs.py.

Runs are read by one stage unless the code says otherwise, and are removed when its tasks are finished, as are
merged runs: a `Slice` names the files that its task consumes. If several stages read the same runs, all but
the last are given `consumed=False`, in `exchange` or `Exchanged.slice`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.hashing import digest_of
from shardkit.kernels.text_arrays import copy_texts
from shardkit.storage.threads import Workers
from shardkit.writers.exchange.sorted_runs import (
    DEFAULT_LIMITS,
    EMPTY_BYTES,
    Batch,
    BlockWriter,
    Chunk,
    Footer,
    Limits,
    Payload,
    Rows,
    Segment,
    Table,
    joined,
    nbytes,
    payload_ends,
    read_blocks,
    read_footer,
    rows_of_keys,
)
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.stage import RunTasks, Stage
from shardkit.writers.kernels.sorting import argsort_keys

__all__ = ["Batch", "Exchanged", "Limits", "RunWriter", "Segment", "Slice", "StepReader", "Table", "exchange"]

_KEYS = 1 << 64

LOCAL_READS = 4  # concurrent reads of files on this machine

_LOCAL_REQUESTS = 16  # reads of a file on this machine that cost as much as a request to a store

_GAP_BYTES = 64 << 10  # bytes of an object in a store that cost less than another request

_SORT_BYTES = 24  # memory to sort a row, in addition to two copies of the row


class RunWriter:
    """Sorts rows that come in any order and writes them as one run; rows with equal keys keep their order.

    Rows are collected while they can be sorted in two thirds of `memory_bytes`, then written to a temporary
    file, a spill, next to `path`. As soon as there are `fan_in` spills of a level, they are merged into one
    spill of the next level, so a row is written once per level. If all rows fit into memory, there are no
    spills. The bytes of the run do not depend on `memory_bytes`.
    """

    def __init__(
        self, path: Path, table: Table, *, memory_bytes: int, limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._path, self._table, self._limits = path, table, limits
        self._memory_bytes = memory_bytes
        self._pending: list[Batch] = []
        self._sorting_bytes = self._bytes = 0
        self._levels: list[list[Path]] = [[]]  # spills, merged spills, ..., each in the order of writing
        self._spills = 0
        # A merge keeps some blocks of each spill in memory, so small memory needs small blocks.
        block_bytes = min(limits.block_bytes, max(1, memory_bytes // (8 * limits.fan_in)))
        self._spill_limits = replace(limits, block_bytes=block_bytes)

    def __enter__(self) -> Self:
        return self

    def write(self, rows: npt.NDArray[Any], payload: Payload | None = None) -> None:
        """Add rows of the table's dtype, and their concatenated payloads if the table has payloads."""
        assert rows.dtype == self._table.dtype, rows.dtype
        assert (payload is not None) == self._table.payload
        payload = np.empty(0, np.uint8) if payload is None else payload
        assert not self._table.payload or int(rows["size"].sum()) == len(payload)
        self._pending.append((rows.view(self._table.void).copy().view(rows.dtype), payload.copy()))
        self._sorting_bytes += 2 * (rows.nbytes + payload.nbytes) + _SORT_BYTES * len(rows)
        self._bytes += rows.nbytes + payload.nbytes
        if self._sorting_bytes > self._memory_bytes * 2 // 3:
            self._spill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._spills:
            self._write_pending(self._path, self._limits)
        elif kind is None:
            self._spill()
            for level in range(len(self._levels) - 1):
                if sum(map(len, self._levels)) > self._limits.fan_in:
                    self._merge_level(level)
            spills = [path for level in reversed(self._levels) for path in level]
            self._merge(spills, self._path, self._limits)
        for path in chain.from_iterable(self._levels):
            path.unlink(missing_ok=True)

    def _spill(self) -> None:
        path = self._new_spill(0)
        self._write_pending(path, self._spill_limits)
        level = 0
        while len(self._levels[level]) == self._limits.fan_in:
            self._merge_level(level)
            level += 1

    def _new_spill(self, level: int) -> Path:
        path = self._path.with_name(f".{self._path.name}.{self._spills}")
        self._spills += 1
        if level == len(self._levels):
            self._levels.append([])
        self._levels[level].append(path)
        return path

    def _merge_level(self, level: int) -> None:
        if spills := self._levels[level]:
            self._merge(spills, self._new_spill(level + 1), self._spill_limits)
            self._levels[level] = []

    def _write_pending(self, path: Path, limits: Limits) -> None:
        with BlockWriter(path, self._table, self._bytes, limits) as file:
            if self._pending:
                batch = _sorted(self._pending, self._table)
                self._pending, self._sorting_bytes = [], 0
                file.write(*batch)

    def _merge(self, spills: Sequence[Path], target: Path, limits: Limits) -> None:
        spilled = Slice.whole(self._table, [Artifact(path) for path in spills], self._spill_limits)
        with BlockWriter(target, self._table, self._bytes, limits) as file:
            for rows, payload in spilled.stream(self._memory_bytes * 2 // 3):
                file.write(rows, payload)
        for path in spills:
            path.unlink()


@dataclass(frozen=True)
class Slice:
    """The rows of a few runs with keys in [start, stop). It is plain data, to be an argument of a task."""

    table: Table
    runs: tuple[tuple[Segment, ...], ...]
    start: int
    stop: int
    limits: Limits = DEFAULT_LIMITS
    is_last: bool = True

    @classmethod
    def whole(cls, table: Table, files: Sequence[Artifact], limits: Limits = DEFAULT_LIMITS) -> Slice:
        """Return the slice of all rows of some runs."""
        runs = tuple((Segment(file, file.size(), "", 0, _KEYS),) for file in files)
        return cls(table, runs, 0, _KEYS, limits)

    @cached_property
    def content(self) -> str:
        """A digest that identifies the rows, for the digest of the task that reads them."""
        files = [[[segment.content, segment.origin] for segment in run] for run in self.runs]
        layout = [self.table.layout, self.table.origin, self.limits.block_bytes]
        return digest_of([*layout, str(self.start), str(self.stop), files])

    def within(self, start: int, stop: int) -> Slice:
        """Return the part of this slice with keys in [start, stop), which must be within its own range."""
        runs = [tuple(s for s in run if s.start < stop and start < s.stop) for run in self.runs]
        return replace(self, runs=tuple(filter(None, runs)), start=start, stop=stop)

    @property
    def consumed(self) -> Iterator[Artifact]:
        """The files that no stage reads after the one that this slice is an argument of."""
        if self.is_last:
            yield from (segment.file for run in self.runs for segment in run if segment.consumed)

    @property
    def bytes(self) -> int:
        """Total size in bytes of the files that have the rows; they may have rows of other keys too."""
        return sum(segment.bytes for run in self.runs for segment in run)

    def read(self) -> Batch:
        """Return (rows, payloads) of the whole slice, in order. Memory: one copy and some megabytes."""
        rows, payload = bytearray(), bytearray()  # grow in place; NumPy 2.5 copies an array to resize it
        for more, texts in self.stream(self.limits.read_memory_bytes):
            rows += more.view(np.uint8).data
            payload += texts.data
        return np.frombuffer(rows, self.table.dtype), np.frombuffer(payload, np.uint8)

    @property
    def is_local(self) -> bool:
        """Whether all files are on this machine."""
        return all(segment.file.remote is None for run in self.runs for segment in run)

    def stream(self, memory_bytes: int) -> Iterator[Batch]:
        """Yield the rows in order, in batches of (rows, payloads), within about `memory_bytes` of memory.

        All rows with the same key are in one batch, unless they exceed a quarter of the memory.
        """
        chunk_bytes = self.limits.chunk_bytes(memory_bytes, len(self.runs))
        share = memory_bytes // (4 * max(1, len(self.runs)))
        ahead = max(1, min(share // chunk_bytes, self.limits.reads_in_flight // max(1, len(self.runs))))
        # The C library keeps the memory that a thread frees for this thread, so local reads use few threads.
        workers = Workers(LOCAL_READS if self.is_local else self.limits.reads_in_flight)
        cursors = [_Cursor(run, self, workers, chunk_bytes, ahead) for run in self.runs]
        yield from _merged(cursors, memory_bytes // 4, self.table)

    def matching(self, keys: npt.NDArray[np.uint64]) -> Rows:
        """Return the rows with these keys, which must ascend strictly and be in the slice's range.

        Reads only the blocks that can have one of the keys, and blocks between two of them if that is cheaper
        than another request. The rows are in the order (key, run, row); memory is not limited.
        """
        workers = Workers(LOCAL_READS if self.is_local else self.limits.reads_in_flight)
        gap_bytes = 0 if self.is_local else _GAP_BYTES
        segments = [segment for run in self.runs for segment in run]
        met = [(s, some) for s in segments if len(some := _between(keys, s.start, s.stop))]
        reads = [workers.submit(partial(read_footer, segment, self.table, self.limits)) for segment, _ in met]
        chunks = list[Future[Rows]]()
        for (segment, some), footer in zip(met, reads, strict=True):
            for blocks in footer.result().blocks_with(some, gap_bytes, self.limits.read_bytes):
                wanted = partial(rows_of_keys, segment, footer.result(), blocks, self.table, some)
                chunks.append(workers.submit(wanted))
        found = np.concatenate([np.empty(0, self.table.dtype), *(chunk.result() for chunk in chunks)])
        return found if len(self.runs) == 1 else found[np.argsort(found["key"], kind="stable")]


def _between(keys: npt.NDArray[np.uint64], start: int, stop: int) -> npt.NDArray[np.uint64]:
    first, last = np.searchsorted(keys, np.uint64(start)), np.searchsorted(keys, np.uint64(stop - 1), "right")
    return keys[first:last]


@dataclass(frozen=True, slots=True)
class Unread:
    """Runs that no task needs any more, as an argument of a task: they go when it is finished."""

    consumed: tuple[Artifact, ...]

    @classmethod
    def of(cls, table: Table, written: Sequence[Commit]) -> Self:
        """Return the runs of a table that tasks wrote."""
        return cls(tuple(commit.file(table.file) for commit in written))


class StepReader:
    """Reads a slice in key order while the caller visits the items that keys number; holds one batch."""

    def __init__(self, piece: Slice, memory_bytes: int) -> None:
        self._batches = piece.stream(memory_bytes)
        self._held = np.empty(0, piece.table.dtype)

    def before(self, key: int) -> Rows:
        """Return the rows with keys below `key` that were not returned before."""
        found = [self._held[:0].copy()]
        while True:
            count = int(np.searchsorted(self._held["key"], np.uint64(key)))
            found.append(self._held[:count])
            self._held = self._held[count:]
            if len(self._held) or (batch := next(self._batches, None)) is None:
                return np.concatenate(found)
            self._held = batch[0]


class Exchanged:
    """The merged runs of an exchange, which the driver cuts into slices, one per reading task."""

    def __init__(self, table: Table, runs: Sequence[tuple[Segment, ...]], limits: Limits) -> None:
        self.table, self.runs, self._limits = table, runs, limits
        self._stops = [[segment.stop for segment in run] for run in runs]
        self._starts = [[segment.start for segment in run] for run in runs]

    def slice(self, start: int, stop: int, *, consumed: bool = True) -> Slice:
        """Return the slice of the rows with keys in [start, stop).

        With `consumed=False`, another stage will read slices of these runs later, so their files stay.
        """
        found = []
        if start < stop:
            for run, starts, stops in zip(self.runs, self._starts, self._stops, strict=True):
                if part := run[bisect_right(stops, start) : bisect_left(starts, stop)]:
                    found.append(part)
        return Slice(self.table, tuple(found), start, stop, self._limits, consumed)


def exchange(
    run: RunTasks,
    reader: Stage[..., Any],
    table: Table,
    maps: Sequence[Commit | Segment],
    *,
    readers: int,
    end: int = _KEYS,
    limits: Limits = DEFAULT_LIMITS,
    consumed: bool = True,
) -> Exchanged:
    """Merge the runs that tasks wrote (`maps`) until each of `readers` tasks reads few and large files.

    The readers are expected to read equal or similar shares of the keys [0, end). A row with a larger key is
    an error when it is read. Merges run as stages `<reader>-<table>-merge-1`, `-merge-2` and so on. A
    `Segment` in `maps` is a run that no task of this build wrote. With `consumed=False`, the runs in `maps`
    are exchanged again later, so they stay.
    """
    runs: list[tuple[Segment, ...]] = []
    for number, written in enumerate(maps):
        if isinstance(written, Segment):
            segment = written
        else:
            segment = replace(_written_by(written, table), consumed=consumed and not table.stays)
        if segment.bytes > EMPTY_BYTES:
            origin = None if table.origin is None else number
            runs.append((replace(segment, start=0, stop=end, origin=origin),))
    if all(segment.file.remote is None for segments in runs for segment in segments):
        limits = replace(limits, segment_bytes=limits.segment_bytes // _LOCAL_REQUESTS)
    level = 0
    while limits.merges(
        len(runs), sum(s.bytes for segments in runs for s in segments), readers, in_place=table.in_place
    ):
        level += 1
        stage = Stage(f"{reader.name}-{table.name}-merge-{level}", reader.title, _merge)
        runs = _merge_level(run, stage, Exchanged(table, runs, limits), end)
    return Exchanged(table, runs, limits)


def _written_by(commit: Commit, table: Table) -> Segment:
    output = commit.outputs[table.file]
    return Segment(commit.file(table.file), output.bytes, output.xxh3_128, 0, _KEYS)


def _merge_level(
    run: RunTasks, stage: Stage[[Slice], None], exchanged: Exchanged, end: int
) -> list[tuple[Segment, ...]]:
    """Merge each group of `fan_in` runs into one run, by one task per key range of about `task_bytes`."""
    table, limits = exchanged.table, exchanged._limits
    tasks, groups = [], []
    for number, first in enumerate(range(0, len(exchanged.runs), limits.fan_in)):
        group = Exchanged(table, exchanged.runs[first : first + limits.fan_in], limits)
        ranges = limits.merge_tasks(sum(s.bytes for r in group.runs for s in r))
        edges = [end * part // ranges for part in range(ranges + 1)]
        groups.append(edges)
        for part in range(ranges):
            piece = group.slice(edges[part], edges[part + 1])
            tasks.append(stage.task(f"{number:05d}.{part:05d}", piece.bytes, piece))
    [commits] = run(tasks)
    found, left = [], iter(commits)
    for edges in groups:
        segments = []
        for start, stop in pairwise(edges):
            commit = next(left)
            output = commit.outputs[table.file]
            file = commit.file(table.file)
            segments.append(Segment(file, output.bytes, output.xxh3_128, start, stop, consumed=True))
        found.append(tuple(segments))
    return found


def _merge(folder: Path, piece: Slice) -> None:
    """Write the rows of a slice as one run; the work function of merge tasks."""
    limits = piece.limits
    memory_bytes = limits.local_memory_bytes if piece.is_local else limits.merge_memory_bytes
    with BlockWriter(folder / piece.table.file, piece.table, piece.bytes, limits) as file:
        for rows, payload in piece.stream(memory_bytes):
            file.write(rows, payload)


class _Cursor:
    """Reads the rows of one run in a key range, in order. Keeps one or two chunks and prefetches others."""

    def __init__(
        self, run: Sequence[Segment], piece: Slice, workers: Workers, chunk_bytes: int, ahead: int
    ) -> None:
        self._piece, self._workers, self._file = piece, workers, run[0].file
        self._chunk_bytes, self._ahead = chunk_bytes, ahead
        self._footers = deque([self._open(run[0])])
        self._chunks = self._plan(run)
        self._coming: deque[Future[Chunk]] = deque()
        self._held: deque[Chunk] = deque()
        self._last = 0  # the last key that was read, to check the order

    @property
    def last(self) -> int | None:
        """The last key in memory; None if all remaining rows are in memory."""
        return int(self._held[-1].keys[-1]) if self._coming else None

    def fill(self, *, two_keys: bool = True) -> bool:
        """Load rows up to half a chunk, or a whole chunk if all have one key. Return False at the end."""
        while True:
            while len(self._coming) < self._ahead and (coming := next(self._chunks, None)) is not None:
                self._coming.append(coming)
            held = sum(chunk.rest_bytes for chunk in self._held)
            has_one_key = not held or self._held[0].key == self._held[-1].keys[-1]
            most = self._chunk_bytes if two_keys and has_one_key else self._chunk_bytes // 2
            is_enough = held >= most
            if not self._coming or is_enough:
                return bool(self._held)
            chunk = self._coming.popleft().result()
            if len(chunk.keys):
                if chunk.key < self._last or (chunk.keys[1:] < chunk.keys[:-1]).any():
                    raise BuildError(f"{self._file}: its keys are not sorted; {self._file.remedy}")
                self._held.append(chunk)
                self._last = int(chunk.keys[-1])

    def take(self, key: int | None, side: Literal["left", "right"] = "left") -> list[Batch]:
        """Take the loaded rows with keys below `key`; with side "right", also `key`; all if it is None."""
        taken = []
        while self._held:
            taken.append(self._held[0].take(key, side))
            if self._held[0].rest_bytes:
                break
            self._held.popleft()
        return [piece for piece in taken if len(piece[0])]

    def _plan(self, run: Sequence[Segment]) -> Iterator[Future[Chunk]]:
        """Yield a future for each chunk of the run, in order; its read starts when it is yielded."""
        piece = self._piece
        keys = range(piece.start, piece.stop)
        for number, segment in enumerate(run):
            footer = self._footers.popleft().result()
            if len(footer.blocks):
                last = int(footer.blocks["last"][-1])
                assert last < segment.stop, f"{segment.file}: key {last} is beyond the range of all readers"
            if number + 1 < len(run):
                self._footers.append(self._open(run[number + 1]))
            first, stop = footer.blocks_of(keys)
            while first < stop:
                most = footer.held[first] + self._chunk_bytes
                last = min(stop, max(first + 1, int(np.searchsorted(footer.held, most, side="right")) - 1))
                yield self._workers.submit(
                    partial(read_blocks, segment, footer, slice(first, last), piece.table, keys)
                )
                first = last

    def _open(self, segment: Segment) -> Future[Footer]:
        return self._workers.submit(partial(read_footer, segment, self._piece.table, self._piece.limits))


def _merged(cursors: Sequence[_Cursor], most_bytes: int, table: Table) -> Iterator[Batch]:
    """Merge runs: repeatedly sort and yield the loaded rows with keys below all rows not yet loaded."""
    while cursors := [cursor for cursor in cursors if cursor.fill()]:
        bound = min((last for cursor in cursors if (last := cursor.last) is not None), default=None)
        if pieces := [piece for cursor in cursors for piece in cursor.take(bound)]:
            yield _sorted(pieces, table)
        else:
            assert bound is not None
            yield from _one_key(cursors, bound, most_bytes, table)


def _one_key(cursors: Sequence[_Cursor], key: int, most_bytes: int, table: Table) -> Iterator[Batch]:
    """Yield the rows of one key, run by run; for a key with more rows than a cursor keeps in memory."""
    pieces, held = list[Batch](), 0
    for cursor in cursors:
        while cursor.fill(two_keys=False) and (more := cursor.take(key, "right")):
            pieces += more
            held += sum(nbytes(piece) for piece in more)
            if held >= most_bytes:
                yield joined(pieces, table)
                pieces, held = [], 0
    if pieces:
        yield joined(pieces, table)


def _sorted(pieces: Sequence[Batch], table: Table) -> Batch:
    """Return all rows of `pieces` sorted by key; equal keys stay in the order of the pieces."""
    keys = np.concatenate([rows["key"] for rows, _ in pieces])
    if (keys[1:] >= keys[:-1]).all():
        return joined(pieces, table)
    _, order = argsort_keys(keys)
    to = np.empty(len(order), np.int64)
    to[order] = np.arange(len(order))
    del keys, order
    rows, at = np.empty(len(to), table.void), 0
    for part, _ in pieces:
        here = to[at : at + len(part)]
        rows[here] = part.view(table.void)
        at += len(part)
    found = rows.view(table.dtype)
    if not table.payload:
        return found, np.empty(0, np.uint8)
    starts, at = payload_ends(found, table), 0
    texts = np.empty(starts[-1], np.uint8)
    for part, payload in pieces:
        here = to[at : at + len(part)]
        sizes = np.ascontiguousarray(part["size"])
        copy_texts(payload, np.cumsum(sizes) - sizes, sizes, texts, starts[here])
        at += len(part)
    return found, texts
