"""Candidate pairs of hubs: buckets of so many documents that not all pairs can be made.

Pages of one template or many copies of one text share a band by the thousand. No document of such a bucket is
skipped; its signature is read, and two levels find the pairs that can matter:

1. *Sub-bands*. The whole signature is cut into bands of `sub_rows` values, and only documents that share one
   of these, too, are compared: 18 bands of 6 for similarity 0.8 and 112 permutations. That keeps a pair of
   Jaccard similarity s with probability 1 - (1 - s^6)^18: 0.996 at 0.8, 0.9998 at 0.85, 1 - 10^-6 at 0.9; of
   documents that share half a template (s = 0.33) 2 % are compared. `sub_rows` is the longest that keeps
   0.995 of the pairs at the threshold, for any threshold.
   In a sub-bucket within the limit, every pair is made whose signatures agree in as many values as an
   estimate of `similarity` - 3 sigma needs, sigma = sqrt(s (1 - s) / permutations): 0.9987 of those at the
   threshold, and about 200 times as cheap as a pair that is made and verified.

2. *Leaders*, in sub-buckets over the limit. In the order of priority, each document is compared with all
   leaders before it and paired with those of estimate >= `similarity` - 3 sigma; it becomes a leader itself
   unless a leader's estimate is >= `similarity` + 2 sigma. Never made are pairs with a document that is no
   leader on the side of higher priority. Such a pair (k, v) matters only if k stays. But a leader l covers k:
   it verifies against k but for one in 40 at the threshold, and then k goes if l stays; if l goes, it goes
   for a document of higher priority still, to which the same applies. So work is documents x leaders, and n
   copies of one text make n - 1 pairs instead of n^2 / 2.

Bounds: `HubLimits`. Where documents need more leaders than there may be, those left over go through sub-bands
of twice the values (at 0.8 half of the pairs stay, at 0.9 0.95 of them) and leaders anew; a document with
more pairs in a sub-bucket than allowed keeps those of the highest estimates. Both are counted (`bounded`).

The result depends on the documents' contents and priorities, never on numbers, parts or memory. Planted
copies come last: they are compared with leaders but never are any and do not count towards limits. Documents
of indexes are compared with one another only to tell which of them lead. What only the containment rule would
find (estimates below `similarity` - 3 sigma) is not looked for in hubs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.array_rows import RowFile
from shardkit.writers.dedup.bands import argsort_keys
from shardkit.writers.dedup.hub_kernels import (
    INDEX,
    INPUT,
    PLANTED,
    make_prints,
    matches_for,
    scan,
    scan_groups,
)
from shardkit.writers.dedup.population import DOCUMENTS_FILE, SIGNATURES_FILE, Kind, Population, priority

__all__ = ["HubLimits", "HubSearch", "ReferenceDocument", "reference_hub_pairs", "sub_rows", "thresholds"]

_CHUNK_DOCUMENTS = 1 << 14
_OUT_PAIRS = 1 << 16
_KINDS: tuple[Kind, ...] = ("index", "input", "planted")

Numbers = npt.NDArray[np.uint64]
Ranks = npt.NDArray[np.int64]
Pairs = tuple[Numbers, Numbers]
Settings = tuple[np.uint64, np.uint64, int, int]  # of `scan`


@dataclass(frozen=True, slots=True)
class HubLimits:
    """Bounds of the work on one bucket; planted copies do not count."""

    documents: int = 512  # buckets and sub-buckets of more do not get all pairs
    leaders: int = 8192  # in a sub-bucket: each document is compared with all, 25 microseconds
    pairs: int = 256  # of one document with leaders of a sub-bucket


def sub_rows(similarity: float, permutations: int) -> int:
    """Values in a sub-band: the most that keep 0.995 of the pairs at the threshold."""
    rows = 1
    while rows < permutations:
        bands = permutations // (rows + 1)
        if 1 - (1 - similarity ** (rows + 1)) ** bands < 0.995:
            break
        rows += 1
    return rows


def thresholds(similarity: float, permutations: int) -> tuple[int, int]:
    """(floor, cover) in equal values, as `matches_for`: what is paired, and what makes no leader."""
    sigma = sqrt(similarity * (1 - similarity) / permutations)
    floor, cover = max(similarity - 3 * sigma, 0.0), min(similarity + 2 * sigma, 1.0)
    return matches_for(floor, permutations), matches_for(cover, permutations)


class HubSearch:
    """Finds the pairs of hubs of one population.

    `bounded` counts documents that met a limit, once for each sub-bucket where they did.
    """

    def __init__(
        self, population: Population, similarity: float, *, limits: HubLimits, memory_bytes: int
    ) -> None:
        self.bounded = 0
        self._population = population
        self._similarity = similarity
        self._limits = limits
        self._memory_bytes = memory_bytes
        self._files: dict[tuple[int, str], RowFile] = {}

    def pairs(self, numbers: Numbers) -> Iterator[Pairs]:
        """Arrays (a, b), a < b, of the pairs among these documents (ascending numbers); some occur again."""
        hub = _Hub(self, numbers, self._similarity, self._limits, self._memory_bytes)
        yield from hub.split(np.arange(len(numbers), dtype=np.int64), hub.rows)
        self.bounded += hub.bounded

    def kinds(self, numbers: Numbers) -> npt.NDArray[np.uint8]:
        """uint8[n]: INDEX, INPUT or PLANTED."""
        planted, indexed = self._population.planted, self._population.indexed
        kinds = np.full(len(numbers), INPUT, np.uint8)
        kinds[(numbers >= planted.start) & (numbers < planted.stop)] = PLANTED
        kinds[(numbers >= indexed.start) & (numbers < indexed.stop)] = INDEX
        return kinds

    def priorities(self, numbers: Numbers) -> npt.NDArray[np.uint64]:
        """uint64[n, 3], `priority` of each of these ascending numbers."""
        found = np.empty((len(numbers), 3), np.uint64)
        for start in range(0, len(numbers), _CHUNK_DOCUMENTS):
            chunk = slice(start, start + _CHUNK_DOCUMENTS)
            for part, rows, places in self._by_part(numbers[chunk]):
                documents = self._file(part, DOCUMENTS_FILE).read(rows)
                kind = self._population.parts[part].kind
                found[chunk][places] = priority(documents, kind)
        return found

    def prints(self, numbers: Numbers) -> npt.NDArray[np.uint64]:
        """uint64[n, words], `make_prints` of the signatures of these numbers, in any order."""
        order = np.argsort(numbers)
        found: npt.NDArray[np.uint64] | None = None
        for part, rows, places in self._by_part(numbers[order]):
            prints = make_prints(self._file(part, SIGNATURES_FILE).read(rows))
            if found is None:
                found = np.empty((len(numbers), prints.shape[1]), np.uint64)
            found[order[places]] = prints
        assert found is not None, "no documents"
        return found

    def permutations(self, number: np.uint64) -> int:
        """Values in this document's signature, as in all."""
        part = int(self._population.locate(np.array([number]))[0][0])
        return self._file(part, SIGNATURES_FILE).row_shape[0]

    def _by_part(self, numbers: Numbers) -> Iterator[tuple[int, Ranks, slice]]:
        """(part, rows in it, their places in `numbers`) for ascending numbers."""
        parts, rows = self._population.locate(numbers)
        edges = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
        for start, stop in pairwise(edges):
            if start < stop:
                yield int(parts[start]), rows[start:stop], slice(start, stop)

    def _file(self, part: int, name: str) -> RowFile:
        if (part, name) not in self._files:
            self._files[part, name] = RowFile(self._population.parts[part].folder / name)
        return self._files[part, name]


