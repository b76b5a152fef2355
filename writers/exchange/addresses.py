"""Moves payloads once: a reader takes them from the runs that map tasks wrote, by the addresses of blocks.

A merge of runs reads and writes all their bytes once more. For rows with long payloads, such as the tokens of
documents, that is most of what a large build moves, and a reader that holds its rows in memory needs no
order. So the runs of a `Table` that is read `in_place` stay as they are, and only addresses are exchanged:

    map       one run per task, in blocks of 64 KiB     RunWriter
    address   footers of runs -> rows of ADDRESSES      one task per 64 GiB of runs
    merge     of addresses only, 40 bytes per block     the exchange
    reduce    one range of keys of all runs             Pieces.read: about one request per run

There are `ranges` equal ranges of keys, one per reader; `range_start` and `range_of` define them. A block
with keys of several ranges has an address for each, and their readers drop the rows of others. If the pieces
that readers take from each run were smaller than `Limits.piece_bytes`, the exchange has merged the runs
before, so requests grow with the bytes. A reader's memory is its rows, their addresses (0.1 %), and what is
on its way (`Limits.read_memory_bytes`), for any number of runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.hashing import digest_of
from shardkit.storage.threads import Workers
from shardkit.writers.exchange.exchange import LOCAL_READS, Exchanged, RunWriter, Slice, exchange
from shardkit.writers.exchange.sorted_runs import (
    Batch,
    Limits,
    Rows,
    Segment,
    Table,
    have_hashes,
    payload_ends,
    read_footer,
    unpacked,
)
from shardkit.writers.execution.artifacts import Artifact, Files
from shardkit.writers.execution.digests import MemoryBytes
from shardkit.writers.execution.stage import RunTasks, Stage, Task

ADDRESSES = Table(
    "addresses.run",
    np.dtype(
        [
            ("key", "<u8"),  # first key of a range in which the block has rows
            ("file", "<i4"),
            ("rows", "<i4"),
            ("packed", "<i4"),  # bytes of the packed rows
            ("bytes", "<i8"),  # of the whole block
            ("offset", "<i8"),
            ("hash", "<u8"),  # xxh3-64 of the block
        ]
    ),
)
_RUNS_PER_TASK = 64  # of `Limits.task_bytes`: a task that reads footers only reads those of many runs


def range_of(keys: npt.NDArray[np.uint64], ranges: int) -> npt.NDArray[np.int64]:
    """Return the range of each key, int64[n]: its upper 32 bits scaled to [0, ranges)."""
    scaled = (keys >> np.uint64(32)) * np.uint64(ranges)
    return (scaled >> np.uint64(32)).astype(np.int64)


def range_start(number: int, ranges: int) -> int:
    """Return the first key of a range (see `range_of`); 2^64 for `number` == `ranges`."""
    return -(-(number << 32) // ranges) << 32


def _files_of(segments: Sequence[Segment]) -> Files:
    return Files.of([s.file for s in segments], digest_of([segment.content for segment in segments]))


@dataclass(frozen=True)
class Pieces:
    """The rows with keys in [start, stop) of the runs `files`, found by their addresses. It is plain data."""

    table: Table
    addresses: Slice
    files: Files
    start: int
    stop: int
    is_last: bool = True

    @cached_property
    def content(self) -> str:
        """A digest that identifies the rows, for the digest of the task that reads them."""
        edges = [str(self.start), str(self.stop)]
        return digest_of([self.table.layout, *edges, self.addresses.content, self.files.content])

    @property
    def consumed(self) -> Iterator[Artifact | Files]:
        """The files that no stage reads after the one that these pieces are an argument of."""
        yield from self.addresses.consumed
        if self.is_last:
            yield self.files

    def read(self) -> Batch:
        """Return (rows, payloads), in the order of runs and keys. Memory: one copy and some megabytes."""
        blocks, _ = self.addresses.read()
        blocks = blocks[np.lexsort((blocks["offset"], blocks["file"]))]
        rows = np.empty(int(blocks["rows"].sum()), self.table.void)
        payload = np.empty(int((blocks["bytes"] - blocks["packed"]).sum()), np.uint8)
        row = at = 0
        for some, texts in self._fetched(blocks):
            rows[row : row + len(some)] = some.view(self.table.void)
            payload[at : at + len(texts)] = texts
            row, at = row + len(some), at + len(texts)
        return rows[:row].view(self.table.dtype), payload[:at]

    def _fetched(self, blocks: Rows) -> Iterator[Batch]:
        """Yield the rows of each block within the range, with a few requests in flight."""
        limits = self.addresses.limits
        in_flight = limits.reads_in_flight if self.files.remote is not None else LOCAL_READS
        workers, coming, held = Workers(in_flight), deque[Any](), 0
        for request in _requests(blocks, limits.read_bytes):
            size = int(request["bytes"].sum())
            while coming and (len(coming) == in_flight or held + size > limits.read_memory_bytes):
                done, arrived = coming.popleft()
                yield from self._rows(*arrived.result())
                held -= done
            file = self.files[int(request["file"][0])]
            coming.append((size, workers.submit(partial(_read, file, request))))
            held += size
        for _, arrived in coming:
            yield from self._rows(*arrived.result())

    def _rows(self, blocks: Rows, data: npt.NDArray[np.uint8]) -> Iterator[Batch]:
        at, file = 0, self.files[int(blocks["file"][0])]
        for count, packed, size in blocks[["rows", "packed", "bytes"]].tolist():
            rows = unpacked(data[at : at + packed], count, self.table, file)
            first = int(rows["key"].searchsorted(np.uint64(self.start)))
            stop = int(rows["key"].searchsorted(np.uint64(self.stop - 1), "right"))
            ends = payload_ends(rows, self.table) + (at + packed)
            yield rows[first:stop], data[ends[first] : ends[stop]]
            at += size


def _requests(blocks: Rows, most: int) -> Iterator[Rows]:
    """Yield blocks in groups that one request reads: adjacent ones of a file, up to `most` bytes."""
    ends = blocks["offset"] + blocks["bytes"]
    is_new = (blocks["file"][1:] != blocks["file"][:-1]) | (blocks["offset"][1:] != ends[:-1])
    edges = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(blocks)]
    for first, stop in pairwise(edges):
        while first < stop:
            fits = int(np.searchsorted(ends[first:stop], blocks["offset"][first] + most, side="right"))
            yield blocks[first : first + max(1, fits)]
            first += max(1, fits)


def _read(file: Artifact, blocks: Rows) -> tuple[Rows, npt.NDArray[np.uint8]]:
    """Read and verify adjacent blocks in one request."""
    start = int(blocks["offset"][0])
    edges = [*(blocks["offset"] - start).tolist(), int(blocks["offset"][-1] + blocks["bytes"][-1]) - start]
    is_right = partial(have_hashes, edges=edges, hashes=blocks["hash"].tolist())
    return blocks, file.read_range(start, start + edges[-1], is_right)


@dataclass(frozen=True)
class Addressed:
    """The runs of an exchange, read in place, which the driver cuts into pieces, one per reading task."""

    table: Table
    addresses: Exchanged
    files: Files
    consumed: bool

    def slice(self, start: int, stop: int, *, consumed: bool = True) -> Pieces:
        """Return the rows with keys in [start, stop), which must be one of the ranges.

        With `consumed=False`, another stage will read the runs later, so their files stay.
        """
        addresses = self.addresses.slice(start, stop, consumed=consumed)
        return Pieces(self.table, addresses, self.files, start, stop, consumed and self.consumed)


def exchange_in_place(
    run: RunTasks,
    reader: Stage[..., Any],
    exchanged: Exchanged,
    ranges: int,
    *,
    memory_bytes: int,
    limits: Limits,
    consumed: bool = True,
) -> Exchanged | Addressed:
    """Exchange the addresses of the blocks of runs for `ranges` tasks of stage `reader`.

    If there are few runs and tasks, these read the runs by their footers. Otherwise the addresses are written
    by stage `<reader>-<table>-addresses`, and merged. `consumed` is as in `exchange`.
    """
    if not limits.has_addresses(len(exchanged.runs), ranges):
        return exchanged
    segments = [segment for segments in exchanged.runs for segment in segments]
    stage = Stage(f"{reader.name}-{exchanged.table.name}-addresses", reader.title, write_addresses)
    tasks, first = list[Task](), 0
    for group in _groups(segments, _RUNS_PER_TASK * limits.task_bytes):
        size = sum(segment.bytes for segment in group)
        tasks.append(
            stage.task(f"{len(tasks):05d}", size, group, first, exchanged.table, ranges, memory_bytes, limits)
        )
        first += len(group)
    [written] = run(tasks)
    merged = exchange(run, reader, ADDRESSES, written, readers=ranges, limits=limits, consumed=consumed)
    goes = all(segment.consumed for segment in segments)
    return Addressed(exchanged.table, merged, _files_of(segments), goes)


def address_tasks(bytes: float, limits: Limits) -> int:
    """Return the number of tasks that write the addresses of runs with `bytes` in all."""
    return max(1, -(-int(bytes) // (_RUNS_PER_TASK * limits.task_bytes)))


def _groups(segments: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    group, size = list[Segment](), 0
    for segment in segments:
        if group and size + segment.bytes > most:
            yield group
            group, size = [], 0
        group.append(segment)
        size += segment.bytes
    yield group


def write_addresses(
    folder: Path,
    runs: Sequence[Segment],
    first: int,
    table: Table,
    ranges: int,
    memory_bytes: MemoryBytes,
    limits: Limits,
) -> None:
    """Write the addresses of the blocks of files `first` and following, for each range of keys they have."""
    workers, coming = Workers(limits.reads_in_flight), deque[Any]()
    with RunWriter(folder / ADDRESSES.file, ADDRESSES, memory_bytes=memory_bytes, limits=limits) as writer:
        left = enumerate(runs, first)
        while True:
            while len(coming) < limits.reads_in_flight and (one := next(left, None)) is not None:
                coming.append((one[0], workers.submit(partial(read_footer, one[1], table, limits))))
            if not coming:
                break
            number, footer = coming.popleft()
            found = footer.result()
            writer.write(_addresses_of(found.blocks, found.offsets, number, table, ranges))


def _addresses_of(
    blocks: Rows, offsets: npt.NDArray[np.int64], file: int, table: Table, ranges: int
) -> npt.NDArray[np.void]:
    if not len(blocks):
        return np.zeros(0, ADDRESSES.dtype)
    first = range_of(np.ascontiguousarray(blocks["first"]), ranges)
    times = range_of(np.ascontiguousarray(blocks["last"]), ranges) - first + 1
    block = np.repeat(np.arange(len(blocks)), times)
    number = first[block] + np.arange(len(block)) - (np.cumsum(times) - times)[block]
    rows = np.zeros(len(block), ADDRESSES.dtype)
    rows["key"] = (-(-(number << 32) // ranges)).astype(np.uint64) << np.uint64(32)
    rows["file"], rows["rows"], rows["packed"] = file, blocks["rows"][block], blocks["packed"][block]
    rows["offset"], rows["bytes"] = offsets[block], np.diff(offsets)[block]
    rows["hash"] = blocks["hash"][block]
    return rows
