"""Blocks of pairs to verify: likeness decides which pairs are verified together.

A pair is in the block that the label of its second document hashes to (pairs.py has labels). Members of a
family mostly have the same label, so they meet in one block: the text of a document is sent to about one
block, wherever in the corpus the rest of its family is, and however large it is.

A task takes a range of second documents. It drops pairs that several tasks of stage `candidates` found:

    block_pairs.run   PAIRS_OF_BLOCK: key block; a document of the block with its partners, coded as in PAIRS
    places.run        PLACES: key document; a block with a pair of this document

A document's label is the lowest of those in its rows. Memory: a batch of pairs, and the partners of one
document.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import UInt64s
from shardkit.writers.dedup.pairs import Partners
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table
from shardkit.writers.execution.digests import MemoryBytes
from shardkit.writers.execution.stage import Stage
from shardkit.writers.kernels.sorting import sort_pairs

_MOST_BLOCK_BITS = 31

PAIRS_OF_BLOCK = Table(
    "block_pairs.run", np.dtype([("key", "<u8"), ("size", "<i8"), ("number", "<u8")]), payload=True
)
PLACES = Table("places.run", np.dtype([("key", "<u8"), ("block", "<u4")]))


def block_bits(text_bytes: int, memory_bytes: int) -> int:
    """Return the number of bits of block numbers, for texts of this size in all.

    If all documents were in pairs, the texts of a block would take up to a quarter of the memory. As less
    than half of them are, their sets of n-grams, which take about as many bytes, fit into an eighth. The
    number of blocks is a power of two, so that it rarely changes while a corpus grows.
    """
    blocks = -(-text_bytes // max(1, memory_bytes // 4))
    return min(_MOST_BLOCK_BITS, max(0, blocks - 1).bit_length())


def assign_blocks(folder: Path, pairs: Slice, bits: int, memory_bytes: MemoryBytes) -> None:
    """Write the pairs of each block, of which there are 2**bits, and the blocks of each document."""
    with (
        RunWriter(folder / PAIRS_OF_BLOCK.file, PAIRS_OF_BLOCK, memory_bytes=memory_bytes // 4) as of_blocks,
        RunWriter(folder / PLACES.file, PLACES, memory_bytes=memory_bytes // 4) as places,
    ):
        for partners, labels in _unique_pairs(pairs, memory_bytes // 4):
            blocks = _hashed(labels, bits)
            for some, sizes, payload in partners.encoded():
                rows = np.empty(len(sizes), PAIRS_OF_BLOCK.dtype)
                numbers = some.numbers
                rows["key"] = blocks[np.searchsorted(partners.numbers, numbers)]
                rows["number"], rows["size"] = numbers, sizes
                of_blocks.write(rows, payload)
            of_pairs = np.repeat(blocks, np.diff(partners.edges))
            places.write(places_of(partners.firsts, of_pairs))
            places.write(places_of(partners.numbers, blocks))


BLOCKS = Stage("blocks", "near-duplicates", assign_blocks, cost=0.3)


def _hashed(labels: UInt64s, bits: int) -> UInt64s:
    """Return the block of each label: labels are spread evenly, also those of neighbors."""
    if bits == 0:
        return np.zeros(len(labels), np.uint64)
    return labels * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - bits)


def places_of(numbers: UInt64s, blocks: UInt64s) -> npt.NDArray[np.void]:
    """Return rows of PLACES without repetitions."""
    numbers, blocks = sort_pairs(np.ascontiguousarray(numbers), np.ascontiguousarray(blocks))
    new = np.ones(len(numbers), np.bool_)
    new[1:] = (numbers[1:] != numbers[:-1]) | (blocks[1:] != blocks[:-1])
    rows = np.empty(int(new.sum()), PLACES.dtype)
    rows["key"], rows["block"] = numbers[new], blocks[new]
    return rows


def _unique_pairs(pairs: Slice, memory_bytes: int) -> Iterator[tuple[Partners, UInt64s]]:
    """Yield (partners, labels) without repetitions, by ascending second document.

    If the rows of a document take several batches, it has the label of the first one, and all its partners so
    far are held, 8 bytes each.
    """
    last, label, held = -1, np.uint64(0), np.empty(0, np.uint64)
    for rows, payload in pairs.stream(memory_bytes // 4):  # pairs take several times as much when decoded
        keys = np.ascontiguousarray(rows["key"])
        found = Partners.decoded(keys, np.ascontiguousarray(rows["size"]), payload)
        seconds, firsts = sort_pairs(found.seconds, found.firsts)
        new = np.ones(len(seconds), np.bool_)
        new[1:] = (seconds[1:] != seconds[:-1]) | (firsts[1:] != firsts[:-1])
        if int(keys[0]) == last:
            new &= (seconds != last) | ~np.isin(firsts, held)
        unique = Partners.of(seconds[new], firsts[new])
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        labels = np.minimum.reduceat(found.bases, starts)
        labels = labels[np.searchsorted(keys[starts], unique.numbers)]
        if len(labels) and int(unique.numbers[0]) == last:
            labels[0] = label
        if int(keys[-1]) != last:
            last, label, held = int(keys[-1]), labels[-1], np.empty(0, np.uint64)
        held = np.concatenate([held, unique.firsts[unique.seconds == last]])
        if len(labels):
            yield unique, labels
