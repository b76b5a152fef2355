"""Blocks of pairs to verify: likeness decides which pairs are verified together.

A pair is in the block that the *label* of its second document hashes to. Members of a family mostly have the
same label, so they meet in one block: the text of a document is sent to about one block (1.01 on average
where families grow with the corpus), wherever in the corpus the rest of its family is, and however large.

The *leader* of a document is its lowest partner. The label of its followers is the lowest one among its own
leader and those of the documents that it is the first partner of. This is three steps at most, which is
enough: nearly all members of a family have the same label, be they all paired with one another or with a few
members alone. Unlike components of the graph, labels do not join families along chains of chance pairs.

Three stages have a task for each range of document numbers:

    near_leaders   pairs of second documents
                   -> followers.run    FOLLOWERS: key leader; a document that has it
                      lowest.run       LOWEST: key document; the lowest leader of it and its later partners
    near_labels    these, of leaders
                   -> labels.run       LABELS: key document; its label
    near_blocks    pairs and labels of second documents
                   -> block_pairs.run  PAIRS_OF_BLOCK: key block; a document and its partners, as in PAIRS
                      places.run       PLACES: key document; a block with a pair of this document

Repetitions of pairs, which several tasks of stage `candidates` may find, are dropped. Memory: a batch of
pairs, the partners of one document, and the leaders or labels of the range, 16 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import UInt64s
from shardkit.writers.dedup.pairs import PAIRS, Partners
from shardkit.writers.exchange.exchange import Exchanged, RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import Limits
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import MemoryBytes
from shardkit.writers.execution.stage import RunTasks, Stage, partition_name
from shardkit.writers.kernels.sorting import sort_pairs

_MOST_BLOCK_BITS = 31
_PAIR_GROWTH = 8  # memory of pairs, as a multiple of their bytes in files

FOLLOWERS = Table("followers.run", np.dtype([("key", "<u8"), ("number", "<u8")]), packed=0.25)
LOWEST = Table("lowest.run", np.dtype([("key", "<u8"), ("leader", "<u8")]), packed=0.25)
LABELS = Table("labels.run", np.dtype([("key", "<u8"), ("label", "<u8")]), packed=0.25)
PAIRS_OF_BLOCK = Table(
    "block_pairs.run",
    np.dtype([("key", "<u8"), ("size", "<i8"), ("number", "<u8")]),
    payload=True,
    packed=0.25,
)
PLACES = Table("places.run", np.dtype([("key", "<u8"), ("block", "<u4")]), packed=0.2)


def block_bits(text_bytes: int, memory_bytes: int) -> int:
    """Return the number of bits of block numbers, for texts of this size in all.

    If all documents were in pairs, the texts of a block would take up to a quarter of the memory. As less
    than half of them are, their sets of n-grams, which take about as many bytes, fit into an eighth. The
    number of blocks is a power of two, so that it rarely changes while a corpus grows.
    """
    blocks = -(-text_bytes // max(1, memory_bytes // 4))
    return min(_MOST_BLOCK_BITS, max(0, blocks - 1).bit_length())


def number_ranges(pairs_bytes: int, limits: Limits) -> int:
    """Return the number of ranges of document numbers, for runs of PAIRS of this size."""
    return max(1, -(-pairs_bytes * _PAIR_GROWTH // limits.partition_bytes))


def put_into_blocks(
    run: RunTasks, candidates: Sequence[Commit], end: int, bits: int, memory_bytes: int, limits: Limits
) -> list[Commit]:
    """Put the pairs among `end` documents into 2**bits blocks of documents that are alike."""
    size = sum(commit.outputs[PAIRS.file].bytes for commit in candidates)
    ranges = number_ranges(size, limits)
    names = [partition_name(number, ranges) for number in range(ranges)]
    edges = [end * number // ranges for number in range(ranges + 1)]
    move = partial(exchange, run, readers=ranges, end=end, limits=limits)

    def slices(moved: Exchanged, *, consumed: bool = True) -> list[Slice]:
        return [moved.slice(start, stop, consumed=consumed) for start, stop in pairwise(edges)]

    pairs = move(LEADERS, PAIRS, candidates)
    named = zip(names, slices(pairs, consumed=False), strict=True)
    [leaders] = run([LEADERS.task(name, some.bytes, some, memory_bytes) for name, some in named])
    followers, lowest = (slices(move(LABELING, table, leaders)) for table in (FOLLOWERS, LOWEST))
    tasks = []
    for name, own, lows in zip(names, followers, lowest, strict=True):
        tasks.append(LABELING.task(name, own.bytes, own, lows, memory_bytes))
    [labeled] = run(tasks)
    labels, tasks = slices(move(BLOCKS, LABELS, labeled)), []
    for name, some, known in zip(names, slices(pairs), labels, strict=True):
        tasks.append(BLOCKS.task(name, some.bytes, some, known, bits, memory_bytes))
    [assigned] = run(tasks)
    return assigned


def find_leaders(folder: Path, pairs: Slice, memory_bytes: MemoryBytes) -> None:
    """Write the followers of each leader, and the lowest leader of each document and its later partners."""
    with (
        RunWriter(folder / FOLLOWERS.file, FOLLOWERS, memory_bytes=memory_bytes // 8) as followers,
        RunWriter(folder / LOWEST.file, LOWEST, memory_bytes=memory_bytes // 8) as lowest,
    ):
        for partners in _unique_pairs(pairs, memory_bytes // 4):
            leaders = partners.firsts[partners.edges[:-1]]
            followers.write(_rows(FOLLOWERS, "number", leaders, partners.numbers))
            of_pairs = np.repeat(leaders, np.diff(partners.edges))
            both = np.append(partners.firsts, partners.numbers), np.append(of_pairs, leaders)
            lowest.write(_rows(LOWEST, "leader", *_lowest(*both)))


LEADERS = Stage("near_leaders", "near-duplicates", find_leaders, cost=0.1)


def label_followers(folder: Path, followers: Slice, lowest: Slice, memory_bytes: MemoryBytes) -> None:
    """Write the label of each follower of a range of leaders."""
    found = [(np.empty(0, np.uint64), np.empty(0, np.uint64))]
    for rows, _ in lowest.stream(memory_bytes // 4):
        found.append(_lowest(rows["key"], rows["leader"]))
    leaders, labels = _lowest(*(np.concatenate(column) for column in zip(*found, strict=True)))
    with RunWriter(folder / LABELS.file, LABELS, memory_bytes=memory_bytes // 8) as writer:
        for rows, _ in followers.stream(memory_bytes // 4):
            writer.write(
                _rows(LABELS, "label", rows["number"], labels[np.searchsorted(leaders, rows["key"])])
            )


LABELING = Stage("near_labels", "near-duplicates", label_followers, cost=0.1)


def assign_blocks(folder: Path, pairs: Slice, labels: Slice, bits: int, memory_bytes: MemoryBytes) -> None:
    """Write the pairs of each block, of which there are 2**bits, and the blocks of each document."""
    found, _ = labels.read()
    numbers, of_numbers = _lowest(found["key"], found["label"])
    with (
        RunWriter(folder / PAIRS_OF_BLOCK.file, PAIRS_OF_BLOCK, memory_bytes=memory_bytes // 4) as of_blocks,
        RunWriter(folder / PLACES.file, PLACES, memory_bytes=memory_bytes // 8) as places,
    ):
        for partners in _unique_pairs(pairs, memory_bytes // 4):
            blocks = _hashed(of_numbers[np.searchsorted(numbers, partners.numbers)], bits)
            for some, sizes, payload in partners.encoded():
                rows = np.empty(len(sizes), PAIRS_OF_BLOCK.dtype)
                rows["key"] = blocks[np.searchsorted(partners.numbers, some)]
                rows["number"], rows["size"] = some, sizes
                of_blocks.write(rows, payload)
            of_pairs = np.repeat(blocks, np.diff(partners.edges))
            places.write(places_of(partners.firsts, of_pairs))
            places.write(places_of(partners.numbers, blocks))


BLOCKS = Stage("near_blocks", "near-duplicates", assign_blocks, cost=0.3)


def _hashed(labels: UInt64s, bits: int) -> UInt64s:
    """Return the block of each label: labels are spread evenly, also those of neighbors."""
    if bits == 0:
        return np.zeros(len(labels), np.uint64)
    return labels * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - bits)


def _rows(table: Table, field: str, keys: UInt64s, values: UInt64s) -> npt.NDArray[np.void]:
    rows = np.empty(len(keys), table.dtype)
    rows["key"], rows[field] = keys, values
    return rows


def _lowest(keys: UInt64s, values: UInt64s) -> tuple[UInt64s, UInt64s]:
    """Return (keys, values): each key once, ascending, with its lowest value."""
    keys, values = sort_pairs(np.ascontiguousarray(keys), np.ascontiguousarray(values))
    new = np.ones(len(keys), np.bool_)
    new[1:] = keys[1:] != keys[:-1]
    return keys[new], values[new]


def places_of(numbers: UInt64s, blocks: UInt64s) -> npt.NDArray[np.void]:
    """Return rows of PLACES by document and block, without repetitions."""
    numbers, blocks = sort_pairs(np.ascontiguousarray(numbers), np.ascontiguousarray(blocks))
    new = np.ones(len(numbers), np.bool_)
    new[1:] = (numbers[1:] != numbers[:-1]) | (blocks[1:] != blocks[:-1])
    return _rows(PLACES, "block", numbers[new], blocks[new])


def _unique_pairs(pairs: Slice, memory_bytes: int) -> Iterator[Partners]:
    """Yield pairs without repetitions, by ascending second document.

    If the rows of a document take several batches, it is repeated, and its partners so far are held, 8 bytes
    each.
    """
    last, held = -1, np.empty(0, np.uint64)
    for rows, payload in pairs.stream(memory_bytes // 16):  # sorted pairs take 30 times their bytes in files
        keys = np.ascontiguousarray(rows["key"])
        found = Partners.decoded(keys, np.ascontiguousarray(rows["size"]), payload)
        seconds, firsts = sort_pairs(found.seconds, found.firsts)
        new = np.ones(len(seconds), np.bool_)
        new[1:] = (seconds[1:] != seconds[:-1]) | (firsts[1:] != firsts[:-1])
        if int(keys[0]) == last:
            new &= (seconds != last) | ~np.isin(firsts, held)
        if int(keys[-1]) != last:
            last, held = int(keys[-1]), np.empty(0, np.uint64)
        held = np.concatenate([held, firsts[new & (seconds == last)]])
        yield Partners.of(seconds[new], firsts[new])
