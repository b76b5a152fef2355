"""Fetches shards from stores into caches: first the shards that readers wait for, then by earliest need.

A `Fetcher` is a pool of threads that fetches for any number of datasets: streams have no threads of their
own. A shard that a reader waits for goes before all others. Idle threads fetch ranges of it, then halves of
the remaining ranges of other shards, so that connections are not idle while a reader waits. Planned shards
follow plans (`shardkit.cache.planner`) by earliest deadline. Each run has one plan for all datasets that
share a cache; plans of several runs take turns. A fetcher holds plans weakly, so a plan ends with its run.

A shard is fetched in two steps. First a thread acquires its lease and reserves its space in the cache, which
may wait for the disk, without holding a connection (`Fetcher._prepare`). Then the shard is ready, and belongs
to no thread until one of `connections` is free. The thread that takes it downloads into the space, returns
the connection, checks hashes, decompresses, hands the bytes to the waiting readers, and makes the entry
durable (`Fetcher._fetch`). Up to `AHEAD` shards are prepared in advance, so connections are not idle between
shards. Ready shards start in the order of their plan, but shards that a reader waits for start first. If
the cache has no space for such a shard, a planned shard that is ready gives up its own.

Damaged bytes are fetched again, `ATTEMPTS` times in all. Processes that share a cache folder use leases, so
that only one of them fetches a shard; a lease whose holder has been stopped is ignored after a timeout. If a
cache has no room, a shard that a reader waits for is read into memory. Every wait has a timeout, and its
error message says how much had arrived.
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

ATTEMPTS = 3  # downloads of a shard with wrong hashes before its object is reported as damaged
AHEAD = 2  # number of shards prepared while no connection is free; each reserves space in the cache
FINISHERS = 4  # number of extra threads, which check and sync shards while others download or prepare
ROW_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchLimits:
    """Time and size limits of a fetcher; tests use smaller values."""

    lease_seconds: float = 20.0
    """Maximum wait for another process's lease. Fetching a shard takes less even at 5 MB/s, so a process that
    holds a lease longer counts as stopped."""
    idle_seconds: float = 10.0
    """Time after which a thread without work ends; a new one is started when needed."""
    join_seconds: float = 2.0
    """Maximum time that `close` waits for threads."""
    min_part_bytes: int = MIN_PART_BYTES
    read_bytes: int = READ_BYTES
    single_rows: int = 32
    """Maximum number of rows fetched one by one after each start of a loop, with one or two requests each."""
    peer_seconds: float = 5.0
    """Maximum wait for another process that is reading a row that this process also needs."""


class Fetcher:
    """Fetches shards for all datasets that are opened with it. A pickled copy starts its own threads."""

    def __init__(self, connections: int, limits: FetchLimits | None = None) -> None:
        self.connections, self.limits = connections, limits or FetchLimits()
        self.row_workers = Workers(ROW_THREADS)
        """Threads for reads of single rows."""
        self.after_fork()
        remake_after_fork(self)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.connections, self.limits)

    def after_fork(self) -> None:
        """Reset in a forked child: it has no threads or jobs, and its parent's threads may hold the lock."""
        self._changed = threading.Condition()
        self._demanded: deque[Job] = deque()  # jobs with a waiting reader that no thread works on yet
        self._active: dict[tuple[Fetchable, int], Job] = {}  # jobs that were begun and are not finished
        self._ready: list[Job] = []  # active jobs that are prepared and wait for a connection, by turn
        self._turns = itertools.count()
        # The list is replaced, never modified; the plan whose turn is next comes first.
        self._plans: list[weakref.ref[FetchPlan]] = []
        self._reset()

    def _reset(self) -> None:
        """Start a new run without threads; threads of the previous run end when they see the new `_run`."""
        self._run = object()
        self._threads: list[threading.Thread] = []
        self._streaming = 0  # number of threads that hold a connection
        self._preparing = 0  # number of threads that acquire lease and space for a job
        self._planning = False

    def demand(self, shards: Fetchable, number: int, plan: FetchPlan | None) -> Job:
        """Return the job that fetches a shard, before all planned shards, for a reader that waits.

        `plan`: the reader's plan, which chooses what to evict; None: any plan for the same cache.
        """
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

    def wait_for_commit(self, shards: Fetchable, number: int, timeout_seconds: float) -> None:
        """Wait until a delivered shard is in the cache, or could not be stored there."""
        with self._changed:
            self._changed.wait_for(lambda: (shards, number) not in self._active, timeout_seconds)

    def waited_for(self, shards: Fetchable) -> Job | None:
        """Return a job that fetches one of these shards for a waiting reader; None if there is none."""
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
        """Make a plan for a loop and fetch by it, in turn with other plans, while the caller holds it.

        `parts`: datasets that share a cache; `uses`: the uses of their shards, numbered through all parts;
        `lanes`: the lanes that the loop reads (None: all).
        """
        # The function must not reference the plan: a cycle would keep it alive until a garbage collection.
        plans = partial(self._planners, parts[0].cache)
        plan = FetchPlan(parts, uses, loop, lanes=lanes, pace=pace, plans=plans)
        with self._changed:
            self._plans = [*map(weakref.ref, self.plans()), weakref.ref(plan)]
            self._start_threads()
            self._changed.notify_all()
        for part in parts:  # other threads may have learned some objects' sizes since the plan was made
            for entry in part.known_objects():
                plan.set_entry(part, *entry)
        return plan

    def _planners(self, cache: Cache) -> list[Planner]:
        return [plan.planner for plan in self.plans() if plan.cache is cache]

    def drop(self, plan: FetchPlan) -> None:
        """Stop following `plan`."""
        with self._changed:
            self._plans = [weakref.ref(other) for other in self.plans() if other is not plan]

    def plans(self) -> list[FetchPlan]:
        """Return the plans that are followed, the next one to be served first."""
        return [plan for reference in self._plans if (plan := reference()) is not None]

    def wake(self) -> None:
        """Wake the threads, because a plan may have something to fetch."""
        with self._changed:
            self._start_threads()
            self._changed.notify_all()

    def close(self, shards: Fetchable) -> None:
        """Stop the fetches of these shards and the plans that include them; end the threads if no other work
        is left. A thread in the middle of a read ends after it.
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
            # Daemons: an unfinished fetch must not keep a process alive; its file is removed later.
            thread = threading.Thread(
                target=self._work, args=(self._run,), name="shardkit-fetch", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work(self, run: object) -> None:
        while (task := self._await_task(run)) is not None:
            task()
            del task  # a task may hold the last reference to a plan whose reader is gone

    def _await_task(self, run: object) -> Callable[[], None] | None:
        """Wait for a task for the calling thread and return it; None if the thread should end."""
        with self._changed:
            is_idle = False
            while self._run is run:
                task = self._next_task()
                if task is not None:
                    return task
                if is_idle:  # end: a waiting thread would keep alive a fetcher that nobody uses any more
                    self._threads.remove(threading.current_thread())
                    return None
                is_idle = not self._changed.wait(self.limits.idle_seconds)
            return None

    def _next_task(self) -> Callable[[], None] | None:
        """Return the next task for the calling thread, or None. The caller holds the lock.

        Counts the task in `_streaming` or `_preparing`.
        """
        if self._streaming < self.connections:
            task = self._next_part() or self._next_ready()
            if task is not None:
                self._streaming += 1
                return task
        free = self.connections + AHEAD - self._streaming - self._preparing
        if free > sum(job.urgent for job in self._ready) and self._demanded:
            # The job may be new, or its bytes were damaged and are fetched again.
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
        """Return a task for half of a range that another thread fetches, or None.

        Returns None unless a reader waits: without one, more ranges per shard do not raise the throughput.
        """
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
        """Context manager that frees the task's connection when its block ends."""
        try:
            yield
        finally:
            with self._changed:
                if self._run is run:
                    self._streaming -= 1
                    if self._ready:  # idle threads may have ended, and this one still has to finish its shard
                        self._start_threads()
                    self._changed.notify_all()

    def _plan(self, plan: FetchPlan, run: object) -> None:
        try:
            plan.plan([*self._active])
            unfit = [other.place(number) for other in self.plans() for number in other.planner.unfit]
            for part in plan.parts:
                part.forget_room({number for other, number in unfit if other is part})
        except (OSError, CacheFolderError):
            pass  # the cache folder cannot be listed: the next reader that needs a shard gets the error
        finally:
            with self._changed:
                if self._run is run:
                    self._planning = False
                    self._changed.notify_all()

    def _help(self, download: Download, part: Part, run: object) -> None:
        """Fetch a range of a shard whose job belongs to another thread."""
        with self._connection(run):
            download.fetch_part(part)

    def _prepare(self, job: Job, run: object) -> None:
        """Acquire lease and space for a job, then queue it; finish it if there is nothing to fetch."""
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
        """Acquire lease and space for a job; return False if there is nothing to fetch now."""
        shards, number, cache = job.shards, job.number, job.shards.cache
        name = shards.entry(number)
        if job.lease is None:
            if cache.has(name):
                return False
            job.lease = cache.lease(name, self.limits.lease_seconds if job.urgent else 0.0)
            if cache.has(name) or (job.lease is None and not job.urgent):
                return False  # the shard has arrived, or another process is fetching it
        if shards.is_compressed(number):
            return True  # needs no space yet: it is downloaded into memory and decompressed first
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
        """Remove and return the last ready job that has space in `cache` and no waiting reader, or None.

        The caller must finish the job, which frees its space.
        """
        with self._changed:
            holding = [job for job in self._ready if job.shards.cache is cache and job.slot is not None]
            job = next((job for job in reversed(holding) if not job.urgent), None)
            if job is not None:
                self._ready.remove(job)
            return job

    def _fetch(self, job: Job, run: object) -> None:
        """Download a ready shard into the cache, and hand it to waiting readers."""
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
        """Make the download of a ready job; return None if there is nothing left to fetch."""
        shards, number = job.shards, job.number
        if shards.cache.has(shards.entry(number)):
            return None  # another process stopped waiting for the lease and fetched the shard
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
        """Return the number of parts of a download: 1, or more if a reader waits and threads are idle."""
        idle = max(0, self.connections - self._streaming - self._preparing - len(self._ready))
        return 1 + idle // (1 + len(self._demanded)) if job.urgent else 1

    def _keep(self, job: Job, download: Download) -> None:
        """Check the downloaded bytes, hand them to waiting readers, and commit them to the cache."""
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
        job.deliver(data)  # before the commit, whose fsync takes time
        slot, job.slot = job.slot, None
        if slot is None:
            return
        try:
            slot.commit()
        except Exception as error:
            if not job.urgent:
                raise
            shards.cache_error = error  # the next `load` raises it: a failing disk must be reported

    def _try_again(self, job: Job) -> bool:
        """Queue a job with damaged bytes again and return True, unless it is stopped or out of attempts."""
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
        except OSError as error:  # the cache folder is gone; waiting readers must still be woken
            job.error = job.error or error
        with self._changed:
            if self._active.get(job.key) is job:
                del self._active[job.key]
            job.done.set()
            self._changed.notify_all()


def _least_recent(contents: Contents) -> Contents:
    """Return the entries in the order in which to evict without a plan: least recently used first."""
    return contents
