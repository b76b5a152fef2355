"""Stores that misbehave: wrappers of any store that keep its contract otherwise.

    FaultyStore     faults by rules, the same ones in every run with the same seed
    ScriptedStore   of these faults, one for each request, on a clock that only moves when somebody sleeps
    ThrottledStore  requests with a latency, connections with a bandwidth
    WatchedStore    stops working at an operation, as if the process were killed, and lets a reader look

Each changes one thing of `WrappedStore`: what a request meets (`request`), or the body of a read (`opened`).
"""

from __future__ import annotations

import itertools
import math
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import xxhash

from shardkit.files import Closing
from shardkit.hashing import hash_bytes
from shardkit.publish.contents import checkable_hash, find_contents
from shardkit.storage.memory import MemoryStore
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.retry import RetryPolicy
from shardkit.storage.store import (
    BaseStore,
    Body,
    ObjectInfo,
    ObjectNotFoundError,
    Store,
    StoreError,
    ThrottledError,
    TransientError,
)

__all__ = [
    "BodyFault",
    "Event",
    "FakeClock",
    "FalseIndexError",
    "Fault",
    "FaultRule",
    "FaultyStore",
    "Operation",
    "PulledPlugError",
    "RequestFault",
    "ScriptedStore",
    "ThrottledStore",
    "WatchedStore",
    "WrappedStore",
    "check_reader",
    "fresh_memory",
    "objects",
    "retrying",
]

Operation = Literal["any", "read", "head", "get", "open", "put", "list", "delete"]
"""`read` is get and open."""
RequestFault = Literal["throttle", "error", "refuse", "deny", "hang", "late", "lost_ack"]
BodyFault = Literal["reset", "truncate", "short", "stall", "corrupt", "trickle"]
Fault = RequestFault | BodyFault
"""Of a request, which then has no effect: throttle (ThrottledError, 503), error (TransientError, 500), refuse
(TransientError without status), deny (StoreError, 403), hang (no answer, then TransientError). Of a request
that has its effect: late (after `seconds`), lost_ack (TransientError).

Of the body of a read, once it has handed out `after_bytes` of its range: reset and truncate (TransientError),
short (ends, as no store should), stall (nothing for `seconds`, then TransientError), corrupt (the next byte
is another), trickle (from there on one byte at a time, `seconds` apart). A body that ends before is left
alone; other requests fail whole."""
_STEP_SECONDS = 0.02  # of bandwidth in one read at most: a large buffer must not bring bursts
_BUFFERED_SECONDS = 0.1  # of bandwidth that arrives while nobody reads

T = TypeVar("T")
_numbers = itertools.count()


class WrappedStore:
    """`below`, with every request passed through `request`."""

    def __init__(self, below: Store) -> None:
        self.below = below

    @property
    def url(self) -> str:
        return self.below.url

    def request(self, operation: str, key: str, action: Callable[[], T]) -> T:
        return action()

    def opened(self, operation: str, key: str, start: int, stop: int | None, version: str | None) -> Body:
        """The body of a `get` or an `open`."""
        return self.request(operation, key, lambda: self.below.open(key, start, stop, version=version))

    def head(self, key: str) -> ObjectInfo:
        return self.request("head", key, lambda: self.below.head(key))

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        with self.opened("get", key, start, stop, version) as body:
            data, buffer = bytearray(), memoryview(bytearray(1 << 16))
            while count := body.readinto(buffer):
                data += buffer[:count]
            return bytes(data)

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        return self.opened("open", key, start, stop, version)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        return self.request(
            "put", key, lambda: self.below.put(key, data, if_absent=if_absent, metadata=metadata)
        )

    def put_folder(
        self, prefix: str, folder: Path, last: str, data: bytes, hashes: Mapping[str, str] | None = None
    ) -> None:
        BaseStore.put_folder(cast(BaseStore, self), prefix, folder, last, data, hashes)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from self.request("list", prefix, lambda: [*self.below.list(prefix)])

    def delete(self, key: str) -> None:
        self.request("delete", key, lambda: self.below.delete(key))

    def close(self) -> None:
        self.below.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRule:
    """Which requests meet a fault: of `operation`, with a key that contains a match of `key`.

    Of those, the first `skip` are left alone, then each meets it with `probability`, until `count` have.
    """

    fault: Fault
    operation: Operation = "any"
    key: str = ""
    skip: int = 0
    count: int | None = None
    probability: float = 1.0
    after_bytes: int = 0
    seconds: float = 30.0
    """How long hang, late and stall last, and between two bytes of a trickle."""

    def concerns(self, operation: str, key: str) -> bool:
        is_read = operation in ("get", "open")
        is_meant = self.operation in ("any", operation) or (self.operation == "read" and is_read)
        return is_meant and re.search(self.key, key) is not None


