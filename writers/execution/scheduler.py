"""Task queues of a stage, and advisory leases between processes that share a build.

An engine takes tasks from a queue and reports finished ones to it. `OwnQueue` hands out every task.
`SharedQueue` hands out tasks that no other live process has claimed, and picks up what others commit:
machines that run the same build share its work, and one that joins late or stops changes only the time.
`take_turn` lets one process at a time do a step, such as publishing.

Leases are objects in the shared part of the work folder:

    sessions/<session>     heartbeat, rewritten every few seconds while a process lives
    claims/<key>           the session that works on a task, or on the publication

A session whose heartbeat has not changed for `LEASE_SECONDS` of the observer's own clock is dead, and its
claims are free; clocks of different machines are never compared. Leases save work, and correctness comes from
commits: a lost claim, two takeovers at once, or a process that was only suspended cost a task run twice, with
the same bytes. So store errors are not raised here: the worst result is duplicate work.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import xxhash

from shardkit.errors import BuildError
from shardkit.storage.store import ObjectExistsError, Store, StoreError
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work

__all__ = [
    "BEAT_SECONDS",
    "LEASE_SECONDS",
    "TURN_SECONDS",
    "Claims",
    "OwnQueue",
    "SharedQueue",
    "TaskQueue",
    "TaskSlice",
    "Waiting",
    "take_turn",
]

LEASE_SECONDS = 60.0

BEAT_SECONDS = 10.0

_NEVER = float("-inf")


class Claims:
    """The claims of one process, for the length of a `with`; `name` identifies it to people."""

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
        self._seen: dict[
            str, tuple[str, float]
        ] = {}  # session -> version of its heartbeat, and when that was first seen
        self._claims: dict[str, str] = {}  # key -> version of its claim
        self._holders: dict[tuple[str, str], str] = {}
        self._contested: set[str] = set()  # claimed by another process since the last refresh
        self._mine: set[str] = set()
        self._beaten = _NEVER  # time of the last successful heartbeat
        self._doubtful: set[str] = (
            set()
        )  # mine, but the lease may have expired and another process may hold them

    def __enter__(self) -> Self:
        self._beat(0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(self._beat_seconds)
        with contextlib.suppress(StoreError):  # after a failure the rest stays, and expires with the lease
            for key in sorted(self._mine):
                self._store.delete(f"claims/{key}")
            self._store.delete(f"sessions/{self.session}")
            if next(iter(self._store.list("sessions/")), None) is None:  # left by killed processes
                for info in list(self._store.list("claims/")):
                    self._store.delete(info.key)
        self._mine.clear()

    def refresh(self) -> None:
        """Read the claims and heartbeats of all processes: two list requests."""
        now = self._clock()
        try:  # claims first: a claim is always preceded by its session
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
        """The live session of another process that holds the claim, as of the last `refresh`."""
        if key in self._contested:
            return "another process"
        if key in self._mine or key not in self._claims:
            return None
        session = self._session_of(key)
        return session if session is not None and self._lives(session) else None

    def take(self, key: str) -> bool:
        """Claim the key for this process; False if another live process holds it."""
        if self.holder(key) is not None:
            return False
        stale = key in self._claims
        try:
            self._store.put(f"claims/{key}", self.session.encode(), if_absent=not stale)
        except ObjectExistsError:
            self._contested.add(key)  # the next refresh finds out whose it is
            return False
        except StoreError:
            pass
        self._mine.add(key)
        return True

    def release(self, key: str) -> None:
        """Give up the claim."""
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
        """Remove the objects of a dead session. If it was only suspended, its next heartbeat restores it."""
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
        if (
            now - self._beaten >= self._lease_seconds
        ):  # the process was suspended, or the store was unreachable
            self._doubtful |= self._mine
        with contextlib.suppress(StoreError):
            self._store.put(f"sessions/{self.session}", f"{number}".encode())
            self._beaten = now


POLL_SECONDS = 2.0  # at most, while this process is idle

_SOON_SECONDS = 0.1  # first poll of a process that becomes idle; doubles with each that finds nothing

BUSY_POLL_SECONDS = 15.0  # while it is busy: conflicts are noticed when a claim fails

_POLL_SHARE = 0.05  # of a busy process's time spent polling, for any number of tasks; of an idle one's, half

_FINISHED_FOUND = 3  # consecutive tasks that others had finished: then poll for all of them

WAIT_SECONDS = 6 * 3600.0  # without any task finished: a process hangs, or a task is far too big

_ORDERS = 16

Done = Callable[[Commit], None]

Waiting = Callable[[Mapping[str, int]], None]

"""Called with {session: number of tasks} that this process waits for; "" stands for unclaimed tasks."""


class TaskQueue(Protocol):
    """The unfinished tasks of a stage."""

    @property
    def exhausted(self) -> bool:
        """Whether all tasks are finished, here or elsewhere."""

    @property
    def poll_seconds(self) -> float | None:
        """How often to `take` again while there is room for a task; None: no new tasks will appear."""

    def take(self) -> Task | None:
        """A task to run now, heavy ones first; None if none is available at the moment."""

    def done(self, commit: Commit) -> None:
        """Report that a task that was taken is finished."""


class OwnQueue:
    """All tasks, for one process."""

    poll_seconds = None

    def __init__(self, tasks: Sequence[Task], done: Done) -> None:
        self._waiting = sorted(tasks, key=lambda task: task.weight)  # the heaviest is last
        self._open = len(tasks)
        self._done = done

    @property
    def exhausted(self) -> bool:
        return not self._open

    def take(self) -> Task | None:
        return self._waiting.pop() if self._waiting else None

    def done(self, commit: Commit) -> None:
        self._open -= 1
        self._done(commit)


@dataclass(frozen=True, slots=True)
class TaskSlice:
    """Number `index` of `count` processes that share a build: which tasks it takes first."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise BuildError(f"task slice {self.index}/{self.count}: must be one of 0/n to (n-1)/n")

    def rank(self, task: Task) -> int:
        """0 for its own tasks, then those of the next process, and so on."""
        owner = xxhash.xxh3_64_intdigest(f"{task.stage}/{task.name}") % self.count
        return (owner - self.index) % self.count


