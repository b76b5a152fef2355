"""A store that does to each request what a script says, and a clock that only moves when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Body, ObjectInfo, StoreError, ThrottledError, TransientError

_NUMBERS = count()
Kind = Literal["error", "throttle", "refuse", "break", "short", "lost", "slow"]


@dataclass(frozen=True)
class Fault:
    """What one request meets: fails at once, or its body after `after` bytes ("slow": a byte in 10 s)."""

    kind: Kind
    after: int = 0


class FakeClock:
    """Seconds pass in `sleep` only."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class ScriptedStore:
    """Each request takes the next entry of `script`; after its end all goes well. `log` has the requests."""

    def __init__(self, script: Sequence[Fault | None] = (), clock: FakeClock | None = None) -> None:
        self.inner = MemoryStore(f"memory://scripted-{next(_NUMBERS)}")  # an id() comes again: not a name
        self.script = list(script)
        self.clock = clock or FakeClock()
        self.log: list[str] = []
        self.open_bodies = self.opened = 0
        self.versions: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.inner.url

    def next(self, operation: str, key: str) -> Fault | None:
        with self.lock:
            self.log.append(operation)
            fault = self.script.pop(0) if self.script else None
        if fault is None:
            return None
        if fault.kind == "error":
            raise TransientError(f"{self.url}/{key}", "internal error", status=500)
        if fault.kind == "throttle":
            raise ThrottledError(f"{self.url}/{key}", "slow down", status=503)
        if fault.kind == "refuse":
            raise StoreError(f"{self.url}/{key}", "access denied", status=403)
        return fault

    def head(self, key: str) -> ObjectInfo:
        self.next("head", key)
        return self.inner.head(key)

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        with self.open(key, start, stop, version=version) as body:
            data = bytearray(body.info.bytes)
            return bytes(data[: body.readinto(memoryview(data))])

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        fault = self.next("open", key)
        self.versions.append(version)
        return ScriptedBody(self, self.inner.open(key, start, stop, version=version), fault)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        fault = self.next("put", key)
        info = self.inner.put(key, data, if_absent=if_absent, metadata=metadata)
        if fault is not None and fault.kind == "lost":
            raise TransientError(f"{self.url}/{key}", "connection reset", status=None)
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(self.inner.list(prefix)):
            if number % 10 == 0:  # a page
                self.next("list", prefix)
            yield info

    def delete(self, key: str) -> None:
        self.next("delete", key)
        self.inner.delete(key)

    def close(self) -> None:
        self.log.append("close")


class ScriptedBody:
    def __init__(self, store: ScriptedStore, body: Body, fault: Fault | None) -> None:
        self.info = body.info
        self._store, self._body, self._fault = store, body, fault
        self._read = 0
        self._is_open = True
        store.open_bodies += 1
        store.opened += 1

    def readinto(self, buffer: memoryview, /) -> int:
        assert self._is_open
        fault = self._fault
        if fault is None:
            return self._body.readinto(buffer)
        left = fault.after - self._read
        if left <= 0 and fault.kind == "break":
            raise TransientError(f"{self._store.url}/{self.info.key}", "connection reset")
        if left <= 0 and fault.kind == "short":
            return 0
        if left <= 0 and fault.kind == "slow":
            self._store.clock.now += 10.0
            left = 1
        count = self._body.readinto(buffer[:left])
        self._read += count
        return count

    def close(self) -> None:
        self._store.open_bodies -= self._is_open
        self._is_open = False
        self._body.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