class _Hub:
    """One bucket. Documents are known by their rank, 0 the highest priority.

    Memory: about 80 bytes a document, and its print as well if that fits into half of `memory_bytes`;
    otherwise prints are read again for each sub-band.
    """

    def __init__(
        self, search: HubSearch, numbers: Numbers, similarity: float, limits: HubLimits, memory_bytes: int
    ) -> None:
        keys = search.priorities(numbers)
        order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))
        del keys
        self.bounded = 0
        self._search = search
        self._numbers = numbers[order]
        self._kinds = search.kinds(self._numbers)
        self._limits = limits
        self._permutations = search.permutations(numbers[0])
        self.rows = sub_rows(similarity, self._permutations)
        self._floor, self._cover = thresholds(similarity, self._permutations)
        words = -(-self._permutations // 8)
        most = max(limits.leaders, limits.documents + 1)
        self._space = (
            np.empty((words, most), np.uint64),
            np.empty(most, np.int64),
            np.empty(most, np.uint8),
            np.empty(most, np.uint64),
        )
        self._out = np.empty((max(_OUT_PAIRS, limits.documents + 1, limits.pairs), 2), np.int64)
        self._prints: npt.NDArray[np.uint64] | None = None
        if len(numbers) * words * 8 <= memory_bytes // 2:
            prints = np.empty((len(numbers), words), np.uint64)
            ranks = np.empty(len(numbers), np.int64)
            ranks[order] = np.arange(len(numbers))
            for start in range(0, len(numbers), _CHUNK_DOCUMENTS):
                chunk = slice(start, start + _CHUNK_DOCUMENTS)
                prints[ranks[chunk]] = search.prints(numbers[chunk])
            self._prints = prints

    def split(self, members: Ranks, rows: int, *, again: bool = True) -> Iterator[Pairs]:
        """Pairs of members (ascending) that share `rows` values of the signature, in any sub-band."""
        for band in range(self._permutations // rows):
            keys, order = argsort_keys(self._keys(members, band * rows, rows))
            edges = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1], [True]]))
            sorted_members = members[order]
            kinds = self._kinds[sorted_members]
            sizes = np.diff(edges)
            inputs = np.add.reduceat(kinds == INPUT, edges[:-1], dtype=np.int64)
            real = np.add.reduceat(kinds != PLANTED, edges[:-1], dtype=np.int64)
            useful = (inputs > 0) & (sizes > 1)
            every = useful & (real <= self._limits.documents)
            at_once = every & (sizes <= _CHUNK_DOCUMENTS)
            yield from self._groups(sorted_members[np.repeat(at_once, sizes)], sizes[at_once])
            for group in np.flatnonzero(useful & ~at_once).tolist():
                bucket = sorted_members[edges[group] : edges[group + 1]]
                left: list[Ranks] = []
                yield from self._scan(bucket, self._all_pairs() if every[group] else self._leaders(), left)
                rest = np.concatenate(left)
                if len(rest) > 1 and again and 2 * rows <= self._permutations:
                    yield from self.split(rest, 2 * rows, again=False)

    def _leaders(self) -> Settings:
        return np.uint64(self._floor), np.uint64(self._cover), self._limits.leaders, self._limits.pairs

    def _all_pairs(self) -> Settings:
        """Nothing is covered, and no limit reached: all documents but planted ones are leaders."""
        never = np.uint64((1 << 64) - 1)
        return np.uint64(self._floor), never, self._limits.documents + 1, self._limits.documents + 1

    def _rows(self, ranks: Ranks) -> npt.NDArray[np.uint64]:
        return self._search.prints(self._numbers[ranks]) if self._prints is None else self._prints[ranks]

    def _keys(self, members: Ranks, first: int, rows: int) -> npt.NDArray[np.uint64]:
        """uint64[n]: FNV-1a of the bytes first to first + rows of each print."""
        keys = np.full(len(members), 0xCBF29CE484222325, np.uint64)
        for start in range(0, len(members), _CHUNK_DOCUMENTS):
            values = self._rows(members[start : start + _CHUNK_DOCUMENTS]).view(np.uint8)
            chunk = keys[start : start + _CHUNK_DOCUMENTS]
            for column in range(first, first + rows):
                chunk ^= values[:, column]
                chunk *= np.uint64(0x100000001B3)
        return keys

    def _groups(self, members: Ranks, sizes: Ranks) -> Iterator[Pairs]:
        """All pairs within groups: members one group after the other, none over `_CHUNK_DOCUMENTS`."""
        edges = np.concatenate([[0], np.cumsum(sizes)])
        begin = 0
        while begin < len(sizes):
            end = int(np.searchsorted(edges, edges[begin] + _CHUNK_DOCUMENTS, side="right")) - 1
            ranks = members[edges[begin] : edges[end]]
            mine, prints, kinds = edges[begin : end + 1] - edges[begin], self._rows(ranks), self._kinds[ranks]
            state, settings = np.zeros(3, np.int64), self._all_pairs()
            while state[0] < len(mine) - 1:
                count = scan_groups(prints, kinds, ranks, mine, state, settings, self._space, self._out)
                yield self._named(count)
            begin = end

    def _scan(self, members: Ranks, settings: Settings, left: list[Ranks]) -> Iterator[Pairs]:
        """Pairs of one bucket by `scan`; `left` gets the members that were to be leaders and could not."""
        leaders = 0
        for start in range(0, len(members), _CHUNK_DOCUMENTS):
            ranks = members[start : start + _CHUNK_DOCUMENTS]
            kinds, prints, bounded = self._kinds[ranks], self._rows(ranks), np.zeros(len(ranks), np.uint8)
            row = 0
            while row < len(ranks):
                row, leaders, count = scan(
                    prints, kinds, ranks, row, leaders, settings, bounded, self._space, self._out, 0
                )
                yield self._named(count)
            left.append(ranks[bounded & 1 == 1])
            self.bounded += int(((bounded > 0) & (kinds != PLANTED)).sum())

    def _named(self, count: int) -> Pairs:
        one, other = self._numbers[self._out[:count, 0]], self._numbers[self._out[:count, 1]]
        return np.minimum(one, other), np.maximum(one, other)


