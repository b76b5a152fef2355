"""Who is at what, when several processes share the work: leases that save work and decide nothing.

    sessions/<session>     rewritten every few seconds while a process lives
    claims/<task key>      the session that is at a task

A session whose object has not changed for `LEASE_SECONDS` of the observer's own clock is dead, and its claims
are free: no two machines' clocks are compared. A claim that fails, or two who take over at once, cost a task
done twice, with the same bytes; what is finished is decided by commits alone. So errors of the store are
not raised here: the worst that follows is more work.
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

from shardkit.storage.errors import ObjectExistsError, StoreError
from shardkit.storage.store import Store
from shardkit.writers.execution.task import Task

__all__ = ["BEAT_SECONDS", "LEASE_SECONDS", "Claims"]

LEASE_SECONDS = 60.0
BEAT_SECONDS = 10.0


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
        self._claims: dict[str, str] = {}  # task key -> version of its claim
        self._holders: dict[tuple[str, str], str] = {}
        self._contested: set[str] = set()  # claimed by another one since the last look
        self._mine: set[str] = set()

    def __enter__(self) -> Self:
        self._beat(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(self._beat_seconds)
        for key in list(self._mine):
            self.release(key)
        self._try(lambda: self._store.delete(f"sessions/{self.session}"))

    def refresh(self) -> None:
        """Look at what the others say. Two listings."""
        now = self._clock()
        try:  # claims first: whoever has one has had a session before
            claims = {info.key.removeprefix("claims/"): info.version for info in self._store.list("claims/")}
            sessions = {info.key.removeprefix("sessions/"): info for info in self._store.list("sessions/")}
        except StoreError:
            return
        for session, info in sessions.items():
            version, _ = self._seen.get(session, ("", 0.0))
            if version != info.version:
                self._seen[session] = (info.version, now)
        self._seen = {session: seen for session, seen in self._seen.items() if session in sessions}
        self._claims = claims
        self._contested.clear()
        self._holders = {known: holder for known, holder in self._holders.items() if known[0] in claims}

    def holder(self, task: Task) -> str | None:
        """The living session of another process that is at a task, as of the last `refresh`."""
        if task.key in self._contested:
            return "another process"
        version = self._claims.get(task.key)
        if version is None or task.key in self._mine:
            return None
        if (task.key, version) not in self._holders:
            try:
                self._holders[task.key, version] = self._store.get(f"claims/{task.key}").decode(
                    errors="replace"
                )
            except StoreError:
                return None
        session = self._holders[task.key, version]
        _, since = self._seen.get(session, ("", float("-inf")))
        return session if self._clock() - since < self._lease_seconds else None

    def take(self, task: Task) -> bool:
        """Say that this process is at a task; False if another one that lives was faster."""
        if self.holder(task) is not None:
            return False
        stale = task.key in self._claims
        try:
            self._store.put(f"claims/{task.key}", self.session.encode(), if_absent=not stale)
        except ObjectExistsError:
            self._contested.add(task.key)  # whose it is, the next refresh tells
            return False
        except StoreError:
            pass
        self._mine.add(task.key)
        return True

    def release(self, key: str) -> None:
        """This process is no longer at a task."""
        self._mine.discard(key)
        self._claims.pop(key, None)
        self._try(lambda: self._store.delete(f"claims/{key}"))

    def _beat_on(self) -> None:
        number = 0
        while not self._ended.wait(self._beat_seconds):
            number += 1
            self._beat(number)

    def _beat(self, number: int) -> None:
        self._try(lambda: self._store.put(f"sessions/{self.session}", f"{number}".encode()))

    @staticmethod
    def _try(call: Callable[[], object]) -> None:
        with contextlib.suppress(StoreError):
            call()
