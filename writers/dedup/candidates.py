"""Candidate pairs of near-duplicates: documents that share a band's key, one partition of keys at a time.

The entries of a range of keys (BANDS) come from the exchange by (key, number); the documents of one key are a
bucket. A bucket of up to `limits.documents` documents gives all pairs, a larger one (a hub) gives the pairs
that `shardkit.writers.dedup.hubs` finds. At least one document of a pair is an input. Since inputs have the
lowest numbers, the pairs of a bucket are each input with all documents that follow it.

The set of all partitions' pairs does not depend on partitions, parts, or memory; the number of times that a
pair repeats does.

    pairs_first.run, pairs_second.run   the pairs (a, b), keyed by `a` and by `b`

Memory: half of the budget for a batch of entries, or one bucket if that is larger; a quarter for a run of
pairs and for the exchange's runs, and a quarter for a hub.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import Bools, Int64s, UInt64s, int64, kernel
from shardkit.writers.dedup.hubs import HubLimits, HubSearch
from shardkit.writers.dedup.population import PAIR, Population, PopulationFile
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage
from shardkit.writers.kernels.sorting import sort_keys

_SIDE = np.dtype([("key", "<u8"), ("other", "<u8")])
PAIRS_BY_FIRST = Table("pairs_first.run", _SIDE)  # key a, other b; a < b
PAIRS_BY_SECOND = Table("pairs_second.run", _SIDE)  # key b, other a

RUN_PAIRS = 1 << 22
WORD_DOCUMENTS = 1 << 32
_PEAK_BYTES_PER_PAIR = 64  # measured peak per pair while a run is sorted, with numbers over 32 bits
_CHUNK = 1 << 14  # pairs made or written at a time

Numbers = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class CandidateCounts:
    """Counts of one partition: band `entries`, `buckets` that made pairs, `hubs` among these buckets,
    documents in the `largest_bucket`, `pairs` without repetitions within a run, and documents that met
    a limit in hubs (`bounded`, see `HubSearch`)."""

    entries: int
    buckets: int
    hubs: int
    largest_bucket: int
    bounded: int
    pairs: int


def find_candidates_of(
    folder: Path,
    entries: Slice,
    population: PopulationFile,
    similarity: Annotated[float, RecipeKey("dedup.near.similarity")],
    memory_bytes: MemoryBytes,
) -> CandidateCounts:
    """Write the candidate pairs among documents that share a band key, for one range of keys."""
    loaded = population.load()
    return find_candidates(entries, loaded, folder, similarity=similarity, memory_bytes=memory_bytes)


CANDIDATES = Stage("candidates", "near-duplicates", find_candidates_of, cost=8)


def find_candidates(
    entries: Slice,
    population: Population,
    folder: Path,
    *,
    similarity: float,
    limits: HubLimits | None = None,
    memory_bytes: int = 256 << 20,
) -> CandidateCounts:
    """Write the candidate pairs of one range of band keys into `folder`; `entries` are its rows of BANDS."""
    limits = limits or HubLimits()
    counts = Counter[str](entries=0, buckets=0, hubs=0, largest_bucket=0)
    hubs = HubSearch(population, similarity, limits=limits, memory_bytes=memory_bytes // 4)
    run_pairs = max(1, min(RUN_PAIRS, memory_bytes // 4 // _PEAK_BYTES_PER_PAIR))
    with PairWriter(folder, int(population.starts[-1]), run_pairs=run_pairs) as writer:
        for rows in _whole_keys(entries, memory_bytes // 4):
            counts["entries"] += len(rows)
            numbers, edges = _buckets(rows)
            _add_buckets(population, numbers, edges, limits, hubs, writer, counts)
    return CandidateCounts(**counts, bounded=hubs.bounded, pairs=writer.pairs)


def _whole_keys(entries: Slice, memory_bytes: int) -> Iterator[npt.NDArray[np.void]]:
    """Yield the rows in order, in batches that contain all rows of each of their keys."""
    held: list[npt.NDArray[np.void]] = []
    for rows, _ in entries.stream(memory_bytes):
        if held and held[-1]["key"][-1] != rows["key"][0]:
            yield np.concatenate(held)
            held = []
        held.append(rows)
    if held:
        yield np.concatenate(held)


def _buckets(rows: npt.NDArray[np.void]) -> tuple[Numbers, npt.NDArray[np.int64]]:
    """Return (numbers, edges); numbers[edges[i] : edges[i + 1]] are the ascending documents of bucket i."""
    keys = np.ascontiguousarray(rows["key"])
    repeated = np.zeros(len(keys) + 1, np.bool_)
    repeated[1:-1] = keys[1:] == keys[:-1]
    shared = repeated[:-1] | repeated[1:]
    keys, numbers = keys[shared], rows["number"][shared]
    first = np.ones(len(keys), np.bool_)
    first[1:] = keys[1:] != keys[:-1]
    new = first.copy()
    new[1:] |= numbers[1:] != numbers[:-1]  # two bands of a document may have the same key
    numbers, first = numbers[new], first[new]
    edges = np.append(np.flatnonzero(first), len(numbers))
    return numbers, edges


def _add_buckets(
    population: Population,
    numbers: Numbers,
    edges: npt.NDArray[np.int64],
    limits: HubLimits,
    hubs: HubSearch,
    writer: PairWriter,
    counts: Counter[str],
) -> None:
    """Find the pairs of all buckets, add them to `writer`, and update `counts`."""
    inputs = np.diff(np.concatenate([[0], np.cumsum(numbers < population.indexed.start)])[edges])
    sizes = np.diff(edges)
    useful = (inputs > 0) & (sizes > 1)
    large = useful & (sizes > limits.documents)
    counts["buckets"] += int(useful.sum())
    counts["hubs"] += int(large.sum())
    counts["largest_bucket"] = max(counts["largest_bucket"], int(sizes[useful].max(initial=0)))
    _all_pairs(numbers, edges, inputs, useful & ~large, writer.add)
    for bucket in np.flatnonzero(large).tolist():
        for a, b in hubs.pairs(numbers[edges[bucket] : edges[bucket + 1]]):
            writer.add(a, b)


def _all_pairs(
    numbers: Numbers,
    edges: npt.NDArray[np.int64],
    inputs: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.bool_],
    add: Callable[[Numbers, Numbers], None],
) -> None:
    """Add the pairs of each input document of the `wanted` buckets with all later documents of its bucket."""
    state = np.zeros(3, np.int64)
    a, b = np.empty(_CHUNK, np.uint64), np.empty(_CHUNK, np.uint64)
    while state[0] < len(inputs):
        count = _next_pairs(numbers, edges, inputs, wanted, state, a, b)
        add(a[:count], b[:count])


@kernel
def _next_pairs(
    numbers: UInt64s, edges: Int64s, inputs: Int64s, wanted: Bools, state: Int64s, a: UInt64s, b: UInt64s
) -> int:
    """Fill `a` and `b` with the next pairs (a[i], b[i]) and return their number.

    `state`, where to continue, is (bucket, index of the input document in the bucket, number of pairs already
    made for this document). It is updated.
    """
    count: int = 0
    bucket, one, done = state
    while bucket < len(inputs):
        start, stop = edges[bucket], edges[bucket + 1]
        while wanted[bucket] and one < inputs[bucket]:
            first = start + one + 1 + done
            taken = min(stop - first, len(a) - count)
            for i in range(taken):
                a[count + i] = numbers[start + one]
                b[count + i] = numbers[first + i]
            count += taken
            if first + taken < stop:
                state[0], state[1], state[2] = bucket, one, done + taken
                return count
            one, done = one + 1, int64(0)
        bucket, one = bucket + 1, int64(0)
    state[0], state[1], state[2] = bucket, one, done
    return count


class PairWriter:
    """Collects pairs, drops repetitions, and writes sorted runs; a context manager that completes the files.

    If the `with` block ends with an error, the files are inconsistent, and the folder must be discarded.
    """

    def __init__(self, folder: Path, documents: int, *, run_pairs: int = RUN_PAIRS) -> None:
        self.pairs = 0
        # A pair of numbers below 2^32 fits one word, which sorts several times as fast as two words.
        self._columns = 1 if documents <= WORD_DOCUMENTS else 2
        self._pending = np.empty((self._columns, run_pairs), np.uint64)
        self._count = 0
        memory_bytes = max(1 << 18, run_pairs * _SIDE.itemsize)
        self._sides = [
            RunWriter(folder / table.file, table, memory_bytes=memory_bytes)
            for table in (PAIRS_BY_FIRST, PAIRS_BY_SECOND)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        self._sort()
        if self._count:
            self._write_run()
        del self._pending
        for side in self._sides:
            side.__exit__(kind, error, trace)

    def add(self, a: Numbers, b: Numbers) -> None:
        """Add the pairs (a[i], b[i]), a[i] < b[i]."""
        at = 0
        while at < len(a):
            taken = min(len(a) - at, self._pending.shape[1] - self._count)
            place, some = slice(self._count, self._count + taken), slice(at, at + taken)
            if self._columns == 1:
                self._pending[0, place] = a[some] << np.uint64(32) | b[some]
            else:
                self._pending[:, place] = a[some], b[some]
            self._count += taken
            at += taken
            if self._count == self._pending.shape[1]:
                self._sort()
                if self._count > self._pending.shape[1] // 2:  # else there is room for more pairs
                    self._write_run()

    def _sort(self) -> None:
        """Sort the pending pairs and drop repetitions."""
        pending = self._pending[:, : self._count]
        if self._columns == 1:
            sort_keys(pending[0])
        else:
            pending[:] = pending[:, np.lexsort((pending[1], pending[0]))]
        new = np.ones(self._count, np.bool_)
        new[1:] = (pending[:, 1:] != pending[:, :-1]).any(axis=0)
        unique = pending[:, new]
        self._count = unique.shape[1]
        self._pending[:, : self._count] = unique

    def _write_run(self) -> None:
        for start in range(0, self._count, _CHUNK):
            some = self._pending[:, start : min(start + _CHUNK, self._count)]
            pairs = np.empty(some.shape[1], PAIR)
            if self._columns == 1:
                pairs["a"], pairs["b"] = some[0] >> np.uint64(32), some[0] & np.uint64(0xFFFFFFFF)
            else:
                pairs["a"], pairs["b"] = some
            for side, names in zip(self._sides, (["a", "b"], ["b", "a"]), strict=True):
                rows = np.empty(len(pairs), _SIDE)
                rows["key"], rows["other"] = pairs[names[0]], pairs[names[1]]
                side.write(rows)
        self.pairs += self._count
        self._count = 0
