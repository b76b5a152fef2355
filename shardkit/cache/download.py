"""The download of one shard into a cache: in one range or several at once, hashed and verified.

Bytes are written to their final place (a file of the cache, or memory) as they arrive. The hashes of the
index are computed while a single range streams in; after several parallel ranges, they are computed over the
whole object. An idle thread may take over the second half of a range that is still being fetched.

A `Job` is everything that a fetcher holds for one shard: lease, space in the cache, download, and an event
for waiting readers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Protocol

import numpy as np

from shardkit.arrays import Bytes
from shardkit.cache.protocol import Contents, Fetchable, Lease, Slot
from shardkit.errors import ShardError, ShardkitError
from shardkit.formats.stored import decompress_shard
from shardkit.hashing import HASH_NAMES, Hasher, hash_bytes, new_hash
from shardkit.manifest import FileInfo, Format, ShardInfo
from shardkit.storage.store import ObjectChangedError, Store
from shardkit.units import format_bytes

READ_BYTES = 1 << 18  # bytes per read from a store; a buffer of this size fits a core's L2 cache
MIN_PART_BYTES = 2 << 20  # minimum size of a parallel range: in smaller ones, latency outweighs the gain
_threads = threading.local()


class Target(Protocol):
    """The destination of a download: a cache's `Slot`, or memory."""

    @property
    def data(self) -> Bytes: ...
    def write(self, at: int, piece: memoryview) -> None: ...


class MemoryTarget:
    """Memory for a download that is not written into the cache."""

    def __init__(self, size: int) -> None:
        self.data: Bytes = np.empty(size, dtype=np.uint8)

    def write(self, at: int, piece: memoryview) -> None:
        self.data.data[at : at + len(piece)] = piece


def _buffer() -> memoryview:
    """Return this thread's read buffer."""
    buffer: memoryview | None = getattr(_threads, "buffer", None)
    if buffer is None:
        buffer = _threads.buffer = memoryview(bytearray(READ_BYTES))
    return buffer


class DamagedObjectError(ShardError):
    """The fetched bytes do not match the index."""


class FetchTimeoutError(ShardkitError, TimeoutError):
    """A shard, or some of its rows, did not arrive in time; the message says how much had arrived."""


class Part:
    """A range of an object that one thread fetches: the bytes [at, stop) that are still missing."""

    __slots__ = ("at", "stop")

    def __init__(self, at: int, stop: int) -> None:
        self.at, self.stop = at, stop


