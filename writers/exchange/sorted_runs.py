"""The format of runs: files of rows sorted by key, whose key ranges can be read separately.

A file is blocks of packed rows (packing.py), each followed by its payloads, and a footer with the keys, sizes
and hash of each block. The block size, of rows in memory, grows with the file, so that a footer stays below
64 KiB (192 KiB in a merged run of rows that pack well) and usually takes one request.
All data read is verified: blocks by the hashes in the footer, the footer by the hash after it. Sorting,
merging and their tasks are in exchange.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
import xxhash

from shardkit.errors import BuildError
from shardkit.writers.exchange.packing import pack, unpack
from shardkit.writers.execution.artifacts import RUN_SUFFIX, Artifact
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes

Rows = npt.NDArray[np.void]
Payload = npt.NDArray[np.uint8]
Batch = tuple[Rows, Payload]

_MOST_BLOCKS = 1500  # maximum number of blocks in a file, if `expected` is right (`BlockWriter`)

_BLOCK = np.dtype(
    [
        ("first", "<u8"),  # keys
        ("last", "<u8"),
        ("rows", "<u4"),
        ("packed", "<u4"),  # bytes of the packed rows
        ("payload", "<u8"),  # bytes of the payloads
        ("hash", "<u8"),  # xxh3-64 of both
    ]
)

_TAIL = struct.Struct("<8sQ16s")  # magic, number of blocks, hash of the footer and of the table's layout

EMPTY_BYTES = _TAIL.size  # size of a run without rows

_FOOTER_HASH_BYTES = 16  # size of the hash that is the last field of the tail

_MAGIC = b"shardrow"

_LEAST_TASKS = 64  # number of tasks that a small build should have, for machines of many cores
_MANY_TASKS = 4096  # number of tasks that a build of 128 GB to 16 TB should have; a larger one has more
_DOCUMENT_BYTES = 2048
_BLOCKS_IN_PLACE = 4  # blocks per usual block, if a table is read in place: fewer rows of other ranges

_GUESSED_BLOCKS = 32  # added to the expected number of blocks, so that one request reads the whole footer


@dataclass(frozen=True)
class Table:
    """A kind of exchanged rows: the file name and the row dtype of its runs.

    `dtype` has the sort key in field `key` (<u8) and, with `payload`, the size of the row's payload in field
    `size` (<i8, bytes). `origin` names an <i4 field that readers set to the number of the map task that wrote
    the row. The task itself must not write it: its number changes when input files are added. Runs of a table
    that is read `in_place` are merged only for very small pieces (addresses.py); their blocks are smaller.
    `packed` is the share of a row's bytes that it takes in a run, about, for the plan of a build: hashes, and
    0.25 for numbers of documents.

    Runs are removed when their last readers are finished, except those of a table that `stays`: it is small,
    and was made from all texts, which another setting or added inputs should not make read again.
    """

    file: str
    dtype: np.dtype[np.void]
    payload: bool = False
    origin: str | None = None
    stays: bool = False
    in_place: bool = False
    packed: float = 0.6

    def __post_init__(self) -> None:
        fields = {"key": "<u8"} | ({"size": "<i8"} if self.payload else {})
        fields |= {self.origin: "<i4"} if self.origin else {}
        assert self.file.endswith(RUN_SUFFIX), self.file
        for name, kind in fields.items():
            assert name in (self.dtype.names or ()), (self.file, name)
            assert self.dtype[name] == np.dtype(kind), (self.file, name, self.dtype[name])

    @property
    def name(self) -> str:
        """The file name of the table's runs without the extension."""
        return self.file.removesuffix(RUN_SUFFIX)

    @cached_property
    def void(self) -> np.dtype[np.void]:
        """The dtype of rows as plain bytes, which NumPy copies several times as fast as fields."""
        return np.dtype((np.void, self.dtype.itemsize))

    @property
    def row_bytes(self) -> float:
        """About how many bytes a row takes in a run."""
        return self.packed * self.dtype.itemsize

    @cached_property
    def layout(self) -> str:
        """A description of the bytes of a run: the fields of a row, and whether it has payloads."""
        return f"{self.dtype.descr} payload={self.payload}"


