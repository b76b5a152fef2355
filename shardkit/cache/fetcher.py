"""Shards from a store into a cache: what a reader waits for first, then what will be needed soonest.

A few threads share the work. A shard that a reader waits for goes before all others, and idle threads fetch
ranges of it. The others follow plans (`shardkit.cache.planner`) by earliest deadline: each reader of the
dataset may have one, and they take turns. A fetcher holds plans weakly, so a plan ends with its reader.

One thread brings a shard all the way (`Fetcher._fetch`): it takes the lease and room in the cache, downloads
into that room, checks hashes, decompresses, hands the bytes to whoever waits, and makes the entry durable. It
holds one of `connections` while bytes come. Checking and syncing a shard takes as long as receiving some of
it, so there are a few more threads than connections.

Damaged bytes are fetched again, `ATTEMPTS` times in all. Processes that share a cache folder take leases, so
that each shard is fetched by one of them; a lease whose holder has been stopped is ignored after a while.
Where a cache has no room, a shard that is waited for is read into memory. Every wait has a limit, and its
error says what had arrived until then.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from shardkit.arrays import Bytes
from shardkit.cache.contract import Cache, Contents, Lease, Slot
from shardkit.cache.download import (
    MIN_PART_BYTES,
    READ_BYTES,
    DamagedObjectError,
    Download,
    MemoryTarget,
    unpack,
)
from shardkit.cache.planner import Planner
from shardkit.errors import ShardkitError
from shardkit.storage.threads import remake_after_fork
from shardkit.units import format_bytes

if TYPE_CHECKING:
    from shardkit.cache.shards import CachedShards

__all__ = ["FetchLimits", "FetchTimeoutError", "Fetcher", "Job", "arrival"]

ATTEMPTS = 3  # to get the bytes that the index states, before the object itself is called damaged
FINISHERS = 2  # threads beyond the connections


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchLimits:
    """The times and sizes that a fetcher goes by; smaller ones are for tests."""

    lease_seconds: float = 20.0
    """Longer than a shard takes at 5 MB/s: a process that holds a lease for so long has been stopped."""
    idle_seconds: float = 10.0
    """A thread without work ends after this long; the next need starts another."""
    join_seconds: float = 2.0
    """How long `close` waits for threads."""
    min_part_bytes: int = MIN_PART_BYTES
    read_bytes: int = READ_BYTES
    single_rows: int = 32
    """Rows that a reader may have fetched one by one after each start, by two small requests each."""


class FetchTimeoutError(ShardkitError, TimeoutError):
    """A shard, or rows of one, did not arrive in time; the message says how much had."""


def arrival(done: int, total: int, status: int | None, free_disk_bytes: int | None) -> str:
    """How far a fetch is, what the store last answered with an error, and how full the disk is."""
    disk = "no disk used" if free_disk_bytes is None else f"free disk {format_bytes(free_disk_bytes)}"
    return f"{done:,} of {total:,} bytes received; last status {'none' if status is None else status}; {disk}"


class Job:
    """One shard being fetched. It belongs to the thread that fetches it; `stop` may come from any."""

    def __init__(self, number: int, *, urgent: bool, victims: Callable[[Contents], list[str]]) -> None:
        self.number = number
        self.urgent = urgent
        self.victims = victims
        self.attempts = 0
        self.download: Download | None = None
        self.slot: Slot | None = None
        self.lease: Lease | None = None
        self.data: Bytes | None = None
        self.error: Exception | None = None
        self.done = threading.Event()
        self.is_stopped = False

    def stop(self, error: Exception) -> None:
        """Report the error to whoever waits, and let the download end at its next piece."""
        self.is_stopped = True
        self.error = self.error or error
        if self.download is not None:
            self.download.stop(error)
        self.done.set()

    def deliver(self, data: Bytes) -> None:
        """Hand the shard to whoever waits for it."""
        self.data = data[:]
        self.data.flags.writeable = False
        self.done.set()

    def drop_slot(self, *, damaged: bool = False) -> None:
        """Give back the room in the cache."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.discard(damaged=damaged)

    def let_go(self) -> None:
        """Give back what is still held: room and lease."""
        try:
            self.drop_slot()
        finally:
            lease, self.lease = self.lease, None
            if lease is not None:
                lease.release()


