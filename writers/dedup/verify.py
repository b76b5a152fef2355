"""Candidate pairs become edges: those that verify, with who wins, in the order in which edges are resolved.

A block of documents is verified at a time (shardkit.writers.dedup.verify): its pairs are gathered from the
sorted runs of all candidates tasks and made unique, the sets of its own documents are held, and those of the
other sides pass by once, in ascending order. The result is one file, sorted by the priority of each edge's
winner, highest first:

    edges.npy    EDGE

The blocks that candidate pairs are verified in: ranges of document numbers that fit a memory budget.

A block [lower, upper) takes the pairs whose first number lies in it. While it is worked on, the sets of its
documents and its pairs are held; the other sides of the pairs pass by in chunks. Where blocks are cut decides
no result. A document whose own set, or whose own pairs, exceed the budget is a block of its own.

Cuts come from two greedy passes, one by bytes of sets, one by pairs, and the blocks are what both leave: at
most twice as many as would do. Pairs are counted by samples of the sorted runs, so planning reads little of
them; of sets it reads the table once, in slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.candidates import PAIR_RUNS_FILE, PAIRS_FILE
from shardkit.writers.dedup.compare import compare_pairs
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, PAIR, Population, priority
from shardkit.writers.dedup.shingle_store import SET, Sets, ShingleReader
from shardkit.writers.dedup.tables import CHUNK_ROWS, Rows, RowsWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import PlainCounts

__all__ = [
    "EDGE",
    "EDGES_FILE",
    "MAX_BLOCK_DOCUMENTS",
    "BlockBudget",
    "PairRuns",
    "plan_blocks",
    "priorities_of",
    "read_documents",
    "verify_block",
]

MAX_BLOCK_DOCUMENTS = 1 << 24  # so that (other number, place in the block) fit 64 bits

_PAIR_BYTES = 100  # in verify_block at its peak: 83 measured where every pair verifies

_DOCUMENT_BYTES = 128  # beside the hashes

_MAX_SAMPLE_STEP = 1024

_U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """How a task's memory is divided: bytes of the block's own sets, its pairs, bytes of a passing chunk."""

    sets_bytes: int
    pairs: int
    chunk_bytes: int

    @classmethod
    def of(cls, memory_bytes: int) -> Self:
        """Half for the sets, three eighths for the pairs, the rest for what passes and is read."""
        return cls(memory_bytes // 2, max(1, memory_bytes * 3 // 8 // _PAIR_BYTES), memory_bytes // 16)


class PairRuns:
    """The sorted runs of one candidates task."""

    def __init__(self, folder: Artifact) -> None:
        self.pairs = Rows(folder / PAIRS_FILE, PAIR, header=False)
        edges: list[int] = Rows(folder / PAIR_RUNS_FILE, "<i8").read().tolist()
        assert edges[-1] == len(self.pairs), folder
        self.runs = [(begin, end) for begin, end in pairwise(edges) if begin < end]

    def first_from(self, run: tuple[int, int], number: int) -> int:
        """Where the run's pairs (a, b) with a >= number begin."""
        begin, end = run
        with self.pairs:
            while begin < end:
                middle = (begin + end) // 2
                if int(self.pairs.read(middle, middle + 1)["a"][0]) < number:
                    begin = middle + 1
                else:
                    end = middle
        return begin


def plan_blocks(
    shingle_folders: Sequence[Artifact], pair_folders: Sequence[Artifact], memory_bytes: int
) -> list[tuple[int, int]]:
    """Consecutive [lower, upper) that hold every pair's first number; none if there are no pairs."""
    budget = BlockBudget.of(memory_bytes)
    tasks = [PairRuns(folder) for folder in pair_folders]
    last = -1
    for task in tasks:
        for _, end in task.runs:
            last = max(last, int(task.pairs.read(end - 1, end)["a"][0]))
    if last < 0:
        return []
    samples, step = _sample(tasks, budget.pairs)
    runs = sum(len(task.runs) for task in tasks)
    cuts = [
        range(0, last + 1, MAX_BLOCK_DOCUMENTS),
        # So many pairs of a run may precede its first sample in a block.
        pair_cuts(samples, step, budget.pairs - (step - 1) * runs),
        set_cuts(ShingleReader(shingle_folders).tables(), budget.sets_bytes),
    ]
    edges = sorted({cut for some in cuts for cut in some if cut <= last} | {0, last + 1})
    return list(pairwise(edges))