class Download:
    """The download of one object, cut into parts. Each part is fetched by one thread."""

    def __init__(
        self,
        store: Store,
        file: FileInfo,
        target: Target,
        *,
        parts: int,
        version: str | None = None,
        min_part_bytes: int = MIN_PART_BYTES,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """Download `file` into `target`, which has room for it, in up to `parts` parts.

        `version`: the only version of the object to read (None: any). `read_bytes`: bytes per read, at most
        READ_BYTES.
        """
        self.target = target
        self._store, self._file, self._read_bytes = store, file, read_bytes
        self._version = version
        self._changed = threading.Condition(threading.Lock())
        count = max(1, min(parts, file.bytes // min_part_bytes))
        edges = [file.bytes * i // count for i in range(count + 1)]
        self._waiting = [Part(*edge) for edge in pairwise(edges)][::-1]
        self._running: list[Part] = []
        self._least_split_bytes = 2 * max(min_part_bytes, 2 * read_bytes)
        self._hashers: Mapping[str, Hasher] = {}
        if count == 1:
            self._hashers = {name: new_hash(name) for name in file.hashes if name in HASH_NAMES}
        self.bytes_done = 0
        self.error: Exception | None = None

    @property
    def where(self) -> str:
        return f"{self._store.url}/{self._file.basename}"

    @property
    def version(self) -> str | None:
        """The version of the object: as given, or of the first response; None before that."""
        return self._version

    def take_part(self) -> Part | None:
        """Return a part that no thread fetches yet, or None; the caller must pass it to `fetch_part`."""
        with self._changed:
            if not self._waiting or self.error is not None:
                return None
            self._running.append(self._waiting.pop())
            return self._running[-1]

    def split_part(self) -> Part | None:
        """Split the longest part that another thread fetches; return its second half for `fetch_part`.

        Returns None if no part is long enough, or if parts are left that no thread fetches.
        """
        with self._changed:
            longest = max(self._running, key=lambda part: part.stop - part.at, default=None)
            if longest is None or self._waiting or self.error is not None:
                return None
            left = longest.stop - longest.at
            if left < self._least_split_bytes:
                return None
            half = Part(longest.stop - left // 2, longest.stop)
            longest.stop = half.at
            self._hashers = {}  # hashers need bytes in order; without them, `check` hashes the whole object
            self._running.append(half)
            return half

    def fetch_part(self, part: Part) -> None:
        """Fetch a part. An error stops the download and is raised by `check`."""
        try:
            self._stream(part)
        except Exception as error:
            self.stop(error)
        finally:
            with self._changed:
                self._running.remove(part)
                self._changed.notify_all()

    def fetch(self) -> None:
        """Take and fetch parts until no part is left to take."""
        while (part := self.take_part()) is not None:
            self.fetch_part(part)

    def stop(self, error: Exception) -> None:
        """Stop all threads of the download after their current reads; `check` raises the first error."""
        with self._changed:
            self.error = self.error or error

    def check(self) -> None:
        """Wait for the parts of other threads, then raise the first error, if any.

        Raises DamagedObjectError if the bytes do not match the index.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        if self.error is not None:
            raise self.error
        if self._hashers:
            found = {name: hasher.hexdigest() for name, hasher in self._hashers.items()}
            _compare(self.where, self._file, found)
        else:
            check_hashes(self.where, self._file, self.target.data)

    def _stream(self, part: Part) -> None:
        size = self._file.bytes
        whole = part.at == 0 and part.stop == size
        key, end = self._file.basename, None if whole else part.stop
        with self._store.open(key, part.at, end, version=self._version) as body:
            if body.info.bytes != size:
                problem = f"the object has {body.info.bytes:,} bytes, the index states {size:,}"
                raise DamagedObjectError(self.where, f"{problem}; upload it again")
            with self._changed:  # all parts must have one version, so check it under the lock
                self._version = self._version or body.info.version
            if body.info.version != self._version:
                raise ObjectChangedError(self.where, "was replaced while it was fetched")
            buffer = _buffer()
            while part.at < part.stop and self.error is None:  # `split_part` may lower `stop`
                count = body.readinto(buffer[: min(self._read_bytes, part.stop - part.at)])
                if not count:
                    raise DamagedObjectError(
                        self.where, "the store sent fewer bytes than it announced", offset=part.at
                    )
                piece = buffer[:count]
                for hasher in self._hashers.values():
                    hasher.update(piece)
                self.target.write(part.at, piece)
                with self._changed:
                    part.at += count
                    self.bytes_done += count


def check_hashes(where: str, file: FileInfo, data: Bytes) -> None:
    """Raise DamagedObjectError unless `data` matches all hashes in the index that are supported."""
    _compare(where, file, hash_bytes(data.data, [name for name in file.hashes if name in HASH_NAMES]))


def _compare(where: str, file: FileInfo, found: Mapping[str, str]) -> None:
    for name, digest in found.items():
        if digest != file.hashes[name].lower():
            raise DamagedObjectError(where, f"{name} is {digest}, the index states {file.hashes[name]}")


def unpack(kind: Format, info: ShardInfo, stored: Bytes, where: str) -> Bytes:
    """Decompress a file to its raw bytes; raises DamagedObjectError if they do not match the index."""
    try:
        raw = decompress_shard(kind, info, stored, where)
    except ShardError as error:
        raise DamagedObjectError(where, error.problem) from error
    check_hashes(where, info.raw, raw)
    return raw


def arrival(done: int, total: int, status: int | None, free_disk_bytes: int | None) -> str:
    """Describe the progress of a fetch, the last error status of the store, and the free disk space."""
    disk = "no disk used" if free_disk_bytes is None else f"free disk {format_bytes(free_disk_bytes)}"
    return f"{done:,} of {total:,} bytes received; last status {'none' if status is None else status}; {disk}"


class Job:
    """The fetch of one shard. It belongs to the thread that works on it; any thread may call `stop`."""

    def __init__(
        self, shards: Fetchable, number: int, *, urgent: bool, victims: Callable[[Contents], Iterable[str]]
    ) -> None:
        self.shards, self.number = shards, number
        self.urgent = urgent
        self.victims = victims
        self.turn = 0  # number of the job, in the order in which the fetcher begins jobs
        self.attempts = 0
        self.download: Download | None = None
        self.slot: Slot | None = None
        self.lease: Lease | None = None
        self.data: Bytes | None = None
        self.error: Exception | None = None
        self.done = threading.Event()
        self.is_stopped = False

    @property
    def key(self) -> tuple[Fetchable, int]:
        return self.shards, self.number

    def stop(self, error: Exception) -> None:
        """Report the error to waiting readers, and stop the download after the current reads."""
        self.is_stopped = True
        self.error = self.error or error
        if self.download is not None:
            self.download.stop(error)
        self.done.set()

    def deliver(self, data: Bytes) -> None:
        """Hand the shard's bytes to waiting readers."""
        self.data = data[:]
        self.data.flags.writeable = False
        self.done.set()

    def drop_slot(self, *, damaged: bool = False) -> None:
        """Release the reserved space in the cache, if any; `damaged` data is kept for inspection."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.discard(damaged=damaged)

    def let_go(self) -> None:
        """Release the space in the cache and the lease, if still held."""
        try:
            self.drop_slot()
        finally:
            lease, self.lease = self.lease, None
            if lease is not None:
                lease.release()

    def describe(self) -> str:
        """Return the object's URL and how much of it has arrived, as text."""
        shards, file = self.shards, self.shards.stored_file(self.number)
        done = 0 if self.download is None else self.download.bytes_done
        status = shards.store.metrics.snapshot().last_status
        came = arrival(done, file.bytes, status, shards.cache.free_disk_bytes())
        return f"{shards.store.url}/{file.basename}: {came}"
