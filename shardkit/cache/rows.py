"""Single rows of remote shards by ranged requests, so that the first batches need not wait for whole shards.

Only where a row's place follows from the index: raw MDS shards whose columns all have a fixed size, and tars
as shardkit writes them. No hash covers a part of an object, so each row is read twice, by two requests that
must agree, and is compared again when its shard has come and been proved: a difference stops the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.cache.fetcher import FetchTimeoutError, arrival
from shardkit.errors import ShardError
from shardkit.formats.tar.members import BLOCK, padded
from shardkit.formats.tar.values import make_npy_header
from shardkit.formats.tar.writer import RECORD_BYTES
from shardkit.manifest import Manifest, ShardInfo
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import ObjectChangedError
from shardkit.storage.threads import Workers

__all__ = ["FetchedRows", "RowLayout", "RowReader", "RowRequests", "row_layout"]

MAX_ROW_BYTES = 4 << 20
MAX_UNPROVED = 4096  # rows kept for a later comparison
_READS = 4  # of one row, before the store is called unreliable


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Row r is the bytes [first + r * stride, + size) of a shard; `head` must precede its columns in it."""

    first: int
    stride: int
    size: int
    head: bytes = b""
    head_at: int = 0

    @property
    def columns_at(self) -> int:
        """Where the columns' bytes begin in a row."""
        return self.head_at + len(self.head)


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """Some rows of one shard: `rows` ascending, and their columns' bytes uint8[len(rows), size]."""

    rows: npt.NDArray[np.int64]
    data: Bytes


@dataclass(frozen=True, slots=True)
class RowRequests:
    """Rows that were asked for: the places (shard, row), each read twice by `reads`."""

    wanted: Mapping[int, npt.NDArray[np.int64]]
    places: list[tuple[int, int]]
    reads: list[Future[bytes]]


