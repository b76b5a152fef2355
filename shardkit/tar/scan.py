"""The manifest of tars that no list describes: every tar is looked through once, in threads.

A sample has a number before the first one is delivered, so all tars are counted when a dataset is opened.
Where there is a cache folder, `shardkit.cache.tar_indexes` keeps what was found: each tar is scanned by one
of the processes that open it at once, others wait for it (in bounded time), and later openings scan nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from threading import Semaphore
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardkit.cache.tar_indexes import TarIndexes
from shardkit.index import Manifest, ShardInfo
from shardkit.progress import reading
from shardkit.tar.index import TarIndex
from shardkit.tar.index_file import Scanned
from shardkit.tar.shard import shard_from_raw

__all__ = ["scan_tars"]

T = TypeVar("T")
Load = Callable[[int], npt.NDArray[np.uint8]]
Skim = Callable[[int], "tuple[Scanned, TarIndex] | None"]
Tell = Callable[[int], None]

# A living scanner needs seconds, and what fetching takes on a slow day; who holds a tar for longer hangs.
CLAIM_SECONDS = 30.0
_FLOOR_BYTES_PER_SECOND = 10e6
_HEAD_THREADS = 8


def scan_tars(
    manifest: Manifest,
    load: Load,
    where: Callable[[int], str],
    indexes: TarIndexes,
    *,
    threads: int,
    held: int | None = None,
    skim: Skim = lambda number: None,
) -> Manifest:
    """`manifest` with the samples, sizes and columns of its tars.

    `load` gives a tar's raw bytes; `skim`, which is tried first, may find what they hold without them. Up to
    `threads` tars are scanned, and `held` of them loaded, at a time. ShardError names a tar that is damaged.
    Scans of more than two seconds are shown on stderr (by the first process of a machine).
    """
    shards = manifest.shards
    found: dict[int, Scanned] = {}
    numbers = range(len(shards))
    with ThreadPoolExecutor(min(_HEAD_THREADS, max(1, len(shards)))) as pool:
        for number, scanned in zip(numbers, pool.map(indexes.scanned, numbers), strict=True):
            if scanned is not None:
                found[number] = scanned
    missing = [number for number in numbers if number not in found]
    if missing:
        sizes = {number: max(shards[number].stored.bytes, 0) for number in missing}
        with reading("scan tars", sizes) as tell:
            scan = _Scan(shards, load, skim, where, indexes, Semaphore(held or threads))
            found |= _scan_all(scan, missing, sizes, indexes, threads=threads, tell=tell)
        indexes.trim()
    return Manifest("tar", tuple(_described(shards[number], found[number]) for number in numbers))


@dataclass(frozen=True, slots=True)
class _Scan:
    """Looks into one tar, and keeps what is found; `room` is for tars that are held whole."""

    infos: Sequence[ShardInfo]
    load: Load
    skim: Skim
    where: Callable[[int], str]
    indexes: TarIndexes
    room: Semaphore

    def __call__(self, number: int) -> Scanned:
        found = self.skim(number) or self._read(number)
        self.indexes.keep(number, *found)
        return found[0]

    def _read(self, number: int) -> tuple[Scanned, TarIndex]:
        with self.room:
            shard = shard_from_raw(self.where(number), self.infos[number], self.load(number))
            return Scanned(len(shard), shard.info.raw.bytes, shard.columns), shard.index


def _scan_all(
    scan: Callable[[int], Scanned],
    missing: list[int],
    sizes: Mapping[int, int],
    indexes: TarIndexes,
    *,
    threads: int,
    tell: Tell,
) -> dict[int, Scanned]:
    if indexes.folder is None:
        return _side_by_side(scan, missing, threads, tell)

    def wait(number: int) -> Scanned | None:
        seconds = CLAIM_SECONDS + sizes[number] / _FLOOR_BYTES_PER_SECOND
        return _scan_claimed(scan, indexes, number, seconds)

    # First those that nobody scans; then whatever others were at, most of which is done by then.
    at_once = partial(_scan_claimed, scan, indexes, timeout_seconds=0.0)
    first = _side_by_side(at_once, missing, threads, tell)
    others = [number for number, scanned in first.items() if scanned is None]
    rest = _side_by_side(wait, others, threads, tell)
    done = {number: scanned for number, scanned in {**first, **rest}.items() if scanned is not None}
    left = [number for number in missing if number not in done]  # their scanner hangs
    return done | _side_by_side(scan, left, threads, tell)


def _scan_claimed(
    scan: Callable[[int], Scanned], indexes: TarIndexes, number: int, timeout_seconds: float
) -> Scanned | None:
    """None if another process is at this tar for all of that time."""
    claim = indexes.claim(number, timeout_seconds)
    try:
        return indexes.scanned(number) or (None if claim is None else scan(number))
    finally:
        if claim is not None:
            claim.release()


def _side_by_side(work: Callable[[int], T], numbers: list[int], threads: int, tell: Tell) -> dict[int, T]:
    done: dict[int, T] = {}
    if not numbers:
        return done
    pool = ThreadPoolExecutor(min(threads, len(numbers)), thread_name_prefix="shardkit-scan")
    try:
        running: dict[Future[T], int] = {pool.submit(work, number): number for number in numbers}
        for future in as_completed(running):
            number = running[future]
            done[number] = future.result()
            if done[number] is not None:
                tell(number)
    finally:
        # After an error or Ctrl-C, what still loads is ended by whoever closes what it loads from.
        pool.shutdown(wait=False, cancel_futures=True)
    return done


def _described(info: ShardInfo, scanned: Scanned) -> ShardInfo:
    raw = replace(info.raw, bytes=scanned.raw_bytes)
    return replace(info, raw=raw, samples=scanned.samples, columns=scanned.columns)
