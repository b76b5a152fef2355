"""Shards from stores into caches: what a reader waits for first, then what will be needed soonest.

A `Fetcher` is the threads that fetch for any number of datasets: streams do not have threads of their own. A
shard that a reader waits for goes before all others, and idle threads fetch ranges of it, then halves of what
is missing of others, so that connections are not idle while a reader waits. Planned shards follow
plans (`shardkit.cache.planner`) by earliest deadline. Each run has one plan for all datasets that share a
cache; plans of several runs take turns. A fetcher holds plans weakly, so a plan ends with its run.

A shard is fetched in two steps. First a thread takes its lease and its room in the cache, which may wait for
the disk, and holds no connection meanwhile (`Fetcher._prepare`). The shard is ready then, and belongs to no
thread until one of `connections` is free. The thread that takes it downloads into the room, returns the
connection, checks hashes, decompresses, hands the bytes to whoever waits, and makes the entry durable
(`Fetcher._fetch`). Up to `AHEAD` shards are ready before a connection is free, so connections do not rest
between shards. Ready shards start in the order of their plan, but those that a reader waits for start first.
If the cache has no other room for such a shard, a ready one of a plan gives up its own.

Damaged bytes are fetched again, `ATTEMPTS` times in all. Processes that share a cache folder take leases, so
that each shard is fetched by one of them; a lease whose holder has been stopped is ignored after a while.
Where a cache has no room, a shard that is waited for is read into memory. Every wait has a limit, and its
error says what had arrived until then.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from shardkit.cache.belady import Uses
from shardkit.cache.download import (
    MIN_PART_BYTES,
    READ_BYTES,
    DamagedObjectError,
    Download,
    Job,
    MemoryTarget,
    Part,
)
from shardkit.cache.planner import FetchPlan, LoopPosition, Pace, Planner
from shardkit.cache.protocol import Cache, CacheFolderError, Contents, Fetchable
from shardkit.order.order import Order
from shardkit.storage.threads import Workers, remake_after_fork

ATTEMPTS = 3  # to get the bytes that the index states, before the object itself is called damaged
AHEAD = 2  # shards that are prepared before a connection is free; each takes room in the cache
FINISHERS = 4  # threads that check and sync shards while all connections are used and AHEAD are prepared
ROW_THREADS = 16


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
    """Rows that a reader may have fetched one by one after each start, by one small request each, or two."""
    peer_seconds: float = 5.0
    """A process that is reading a row for its replicas, too, is not waited for longer than this."""


class Fetcher:
    """Fetches shards of all datasets that are opened with it. A pickled copy has threads of its own."""

    def __init__(self, connections: int, limits: FetchLimits | None = None) -> None:
        self.connections, self.limits = connections, limits or FetchLimits()
        self.row_workers = Workers(ROW_THREADS)
        """For reads of single rows."""
        self.after_fork()
        remake_after_fork(self)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.connections, self.limits)

    def after_fork(self) -> None:
        """Reset in a child: its parent's threads and jobs are not there, and one may have held the lock."""
        self._changed = threading.Condition()
        self._demanded: deque[Job] = deque()  # a job here is in no thread's hands
        self._active: dict[tuple[Fetchable, int], Job] = {}  # begun, and not finished
        self._ready: list[Job] = []  # of these, by turn, those with lease and room and in no thread's hands
        self._turns = itertools.count()
        # Replaced, never changed; the plan whose turn it is comes first.
        self._plans: list[weakref.ref[FetchPlan]] = []
        self._reset()

    def _reset(self) -> None:
        """Start a run without threads; threads of the last one end when they see the new `_run`."""
        self._run = object()
        self._threads: list[threading.Thread] = []
        self._streaming = 0  # threads that hold a connection
        self._preparing = 0  # threads that take lease and room for a job
        self._planning = False

    def demand(self, shards: Fetchable, number: int, plan: FetchPlan | None) -> Job:
        """Return the job that brings a shard before all that are only planned; `plan` is that of who asks."""
        with self._changed:
            self._start_threads()
            job = self._active.get((shards, number)) or next(
                (job for job in self._demanded if job.key == (shards, number)), None
            )
            if job is None:
                plan = plan or next((other for other in self.plans() if other.cache is shards.cache), None)
                victims = plan.planner.victims_now if plan is not None else _least_recent
                job = Job(shards, number, urgent=True, victims=victims)
                self._demanded.append(job)
            job.urgent = True
            self._changed.notify_all()
            return job

    def waited_for(self, shards: Fetchable) -> Job | None:
        """Return a job that someone waits for, of these shards."""
        with self._changed:
            known = (*self._active.values(), *self._demanded)
            mine = (job for job in known if job.shards is shards and job.urgent and not job.done.is_set())
            return next(mine, None)

    def follow(
        self,
        parts: Sequence[Fetchable],
        uses: Order | Uses,
        loop: LoopPosition,
        lanes: Sequence[int] | None = None,
        pace: Pace | None = None,
    ) -> FetchPlan:
        """Fetch ahead for a loop, in turn with other plans, for as long as the caller holds the plan.

        `parts` share a cache; `uses`: of the shards of all parts, one after another; `lanes`: that the loop
        reads (None: all).
        """
        # Not a method of the plan: it must end with its last reference, not with a garbage collection.
        plans = partial(self._planners, parts[0].cache)
        plan = FetchPlan(parts, uses, loop, lanes=lanes, pace=pace, plans=plans)
        with self._changed:
            self._plans = [*map(weakref.ref, self.plans()), weakref.ref(plan)]
            self._start_threads()
            self._changed.notify_all()
        for part in parts:  # other threads may have asked for some since
            for entry in part.known_objects():
                plan.set_entry(part, *entry)
        return plan

    def _planners(self, cache: Cache) -> list[Planner]:
        return [plan.planner for plan in self.plans() if plan.cache is cache]

    def drop(self, plan: FetchPlan) -> None:
        """Stop fetching by `plan`."""
        with self._changed:
            self._plans = [weakref.ref(other) for other in self.plans() if other is not plan]

    def plans(self) -> list[FetchPlan]:
        """Return the plans that are followed, the one whose turn it is first."""
        return [plan for reference in self._plans if (plan := reference()) is not None]

    def wake(self) -> None:
        """Let threads look at the plans: one of them may have something to do."""
        with self._changed:
            self._start_threads()
            self._changed.notify_all()

    def close(self, shards: Fetchable) -> None:
        """End the fetches of these shards and the plans they are part of; end the threads if no others are
        left. One in the middle of a read ends after it.
        """
        with self._changed:
            waiting = [job for job in (*self._demanded, *self._ready) if job.shards is shards]
            for job in (*waiting, *(job for job in self._active.values() if job.shards is shards)):
                job.stop(RuntimeError("the loader was closed"))
            self._demanded = deque(job for job in self._demanded if job.shards is not shards)
            self._ready = [job for job in self._ready if job.shards is not shards]
            self._active = {key: job for key, job in self._active.items() if job.shards is not shards}
            self._plans = [weakref.ref(plan) for plan in self.plans() if shards not in plan.parts]
            threads: list[threading.Thread] = []
            if not (self._demanded or self._active or self._plans):
                threads = self._threads
                self._reset()
            self._changed.notify_all()
        for job in waiting:
            job.let_go()
        deadline = time.monotonic() + self.limits.join_seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_threads(self) -> None:
        while len(self._threads) < self.connections + AHEAD + FINISHERS:
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
        """Return what a free thread should do; None: end."""
        with self._changed:
            is_idle = False
            while self._run is run:
                task = self._next_task()
                if task is not None:
                    return task
                if is_idle:  # a thread that stayed would keep alive a fetcher that nobody uses any more
                    self._threads.remove(threading.current_thread())
                    return None
                is_idle = not self._changed.wait(self.limits.idle_seconds)
            return None

    def _next_task(self) -> Callable[[], None] | None:
        """Return what a free thread should do, counted as begun; the lock is held by the caller."""
        if self._streaming < self.connections:
            task = self._next_part() or self._next_ready()
            if task is not None:
                self._streaming += 1
                return task
        free = self.connections + AHEAD - self._streaming - self._preparing
        if free > sum(job.urgent for job in self._ready) and self._demanded:
            # It may have come damaged, to be fetched again.
            return self._begin(self._demanded.popleft())
        task = self._next_planned() if free > len(self._ready) else None
        if task is None and self._streaming < self.connections and not self._preparing:
            task = self._next_half()
            self._streaming += task is not None
        return task

    def _next_part(self) -> Callable[[], None] | None:
        for job in sorted(self._active.values(), key=lambda j: not j.urgent):
            if job.download is not None and (part := job.download.take_part()) is not None:
                return partial(self._help, job.download, part, self._run)
        return None

    def _next_half(self) -> Callable[[], None] | None:
        """Take half of what is missing of a shard, while someone waits: nothing is gained by it otherwise."""
        jobs = sorted(self._active.values(), key=lambda job: not job.urgent)
        if not any(job.urgent and not job.done.is_set() for job in jobs):
            return None
        for job in jobs:
            if job.download is not None and (part := job.download.split_part()) is not None:
                return partial(self._help, job.download, part, self._run)
        return None

    def _next_ready(self) -> Callable[[], None] | None:
        if not self._ready:
            return None
        job = next((job for job in self._ready if job.urgent), self._ready[0])
        self._ready.remove(job)
        return partial(self._fetch, job, self._run)

    def _begin(self, job: Job) -> Callable[[], None]:
        job.turn = next(self._turns)
        self._active[job.key] = job
        self._preparing += 1
        return partial(self._prepare, job, self._run)

    def _next_planned(self) -> Callable[[], None] | None:
        plans = [] if self._planning else self.plans()
        for turn, plan in enumerate(plans):
            fetch = plan.take(self._active)
            if fetch is None and not plan.planner.is_stale():
                continue
            self._plans = [weakref.ref(other) for other in plans[turn + 1 :] + plans[: turn + 1]]
            if fetch is None:
                self._planning = True
                return partial(self._plan, plan, self._run)
            shards, number = plan.place(fetch.shard)
            victims = partial(plan.planner.victims_for, fetch)
            return self._begin(Job(shards, number, urgent=False, victims=victims))
        return None

    @contextlib.contextmanager
    def _connection(self, run: object) -> Iterator[None]:
        """Give back the connection that came with the task, at the end of the block."""
        try:
            yield
        finally:
            with self._changed:
                if self._run is run:
                    self._streaming -= 1
                    if self._ready:  # idle threads may have ended, and this one has something to finish
                        self._start_threads()
                    self._changed.notify_all()

    def _plan(self, plan: FetchPlan, run: object) -> None:
        try:
            plan.plan([*self._active])
            unfit = [other.place(number) for other in self.plans() for number in other.planner.unfit]
            for part in plan.parts:
                part.forget_room({number for other, number in unfit if other is part})
        except (OSError, CacheFolderError):
            pass  # the cache folder cannot be listed: whoever needs a shard gets the error
        finally:
            with self._changed:
                if self._run is run:
                    self._planning = False
                    self._changed.notify_all()

    def _help(self, download: Download, part: Part, run: object) -> None:
        """Fetch a range of a shard that another thread brings."""
        with self._connection(run):
            download.fetch_part(part)

    def _prepare(self, job: Job, run: object) -> None:
        """Get a job ready for a connection, or end it: there is nothing to fetch, or not now."""
        is_ready = False
        try:
            is_ready = self._take_room(job)
        except Exception as error:
            job.error = job.error or error
        with self._changed:
            if self._run is run:
                self._preparing -= 1
            is_ready = is_ready and not job.is_stopped
            if is_ready:
                bisect.insort(self._ready, job, key=lambda ready: ready.turn)
            self._changed.notify_all()
        if not is_ready:
            self._finish(job)

    def _take_room(self, job: Job) -> bool:
        """Take lease and room; False if there is nothing to fetch, or not now."""
        shards, number, cache = job.shards, job.number, job.shards.cache
        name = shards.entry(number)
        if job.lease is None:
            if cache.has(name):
                return False
            job.lease = cache.lease(name, self.limits.lease_seconds if job.urgent else 0.0)
            if cache.has(name) or (job.lease is None and not job.urgent):
                return False  # it has come, or another process is at it
        if shards.is_compressed(number):
            return True  # into memory first
        size = shards.stored_file(number).bytes
        job.slot = cache.reserve(name, size, job.victims)
        while job.slot is None and job.urgent and (other := self._withdraw(cache)) is not None:
            self._finish(other)
            job.slot = cache.reserve(name, size, job.victims)
        if job.slot is None and not job.urgent:
            return False
        shards.note_room(number, found=job.slot is not None)
        return True

    def _withdraw(self, cache: Cache) -> Job | None:
        """Withdraw the last ready job that has room in `cache` and no waiter; the caller ends it."""
        with self._changed:
            holding = [job for job in self._ready if job.shards.cache is cache and job.slot is not None]
            job = next((job for job in reversed(holding) if not job.urgent), None)
            if job is not None:
                self._ready.remove(job)
            return job

    def _fetch(self, job: Job, run: object) -> None:
        """Bring a ready shard from the store into the cache, and to whoever waits for it."""
        try:
            with self._connection(run):
                download = self._download(job)
                if download is not None:
                    download.fetch()
            if download is not None:
                self._keep(job, download)
        except DamagedObjectError as error:
            if self._try_again(job):
                return
            problem = f"{error.problem}; it was fetched {job.attempts} times: check the object in the bucket"
            job.error = job.error or DamagedObjectError(error.file, problem, offset=error.offset)
        except Exception as error:
            job.error = job.error or error
        self._finish(job)

    def _download(self, job: Job) -> Download | None:
        """Make the download of a ready job; None if there is nothing to fetch any more."""
        shards, number = job.shards, job.number
        if shards.cache.has(shards.entry(number)):
            return None  # from a process that did not wait for the lease any longer
        file = shards.stored_file(number)
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
                min_part_bytes=self.limits.min_part_bytes,
                read_bytes=self.limits.read_bytes,
            )
            self._changed.notify_all()  # idle threads may help
            return job.download

    def _parts(self, job: Job) -> int:
        """Return how many threads fetch one shard: all that are idle, if someone waits for it."""
        idle = max(0, self.connections - self._streaming - self._preparing - len(self._ready))
        return 1 + idle // (1 + len(self._demanded)) if job.urgent else 1

    def _keep(self, job: Job, download: Download) -> None:
        """Prove what came, hand it to whoever waits, and put it into the cache, which takes a while."""
        shards = job.shards
        job.attempts += 1
        try:
            download.check()
            data = shards.accept(job.number, download.target.data, download.version)
        except DamagedObjectError:
            shards.counts["damaged"] += 1
            job.drop_slot(damaged=True)
            raise
        if shards.is_compressed(job.number):
            job.slot = shards.cache.reserve(shards.entry(job.number), len(data), job.victims)
            shards.note_room(job.number, found=job.slot is not None)
            if job.slot is not None:
                job.slot.data[:] = data
                data = job.slot.data
        job.deliver(data)  # to whoever comes to wait while it is made durable, too
        slot, job.slot = job.slot, None
        if slot is None:
            return
        try:
            slot.commit()
        except Exception as error:
            if not job.urgent:
                raise
            shards.cache_error = error  # for the next `load`: a failing disk must not go unnoticed

    def _try_again(self, job: Job) -> bool:
        """Whether damaged bytes will be fetched again, by the next free thread."""
        with self._changed:
            if job.attempts >= ATTEMPTS or job.is_stopped:
                return False
            job.download = None
            self._demanded.appendleft(job)
            self._changed.notify_all()
            return True

    def _finish(self, job: Job) -> None:
        try:
            job.let_go()
        except OSError as error:  # the cache folder is gone; whoever waits must be woken all the same
            job.error = job.error or error
        with self._changed:
            if self._active.get(job.key) is job:
                del self._active[job.key]
            job.done.set()
            self._changed.notify_all()


def _least_recent(contents: Contents) -> Contents:
    """Return names, the least recently used first: all that is known without a plan."""
    return contents
