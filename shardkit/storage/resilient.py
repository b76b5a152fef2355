"""A wrapper around any store that retries, resumes bodies, hedges slow reads and keeps deadlines.

    store = connect("s3://bucket/dataset")
    with store.open("shard.00000.mds") as body: ...
    store.urgent.get("shard.00000.mds", 0, 4096)   # overtakes long transfers

It retries errors that may pass (TransientError, ThrottledError), continues bodies where they broke, on the
same version of the object, sends a second request for reads that are slow to start, and opens fewer requests
when the store answers 503. Every operation ends by its deadline, with an error of the same class that says
how many attempts were made. It returns the object's exact bytes or raises an error.

How a read proceeds: `ResilientStore.open` makes a `ResilientBody`, whose `Call` (`shardkit.storage.retry`)
waits at the gate, lets a thread call `open` of the wrapped store (for S3: `S3Store.open`, `S3Client.request`,
botocore), and repeats that until it succeeds. `readinto` then reads from the wrapped store's body, and
returns to the same `Call` if that body breaks. An open body holds one of the store's connections until its
last byte is read or it is closed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self, TypeVar

from shardkit.storage.hub import HubStore
from shardkit.storage.limits import shared_gate
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.retry import Call, Operation, RetryPolicy, Upstream
from shardkit.storage.store import (
    BaseBody,
    BaseStore,
    Body,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    Store,
    StoreError,
    TransientError,
    commits_of,
    copier_of,
    open_source,
)
from shardkit.storage.url import open_store

_LISTED_AT_ONCE = 1000  # objects per page, as in S3; each page is one operation with its own deadline
_COMPARED_AT_ONCE = 1 << 20  # bytes per read when an object is compared with local data

T = TypeVar("T")


def connect(
    url: str | os.PathLike[str],
    options: StorageOptions | None = None,
    *,
    policy: RetryPolicy | None = None,
    metrics: StoreMetrics | None = None,
    shares_limit: bool = False,
    has_answered: bool = False,
) -> ResilientStore:
    """Open the store at `url` and retry for `options.retry_seconds`. Contacts no server yet.

    `has_answered`: another process has reached it, so failing to reach it is an outage.
    `shares_limit`: share one limit on connections with all stores of the bucket that also set this
    (`shared_gate`).
    """
    options = options or StorageOptions()
    policy = policy or RetryPolicy.of(options)
    store = open_store(url, options)
    return ResilientStore(
        store,
        policy,
        metrics,
        connections=options.connections,
        has_answered=has_answered,
        shares_limit=shares_limit,
    )


class ResilientStore(BaseStore):
    """A `Store` that retries. A pickled copy has new counts, and the shared limits of its new process."""

    def __init__(
        self,
        store: Store,
        policy: RetryPolicy | None = None,
        metrics: StoreMetrics | None = None,
        *,
        connections: int = StorageOptions().connections,
        has_answered: bool = False,
        shares_limit: bool = False,
    ) -> None:
        """`has_answered`: the store answered earlier, so failing to reach it now is an outage."""
        self._store = store
        self._connections, self._shares_limit = connections, shares_limit
        self.policy, self.metrics = policy or RetryPolicy(), metrics or StoreMetrics()
        gate = shared_gate(store.url, connections) if shares_limit else None
        self._upstream = Upstream(
            store.url, self.policy, self.metrics, connections, has_answered=has_answered, gate=gate
        )
        self._urgent = False

    def __reduce__(self) -> tuple[object, ...]:
        make = partial(
            type(self),
            connections=self._connections,
            has_answered=self._upstream.has_answered,
            shares_limit=self._shares_limit,
        )
        return make, (self._store, self.policy), {"_urgent": self._urgent}

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def urgent(self) -> Self:
        """A view of this store (same connections, limit, metrics) whose reads go ahead of others."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _urgent=True)
        return view

    def head(self, key: str) -> ObjectInfo:
        return self._run("head", key, lambda: self._store.head(key))

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """Return bytes of an object, read like an open body: resumed after failures, and hedged if slow."""
        with self._open("get", key, start, stop, version) as body:
            return body.read()

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> ResilientBody:
        return self._open("open", key, start, stop, version)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        """Write an object. Its size and `RetryPolicy.floor_bytes_per_second` determine the deadline.

        With `if_absent`, an object that exists after a failed attempt counts as ours if its bytes and
        metadata are equal to ours; two writers of an identical object may therefore both succeed.
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

        try:
            info = self._run("put", key, request, self.policy.transfer_seconds(size))
        except ObjectExistsError:
            found = None
            if may_be_ours:
                with suppress(ObjectNotFoundError, ObjectChangedError):  # another writer's object, gone since
                    found = self._find_same(key, data, size, metadata)
            if found is None:
                raise
            info = found
        self.metrics.count("bytes_written", size)
        return info

    def copies(self, source: Store, size: int) -> bool:
        """Return whether the wrapped store can copy objects of this size of the store that `source` wraps."""
        copier = copier_of(self._store)
        return (
            copier is not None and isinstance(source, ResilientStore) and copier.copies(source._store, size)
        )

    def copy(self, key: str, source: Store, info: ObjectInfo) -> ObjectInfo:
        """Copy an object as `CopyingStore.copy` does. Its size determines the deadline."""
        copier = copier_of(self._store)
        assert copier is not None
        assert isinstance(source, ResilientStore)
        below, seconds = source._store, self.policy.transfer_seconds(info.bytes)
        return self._run("put", key, lambda: copier.copy(key, below, info), seconds)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List objects. After a failure, list again from the start, but skip objects already yielded."""
        last: str | None = None
        going: Iterator[ObjectInfo] | None = None

        def request() -> tuple[Iterator[ObjectInfo], list[ObjectInfo]]:
            nonlocal going
            # Clear `going` first: a listing that failed or was abandoned must not be continued.
            listing, going = going or self._list_after(prefix, last), None
            return listing, [*islice(listing, _LISTED_AT_ONCE)]

        while True:
            going, page = self._run("list", f"{prefix}*", request)
            yield from page
            if len(page) < _LISTED_AT_ONCE:
                return
            last = page[-1].key

    def delete(self, key: str) -> None:
        self._run("delete", key, lambda: self._store.delete(key))

    @property
    def has_commits(self) -> bool:
        """Whether the wrapped store writes many files in one atomic `commit` (`CommitStore`)."""
        return commits_of(self._store) is not None

    def commit(
        self, files: Mapping[str, bytes | Path], deleted: Collection[str] = ()
    ) -> Mapping[str, ObjectInfo]:
        """Commit files as `CommitStore.commit` does. The total size determines the deadline."""
        commits = commits_of(self._store)
        assert commits is not None, "call `commit` only if `has_commits`"
        size = sum(map(_size, files.values()))
        seconds = self.policy.transfer_seconds(size)
        infos = self._run("put", f"{len(files):,} files", lambda: commits.commit(files, deleted), seconds)
        self.metrics.count("bytes_written", size)
        return infos

    def pinned(self) -> ResilientStore:
        """Return a store fixed at the current state of its URL if the store supports that, otherwise itself.

        For a branch of a repository, that state is its latest commit, which the result's URL names.
        """
        if not isinstance(self._store, HubStore) or self._store.is_pinned:
            return self
        return ResilientStore(
            self._run("head", "", self._store.pinned),
            self.policy,
            self.metrics,
            connections=self._connections,
            has_answered=True,
            shares_limit=self._shares_limit,
        )

    def close(self) -> None:
        self._store.close()

    def _list_after(self, prefix: str, last: str | None) -> Iterator[ObjectInfo]:
        return (info for info in self._store.list(prefix) if last is None or info.key > last)

    def _run(
        self, operation: Operation, key: str, request: Callable[[], T], seconds: float | None = None
    ) -> T:
        call = self._call(operation, key, seconds)
        try:
            return call.answer(request)
        finally:
            call.leave()

    def _open(
        self, operation: Operation, key: str, start: int, stop: int | None, version: str | None
    ) -> ResilientBody:
        def request(position: int, version: str | None) -> Body:
            return self._store.open(key, position, stop, version=version)

        return ResilientBody(self._call(operation, key), request, start, stop, version)

    def _call(self, operation: Operation, key: str, seconds: float | None = None) -> Call:
        return Call(self._upstream, operation, self.where(key), urgent=self._urgent, seconds=seconds)

    def _find_same(
        self, key: str, data: bytes | Path, size: int, metadata: Mapping[str, str] | None
    ) -> ObjectInfo | None:
        """Return the object at `key` if it is exactly what putting `data` would create, else None."""
        info = self.head(key)
        if info.bytes != size or (info.metadata and info.metadata != (metadata or {})):
            return None
        piece = memoryview(bytearray(_COMPARED_AT_ONCE))
        with (
            self._open("get", key, 0, None, info.version or None) as body,
            open_source(self.where(key), data) as source,
        ):
            while count := body.readinto(piece):
                if source.read(count) != piece[:count]:
                    return None
        return info