class Fetcher:
    """Fetches shards of one dataset into one cache, for one process."""

    def __init__(self, shards: CachedShards, cache: Cache, *, connections: int, limits: FetchLimits) -> None:
        self._shards, self._cache = shards, cache
        self._connections, self._limits = connections, limits
        self.counts: Counter[str] = Counter()
        self._fetched: set[int] = set()
        self._without_room: set[int] = set()  # shards that found no room lately
        self._unkept: Exception | None = None  # why the cache could not keep what was delivered
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        """Reset in a child: its parent's threads and jobs are not there, and one may have held the lock."""
        self._changed = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        """Start a run without threads and jobs; threads of the last one end when they see the new `_run`."""
        self._run = object()
        self._threads: list[threading.Thread] = []
        self._streaming = 0  # threads that hold a connection
        self._demanded: deque[Job] = deque()  # a job here is in no thread's hands
        self._active: dict[int, Job] = {}
        self._planning = False
        self._plans: list[weakref.ref[Planner]] = []  # replaced, never changed; whose turn it is comes first

    def load(self, number: int, timeout_seconds: float, plan: Planner | None = None) -> Bytes:
        """The raw bytes of a shard, read-only; `plan` is that of the reader that asks.

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
                raise FetchTimeoutError(f"did not arrive within {timeout_seconds:g} s: {self._describe(job)}")
            if job.data is not None:
                self.counts["misses"] += 1
                return job.data
            if job.error is not None:
                raise job.error

    def is_there(self, number: int) -> bool:
        """Whether a shard could be loaded without waiting."""
        return self._cache.has(self._shards.entry(number))

    def has_no_room(self, number: int) -> bool:
        """Whether the cache had no room for a shard when it was last needed."""
        return number in self._without_room

    def progress(self) -> str:
        """What is being waited for, with how much of it has come; "" if nothing is."""
        with self._changed:
            known = (*self._active.values(), *self._demanded)
            jobs = [job for job in known if job.urgent and not job.done.is_set()]
        return self._describe(jobs[0]) if jobs else ""

    def add_plan(self, plan: Planner) -> None:
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
        """The reader of `plan` has reached `position`; cheap."""
        if plan.advance(position):
            with self._changed:
                self._start_threads()
                self._changed.notify_all()

    def close(self) -> None:
        """End the threads; one in the middle of a read ends after it."""
        with self._changed:
            threads, waiting = self._threads, [*self._demanded]
            for job in (*waiting, *self._active.values()):
                job.stop(RuntimeError("the loader was closed"))
            self._reset()
            self._changed.notify_all()
        for job in waiting:
            job.let_go()
        deadline = time.monotonic() + self._limits.join_seconds
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
        while (task := self._await_task(run)) is not None:
            task()
            del task  # it may hold the last reference to a plan whose reader is gone

    def _await_task(self, run: object) -> Callable[[], None] | None:
        """What a free thread should do; None: end."""
        with self._changed:
            is_idle = False
            while self._run is run:
                task = self._next_task()
                if task is not None:
                    return task
                if is_idle:  # a thread that stayed would keep alive a fetcher that nobody uses any more
                    self._threads.remove(threading.current_thread())
                    return None
                is_idle = not self._changed.wait(self._limits.idle_seconds)
            return None

    def _next_task(self) -> Callable[[], None] | None:
        """What a free thread should do, with a connection for it; the lock is held by the caller."""
        if self._streaming >= self._connections:
            return None
        task = self._next_part() or self._next_demanded() or self._next_planned()
        if task is not None:
            self._streaming += 1
        return task

    def _next_part(self) -> Callable[[], None] | None:
        for job in sorted(self._active.values(), key=lambda j: not j.urgent):
            if job.download is not None and (part := job.download.take_part()) is not None:
                return partial(self._help, job.download, part, self._run)
        return None

    def _next_demanded(self) -> Callable[[], None] | None:
        if not self._demanded:
            return None
        job = self._demanded.popleft()  # it may have come damaged, to be fetched again
        self._active[job.number] = job
        return partial(self._fetch, job, self._run)

    def _next_planned(self) -> Callable[[], None] | None:
        plans = [] if self._planning else self.plans()
        for turn, plan in enumerate(plans):
            fetch = plan.take(self._active)
            if fetch is None and not plan.is_stale():
                continue
            self._plans = [weakref.ref(other) for other in plans[turn + 1 :] + plans[: turn + 1]]
            if fetch is None:
                self._planning = True
                return partial(self._plan, plan, self._run)
            job = Job(fetch.shard, urgent=False, victims=partial(plan.victims_for, fetch))
            self._active[job.number] = job
            return partial(self._fetch, job, self._run)
        return None

    @contextlib.contextmanager
    def _connection(self, run: object) -> Iterator[None]:
        """At the end of the block, give back the connection that came with the task."""
        try:
            yield
        finally:
            with self._changed:
                if self._run is run:
                    self._streaming -= 1
                    self._changed.notify_all()

    def _plan(self, plan: Planner, run: object) -> None:
        with self._connection(run):
            try:
                plan.plan(self._cache, [*self._active])
                self._without_room &= plan.unfit.union(*(other.unfit for other in self.plans()))
            except OSError:
                pass  # the cache folder cannot be listed: whoever needs a shard gets the error
            finally:
                with self._changed:
                    self._planning = False

    def _help(self, download: Download, part: tuple[int, int], run: object) -> None:
        """Fetch a range of a shard that another thread brings."""
        with self._connection(run):
            download.fetch_part(part)

    def _fetch(self, job: Job, run: object) -> None:
        """Bring a shard from the store into the cache, and to whoever waits for it."""
        try:
            with self._connection(run):
                download = self._prepare(job)
                if download is not None:
                    download.fetch()
            if download is not None:
                self._keep(job, download)
        except DamagedObjectError as error:
            self.counts["damaged"] += 1
            if self._try_again(job):
                return
            problem = f"{error.problem}; it was fetched {job.attempts} times: check the object in the bucket"
            job.error = job.error or DamagedObjectError(error.file, problem, offset=error.offset)
        except Exception as error:
            job.error = job.error or error
        self._finish(job)

    def _prepare(self, job: Job) -> Download | None:
        """Get lease, room and download ready; None if there is nothing to fetch, or not now."""
        shards, number = self._shards, job.number
        name, info = shards.entry(number), shards.info(number)
        if job.lease is None:
            if self._cache.has(name):
                return None
            job.lease = self._cache.lease(name, self._limits.lease_seconds if job.urgent else 0.0)
            if self._cache.has(name) or (job.lease is None and not job.urgent):
                return None  # it has come, or another process is at it
        file = shards.stored_file(number)
        if info.compression is None:
            job.slot = self._cache.reserve(name, file.bytes, job.victims)
            if job.slot is None and not job.urgent:
                return None
            self._note_room(job)
        target, version = job.slot or MemoryTarget(file.bytes), shards.version(number)
        with self._changed:
            if job.is_stopped:
                return None
            job.download = Download(
                shards.store,
                file,
                target,
                parts=self._parts(job),
                version=version,
                min_part_bytes=self._limits.min_part_bytes,
                read_bytes=self._limits.read_bytes,
            )
            self._changed.notify_all()  # idle threads may help
            return job.download

    def _parts(self, job: Job) -> int:
        """Threads for one shard: those that have nothing else to do, if someone waits for it."""
        idle = self._connections - self._streaming
        return 1 + idle // (1 + len(self._demanded)) if job.urgent else 1

    def _keep(self, job: Job, download: Download) -> None:
        """Prove what came, hand it to whoever waits, and put it into the cache, which takes a while."""
        shards, info = self._shards, self._shards.info(job.number)
        job.attempts += 1
        data = download.target.data
        try:
            download.check()
            if download.version is not None:
                shards.rows.trust(job.number, download.version)
            self._count_fetched(job.number)
            if info.compression is not None:
                data = unpack(shards.kind, info, data, download.where)
        except DamagedObjectError:
            job.drop_slot(damaged=True)
            raise
        if info.compression is not None:
            self.counts["decompressed_bytes"] += len(data)
            job.slot = self._cache.reserve(shards.entry(job.number), len(data), job.victims)
            self._note_room(job)
            if job.slot is not None:
                job.slot.data[:] = data
                data = job.slot.data
        if job.urgent:
            job.deliver(data)
        slot, job.slot = job.slot, None
        if slot is None:
            return
        try:
            slot.commit()
        except Exception as error:
            if job.data is None:
                raise
            self._unkept = error  # for the next `load`: a failing disk must not go unnoticed

    def _count_fetched(self, number: int) -> None:
        size = self._shards.stored_file(number).bytes
        self.counts["fetched_bytes"] += size
        self.counts["fetched_shards"] += 1
        if number in self._fetched:
            self.counts["refetched_bytes"] += size
        self._fetched.add(number)

    def _try_again(self, job: Job) -> bool:
        """Whether damaged bytes will be fetched again, by the next free thread."""
        with self._changed:
            if job.attempts >= ATTEMPTS or job.is_stopped:
                return False
            job.download = None
            self._demanded.appendleft(job)
            self._changed.notify_all()
            return True

    def _note_room(self, job: Job) -> None:
        """Remember whether the cache had room for a shard that is read."""
        if job.slot is not None:
            self._without_room.discard(job.number)
            return
        self.counts["bypassed"] += 1
        self._without_room.add(job.number)

    def _finish(self, job: Job) -> None:
        try:
            job.let_go()
        except OSError as error:  # the cache folder is gone; whoever waits must be woken all the same
            job.error = job.error or error
        with self._changed:
            if self._active.get(job.number) is job:
                del self._active[job.number]
            job.done.set()
            self._changed.notify_all()

    def _describe(self, job: Job) -> str:
        file, download = self._shards.stored_file(job.number), job.download
        done = 0 if download is None else download.bytes_done
        status = self._shards.store.metrics.snapshot().last_status
        came = arrival(done, file.bytes, status, self._cache.free_disk_bytes())
        return f"{self._shards.store.url}/{file.basename}: {came}"


def _least_recent(contents: Contents) -> list[str]:
    """Names by when they were last used, the longest ago first: all that is known without a plan."""
    return sorted(contents, key=lambda name: -contents[name].used_seconds_ago)