@dataclass(frozen=True, slots=True)
class Event:
    """A request that met the rule of this number (counted from 0)."""

    rule: int
    fault: Fault
    operation: str
    key: str


class FaultyStore(WrappedStore):
    """`below`, with the faults of `rules`; of several that fit a request, the first strikes.

    Whether a rule with a probability applies depends on the seed, the key and the number of requests for the
    key, not on the order of threads. `log` has what happened. Every fault ends by itself: a request hangs
    until `release` is called or its `seconds` are over. `bodies` and `open_bodies` count those it handed out.
    """

    def __init__(self, below: Store, rules: Sequence[FaultRule] = (), *, seed: int = 0) -> None:
        super().__init__(below)
        self._rules, self._seed = tuple(rules), seed
        self.lock = threading.Lock()
        self.bodies = self.open_bodies = 0
        self._released = threading.Event()
        self._log: list[Event] = []
        self._concerned = [0] * len(rules)
        self._struck = [0] * len(rules)
        self._asked: Counter[tuple[int, str, str]] = Counter()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.below, self._rules), {"_seed": self._seed}

    @property
    def log(self) -> Sequence[Event]:
        """The events so far, in order."""
        with self.lock:
            return [*self._log]

    def release(self) -> None:
        """End all that hangs, now and from now on."""
        self._released.set()

    def wait(self, seconds: float) -> None:
        self._released.wait(seconds)

    def request(self, operation: str, key: str, action: Callable[[], T]) -> T:
        return self._done(self._strike(operation, key), key, action())

    def opened(self, operation: str, key: str, start: int, stop: int | None, version: str | None) -> Body:
        rule = self._strike(operation, key)
        body = FaultyBody(self, self.below.open(key, start, stop, version=version), rule, start, stop)
        try:
            return self._done(rule, key, body)
        except TransientError:
            body.close()
            raise

    def rule_for(self, operation: str, key: str) -> FaultRule | None:
        """The rule that a request meets."""
        with self.lock:
            for number, rule in enumerate(self._rules):
                if not rule.concerns(operation, key):
                    continue
                self._concerned[number] += 1
                self._asked[number, operation, key] += 1
                if self._concerned[number] <= rule.skip:
                    continue
                if rule.count is not None and self._struck[number] >= rule.count:
                    continue
                if self._draw(number, operation, key) >= rule.probability:
                    continue
                self._struck[number] += 1
                self._log.append(Event(number, rule.fault, operation, key))
                return rule
        return None

    def _strike(self, operation: str, key: str) -> FaultRule | None:
        """The rule that this request meets; raises if that is the end of it."""
        rule = self.rule_for(operation, key)
        if rule is None or rule.fault == "lost_ack":
            return rule
        if rule.fault in get_args(BodyFault) and operation in ("get", "open"):
            return rule
        where, fault = f"{self.url}/{key}", rule.fault
        if fault in ("hang", "late", "stall"):
            self.wait(rule.seconds)
            if fault == "late":
                return rule
            raise TransientError(where, "no answer (injected)")
        if fault == "throttle":
            raise ThrottledError(where, "SlowDown (injected)", status=503)
        if fault == "deny":
            raise StoreError(where, "AccessDenied (injected)", status=403)
        if fault == "error":
            raise TransientError(where, "InternalError (injected)", status=500)
        raise TransientError(where, f"{fault} (injected)")

    def _done(self, rule: FaultRule | None, key: str, result: T) -> T:
        if rule is not None and rule.fault == "lost_ack":
            raise TransientError(f"{self.url}/{key}", "the answer was lost (injected)")
        return result

    def _draw(self, number: int, operation: str, key: str) -> float:
        """Uniform in [0, 1)."""
        text = f"{self._seed} {number} {operation} {self._asked[number, operation, key]} {key}"
        return xxhash.xxh64_intdigest(text.encode()) / 2.0**64 if self._rules[number].probability < 1 else 0.0


