"""Measures how long training waits for data: counted at every step, summarized in one line.

`Telemetry` costs half a microsecond per step: a few additions and one entry of a histogram. The running
totals of cache and store are read only by `stats`. One thread counts (the training loop's) and any thread may
call `stats`, without a lock, so its result may lack the step that is being counted. Time runs from the
request of the first batch: the time that a script takes before it is not counted.

`verdict` returns whether training waited for data and, if it did, the likeliest reason, from the statistics
alone. The wait for the first batch (opening shards, a cold cache) is counted separately: a run that lost a
second once, at its start, is not input-bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.cache.shards import CachedShards
from shardkit.loaders.config import BUSY_SECONDS
from shardkit.units import format_bytes

FED_SHARE = 0.01  # the verdict is "fed" if waits in slow steps took less than this share of the time

REFETCHED_SHARE = 0.1  # the cache is too small if this share of fetched bytes had been in it before

THROTTLED_SHARE = 0.01  # the store throttles if this share of requests got a 503: clients pause after each

RETRIED_SHARE = 0.05  # the store fails if this share of requests was retried

SLOW_FIRST_BYTE_SECONDS = 0.5  # the store is slow if the p99 first byte is later; S3's is mostly below 0.2 s


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStats:
    """Counters of the shard cache since the start; `used_bytes` and `capacity_bytes` are current values."""

    hits: float = 0.0
    """Shards that were in the cache when needed."""
    misses: float = 0.0
    """Shards that were not in the cache when needed."""
    evictions: float = 0.0
    """Shards removed from the cache to make room."""
    fetched_bytes: float = 0.0
    """Bytes fetched into the cache."""
    refetched_bytes: float = 0.0
    """Bytes fetched again after their eviction."""
    decompressed_bytes: float = 0.0
    """Bytes produced by decompression."""
    row_reads: float = 0.0
    """Single rows fetched because their shard was not in the cache yet."""
    unproved_bytes: float = 0.0
    """Bytes that could be checked only by size, because the index records no hashes."""
    bypassed: float = 0.0
    """Shards read without being cached, because the cache had no room."""
    quarantined: float = 0.0
    """Shards whose bytes were wrong."""
    disk_full: float = 0.0
    """Number of times that the cache's disk had no room for a shard."""
    locked_out: float = 0.0
    """Number of times that a stopped process held the lock of the cache."""
    used_bytes: float = 0.0
    """Bytes in the cache."""
    capacity_bytes: float = 0.0
    """Bytes that the cache may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """Counters of object store requests since the start; percentiles cover the latest requests."""

    requests: float = 0.0
    """Requests sent to the object store."""
    read_bytes: float = 0.0
    """Bytes read from the object store."""
    retries: float = 0.0
    """Requests repeated after a failure."""
    outages: float = 0.0
    """Number of times that requests failed for more than a few seconds."""
    throttled: float = 0.0
    """Responses with status 503 (slow down)."""
    hedges: float = 0.0
    """Duplicate requests sent because the first one took long."""
    resumed_bodies: float = 0.0
    """Response bodies continued on a new connection."""
    errors: float = 0.0
    """Requests that failed."""
    first_byte_p50_seconds: float | None = None
    """Median time to the first byte, in seconds."""
    first_byte_p99_seconds: float | None = None
    """99th percentile of the time to the first byte, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceStats:
    """Imbalance of the ranks' work: the cost of the most expensive rank divided by the mean over all ranks.

    1.0 means perfectly balanced. Computed over all delivered batches and, if `global_batch` is given, over
    all completed optimizer steps. The `unbalanced` values are those of the same rows without `balance`.
    """

    max_over_mean: float = 0.0
    """Cost of each batch's most expensive rank, divided by the mean over all ranks."""
    unbalanced: float = 0.0
    """Value of `max_over_mean` that the same batches would have without `balance`."""
    step_max_over_mean: float | None = None
    """Cost of each optimizer step's most expensive rank, divided by the mean; None without `global_batch`."""
    step_unbalanced: float | None = None
    """Value of `step_max_over_mean` without `balance`; None without `global_batch`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """Statistics of one rank over `seconds`. A step is a delivered batch; a wait is the loop's wait for it.

    Percentiles come from a histogram with 8 bins per doubling, so they are at most 9 % too high. `cache` and
    `store` are None without remote data, `balance` is None if ranks are not balanced.
    """

    steps: int = 0
    samples: int = 0
    """Samples delivered by this rank."""
    seconds: float = 0.0
    """Time since the first batch was requested."""
    first_wait_seconds: float = 0.0
    """The wait for the first batch."""
    wait_seconds: float = 0.0
    wait_last_seconds: float = 0.0
    """The latest wait."""
    wait_p50_seconds: float = 0.0
    wait_p99_seconds: float = 0.0
    wait_max_seconds: float = 0.0
    """The longest wait."""
    slow_step_seconds: float = 1e-3
    """Threshold above which the wait of a step counts as slow."""
    slow_steps: int = 0
    """Steps that waited longer than `slow_step_seconds`."""
    slow_wait_seconds: float = 0.0
    """Total wait of the slow steps, in seconds."""
    queue_depth: float = 0.0
    """Batches ready after the latest one was delivered."""
    queue_depth_mean: float = 0.0
    copy_seconds: float = 0.0
    """Time that the loop or the GPU waited for copies to the device; only a `CudaPrefetcher` counts it."""
    loop_seconds: float = 0.0
    """Time inside `for` loops up to the latest batch, without the time between loops."""
    completed_steps: int = 0
    """Steps whose loop came back for another batch, so that their whole duration is in `loop_seconds`."""
    ranks: int = 1
    """Number of data-parallel ranks."""
    sample_tokens: int | None = None
    """Tokens of a sample; None if samples differ in length or have no tokens."""
    cache: CacheStats | None = None
    store: StoreStats | None = None
    balance: BalanceStats | None = None
    wait_counts: tuple[int, ...] = field(default=(), repr=False)
    """The histogram of waits, from which `since` computes percentiles."""

    @property
    def rest_seconds(self) -> float:
        """Time inside `for` loops that was spent neither waiting for batches nor for copies: the training."""
        return max(0.0, self.loop_seconds - self.wait_seconds - self.copy_seconds)

    def since(self, earlier: LoaderStats) -> LoaderStats:
        """Return the statistics of the interval between `earlier`, of the same loader, and these.

        Values that are neither sums nor percentiles of waits stay as they are, such as those of requests.
        `earlier` of another loader that has counted more steps is ignored.
        """
        if not earlier.steps or earlier.steps > self.steps:
            return self
        sums = (
            "steps", "samples", "seconds", "wait_seconds", "slow_steps", "slow_wait_seconds",
            "copy_seconds", "loop_seconds", "completed_steps",
        )  # fmt: skip
        changes: dict[str, Any] = {name: getattr(self, name) - getattr(earlier, name) for name in sums}
        counts = np.array(self.wait_counts, np.int64) - np.array(earlier.wait_counts, np.int64)
        p50, p99, longest = (_quantile(counts, part, self.wait_max_seconds) for part in (0.5, 0.99, 1.0))
        return replace(
            self,
            **changes,
            first_wait_seconds=0.0,
            wait_p50_seconds=p50,
            wait_p99_seconds=p99,
            wait_max_seconds=longest,
            cache=_difference(self.cache, earlier.cache, ("used_bytes", "capacity_bytes")),
            store=_difference(
                self.store, earlier.store, ("first_byte_p50_seconds", "first_byte_p99_seconds")
            ),
            wait_counts=tuple(counts.tolist()),
        )

    @property
    def samples_per_second(self) -> float:
        """Samples per second of this rank."""
        return _share(self.samples, self.seconds)

    @property
    def slow_steps_share(self) -> float:
        return _share(self.slow_steps, self.steps)

    @property
    def waited_share(self) -> float:
        """Share of the time that the loop spent waiting for batches, from 0 to 1."""
        return min(1.0, _share(self.wait_seconds, self.seconds))

    @property
    def verdict(self) -> str:
        """One line that says whether training waited for data, and why."""
        return verdict(self)

    def to_dict(self) -> dict[str, object]:
        """Return all statistics, including derived ones, as plain data for JSON and loggers."""
        derived = ("rest_seconds", "samples_per_second", "slow_steps_share", "waited_share", "verdict")
        stated = asdict(self) | {name: getattr(self, name) for name in derived}
        del stated["wait_counts"]
        return stated


Counters = TypeVar("Counters", CacheStats, StoreStats)


def _difference(now: Counters | None, earlier: Counters | None, current: Sequence[str]) -> Counters | None:
    """Return the counters `now` less those `earlier`, except for the fields `current`, which are not sums."""
    if now is None or earlier is None:
        return now
    names = [each.name for each in fields(now) if each.name not in current]
    return replace(now, **{name: getattr(now, name) - getattr(earlier, name) for name in names})


def verdict(stats: LoaderStats) -> str:
    """Return "fed: …" or "input-bound: …; cause: advice", with the number of damaged shards, if any."""
    if not stats.steps:
        return "no steps yet"
    bad = f"; {stats.cache.quarantined:.0f} damaged shards" if stats.cache and stats.cache.quarantined else ""
    first = stats.first_wait_seconds
    first_is_slow = first > stats.slow_step_seconds
    slow = stats.slow_steps - first_is_slow
    lost = stats.slow_wait_seconds - (first if first_is_slow else 0.0)
    lost_share = min(1.0, _share(lost, stats.seconds - first))
    waited = f"{_percent(_share(slow, stats.steps))} of steps waited"
    if slow <= 0 or lost_share < FED_SHARE:
        return f"fed: {waited}{bad}"
    return f"input-bound: {waited}, {_percent(lost_share)} of the time{bad}; {_likeliest_cause(stats)}"


def _likeliest_cause(stats: LoaderStats) -> str:
    """Return the cause of waits, and what to do, by the first rule that applies."""
    cache, store = stats.cache or CacheStats(), stats.store or StoreStats()
    if cache.disk_full > REFETCHED_SHARE * cache.misses:
        return "the cache's disk is full, so shards are read into memory: free disk space or change cache_dir"
    if cache.locked_out > REFETCHED_SHARE * cache.misses:
        return "a stopped process holds the lock of the cache: continue it or end it"
    # Before the throttling rule, because refetching evicted shards also causes throttling.
    again = _share(cache.refetched_bytes, cache.fetched_bytes)
    too_small = f"the cache of {format_bytes(cache.capacity_bytes)} is too small"
    if again >= REFETCHED_SHARE:
        why = f"{_percent(again)} of the bytes fetched had been evicted before they were needed"
        return f"{too_small} ({why}): raise cache_bytes"
    if cache.bypassed and cache.bypassed >= REFETCHED_SHARE * cache.misses:
        return f"{too_small} ({cache.bypassed:.0f} shards did not fit): raise cache_bytes"
    if _share(store.throttled, store.requests) >= THROTTLED_SHARE:
        why = f"{store.throttled:.0f} of {store.requests:.0f} requests were answered 503"
        return f"the store throttles ({why}): lower connections, use more prefixes or raise cache_bytes"
    if _share(store.retries, store.requests) >= RETRIED_SHARE:
        why = f"{store.retries:.0f} retries, {store.errors:.0f} errors, {store.requests:.0f} requests"
        return f"the store fails ({why}): check the network and the endpoint"
    # A prefetcher that keeps up hides a slow store: the store is the cause only if shards were missing.
    if (store.read_bytes if stats.cache is None else cache.misses + cache.row_reads) > 0:
        first_byte = store.first_byte_p99_seconds
        if first_byte is not None and first_byte >= SLOW_FIRST_BYTE_SECONDS:
            return f"the store is slow (GET p99 {_seconds(first_byte)}): raise connections or cache_bytes"
        rate = format_bytes(_share(store.read_bytes, stats.seconds))
        return f"the store delivers {rate}/s, less than is used: raise connections or cache_bytes"
    if cache.decompressed_bytes:
        rate = format_bytes(_share(cache.decompressed_bytes, stats.seconds))
        return (
            f"decompression ({rate}/s) is too slow: give this process more CPU cores, or build uncompressed "
            "shards"
        )
    if _share(stats.seconds - stats.wait_seconds, stats.steps) < BUSY_SECONDS:
        return "the loop only reads, so this is the maximum rate at which this machine makes batches"
    return "this machine makes batches too slowly: look for busy CPU cores or a slow local disk"


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


CLASSES_PER_DOUBLING = 8
_FIRST_CLASS_SECONDS = 1e-6  # waits up to this count as no wait
_CLASSES = 2 + 32 * CLASSES_PER_DOUBLING  # number of bins, up to 1.2 hours; the last bin has longer waits
# Added to a wait's bin number, so that a wait of 1 microsecond is in bin 1; bin 0 counts steps without wait.
_OFFSET = 1 - CLASSES_PER_DOUBLING * math.log2(_FIRST_CLASS_SECONDS)


class Telemetry:
    """Counts a loader's steps and waits, and reports them together with counters of its caches and stores.

    `batch_size`: samples per step on this rank. `shards`: shards of the remote datasets, with their caches
    and stores. A step that waits longer than `slow_step_seconds` counts as slow. `ranks`: number of ranks.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        shards: Sequence[CachedShards] = (),
        slow_step_seconds: float = 1e-3,
        ranks: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batch_size = batch_size
        self._shards = tuple(shards)
        self._slow_step_seconds = slow_step_seconds
        self._ranks = ranks
        self._clock = clock
        self._began = self._ended_seconds = self._copy_seconds = 0.0
        self._at: float | None = None  # when the running loop received its latest batch
        self._loops = self._ends = (
            0  # loops that received a batch; those that came back for one after the last
        )
        self._started: float | None = None
        self._first_wait_seconds = self._last_wait_seconds = self._max_wait_seconds = 0.0
        self._steps = self._waits = self._slow_steps = 0
        self._wait_seconds = self._slow_wait_seconds = 0.0
        self._queue_depth = self._queue_depths = 0.0
        self._histogram = [0] * _CLASSES
        self._work: npt.NDArray[np.float64] | None = None

    def balanced(self, work: npt.NDArray[np.int64], ranks: int) -> None:
        """Add the work of a balanced batch, in the format of `Steps.work`; `ranks`: the number of ranks."""
        total = work.astype(np.float64) * np.array([1, ranks, ranks] * 2)
        self._work = total if self._work is None else self._work + total

    def begin(self) -> None:
        """Count the time up to the next batch's request not as time of a loop: a `for` begins."""
        if self._at is not None:
            self._ended_seconds += self._at - self._began
            self._at = None

    def end(self) -> None:
        """Count the last batch's step as completed: its loop came back and there is no further batch."""
        if self._at is not None:
            self._at = self._clock()
            self._ends += 1
            self.begin()

    def step(self, wait_seconds: float, queue_depth: float = 0, copy_seconds: float = 0.0) -> None:
        """Count a batch delivered after `wait_seconds`, with `queue_depth` more batches ready.

        `copy_seconds`: the further wait for its copy to the device.
        """
        now = self._clock()
        if self._at is None:
            self._began = now - wait_seconds - copy_seconds
            self._loops += 1
            if self._started is None:
                self._started = self._began
                self._first_wait_seconds = wait_seconds
        self._at = now
        self._copy_seconds += copy_seconds
        self._steps += 1
        self._waits += 1
        self._queue_depth = queue_depth
        self._queue_depths += queue_depth
        self._last_wait_seconds = wait_seconds
        self._wait_seconds += wait_seconds
        if wait_seconds <= _FIRST_CLASS_SECONDS:
            return
        self._histogram[min(int(math.log2(wait_seconds) * CLASSES_PER_DOUBLING + _OFFSET), _CLASSES - 1)] += 1
        if wait_seconds > self._max_wait_seconds:
            self._max_wait_seconds = wait_seconds
        if wait_seconds > self._slow_step_seconds:
            self._slow_steps += 1
            self._slow_wait_seconds += wait_seconds

    def more(self) -> None:
        """Count a batch that became ready together with the latest counted batch and added no wait."""
        self._steps += 1
        self._at = self._clock()

    def stats(self, sample_tokens: int | None = None) -> LoaderStats:
        """Return the statistics since the first batch was requested, of samples of this many tokens."""
        histogram = np.array(self._histogram, np.int64)
        steps, at = self._steps, self._at
        histogram[0] = steps - histogram.sum()
        p50, p99, longest = (_quantile(histogram, part, self._max_wait_seconds) for part in (0.5, 0.99, 1.0))
        return LoaderStats(
            steps=steps,
            samples=steps * self._batch_size,
            seconds=0.0 if self._started is None else self._clock() - self._started,
            first_wait_seconds=self._first_wait_seconds,
            wait_seconds=self._wait_seconds,
            wait_last_seconds=self._last_wait_seconds,
            wait_p50_seconds=p50,
            wait_p99_seconds=p99,
            wait_max_seconds=longest,
            slow_step_seconds=self._slow_step_seconds,
            slow_steps=self._slow_steps,
            slow_wait_seconds=self._slow_wait_seconds,
            queue_depth=self._queue_depth,
            queue_depth_mean=self._queue_depths / self._waits if self._waits else 0.0,
            copy_seconds=self._copy_seconds,
            loop_seconds=self._ended_seconds + (0.0 if at is None else at - self._began),
            completed_steps=steps - self._loops + self._ends,
            ranks=self._ranks,
            sample_tokens=sample_tokens,
            wait_counts=tuple(histogram.tolist()),
            cache=_cache_stats(self._shards) if self._shards else None,
            store=_store_stats(self._shards) if self._shards else None,
            balance=None if self._work is None else _balance_stats(*self._work.tolist()),
        )


