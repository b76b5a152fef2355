"""Candidate pairs of near-duplicates: documents that share a band's key, one partition of keys at a time.

The entries of a range of keys (BANDS) come from the exchange by (key, number); the documents of one key are a
bucket, together with the documents of indexes that have the key, which are looked up for some thousand keys
at a time (index.py). A bucket of up to `limits.documents` documents gives all pairs, a larger one (a hub)
gives the pairs that `shardkit.writers.dedup.hubs` finds. At least one document of a pair is an input. Since
inputs have the lowest numbers, the pairs of a bucket are each input with all documents that follow it.

The set of all partitions' pairs does not depend on partitions, parts, or memory; the number of times that a
pair repeats does.

Memory: half of the budget for a batch of entries, or one bucket if that is larger; a quarter for a run of
pairs (pairs.py), and a quarter for a hub.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import Bools, Int64s, UInt64s, int64, kernel
from shardkit.writers.dedup.bands import BANDS
from shardkit.writers.dedup.hubs import HubLimits, HubSearch
from shardkit.writers.dedup.index import IndexedKeys
from shardkit.writers.dedup.pairs import PairWriter, run_pairs
from shardkit.writers.dedup.population import Population, PopulationFile
from shardkit.writers.exchange.exchange import Slice
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage

_CHUNK = 1 << 14  # pairs made at a time

_KEYS_AT_ONCE = 1 << 16  # keys that are looked up in indexes at a time

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
    indexed: tuple[IndexedKeys, ...],
    population: PopulationFile,
    similarity: Annotated[float, RecipeKey("dedup.near.similarity")],
    memory_bytes: MemoryBytes,
) -> CandidateCounts:
    """Write the candidate pairs among documents that share a band key, for one range of keys."""
    return find_candidates(
        entries,
        population.load(),
        folder,
        similarity=similarity,
        indexed=indexed,
        memory_bytes=memory_bytes,
    )


CANDIDATES = Stage("candidates", "near-duplicates", find_candidates_of, cost=8)


def find_candidates(
    entries: Slice,
    population: Population,
    folder: Path,
    *,
    similarity: float,
    limits: HubLimits | None = None,
    indexed: Sequence[IndexedKeys] = (),
    memory_bytes: int = 256 << 20,
) -> CandidateCounts:
    """Write the candidate pairs of one range of band keys into `folder`; `entries` are its rows of BANDS.

    `indexed` are the rows of BANDS_OF_INDEX of this range.
    """
    limits = limits or HubLimits()
    counts = Counter[str](entries=0, buckets=0, hubs=0, largest_bucket=0)
    hubs = HubSearch(population, similarity, folder / ".hub", limits=limits, memory_bytes=memory_bytes // 4)
    with PairWriter(folder, int(population.starts[-1]), run_pairs=run_pairs(memory_bytes // 4)) as writer:
        for rows in _whole_keys(entries, memory_bytes // 4):
            counts["entries"] += len(rows)
            for some in _with_indexed(rows, indexed) if indexed else [rows]:
                numbers, edges = _buckets(some)
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


def _with_indexed(
    rows: npt.NDArray[np.void], indexed: Sequence[IndexedKeys]
) -> Iterator[npt.NDArray[np.void]]:
    """Yield the rows with those of indexes that have the same keys, some keys at a time."""
    keys = np.ascontiguousarray(rows["key"])
    starts = np.flatnonzero(np.concatenate([np.ones(1, np.bool_), keys[1:] != keys[:-1]]))
    for first in range(0, len(starts), _KEYS_AT_ONCE):
        some = starts[first : first + _KEYS_AT_ONCE]
        stop = int(starts[first + len(some)]) if first + len(some) < len(starts) else len(rows)
        pieces = [rows[int(some[0]) : stop]]
        for index in indexed:
            found = index.matching(keys[some])
            entries = np.empty(len(found), BANDS.dtype)
            entries["key"] = found["key"]
            entries["number"] = found["number"].astype(np.uint64) + np.uint64(index.first)
            pieces.append(entries)
        both = np.concatenate(pieces)
        yield both[np.argsort(both["key"], kind="stable")]


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
    buckets = [numbers[edges[bucket] : edges[bucket + 1]] for bucket in np.flatnonzero(large).tolist()]
    for a, b in hubs.pairs_of(buckets):
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
