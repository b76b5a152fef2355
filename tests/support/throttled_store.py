"""A store that behaves as if it were far away: requests have a latency, and connections a bandwidth.

Wraps any store and keeps its contract. The bandwidth holds over a whole body: after a late read the next ones
are faster, as far as a network's buffers allow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from shardkit.files import Closing
from shardkit.storage.store import Body, ObjectInfo, Store

__all__ = ["ThrottledStore"]

_STEP_SECONDS = 0.02  # of bandwidth in one read at most: a large buffer must not bring bursts
_BUFFERED_SECONDS = 0.1  # of bandwidth that arrives while nobody reads


class ThrottledStore:
    """`store`, with every request delayed by `latency_seconds` and bodies at `bytes_per_second` each.

    Only the default `clock` and `sleep` can be pickled with it.
    """

    def __init__(
        self,
        store: Store,
        *,
        latency_seconds: float = 0.0,
        bytes_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not (latency_seconds >= 0 and (bytes_per_second is None or bytes_per_second > 0)):
            raise ValueError("latency_seconds must not be below 0, and bytes_per_second must be above 0")
        self._store = store
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep

    @property
    def url(self) -> str:
        return self._store.url

    def head(self, key: str) -> ObjectInfo:
        self._wait()
        return self._store.head(key)

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        self._wait()
        data = self._store.get(key, start, stop, version=version)
        self._wait_for(len(data))
        return data

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        self._wait()
        body = self._store.open(key, start, stop, version=version)
        if self._bytes_per_second is None:
            return body
        return ThrottledBody(body, self._bytes_per_second, self._clock, self._sleep)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        self._wait()
        info = self._store.put(key, data, if_absent=if_absent, metadata=metadata)
        self._wait_for(info.bytes)
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._wait()
        yield from self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._wait()
        self._store.delete(key)

    def close(self) -> None:
        self._store.close()

    def _wait(self) -> None:
        if self._latency_seconds:
            self._sleep(self._latency_seconds)

    def _wait_for(self, count: int) -> None:
        if self._bytes_per_second is not None and count:
            self._sleep(count / self._bytes_per_second)


class ThrottledBody(Closing):
    """A body that returns no more than its bandwidth allows."""

    def __init__(
        self, body: Body, bytes_per_second: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._body = body
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._step_bytes = max(1, math.floor(bytes_per_second * _STEP_SECONDS))
        self._due = clock()

    @property
    def info(self) -> ObjectInfo:
        return self._body.info

    def readinto(self, buffer: memoryview, /) -> int:
        count = self._body.readinto(buffer[: self._step_bytes])
        now = self._clock()
        self._due = max(self._due, now - _BUFFERED_SECONDS) + count / self._bytes_per_second
        if self._due > now:
            self._sleep(self._due - now)
        return count

    def close(self) -> None:
        self._body.close()
