"""How long training waits for data, counted at every step for half a microsecond.

The loader reports each wait, which costs a few additions and one entry of a histogram. Cache and store are
asked for their running totals only when someone wants `stats`. One thread counts (the training loop's), any
thread may ask: without a lock, so that an answer may lack the figures of the step that is being counted.

Time runs from the moment the first batch was asked for: what a script does before is not the loader's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.loaders.stats import CacheStats, LoaderStats, StoreStats

__all__ = ["Mark", "Source", "Telemetry"]

Source = Callable[[], Mapping[str, float | None]]
"""Gives running totals since its start by name, e.g. {"hits": 812, "misses": 3}; None: not known yet."""

CLASSES_PER_DOUBLING = 8
_FIRST_CLASS_SECONDS = 1e-6  # what is not longer counts as no wait
_CLASSES = 2 + 32 * CLASSES_PER_DOUBLING  # up to 1.2 hours; longer waits are in the last class
_OFFSET = 1 - CLASSES_PER_DOUBLING * math.log2(_FIRST_CLASS_SECONDS)  # class 0 is for no wait at all
_OF_NOW = {"used_bytes", "capacity_bytes", "first_byte_p50_seconds", "first_byte_p99_seconds"}
_KINDS: dict[str, type[CacheStats | StoreStats]] = {"cache": CacheStats, "store": StoreStats}

T = TypeVar("T", CacheStats, StoreStats)


@dataclass(frozen=True, slots=True)
class Mark:
    """The running totals at a moment: what `Telemetry.stats(since=…)` counts from."""

    seconds: float = 0.0
    steps: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    slow_steps: int = 0
    slow_wait_seconds: float = 0.0
    queue_depths: float = 0.0
    histogram: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_CLASSES, np.int64))
    sources: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)


class Telemetry:
    """Counts a loader's steps and waits, and shows them beside what its cache and its store did.

    `batch_size`: samples of a step on this rank. `sources`: running totals of "cache" and "store", with the
    names of `CacheStats` and `StoreStats`; missing names are 0, others are ignored. A step that waited longer
    than `slow_step_seconds` is a slow one.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        sources: Mapping[str, Source] | None = None,
        slow_step_seconds: float = 1e-3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if unknown := sorted(set(sources or {}) - set(_KINDS)):
            raise ValueError(f"unknown sources {', '.join(unknown)}: known are {', '.join(_KINDS)}")
        self._batch_size = batch_size
        self._sources = dict(sources or {})
        self._slow_step_seconds = slow_step_seconds
        self._clock = clock
        self._started: float | None = None
        self._first_wait_seconds = self._last_wait_seconds = self._max_wait_seconds = 0.0
        self._steps = self._waits = self._slow_steps = 0
        self._wait_seconds = self._slow_wait_seconds = 0.0
        self._queue_depth = self._queue_depths = 0.0
        self._histogram = [0] * _CLASSES
        self._interval = Mark()

    def step(self, wait_seconds: float, queue_depth: float = 0) -> None:
        """A batch was handed over after `wait_seconds`; `queue_depth` batches were ready behind it."""
        self.steps(1, wait_seconds, queue_depth)

    def steps(self, count: int, wait_seconds: float, queue_depth: float = 0) -> None:
        """`count` batches came out of one wait: the first of them waited, the others did not."""
        if self._started is None:
            self._started = self._clock() - wait_seconds
            self._first_wait_seconds = wait_seconds
        self._steps += count
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

    def more(self, count: int = 1) -> None:
        """`count` more batches of the latest wait: for a loader that counts as it hands them out."""
        self._steps += count

    def mark(self) -> Mark:
        """The totals of now."""
        sources = {name: dict(source()) for name, source in self._sources.items()}
        histogram = np.array(self._histogram, np.int64)
        histogram[0] = self._steps - histogram.sum()
        return Mark(
            seconds=0.0 if self._started is None else self._clock() - self._started,
            steps=self._steps,
            waits=self._waits,
            wait_seconds=self._wait_seconds,
            slow_steps=self._slow_steps,
            slow_wait_seconds=self._slow_wait_seconds,
            queue_depths=self._queue_depths,
            histogram=histogram,
            sources=sources,
        )

    def stats(self, since: Mark | None = None) -> LoaderStats:
        """The figures since `since`; without it, since the first batch was asked for."""
        return self._between(since or Mark(), self.mark())

    def interval(self) -> LoaderStats:
        """The figures since the last call of this method: one caller's; others keep a `mark` of their own."""
        now = self.mark()
        before, self._interval = self._interval, now
        return self._between(before, now)

    def _between(self, before: Mark, now: Mark) -> LoaderStats:
        steps = now.steps - before.steps
        histogram = now.histogram - before.histogram
        p50, p99, longest = (_quantile(histogram, part, self._max_wait_seconds) for part in (0.5, 0.99, 1.0))
        waits = now.waits - before.waits
        return LoaderStats(
            steps=steps,
            samples=steps * self._batch_size,
            seconds=now.seconds - before.seconds,
            first_wait_seconds=0.0 if before.steps else self._first_wait_seconds,
            wait_seconds=now.wait_seconds - before.wait_seconds,
            wait_last_seconds=self._last_wait_seconds,
            wait_p50_seconds=p50,
            wait_p99_seconds=p99,
            wait_max_seconds=longest,
            slow_step_seconds=self._slow_step_seconds,
            slow_steps=now.slow_steps - before.slow_steps,
            slow_wait_seconds=now.slow_wait_seconds - before.slow_wait_seconds,
            queue_depth=self._queue_depth,
            queue_depth_mean=(now.queue_depths - before.queue_depths) / waits if waits else 0.0,
            cache=_difference(CacheStats, "cache", before, now),
            store=_difference(StoreStats, "store", before, now),
        )


def _quantile(histogram: npt.NDArray[np.int64], part: float, longest: float) -> float:
    """The upper edge of the class that holds the quantile, and never more than the longest wait."""
    total = int(histogram.sum())
    if not total:
        return 0.0
    found = int(np.searchsorted(np.cumsum(histogram), part * total))
    if found == 0:
        return 0.0
    edge = _FIRST_CLASS_SECONDS * 2.0 ** (found / CLASSES_PER_DOUBLING)
    return longest if found == _CLASSES - 1 else min(edge, longest)


def _difference(kind: type[T], name: str, before: Mark, now: Mark) -> T | None:
    """What a source counted between two marks; None without that source."""
    if name not in now.sources:
        return None
    new, old = now.sources[name], before.sources.get(name, {})
    found: dict[str, float] = {}
    for entry in fields(kind):
        value = new.get(entry.name)
        if value is None:
            continue
        # A total that went down started anew (a cache reopened): all of it is new.
        earlier = 0 if entry.name in _OF_NOW else old.get(entry.name) or 0
        found[entry.name] = value - earlier if value >= earlier else value
    return kind(**found)