class FaultyBody(Closing):
    """A body that meets its rule's fault after so many bytes."""

    def __init__(
        self, store: FaultyStore, body: Body, rule: FaultRule | None, start: int, stop: int | None
    ) -> None:
        self.info = body.info
        self._store, self._body, self._rule = store, body, rule
        self._bytes = (self.info.bytes if stop is None else min(stop, self.info.bytes)) - start
        self._done = 0
        self._is_open = True
        self._count_open(+1)

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._is_open:
            raise ValueError("read of a closed body")
        rule = self._rule
        if rule is None or rule.fault not in get_args(BodyFault):
            return self._body.readinto(buffer)
        left = rule.after_bytes - self._done
        if rule.fault == "corrupt":
            count = self._body.readinto(buffer)
            if 0 <= left < count:
                buffer[left] ^= 0xFF
        elif left > 0 or self._done == self._bytes:
            count = self._body.readinto(buffer[:left] if left > 0 else buffer)
        elif rule.fault == "trickle":
            self._store.wait(rule.seconds)
            count = self._body.readinto(buffer[:1])
        elif rule.fault == "short":
            count = 0
        else:
            if rule.fault == "stall":
                self._store.wait(rule.seconds)
            where = f"{self._store.url}/{self.info.key}"
            raise TransientError(where, f"{rule.fault} after {self._done:,} bytes (injected)")
        self._done += count
        return count

    def close(self) -> None:
        self._count_open(-self._is_open)
        self._is_open = False
        self._body.close()

    def _count_open(self, change: int) -> None:
        with self._store.lock:
            self._store.open_bodies += change
            self._store.bodies += change > 0


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