def pair_cuts(samples: _U64, step: int, pairs: int) -> list[int]:
    """Where to cut so that a block has at most `pairs` pairs; `samples` (ascending) stand for `step` each."""
    most = max(1, pairs // step)
    cuts = []
    at = 0
    while at + most < len(samples):
        # The first document that is too many begins the next block; alone it may be too large.
        number = int(samples[at + most])
        if number == int(samples[at]):
            number += 1
        cuts.append(number)
        at = int(np.searchsorted(samples, np.uint64(number)))
    return cuts


def set_cuts(tables: Iterable[npt.NDArray[np.void]], sets_bytes: int) -> list[int]:
    """Where to cut so that the sets of a block (SET rows, ascending numbers) take at most so many bytes."""
    cuts = []
    held = 0  # bytes of the block so far, in tables before this one
    for rows in tables:
        assert rows.dtype == SET
        ends = np.cumsum(rows["stored"].astype(np.int64) * 8 + _DOCUMENT_BYTES)
        before = -held
        while True:
            at = int(np.searchsorted(ends, before + sets_bytes, "right"))
            if at == len(rows):
                break
            start = int(ends[at - 1]) if at else 0
            if start == before:  # the block is empty: a document that is too large alone
                at += 1
                if at == len(rows):
                    break
                start = int(ends[at - 1])
            cuts.append(int(rows["number"][at]))
            before = start
        held = int(ends[-1]) - before if len(rows) else held
    return cuts


def _sample(tasks: Sequence[PairRuns], budget_pairs: int) -> tuple[_U64, int]:
    """(ascending first numbers of every step-th pair of each run, step), the error at most a quarter."""
    runs = max(1, sum(len(task.runs) for task in tasks))
    step = min(_MAX_SAMPLE_STEP, max(1, budget_pairs // (4 * runs)))
    found = [task.pairs.sample(begin, end, step)["a"] for task in tasks for begin, end in task.runs]
    samples = np.concatenate(found)
    samples.sort()
    return samples, step


EDGES_FILE = "edges.npy"

EDGE = np.dtype(
    [
        ("hi_priority", "<u8", (3,)),  # population.priority of the document that wins
        ("hi", "<u8"),
        ("lo", "<u8"),
        ("jaccard", "<f4"),
        ("containment", "<f4"),
    ]
)

_PLACE_BITS = np.uint64(MAX_BLOCK_DOCUMENTS.bit_length() - 1)

_PLACE = np.uint64(MAX_BLOCK_DOCUMENTS - 1)

_SPREAD_ROWS = 4096  # a read of documents.npy takes up to so many rows


@dataclass(frozen=True, slots=True)
class VerifiedBlock(PlainCounts):
    """`verified` of the `pairs` that were compared are edges, `by_similarity` by tenths of Jaccard."""

    pairs: int
    verified: int
    by_similarity: Sequence[int]


def verify_block(
    folder: Path,
    population: Population,
    block: tuple[int, int],
    pair_folders: Sequence[Artifact],
    shingle_folders: Sequence[Artifact],
    config: NearDedupConfig,
    memory_bytes: int,
) -> VerifiedBlock:
    """Write into `folder` the edges among pairs whose first number lies in the block."""
    lower, upper = block
    assert upper - lower <= MAX_BLOCK_DOCUMENTS
    assert int(population.starts[-1]) < 1 << (64 - int(_PLACE_BITS))
    budget = BlockBudget.of(memory_bytes)
    keys = _gather_pairs(lower, upper, [PairRuns(pairs) for pairs in pair_folders])
    places = np.zeros(upper - lower, np.bool_)
    places[(keys & _PLACE).astype(np.int64)] = True
    reader = ShingleReader(shingle_folders)
    own = reader.read(np.flatnonzero(places).astype(np.uint64) + np.uint64(lower))
    del places
    priorities = priorities_of(population, own.numbers)
    edges = np.empty(len(keys), EDGE)  # memory is taken as rows are set
    count = 0
    for others, first, second in _passing(keys, lower, own, reader, budget.chunk_bytes):
        compared = compare_pairs(own, others, first, second, config)
        kept = np.flatnonzero(compared.verified)
        if not len(kept):
            continue
        first, second = first[kept], second[kept]
        beside = np.unique(second)
        theirs = np.empty((len(others.rows), 3), np.uint64)
        theirs[beside] = priorities_of(population, others.numbers[beside])
        new = edges[count : count + len(kept)]
        _direct(new, own.numbers[first], priorities[first], others.numbers[second], theirs[second])
        new["jaccard"], new["containment"] = compared.jaccard[kept], compared.containment[kept]
        count += len(kept)
    edges = edges[:count]
    _write_sorted(edges, folder / EDGES_FILE)
    tenths = np.minimum((edges["jaccard"].astype(np.float64) * 10 + 1e-6).astype(np.int64), 9)
    by_similarity = np.bincount(tenths, minlength=10).tolist()
    return VerifiedBlock(len(keys), count, by_similarity)


def priorities_of(population: Population, numbers: _U64) -> _U64:
    """uint64[n, 3]: `population.priority` of documents given in ascending order."""
    priorities = np.empty((len(numbers), 3), np.uint64)
    for part, begin, rows in read_documents(population, numbers):
        priorities[begin : begin + len(rows)] = priority(rows, population.parts[part].kind)
    return priorities


def read_documents(population: Population, numbers: _U64) -> Iterator[tuple[int, int, npt.NDArray[np.void]]]:
    """(part, place in `numbers` of the first, DOCUMENT rows) of documents given in ascending order."""
    parts, rows = population.locate(numbers)
    pages = rows // _SPREAD_ROWS
    cuts = np.flatnonzero((np.diff(parts) != 0) | (np.diff(pages) != 0)) + 1
    tables: dict[int, Rows] = {}
    for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(numbers)], strict=True):
        if begin == end:
            return
        part, first, last = int(parts[begin]), int(rows[begin]), int(rows[end - 1])
        if part not in tables:
            tables = {part: Rows(population.parts[part].folder / DOCUMENTS_FILE, DOCUMENT)}
        yield part, begin, tables[part].read(first, last + 1)[rows[begin:end] - first]


def _gather_pairs(lower: int, upper: int, tasks: Sequence[PairRuns]) -> _U64:
    """uint64[pairs], ascending, unique: second number << _PLACE_BITS | place of the first in the block."""
    slices = [
        (task, task.first_from(run, lower), task.first_from(run, upper))
        for task in tasks
        for run in task.runs
    ]
    keys = np.empty(sum(end - begin for _, begin, end in slices), np.uint64)
    at = 0
    for task, begin, end in slices:
        for start in range(begin, end, CHUNK_ROWS):
            pairs = task.pairs.read(start, min(start + CHUNK_ROWS, end))
            keys[at : at + len(pairs)] = pairs["b"] << _PLACE_BITS | (pairs["a"] - np.uint64(lower))
            at += len(pairs)
    keys.sort()
    new = np.ones(len(keys), np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    return keys[new]


def _passing(
    keys: _U64, lower: int, own: Sets, reader: ShingleReader, chunk_bytes: int
) -> Iterator[tuple[Sets, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(sets of other sides, rows in `own`, rows in the sets) of the pairs, some pairs at a time."""
    rows_at_once = max(1, chunk_bytes // 64)  # of what is held of a pair here
    begin = 0
    while begin < len(keys):
        # All pairs of one second number may come in several turns: its set is read again.
        some = keys[begin : begin + rows_at_once]
        seconds = some >> _PLACE_BITS
        numbers = seconds[np.concatenate(([True], seconds[1:] != seconds[:-1]))]
        firsts = np.searchsorted(own.numbers, (some & _PLACE) + np.uint64(lower))
        for sets in reader.chunks(numbers, chunk_bytes):
            start, stop = np.searchsorted(
                seconds, sets.numbers[[0, -1]] + np.array([0, 1], np.uint64)
            ).tolist()
            yield sets, firsts[start:stop], np.searchsorted(sets.numbers, seconds[start:stop])
        begin += len(some)


def _direct(edges: npt.NDArray[np.void], a: _U64, a_priority: _U64, b: _U64, b_priority: _U64) -> None:
    """Set who wins: the lexicographically lower priority."""
    wins = np.zeros(len(edges), np.bool_)
    open_ = np.ones(len(edges), np.bool_)
    for column in range(3):
        wins |= open_ & (a_priority[:, column] < b_priority[:, column])
        open_ &= a_priority[:, column] == b_priority[:, column]
    assert not open_.any(), "two documents of one content rank"
    edges["hi"], edges["lo"] = np.where(wins, a, b), np.where(wins, b, a)
    edges["hi_priority"] = np.where(wins[:, None], a_priority, b_priority)


def _write_sorted(edges: npt.NDArray[np.void], path: Path) -> None:
    priority = edges["hi_priority"]
    order = np.lexsort((edges["lo"], priority[:, 2], priority[:, 1], priority[:, 0]))
    with RowsWriter(path, EDGE) as writer:
        for begin in range(0, len(order), CHUNK_ROWS):
            writer.write(edges[order[begin : begin + CHUNK_ROWS]])