def row_layout(kind: str, info: ShardInfo) -> RowLayout | None:
    """Where rows are in a shard of that format, if the index says so."""
    sizes = [column.size for column in info.columns]
    total = sum(size or 0 for size in sizes)
    if info.samples < 1 or not total or None in sizes or info.compression or total > MAX_ROW_BYTES:
        return None
    if kind == "mds":
        first = info.raw.bytes - info.samples * total  # samples fill the file's end
        return RowLayout(first, total, total) if first > 0 else None
    parts = info.columns[0].encoding.split(":")
    if len(info.columns) != 1 or len(parts) != 3 or not parts[2].isdigit():
        return None
    head = make_npy_header(np.dtype(parts[1]), int(parts[2]))
    size = BLOCK + padded(len(head) + total)
    end = -(-(info.samples * size + 2 * BLOCK) // RECORD_BYTES) * RECORD_BYTES
    return RowLayout(0, size, size, head, BLOCK) if end == info.raw.bytes else None


class RowReader:
    """Reads rows of one dataset's shards and remembers them until they are proved."""

    def __init__(
        self,
        store: ResilientStore,
        manifest: Manifest,
        workers: Workers,
        free_disk_bytes: Callable[[], int | None] = lambda: None,
        *,
        max_unproved: int = MAX_UNPROVED,
    ) -> None:
        """`workers` make the requests, also of other datasets; `free_disk_bytes` is for error messages."""
        self._store = store.urgent
        self._free_disk_bytes = free_disk_bytes
        self._manifest = manifest
        self._workers = workers
        self._unproved: dict[int, list[FetchedRows]] = {}
        self._max_unproved = max_unproved
        self._versions: dict[int, str] = {}  # of the objects that rows were read from
        self.count = 0

    def layout(self, number: int) -> RowLayout | None:
        """Where the rows of a shard are, if they can be read one by one."""
        return row_layout(self._manifest.format, self._manifest.shards[number])

    def read(
        self, wanted: Mapping[int, npt.NDArray[np.int64]], timeout_seconds: float = 600.0
    ) -> dict[int, FetchedRows]:
        """These rows (ascending, by shard) of shards that have a layout, in one round of requests.

        FetchTimeoutError; ObjectChangedError if an object is another one than at its first row.
        """
        deadline = time.monotonic() + timeout_seconds
        return self.finish(self.begin(wanted), deadline)

    def begin(self, wanted: Mapping[int, npt.NDArray[np.int64]]) -> RowRequests:
        """Send the requests for these rows; `finish` waits for them. So several datasets share one wait."""
        places = [(number, int(row)) for number, rows in wanted.items() for row in rows]
        reads = [self._workers.submit(partial(self._get, *place)) for place in places for _ in range(2)]
        return RowRequests(wanted, places, reads)

    def finish(self, requests: RowRequests, deadline: float) -> dict[int, FetchedRows]:
        """The rows that were asked for, by shard; what is not there by the deadline is given up."""
        places = requests.places
        read = self._wait([place for place in places for _ in range(2)], requests.reads, deadline)
        found = {
            place: self._columns(place, self._agreed(place, [read[2 * i], read[2 * i + 1]], deadline))
            for i, place in enumerate(places)
        }
        self.count += len(places)
        fetched = {}
        for number, rows in requests.wanted.items():
            data = np.frombuffer(b"".join(found[number, int(row)] for row in rows), dtype=np.uint8)
            fetched[number] = FetchedRows(rows, data.reshape(len(rows), -1))
            self._remember(number, fetched[number])
        return fetched

    def _remember(self, number: int, fetched: FetchedRows) -> None:
        """Keep rows to prove them later, but not forever: whole shards may never come."""
        self._unproved.setdefault(number, []).append(fetched)
        # Counted again each time: `prove` runs in other threads.
        kept = {n: sum(len(one.rows) for one in some) for n, some in list(self._unproved.items())}
        excess = sum(kept.values()) - self._max_unproved
        for oldest, count in kept.items():
            if excess <= 0:
                break
            self._unproved.pop(oldest, None)
            excess -= count

    def trust(self, number: int, version: str) -> None:
        """The whole object was proved to be the index's: rows are from now on read of this version."""
        self._versions[number] = version

    def prove(self, number: int, raw: Bytes) -> None:
        """Compare what was read of a shard with its proved bytes; ShardError if a row was wrong."""
        for fetched in self._unproved.pop(number, []):
            layout = self.layout(number)
            assert layout is not None
            for row, data in zip(fetched.rows.tolist(), fetched.data, strict=True):
                start = layout.first + row * layout.stride + layout.columns_at
                if not np.array_equal(raw[start : start + len(data)], data):
                    problem = f"row {row:,} was damaged identically in two ranged reads, and was delivered"
                    raise ShardError(self._where(number), f"{problem}; go back to the last checkpoint")

    def _wait(
        self, places: list[tuple[int, int]], reads: list[Future[bytes]], deadline: float
    ) -> list[bytes]:
        """What `reads` of the rows at `places` give; what is not there by the deadline is given up."""
        done, late = wait(reads, max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
        for read in late:
            read.cancel()
        errors = [error for read in done if (error := read.exception()) is not None]
        if errors:
            raise errors[0]
        if late:
            number, row = next(place for place, read in zip(places, reads, strict=True) if read in late)
            size = self._manifest.shards[number].raw.bytes
            status = self._store.metrics.snapshot().last_status
            raise FetchTimeoutError(
                f"{self._where(number)}: row {row:,} did not arrive in time; "
                f"{len(done)} of this batch's {len(places)} reads finished; "
                f"{arrival(0, size, status, self._free_disk_bytes())}"
            )
        return [read.result() for read in reads]

    def _get(self, number: int, row: int) -> bytes:
        layout = self.layout(number)
        assert layout is not None
        start = layout.first + row * layout.stride
        key, version = self._manifest.shards[number].stored.basename, self._versions.get(number)
        with self._store.open(key, start, start + layout.size, version=version) as body:
            data = body.read()
        if self._versions.setdefault(number, body.info.version) != body.info.version:
            raise ObjectChangedError(self._where(number), "was replaced while rows of it were read")
        return data

    def _agreed(self, place: tuple[int, int], seen: list[bytes], deadline: float) -> bytes:
        """What two reads of a row have in common; `seen` are the first two."""
        while seen[-1] not in seen[:-1]:
            if len(seen) > _READS:
                problem = f"row {place[1]:,} was different in each of {len(seen)} reads"
                raise ShardError(self._where(place[0]), f"{problem}; check the network")
            seen += self._wait([place], [self._workers.submit(partial(self._get, *place))], deadline)
        return seen[-1]

    def _columns(self, place: tuple[int, int], data: bytes) -> bytes:
        """The columns' part of a row, if it is one."""
        number, row = place
        layout = self.layout(number)
        assert layout is not None
        if len(data) != layout.size or not data.startswith(layout.head, layout.head_at):
            problem, start = f"row {row:,} is not where the index says", layout.first + row * layout.stride
            raise ShardError(self._where(number), f"{problem}; run shardkit verify", offset=start)
        used = sum(column.size or 0 for column in self._manifest.shards[number].columns)
        return data[layout.columns_at : layout.columns_at + used]

    def _where(self, number: int) -> str:
        return f"{self._store.url}/{self._manifest.shards[number].stored.basename}"
