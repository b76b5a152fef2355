"""Reads single rows of remote shards by ranged requests, so that first batches do not wait for whole shards.

This is possible only if the index gives a row's offset in its shard (`shardkit.cache.row_bytes`).

A row is verified before it is returned, and read with one request, if checksums of its blocks are published
with the dataset, or if its whole shard was read before (`shardkit.cache.row_bytes`). If only the whole shard
can be verified, by its hash or just by its size, its rows are not read singly (`RowReader.can_read`). Two
kinds of rows have no checksums: ranges of flat token files, and rows whose checksums were discarded from
memory. They are read by two requests that must agree, and compared again when their whole shard has arrived.
Only then is a store detected that returns the same wrong bytes twice; the difference stops the run. In
all cases, an object must have the size in the index, and its version must not change.

Replicas (tensor, pipeline and context parallel peers) need the same rows at the same time. Replicas on one
machine read each row once: the process that gets the lease on a row reads it and leaves it in the cache
folder as a small entry (`NodeRows`), where the others read it. A process waits for another for at most
`FetchLimits.peer_seconds`, then reads the row itself. The entry is removed when its writer has the whole
shard.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.arrays import Bytes
from shardkit.cache.download import DamagedObjectError, FetchTimeoutError, arrival
from shardkit.cache.protocol import Cache, CacheFolderError, Lease
from shardkit.cache.row_bytes import BlockChecksums, BlockProof, Proof, RowChecksums, RowLayout, row_layout
from shardkit.errors import ShardError
from shardkit.formats.block_checksums import are_right
from shardkit.manifest import FileInfo, Manifest
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.running_clock import running_seconds, wait_until
from shardkit.storage.store import ObjectChangedError
from shardkit.storage.threads import Workers

MAX_UNPROVED = 4096  # maximum number of unverified rows kept, to compare them with their shards later
_READS = 4  # attempts to read a row correctly, before an error is raised

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FetchedRows:
    """Rows of one shard: their ascending numbers, and the bytes of their columns, uint8[rows, size]."""

    rows: npt.NDArray[np.int64]
    data: Bytes


Place = tuple[int, int]
"""The place of a row: (shard number, row number in the shard)."""


@dataclass(slots=True)
class RowRequests:
    """A request for the rows `wanted`, by shard. A context manager, which calls `release` at its end."""

    wanted: Mapping[int, npt.NDArray[np.int64]]
    found: dict[Place, bytes] = field(default_factory=dict)
    """Rows that have arrived: the bytes of each in its shard."""
    reads: dict[Place, tuple[Proof | None, list[Future[bytes]]]] = field(default_factory=dict)
    """(Proof, reads) of each row that this process reads: one read with a proof, two reads without one."""
    proved: set[Place] = field(default_factory=set)
    leases: dict[Place, Lease] = field(default_factory=dict)

    @property
    def places(self) -> list[Place]:
        return [(number, row) for number, rows in self.wanted.items() for row in rows.tolist()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Release the leases, so that other processes can read the rows that have not arrived."""
        while self.leases:
            self.leases.popitem()[1].release()


class NodeRows:
    """Rows that processes share as small entries of a cache folder, each with the version of its object.

    Storing a row never evicts a shard: if the cache is full, the row is not shared.
    """

    def __init__(self, cache: Cache, entry: Callable[[int], str]) -> None:
        """Share rows in `cache`; `entry` returns the name of a shard's entry."""
        self._cache, self._entry = cache, entry
        self._written: dict[int, list[str]] = {}

    def lease(self, place: Place, wait_seconds: float) -> Lease | None:
        """Acquire the lease to read a row; return None if another process holds it for `wait_seconds`."""
        # Not the name of the entry: the cache acquires the lease of that name to set a damaged entry aside.
        return self._cache.lease(f"read-{self._name(place)}", max(0.0, wait_seconds))

    def find(self, place: Place, size: int) -> tuple[bytes, str] | None:
        """Return a row's `size` bytes and the version of its object; None if no process has stored it."""
        data = self._cache.find(self._name(place))
        if data is None or len(data) < size:
            return None
        return data[:size].tobytes(), data[size:].tobytes().decode(errors="replace")

    def put(self, place: Place, row: bytes, version: str) -> None:
        """Store a row for other processes, if there is room."""
        name, content = self._name(place), row + version.encode(errors="replace")
        # An unusable folder raises its error when the next shard is stored; this row was read correctly.
        with contextlib.suppress(CacheFolderError):
            slot = self._cache.reserve(name, len(content), lambda contents: ())
            if slot is not None:
                self._written.setdefault(place[0], []).append(name)
                slot.write(0, memoryview(content))
                slot.commit(durable=False)

    def remove(self, number: int | None = None) -> None:
        """Remove the rows of a shard (None: of all shards) that this process has stored."""
        for shard in list(self._written) if number is None else [number]:
            for name in self._written.pop(shard, []):
                self._cache.remove(name)

    def _name(self, place: Place) -> str:
        origin = f"{self._entry(place[0])}\0{place[1]}"
        return f"row-{hashlib.blake2b(origin.encode(), digest_size=16).hexdigest()}"