@dataclass(frozen=True, slots=True)
class ReferenceDocument:
    """A document as the plain-Python references take it; equal priorities do not occur."""

    signature: Sequence[int]
    priority: tuple[int, ...]
    kind: Kind = "input"
    keys: Sequence[int] = ()  # of its bands


def reference_hub_pairs(
    documents: Sequence[ReferenceDocument], similarity: float, limits: HubLimits
) -> tuple[set[tuple[int, int]], int]:
    """(pairs of positions, lower first; `bounded`) of one hub, in plain Python."""
    permutations = len(documents[0].signature)
    rows = sub_rows(similarity, permutations)
    floor, cover = (least - -permutations % 8 for least in thresholds(similarity, permutations))
    prints = [[value * 0x9E3779B1 % (1 << 32) >> 24 for value in one.signature] for one in documents]
    pairs: set[tuple[int, int]] = set()
    bounded = 0

    def split(members: list[int], rows: int, again: bool) -> None:
        nonlocal bounded
        for first in range(0, permutations - rows + 1, rows):
            buckets: dict[tuple[int, ...], list[int]] = {}
            for member in members:
                buckets.setdefault(tuple(prints[member][first : first + rows]), []).append(member)
            for bucket in buckets.values():
                if all(documents[member].kind != "input" for member in bucket):
                    continue
                real = sum(documents[member].kind != "planted" for member in bucket)
                lead = real > limits.documents
                left = compare(bucket, lead)
                if lead and len(left) > 1 and again and 2 * rows <= permutations:
                    split(left, 2 * rows, False)

    def compare(bucket: list[int], lead: bool) -> list[int]:
        nonlocal bounded
        leaders: list[int] = []
        left = []
        for member in bucket:
            kind = documents[member].kind
            equal = [
                sum(a == b for a, b in zip(prints[member], prints[leader], strict=True)) for leader in leaders
            ]
            allowed = {"index": (), "input": ("index", "input"), "planted": ("input",)}[kind]
            hits = [
                (-count, at)
                for at, count in enumerate(equal)
                if count >= floor and documents[leaders[at]].kind in allowed
            ]
            met = lead and len(hits) > limits.pairs
            for _, at in sorted(hits)[: limits.pairs] if lead else hits:
                pairs.add((min(leaders[at], member), max(leaders[at], member)))
            if not lead or max(equal, default=-1) < cover:
                if lead and len(leaders) == limits.leaders:
                    left.append(member)
                    met = True
                elif kind != "planted":
                    leaders.append(member)
            bounded += met and kind != "planted"
        return left

    split(sorted(range(len(documents)), key=lambda at: documents[at].priority), rows, True)
    return pairs, bounded
