"""The exchange: moves everything that crosses splits from the tasks that make it to those that read it.

A *run* is one file of rows sorted by a uint64 key. Each map task writes one (`RunWriter`), `exchange` merges
many runs into few, and a reduce task reads one range of keys of these few runs (`Slice`). It is the
sorted-string table of an LSM tree, without updates:

    map      a run a task                          RunWriter: sorts in memory, spills, merges its own spills
    merge    64 runs -> one, cut into key ranges   a task a range, about 1 GiB each; again while runs are many
    reduce   a range of keys of <= 64 runs         Slice.read, Slice.stream

Without merging, reading S runs by R tasks takes S x R requests, which is what limits other designs. A merge
level costs one more reading and writing of all bytes in large requests, and divides the runs by 64; it is
left out where the pieces that readers get are large, or few. So requests grow with the bytes, not with S x R.

Guarantees: a reader sees the rows of its range in the order (key, number of the map task, order of writing),
whatever was merged. Which merges happen, their names and bytes follow from the runs and `Limits` alone, never
from workers. Reading and merging take bounded memory at any size. A file is blocks of rows followed by their
payload, and a footer with the keys, sizes and hash of each block; blocks grow with the file, so that a footer
stays below 64 KiB. Each block and footer that is read is compared with its hash.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from shardkit.errors import BuildError
from shardkit.hashing import digest_of
from shardkit.storage.threads import Workers
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, RunTasks, Task

__all__ = ["Batch", "Exchanged", "Limits", "RunWriter", "Segment", "Slice", "Table", "exchange"]

Rows = npt.NDArray[np.void]
Payload = npt.NDArray[np.uint8]
Batch = tuple[Rows, Payload]

_KEYS = 1 << 64

_MOST_BLOCKS = 1500  # in a file, so that a footer stays below 64 KiB

_BLOCK = np.dtype([("first", "<u8"), ("last", "<u8"), ("rows", "<u8"), ("payload", "<u8"), ("hash", "<u8")])

_TAIL = struct.Struct("<8sQ16s")  # magic, blocks, hash of the footer and of the type of the rows

_MAGIC = b"shardrun"

_GUESSED_BLOCKS = 16  # more than a file of its size should have: usually one request reads the footer


@dataclass(frozen=True)
class Table:
    """What is exchanged: name and row type of its runs.

    `dtype` has the field `key` (<u8), which sorts, and with `payload` the field `size` (<i8): bytes of
    payload that belong to the row. `origin` names an <i4 field that is filled with the number of the map task
    when its run is read: tasks must not know their own number, because an added input file changes it.
    """

    file: str
    dtype: np.dtype[np.void]
    payload: bool = False
    origin: str | None = None

    def __post_init__(self) -> None:
        fields = {"key": "<u8"} | ({"size": "<i8"} if self.payload else {})
        fields |= {self.origin: "<i4"} if self.origin else {}
        for name, kind in fields.items():
            assert name in (self.dtype.names or ()), (self.file, name)
            assert self.dtype[name] == np.dtype(kind), (self.file, name, self.dtype[name])

    @cached_property
    def layout(self) -> str:
        """What the bytes of a run mean."""
        return f"{self.dtype.descr} payload={self.payload}"


@dataclass(frozen=True)
class Limits:
    """Sizes that decide what is merged, and in which pieces files are read and written."""

    fan_in: int = 64  # runs that one task reads
    task_bytes: int = 1 << 30  # that a merge task writes, about
    least_segments: int = 256  # runs x readers that are never merged
    segment_bytes: int = 256 << 10  # least share of a run that a reader should get
    block_bytes: int = 256 << 10  # unit of reading and checking, in small files
    read_bytes: int = 4 << 20  # of one request
    reads_in_flight: int = 32
    merge_memory_bytes: int = 192 << 20  # of a merge task

    def merges(self, runs: int, bytes: int, readers: int) -> bool:
        """Whether so many runs of together `bytes` are too many for so many readers."""
        if runs <= 1:
            return False
        is_small = bytes < self.segment_bytes * runs * readers
        return runs > self.fan_in or (runs * readers > self.least_segments and is_small)


class RunWriter:
    """Writes one run of rows that come in any order; equal keys keep the order of writing.

    Rows are collected up to a third of `memory_bytes`, sorted, and spilled next to `path`; at the end the
    spills are merged. What fits into memory is written once.
    """

    def __init__(self, path: Path, table: Table, *, memory_bytes: int, limits: Limits = Limits()) -> None:
        self._path, self._table, self._limits = path, table, limits
        self._memory_bytes = memory_bytes
        self._pending: list[Batch] = []
        self._pending_bytes = 0
        self._spills: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def write(self, rows: npt.NDArray[Any], payload: Payload | None = None) -> None:
        """Append rows of the table's type, and their payloads one after the other."""
        assert rows.dtype == self._table.dtype, rows.dtype
        assert (payload is not None) == self._table.payload
        payload = np.empty(0, np.uint8) if payload is None else payload
        assert not self._table.payload or int(rows["size"].sum()) == len(payload)
        self._pending.append((rows.copy(), payload.copy()))
        self._pending_bytes += rows.nbytes + payload.nbytes
        if self._pending_bytes > self._memory_bytes // 3:
            self._spill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._spills:
            self._write_pending(self._path)
        elif kind is None:
            self._spill()
            self._merge_spills(self._path)
        for spill in self._spills:
            spill.unlink(missing_ok=True)

    def _spill(self) -> None:
        if len(self._spills) == self._limits.fan_in:
            merged = self._path.with_name(f".{self._path.name}.merged-{len(self._spills)}")
            self._merge_spills(merged)
            self._spills = [merged.rename(self._spills[0])]
        path = self._path.with_name(f".{self._path.name}.{len(self._spills)}")
        self._write_pending(path)
        self._spills.append(path)

    def _write_pending(self, path: Path) -> None:
        with _BlockWriter(path, self._table, self._pending_bytes, self._limits) as file:
            if self._pending:
                batch = _sorted(self._pending)
                self._pending, self._pending_bytes = [], 0
                file.write(*batch)

    def _merge_spills(self, target: Path) -> None:
        runs = [(Segment(Artifact(path), path.stat().st_size, "", 0, _KEYS),) for path in self._spills]
        spilled = Slice(self._table, tuple(runs), 0, _KEYS, self._limits)
        with _BlockWriter(target, self._table, spilled.bytes, self._limits) as file:
            for rows, payload in spilled.stream(self._memory_bytes):
                file.write(rows, payload)
        for path in self._spills:
            path.unlink()