def _have_ended(reads: Sequence[Future[T]], seconds: float) -> bool:
    """Wait up to `seconds` for `reads`; return whether all have ended, or one has failed."""
    done, late = wait(reads, seconds, FIRST_EXCEPTION)
    return not late or any(read.exception() is not None for read in done)


class RowReader:
    """Reads rows of one dataset's shards, and keeps unverified rows until their shards arrive."""

    def __init__(
        self,
        store: ResilientStore,
        manifest: Manifest,
        workers: Workers,
        free_disk_bytes: Callable[[], int | None] = lambda: None,
        *,
        node: NodeRows | None = None,
        peer_seconds: float = 5.0,
        max_unproved: int = MAX_UNPROVED,
        blocks: FileInfo | None = None,
    ) -> None:
        """Read rows of the shards in `manifest`; `workers` are threads for requests, shared by datasets.

        `free_disk_bytes` is for error messages. `node`: rows shared with other processes of this machine;
        `peer_seconds`: the maximum wait for a row that one of them reads. `blocks`: the card's entry for
        blocks.bin; raises ShardError if that file belongs to other shards.
        """
        self._store = store.urgent
        self._free_disk_bytes = free_disk_bytes
        self._manifest = manifest
        self._workers = workers
        self._node, self._peer_seconds = node, peer_seconds
        self._unproved: dict[int, list[FetchedRows]] = {}
        self._max_unproved = max_unproved
        self._blocks = None if blocks is None else BlockChecksums(self._store, manifest, blocks, workers)
        self._seen = RowChecksums()
        self._versions: dict[int, str] = {}  # versions of the objects that rows were read from
        self._known: set[int] = (
            set()
        )  # shards whose row checksums `remember_rows` has kept; they may have been discarded since
        self.count = self.unproved_bytes = 0

    def layout(self, number: int) -> RowLayout | None:
        """Return the layout of a shard's rows; None if the index does not define it."""
        return row_layout(self._manifest.format, self._manifest.shards[number])

    def can_read(self, number: int) -> bool:
        """Return whether rows of a shard can be read singly and verified as well as the whole shard is."""
        is_proved = self._blocks is not None or number in self._known
        # Flat token files have no hashes: reading whole shards of them would not verify anything either.
        return (is_proved or self._manifest.format == "tokens") and self.layout(number) is not None

    def read(
        self, wanted: Mapping[int, npt.NDArray[np.int64]], timeout_seconds: float = 600.0
    ) -> dict[int, FetchedRows]:
        """Read the rows `wanted` (ascending, by shard) in one round of requests; shards need a layout.

        Raises FetchTimeoutError, or ObjectChangedError if an object has changed since its first row was read.
        """
        deadline = running_seconds() + timeout_seconds
        with self.begin(wanted) as requests:
            return self.finish(requests, deadline)

    def begin(self, wanted: Mapping[int, npt.NDArray[np.int64]], *, shared: bool = False) -> RowRequests:
        """Send the requests for these rows; `finish` waits for them, so that several datasets share one wait.

        `shared`: other processes of this machine need the same rows. Rows that one of them is already
        reading are not requested here: `finish` waits for them.
        """
        requests = RowRequests(wanted)
        try:
            node = self._node if shared else None
            places = requests.places
            self._send(requests, [p for p in places if node is None or self._claim(requests, p, node, 0.0)])
        except BaseException:
            requests.release()
            raise
        return requests

    def finish(self, requests: RowRequests, deadline: float) -> dict[int, FetchedRows]:
        """Return the requested rows, by shard; raises FetchTimeoutError if one has not arrived in time."""
        self._collect(requests, deadline)
        places = requests.places
        if (awaited := [place for place in places if place not in requests.found]) and self._node is not None:
            patience = min(deadline, running_seconds() + self._peer_seconds)
            for place in awaited:
                self._claim(requests, place, self._node, patience - running_seconds())
            self._send(requests, [place for place in awaited if place not in requests.found])
            self._collect(requests, deadline)
        found = {place: self._columns(place, requests.found[place]) for place in places}
        self.count += len(places)
        fetched = {}
        for number, rows in requests.wanted.items():
            data = np.frombuffer(b"".join(found[number, int(row)] for row in rows), dtype=np.uint8)
            fetched[number] = FetchedRows(rows, data.reshape(len(rows), -1))
            if self._blocks is None and not requests.proved.issuperset((number, int(row)) for row in rows):
                self._remember(number, fetched[number])
        return fetched

    def _claim(self, requests: RowRequests, place: Place, node: NodeRows, wait_seconds: float) -> bool:
        """Return whether this process must read a row; False if another process reads or has stored it.

        Waits up to `wait_seconds` for the row's lease. If the row must be read, `requests` keeps the lease; a
        stored row is added to `requests.found`.
        """
        lease = node.lease(place, wait_seconds)
        if lease is None:
            return False
        requests.leases[place] = lease
        layout = self.layout(place[0])
        assert layout is not None
        left = node.find(place, layout.size)
        # If the object's version differs from earlier rows', read the row: the store reports a change.
        if left is None or self._versions.setdefault(place[0], left[1]) != left[1]:
            return True
        requests.found[place] = left[0]
        requests.leases.pop(place).release()
        return False

    def _send(self, requests: RowRequests, places: Sequence[Place]) -> None:
        """Send the requests for rows and for the checksums that verify them."""
        proofs: dict[Place, Proof | None] = {p: self._seen.proof(*p, self._range(p)) for p in places}
        if self._blocks is not None:
            unseen = [place for place, proof in proofs.items() if proof is None]
            checksums = self._blocks.request(number for number, _ in unseen)
            for place in unseen:
                file = self._manifest.shards[place[0]].stored
                proofs[place] = BlockProof.of(place[0], self._range(place), file, checksums[place[0]])
        for place, proof in proofs.items():
            read = partial(self._get, place, self._range(place) if proof is None else proof.read)
            times = 2 if proof is None else 1
            requests.reads[place] = proof, [self._workers.submit(read) for _ in range(times)]

    def _collect(self, requests: RowRequests, deadline: float) -> None:
        """Wait for the rows that this process reads, verify them, and store leased rows for others."""
        reads, requests.reads = requests.reads, {}
        sent = [(place, read) for place, (_, some) in reads.items() for read in some]
        self._wait(sent, deadline)
        for place, (proof, some) in reads.items():
            if proof is None:
                row = self._agreed(place, [read.result() for read in some], deadline)
                self.unproved_bytes += len(row)
            else:
                row = self._proved(place, proof, some[0].result(), deadline)
                requests.proved.add(place)
            requests.found[place] = row
            if (lease := requests.leases.get(place)) is not None and self._node is not None:
                self._columns(place, row)  # raises ShardError before invalid bytes are shared
                self._node.put(place, row, self._versions[place[0]])
                del requests.leases[place]
                lease.release()

    def _remember(self, number: int, fetched: FetchedRows) -> None:
        """Keep unverified rows for a later comparison, at most `_max_unproved`: shards may never arrive."""
        self._unproved.setdefault(number, []).append(fetched)
        # Counted again each time, because `verify_rows` removes rows in other threads.
        kept = {n: sum(len(one.rows) for one in some) for n, some in list(self._unproved.items())}
        excess = sum(kept.values()) - self._max_unproved
        for oldest, count in kept.items():
            if excess <= 0:
                break
            self._unproved.pop(oldest, None)
            excess -= count

    def check(self, number: int, data: Bytes) -> None:
        """Verify a whole shard by its block checksums, if it has some and no hash in the index.

        Raises DamagedObjectError if a checksum differs, StoreError if the checksums cannot be read.
        """
        if self._blocks is None or self._manifest.shards[number].has_hashes:
            return
        checksums = self._blocks.request([number])[number].result()[number]
        if not are_right(checksums, 0, data.data):
            problem = "its blocks have other checksums than the dataset's blocks.bin"
            raise DamagedObjectError(self._where(number), problem)

    def trust(self, number: int, version: str) -> None:
        """Require this version of a shard's object for all later rows: this version was verified whole."""
        self._versions[number] = version

    def verify_rows(self, number: int, raw: Bytes) -> None:
        """Compare a shard's unverified rows with `raw`, its verified bytes; raises ShardError if unequal."""
        if self._node is not None:
            self._node.remove(number)
        for fetched in self._unproved.pop(number, []):
            layout = self.layout(number)
            assert layout is not None
            for row, data in zip(fetched.rows.tolist(), fetched.data, strict=True):
                start = layout.first + row * layout.stride
                if layout.values(raw[start : start + layout.size]) != data.tobytes():
                    problem = f"row {row:,} was damaged identically in two ranged reads, and was delivered"
                    raise ShardError(self._where(number), f"{problem}; go back to the last checkpoint")

    def remember_rows(self, number: int, raw: Bytes) -> None:
        """Keep the row checksums of a verified shard whose rows will be read one by one."""
        if (layout := self.layout(number)) is not None:
            rows = self._manifest.shards[number].samples
            self._seen.remember(number, raw, layout.first, layout.stride, layout.size, rows)
            self._known.add(number)

    def close(self) -> None:
        """Remove the rows that this process has stored for others."""
        if self._node is not None:
            self._node.remove()

    def _wait(self, sent: Sequence[tuple[Place, Future[T]]], deadline: float) -> list[T]:
        """Return the results of the reads, in order; raises FetchTimeoutError if one misses `deadline`."""
        reads = [read for _, read in sent]
        wait_until(partial(_have_ended, reads), deadline)
        done, late = wait(reads, 0)
        for read in late:
            read.cancel()
        errors = [error for read in done if (error := read.exception()) is not None]
        if errors:
            raise errors[0]
        if late:
            number, row = next(place for place, read in sent if read in late)
            size = self._manifest.shards[number].raw.bytes
            status = self._store.metrics.snapshot().last_status
            raise FetchTimeoutError(
                f"{self._where(number)}: row {row:,} did not arrive in time; "
                f"{len(done)} of this batch's {len(reads)} reads finished; "
                f"{arrival(0, size, status, self._free_disk_bytes())}"
            )
        return [read.result() for read in reads]

    def _range(self, place: Place) -> tuple[int, int]:
        """Return the first byte of a row in its shard, and the end (exclusive)."""
        layout = self.layout(place[0])
        assert layout is not None
        start = layout.first + place[1] * layout.stride
        return start, start + layout.size

    def _get(self, place: Place, read: tuple[int, int]) -> bytes:
        """Read the byte range `read` of a row's shard."""
        number, file, (start, stop) = place[0], self._manifest.shards[place[0]].stored, read
        version = self._versions.get(number)
        with self._store.open(file.basename, start, stop, version=version) as body:
            if body.info.bytes != file.bytes:
                problem = f"the object has {body.info.bytes:,} bytes, the index states {file.bytes:,}"
                raise DamagedObjectError(self._where(number), f"{problem}; upload it again")
            data = body.read()
        if self._versions.setdefault(number, body.info.version) != body.info.version:
            raise ObjectChangedError(self._where(number), "was replaced while rows of it were read")
        return data

    def _proved(self, place: Place, proof: Proof, data: bytes, deadline: float) -> bytes:
        """Return the verified row in `data`; reads wrong data again, and may raise DamagedObjectError."""
        if isinstance(proof, BlockProof):
            self._wait([(place, proof.checksums)], deadline)
        reads = 1
        while (row := proof.row_in(data)) is None:
            if reads == _READS:
                problem = f"row {place[1]:,}: {reads} reads have other checksums than the dataset's"
                raise DamagedObjectError(
                    self._where(place[0]), f"{problem}; check the object in the bucket", offset=proof.read[0]
                )
            data, reads = self._read_again(place, proof.read, deadline), reads + 1
        return row

    def _agreed(self, place: Place, seen: list[bytes], deadline: float) -> bytes:
        """Read a row until two reads are equal, and return it. `seen`: two reads. May raise ShardError."""
        while seen[-1] not in seen[:-1]:
            if len(seen) > _READS:
                problem = f"row {place[1]:,} was different in each of {len(seen)} reads"
                raise ShardError(self._where(place[0]), f"{problem}; check the network")
            seen.append(self._read_again(place, self._range(place), deadline))
        return seen[-1]

    def _read_again(self, place: Place, read: tuple[int, int], deadline: float) -> bytes:
        return self._wait([(place, self._workers.submit(partial(self._get, place, read)))], deadline)[0]

    def _columns(self, place: Place, data: bytes) -> bytes:
        """Return the bytes of the columns in a row; raises ShardError if `data` is not a row."""
        number, row = place
        layout = self.layout(number)
        assert layout is not None
        if len(data) != layout.size or not all(column.is_in(data) for column in layout.columns):
            problem = f"row {row:,} is not where the index says; run shardkit verify"
            raise ShardError(self._where(number), problem, offset=self._range(place)[0])
        return layout.values(data)

    def _where(self, number: int) -> str:
        return f"{self._store.url}/{self._manifest.shards[number].stored.basename}"