_NoByte = Annotated[int, DecidesNoByte("only affects which tasks there are, or how much is read at a time")]


@dataclass(frozen=True)
class Limits:
    """Sizes that determine which runs are merged, and the units of reading and writing."""

    fan_in: _NoByte = 64  # maximum number of runs that one task reads
    task_bytes: _NoByte = 1 << 30  # approximate output of a merge task
    partition_bytes: _NoByte = 100 << 20  # approximate input of a reading task; small, so no worker is idle
    least_segments: _NoByte = 64  # with no more requests than this (runs * readers), runs are never merged
    segment_bytes: _NoByte = 4 << 20  # bytes that a merge can copy in the time of one request
    piece_bytes: _NoByte = 256 << 10  # least piece to read in place: smaller ones cost more than a merge
    block_bytes: int = 256 << 10  # size of a block, the unit of reading and verifying; larger in large files
    read_bytes: _NoByte = 16 << 20  # maximum size of one request
    reads_in_flight: _NoByte = 32  # maximum number of concurrent requests
    merge_memory_bytes: MemoryBytes = 192 << 20  # memory of a merge task that reads from a store
    local_memory_bytes: MemoryBytes = (
        64 << 20
    )  # memory of a merge task that reads local files: less, because small local reads cost little
    read_memory_bytes: MemoryBytes = 64 << 20  # memory of `Slice.read` in addition to its result
    gather_bytes: _NoByte = 4 << 30  # maximum kept text of splits that are joined (stages/gather.py)
    gather_splits: _NoByte = 32  # no fewer small splits in a row are joined: their tasks take few seconds

    def within(self, memory_bytes: int) -> Limits:
        """Return limits with larger requests if `memory_bytes` is large; the bytes of runs stay the same."""
        merge = max(self.merge_memory_bytes, memory_bytes // 2)
        read = max(self.read_memory_bytes, memory_bytes // 8)
        return replace(self, merge_memory_bytes=merge, read_memory_bytes=read)

    def divided(self, by: int) -> Limits:
        """Return limits with all sizes divided by `by`, for tests in which little data behaves like much."""
        sizes = {f.name: getattr(self, f.name) // by for f in fields(self) if f.name.endswith("_bytes")}
        return replace(self, **sizes)

    def partitions(self, rows: int, dtype: np.dtype[np.void]) -> int:
        """Return the number of reading tasks for `rows` rows, so that each reads about `partition_bytes`."""
        return max(1, -(-rows * dtype.itemsize // self.partition_bytes))

    def gathered(self, kept_bytes: int) -> int:
        """Return the bytes of text that joined splits should have together, if all splits keep `kept_bytes`.

        It is a power of two, so that a few more input files rarely change it.
        """
        wanted = max(min(kept_bytes // _LEAST_TASKS, self.gather_bytes >> 7), kept_bytes // _MANY_TASKS)
        wanted = min(max(wanted, self.gather_bytes >> 12), self.gather_bytes)
        return 1 << max(0, wanted - 1).bit_length()

    def gathered_weight(self, documents: int, bytes: int, wanted: int) -> int:
        """Return the bytes that a split counts among splits that are joined to have `wanted` bytes.

        Documents count as at least 2 KiB, because later tasks hold some bytes for each, and a split as at
        least 1/1024 of `wanted`, because a task opens all of its files.
        """
        return max(bytes, _DOCUMENT_BYTES * documents, wanted >> 10)

    def chunk_bytes(self, memory_bytes: int, runs: int) -> int:
        """Return the size of a chunk, which one request reads, if `runs` runs are read within `memory_bytes`.

        Per run, a reader keeps up to 1.5 chunks, prefetches one, and copies rows into a batch.
        """
        return min(max(1, memory_bytes // (4 * max(1, runs))), self.read_bytes)

    def merge_tasks(self, bytes: int) -> int:
        """Return the number of tasks, one per key range, that merge a group of runs with `bytes` in total."""
        return max(1, -(-bytes // self.task_bytes))

    def merges(self, runs: int, bytes: int, readers: int, *, in_place: bool = False) -> bool:
        """Return whether `runs` runs of `bytes` in total should be merged for `readers` tasks."""
        if runs > self.fan_in and not in_place:
            return True
        saved = runs * readers - runs - readers  # number of requests that a merge into one run saves
        piece = self.piece_bytes if in_place else self.segment_bytes
        return self.has_addresses(runs, readers) and bytes < piece * saved

    def has_addresses(self, runs: int, readers: int) -> bool:
        """Return whether reading `runs` runs by `readers` tasks takes many requests: see addresses.py."""
        return runs * readers > self.least_segments

    def block_bytes_in(self, table: Table, bytes: int) -> int:
        """Return the size of a block in a run of `table` with `bytes` in all."""
        if table.in_place:
            return max(1, self.block_bytes // _BLOCKS_IN_PLACE)
        return max(self.block_bytes, -(-bytes // _MOST_BLOCKS))


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Segment:
    """A file with all rows of a run whose keys are in [start, stop); `content` is the file's hash."""

    file: Artifact
    bytes: int
    content: str
    start: int
    stop: int
    origin: int | None = None  # number of the map task; None if the rows already contain it
    consumed: bool = False  # whether the file goes as soon as the stage that reads this segment is finished


class BlockWriter:
    """Writes sorted rows as a run file. `expected`, an upper bound of their bytes, sets the block size."""

    def __init__(self, path: Path, table: Table, expected: int, limits: Limits) -> None:
        self._table, self._file = table, path.open("wb")
        self._block_bytes = limits.block_bytes_in(table, expected)
        self._pending: list[Batch] = []
        self._pending_bytes = 0
        self._blocks: list[tuple[int, ...]] = []
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def write(self, rows: Rows, payload: Payload) -> None:
        ends = payload_ends(rows, self._table)
        sizes = ends + np.arange(len(ends)) * rows.itemsize  # bytes before each row, including payloads
        at = 0
        while at < len(rows):
            cut = int(np.searchsorted(sizes, sizes[at] + self._block_bytes - self._pending_bytes))
            cut = min(max(cut, at + 1), len(rows))
            piece = rows[at:cut], payload[ends[at] : ends[cut]]
            self._pending_bytes += int(sizes[cut] - sizes[at])
            is_full = self._pending_bytes >= self._block_bytes
            self._pending.append(piece if is_full else (piece[0].copy(), piece[1].copy()))
            if is_full:
                self._write_block()
            at = cut

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                if self._pending:
                    self._write_block()
                footer = np.array(self._blocks, _BLOCK).tobytes()
                tail = _TAIL.pack(_MAGIC, len(self._blocks), _footer_hash(footer, self._table))
                self._file.write(footer + tail)

    def _write_block(self) -> None:
        hasher = xxhash.xxh3_64()
        rows, payload = joined(self._pending, self._table)
        packed = pack(rows)
        for part in (packed, payload):
            hasher.update(part.data)
            self._file.write(part.data)
        keys = int(rows["key"][0]), int(rows["key"][-1])
        self._blocks.append((*keys, len(rows), len(packed), len(payload), hasher.intdigest()))
        self._pending, self._pending_bytes = [], 0
        self.rows += len(rows)


class Chunk:
    """Consecutive rows of a run in memory; `take` removes rows from the front."""

    def __init__(self, rows: Rows, payload: Payload, table: Table) -> None:
        self._rows, self._payload, self._at = rows, payload, 0
        self._ends = payload_ends(rows, table)
        self.keys: npt.NDArray[np.uint64] = np.ascontiguousarray(rows["key"])

    @property
    def key(self) -> int:
        return int(self.keys[self._at])

    @property
    def rest_bytes(self) -> int:
        rows = len(self.keys) - self._at
        return rows * self._rows.itemsize + int(self._ends[-1] - self._ends[self._at])

    def take(self, key: int | None, side: Literal["left", "right"]) -> Batch:
        begin, self._at = self._at, len(self.keys)
        if key is not None:
            self._at = max(begin, int(self.keys.searchsorted(np.uint64(key), side)))
        return self._rows[begin : self._at], self._payload[self._ends[begin] : self._ends[self._at]]


@dataclass(frozen=True)
class Footer:
    blocks: npt.NDArray[np.void]
    offsets: npt.NDArray[np.int64]  # offset of each block, and of the footer, in the file
    held: npt.NDArray[np.int64]  # bytes in memory of all rows and payloads before each block, and in all
    end: Payload  # the last bytes of the file, which were read to get the footer; may include blocks

    def blocks_of(self, keys: range) -> tuple[int, int]:
        """Return (first, stop), the range of the numbers of blocks that may have keys in `keys`."""
        first = np.searchsorted(self.blocks["last"], np.uint64(keys.start))
        after = np.searchsorted(self.blocks["first"], np.uint64(keys.stop - 1), side="right")
        return int(first), int(after)

    def blocks_with(self, keys: npt.NDArray[np.uint64], gap_bytes: int, most_bytes: int) -> list[slice]:
        """Return which blocks to read together to find ascending `keys`.

        Up to `gap_bytes` that have none of them are read, too, rather than in two reads. A read has up to
        `most_bytes`, or one block.
        """
        first = np.searchsorted(keys, self.blocks["first"])
        wanted = np.flatnonzero(first < np.searchsorted(keys, self.blocks["last"], "right"))
        gaps = self.offsets[wanted[1:]] - self.offsets[wanted[:-1] + 1]
        reads = list[slice]()
        for block, gap in zip(wanted.tolist(), [0, *gaps.tolist()], strict=False):
            begin = reads[-1].start if reads else block
            is_near = gap <= gap_bytes and self.offsets[block + 1] - self.offsets[begin] <= most_bytes
            if reads and is_near:
                reads[-1] = slice(begin, block + 1)
            else:
                reads.append(slice(block, block + 1))
        return reads


def read_footer(segment: Segment, table: Table, limits: Limits) -> Footer:
    """Read and verify a file's footer, or a small file whole; in two requests if it has many small blocks."""
    size = segment.bytes
    in_memory = size if table.payload else int(1.5 * size / table.packed)
    blocks = in_memory // limits.block_bytes_in(table, size) + _GUESSED_BLOCKS
    needed = blocks * _BLOCK.itemsize + _TAIL.size
    if size <= limits.block_bytes + needed:
        needed = size
    is_right = partial(_ends_with_footer, table=table, size=size)
    end = segment.file.read_range(max(0, size - needed), size, is_right)
    if (footer_bytes := _footer_bytes(end)) > len(end):
        end = segment.file.read_range(size - footer_bytes, size, is_right)
    found = end[len(end) - _footer_bytes(end) : -_TAIL.size].copy().view(_BLOCK)
    rows = found["rows"].astype(np.int64) * table.dtype.itemsize
    held = np.cumsum(rows + found["payload"].astype(np.int64))
    return Footer(found, _offsets(found), np.concatenate([np.zeros(1, np.int64), held]), end)


def _footer_bytes(end: Payload) -> int:
    magic, blocks, _ = _TAIL.unpack(end[-_TAIL.size :].tobytes())
    return blocks * _BLOCK.itemsize + _TAIL.size if magic == _MAGIC else 0


def _ends_with_footer(end: Payload, table: Table, size: int) -> bool:
    """Return whether a run of `size` bytes may end with `end`: its footer is valid, or begins before that."""
    if len(end) < _TAIL.size or not _TAIL.size <= (needed := _footer_bytes(end)) <= size:
        return False
    if needed > len(end):
        return True
    data = end[len(end) - needed : -_TAIL.size].tobytes()
    blocks = np.frombuffer(data, _BLOCK)
    if end[-_FOOTER_HASH_BYTES:].tobytes() != _footer_hash(data, table):
        return False
    # The file may come from elsewhere: reject large numbers, so that the sums in `_offsets` cannot overflow.
    is_possible = max(int(blocks[name].max(initial=0)) for name in ("rows", "packed", "payload")) <= size
    return is_possible and int(_offsets(blocks)[-1]) == size - needed


def _offsets(blocks: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    sizes = blocks["packed"] + blocks["payload"]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes).astype(np.int64)])


def _footer_hash(blocks: bytes, table: Table) -> bytes:
    return xxhash.xxh3_128_digest(blocks + table.layout.encode())


def read_blocks(segment: Segment, footer: Footer, blocks: slice, table: Table, keys: range) -> Chunk:
    """Read and verify the blocks with the numbers `blocks`; return their rows with keys in `keys`."""
    listed, edges = footer.blocks[blocks], footer.offsets[blocks.start : blocks.stop + 1]
    start, stop = int(edges[0]), int(edges[-1])
    begin = segment.bytes - len(footer.end)  # offset of `footer.end` in the file
    is_right = partial(have_hashes, edges=(edges - start).tolist(), hashes=listed["hash"].tolist())
    data = footer.end[max(0, start - begin) : max(0, stop - begin)]
    is_own = len(data) < stop - start or not is_right(data)  # not read with the footer, or read wrong
    if is_own:
        data = segment.file.read_range(start, stop, is_right)
    stored = zip((edges - start).tolist(), listed["packed"].tolist(), listed["rows"].tolist(), strict=False)
    pieces = []
    for (place, packed, count), after in zip(stored, (edges[1:] - start).tolist(), strict=True):
        piece = unpacked(data[place : place + packed], count, table, segment.file)
        pieces.append((piece, data[place + packed : after]))
    rows, payload = joined(pieces, table)
    first_row = int(rows["key"].searchsorted(np.uint64(keys.start)))
    stop_row = int(rows["key"].searchsorted(np.uint64(keys.stop - 1), "right"))
    ends = payload_ends(rows, table)
    rows, payload = rows[first_row:stop_row], payload[ends[first_row] : ends[stop_row]]
    if table.origin is not None and segment.origin is not None:
        rows[table.origin] = segment.origin
    return Chunk(rows, payload, table)


def rows_of_keys(
    segment: Segment, footer: Footer, blocks: slice, table: Table, keys: npt.NDArray[np.uint64]
) -> Rows:
    """Read and verify blocks, as `read_blocks` does; return their rows with one of the ascending `keys`."""
    chunk = read_blocks(segment, footer, blocks, table, range(int(keys[0]), int(keys[-1]) + 1))
    rows, _ = chunk.take(None, "left")
    found = np.ascontiguousarray(rows["key"])
    if (found[1:] < found[:-1]).any():
        raise BuildError(f"{segment.file}: its keys are not sorted; {segment.file.remedy}")
    places = np.minimum(np.searchsorted(keys, found), len(keys) - 1)
    wanted: Rows = rows[keys[places] == found]
    return wanted


def unpacked(data: Payload, count: int, table: Table, file: Artifact) -> Rows:
    """Return the `count` rows of a block of `file`. Raises BuildError if there are not so many."""
    try:
        return unpack(data, count, table.dtype)
    except ValueError as error:
        raise BuildError(f"{file}: {error}; {file.remedy}") from None


def have_hashes(data: Payload, edges: Sequence[int], hashes: Sequence[int]) -> bool:
    """Return whether the blocks between `edges` in `data` have these hashes."""
    return all(
        xxhash.xxh3_64_intdigest(data[start:stop].data) == expected
        for (start, stop), expected in zip(pairwise(edges), hashes, strict=True)
    )


def joined(pieces: Sequence[Batch], table: Table) -> Batch:
    if len(pieces) == 1:
        return pieces[0]
    rows = [np.empty(0, table.void), *(rows.view(table.void) for rows, _ in pieces)]
    payloads = [np.empty(0, np.uint8), *(payload for _, payload in pieces)]
    return np.concatenate(rows).view(table.dtype), np.concatenate(payloads)


def payload_ends(rows: Rows, table: Table) -> npt.NDArray[np.int64]:
    """Return int64[len(rows) + 1]: the offset of each payload, and their total size; may be read-only."""
    if not table.payload:
        return np.broadcast_to(np.int64(0), len(rows) + 1)  # takes the memory of one number
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(rows["size"], out=ends[1:])
    return ends


def nbytes(batch: Batch) -> int:
    return batch[0].nbytes + batch[1].nbytes
