"""A store around a store that retries, resumes bodies, hedges slow reads and keeps deadlines.

It retries what may help (TransientError, ThrottledError) as `shardkit.storage.retry` does, continues bodies
where they broke, on the same version of the object, sends a second request for reads that are slow to start,
and has fewer requests open when the store says 503 (`shardkit.storage.limits`). Every operation ends by its
deadline, with an error of the same kind that says what was attempted. The bytes it returns are the object's,
or there is an error.

    store = connect("s3://bucket/dataset")
    with store.open("shard.00000.mds") as body: ...
    store.urgent.get("shard.00000.mds", 0, 4096)   # overtakes long transfers

An open body holds one of the store's connections until its last byte is read or it is closed.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Self

from shardkit.files import Closing
from shardkit.storage.limits import Ticket
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.retry import Calls, Operation, Retries, RetryPolicy
from shardkit.storage.store import (
    Body,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    StorageOptions,
    Store,
    StoreError,
    TransientError,
)
from shardkit.storage.url import open_store

__all__ = ["ResilientBody", "ResilientStore", "connect"]

_LISTED_AT_ONCE = 1000  # as S3's pages; each is one operation for the gate and the deadline
_COMPARED_AT_ONCE = 1 << 20
_REPORT_BYTES = 1 << 20  # read before the metrics are updated


def connect(
    url: str | os.PathLike[str],
    options: StorageOptions | None = None,
    *,
    policy: RetryPolicy | None = None,
    metrics: StoreMetrics | None = None,
) -> ResilientStore:
    """Open the store at `url` and make it resilient for `options.retry_seconds`. Nothing is contacted yet."""
    options = options or StorageOptions()
    policy = policy or RetryPolicy(deadline_seconds=options.retry_seconds)
    return ResilientStore(open_store(url, options), policy, metrics, connections=options.connections)


class ResilientStore:
    """Keeps the contract of `Store`. A pickled copy has counts and limits of its own."""

    def __init__(
        self,
        store: Store,
        policy: RetryPolicy | None = None,
        metrics: StoreMetrics | None = None,
        *,
        connections: int = StorageOptions().connections,
        has_answered: bool = False,
    ) -> None:
        """`has_answered`: the store was reached before, so failing to reach it is an outage."""
        self._store = store
        self._connections = connections
        self._calls = Calls(
            store.url,
            policy or RetryPolicy(),
            metrics or StoreMetrics(),
            connections,
            has_answered=has_answered,
        )
        self._urgent = False

    def __reduce__(self) -> tuple[object, ...]:
        has_answered = self._calls.health.has_answered
        return (_rebuild, (self._store, self.policy, self._connections, has_answered, self._urgent))

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def policy(self) -> RetryPolicy:
        return self._calls.policy

    @property
    def metrics(self) -> StoreMetrics:
        return self._calls.metrics

    @property
    def urgent(self) -> Self:
        """The same store (connections, limit, metrics), for reads that go ahead of others."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _urgent=True)
        return view

    def head(self, key: str) -> ObjectInfo:
        return self._calls.run("head", self._where(key), lambda: self._store.head(key), urgent=self._urgent)

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """As `open` and read, so it is resumed and hedged in the same way."""
        with self._open("get", key, (start, stop), version) as body:
            return body.read()

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> ResilientBody:
        return self._open("open", key, (start, stop), version)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        """As `Store.put`. The size and `RetryPolicy.floor_bytes_per_second` bound its time.

        With `if_absent`, an object that exists after a failed attempt is ours if it has exactly our bytes and
        our metadata; two writers of the very same object may then both succeed.
        """
        size = _size(data)
        may_be_ours = False

        def request() -> ObjectInfo:
            nonlocal may_be_ours
            try:
                return self._store.put(key, data, if_absent=if_absent, metadata=metadata)
            except TransientError:
                may_be_ours = True
                raise

        where = self._where(key)
        seconds = self.policy.transfer_seconds(size)
        try:
            info = self._calls.run("put", where, request, urgent=self._urgent, seconds=seconds)
        except ObjectExistsError:
            found = self._find_same(key, data, size, metadata) if may_be_ours else None
            if found is None:
                raise
            info = found
        self.metrics.count("bytes_written", size)
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """As `Store.list`. After a failure it starts again and skips what was yielded already."""
        last: str | None = None
        going: Iterator[ObjectInfo] | None = None

        def request() -> tuple[Iterator[ObjectInfo], list[ObjectInfo]]:
            nonlocal going
            # Cleared first: a listing that fails, or is abandoned, is not continued.
            listing, going = going or self._list_after(prefix, last), None
            return listing, [*islice(listing, _LISTED_AT_ONCE)]

        while True:
            going, page = self._calls.run("list", f"{self.url}/{prefix}*", request, urgent=self._urgent)
            yield from page
            if len(page) < _LISTED_AT_ONCE:
                return
            last = page[-1].key

    def delete(self, key: str) -> None:
        self._calls.run("delete", self._where(key), lambda: self._store.delete(key), urgent=self._urgent)

    def close(self) -> None:
        self._calls.close()
        self._store.close()

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _list_after(self, prefix: str, last: str | None) -> Iterator[ObjectInfo]:
        return (info for info in self._store.list(prefix) if last is None or info.key > last)

    def _open(
        self, operation: Operation, key: str, span: tuple[int, int | None], version: str | None
    ) -> ResilientBody:
        where = self._where(key)
        start, stop = span
        retries = Retries(self._calls.health, operation, where)
        ticket = self._calls.gate.ticket(urgent=self._urgent)

        def reopen(position: int, version: str | None) -> Body:
            return self._store.open(key, position, stop, version=version)

        raw = self._calls.open(operation, lambda: reopen(start, version), retries, ticket)
        return ResilientBody(self._calls, raw, ticket, where, span, reopen, operation)

    def _find_same(
        self, key: str, data: bytes | Path, size: int, metadata: Mapping[str, str] | None
    ) -> ObjectInfo | None:
        """Return the object at `key` if it is what a put of `data` leaves there."""
        info = self.head(key)
        if info.bytes != size or (info.metadata and info.metadata != (metadata or {})):
            return None
        piece = memoryview(bytearray(_COMPARED_AT_ONCE))
        with (
            self._open("get", key, (0, None), info.version or None) as body,
            data.open("rb") if isinstance(data, Path) else io.BytesIO(data) as source,
        ):
            while count := body.readinto(piece):
                if source.read(count) != piece[:count]:
                    return None
        return info


