"""Verifies candidate pairs; each pair that verifies becomes an edge from the winner to the loser.

Pairs are verified in blocks of documents that are alike (blocks.py). A task reads two ranges through the
exchange: the pairs of its block, and the texts of all documents in them (`texts`), with the fields that
resolving needs. So no task opens files of other parts, and the number of parts does not matter.

A task works in turns of pairs that take a sixteenth of the memory. Blocks are sized so that the sets of all
documents usually fit into an eighth of the memory: then each text is read once. If not, the turn holds the
sets of one side of its pairs, the side with fewer documents, and streams the other: of a family whose members
are all paired with the same few documents, these are held, and each text becomes a set about once. If even
one side does not fit, the turn takes the pairs whose documents it holds, and leaves the others. Turns never
affect the edges.

    edges.run      EDGES: from the document of higher priority to the other one
    waiting.run    WAITING: the documents that an edge leads to
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.writers.dedup.compare import PairRule, compare_pairs
from shardkit.writers.dedup.pairs import Partners
from shardkit.writers.dedup.population import PAIR
from shardkit.writers.dedup.shingle_store import HASH_BITS, Sets, read_sets
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage

_U64 = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.void]


# key: the winner; lo: the loser; the winner's `population.priority`; the similarity of the two.
EDGES = Table(
    "edges.run",
    np.dtype([("key", "<u8"), ("lo", "<u8"), ("priority", "<u8", (3,)), ("jaccard", "<f4")]),
)

WAITING = Table("waiting.run", np.dtype([("key", "<u8")]), packed=0.25)


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """Counts of a block: compared `pairs`, and those `verified`, which became edges.

    `estimated` counts verified pairs with a document of an index, whose n-grams are not known whole.
    """

    pairs: int
    verified: int
    estimated: int = 0


def verify_block(
    folder: Path,
    pairs: Slice,
    texts: Slice,
    rule: Annotated[PairRule, RecipeKey("dedup.near")],
    memory_bytes: MemoryBytes,
) -> VerifiedBlock:
    """Write the edges among the pairs of a block; both slices cover exactly this block."""
    block = _Block(texts, rule, memory_bytes)
    compared = verified = 0
    with (
        RunWriter(folder / EDGES.file, EDGES, memory_bytes=memory_bytes // 8) as edges,
        RunWriter(folder / WAITING.file, WAITING, memory_bytes=memory_bytes // 16) as waiting,
    ):
        for some in _turns(pairs, memory_bytes // 16):
            compared += len(some)
            for found in block.edges(some):
                edges.write(found)
                waiting.write(np.unique(found["lo"]).view(WAITING.dtype))
                verified += len(found)
    return VerifiedBlock(compared, verified, block.estimated)


VERIFY = Stage("verify", "near-duplicates", verify_block, cost=5.8)


def _turns(pairs: Slice, memory_bytes: int) -> Iterator[Rows]:
    """Yield the pairs of a block, up to `memory_bytes` at a time."""
    held, count, most = list[Rows](), 0, max(1, memory_bytes // PAIR.itemsize)
    for rows, payload in pairs.stream(memory_bytes // 4):  # they take several times as much when decoded
        numbers, sizes = (np.ascontiguousarray(rows[name]) for name in ("number", "size"))
        partners = Partners.decoded(numbers, sizes, payload)
        found = np.empty(len(partners.firsts), PAIR)
        found["a"], found["b"] = partners.firsts, partners.seconds
        at = 0
        while count + len(found) - at >= most:
            yield np.concatenate([*held, found[at : at + most - count]])
            at += most - count
            held, count = [], 0
        held.append(found[at:])
        count += len(found) - at
    if count:
        yield np.concatenate(held)


class _Block:
    """The documents of a block; makes edges of their pairs."""

    def __init__(self, texts: Slice, rule: PairRule, memory_bytes: int) -> None:
        self._texts, self._rule, self._memory_bytes = texts, rule, memory_bytes
        self._fits = True
        self.estimated = 0

    def edges(self, pairs: Rows) -> Iterator[Rows]:
        """Yield the edges of the pairs that verify."""
        if self._fits:
            sets, self._fits = self._hold(np.unique(np.concatenate([pairs["a"], pairs["b"]])))
            if self._fits:
                yield from self._compared(pairs, sets, sets)
                return
        while len(pairs):
            firsts, seconds = np.unique(pairs["a"]), np.unique(pairs["b"])
            side, numbers = ("a", firsts) if len(firsts) < len(seconds) else ("b", seconds)
            sets, is_all = self._hold(numbers)
            here = np.ones(len(pairs), np.bool_)
            if not is_all:
                here = np.isin(pairs[side], np.concatenate([piece.numbers for piece in sets]))
            yield from self._streamed(pairs[here], side, sets)
            pairs = pairs[~here]

    def _hold(self, numbers: _U64) -> tuple[list[Sets], bool]:
        """Return the sets of these documents in the order of their numbers, and whether those are all.

        The sets take up to an eighth of the memory, or are one batch that is larger.
        """
        pieces, held = list[Sets](), 0
        for sets in self._read(numbers):
            size = sets.rows.nbytes + sets.hashes.nbytes
            if pieces and held + size > self._memory_bytes // 8:
                return pieces, False
            pieces.append(sets)
            held += size
        if sum(len(piece.rows) for piece in pieces) != len(numbers):
            raise _without_set(self._texts)
        return pieces, True

    def _read(self, numbers: _U64) -> Iterator[Sets]:
        return read_sets(self._texts, self._rule, self._memory_bytes // 6, numbers)

    def _streamed(self, pairs: Rows, side: str, held: list[Sets]) -> Iterator[Rows]:
        """Yield the edges of pairs whose documents of this side are held, streaming the others."""
        other = "b" if side == "a" else "a"
        pairs = pairs[np.argsort(pairs[other], kind="stable")]
        numbers = np.ascontiguousarray(pairs[other])
        at = 0
        for sets in self._read(np.unique(numbers)):
            stop = int(np.searchsorted(numbers, sets.numbers[-1], "right"))
            firsts, seconds = (held, [sets]) if side == "a" else ([sets], held)
            yield from self._compared(pairs[at:stop], firsts, seconds)
            at = stop
        if at != len(pairs):
            raise _without_set(self._texts)

    def _compared(self, pairs: Rows, firsts: list[Sets], seconds: list[Sets]) -> Iterator[Rows]:
        """Yield the edges of the pairs that verify; both sides have the sets of all their documents."""
        a, b = self._pieces(firsts, pairs["a"]), self._pieces(seconds, pairs["b"])
        both = a * len(seconds) + b
        order = np.argsort(both, kind="stable")
        edges = np.flatnonzero(np.diff(both[order], prepend=-1, append=-1))
        for start, stop in pairwise(edges.tolist()):
            some = order[start:stop]
            yield self._compared_pieces(pairs[some], firsts[a[some[0]]], seconds[b[some[0]]])

    def _pieces(self, sets: list[Sets], numbers: _U64) -> npt.NDArray[np.int64]:
        """Return in which of the pieces each document is."""
        lasts = np.array([piece.numbers[-1] for piece in sets], np.uint64)
        assert (lasts[1:] > lasts[:-1]).all(), "texts of a block are not in order"
        pieces: npt.NDArray[np.int64] = np.searchsorted(lasts, np.ascontiguousarray(numbers))
        if (pieces == len(sets)).any():
            raise _without_set(self._texts)
        return pieces

    def _compared_pieces(self, pairs: Rows, firsts: Sets, seconds: Sets) -> Rows:
        a, b = self._places(firsts, pairs["a"]), self._places(seconds, pairs["b"])
        result = compare_pairs(firsts, seconds, a, b, self._rule)
        kept = np.flatnonzero(result.verified)
        one, other = firsts.rows[a[kept]], seconds.rows[b[kept]]
        self.estimated += int((np.minimum(firsts.bits[a[kept]], seconds.bits[b[kept]]) < HASH_BITS).sum())
        edges = np.empty(len(kept), EDGES.dtype)
        direct(edges, one["number"], one["priority"], other["number"], other["priority"])
        edges["jaccard"] = result.jaccard[kept]
        return edges

    def _places(self, sets: Sets, numbers: _U64) -> npt.NDArray[np.int64]:
        """Return the row of each document."""
        of_sets, numbers = np.ascontiguousarray(sets.numbers), np.ascontiguousarray(numbers)
        places: npt.NDArray[np.int64] = np.searchsorted(of_sets, numbers)
        if (of_sets[places] != numbers).any():
            raise _without_set(self._texts)
        return places


def _without_set(sets: Slice) -> BuildError:
    return BuildError(
        f"verify: in block {sets.start:,}, a pair has a document without a set of n-grams; remove the work "
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