def _balance_stats(
    work: float, dearest: float, plain: float, steps: float, step_dearest: float, step_plain: float
) -> BalanceStats:
    """Return the statistics from sums of work over batches (first three) and optimizer steps (last three).

    `work`, `steps`: work of all ranks. `dearest`, `plain`: work of the most expensive rank, with and without
    `balance`, times the number of ranks.
    """
    return BalanceStats(
        max_over_mean=_share(dearest, work),
        unbalanced=_share(plain, work),
        step_max_over_mean=step_dearest / steps if steps else None,
        step_unbalanced=step_plain / steps if steps else None,
    )


def _quantile(histogram: npt.NDArray[np.int64], part: float, longest: float) -> float:
    """Return the upper edge of the bin that holds quantile `part`, at most the `longest` wait, in seconds."""
    total = int(histogram.sum())
    if not total:
        return 0.0
    found = int(np.searchsorted(np.cumsum(histogram), part * total))
    if found == 0:
        return 0.0
    edge = _FIRST_CLASS_SECONDS * 2.0 ** (found / CLASSES_PER_DOUBLING)
    return longest if found == _CLASSES - 1 else min(edge, longest)


def _cache_stats(shards: Sequence[CachedShards]) -> CacheStats:
    """Return counters summed over caches; a shared cache's used and capacity bytes count only once."""
    counted = [each.counters() for each in shards]
    total = {entry.name: sum(each[entry.name] for each in counted) for entry in fields(CacheStats)}
    if shards[0].cache.is_shared:
        total |= {name: counted[0][name] for name in ("used_bytes", "capacity_bytes")}
    return CacheStats(**total)


def _store_stats(shards: Sequence[CachedShards]) -> StoreStats:
    """Return counters summed over the stores, and the time percentiles of the slowest store."""
    seen = [each.store.metrics.snapshot() for each in shards]

    def slowest(quantile: float) -> float | None:
        times = [each.first_byte_seconds(quantile) for each in seen]
        return max((time for time in times if time is not None), default=None)

    return StoreStats(
        requests=sum(sum(each.requests.values()) for each in seen),
        errors=sum(sum(each.errors.values()) for each in seen),
        read_bytes=sum(each.bytes_read for each in seen),
        retries=sum(each.retries for each in seen),
        outages=sum(each.outages for each in seen),
        throttled=sum(each.throttled for each in seen),
        hedges=sum(each.hedges for each in seen),
        resumed_bodies=sum(each.resumed_bodies for each in seen),
        first_byte_p50_seconds=slowest(0.5),
        first_byte_p99_seconds=slowest(0.99),
    )