class SharedQueue:
    """Tasks that no live process has claimed: own slice first, then others, heavy ones first in each."""

    def __init__(
        self,
        tasks: Sequence[Task],
        done: Done,
        work: Work,
        claims: Claims,
        slice: TaskSlice | None,
        *,
        waiting: Waiting = lambda holders: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Without a slice, the session's name gives one, so that processes begin at different tasks.
        order = slice or TaskSlice(xxhash.xxh3_64_intdigest(claims.session) % _ORDERS, _ORDERS)
        self._waiting = {task.key: task for task in sorted(tasks, key=lambda t: (order.rank(t), -t.weight))}
        self._running: dict[str, Task] = {}
        self._done, self._waiting_for, self._work, self._claims, self._clock = (
            done,
            waiting,
            work,
            claims,
            clock,
        )
        self._next_poll = self._polled = float("-inf")
        self._poll_took = 0.0
        self._idle_seconds = _SOON_SECONDS
        self._moved = clock()

    @property
    def exhausted(self) -> bool:
        return not self._waiting and not self._running

    @property
    def poll_seconds(self) -> float:
        return POLL_SECONDS if self._running else self._idle_seconds

    def take(self) -> Task | None:
        if self._clock() >= self._next_poll:
            self._poll()
        finished = 0
        for key, task in list(self._waiting.items()):
            if key not in self._waiting or not self._claims.take(key):
                continue
            commit = self._work.finished([task])[0]
            if commit is None:
                del self._waiting[key]
                self._running[key] = task
                self._idle_seconds = _SOON_SECONDS
                return task
            # Another process has committed it since the last poll.
            self._claims.release(key)
            self._finished_elsewhere(key, commit)
            finished += 1
            if finished == _FINISHED_FOUND:
                self._poll()
                finished = 0
        if not self._running and self._waiting:  # poll more often now
            self._idle_seconds = min(2 * self._idle_seconds, POLL_SECONDS)
            self._next_poll = min(self._next_poll, self._polled + max(self._idle_seconds, self._poll_took))
            self._report_wait()
        return None

    def done(self, commit: Commit) -> None:
        key = f"{commit.stage}/{commit.folder.name}"
        self._running.pop(key, None)
        self._claims.release(key)
        self._moved = self._clock()
        self._done(commit)

    def _finished_elsewhere(self, key: str, commit: Commit) -> None:
        del self._waiting[key]
        self._moved = self._clock()
        self._idle_seconds = _SOON_SECONDS
        self._done(commit)

    def _poll(self) -> None:
        """Find out what others have finished, and what they have claimed."""
        start = self._clock()
        self._claims.refresh()
        tasks = list(self._waiting.values())
        for task, commit in zip(tasks, self._work.finished(tasks), strict=True):
            if commit is not None:
                self._finished_elsewhere(task.key, commit)
        self._polled = self._clock()
        self._poll_took = self._polled - start
        self._next_poll = self._polled + max(BUSY_POLL_SECONDS, self._poll_took / _POLL_SHARE)

    def _report_wait(self) -> None:
        """Report which processes are waited for; BuildError after `WAIT_SECONDS` without progress."""
        holders = Counter(self._claims.holder(key) or "" for key in self._waiting)
        self._waiting_for(holders)
        if self._clock() - self._moved > WAIT_SECONDS:
            names = ", ".join(sorted(name or "nobody" for name in holders)[:3])
            raise BuildError(
                f"waited {WAIT_SECONDS / 3600:.0f} hours for others to finish {len(self._waiting):,} tasks, "
                f"such as {next(iter(self._waiting.values()))} (claimed by {names}); stop what "
                f"hangs, then start again"
            )


TURN_SECONDS = 24 * 3600.0  # a publication moves terabytes; a process that takes longer hangs


@contextmanager
def take_turn(
    claims: Claims,
    key: str,
    is_done: Callable[[], bool],
    waiting: Waiting,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """Yield True while this process holds the claim `key` and the work is still to do: `Runner.exclusive`.

    BuildError if a live process holds it for `TURN_SECONDS`.
    """
    start = clock()
    while True:
        if is_done():
            yield False
            return
        claims.refresh()
        if claims.take(key):
            break
        holder = claims.holder(key) or "another process"
        waiting({holder: 1})
        if clock() - start > TURN_SECONDS:
            raise BuildError(
                f"waited {TURN_SECONDS / 3600:.0f} hours for {holder} to publish the dataset; stop that "
                f"process, then start again"
            )
        sleep(POLL_SECONDS)
    try:
        yield not is_done()  # another process may have been faster
    finally:
        claims.release(key)