class ResilientBody(Closing):
    """A body that continues where its connection broke: all bytes of one version of the object, or an error.

    A broken, short or too slow connection is closed, and the range opened again from the next byte with
    `reopen`, pinned to the version that was seen first: a replaced object ends in ObjectChangedError and
    never in a mixture. The time of retries counts from the last byte that arrived; the time of all reads is
    bounded by the size of the range. Between failures a read costs two looks at the clock and a few additions
    (a microsecond). One silence lasts as long as the store's read timeout, which this layer cannot shorten.
    """

    def __init__(
        self,
        calls: Calls,
        raw: Body,
        ticket: Ticket,
        where: str,
        span: tuple[int, int | None],
        reopen: Callable[[int, str], Body],
        operation: Operation,
    ) -> None:
        self.info = raw.info
        self._calls = calls
        self._raw: Body | None = raw
        self._readinto = raw.readinto
        self._ticket = ticket
        self._where = where
        self._reopen = reopen
        self._operation = operation
        self._clock = calls.policy.clock
        self._closed = threading.Event()
        start, stop = span
        self._start = self._position = self._reported = start
        self._stop = self.info.bytes if stop is None else min(stop, self.info.bytes)
        self._check_at = min(start + _REPORT_BYTES, self._stop)  # the position of the next `_check`
        self._window_seconds = calls.policy.window_seconds
        self._window_start = start
        self._window_used = 0.0  # time in reads since then, without the pauses of the reader
        self._left_seconds = calls.policy.transfer_seconds(self._stop - start)
        if self._position >= self._stop:
            self._finish()

    def readinto(self, buffer: memoryview, /) -> int:
        began = self._clock()
        try:
            count = self._next(buffer)
        except TransientError as error:
            return self._resume(buffer, error, began)
        self._window_used += self._clock() - began
        self._position += count
        if self._position >= self._check_at or self._window_used >= self._window_seconds:
            self._check()
        return count

    def read(self) -> bytes:
        """Return the rest."""
        data = bytearray(max(0, self._stop - self._position))
        view, filled = memoryview(data), 0
        while filled < len(data):
            filled += self.readinto(view[filled:])
        return bytes(data)

    def close(self) -> None:
        """Close; also from another thread, where a read then fails as soon as its connection does."""
        self._closed.set()
        self._release()
        self._report()
        self._readinto = _refuse

    def _next(self, buffer: memoryview) -> int:
        """Read from the open connection; count a failure, also if it ends early."""
        try:
            count = self._readinto(buffer)
            if not count and self._position < self._stop:
                raise TransientError(self._where, "the connection ended early")
        except TransientError as error:
            self._calls.failed(error)
            raise
        return count

    def _check(self) -> None:
        """After some bytes or some time, check for the end and the rate."""
        self._report()
        if self._position >= self._stop:
            self._finish()
            return
        self._check_at = min(self._position + _REPORT_BYTES, self._stop)
        if self._window_used < self._window_seconds:
            return
        policy = self._calls.policy
        rate = (self._position - self._window_start) / self._window_used
        self._left_seconds -= self._window_used
        self._window_start, self._window_used = self._position, 0.0
        if rate < policy.floor_bytes_per_second:
            self._window_seconds = min(
                2 * self._window_seconds, max(policy.window_seconds, self._left_seconds)
            )
            self._calls.metrics.count("slow_bodies")
            slow = TransientError(self._where, f"only {rate:,.0f} bytes per second arrive")
            self._release()

            def fail(buffer: memoryview, /) -> int:
                raise slow

            self._readinto = fail  # the next read opens the rest again

    def _resume(self, buffer: memoryview, error: TransientError, began: float) -> int:
        """Open the rest again, until some bytes are in `buffer`."""
        policy, metrics = self._calls.policy, self._calls.metrics
        self._left_seconds -= self._window_used
        seconds = min(policy.deadline_seconds, self._left_seconds)
        retries = Retries(self._calls.health, "read", self._where, seconds=seconds, began=began)
        while True:
            self._release()
            if self._closed.is_set() or not self.info.version:
                raise error  # without a version, the object might be another one when opened again
            retries.wait(error, self._arrived())
            raw = self._calls.open(
                self._operation,
                lambda: self._reopen(self._position, self.info.version),
                retries,
                self._ticket,
                self._arrived(),
            )
            self._raw, self._readinto = raw, raw.readinto
            if self._closed.is_set():
                self.close()
                raise error
            if raw.info.version != self.info.version or raw.info.bytes != self.info.bytes:
                self._release()
                raise ObjectChangedError(self._where, f"was replaced while it was read ({self._arrived()})")
            metrics.count("resumed_bodies")
            try:
                count = self._next(buffer)
                break
            except TransientError as raised:
                error = raised
        self._left_seconds -= self._clock() - began
        self._position += count
        self._window_start, self._window_used = self._position, 0.0
        self._check()
        return count

    def _finish(self) -> None:
        """Make room for others, because the reader may not close this body soon."""
        if self._position > self._stop:
            raise StoreError(self._where, f"the store sent {self._position - self._stop:,} bytes too many")
        self._ticket.leave()
        self._readinto = _nothing

    def _release(self) -> None:
        if self._raw is not None:
            raw, self._raw = self._raw, None
            with suppress(StoreError):
                raw.close()
        self._ticket.leave()

    def _report(self) -> None:
        if self._position > self._reported:
            self._calls.metrics.count("bytes_read", self._position - self._reported)
            self._reported = self._position

    def _arrived(self) -> str:
        return f"{self._position - self._start:,} of {self._stop - self._start:,} bytes had arrived"


def _size(data: bytes | Path) -> int:
    try:
        return data.stat().st_size if isinstance(data, Path) else len(data)
    except OSError:
        return 0  # the store reports what is wrong with the file


def _rebuild(
    store: Store, policy: RetryPolicy, connections: int, has_answered: bool, urgent: bool
) -> ResilientStore:
    rebuilt = ResilientStore(store, policy, connections=connections, has_answered=has_answered)
    return rebuilt.urgent if urgent else rebuilt


def _nothing(buffer: memoryview, /) -> int:
    return 0


def _refuse(buffer: memoryview, /) -> int:
    raise ValueError("read of a closed body")
