"""Shards from a store into a cache: what a reader waits for first, then what will be needed soonest.

A few threads share the work. A shard that a reader waits for goes before all others, and is split into ranges
when threads are free. The others follow plans (`shardkit.cache.planner`) by earliest deadline: each reader of
the dataset may have one, and they take turns. A fetcher holds plans weakly, so a plan ends with its reader.

A `Job` is one shard on its way, and passes from thread to thread:

    load or a plan -> _begin: lease, room in the cache, download
                   -> _run_part, for each range: bytes arrive in that room
                   -> _end: hashes are checked, the bytes unpacked and handed to who waits, then made durable
                   -> _finish: lease and room are given back

Damaged bytes are fetched again, `ATTEMPTS` times in all. Processes that share a cache folder take leases, so
that each shard is fetched by one of them; a lease whose holder has been stopped is ignored after a while.
Where a cache has no room, a shard that is waited for is read into memory. Every wait has a limit, and its
error says what had arrived until then.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from shardkit.arrays import Bytes
from shardkit.cache.contract import Cache, Contents, Lease, Slot
from shardkit.cache.download import DamagedObjectError, Download, MemoryTarget, Target, unpack
from shardkit.cache.planner import Planner
from shardkit.errors import ShardkitError
from shardkit.manifest import FileInfo, Format, ShardInfo
from shardkit.storage.store import Store
from shardkit.storage.threads import remake_after_fork
from shardkit.units import format_bytes

__all__ = ["FetchTimeoutError", "Fetcher", "Job", "Shards", "arrival"]

ATTEMPTS = 3  # to get the bytes that the index states, before the object itself is called damaged
LEASE_SECONDS = 20.0  # longer than a shard takes at 5 MB/s: who holds a lease for so long has been stopped
FINISHERS = 2  # threads beside those that hold the connections
IDLE_SECONDS = 10.0  # without anything to do, after which a thread ends; the next need starts another
_JOIN_SECONDS = 2.0


class FetchTimeoutError(ShardkitError, TimeoutError):
    """A shard, or rows of one, did not arrive in time; the message says how much had."""


def arrival(done: int, total: int, status: int | None, free_disk_bytes: int | None) -> str:
    """How far a fetch is, what the store last answered with an error, and how full the disk is."""
    disk = "no disk used" if free_disk_bytes is None else f"free disk {format_bytes(free_disk_bytes)}"
    return f"{done:,} of {total:,} bytes came; last status {'none' if status is None else status}; {disk}"


class Shards(Protocol):
    """What a fetcher must know of a dataset."""

    @property
    def kind(self) -> Format: ...
    @property
    def store(self) -> Store: ...
    def info(self, number: int) -> ShardInfo: ...
    def stored_file(self, number: int) -> FileInfo: ...
    def entry(self, number: int) -> str: ...
    def version(self, number: int) -> str | None: ...
    def trust(self, number: int, version: str | None) -> None: ...
    def last_status(self) -> int | None: ...


class Job:
    """One shard being fetched. It belongs to the threads that hold its parts; `stop` may come from any."""

    def __init__(self, number: int, *, urgent: bool, victims: Callable[[Contents], list[str]]) -> None:
        self.number = number
        self.urgent = urgent
        self.victims = victims
        self.attempts = 0
        self.download: Download | None = None
        self.slot: Slot | None = None
        self.lease: Lease | None = None
        self.target: Target | None = None
        self.data: Bytes | None = None
        self.error: Exception | None = None
        self.done = threading.Event()
        self.stopped = threading.Event()
        self._lock = threading.Lock()  # a job that is stopped may be let go by two threads

    def stop(self, error: Exception) -> bool:
        """Tell whoever waits, and let the download end at its next piece; True if nobody is at a piece."""
        self.stopped.set()
        self.error = self.error or error
        is_idle = self.download is not None and self.download.stop(error)
        self.done.set()
        return is_idle

    def deliver(self, data: Bytes) -> None:
        """Hand the shard to whoever waits for it."""
        self.data = data[:]
        self.data.flags.writeable = False
        self.done.set()

    def drop_slot(self, *, damaged: bool) -> None:
        """Give back the room in the cache."""
        with self._lock:
            slot, self.slot = self.slot, None
        if slot is not None:
            slot.discard(damaged=damaged)

    def let_go(self) -> None:
        """Give back what is still held: room, lease, memory."""
        self.drop_slot(damaged=False)
        with self._lock:
            lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        self.target = None


class Fetcher:
    """Fetches shards of one dataset into one cache, for one process."""

    def __init__(self, shards: Shards, cache: Cache, *, connections: int) -> None:
        self._shards, self._cache = shards, cache
        self._connections = connections
        self.counts: Counter[str] = Counter()
        self._fetched: set[int] = set()
        self._squeezed: set[int] = set()  # shards that found no room lately
        self._unkept: Exception | None = None  # why the cache could not keep what was delivered
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """Begin anew in a child: its parent's threads and jobs are not there, their lock may be held."""
        self._changed = threading.Condition()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Without threads and jobs; threads of before end when they see that the run is another."""
        self._run = object()
        self._threads: list[threading.Thread] = []
        self._streaming = 0  # threads that hold a connection
        self._arrived: deque[Job] = deque()  # all bytes have come: to be checked, unpacked and kept
        self._demanded: deque[Job] = deque()
        self._active: dict[int, Job] = {}
        self._planning = False
        self._plans: list[weakref.ref[Planner]] = []  # replaced, never changed; whose turn it is comes first

    def load(self, number: int, timeout_seconds: float, plan: Planner | None = None) -> Bytes:
        """The raw bytes of a shard, read-only; `plan` is that of the reader who asks.

        FetchTimeoutError; DamagedObjectError if the object is not what the index states; StoreError.
        """
        deadline = time.monotonic() + timeout_seconds
        waited = False
        while True:
            data = self._cache.find(self._shards.entry(number))
            if data is not None:
                self.counts["misses" if waited else "hits"] += 1
                return data
            if self._unkept is not None:
                error, self._unkept = self._unkept, None
                raise error
            job = self._demand(number, plan)
            waited = True
            if not job.done.wait(max(0.0, deadline - time.monotonic())):
                raise FetchTimeoutError(f"not here after {timeout_seconds:g} s: {self._describe(job)}")
            if job.data is not None:
                self.counts["misses"] += 1
                return job.data
            if job.error is not None:
                raise job.error

    def is_there(self, number: int) -> bool:
        """Whether a shard could be loaded without waiting."""
        return self._cache.has(self._shards.entry(number))

    def is_squeezed(self, number: int) -> bool:
        """Whether the cache had no room for a shard when it was last needed."""
        return number in self._squeezed

    def progress(self) -> str:
        """What is being waited for, with how much of it has come; "" if nothing is."""
        with self._changed:
            known = (*self._active.values(), *self._demanded)
            jobs = [job for job in known if job.urgent and not job.done.is_set()]
        return self._describe(jobs[0]) if jobs else ""

    def follow(self, plan: Planner) -> None:
        """Fetch ahead as `plan` says, in turn with other plans, for as long as the caller holds it."""
        with self._changed:
            self._plans = [*map(weakref.ref, self.plans()), weakref.ref(plan)]
            self._start_threads()
            self._changed.notify_all()

    def drop(self, plan: Planner) -> None:
        """Fetch no longer as `plan` says."""
        with self._changed:
            self._plans = [weakref.ref(other) for other in self.plans() if other is not plan]

    def plans(self) -> list[Planner]:
        """The plans that are followed, the one whose turn it is first."""
        return [plan for reference in self._plans if (plan := reference()) is not None]

    def advance(self, plan: Planner, position: int) -> None:
        """Tell how far the reader of `plan` is; cheap."""
        if plan.advance(position):
            with self._changed:
                self._start_threads()
                self._changed.notify_all()

    @property
    def in_flight(self) -> int:
        """Shards being fetched."""
        return len(self._active)

    def close(self) -> None:
        """End the threads; one in the middle of a read ends after it."""
        with self._changed:
            threads = self._threads
            unattended = [*self._demanded, *self._arrived]
            for job in (*unattended, *self._active.values()):
                if job.stop(RuntimeError("the loader was closed")):
                    unattended.append(job)  # between two parts; all others are in the hands of a thread
            self._begin_anew()
            self._changed.notify_all()
        for job in unattended:
            job.let_go()
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _demand(self, number: int, plan: Planner | None) -> Job:
        with self._changed:
            self._start_threads()
            job = self._active.get(number) or next((j for j in self._demanded if j.number == number), None)
            if job is None:
                plan = plan or next(iter(self.plans()), None)  # any is better than none
                victims = plan.victims_now if plan is not None else _least_recent
                job = Job(number, urgent=True, victims=victims)
                self._demanded.append(job)
            job.urgent = True
            self._changed.notify_all()
            return job

    def _start_threads(self) -> None:
        while len(self._threads) < self._connections + FINISHERS:
            # Daemons: an unfinished fetch must not keep a process alive; its file is cleared away later.
            thread = threading.Thread(
                target=self._work, args=(self._run,), name="shardkit-fetch", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work(self, run: object) -> None:
        while True:
            with self._changed:
                task = self._awaited_task(run)
            if task is None:
                return
            task()
            del task  # it may be the last to hold a plan whose reader is gone

    def _awaited_task(self, run: object) -> Callable[[], None] | None:
        """What a free thread should do, None: end; the lock is held by the caller."""
        is_idle = False
        while self._run is run:
            task = self._next_task()
            if task is None and is_idle:
                # Threads would keep a fetcher alive that nobody has any more.
                self._threads.remove(threading.current_thread())
            if task is not None or is_idle:
                return task
            is_idle = not self._changed.wait(IDLE_SECONDS)
        return None

    def _next_task(self) -> Callable[[], None] | None:
        """What a free thread should do; the lock is held by the caller.

        Checking and syncing a shard takes as long as receiving some of it: other threads than those that
        hold the connections do it.
        """
        if self._arrived:
            return partial(self._end, self._arrived.popleft())
        if self._streaming >= self._connections:
            return None
        task = self._next_transfer()
        if task is None:
            return None
        self._streaming += 1
        return partial(self._transfer, task, self._run)

    def _transfer(self, task: Callable[[], None], run: object) -> None:
        try:
            task()
        finally:
            with self._changed:
                if self._run is run:
                    self._streaming -= 1
                    self._changed.notify_all()

    def _next_transfer(self) -> Callable[[], None] | None:
        for job in sorted(self._active.values(), key=lambda j: not j.urgent):
            part = job.download.take_part() if job.download is not None else None
            if part is not None:
                return partial(self._run_part, job, part)
        if self._demanded:
            job = self._demanded.popleft()  # or one that came damaged, to be fetched again
            self._active[job.number] = job
            return partial(self._begin, job)
        return None if self._planning else self._next_planned()

    def _next_planned(self) -> Callable[[], None] | None:
        plans = self.plans()
        for turn, plan in enumerate(plans):
            fetch = plan.take(self._active)
            if fetch is None and not plan.is_stale():
                continue
            self._plans = [weakref.ref(other) for other in plans[turn + 1 :] + plans[: turn + 1]]
            if fetch is None:
                self._planning = True
                return partial(self._plan, plan)
            job = Job(fetch.shard, urgent=False, victims=partial(plan.victims_for, fetch))
            self._active[job.number] = job
            return partial(self._begin, job)
        return None

    def _plan(self, plan: Planner) -> None:
        try:
            plan.plan(self._cache, [*self._active])
            self._squeezed &= plan.unfit.union(*(other.unfit for other in self.plans()))
        except OSError:
            pass  # the cache folder is not to be listed: whoever needs a shard finds out why
        finally:
            with self._changed:
                self._planning = False
                self._changed.notify_all()

    def _begin(self, job: Job) -> None:
        """Prepare a job, then fetch its first part."""
        try:
            if job.stopped.is_set() or not self._prepare(job) or job.stopped.is_set():
                self._finish(job)
                return
        except Exception as error:
            job.error = error
            self._finish(job)
            return
        download = job.download
        assert download is not None
        with self._changed:
            self._changed.notify_all()
        part = download.take_part()
        if part is not None:
            self._run_part(job, part)
        elif job.stopped.is_set():
            self._finish(job)

    def _prepare(self, job: Job) -> bool:
        """Get lease, room and download ready; False if there is nothing to fetch, or not now."""
        shards, number = self._shards, job.number
        name, info = shards.entry(number), shards.info(number)
        if job.lease is None:
            if self._cache.has(name):
                return False
            job.lease = self._cache.lease(name, LEASE_SECONDS if job.urgent else 0.0)
            if self._cache.has(name) or (job.lease is None and not job.urgent):
                return False  # it has come, or another process is at it
        file = shards.stored_file(number)
        if info.compression is None:
            job.slot = self._cache.reserve(name, file.bytes, job.victims)
            if job.slot is None and not job.urgent:
                return False
            self._note_room(job)
        job.target = job.slot or MemoryTarget(file.bytes)
        job.download = Download(
            shards.store, file, job.target, parts=self._parts(job), version=shards.version(number)
        )
        return True

    def _parts(self, job: Job) -> int:
        """Threads for one shard: those that have nothing else to do, if someone waits for it."""
        with self._changed:
            idle = self._connections - self._streaming
            return 1 + idle // (1 + len(self._demanded)) if job.urgent else 1

    def _run_part(self, job: Job, part: tuple[int, int]) -> None:
        assert job.download is not None
        if job.download.fetch_part(part):
            with self._changed:
                if not job.stopped.is_set():
                    self._arrived.append(job)
                    self._changed.notify_all()
                    return
            self._finish(job)

    def _end(self, job: Job) -> None:
        """All parts have come, or one has failed."""
        assert job.download is not None
        job.attempts += 1
        try:
            job.download.check()
            self._keep(job)
        except DamagedObjectError as error:
            self.counts["damaged"] += 1
            if self._try_again(job):
                return
            problem = f"{error.problem}; it was fetched {job.attempts} times: check the object in the bucket"
            job.error = job.error or DamagedObjectError(error.file, problem, offset=error.offset)
        except Exception as error:
            job.error = error
        self._finish(job)

    def _try_again(self, job: Job) -> bool:
        """Whether what came damaged will be fetched again."""
        try:
            job.drop_slot(damaged=True)
        except Exception as error:
            job.error = error
            return False
        with self._changed:
            if job.attempts >= ATTEMPTS or job.stopped.is_set():
                return False
            job.download = None
            self._demanded.appendleft(job)
            self._changed.notify_all()
            return True

    def _keep(self, job: Job) -> None:
        """Put what came into the cache, or at least into the hands of who waits for it."""
        assert job.download is not None
        assert job.target is not None
        shards, info = self._shards, self._shards.info(job.number)
        shards.trust(job.number, job.download.version)
        size = shards.stored_file(job.number).bytes
        self.counts["fetched_bytes"] += size
        self.counts["fetched_shards"] += 1
        if job.number in self._fetched:
            self.counts["refetched_bytes"] += size
        self._fetched.add(job.number)
        data = job.target.data if job.slot is None else None
        if info.compression is not None:
            data = unpack(shards.kind, info, job.target.data, job.download.where)
            self.counts["decompressed_bytes"] += len(data)
            job.slot = self._cache.reserve(shards.entry(job.number), len(data), job.victims)
            self._note_room(job)
            if job.slot is not None:
                job.slot.data[:] = data
        if job.slot is not None:
            data = job.slot.data
        assert data is not None
        if job.urgent:
            job.deliver(data)
        if job.slot is not None:
            slot, job.slot = job.slot, None
            self._commit(job, slot)

    def _commit(self, job: Job, slot: Slot) -> None:
        """Make an entry durable, which takes a while: whoever waits has its bytes already."""
        try:
            slot.commit()
        except Exception as error:
            if job.data is None:
                raise
            self._unkept = error  # for the next who asks: a disk that fails must not stay unnoticed

    def _note_room(self, job: Job) -> None:
        if job.slot is not None:
            self._squeezed.discard(job.number)
            return
        self.counts["bypassed"] += 1
        self._squeezed.add(job.number)

    def _finish(self, job: Job) -> None:
        try:
            job.let_go()
        except OSError as error:  # the cache folder is gone; whoever waits must hear all the same
            job.error = job.error or error
        with self._changed:
            if self._active.get(job.number) is job:
                del self._active[job.number]
            job.done.set()
            self._changed.notify_all()

    def _describe(self, job: Job) -> str:
        file = self._shards.stored_file(job.number)
        done = job.download.bytes_done if job.download is not None else 0
        free = self._cache.free_disk_bytes()
        came = arrival(done, file.bytes, self._shards.last_status(), free)
        return f"{self._shards.store.url}/{file.basename}: {came}"


def _least_recent(contents: Contents) -> list[str]:
    """Names by when they were last used, the longest ago first: all that is known without a plan."""
    return sorted(contents, key=lambda name: -contents[name].used_seconds_ago)
