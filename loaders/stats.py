"""What a loader did in a stretch of time, as plain numbers, and the one line that sums it up.

`verdict` says whether training waited for data and, if it did, the likeliest reason: the rules are the list
`_CAUSES`, tried in its order, each from figures alone. The wait for the first batch (shards being opened, a
cold cache) is told apart: a run that lost a second once, at its start, is not input-bound.

Costs nothing while training: figures are put together when someone asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from shardkit.loaders.prefetch import BUSY_SECONDS
from shardkit.units import format_bytes

__all__ = ["CacheStats", "LoaderStats", "StoreStats", "verdict"]

FED_SHARE = 0.01  # of the time lost in steps that waited: below, nothing is worth changing
REFETCHED_SHARE = 0.1  # of what was fetched had been in the cache before: it is too small
THROTTLED_SHARE = 0.01  # of requests answered 503: clients slow themselves down after each
RETRIED_SHARE = 0.05  # of requests made again
SLOW_FIRST_BYTE_SECONDS = 0.5  # S3 answers most requests within 0.2 s


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheStats:
    """What the shard cache did. Counts and bytes are of the stretch; used and capacity are of now."""

    hits: float = 0
    misses: float = 0
    evictions: float = 0
    fetched_bytes: float = 0
    refetched_bytes: float = 0
    """Of these, bytes that had been in the cache before and were evicted."""
    decompressed_bytes: float = 0
    row_reads: float = 0
    """Rows read by themselves because their shard was not there yet."""
    bypassed: float = 0
    """Shards read without being kept: the cache had no room."""
    quarantined: float = 0
    """Shards whose bytes were wrong."""
    used_bytes: float = 0
    capacity_bytes: float = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """What the object store was asked. Counts and bytes are of the stretch; percentiles as the store says."""

    requests: float = 0
    read_bytes: float = 0
    retries: float = 0
    outages: float = 0
    """Times that requests failed for more than a few seconds."""
    throttled: float = 0
    """Answers "slow down" (503)."""
    hedges: float = 0
    """Requests made a second time because the first took long."""
    resumed_bodies: float = 0
    errors: float = 0
    first_byte_p50_seconds: float | None = None
    first_byte_p99_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """The figures of one rank over `seconds`. A step is a batch handed over; a wait is the loop's for it.

    Percentiles come from a histogram of 8 classes per doubling: at most 9 % too high. `slow_steps` are those
    that waited longer than `slow_step_seconds`. `cache` and `store` are None where there is none.
    """

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    first_wait_seconds: float = 0.0
    """The wait for the first batch; 0 in a stretch that does not hold it."""
    wait_seconds: float = 0.0
    wait_last_seconds: float = 0.0
    wait_p50_seconds: float = 0.0
    wait_p99_seconds: float = 0.0
    wait_max_seconds: float = 0.0
    slow_step_seconds: float = 1e-3
    slow_steps: int = 0
    slow_wait_seconds: float = 0.0
    """What the slow steps waited together."""
    queue_depth: float = 0.0
    queue_depth_mean: float = 0.0
    cache: CacheStats | None = None
    store: StoreStats | None = None

    @property
    def samples_per_second(self) -> float:
        """Of this rank."""
        return _share(self.samples, self.seconds)

    @property
    def slow_steps_share(self) -> float:
        return _share(self.slow_steps, self.steps)

    @property
    def waited_share(self) -> float:
        """Of the time: how much of it the loop spent waiting for batches."""
        return min(1.0, _share(self.wait_seconds, self.seconds))

    @property
    def verdict(self) -> str:
        """One line: whether training waited for data, and why."""
        return verdict(self)

    def to_dict(self) -> dict[str, object]:
        """All figures as plain data, what is derived from them included; for JSON and loggers."""
        derived = ("samples_per_second", "slow_steps_share", "waited_share", "verdict")
        return asdict(self) | {name: getattr(self, name) for name in derived}


def verdict(stats: LoaderStats) -> str:
    """ "fed: …" or "input-bound: …; what to do", with damaged shards named in either."""
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
    cause = next(found for rule in _CAUSES if (found := rule(stats)))
    return f"input-bound: {waited}, {_percent(lost_share)} of the time{bad}; {cause}"


def _cache_too_small(stats: LoaderStats) -> str | None:
    # First: fetching again what was there is also what makes a store throttle.
    cache = stats.cache or CacheStats()
    again = _share(cache.refetched_bytes, cache.fetched_bytes)
    if again >= REFETCHED_SHARE:
        why = f"{_percent(again)} of the bytes fetched had been evicted before they were needed"
    elif cache.bypassed and cache.bypassed >= REFETCHED_SHARE * cache.misses:
        why = f"{cache.bypassed:.0f} shards found no room"
    else:
        return None
    return f"the cache of {format_bytes(cache.capacity_bytes)} is too small ({why}): raise cache_bytes"


def _throttled(stats: LoaderStats) -> str | None:
    store = stats.store or StoreStats()
    if not store.throttled or store.throttled < THROTTLED_SHARE * store.requests:
        return None
    why = f"{store.throttled:.0f} answers 503 to {store.requests:.0f} requests"
    return f"the store throttles ({why}): lower connections, use more prefixes or raise cache_bytes"


def _failing_store(stats: LoaderStats) -> str | None:
    store = stats.store or StoreStats()
    if not store.retries or store.retries < RETRIED_SHARE * store.requests:
        return None
    why = f"{store.retries:.0f} retries, {store.errors:.0f} errors, {store.requests:.0f} requests"
    return f"the store fails ({why}): check the network and the endpoint"


def _slow_store(stats: LoaderStats) -> str | None:
    # A prefetcher that keeps up hides a slow store: it is to blame only if shards were missing when needed.
    store = stats.store or StoreStats()
    if not _missed(stats):
        return None
    first_byte = store.first_byte_p99_seconds
    if first_byte is not None and first_byte >= SLOW_FIRST_BYTE_SECONDS:
        return f"the store is slow (GET p99 {_seconds(first_byte)}): raise connections or cache_bytes"
    rate = format_bytes(_share(store.read_bytes, stats.seconds))
    return f"the store delivers {rate}/s, less than is used: raise connections or cache_bytes"


def _decompression(stats: LoaderStats) -> str | None:
    cache = stats.cache or CacheStats()
    if not cache.decompressed_bytes:
        return None
    rate = format_bytes(_share(cache.decompressed_bytes, stats.seconds))
    return f"decompression ({rate}/s) is too slow here: give it more CPU cores or store shards uncompressed"


def _only_reading(stats: LoaderStats) -> str | None:
    busy_seconds = _share(stats.seconds - stats.wait_seconds, stats.steps)
    if busy_seconds >= BUSY_SECONDS:
        return None
    return "the loop does nothing but read: this is as fast as batches are made here"


def _processor(stats: LoaderStats) -> str | None:
    return "batches are made too slowly on this machine: look for busy CPU cores or a slow local disk"


_Cause = Callable[[LoaderStats], str | None]
_CAUSES: tuple[_Cause, ...] = (
    _cache_too_small,
    _throttled,
    _failing_store,
    _slow_store,
    _decompression,
    _only_reading,
    _processor,
)


def _missed(stats: LoaderStats) -> bool:
    """Whether readers had to wait for the store; without a cache, every read is such a wait."""
    if stats.cache is None:
        return stats.store is not None and stats.store.read_bytes > 0
    return stats.cache.misses + stats.cache.row_reads > 0


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"