class _BlockWriter:
    """Writes rows that come in order; the block size follows from `expected`, a bound on their bytes."""

    def __init__(self, path: Path, table: Table, expected: int, limits: Limits) -> None:
        self._table, self._file = table, path.open("wb")
        self._block_bytes = max(limits.block_bytes, -(-expected // _MOST_BLOCKS))
        self._pending: list[Batch] = []
        self._pending_bytes = 0
        self._blocks: list[tuple[int, ...]] = []
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def write(self, rows: Rows, payload: Payload) -> None:
        self._pending.append((rows, payload))
        self._pending_bytes += rows.nbytes + payload.nbytes
        if self._pending_bytes >= self._block_bytes:
            self._write_blocks(is_last=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._write_blocks(is_last=True)
                footer = np.array(self._blocks, _BLOCK).tobytes()
                tail = _TAIL.pack(_MAGIC, len(self._blocks), _footer_hash(footer, self._table))
                self._file.write(footer + tail)

    def _write_blocks(self, *, is_last: bool) -> None:
        rows, payload = _joined(self._pending, self._table)
        ends = _ends(rows, self._table)
        sizes = ends + np.arange(len(ends)) * rows.itemsize  # bytes of the rows before each, payload included
        at = 0
        while at < len(rows):
            cut = int(np.searchsorted(sizes, sizes[at] + self._block_bytes))
            if cut > len(rows):
                if not is_last:
                    break
                cut = len(rows)
            self._write_block(rows[at:cut], payload[ends[at] : ends[cut]])
            at = cut
        rest = rows[at:].copy(), payload[ends[at] :].copy()
        self._pending, self._pending_bytes = [rest], _nbytes(rest)

    def _write_block(self, rows: Rows, payload: Payload) -> None:
        hasher = xxhash.xxh3_64()
        for part in (np.ascontiguousarray(rows).view(np.uint8), payload):
            hasher.update(part.data)
            self._file.write(part.data)
        keys = rows["key"]
        self._blocks.append((int(keys[0]), int(keys[-1]), len(rows), len(payload), hasher.intdigest()))
        self.rows += len(rows)


@dataclass(frozen=True)
class Segment:
    """One file of a run: all of its rows with keys in [start, stop). `content` is the hash of the file."""

    file: Artifact
    bytes: int
    content: str
    start: int
    stop: int
    origin: int | None = None  # number of the map task; None once the rows hold it


@dataclass(frozen=True)
class Slice:
    """Rows with keys in [start, stop) of a few runs: plain data, the argument of a reduce task."""

    table: Table
    runs: tuple[tuple[Segment, ...], ...]
    start: int
    stop: int
    limits: Limits = Limits()

    @cached_property
    def digest(self) -> str:
        """Names the rows: what the reader's task names as its input."""
        files = [[[segment.content, segment.origin] for segment in run] for run in self.runs]
        return digest_of([self.table.layout, self.table.origin, str(self.start), str(self.stop), files])

    @property
    def bytes(self) -> int:
        """Size of the files that the rows are in."""
        return sum(segment.bytes for run in self.runs for segment in run)

    def read(self) -> Batch:
        """All rows in order, and their payloads in that order."""
        return _joined(list(self.stream(self.limits.merge_memory_bytes)), self.table)

    def stream(self, memory_bytes: int) -> Iterator[Batch]:
        """The rows in batches, in order, within about `memory_bytes`; the next ranges are read meanwhile.

        All rows of a key are in one batch, unless they alone are larger than half of the memory.
        """
        # Each run holds a chunk, the next ones are on their way, and a batch is copied twice.
        share = max(1, memory_bytes // (6 * max(1, len(self.runs))))
        chunk_bytes = min(share, self.limits.read_bytes)
        ahead = max(1, min(2 * share // chunk_bytes, self.limits.reads_in_flight // max(1, len(self.runs))))
        workers = Workers(self.limits.reads_in_flight)
        try:
            cursors = [_Cursor(run, self, workers, chunk_bytes, ahead) for run in self.runs]
            yield from _merged(cursors, memory_bytes // 2, self.table)
        finally:
            workers.close()


class Exchanged:
    """The merged runs, held by the driver."""

    def __init__(self, table: Table, runs: Sequence[tuple[Segment, ...]], limits: Limits) -> None:
        self.table, self.runs, self._limits = table, runs, limits
        self._stops = [[segment.stop for segment in run] for run in runs]
        self._starts = [[segment.start for segment in run] for run in runs]

    def slice(self, start: int, stop: int) -> Slice:
        """The rows with keys in [start, stop)."""
        found = []
        if start < stop:
            for run, starts, stops in zip(self.runs, self._starts, self._stops, strict=True):
                if part := run[bisect_right(stops, start) : bisect_left(starts, stop)]:
                    found.append(part)
        return Slice(self.table, tuple(found), start, stop, self._limits)


def exchange(
    run: RunTasks,
    stage: str,
    table: Table,
    maps: Sequence[Commit],
    *,
    readers: int,
    end: int = _KEYS,
    limits: Limits = Limits(),
) -> Exchanged:
    """Merge the runs of `maps` until each of `readers` tasks meets few and large ones.

    The readers get equal or similar shares of the keys [0, end). Merge tasks are stages `<stage>-merge-1`, ….
    """
    empty = _TAIL.size
    runs: list[tuple[Segment, ...]] = []
    for number, commit in enumerate(maps):
        output = commit.outputs[table.file]
        if output.bytes > empty:
            file = commit.files / table.file
            origin = None if table.origin is None else number
            runs.append((Segment(file, output.bytes, output.xxh3_128, 0, end, origin),))
    level = 0
    while limits.merges(len(runs), sum(s.bytes for segments in runs for s in segments), readers):
        level += 1
        runs = _merge_level(run, f"{stage}-merge-{level}", Exchanged(table, runs, limits), end)
    return Exchanged(table, runs, limits)


def _merge_level(run: RunTasks, stage: str, exchanged: Exchanged, end: int) -> list[tuple[Segment, ...]]:
    """Merge each group of runs into one, by as many tasks as keep each near `task_bytes`."""
    table, limits = exchanged.table, exchanged._limits
    config = {"table": table.file, "layout": table.layout, "limits": asdict(limits)}
    tasks, groups = [], []
    for number, first in enumerate(range(0, len(exchanged.runs), limits.fan_in)):
        group = Exchanged(table, exchanged.runs[first : first + limits.fan_in], limits)
        ranges = max(1, -(-sum(s.bytes for r in group.runs for s in r) // limits.task_bytes))
        edges = [end * part // ranges for part in range(ranges + 1)]
        groups.append(edges)
        for part in range(ranges):
            piece = group.slice(edges[part], edges[part + 1])
            name, inputs = f"{number:05d}.{part:05d}", {"runs": piece.digest}
            tasks.append(Task(stage, name, config, _merge, (piece,), piece.bytes, inputs))
    [commits] = run(tasks)
    found, left = [], iter(commits)
    for edges in groups:
        segments = []
        for start, stop in pairwise(edges):
            commit = next(left)
            output = commit.outputs[table.file]
            file = commit.files / table.file
            segments.append(Segment(file, output.bytes, output.xxh3_128, start, stop))
        found.append(tuple(segments))
    return found


def _merge(folder: Path, piece: Slice) -> dict[str, int]:
    """Write the rows of a range as one run."""
    with _BlockWriter(folder / piece.table.file, piece.table, piece.bytes, piece.limits) as file:
        for rows, payload in piece.stream(piece.limits.merge_memory_bytes):
            file.write(rows, payload)
    return {"rows": file.rows}


class _Cursor:
    """The rows of one run in a range, in order. Holds a chunk; the next ones are on their way."""

    def __init__(
        self, run: Sequence[Segment], piece: Slice, workers: Workers, chunk_bytes: int, ahead: int
    ) -> None:
        self._piece, self._workers = piece, workers
        self._chunk_bytes, self._ahead = chunk_bytes, ahead
        self._footers = deque([self._open(run[0])])
        self._chunks = self._plan(run)
        self._coming: deque[Future[Batch]] = deque()
        self._rows: Rows = np.empty(0, piece.table.dtype)
        self._payload: Payload = np.empty(0, np.uint8)
        self._keys: npt.NDArray[np.uint64] = self._rows["key"]
        self._ends = np.zeros(1, np.int64)
        self._at = 0

    @property
    def rest(self) -> int:
        return self._rows.size - self._at

    @property
    def last(self) -> int:
        return int(self._keys[-1])

    @property
    def is_last(self) -> bool:
        """Whether no chunk follows."""
        return not self._coming

    def fill(self) -> bool:
        """Have at least one row, and more than one key if there are more; False at the end."""
        while len(self._coming) < self._ahead and (chunk := next(self._chunks, None)) is not None:
            self._coming.append(chunk)
        while self._coming and (not self.rest or self._keys[self._at] == self._keys[-1]):
            had = self.rest
            rest = self._rows[self._at :], self._payload[self._ends[self._at] :]
            rows, payload = self._coming.popleft().result()
            self._set(*_joined([rest, (rows, payload)], self._piece.table) if had else (rows, payload))
            if (chunk := next(self._chunks, None)) is not None:
                self._coming.append(chunk)
            if had and len(rows):
                break
        return self.rest > 0

    def take(self, key: int | None, side: Literal["left", "right"]) -> Batch:
        """The rows below `key` (side "left"), or up to and with it ("right"); all without a key."""
        stop = len(self._rows)
        if key is not None:
            stop = int(np.searchsorted(self._keys, np.uint64(key), side=side))
        begin, self._at = self._at, max(stop, self._at)
        return self._rows[begin:stop], self._payload[self._ends[begin] : self._ends[self._at]]

    def _set(self, rows: Rows, payload: Payload) -> None:
        self._rows, self._payload, self._at = rows, payload, 0
        self._keys = np.ascontiguousarray(rows["key"])
        self._ends = _ends(rows, self._piece.table)

    def _plan(self, run: Sequence[Segment]) -> Iterator[Future[Batch]]:
        """Begin to read one chunk after the other."""
        for number, segment in enumerate(run):
            footer = self._footers.popleft().result()
            if number + 1 < len(run):
                self._footers.append(self._open(run[number + 1]))
            first, stop = footer.blocks_of(self._piece.start, self._piece.stop)
            while first < stop:
                most = footer.offsets[first] + self._chunk_bytes
                last = min(stop, max(first + 1, int(np.searchsorted(footer.offsets, most, side="right")) - 1))
                yield self._workers.submit(partial(_read_blocks, segment, footer, first, last, self._piece))
                first = last

    def _open(self, segment: Segment) -> Future[_Footer]:
        return self._workers.submit(partial(_read_footer, segment, self._piece))


@dataclass(frozen=True)
class _Footer:
    blocks: npt.NDArray[np.void]
    offsets: npt.NDArray[np.int64]  # of each block, and of the footer
    end: bytearray  # of the file: what was read with the footer

    def blocks_of(self, start: int, stop: int) -> tuple[int, int]:
        """[first, stop) of the blocks with keys in [start, stop)."""
        first = np.searchsorted(self.blocks["last"], np.uint64(start))
        after = np.searchsorted(self.blocks["first"], np.uint64(stop - 1), side="right")
        return int(first), int(after)


def _read_footer(segment: Segment, piece: Slice) -> _Footer:
    limits, size = piece.limits, segment.bytes
    blocks = min(_MOST_BLOCKS, size // limits.block_bytes) + _GUESSED_BLOCKS
    guess = blocks * _BLOCK.itemsize + _TAIL.size
    if size <= limits.block_bytes + guess:
        guess = size
    end = segment.file.read_range(max(0, size - guess), size)
    problem = (
        f"{segment.file}: not a finished run of {piece.table.file}; remove the work folder and build again"
    )
    if len(end) < _TAIL.size:
        raise BuildError(problem)
    magic, count, digest = _TAIL.unpack(end[-_TAIL.size :])
    needed = count * _BLOCK.itemsize + _TAIL.size
    if magic != _MAGIC or needed > size:
        raise BuildError(problem)
    if needed > len(end):
        end = segment.file.read_range(size - needed, size)
    data = end[len(end) - needed : -_TAIL.size]
    table = np.frombuffer(data, _BLOCK)
    sizes = table["rows"] * np.uint64(piece.table.dtype.itemsize) + table["payload"]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes).astype(np.int64)])
    if _footer_hash(data, piece.table) != digest or offsets[-1] != size - needed:
        raise BuildError(problem)
    return _Footer(table, offsets, end)


def _read_blocks(segment: Segment, footer: _Footer, first: int, stop: int, piece: Slice) -> Batch:
    """The rows of blocks [first, stop) that are in the range of keys."""
    start, end = int(footer.offsets[first]), int(footer.offsets[stop])
    begin = segment.bytes - len(footer.end)  # where `footer.end` begins
    data = footer.end[start - begin : end - begin] if start >= begin else segment.file.read_range(start, end)
    view, parts = memoryview(data), list[Batch]()
    for number in range(first, stop):
        at, after = (int(footer.offsets[n]) - start for n in (number, number + 1))
        block = footer.blocks[number]
        if xxhash.xxh3_64_intdigest(view[at:after]) != block["hash"]:
            raise BuildError(
                f"{segment.file}: bytes {start + at:,} to {start + after:,} differ from their hash; remove "
                f"the work folder and build again"
            )
        middle = at + int(block["rows"]) * piece.table.dtype.itemsize
        parts.append(
            (np.frombuffer(view[at:middle], piece.table.dtype), np.frombuffer(view[middle:after], np.uint8))
        )
    rows, payload = _joined(parts, piece.table)
    keys = np.ascontiguousarray(rows["key"])
    cut = slice(
        int(np.searchsorted(keys, np.uint64(piece.start))),
        int(np.searchsorted(keys, np.uint64(piece.stop - 1), side="right")),
    )
    ends = _ends(rows, piece.table)
    rows, payload = rows[cut], payload[ends[cut.start] : ends[cut.stop]]
    if piece.table.origin is not None and segment.origin is not None:
        rows = rows.copy()
        rows[piece.table.origin] = segment.origin
    return rows, payload


def _merged(cursors: Sequence[_Cursor], most_bytes: int, table: Table) -> Iterator[Batch]:
    """Merge runs: rows that no later chunk can precede are complete, and are sorted together."""
    while cursors := [cursor for cursor in cursors if cursor.fill()]:
        bound = min((cursor.last for cursor in cursors if not cursor.is_last), default=None)
        pieces = [piece for cursor in cursors if len((piece := cursor.take(bound, "left"))[0])]
        if pieces:
            yield _sorted(pieces)
        else:
            assert bound is not None
            yield from _one_key(cursors, bound, most_bytes, table)


def _one_key(cursors: Sequence[_Cursor], key: int, most_bytes: int, table: Table) -> Iterator[Batch]:
    """The rows of a key that has more of them than a chunk, run by run."""
    pieces, held = list[Batch](), 0
    for cursor in cursors:
        while True:
            pieces.append(cursor.take(key, "right"))
            held += _nbytes(pieces[-1])
            if held >= most_bytes:
                yield _joined(pieces, table)
                pieces, held = [], 0
            if cursor.rest or not cursor.fill():
                break
    if held:
        yield _joined(pieces, table)


def _sorted(pieces: Sequence[Batch]) -> Batch:
    """All rows of `pieces` by key; equal keys in the order of the pieces."""
    rows = np.concatenate([rows for rows, _ in pieces])
    payload = np.concatenate([payload for _, payload in pieces])
    keys = rows["key"]
    if len(pieces) == 1 and (keys[1:] >= keys[:-1]).all():
        return rows, payload
    order = np.argsort(keys, kind="stable")
    if len(payload):
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows["size"])])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(payload)]
        taken = pa.Array.from_buffers(pa.large_binary(), len(rows), buffers).take(pa.array(order))
        payload = np.frombuffer(taken.buffers()[2], np.uint8, len(payload))
    return rows[order], payload


def _joined(pieces: Sequence[Batch], table: Table) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    rows = [np.empty(0, table.dtype), *(rows for rows, _ in pieces)]
    return np.concatenate(rows), np.concatenate([np.empty(0, np.uint8), *(payload for _, payload in pieces)])


def _ends(rows: Rows, table: Table) -> npt.NDArray[np.int64]:
    """int64[len(rows) + 1]: where the payload of each row begins, and the end."""
    ends = np.zeros(len(rows) + 1, np.int64)
    if table.payload:
        np.cumsum(rows["size"], out=ends[1:])
    return ends


def _nbytes(batch: Batch) -> int:
    return batch[0].nbytes + batch[1].nbytes


def _footer_hash(footer: bytes | bytearray, table: Table) -> bytes:
    return xxhash.xxh3_128_digest(bytes(footer) + table.layout.encode())