class ResilientBody(BaseBody):
    """A body that resumes after broken connections: it delivers one version of the object, or fails.

    A connection that breaks, ends early or is too slow is closed, and the range is opened again from the next
    byte, on the version that was seen first. If the object was replaced, the read raises ObjectChangedError
    and never returns a mixture. The time limit of retries starts at the last byte that arrived; the total
    time of all reads is limited according to the size of the range. Without failures, each read takes about
    two microseconds more than a read of the wrapped body. A connection without data is detected only after
    the store's read timeout, which this layer cannot shorten.
    """

    def __init__(
        self,
        call: Call,
        request: Callable[[int, str | None], Body],
        start: int,
        stop: int | None,
        version: str | None,
    ) -> None:
        """`request(position, version)` opens the range from `position` on; version None means any version."""
        self._call, self._request = call, request
        self._policy, self._metrics = call.upstream.policy, call.upstream.metrics
        raw = call.answer(lambda: request(start, version), discard=_close)
        self._raw: Body | None = raw
        self.info = raw.info
        self._closed = threading.Event()
        self._start = self._position = start
        self._stop = self.info.bytes if stop is None else min(stop, self.info.bytes)
        self._left_seconds = self._policy.transfer_seconds(self._stop - start)
        self._rate = 0.0
        self._window_seconds = self._policy.window_seconds
        self._window_start = start
        self._window_used = 0.0  # seconds spent in reads in this window, without pauses of the reader
        self._advance(0)

    def readinto(self, buffer: memoryview, /) -> int:
        began = self._policy.clock()
        try:
            count = self._next(buffer)
        except TransientError as error:
            return self._resume(buffer, error, began)
        self._window_used += self._policy.clock() - began
        self._advance(count)
        if self._window_used >= self._window_seconds:
            self._check_rate()
        return count

    @property
    def left(self) -> int:
        return max(0, self._stop - self._position)

    def close(self) -> None:
        """Close the body; if another thread is reading, its read fails as soon as the connection does."""
        self._closed.set()
        self._release()

    def _next(self, buffer: memoryview) -> int:
        """Read from the open connection; count an error or early end as a failure of the store."""
        raw = self._raw
        if self._closed.is_set():
            raise ValueError("cannot read from a closed body")
        if self._position >= self._stop:
            return 0
        try:
            if raw is None:  # `_check_rate` has closed the connection
                problem = f"the body arrives too slowly, at {self._rate:,.0f} bytes per second"
                raise TransientError(self._call.where, problem)
            count = raw.readinto(buffer)
            if not count:
                raise TransientError(self._call.where, "the connection ended early")
        except TransientError as error:
            self._call.upstream.failed(error)
            raise
        return count

    def _advance(self, count: int) -> None:
        """Count `count` received bytes. After the last byte, leave the gate: `close` may come much later."""
        self._position += count
        self._metrics.count("bytes_read", count)
        if self._position >= self._stop:
            self._release()
        if self._position > self._stop:
            problem = f"the store sent {self._position - self._stop:,} bytes more than were requested"
            raise StoreError(self._call.where, problem)

    def _check_rate(self) -> None:
        """Close the connection if it is too slow; the next read then opens the rest of the range again."""
        self._rate = (self._position - self._window_start) / self._window_used
        self._left_seconds -= self._window_used
        self._window_start, self._window_used = self._position, 0.0
        if self._rate < self._policy.floor_bytes_per_second and self._position < self._stop:
            longest = max(self._policy.window_seconds, self._left_seconds)
            self._window_seconds = min(2 * self._window_seconds, longest)
            self._metrics.count("slow_bodies")
            self._release()

    def _resume(self, buffer: memoryview, error: TransientError, began: float) -> int:
        """Open the rest of the range again, repeatedly if necessary, until some bytes are in `buffer`."""
        call, position, version = self._call, self._position, self.info.version
        self._left_seconds -= self._window_used
        seconds = min(self._policy.deadline_seconds, self._left_seconds)
        arrived = f"{position - self._start:,} of {self._stop - self._start:,} bytes had arrived"
        call.restart("read", began, seconds, arrived)
        while True:
            self._release()
            if self._closed.is_set() or not version:
                raise error  # without a version, a replaced object could not be detected
            raw = self._raw = call.answer(
                lambda: self._request(position, version), failure=error, discard=_close
            )
            if self._closed.is_set():
                self._release()
                raise error
            if raw.info.version != version or raw.info.bytes != self.info.bytes:
                self._release()
                raise ObjectChangedError(call.where, f"was replaced while it was read ({arrived})")
            self._metrics.count("resumed_bodies")
            try:
                count = self._next(buffer)
                break
            except TransientError as raised:
                error = raised
        self._left_seconds -= self._policy.clock() - began
        self._window_start, self._window_used = position + count, 0.0
        self._advance(count)
        return count

    def _release(self) -> None:
        """Close the connection and leave the gate."""
        raw, self._raw = self._raw, None
        if raw is not None:
            _close(raw)
        self._call.leave()


def _close(body: Body) -> None:
    with suppress(StoreError):
        body.close()


def _size(data: bytes | Path) -> int:
    try:
        return data.stat().st_size if isinstance(data, Path) else len(data)
    except OSError:
        return 0  # the store will report what is wrong with the file