class ScriptedStore(FaultyStore):
    """A store in memory where each request takes the next entry of `script`; after its end all goes well.

    `requests` has the operations, `versions` those that reads asked for. A listing asks again after every
    ten objects.
    """

    def __init__(self, script: Sequence[FaultRule | None] = (), clock: FakeClock | None = None) -> None:
        super().__init__(fresh_memory())
        self.script = [*script]
        self.clock = clock or FakeClock()
        self.requests: list[str] = []
        self.versions: list[str | None] = []

    def rule_for(self, operation: str, key: str) -> FaultRule | None:
        with self.lock:
            self.requests.append(operation)
            return self.script.pop(0) if self.script else None

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def opened(self, operation: str, key: str, start: int, stop: int | None, version: str | None) -> Body:
        self.versions.append(version)
        return super().opened(operation, key, start, stop, version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(self.below.list(prefix)):
            if number % 10 == 0:  # a page
                self.request("list", prefix, lambda: None)
            yield info

    def close(self) -> None:
        self.requests.append("close")


def retrying(store: ScriptedStore, **settings: Any) -> ResilientStore:
    """`store` with retries on its clock, the same waits in every run, and no hedges."""
    clock, jitter = store.clock, random.Random(7).random
    defaults: dict[str, Any] = {"hedge": False, "clock": clock, "sleep": clock.sleep, "jitter": jitter}
    return ResilientStore(store, RetryPolicy(**(defaults | settings)))


class ThrottledStore(WrappedStore):
    """`below`, with every request delayed by `latency_seconds` and bodies at `bytes_per_second` each.

    The bandwidth holds over a whole body: after a late read the next ones are faster, as far as a network's
    buffers allow. Only the default `clock` and `sleep` can be pickled with it.
    """

    def __init__(
        self,
        below: Store,
        *,
        latency_seconds: float = 0.0,
        bytes_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(below)
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second
        self._clock, self._sleep = clock, sleep

    def request(self, operation: str, key: str, action: Callable[[], T]) -> T:
        if self._latency_seconds:
            self._sleep(self._latency_seconds)
        result = action()
        if operation == "put" and isinstance(result, ObjectInfo) and self._bytes_per_second and result.bytes:
            self._sleep(result.bytes / self._bytes_per_second)
        return result

    def opened(self, operation: str, key: str, start: int, stop: int | None, version: str | None) -> Body:
        body = super().opened(operation, key, start, stop, version)
        if self._bytes_per_second is None:
            return body
        return ThrottledBody(body, self._bytes_per_second, self._clock, self._sleep)


class ThrottledBody(Closing):
    """A body that returns no more than its bandwidth allows."""

    def __init__(
        self, body: Body, bytes_per_second: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self.info = body.info
        self._body = body
        self._bytes_per_second = bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._step_bytes = max(1, math.floor(bytes_per_second * _STEP_SECONDS))
        self._due = clock()

    def readinto(self, buffer: memoryview, /) -> int:
        count = self._body.readinto(buffer[: self._step_bytes])
        now = self._clock()
        self._due = max(self._due, now - _BUFFERED_SECONDS) + count / self._bytes_per_second
        if self._due > now:
            self._sleep(self._due - now)
        return count

    def close(self) -> None:
        self._body.close()


class PulledPlugError(BaseException):
    """Not an Exception: nothing may handle it, as nothing handles a kill."""


class FalseIndexError(BaseException):
    """A reader saw an index without its files. Not an Exception: it must not pass for a failed request."""


class WatchedStore(WrappedStore):
    """`below`, which stops working at operation `limit`: before it, or with `late` just after its effect.

    `watch` is called with its number after every operation. `puts` has the names of what was put.
    """

    def __init__(
        self,
        below: MemoryStore,
        *,
        limit: int | None = None,
        late: bool = False,
        watch: Callable[[int], None] = lambda number: None,
    ) -> None:
        super().__init__(below)
        self._limit, self._late, self._watch = limit, late, watch
        self._lock = threading.RLock()
        self.operations = 0
        self.puts: list[str] = []

    def request(self, operation: str, key: str, action: Callable[[], T]) -> T:
        with self._lock:
            self.operations += 1
            dead = self._limit is not None and self.operations >= self._limit
            if dead and (not self._late or self.operations != self._limit):
                raise PulledPlugError
            try:
                result = action()
                if operation == "put":
                    self.puts.append(key)
                return result
            finally:
                self._watch(self.operations)
                if dead:
                    raise PulledPlugError


def fresh_memory() -> MemoryStore:
    """A memory store that no other test has used."""
    return MemoryStore(f"memory://fresh-{next(_numbers)}/prefix")


def objects(store: Store) -> dict[str, bytes]:
    """All that a store holds."""
    return {info.key: store.get(info.key) for info in store.list()}


def check_reader(store: Store, fingerprints: set[str]) -> None:
    """FalseIndexError unless a reader sees no index, or that of a known dataset with every file whole."""
    found = find_contents(store)
    if len(found) > 1 or not {contents.manifest.fingerprint for contents in found} <= fingerprints:
        raise FalseIndexError(f"{len(found)} indexes, or an unknown one")
    for contents in found:
        for file in contents.files:
            name = checkable_hash(file)
            assert name is not None
            try:
                data = store.get(file.basename)
            except ObjectNotFoundError as error:
                raise FalseIndexError(f"the index is there, {file.basename} is not") from error
            if hash_bytes(data, [name])[name] != file.hashes[name]:
                raise FalseIndexError(f"the index is there, {file.basename} is another's")
