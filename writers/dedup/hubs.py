"""Candidate pairs of hubs: buckets with too many documents to make all pairs.

Thousands of pages of one template, or copies of one text, share a band. No document of such a bucket is
skipped: all signatures are read, and two levels find the pairs that can matter:

1. *Sub-bands*. The whole signature is cut into bands of `sub_rows` values, and only documents that also share
   one of these are compared: 18 bands of 6 values for similarity 0.8 and 112 permutations. This keeps a pair
   of Jaccard similarity s with probability 1 - (1 - s^6)^18: 0.996 at 0.8, 0.9998 at 0.85, 1 - 10^-6 at 0.9;
   of pairs that share half a template (s = 0.33), 2 % are compared. `sub_rows` is the largest number that
   keeps 0.995 of the pairs at the threshold, for any threshold. A sub-band inside the band that makes the hub
   is equal for all its documents and left out; the other 17 keep 0.994 at 0.8.
   In a sub-bucket of up to 64 documents, a pair is made if its signatures agree in as many values as an
   estimate of `similarity` - 3 sigma requires, sigma = sqrt(s (1 - s) / permutations). This keeps 0.9987 of
   the pairs at the threshold, and costs about 1/200 of making and verifying a pair.

2. *Leaders*, in larger sub-buckets. In order of priority, each document is compared with all leaders before
   it and paired with those whose estimate is >= `similarity` - 3 sigma. It becomes a leader itself unless
   firm leaders cover it: one with an estimate >= `similarity` + 2 sigma, or three with >= `similarity`. A
   leader is firm if no firm leader before it has an estimate >= `similarity` with it. Pairs whose document of
   higher priority is not a leader are never made. Such a pair (k, v) matters only if k stays; but then k
   verifies against none of its covering leaders (the estimate of a pair below the threshold is that high for
   one leader once in 40 times, for all three once in eight), and firm leaders are those that stay, according
   to the estimates. Work is documents x leaders; n copies of one text make n - 1 pairs instead of n^2 / 2.

Limits: `HubLimits`. If a sub-bucket needs more leaders than the limit, its remaining documents are divided
again into sub-bands of twice as many values (which keep half of the pairs at 0.8, 0.95 of them at 0.9) with
new leaders. A document with more pairs in a sub-bucket than the limit keeps half of them with the leaders of
highest priority, which most likely stay, and half with the most similar leaders. `bounded` counts the
documents that meet either limit, except covered ones that only have too many pairs.

The result depends on the documents' contents and priorities, never on numbers, parts or memory. Documents of
indexes are compared with one another only to determine the leaders. Pairs that only the containment rule
would find (estimates below `similarity` - 3 sigma) are not searched for in hubs.

Signatures are compared by one byte of each value. The byte depends on all bits of the value (b-bit minwise
hashing: Li and König, 2010): different values share it once in 256 times, which the thresholds allow for. The
bytes of a document, padded with zeros to whole words, are its *print*: uint64[words], 112 bytes for 112
permutations instead of 448. Leaders' prints are stored by columns, so that vector registers compare many of
them at once: about 3 ns per comparison of 112 values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.kernels.numba_support import Int64s, UInt8s, UInt64s, int64, kernel
from shardkit.writers.dedup.population import (
    DOCUMENTS_FILE,
    PRINTS_FILE,
    Population,
    priority,
)
from shardkit.writers.dedup.tables import RowFile, RowsWriter, read_header
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.kernels.sorting import argsort_keys

INDEX, INPUT = 0, 1  # kinds of documents; those of an index have the higher priority

_BLOCK = 256  # number of documents whose match counts fit into the L1 cache

_LOW7 = np.uint64(0x7F7F7F7F7F7F7F7F)

_BIT7 = np.uint64(0x8080808080808080)

_PAIRS = np.uint64(0x00FF00FF00FF00FF)

_ONES = np.uint64(0x0001000100010001)


def make_prints(stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the prints, uint64[n, words], of the `print_bytes` of signatures."""
    count, permutations = stored.shape
    prints = np.zeros((count, -(-permutations // 8) * 8), np.uint8)
    prints[:, :permutations] = stored
    return prints.view("<u8")


def matches_for(similarity: float, permutations: int) -> int:
    """Return how many bytes of two prints, padding included, must be equal to estimate this similarity."""
    equal = similarity + (1 - similarity) / 256
    filling = -permutations % 8
    return int(np.ceil(permutations * equal - 1e-9)) + filling


Settings = tuple[np.uint64, np.uint64, np.uint64, int, int, int]  # the argument `settings` of `scan`
_Space = tuple[UInt64s, Int64s, UInt8s, UInt64s]


@kernel
def count_matches(document: UInt64s, columns: UInt64s, count: int, out: UInt64s) -> None:
    """Set out[i] to the number of equal bytes in `document` and column i of `columns`, for i < count."""
    for start in range(0, count, _BLOCK):
        stop = min(count, start + _BLOCK)
        sums = out[start:stop]
        sums[:] = np.uint64(0)
        for word in range(len(document)):
            value = document[word]
            row = columns[word, start:stop]
            for i in range(len(sums)):
                # A byte of `differs` has its upper bit set if any bit of x is set there. A byte of `sums`
                # cannot overflow: it counts up to one match per word of the print.
                x = row[i] ^ value
                differs = ((x & _LOW7) + _LOW7) | x
                sums[i] += (~differs & _BIT7) >> np.uint64(7)
        for i in range(len(sums)):
            halves = (sums[i] & _PAIRS) + ((sums[i] >> np.uint64(8)) & _PAIRS)
            sums[i] = halves * _ONES >> np.uint64(48)


@kernel
def scan(
    prints: UInt64s,
    kinds: UInt8s,
    ranks: Int64s,
    begin: int,
    leaders: int,
    settings: Settings,
    bounded: UInt8s,
    space: _Space,
    out: Int64s,
    at: int,
) -> tuple[int, int, int]:
    """Pair documents with the leaders before them; documents that no leader covers become leaders.

    Processes rows of `prints` from `begin` on, and stops when the pairs of a row might not fit into `out`
    from index `at` on. `space` holds `leaders` leaders: (prints by columns, ranks, firm or not, room for
    match counts). `settings` is (floor, similar, cover, maximum of leaders, maximum of pairs per document,
    number of similar firm leaders that cover a document); the first three count equal bytes, as `matches_for`
    does. Sets bounded[i] to 1 if document i did not become a leader because of the limit, to 2 if some of its
    pairs were left out although it is not covered, to 3 for both. Returns (next row, leaders, next index in
    `out`).
    """
    floor, similar, cover, most_leaders, most_pairs, enough = settings
    columns, heads, firm, sums = space
    for i in range(begin, len(prints)):
        if at + min(leaders, most_pairs) > len(out):
            return i, leaders, at
        count_matches(prints[i], columns, leaders, sums)
        kind = kinds[i]
        hits = alike = 0
        best = np.uint64(0)  # most matches with any firm leader
        for j in range(leaders):  # without branches, so that the compiler vectorizes it
            of_firm = sums[j] * np.uint64(firm[j])
            best = max(best, of_firm)
            alike += of_firm >= similar
            hits += sums[j] >= floor
        covered = leaders > 0 and (best >= cover or alike >= enough)
        if hits and kind != INDEX:
            at = _pair(ranks[i], leaders, floor, hits, most_pairs, space, out, at)
            if hits > most_pairs and not covered:
                bounded[i] |= 2
        if covered:
            continue
        if leaders == most_leaders:
            bounded[i] |= 1
        else:
            for word in range(len(columns)):  # slice assignment would take Numba seconds to compile
                columns[word, leaders] = prints[i, word]
            heads[leaders] = ranks[i]
            firm[leaders] = kind == INDEX or best < similar
            leaders += 1
    return len(prints), leaders, at


@kernel
def _pair(
    rank: int,
    leaders: int,
    floor: np.uint64,
    hits: int,
    most: int,
    space: _Space,
    out: Int64s,
    at: int,
) -> int:
    """Write the pairs of one document with its `hits` leaders, but at most `most`.

    If there are more, half are with the first leaders and half with the most similar of the others.
    """
    _, heads, _, sums = space
    first = hits if hits <= most else most // 2
    least, ties = floor, 0
    if hits > most:
        least, ties = _cut(leaders, floor, first, most - first, sums)
    for j in range(leaders):
        if sums[j] < floor:
            continue
        if first > 0:
            first -= 1
        elif sums[j] < least:
            continue
        elif sums[j] == least:
            if ties == 0:
                continue
            ties -= 1
        out[at, 0] = heads[j]
        out[at, 1] = rank
        at += 1
    return at


@kernel
def _cut(leaders: int, floor: np.uint64, first: int, most: int, sums: UInt64s) -> tuple[np.uint64, int]:
    """Return (least, ties), which select the `most` best hits after the first `first` ones.

    These are all hits with more than `least` matches, and `ties` hits with exactly `least`.
    """
    histogram = np.zeros(int64(sums[:leaders].max()) + 1, np.int64)
    for j in range(leaders):
        if sums[j] >= floor:
            if first > 0:
                first -= 1
            else:
                histogram[int64(sums[j])] += 1
    left = int64(most)
    for matches in range(len(histogram) - 1, -1, -1):
        if histogram[matches] >= left:
            return np.uint64(matches), left
        left -= histogram[matches]
    return floor, left


@kernel
def scan_groups(
    prints: UInt64s,
    kinds: UInt8s,
    ranks: Int64s,
    edges: Int64s,
    state: Int64s,
    settings: Settings,
    space: _Space,
    out: Int64s,
) -> int:
    """Run `scan` on small groups of rows whose documents all become leaders; return the number of pairs.

    Group g is the rows edges[g] to edges[g + 1]. No group may have as many documents as the maximum of
    leaders, and the settings must let no document be covered. `state`, where to continue, is (group, row,
    leaders) and is updated; the work is complete when its group is len(edges) - 1.
    """
    at = 0
    bounded = np.zeros(0, np.uint8)
    while state[0] < len(edges) - 1:
        start, stop = edges[state[0]], edges[state[0] + 1]
        row, leaders, at = scan(
            prints[start:stop],
            kinds[start:stop],
            ranks[start:stop],
            state[1],
            state[2],
            settings,
            bounded,
            space,
            out,
            at,
        )
        state[1], state[2] = row, leaders
        if row < stop - start:
            return at
        state[0] += 1
        state[1] = state[2] = 0
    return at


_CHUNK_DOCUMENTS = 1 << 14  # maximum number of documents whose signatures are read together

_BYTES_PER_VALUE = 10  # most memory per value while stored bytes become prints; measured with 4 bytes each

_HELD_BYTES = 64  # of a document beside its print, while buckets are read together: numbers, priority

_OUT_PAIRS = 1 << 16

Numbers = npt.NDArray[np.uint64]

Ranks = npt.NDArray[np.int64]

Pairs = tuple[Numbers, Numbers]


@dataclass(frozen=True, slots=True)
class HubLimits:
    """Limits of the work on one bucket."""

    documents: int = 128  # a bucket with more documents does not get all pairs
    sub_documents: int = 64  # a sub-bucket with more documents does not get all pairs
    leaders: int = 4096  # maximum per sub-bucket; comparing a document with all takes 12 microseconds
    pairs: int = 6  # maximum per document with the leaders of a sub-bucket, of which it is in many
    covering: int = 3  # number of firm leaders, each with an estimate >= similarity, that cover it


def sub_rows(similarity: float, permutations: int) -> int:
    """Return the most values per sub-band for which 99.5 % of pairs of this similarity share a sub-band."""
    rows = 1
    while rows < permutations:
        bands = permutations // (rows + 1)
        if 1 - (1 - similarity ** (rows + 1)) ** bands < 0.995:
            break
        rows += 1
    return rows


def thresholds(similarity: float, permutations: int) -> tuple[int, int, int]:
    """Return (floor, similar, cover), each a number of equal bytes as in `matches_for`.

    `floor` matches make a pair; `similar` matches with a firm leader keep a new leader from being firm;
    `cover` matches with a firm leader cover a document.
    """
    sigma = sqrt(similarity * (1 - similarity) / permutations)
    estimates = max(similarity - 3 * sigma, 0.0), similarity, min(similarity + 2 * sigma, 1.0)
    floor, similar, cover = (matches_for(estimate, permutations) for estimate in estimates)
    return floor, similar, cover


class HubSearch:
    """Finds the candidate pairs in the hubs of one population; `scratch` is a file for hubs beyond memory.

    `bounded` counts the documents that met a limit, once for each sub-bucket where they did.
    """

    def __init__(
        self,
        population: Population,
        similarity: float,
        scratch: Path,
        *,
        limits: HubLimits,
        memory_bytes: int,
    ) -> None:
        self.bounded = 0
        self.scratch = scratch
        self._population = population
        self._similarity = similarity
        self._limits = limits
        self._memory_bytes = memory_bytes
        self._held: _Held | None = None
        parts = len(population.parts)
        self._headers = {name: _Headers(parts) for name in (DOCUMENTS_FILE, PRINTS_FILE)}

    def pairs_of(self, buckets: Sequence[Numbers]) -> Iterator[Pairs]:
        """Yield the `pairs` of each bucket. What buckets need is read for as many as fit a quarter of memory:
        parts are many, and a small bucket has one document of each."""
        if not buckets:
            return
        each = self.permutations(buckets[0][0]) + _HELD_BYTES
        for some in _batches(buckets, self._memory_bytes // 4 // each):
            if len(some) > 1:
                numbers = np.unique(np.concatenate(some))
                self._held = _Held(numbers, self.priorities(numbers), self.prints(numbers))
            for numbers in some:
                yield from self.pairs(numbers)
            self._held = None

    def pairs(self, numbers: Numbers) -> Iterator[Pairs]:
        """Yield arrays (a, b), a < b, of pairs among these ascending document numbers; pairs may repeat."""
        hub = _Hub(self, numbers, self._similarity, self._limits, self._memory_bytes)
        yield from hub.split(np.arange(len(numbers), dtype=np.int64), hub.rows)
        self.scratch.unlink(missing_ok=True)
        self.bounded += hub.bounded

    def kinds(self, numbers: Numbers) -> npt.NDArray[np.uint8]:
        """Return uint8[n], INDEX or INPUT for each document number."""
        return np.where(numbers < self._population.indexed.start, INPUT, INDEX).astype(np.uint8)

    def priorities(self, numbers: Numbers) -> npt.NDArray[np.uint64]:
        """Return the priorities, uint64[n, 3], of these ascending document numbers."""
        if self._held is not None:
            return self._held.priorities[np.searchsorted(self._held.numbers, numbers)]
        found = np.empty((len(numbers), 3), np.uint64)
        for start in range(0, len(numbers), _CHUNK_DOCUMENTS):
            chunk = slice(start, start + _CHUNK_DOCUMENTS)
            for part, rows, places in self._by_part(numbers[chunk]):
                documents = self._file(part, DOCUMENTS_FILE).read(rows)
                kind = self._population.parts[part].kind
                found[chunk][places] = priority(documents, kind)
        return found

    def prints(self, numbers: Numbers) -> npt.NDArray[np.uint64]:
        """Return the prints, uint64[n, words], of these document numbers; files are read in order."""
        if self._held is not None:
            return self._held.prints[np.searchsorted(self._held.numbers, numbers)]
        permutations = self.permutations(numbers[0])
        found = np.empty((len(numbers), -(-permutations // 8)), np.uint64)
        order, size = np.argsort(numbers), self.chunk_documents(permutations)
        for start in range(0, len(order), size):
            some = order[start : start + size]
            for part, rows, places in self._by_part(numbers[some]):
                found[some[places]] = make_prints(self._file(part, PRINTS_FILE).read(rows))
        return found

    def chunk_documents(self, permutations: int) -> int:
        """Return how many documents' stored signatures are read at a time, in a quarter of the memory."""
        most = self._memory_bytes // 4 // (_BYTES_PER_VALUE * permutations)
        return min(_CHUNK_DOCUMENTS, max(256, most))

    def permutations(self, number: np.uint64) -> int:
        """Return the number of values in the signature of an input, which is the same for all documents."""
        part = int(self._population.locate(np.array([number]))[0][0])
        return self._file(part, PRINTS_FILE).row_shape[0]

    def _by_part(self, numbers: Numbers) -> Iterator[tuple[int, Ranks, slice]]:
        """Yield (part, rows in the part, their slice of `numbers`) for ascending document numbers."""
        parts, rows = self._population.locate(numbers)
        edges = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
        for start, stop in pairwise(edges):
            if start < stop:
                yield int(parts[start]), rows[start:stop], slice(start, stop)

    def _file(self, part: int, name: str) -> RowFile:
        population = self._population
        rows = int(population.starts[part + 1] - population.starts[part])
        own = population.parts[part]
        file = own.prints if name == PRINTS_FILE else own.folder / name
        return self._headers[name].open(file, part, rows)


@dataclass(frozen=True, slots=True)
class _Held:
    """The priorities and prints of ascending document numbers."""

    numbers: Numbers
    priorities: npt.NDArray[np.uint64]
    prints: npt.NDArray[np.uint64]


def _batches(buckets: Sequence[Numbers], most: int) -> Iterator[list[Numbers]]:
    """Yield consecutive buckets with at most `most` documents in all, or one bucket that has more."""
    held: list[Numbers] = []
    documents = 0
    for bucket in buckets:
        if held and documents + len(bucket) > most:
            yield held
            held, documents = [], 0
        held.append(bucket)
        documents += len(bucket)
    if held:
        yield held


class _Headers:
    """Caches the .npy headers of one table in all parts; one byte per part, since only row counts differ."""

    def __init__(self, parts: int) -> None:
        self._kind_of = np.zeros(parts, np.uint8)  # index into `_kinds` plus 1; 0: header not read yet
        self._kinds: list[tuple[int, tuple[int, ...], np.dtype[Any]]] = []

    def open(self, table: Artifact, part: int, rows: int) -> RowFile:
        if kind := int(self._kind_of[part]):
            begin, row_shape, dtype = self._kinds[kind - 1]
            return RowFile(table, (begin, (rows, *row_shape), dtype))
        begin, shape, dtype = header = read_header(table)
        assert shape[0] == rows, (table, shape, rows)
        found = begin, shape[1:], dtype
        if found not in self._kinds:
            self._kinds.append(found)
        self._kind_of[part] = self._kinds.index(found) + 1
        return RowFile(table, header)


class _Hub:
    """One large bucket, whose documents are numbered by rank; rank 0 has the highest priority.

    Memory: about 80 bytes per document. The prints are held as well if they fit into half of `memory_bytes`;
    otherwise they are written to the search's scratch file by rank, since each sub-band reads them again.
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
        self._chunk_documents = search.chunk_documents(self._permutations)
        floor, similar, cover = (np.uint64(least) for least in thresholds(similarity, self._permutations))
        never = np.uint64((1 << 64) - 1)
        every = limits.documents + 1  # a limit that is never reached
        self._leaders: Settings = (floor, similar, cover, limits.leaders, limits.pairs, limits.covering)
        self._all_pairs: Settings = (floor, never, never, every, every, every)
        words = -(-self._permutations // 8)
        most = max(limits.leaders, limits.documents + 1)
        self._space = (
            np.empty((words, most), np.uint64),
            np.empty(most, np.int64),
            np.empty(most, np.uint8),
            np.empty(most, np.uint64),
        )
        self._out = np.empty((max(_OUT_PAIRS, limits.documents + 1, limits.pairs), 2), np.int64)
        at_once = max(self._chunk_documents, memory_bytes // 2 // (8 * words))
        self._prints: npt.NDArray[np.uint64] | RowFile = search.prints(self._numbers[:at_once])
        if len(numbers) > at_once:
            with RowsWriter(search.scratch, np.uint64, width=words) as file:
                file.write(self._prints)
                for first in range(at_once, len(numbers), at_once):
                    file.write(search.prints(self._numbers[first : first + at_once]))
            self._prints = RowFile(Artifact(search.scratch))

    def split(self, members: Ranks, rows: int, *, again: bool = True) -> Iterator[Pairs]:
        """Yield pairs of members (ascending ranks) that agree in all `rows` values of a sub-band."""
        bands = list(range(self._permutations // rows))
        if again and len(shared := self._shared_by_all(members, rows)) == 1 < len(bands):
            bands.remove(shared[0])  # inside the band that made the hub, so it divides nothing
        for band in bands:
            keys, order = argsort_keys(self._keys(members, band * rows, rows))
            edges = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1], [True]]))
            sorted_members = members[order]
            kinds = self._kinds[sorted_members]
            sizes = np.diff(edges)
            inputs = np.add.reduceat(kinds == INPUT, edges[:-1], dtype=np.int64)
            useful = (inputs > 0) & (sizes > 1)
            every = useful & (sizes <= min(self._limits.sub_documents, self._limits.documents))
            at_once = every & (sizes <= self._chunk_documents)
            yield from self._groups(sorted_members[np.repeat(at_once, sizes)], sizes[at_once])
            for group in np.flatnonzero(useful & ~at_once).tolist():
                bucket = sorted_members[edges[group] : edges[group + 1]]
                left: list[Ranks] = []
                yield from self._scan(bucket, self._all_pairs if every[group] else self._leaders, left)
                rest = np.concatenate(left)
                if len(rest) > 1 and again and 2 * rows <= self._permutations:
                    yield from self.split(rest, 2 * rows, again=False)

    def _shared_by_all(self, members: Ranks, rows: int) -> list[int]:
        """Return the sub-bands whose values are equal in all members."""
        first = self._rows(members[:1]).view(np.uint8)
        same = np.ones(first.shape[1], np.bool_)
        for start in range(0, len(members), self._chunk_documents):
            same &= (self._rows(members[start : start + self._chunk_documents]).view(np.uint8) == first).all(
                axis=0
            )
            if not same[: self._permutations].any():
                break
        bands = self._permutations // rows
        return [band for band in range(bands) if same[band * rows : (band + 1) * rows].all()]

    def _rows(self, ranks: Ranks) -> npt.NDArray[np.uint64]:
        if not isinstance(self._prints, RowFile):
            return self._prints[ranks]
        order = np.argsort(ranks)
        found = np.empty((len(ranks), len(self._space[0])), np.uint64)
        found[order] = self._prints.read(ranks[order])
        return found

    def _keys(self, members: Ranks, first: int, rows: int) -> npt.NDArray[np.uint64]:
        """Return the FNV-1a hashes, uint64[n], of the bytes [first, first + rows) of each print."""
        keys = np.full(len(members), 0xCBF29CE484222325, np.uint64)
        for start in range(0, len(members), self._chunk_documents):
            values = self._rows(members[start : start + self._chunk_documents]).view(np.uint8)
            chunk = keys[start : start + self._chunk_documents]
            for column in range(first, first + rows):
                chunk ^= values[:, column]
                chunk *= np.uint64(0x100000001B3)
        return keys

    def _groups(self, members: Ranks, sizes: Ranks) -> Iterator[Pairs]:
        """Yield all pairs within each group; `members` has groups of these `sizes`, each at most a chunk."""
        edges = np.concatenate([[0], np.cumsum(sizes)])
        begin = 0
        while begin < len(sizes):
            end = int(np.searchsorted(edges, edges[begin] + self._chunk_documents, side="right")) - 1
            ranks = members[edges[begin] : edges[end]]
            mine, prints, kinds = edges[begin : end + 1] - edges[begin], self._rows(ranks), self._kinds[ranks]
            state = np.zeros(3, np.int64)
            while state[0] < len(mine) - 1:
                count = scan_groups(
                    prints, kinds, ranks, mine, state, self._all_pairs, self._space, self._out
                )
                yield self._named(count)
            begin = end

    def _scan(self, members: Ranks, settings: Settings, left: list[Ranks]) -> Iterator[Pairs]:
        """Yield the pairs that `scan` finds in a bucket.

        Appends the members that did not become leaders because of the limit to `left`.
        """
        leaders = 0
        for start in range(0, len(members), self._chunk_documents):
            ranks = members[start : start + self._chunk_documents]
            kinds, prints, bounded = self._kinds[ranks], self._rows(ranks), np.zeros(len(ranks), np.uint8)
            row = 0
            while row < len(ranks):
                row, leaders, count = scan(
                    prints, kinds, ranks, row, leaders, settings, bounded, self._space, self._out, 0
                )
                yield self._named(count)
            left.append(ranks[bounded & 1 == 1])
            self.bounded += int((bounded > 0).sum())

    def _named(self, count: int) -> Pairs:
        one, other = self._numbers[self._out[:count, 0]], self._numbers[self._out[:count, 1]]
        return np.minimum(one, other), np.maximum(one, other)
