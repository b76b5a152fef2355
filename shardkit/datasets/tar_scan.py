"""Scan tars that have no shards.json, each once and in threads, to make their manifest.

All samples are numbered before the first one is delivered, so all tars are scanned when a dataset is opened.
A remote tar that does not fit in the cache is scanned while it is streamed, without storing it. If a payload
takes longer to transfer than a new request takes to start, it is skipped by opening the object again after
it. So scanning a tar of videos takes one request per video instead of a transfer of all its bytes.

With a cache folder, the results are kept there (`shardkit.cache.indexes.TarIndexes`): of the processes that
open a tar at the same time, one scans it while the others wait (for a limited time), and later openings scan
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from threading import Semaphore
from typing import TypeVar

from shardkit.arrays import Bytes
from shardkit.cache.indexes import TarIndexes
from shardkit.formats.tar.members import (
    Member,
    Scanned,
    TarIndex,
    group_members,
    split_name,
    walk_members,
)
from shardkit.formats.tar.shard import shard_from_raw
from shardkit.formats.tar.values import encoding_of
from shardkit.manifest import Column, Manifest, ShardInfo
from shardkit.progress import reading
from shardkit.storage.store import Body, Store

SKIP_BYTES = 8 << 20  # number of bytes that arrive in the time that another request takes to start
# Seconds to wait for another process's scan, plus time for a slow download; after that, it must be hanging.
CLAIM_SECONDS = 30.0
_FLOOR_BYTES_PER_SECOND = 10e6
_PIECE_BYTES = 1 << 17
_HEAD_THREADS = 8

T = TypeVar("T")
Load = Callable[[int], Bytes]
Skim = Callable[[int], "tuple[Scanned, TarIndex] | None"]
Report = Callable[[int], None]


def skim_tar(
    store: Store,
    info: ShardInfo,
    version: str,
    *,
    skip_bytes: int = SKIP_BYTES,
    piece_bytes: int = _PIECE_BYTES,
) -> tuple[Scanned, TarIndex] | None:
    """Scan a remote, uncompressed tar in pieces of `piece_bytes`, without reading most of its payloads.

    Unneeded bytes are skipped if there are more than `skip_bytes`. Returns None for a tar that must be read
    whole, because it is compressed or has arrays. Raises ShardError if it is damaged, ObjectChangedError if
    its version is not `version`, and StoreError if the store fails.
    """
    if info.compression:
        return None
    where = f"{store.url}/{info.stored.basename}"
    with _Passing(store, info.stored.basename, info.stored.bytes, version, skip_bytes, piece_bytes) as data:
        try:
            index = group_members(_without_arrays(walk_members(data, where)), where)
        except _ArraysError:
            return None
    columns = tuple(Column(extension, encoding_of(extension)) for extension in index.extensions)
    return Scanned(len(index), info.stored.bytes, columns), index


class _ArraysError(Exception):
    """The tar has .npy members. To describe their column, the headers of all of them must be read."""


def _without_arrays(members: Iterator[Member]) -> Iterator[Member]:
    for member in members:
        parts = split_name(member.name)
        if parts is not None and parts[1].rpartition(".")[2] == "npy":
            raise _ArraysError
        yield member


class _Passing:
    """A forward-only view of an object: no slice may begin before the previous one. Stores nothing."""

    def __init__(
        self, store: Store, key: str, size: int, version: str, skip_bytes: int, piece_bytes: int
    ) -> None:
        self._store, self._key, self._size, self._version = store, key, size, version
        self._body: Body | None = None
        self._skip_bytes = skip_bytes
        self._buffer = memoryview(bytearray(piece_bytes))
        self._begin = self._end = 0  # range of the object that the buffer holds
        self._last = (0, b"")  # start and bytes of the last slice: the end marker is read twice

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice) -> bytes:
        start, stop, _ = span.indices(self._size)
        at, data = start, bytearray()
        if start < self._end and start == self._last[0]:
            data += self._last[1][: max(0, stop - start)]
            at += len(data)
        while at < stop:
            if not self._begin <= at < self._end:
                self._fill(at)
                continue
            data += self._buffer[at - self._begin : min(stop, self._end) - self._begin]
            at = min(stop, self._end)
        self._last = (start, bytes(data))
        return self._last[1]

    def _fill(self, at: int) -> None:
        """Read the next piece, or skip towards `at` by opening the object there."""
        assert at >= self._end
        if self._body is not None and at - self._end > self._skip_bytes:
            self._close()
        if self._body is None:
            self._body = self._store.open(self._key, at, version=self._version)
            self._end = at
        count = self._body.readinto(self._buffer)
        assert count, "a body ends where its object does"
        self._begin, self._end = self._end, self._end + count

    def _close(self) -> None:
        if self._body is not None:
            self._body.close()
            self._body = None

    def __enter__(self) -> _Passing:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def scan_tars(
    manifest: Manifest,
    load: Load,
    where: Callable[[int], str],
    indexes: TarIndexes,
    *,
    threads: int,
    held: int | None = None,
    skim: Skim = lambda number: None,
    claim_seconds: float = CLAIM_SECONDS,
) -> Manifest:
    """Return `manifest` with the samples, sizes and columns of its tars.

    `skim` is tried first for each tar; if it returns None, `load` must return the tar's raw bytes. At most
    `threads` tars are scanned at a time, and at most `held` of them are in memory. Raises ShardError for a
    damaged tar. If scanning takes more than two seconds, a machine's first process shows progress on stderr.
    """
    shards, numbers = manifest.shards, range(len(manifest.shards))
    room = Semaphore(held or threads)  # limits the number of tars in memory

    def scan(number: int) -> Scanned:
        found = skim(number)
        if found is None:
            with room:
                shard = shard_from_raw(where(number), shards[number], load(number))
                found = Scanned(len(shard), shard.info.raw.bytes, shard.columns), shard.index
        indexes.keep(number, *found)
        return found[0]

    with ThreadPoolExecutor(min(_HEAD_THREADS, max(1, len(shards)))) as pool:
        known = zip(numbers, pool.map(indexes.scanned, numbers), strict=True)
        found = {number: scanned for number, scanned in known if scanned is not None}
    missing = [number for number in numbers if number not in found]
    if missing:
        sizes = {number: max(shards[number].stored.bytes, 0) for number in missing}
        seconds = {number: claim_seconds + size / _FLOOR_BYTES_PER_SECOND for number, size in sizes.items()}
        with reading("scan tars", sizes) as report:
            found |= _scan_all(scan, seconds, indexes, threads=threads, report=report)
        indexes.trim()
    return Manifest("tar", tuple(_described(shards[number], found[number]) for number in numbers))


def _scan_all(
    scan: Callable[[int], Scanned],
    seconds: Mapping[int, float],
    indexes: TarIndexes,
    *,
    threads: int,
    report: Report,
) -> dict[int, Scanned]:
    """Scan tars, each in one process; `seconds` maps tars to the time limit to wait for another process."""
    missing = [*seconds]
    if indexes.folder is None:
        return _side_by_side(scan, missing, threads, report)

    def wait(number: int) -> Scanned | None:
        return _scan_claimed(scan, indexes, number, seconds[number])

    # First scan the tars that no other process is scanning; meanwhile, most of the others are finished.
    at_once = partial(_scan_claimed, scan, indexes, timeout_seconds=0.0)
    first = _side_by_side(at_once, missing, threads, report)
    others = [number for number, scanned in first.items() if scanned is None]
    rest = _side_by_side(wait, others, threads, report)
    done = {number: scanned for number, scanned in {**first, **rest}.items() if scanned is not None}
    left = [number for number in missing if number not in done]  # claimed by a process that hangs
    return done | _side_by_side(scan, left, threads, report)


def _scan_claimed(
    scan: Callable[[int], Scanned], indexes: TarIndexes, number: int, timeout_seconds: float
) -> Scanned | None:
    """Scan a tar, or wait for the process that is scanning it; return None after `timeout_seconds`."""
    claim = indexes.claim(number, timeout_seconds)
    try:
        return indexes.scanned(number) or (None if claim is None else scan(number))
    finally:
        if claim is not None:
            claim.release()


def _side_by_side(work: Callable[[int], T], numbers: list[int], threads: int, report: Report) -> dict[int, T]:
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
                report(number)
    finally:
        # After an error or Ctrl-C, pending loads end when the caller closes the shards that they read.
        pool.shutdown(wait=False, cancel_futures=True)
    return done


def _described(info: ShardInfo, scanned: Scanned) -> ShardInfo:
    raw = replace(info.raw, bytes=scanned.raw_bytes)
    return replace(info, raw=raw, samples=scanned.samples, columns=scanned.columns)
