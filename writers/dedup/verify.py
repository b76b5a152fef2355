"""Verifies candidate pairs; each pair that verifies becomes an edge from the winner to the loser.

Pairs are verified in blocks, which are ranges of the number of a pair's first document. A task reads three
ranges through the exchange: the pairs of its block, their first documents (`own`), and their second documents
(`guests`), with the fields that resolving needs. So no task opens files of other parts, and the number of
parts does not matter.

A task works in turns: own sets in an eighth of the memory, with their pairs in a sixteenth; the guests of the
turn are streamed once. Blocks are sized so that one turn is usually enough, and their width is a power of
two, so that it rarely changes while a corpus grows. Neither turns nor blocks affect the edges.

    edges.run      EDGES: from the document of higher priority to the other one
    waiting.run    WAITING: the documents that an edge leads to
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.writers.dedup.compare import PairRule, compare_pairs
from shardkit.writers.dedup.shingle_store import Sets, read_sets
from shardkit.writers.exchange.exchange import Batch, RunWriter, Slice, Table
from shardkit.writers.exchange.sorted_runs import joined
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage
from shardkit.writers.kernels.sorting import sort_pairs

_MOST_BLOCK_BITS = 24

_U64 = npt.NDArray[np.uint64]


def block_bits(documents: int, text_bytes: int, memory_bytes: int) -> int:
    """Return the largest number of bits such that 2**bits documents' texts fit a quarter of the memory.

    A block has 2**bits document numbers. Sets of word n-grams take about as many bytes as the texts, and less
    than half of the documents are first in a pair. If their sets exceed an eighth of the memory, a task takes
    several turns.
    """
    each = max(1, text_bytes // max(1, documents))
    return min(_MOST_BLOCK_BITS, max(1, memory_bytes // 4 // each).bit_length() - 1)


# key: the winner; lo: the loser; the winner's `population.priority`; the similarity of the two.
EDGES = Table(
    "edges.run",
    np.dtype([("key", "<u8"), ("lo", "<u8"), ("priority", "<u8", (3,)), ("jaccard", "<f4")]),
)

WAITING = Table("waiting.run", np.dtype([("key", "<u8")]))


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """Counts of a block: compared `pairs`, and those `verified`, which became edges."""

    pairs: int
    verified: int


def verify_block(
    folder: Path,
    pairs: Slice,
    own: Slice,
    guests: Slice,
    rule: Annotated[PairRule, RecipeKey("dedup.near")],
    memory_bytes: MemoryBytes,
) -> VerifiedBlock:
    """Write the edges among the pairs of a block; the three slices cover the block's document numbers."""
    compared, verified, start = 0, 0, pairs.start
    with (
        RunWriter(folder / EDGES.file, EDGES, memory_bytes=memory_bytes // 8) as edges,
        RunWriter(folder / WAITING.file, WAITING, memory_bytes=memory_bytes // 16) as waiting,
    ):
        for sets in _gathered_sets(read_sets(own, rule, memory_bytes // 6), memory_bytes // 8):
            stop = int(sets.numbers[-1]) + 1
            for some in _unique_pairs(replace(pairs, start=start, stop=stop), memory_bytes // 16):
                compared += len(some)
                theirs = replace(guests, stop=int(some["key"].max(initial=start)) + 1)
                for found in _edges(some, sets, theirs, rule, memory_bytes // 6):
                    edges.write(found)
                    waiting.write(np.unique(found["lo"]).view(WAITING.dtype))
                    verified += len(found)
            start = stop
    if any(len(rows) for rows, _ in replace(pairs, start=start).stream(memory_bytes // 16)):
        raise _without_set(own)
    return VerifiedBlock(compared, verified)


VERIFY = Stage("verify", "near-duplicates", verify_block, cost=5.8)


def _gathered_sets(found: Iterator[Sets], most_bytes: int) -> Iterator[Sets]:
    """Yield the sets in order, in batches of up to `most_bytes`, or one batch of `found` if it is larger."""
    pieces, held = list[Sets](), 0
    for sets in found:
        size = sets.rows.nbytes + sets.hashes.nbytes
        if pieces and held + size > most_bytes:
            yield Sets.joined(pieces)
            pieces, held = [], 0
        pieces.append(sets)
        held += size
    if pieces:
        yield Sets.joined(pieces)


def _gathered(source: Slice, memory_bytes: int) -> Iterator[Batch]:
    """Yield the rows in order, in batches of up to half of `memory_bytes`, or one larger source batch."""
    pieces, held = list[Batch](), 0
    for batch in source.stream(memory_bytes // 2):
        size = batch[0].nbytes + batch[1].nbytes
        if pieces and held + size > memory_bytes // 2:
            yield joined(pieces, source.table)
            pieces, held = [], 0
        pieces.append(batch)
        held += size
    if pieces:
        yield joined(pieces, source.table)


def _unique_pairs(pairs: Slice, memory_bytes: int) -> Iterator[npt.NDArray[np.void]]:
    """Yield batches of pairs, sorted by second document, then by first one (`key`), without repetitions.

    Several tasks of stage `candidates` may find the same pair. If the pairs of a first document take several
    batches, all its second documents are held, 8 bytes each.
    """
    last, partners = -1, np.empty(0, np.uint64)
    for rows, _ in _gathered(pairs, memory_bytes):
        others, keys = sort_pairs(np.ascontiguousarray(rows["other"]), np.ascontiguousarray(rows["key"]))
        new = np.ones(len(rows), np.bool_)
        new[1:] = (keys[1:] != keys[:-1]) | (others[1:] != others[:-1])
        if int(rows["key"][0]) == last:
            new &= (keys != last) | ~np.isin(others, partners)
        batch = np.empty(int(new.sum()), rows.dtype)
        batch["key"], batch["other"] = keys[new], others[new]
        if int(rows["key"][-1]) != last:
            last, partners = int(rows["key"][-1]), np.empty(0, np.uint64)
        partners = np.concatenate([partners, batch["other"][batch["key"] == last]])
        yield batch


def _edges(
    pairs: npt.NDArray[np.void], own: Sets, guests: Slice, rule: PairRule, memory_bytes: int
) -> Iterator[npt.NDArray[np.void]]:
    """Yield edges for the pairs that verify, streaming the sets of their second documents."""
    seconds, firsts = np.ascontiguousarray(pairs["other"]), np.ascontiguousarray(pairs["key"])
    numbers = np.ascontiguousarray(own.numbers)
    places = np.searchsorted(numbers, firsts)
    if (numbers[np.minimum(places, len(numbers) - 1)] != firsts).any():
        raise _without_set(guests)
    compared = 0
    for others in read_sets(guests, rule, memory_bytes):
        rows = others.rows
        begins, ends = (np.searchsorted(seconds, rows["number"], side) for side in ("left", "right"))
        counts = ends - begins
        met = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - begins, counts)
        compared += len(met)
        if not len(met):
            continue
        first, second = places[met], np.repeat(np.arange(len(rows)), counts)
        result = compare_pairs(own, others, first, second, rule)
        kept = np.flatnonzero(result.verified)
        winners, losers = own.rows[first[kept]], rows[second[kept]]
        edges = np.empty(len(kept), EDGES.dtype)
        direct(edges, winners["number"], winners["priority"], losers["number"], losers["priority"])
        edges["jaccard"] = result.jaccard[kept]
        yield edges
    if compared != len(pairs):
        raise _without_set(guests)


def _without_set(sets: Slice) -> BuildError:
    numbers = f"{sets.start:,} to {sets.stop:,}"
    return BuildError(
        f"verify: in documents {numbers}, a pair has a document without a set of n-grams; remove the work "
        "folder and build again"
    )


def direct(edges: npt.NDArray[np.void], a: _U64, a_priority: _U64, b: _U64, b_priority: _U64) -> None:
    """Set winner, loser and priority of each edge; the lexicographically lower priority wins."""
    wins = np.zeros(len(edges), np.bool_)
    open_ = np.ones(len(edges), np.bool_)
    for column in range(3):
        wins |= open_ & (a_priority[:, column] < b_priority[:, column])
        open_ &= a_priority[:, column] == b_priority[:, column]
    assert not open_.any(), "two documents have the same priority"
    edges["key"], edges["lo"] = np.where(wins, a, b), np.where(wins, b, a)
    edges["priority"] = np.where(wins[:, None], a_priority, b_priority)
