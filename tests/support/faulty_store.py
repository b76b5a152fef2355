"""A store that injects faults by rules, the same ones in every run with the same seed.

Wraps any store and keeps its contract otherwise. Whether a rule with a probability applies depends on the
seed, the key and the number of requests for the key, not on the order of threads. The log has what happened.
Every fault ends by itself: a request hangs until `release` is called or its `seconds` are over.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import xxhash

from shardkit.files import Closing
from shardkit.storage.store import Body, ObjectInfo, Store, StoreError, ThrottledError, TransientError

__all__ = ["BodyFault", "Event", "Fault", "FaultRule", "FaultyStore", "Operation", "RequestFault"]

Operation = Literal["any", "read", "head", "get", "open", "put", "list", "delete"]
"""`read` is get and open."""
RequestFault = Literal["throttle", "error", "refuse", "deny", "hang", "lost_ack"]
BodyFault = Literal["reset", "truncate", "stall", "corrupt", "trickle"]
Fault = RequestFault | BodyFault
"""Of a request, which then has no effect: throttle (ThrottledError, 503), error (TransientError, 500), refuse
(TransientError without status), deny (StoreError, 403), hang (no answer, then TransientError). Of a request
that has its effect: lost_ack (TransientError).

Of the body of a read, once it has handed out `after_bytes` of its range: reset and truncate (TransientError),
stall (nothing for `seconds`, then TransientError), corrupt (the next byte is another), trickle (from there on
one byte at a time, `seconds` apart). A body that ends before is left alone; other requests fail whole."""
_FAULTS = (*get_args(RequestFault), *get_args(BodyFault))


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
    """How long hang and stall last, and between two bytes of a trickle."""

    def __post_init__(self) -> None:
        if self.fault not in _FAULTS or self.operation not in get_args(Operation):
            raise ValueError(f"unknown fault or operation: {self.fault!r}, {self.operation!r}")
        if not 0 <= self.probability <= 1 or min(self.skip, self.after_bytes, self.seconds) < 0:
            raise ValueError("probability must be from 0 to 1; skip, after_bytes and seconds not below 0")
        re.compile(self.key)

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


class FaultyStore:
    """`store`, with the faults of `rules`; of several that fit a request, the first strikes."""

    def __init__(self, store: Store, rules: Sequence[FaultRule] = (), *, seed: int = 0) -> None:
        self._store = store
        self._seed = seed
        self._remade(tuple(rules))

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def log(self) -> list[Event]:
        """What happened so far, in order."""
        with self._lock:
            return list(self._log)

    def release(self) -> None:
        """End all that hangs, now and from now on."""
        self._released.set()

    def head(self, key: str) -> ObjectInfo:
        rule = self._strike("head", key)
        info = self._store.head(key)
        self._acknowledge(rule, key)
        return info

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        with self._opened("get", key, start, stop, version) as body:
            data, buffer = bytearray(), memoryview(bytearray(1 << 16))
            while count := body.readinto(buffer):
                data += buffer[:count]
            return bytes(data)

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        return self._opened("open", key, start, stop, version)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        rule = self._strike("put", key)
        info = self._store.put(key, data, if_absent=if_absent, metadata=metadata)
        self._acknowledge(rule, key)
        return info

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        rule = self._strike("list", prefix)
        yield from self._store.list(prefix)
        self._acknowledge(rule, prefix)

    def delete(self, key: str) -> None:
        rule = self._strike("delete", key)
        self._store.delete(key)
        self._acknowledge(rule, key)

    def close(self) -> None:
        self._store.close()

    def __getstate__(self) -> tuple[Store, tuple[FaultRule, ...], int]:
        return self._store, self._rules, self._seed

    def __setstate__(self, state: tuple[Store, tuple[FaultRule, ...], int]) -> None:
        self._store, rules, self._seed = state
        self._remade(rules)

    def _remade(self, rules: tuple[FaultRule, ...]) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._log: list[Event] = []
        self._concerned = [0] * len(rules)
        self._struck = [0] * len(rules)
        self._asked: Counter[tuple[int, str, str]] = Counter()

    def _opened(self, operation: str, key: str, start: int, stop: int | None, version: str | None) -> Body:
        rule = self._strike(operation, key)
        body = self._store.open(key, start, stop, version=version)
        if rule is None:
            return body
        if rule.fault == "lost_ack":
            body.close()
            self._acknowledge(rule, key)
        size = body.info.bytes
        length = (size if stop is None else min(stop, size)) - start
        return FaultyBody(body, rule, self._where(key), length, self._released)

    def _strike(self, operation: str, key: str) -> FaultRule | None:
        """The rule that this request meets; raises if that is the end of it."""
        rule = self._rule_for(operation, key)
        if rule is None or rule.fault == "lost_ack":
            return rule
        if rule.fault in get_args(BodyFault) and operation in ("get", "open"):
            return rule
        where, fault = self._where(key), rule.fault
        if fault in ("hang", "stall"):
            self._released.wait(rule.seconds)
            raise TransientError(where, "no answer (injected)")
        if fault == "throttle":
            raise ThrottledError(where, "SlowDown (injected)", status=503)
        if fault == "deny":
            raise StoreError(where, "AccessDenied (injected)", status=403)
        if fault == "error":
            raise TransientError(where, "InternalError (injected)", status=500)
        raise TransientError(where, f"{fault} (injected)")

    def _rule_for(self, operation: str, key: str) -> FaultRule | None:
        with self._lock:
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

    def _draw(self, number: int, operation: str, key: str) -> float:
        """Uniform in [0, 1)."""
        text = f"{self._seed} {number} {operation} {self._asked[number, operation, key]} {key}"
        return xxhash.xxh64_intdigest(text) / 2.0**64 if self._rules[number].probability < 1 else 0.0

    def _acknowledge(self, rule: FaultRule | None, key: str) -> None:
        if rule is not None and rule.fault == "lost_ack":
            raise TransientError(self._where(key), "the answer was lost (injected)")

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}"


class FaultyBody(Closing):
    """A body that meets its rule's fault after so many bytes."""

    def __init__(
        self, body: Body, rule: FaultRule, where: str, length: int, released: threading.Event
    ) -> None:
        self._body = body
        self._rule = rule
        self._where = where
        self._bytes = length
        self._released = released
        self._done = 0

    @property
    def info(self) -> ObjectInfo:
        return self._body.info

    def readinto(self, buffer: memoryview, /) -> int:
        fault, left = self._rule.fault, self._rule.after_bytes - self._done
        if fault == "corrupt":
            return self._corrupted(buffer, left)
        if left > 0 or self._done == self._bytes:
            return self._count(self._body.readinto(buffer[:left] if left > 0 else buffer))
        if fault == "trickle":
            self._released.wait(self._rule.seconds)
            return self._count(self._body.readinto(buffer[:1]))
        if fault == "stall":
            self._released.wait(self._rule.seconds)
        raise TransientError(self._where, f"{fault} after {self._done:,} bytes (injected)")

    def close(self) -> None:
        self._body.close()

    def _corrupted(self, buffer: memoryview, left: int) -> int:
        count = self._body.readinto(buffer)
        if 0 <= left < count:
            buffer[left] ^= 0xFF
        return self._count(count)

    def _count(self, count: int) -> int:
        self._done += count
        return count
