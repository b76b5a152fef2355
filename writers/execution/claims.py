"""Who is at what, when several processes share the work: leases that save work and decide nothing.

    sessions/<session>     rewritten every few seconds while a process lives
    claims/<key>           the session that is at a task, or at the publication

A session whose object has not changed for `LEASE_SECONDS` of the observer's own clock is dead, and its claims
are free: no two machines' clocks are compared. A claim that fails, two who take over at once, or one who was
only asleep, cost a task done twice, with the same bytes; what is finished is decided by commits alone. So
errors of the store are not raised here: the worst that follows is more work.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from shardkit.storage.store import ObjectExistsError, Store, StoreError

__all__ = ["BEAT_SECONDS", "LEASE_SECONDS", "Claims"]

LEASE_SECONDS = 60.0
BEAT_SECONDS = 10.0

_NEVER = float("-inf")


class Claims:
    """The claims of one process, from `with` to its end; `name` tells people who that is."""

    def __init__(
        self,
        store: Store,
        *,
        name: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = name or f"{socket.gethostname()[:40]}-{os.getpid()}-{os.urandom(4).hex()}"
        self._store, self._clock = store, clock
        self._lease_seconds, self._beat_seconds = lease_seconds, beat_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="shardkit-claims", daemon=True)
        self._seen: dict[str, tuple[str, float]] = {}  # session -> version of its object, when first seen so
        self._claims: dict[str, str] = {}  # key -> version of its claim
        self._holders: dict[tuple[str, str], str] = {}
        self._contested: set[str] = set()  # claimed by another one since the last look
        self._mine: set[str] = set()
        self._beaten = _NEVER  # when this session last said that it lives
        self._doubtful: set[str] = set()  # mine, but others may have taken them over since

    def __enter__(self) -> Self:
        self._beat(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(self._beat_seconds)
        with contextlib.suppress(StoreError):  # the first failure ends it: others wait for the lease
            for key in sorted(self._mine):
                self._store.delete(f"claims/{key}")
            self._store.delete(f"sessions/{self.session}")
            if next(iter(self._store.list("sessions/")), None) is None:  # what killed ones left
                for info in list(self._store.list("claims/")):
                    self._store.delete(info.key)
        self._mine.clear()

    def refresh(self) -> None:
        """Look at what the others say. Two listings."""
        now = self._clock()
        try:  # claims first: whoever has one has had a session before
            claims = {info.key.removeprefix("claims/"): info.version for info in self._store.list("claims/")}
            sessions = {info.key.removeprefix("sessions/"): info for info in self._store.list("sessions/")}
        except StoreError:
            return
        for session, info in sessions.items():
            version, _ = self._seen.get(session, ("", _NEVER))
            if version != info.version:
                self._seen[session] = (info.version, now)
        self._seen = {session: seen for session, seen in self._seen.items() if session in sessions}
        self._claims = claims
        self._contested.clear()
        self._holders = {
            known: who for known, who in self._holders.items() if claims.get(known[0]) == known[1]
        }
        for session in [session for session in self._seen if not self._lives(session)]:
            self._bury(session)

    def holder(self, key: str) -> str | None:
        """The living session of another process that has a claim, as of the last `refresh`."""
        if key in self._contested:
            return "another process"
        if key in self._mine or key not in self._claims:
            return None
        session = self._session_of(key)
        return session if session is not None and self._lives(session) else None

    def take(self, key: str) -> bool:
        """Say that this process is at it; False if another one that lives was faster."""
        if self.holder(key) is not None:
            return False
        stale = key in self._claims
        try:
            self._store.put(f"claims/{key}", self.session.encode(), if_absent=not stale)
        except ObjectExistsError:
            self._contested.add(key)  # whose it is, the next refresh tells
            return False
        except StoreError:
            pass
        self._mine.add(key)
        return True

    def release(self, key: str) -> None:
        """This process is no longer at it."""
        self._mine.discard(key)
        self._claims.pop(key, None)
        with contextlib.suppress(StoreError):
            is_sure = key not in self._doubtful and self._clock() - self._beaten < self._lease_seconds
            if is_sure or self._store.get(f"claims/{key}") == self.session.encode():
                self._store.delete(f"claims/{key}")
        self._doubtful.discard(key)

    def _lives(self, session: str) -> bool:
        _, since = self._seen.get(session, ("", _NEVER))
        return session == self.session or self._clock() - since < self._lease_seconds

    def _session_of(self, key: str) -> str | None:
        known = key, self._claims[key]
        if known not in self._holders:
            try:
                self._holders[known] = self._store.get(f"claims/{key}").decode(errors="replace")
            except StoreError:
                return None
        return self._holders[known]

    def _bury(self, session: str) -> None:
        """Remove what a dead one left. If it was only asleep, it says so again, and lost nothing but time."""
        with contextlib.suppress(StoreError):
            for key in [key for key in self._claims if self._session_of(key) == session]:
                self._store.delete(f"claims/{key}")
                del self._claims[key]
            self._store.delete(f"sessions/{session}")
            del self._seen[session]

    def _beat_on(self) -> None:
        number = 0
        while not self._ended.wait(self._beat_seconds):
            number += 1
            self._beat(number)

    def _beat(self, number: int) -> None:
        now = self._clock()
        if now - self._beaten >= self._lease_seconds:  # it was asleep, or cut off
            self._doubtful |= self._mine
        with contextlib.suppress(StoreError):
            self._store.put(f"sessions/{self.session}", f"{number}".encode())
            self._beaten = now
