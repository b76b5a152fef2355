"""Candidate pairs become edges: those that verify, with who wins, in the order in which edges are resolved.

A block of documents is verified at a time (shardkit.writers.dedup.blocks): its pairs are gathered from the
sorted runs of all candidates tasks and made unique, the sets of its own documents are held, and those of the
other sides pass by once, in ascending order. The result is one file, sorted by the priority of each edge's
winner, highest first:

    edges.npy    EDGE
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.array_file import CHUNK_ROWS, Rows, RowsWriter
from shardkit.writers.dedup.blocks import MAX_BLOCK_DOCUMENTS, BlockBudget, PairRuns
from shardkit.writers.dedup.compare import compare_pairs
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, Population, priority
from shardkit.writers.dedup.shingle_store import Sets, ShingleReader

__all__ = ["EDGE", "EDGES_FILE", "priorities_of", "read_documents", "verify_block"]

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

_U64 = npt.NDArray[np.uint64]
_PLACE_BITS = np.uint64(MAX_BLOCK_DOCUMENTS.bit_length() - 1)
_PLACE = np.uint64(MAX_BLOCK_DOCUMENTS - 1)
_SPREAD_ROWS = 4096  # a read of documents.npy takes up to so many rows


def verify_block(
    population: Population,
    block: tuple[int, int],
    pair_folders: Sequence[Path],
    shingle_folders: Sequence[Path],
    config: NearDedupConfig,
    memory_bytes: int,
    folder: Path,
) -> dict[str, Any]:
    """Write the edges among pairs whose first number lies in the block, and count.

    {"pairs": compared, "verified": of them, "by_similarity": verified ones by tenths of Jaccard similarity}
    """
    lower, upper = block
    assert upper - lower <= MAX_BLOCK_DOCUMENTS
    assert int(population.starts[-1]) < 1 << (64 - int(_PLACE_BITS))
    budget = BlockBudget.of(memory_bytes)
    keys = _gather_pairs(lower, upper, [PairRuns(folder) for folder in pair_folders])
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
    return {"pairs": len(keys), "verified": count, "by_similarity": by_similarity}


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
