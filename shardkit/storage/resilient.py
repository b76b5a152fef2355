"""A store around a store, that gives up late instead of early, and always gives up.

It tries again what may help (TransientError, ThrottledError), with growing random waits; goes on with bodies
where they broke, on the same version of the object; asks a second time for reads that are slow to start; has
fewer requests open when the store says 503; and ends every operation by a deadline, with an error of the same
kind that says what was tried. The bytes it hands out are the object's, or there is an error.

    store = connect("s3://bucket/dataset")
    with store.open("shard.00000.mds") as body: ...
    store.urgent.get("shard.00000.mds", 0, 4096)   # goes ahead of long transfers

An open body holds one of the store's connections until its last byte is read or it is closed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Self

from shardkit.storage.calls import Calls, Operation
from shardkit.storage.errors import ObjectExistsError, TransientError
from shardkit.storage.metrics import StoreMetrics
from shardkit.storage.options import StorageOptions
from shardkit.storage.resilient_body import ResilientBody
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.store import Body, ObjectInfo, Store
from shardkit.storage.url import open_store

__all__ = ["ResilientStore", "connect"]

_LISTED_AT_ONCE = 1000  # as S3's pages; each step is one request for the gate and the deadline
_COMPARED_AT_ONCE = 1 << 20


def connect(
    url: str | os.PathLike[str],
    options: StorageOptions | None = None,
    *,
    policy: RetryPolicy | None = None,
    metrics: StoreMetrics | None = None,
) -> ResilientStore:
    """`open_store(url, options)` with everything of this module around it. Nothing is contacted yet."""
    options = options or StorageOptions()
    policy = policy or RetryPolicy(deadline_seconds=options.retry_seconds)
    return ResilientStore(open_store(url, options), policy, metrics, connections=options.connections)


class ResilientStore:
    """Keeps the contract of `Store`. A pickled copy counts and limits on its own."""

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
        """The same store (connections, limit, metrics), for reads that others should make way for."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _urgent=True)
        return view

    def head(self, key: str) -> ObjectInfo:
        return self._calls.run("head", self._where(key), lambda: self._store.head(key), urgent=self._urgent)

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """As `open` and read, so it is resumed and hedged likewise."""
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
        """As `Store.put`. Its time is bounded by the size and `RetryPolicy.floor_bytes_per_second`.

        With `if_absent`, an object that is there after a failed try is our own if it has our bytes and our
        metadata, no more and no less; two writers of the very same object may then both succeed.
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
        """As `Store.list`. After a failure it starts over and leaves out what was handed out already."""
        last: str | None = None
        going: Iterator[ObjectInfo] | None = None

        def request() -> tuple[Iterator[ObjectInfo], list[ObjectInfo]]:
            nonlocal going
            # Taken away first: a listing that fails, or is left to itself, is not gone on with.
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
        tries = self._calls.retries(operation, where)
        ticket = self._calls.gate.ticket(urgent=self._urgent)

        def reopen(position: int, version: str | None) -> Body:
            return self._store.open(key, position, stop, version=version)

        raw = self._calls.open(operation, lambda: reopen(start, version), tries, ticket)
        return ResilientBody(self._calls, raw, ticket, where, span, reopen, operation)

    def _find_same(
        self, key: str, data: bytes | Path, size: int, metadata: Mapping[str, str] | None
    ) -> ObjectInfo | None:
        """The object at `key` if it is what a put of `data` leaves there."""
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


def _size(data: bytes | Path) -> int:
    try:
        return data.stat().st_size if isinstance(data, Path) else len(data)
    except OSError:
        return 0  # the store will say what is wrong with the file


def _rebuild(
    store: Store, policy: RetryPolicy, connections: int, has_answered: bool, urgent: bool
) -> ResilientStore:
    rebuilt = ResilientStore(store, policy, connections=connections, has_answered=has_answered)
    return rebuilt.urgent if urgent else rebuilt
