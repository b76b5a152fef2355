"""Decides removals: a document goes if and only if one that stays, of higher priority, verifies against it.

Edges come by the priority of their winner, highest first. When an edge is read, all edges that could remove
its winner have been read, so one bit a document decides: if the winner stays, the loser is removed and booked
on it (on the first such winner, which has the highest priority). The result is the lexicographically first
maximal independent set, which is unique; there is no transitive closure, and only the bits are in memory.

Documents whose words equal another's were left out before (`equal`): they go with it, or are booked on it.

The number of documents that each kept one represents is computed over ranges of document numbers that fit in
memory; records on disk are divided among the ranges by document number.

    losers.npy     NEAR_LOSER by (split, row): removed documents of inputs
    winners.npy    WINNER_DTYPE by (split, row): kept documents that represent more than themselves
    planted.npy    NEAR_LOSER, split the number of the part: planted copies that were removed
    outcomes.run   OUTCOMES: the losers and winners for the tasks of their splits

`merge_edges` makes one sorted stream of sorted files of edges, in bounded memory: it buffers some rows of
each file, and yields rows up to the lowest of the buffers' last rows, which nothing on disk can precede. If
there are too many files for buffers of a useful size, groups of files are merged into one file first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkit.writers.dedup.exact import LOSER_DTYPE, WINNER_DTYPE
from shardkit.writers.dedup.population import Population
from shardkit.writers.dedup.removals import GROUP_SIZES, OUTCOMES, document_keys, outcomes
from shardkit.writers.dedup.tables import CHUNK_ROWS, Rows, RowsWriter
from shardkit.writers.dedup.verify import EDGE, read_documents
from shardkit.writers.exchange import RunWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import PlainCounts
from shardkit.writers.kernels.numba_support import Bools, Int64s, UInt8s, UInt64s, int64, kernel

__all__ = [
    "LOSERS_FILE",
    "MAX_FILES",
    "NEAR_LOSER",
    "PLANTED_FILE",
    "WINNERS_FILE",
    "merge_edges",
    "resolve",
]

MAX_FILES = 256  # merged at a time

_BYTES_PER_ROW = 4 * EDGE.itemsize  # held with keys, taken out, put in order, and the order

_MIN_ROWS = 16


def merge_edges(
    files: Sequence[Artifact], memory_bytes: int, temporary: Path, *, max_files: int = MAX_FILES
) -> Iterator[npt.NDArray[np.void]]:
    """EDGE rows of all files by descending priority of `hi`, some at a time; each file is sorted so.

    `temporary` is an empty folder for files in between; they are removed.
    """
    rest, made = list(files), 0
    while len(rest) > max_files:
        group, rest = rest[:max_files], rest[max_files:]
        merged = Artifact(temporary / f"merged{made}.npy")
        made += 1
        with RowsWriter(merged.path, EDGE) as writer:
            for edges in _merge(group, memory_bytes):
                writer.write(edges)
        _remove(group, temporary)
        rest.append(merged)
    yield from _merge(rest, memory_bytes)
    _remove(rest, temporary)


def _remove(files: Sequence[Artifact], temporary: Path) -> None:
    for file in files:
        if file.path.parent == temporary:
            file.path.unlink()


class _Buffer:
    """Rows of one file that are held until they are handed on."""

    def __init__(self, file: Artifact) -> None:
        self._table = Rows(file, EDGE)
        self._next = 0
        self._held = np.empty(0, EDGE)
        self.keys = np.empty((0, 3), np.uint64)
        self.fill(_MIN_ROWS)

    @property
    def at_end(self) -> bool:
        """Nothing is left on disk."""
        return self._next == len(self._table)

    def fill(self, rows: int) -> None:
        """Hold `rows` rows, if there are so many."""
        if not self.at_end and len(self._held) < rows // 2 + 1:
            stop = min(self._next + rows - len(self._held), len(self._table))
            self._held = np.concatenate([self._held, self._table.read(self._next, stop)])
            self.keys = np.ascontiguousarray(self._held["hi_priority"])
            self._next = stop

    def take(self, limit: npt.NDArray[np.uint64]) -> npt.NDArray[np.void]:
        """Take out the rows that are not above the limit."""
        count = _not_above(self.keys, limit)
        taken, self._held = self._held[:count], self._held[count:]
        self.keys = self.keys[count:]
        return taken


def _merge(files: Sequence[Artifact], memory_bytes: int) -> Iterator[npt.NDArray[np.void]]:
    buffers = [_Buffer(file) for file in files]
    rows = max(_MIN_ROWS, memory_bytes // (_BYTES_PER_ROW * max(1, len(files))))
    while True:
        for buffer in buffers:
            buffer.fill(rows)
        buffers = [buffer for buffer in buffers if len(buffer.keys)]
        if not buffers:
            return
        limit = np.full(3, np.iinfo(np.uint64).max, np.uint64)
        for buffer in buffers:
            if not buffer.at_end and _above(limit, buffer.keys[-1]):
                limit = buffer.keys[-1].copy()
        taken = [edges for buffer in buffers if len(edges := buffer.take(limit))]
        if len(taken) == 1:
            yield taken[0]
            continue
        edges = np.concatenate(taken)
        starts = np.cumsum([0, *(len(some) for some in taken)], dtype=np.int64)
        del taken
        yield edges[_merged_order(np.ascontiguousarray(edges["hi_priority"]), starts)]


@kernel
def _above(first: UInt64s, second: UInt64s) -> bool:
    """Whether the first key of three numbers is greater than the second."""
    for column in range(3):
        if first[column] != second[column]:
            above: bool = first[column] > second[column]
            return above
    return False


@kernel
def _not_above(keys: UInt64s, limit: UInt64s) -> int:
    """How many of these ascending keys are not above the limit."""
    begin, end = 0, len(keys)
    while begin < end:
        middle = (begin + end) // 2
        if _above(keys[middle], limit):
            end = middle
        else:
            begin = middle + 1
    return begin


@kernel
def _merged_order(keys: UInt64s, starts: Int64s) -> Int64s:
    """int64[n]: the order that merges the runs keys[starts[i]:starts[i + 1]], each of them ascending."""
    order, other = np.arange(len(keys)), np.empty(len(keys), np.int64)
    edges = starts.copy()
    runs = len(edges) - 1
    while runs > 1:
        out = 0
        for run in range(0, runs, 2):
            i, i_end = edges[run], edges[run + 1]
            j, j_end = i_end, edges[min(run + 2, runs)]
            at = i
            while i < i_end and j < j_end:
                if _above(keys[order[i]], keys[order[j]]):
                    other[at] = order[j]
                    j += 1
                else:
                    other[at] = order[i]
                    i += 1
                at += 1
            while i < i_end:
                other[at] = order[i]
                i, at = i + 1, at + 1
            while j < j_end:
                other[at] = order[j]
                j, at = j + 1, at + 1
            edges[out] = edges[run]
            out += 1
        edges[out] = edges[runs]
        runs = out
        order, other = other, order
    return order


LOSERS_FILE = "losers.npy"

WINNERS_FILE = "winners.npy"

PLANTED_FILE = "planted.npy"

NEAR_LOSER = np.dtype(
    [
        ("split", "<i4"),
        ("row", "<i8"),
        ("bytes", "<i8"),
        ("kept", "<u8"),  # number of the document that it is booked on
        ("copies", "<i4"),  # documents with the very same text, this one included
    ]
)

_BOOKED = np.dtype([("number", "<u8"), ("kept", "<u8")])

_GAINED = np.dtype([("number", "<u8"), ("copies", "<i8")])

_BYTES_PER_NUMBER = 128  # in a range, at the worst: every document is removed

_MIN_RANGE = 16

_PENDING_ROWS = 1 << 17  # files are opened anew for so many records


def resolve(
    folder: Path,
    population: Population,
    edge_files: Sequence[Artifact],
    equal_files: Sequence[Artifact],
    memory_bytes: int,
) -> Resolved:
    """Write the four files into `folder`.

    `equal_files` hold LOSER_DTYPE rows of documents whose words another one has (split: the part; row: the
    row in the part).
    """
    documents = int(population.starts[-1])
    removed = np.zeros(-(-documents // 8), np.uint8)
    tally = Resolved()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        temporary = Path(name)
        rows = max(_MIN_RANGE, memory_bytes // _BYTES_PER_NUMBER)
        booked = _Ranges(temporary, "booked", _BOOKED, rows, documents)
        equals = _Ranges(temporary, "equal", _BOOKED, rows, documents)
        gained = _Ranges(temporary, "gained", _GAINED, rows, documents)
        tally.equal = _add_equal(population, equal_files, removed, equals)
        for edges in merge_edges(edge_files, memory_bytes // 2, temporary):
            tally.edges += len(edges)
            booked.write(_fall(edges, removed))
        _follow(booked, equals)
        with RunWriter(folder / OUTCOMES.file, OUTCOMES, memory_bytes=memory_bytes // 8) as decided:
            _write_losers(population, booked, gained, folder, decided, tally)
            _write_winners(population, removed, gained, folder, decided, tally)
    tally.sources = {source: tally.sources[source] for source in sorted(tally.sources, key=int)}
    return tally


@dataclass
class Resolved(PlainCounts):
    """What was decided: `losers`, their `bytes` and their exact `copies`.

    `equal` of the losers had the same words as another document, `kept_by_index` are documents of indexes
    that stand for one of the inputs. `groups` counts kept documents of inputs in the classes of GROUP_SIZES,
    `largest_group` is the most documents that one stands for, exact copies and itself included. `planted` are
    the planted copies that were removed; `sources` has documents compared, losers and their bytes by source,
    whose number is a string as in JSON.
    """

    edges: int = 0
    equal: int = 0
    losers: int = 0
    bytes: int = 0
    copies: int = 0
    kept_by_index: int = 0
    planted: int = 0
    largest_group: int = 0
    groups: list[int] = field(default_factory=lambda: [0] * (len(GROUP_SIZES) + 1))
    sources: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, documents: npt.NDArray[np.void], *, lost: bool) -> None:
        """Count rows of DOCUMENT by source: as compared, or as lost."""
        for source in np.unique(documents["source"]).tolist():
            own = documents["bytes"][documents["source"] == source]
            counts = self.sources.setdefault(str(source), {"documents": 0, "losers": 0, "bytes": 0})
            if lost:
                counts["losers"] += len(own)
                counts["bytes"] += int(own.sum())
            else:
                counts["documents"] += len(own)


class _Ranges:
    """Records on disk, divided by their `number` into ranges of equal length."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], rows: int, numbers: int) -> None:
        self._dtype = dtype
        self._rows = rows
        self._paths = [folder / f"{name}{at}.bin" for at in range(-(-numbers // rows))]
        self._pending: list[npt.NDArray[np.void]] = []
        self._pending_rows = 0
        self.ranges = [(begin, min(begin + rows, numbers)) for begin in range(0, numbers, rows)]

    def write(self, records: npt.NDArray[np.void]) -> None:
        """Append records, in any order."""
        assert records.dtype == self._dtype
        self._pending.append(records)
        self._pending_rows += len(records)
        if self._pending_rows >= _PENDING_ROWS:
            self._flush()

    def _flush(self) -> None:
        if not self._pending_rows:
            return
        records = np.concatenate(self._pending)
        self._pending, self._pending_rows = [], 0
        places = (records["number"] // np.uint64(self._rows)).astype(np.int64)
        order = np.argsort(places, kind="stable")
        cuts = np.flatnonzero(np.diff(places[order])) + 1
        for own in np.split(order, cuts):
            with self._paths[places[own[0]]].open("ab") as file:
                file.write(records[own].data)

    def read(self, at: int) -> Iterator[npt.NDArray[np.void]]:
        """The records of one range, some at a time."""
        self._flush()
        if self._paths[at].exists():
            table = Rows(Artifact(self._paths[at]), self._dtype, header=False)
            for start in range(0, len(table), CHUNK_ROWS):
                yield table.read(start, min(start + CHUNK_ROWS, len(table)))

    def read_all(self, at: int) -> npt.NDArray[np.void]:
        """The same at once: for records that have different numbers."""
        self._flush()
        if not self._paths[at].exists():
            return np.empty(0, self._dtype)
        return Rows(Artifact(self._paths[at]), self._dtype, header=False).read()


def _add_equal(population: Population, files: Sequence[Artifact], removed: UInt8s, equals: _Ranges) -> int:
    """Mark the documents that equal another, and file them under that; returns how many there are."""
    count = 0
    for file in files:
        table = Rows(file, LOSER_DTYPE)
        count += len(table)
        for start in range(0, len(table), CHUNK_ROWS):
            rows = table.read(start, min(start + CHUNK_ROWS, len(table)))
            records = np.empty(len(rows), _BOOKED)
            records["number"] = population.starts[rows["winner_split"]] + rows["winner_row"]
            records["kept"] = population.starts[rows["split"]] + rows["row"]  # until _follow turns it round
            _mark(records["kept"].copy(), removed)
            equals.write(records)
    return count


def _fall(edges: npt.NDArray[np.void], removed: UInt8s) -> npt.NDArray[np.void]:
    """The rule; returns who fell and on whom."""
    fallen = np.empty(len(edges), np.int64)
    count = _remove_losers(edges["hi"].copy(), edges["lo"].copy(), removed, fallen)
    fallen = fallen[:count]
    records = np.empty(count, _BOOKED)
    records["number"], records["kept"] = edges["lo"][fallen], edges["hi"][fallen]
    return records


@kernel
def _remove_losers(hi: UInt64s, lo: UInt64s, removed: UInt8s, fallen: Int64s) -> int:
    """Put the positions of edges that remove a document into `fallen`; returns how many."""
    count = 0
    for edge in range(len(hi)):
        winner, loser = int64(hi[edge]), int64(lo[edge])
        if not removed[winner >> 3] >> (winner & 7) & 1 and not removed[loser >> 3] >> (loser & 7) & 1:
            removed[loser >> 3] |= np.uint8(1 << (loser & 7))
            fallen[count] = edge
            count += 1
    return count


@kernel
def _mark(numbers: UInt64s, bits: UInt8s) -> None:
    for at in range(len(numbers)):
        number = int64(numbers[at])
        bits[number >> 3] |= np.uint8(1 << (number & 7))


@kernel
def _marked(begin: int, end: int, bits: UInt8s) -> Bools:
    """bool[end - begin]: the bits of these numbers."""
    found = np.empty(end - begin, np.bool_)
    for number in range(begin, end):
        found[number - begin] = bits[number >> 3] >> (number & 7) & 1
    return found


def _follow(booked: _Ranges, equals: _Ranges) -> None:
    """Book every document that equals another on whom that one is booked on, or on it."""
    for at, (begin, end) in enumerate(booked.ranges):
        kept = np.arange(begin, end, dtype=np.uint64)
        # What is written here into this range are equal documents: no other one equals them.
        for records in booked.read(at):
            kept[(records["number"] - np.uint64(begin)).astype(np.int64)] = records["kept"]
        for records in equals.read(at):
            turned = np.empty(len(records), _BOOKED)
            turned["number"] = records["kept"]
            turned["kept"] = kept[(records["number"] - np.uint64(begin)).astype(np.int64)]
            booked.write(turned)


def _write_losers(
    population: Population,
    booked: _Ranges,
    gained: _Ranges,
    folder: Path,
    decided: RunWriter,
    tally: Resolved,
) -> None:
    """losers.npy and planted.npy; tells each kept document's range what it gains."""
    indexed = np.uint64(population.indexed.start)
    with (
        RowsWriter(folder / LOSERS_FILE, NEAR_LOSER) as losers,
        RowsWriter(folder / PLANTED_FILE, NEAR_LOSER) as planted,
    ):
        for at in range(len(booked.ranges)):
            records = booked.read_all(at)
            records = records[np.argsort(records["number"])]
            for part, begin, documents in read_documents(population, records["number"]):
                rows = np.empty(len(documents), NEAR_LOSER)
                rows["split"], rows["kept"] = part, records["kept"][begin : begin + len(documents)]
                for name in ("row", "bytes", "copies"):
                    rows[name] = documents[name]
                if population.parts[part].kind == "planted":
                    planted.write(rows)
                    tally.planted += len(rows)
                elif population.parts[part].kind == "input":
                    losers.write(rows)
                    keys = document_keys(rows["split"], rows["row"])
                    decided.write(outcomes(keys, bytes=rows["bytes"]))
                    tally.losers += len(rows)
                    tally.bytes += int(rows["bytes"].sum())
                    tally.copies += int(rows["copies"].sum(dtype=np.int64))
                    tally.kept_by_index += int((rows["kept"] >= indexed).sum())
                    tally.add(documents, lost=True)
                    gains = np.empty(len(rows), _GAINED)
                    gains["number"], gains["copies"] = rows["kept"], rows["copies"]
                    gained.write(gains)


def _write_winners(
    population: Population,
    removed: UInt8s,
    gained: _Ranges,
    folder: Path,
    decided: RunWriter,
    tally: Resolved,
) -> None:
    """winners.npy, from what every document gains and its own copies."""
    with RowsWriter(folder / WINNERS_FILE, WINNER_DTYPE) as winners:
        for at, (start, stop) in enumerate(gained.ranges):
            gains = np.zeros(stop - start, np.int64)
            for records in gained.read(at):
                np.add.at(gains, (records["number"] - np.uint64(start)).astype(np.int64), records["copies"])
            kept = ~_marked(start, stop, removed)
            for part, first, documents in _documents_between(population, start, stop):
                here = slice(first - start, first - start + len(documents))
                kind = population.parts[part].kind
                copies = gains[here] + (documents["copies"] if kind == "input" else 1)
                tally.largest_group = max(tally.largest_group, int(copies[kept[here]].max(initial=0)))
                if kind == "input":
                    tally.add(documents, lost=False)
                    rows = _winners_of(part, documents, copies, kept[here], tally)
                    winners.write(rows)
                    keys = document_keys(rows["split"], rows["row"])
                    decided.write(outcomes(keys, copies=rows["copies"]))


def _documents_between(
    population: Population, start: int, stop: int
) -> Iterator[tuple[int, int, npt.NDArray[np.void]]]:
    """(part, number of the first, DOCUMENT rows) of all these numbers, some at a time."""
    for first in range(start, stop, CHUNK_ROWS):
        numbers = np.arange(first, min(first + CHUNK_ROWS, stop), dtype=np.uint64)
        for part, place, documents in read_documents(population, numbers):
            yield part, first + place, documents


def _winners_of(
    part: int,
    documents: npt.NDArray[np.void],
    copies: npt.NDArray[np.int64],
    kept: npt.NDArray[np.bool_],
    tally: Resolved,
) -> npt.NDArray[np.void]:
    classes = np.bincount(np.searchsorted(GROUP_SIZES, copies[kept]), minlength=len(tally.groups))
    tally.groups = [before + new for before, new in zip(tally.groups, classes.tolist(), strict=True)]
    several = np.flatnonzero(kept & (copies > 1))
    assert int(copies.max(initial=0)) <= np.iinfo(np.int32).max
    rows = np.empty(len(several), WINNER_DTYPE)
    rows["split"], rows["row"], rows["copies"] = part, documents["row"][several], copies[several]
    return rows
