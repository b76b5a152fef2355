"""Summarizes the tables of removed documents in one pass: values by rule, and clusters of duplicates.

The passes run in the background, one for each table. Only the columns that are counted are read, so that a
pass over 10^7 documents takes some seconds, and its result a few megabytes. Files of dropped documents are
counted in an order that is spread over the table, so what is counted `so_far` is a sample of all, which pages
show meanwhile. The bins of values are float32 numbers truncated to 7 bits of mantissa: 128 bins per power of
two, with exact counts, and without knowing the range in advance. Texts are read from at most `_TEXT_FILES`
files, evenly spaced.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import itemgetter
from threading import Lock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.card import Histogram
from shardkit.datasets.provenance.folder import ParquetFolder
from shardkit.tools.explore.scan import Place

_TEXT_FILES = 256
_TEXTS_OF_RULE = 100  # maximum texts per rule in each list: nearest to its bound, farthest from it, random
_BOUNDS = 8  # maximum number of bounds of a rule that are shown
_CLUSTERS = 100  # maximum number of clusters in each list: the largest, and a random sample
_MANTISSA_BITS_CUT = 16

_Floats = npt.NDArray[np.float64]
_Ranked = list[tuple[float, Place]]


@dataclass(slots=True)
class Values:
    """Values that a rule compared, as counts by bin and by label."""

    documents: int = 0
    low: float = np.inf
    high: float = -np.inf
    bins: Counter[int] = field(default_factory=Counter)
    labels: Counter[str] = field(default_factory=Counter)

    def add(self, values: _Floats) -> None:
        """Count values, of which NaN and infinite ones are only documents."""
        self.documents += len(values)
        known = values[np.isfinite(values)]
        if len(known):
            self.low, self.high = min(self.low, float(known.min())), max(self.high, float(known.max()))
            keys, counts = np.unique(_bin_key(known), return_counts=True)
            self.bins.update(dict(zip(keys.tolist(), counts.tolist(), strict=True)))

    def values(self) -> tuple[_Floats, npt.NDArray[np.int64]]:
        """Return two arrays about the nonempty bins, ascending: their values nearest to 0, their counts."""
        keys = np.array(sorted(self.bins), np.int64)
        counts = np.array([self.bins[key] for key in keys.tolist()], np.int64)
        return _bin_value(keys), counts


@dataclass(slots=True)
class RuleValues(Values):
    """Values of the documents that a rule dropped, its bounds, and places of lines that have a text.

    A rule has several bounds if they differ by language; the lowest `_BOUNDS` are known. The places are
    (rank, place), lowest rank first: `near` and `far` from the bound, and `drawn` at random.
    """

    bounds: list[float] = field(default_factory=list)
    near: _Ranked = field(default_factory=list)
    far: _Ranked = field(default_factory=list)
    drawn: _Ranked = field(default_factory=list)

    def add_bounds(self, bounds: _Floats) -> None:
        """Add the bounds of some documents, of which NaN is none."""
        known = np.unique(bounds[np.isfinite(bounds)]).tolist()
        self.bounds = sorted({*self.bounds, *known})[:_BOUNDS]

    def add_labels(self, labels: pa.ChunkedArray) -> None:
        """Count the labels of some documents."""
        for entry in labels.drop_null().value_counts().to_pylist():
            self.labels[entry["values"]] += entry["counts"]

    def add_places(
        self, distances: _Floats, ids: list[bytes], group: Place, lines: npt.NDArray[np.int64]
    ) -> None:
        """Rank documents with a text: their distances to the bound, ids, and lines in a row group."""
        known = np.isfinite(distances)
        self.near = _lowest(self.near, distances[known], group, lines[known])
        self.far = _lowest(self.far, -distances[known], group, lines[known])
        self.drawn = _lowest(self.drawn, np.array([_uniform(one) for one in ids]), group, lines)


def _lowest(held: _Ranked, ranks: _Floats, group: Place, lines: npt.NDArray[np.int64]) -> _Ranked:
    """Return the `_TEXTS_OF_RULE` places with the lowest ranks: of those held so far, and of these lines."""
    if len(held) == _TEXTS_OF_RULE:  # of equal ranks, those that were counted first stay
        chosen = np.flatnonzero(ranks < held[-1][0])
    else:
        chosen = np.arange(len(ranks))
    chosen = chosen[np.argsort(ranks[chosen], kind="stable")[:_TEXTS_OF_RULE]]
    new = [
        (rank, Place(group.file, group.group, line))
        for rank, line in zip(ranks[chosen].tolist(), lines[chosen].tolist(), strict=True)
    ]
    return sorted([*held, *new], key=itemgetter(0))[:_TEXTS_OF_RULE] if new else held


@dataclass(frozen=True, order=True, slots=True)
class ClusterAt:
    """The duplicates of one kept document: the place of their first line, and their number (`size`)."""

    at: Place
    size: int
    kept: bytes
    has_text: bool


@dataclass(slots=True)
class Clusters:
    """Statistics of clusters of duplicates: sizes, the largest, and a sample that prefers stored texts."""

    count: int = 0
    documents: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    sizes: Histogram = field(default_factory=Histogram)
    largest: list[ClusterAt] = field(default_factory=list)
    drawn: list[ClusterAt] = field(default_factory=list)


class Rules:
    """Counts the values of rules in the table of dropped documents; `by_name` has them at the end."""

    def __init__(self, dropped: ParquetFolder) -> None:
        self._dropped = dropped
        self._lock = Lock()
        self.by_name: dict[str, RuleValues] = {}

    def count(self, report: Callable[[float], None]) -> Rules:
        """Count the table and return self; `report` is called with the share of work done."""
        files = len(self._dropped.names)
        groups = (
            (file, group)
            for file in spread_order(files)
            for group in range(self._dropped.footer(file)[0].num_row_groups)
        )
        read = dict.fromkeys(range(files), 0)
        with closing(self._dropped.run(self._read, groups)) as tables:
            for (file, group), table in tables:
                with self._lock:
                    self._add(table, Place(file, group))
                read[file] = 1
                report(sum(read.values()) / files)
        return self

    def so_far(self, rule: str) -> RuleValues:
        """Return a copy of what was counted of a rule so far."""
        with self._lock:
            return deepcopy(self.by_name.get(rule, RuleValues()))

    def _read(self, job: tuple[int, int]) -> tuple[tuple[int, int], pa.Table]:
        file, group = job
        with_texts = file % -(-len(self._dropped.names) // _TEXT_FILES) == 0
        columns = ["rule", "value", "label", "bound", *(["text", "document_id"] if with_texts else [])]
        with self._dropped.open(file) as opened:
            table = opened.read_row_group(group, columns=columns, use_threads=False)
        number = table.column_names.index("rule")
        table = table.set_column(number, "rule", table.column("rule").combine_chunks().dictionary_encode())
        if with_texts:
            valid = table.column("text").is_valid()
            table = table.drop_columns(["text"]).append_column("has_text", valid)
        return job, table

    def _add(self, table: pa.Table, group: Place) -> None:
        names = table.column("rule").combine_chunks()
        codes = names.indices.to_numpy(zero_copy_only=False)
        values, bounds = (table.column(name).to_numpy().astype(np.float64) for name in ("value", "bound"))
        has_text = np.zeros(len(codes), np.bool_)
        if "has_text" in table.column_names:
            has_text = table.column("has_text").to_numpy()
        has_labels = table.column("label").null_count < len(codes)
        for code, name in enumerate(names.dictionary.to_pylist()):
            lines = np.flatnonzero(codes == code)
            rule = self.by_name.setdefault(name, RuleValues())
            rule.add(values[lines])
            rule.add_bounds(bounds[lines])
            if has_labels:
                rule.add_labels(table.column("label").take(pa.array(lines)))
            shown = lines[has_text[lines]]
            if len(shown):
                ids = table.column("document_id").take(pa.array(shown)).to_pylist()
                rule.add_places(np.abs(values[shown] - bounds[shown]), ids, group, shown)


def spread_order(count: int) -> list[int]:
    """Return the numbers below `count` in an order whose beginnings are evenly spread: 0, half, quarters."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


class ClusterSummary:
    """Counts the clusters in the table of duplicates; `clusters` has them at the end."""

    def __init__(self, duplicates: ParquetFolder) -> None:
        self._duplicates = duplicates
        self._runs = _ClusterRuns()
        self._lock = Lock()
        self.reasons: Counter[str] = Counter()

    def count(self, report: Callable[[float], None]) -> ClusterSummary:
        """Count the table and return self; `report` is called with the share of work done."""
        groups = list(self._duplicates.groups())
        with closing(self._duplicates.run(self._read, iter(groups))) as tables:
            for number, ((file, group), table) in enumerate(tables):
                with self._lock:
                    self._add(table, Place(file, group))
                report((number + 1) / len(groups))
        with self._lock:
            self._runs.finish()
        return self

    def so_far(self) -> Clusters:
        """Return what was counted so far. Ids are hashes, so the first clusters are a sample of all."""
        with self._lock:
            return replace(self._runs.found(), reasons=self.reasons.copy())

    def _read(self, job: tuple[int, int]) -> tuple[tuple[int, int], pa.Table]:
        file, group = job
        with_texts = file % -(-len(self._duplicates.names) // _TEXT_FILES) == 0
        columns = ["kept_document_id", "reason", *(["text", "kept_text"] if with_texts else [])]
        with self._duplicates.open(file) as opened:
            table = opened.read_row_group(group, columns=columns, use_threads=False)
        has_text = pa.array(np.zeros(table.num_rows, np.bool_))
        if with_texts:
            has_text = pc.and_(*(table.column(name).is_valid() for name in ("text", "kept_text")))
        return job, table.select(["kept_document_id", "reason"]).append_column("has_text", has_text)

    def _add(self, table: pa.Table, group: Place) -> None:
        for entry in table.column("reason").value_counts().to_pylist():
            self.reasons[entry["values"]] += entry["counts"]
        self._runs.add(table.column("kept_document_id"), table.column("has_text").to_numpy(), group)


class _ClusterRuns:
    """Finds clusters of duplicates: consecutive lines, which may continue in the next row group."""

    def __init__(self) -> None:
        self._found = Clusters()
        self._open: ClusterAt | None = None
        self._drawn: list[tuple[float, ClusterAt]] = []
        self._largest: list[tuple[int, ClusterAt]] = []

    def add(self, kept: pa.ChunkedArray, has_text: npt.NDArray[np.bool_], group: Place) -> None:
        """Add a row group: its column `kept_document_id` (may be null) and which of its lines have texts."""
        valid = np.flatnonzero(kept.is_valid().to_numpy())
        if not len(valid):
            return
        data = kept.drop_null().combine_chunks()
        ids = np.frombuffer(data.buffers()[1], "V16")[data.offset : data.offset + len(data)]
        halves = ids.view("<u8").reshape(-1, 2)
        is_first = np.ones(len(ids), np.bool_)
        is_first[1:] = (halves[1:] != halves[:-1]).any(axis=1)
        starts = np.flatnonzero(is_first)
        sizes = np.diff(starts, append=len(ids))
        texts = np.logical_or.reduceat(has_text[valid], starts)
        runs = _Runs(sizes, valid[starts], ids[starts], texts, group)
        if self._open is not None and self._open.kept == runs.kept[0].tobytes():
            last, size = self._open, self._open.size + int(sizes[0])
            self._open = ClusterAt(last.at, size, last.kept, last.has_text or bool(texts[0]))
            runs = runs.part(1, None)
        if len(runs.sizes):
            self._close_open()
            self._close(runs.part(0, -1))
            self._open = runs.cluster(len(runs.sizes) - 1)

    def finish(self) -> None:
        """End the last cluster."""
        self._close_open()
        self._open = None

    def found(self) -> Clusters:
        """Return the clusters that have ended so far: counts, the largest ones, and a random sample."""
        return replace(
            self._found,
            sizes=deepcopy(self._found.sizes),
            largest=[each for _, each in self._largest],
            drawn=[each for _, each in self._drawn],
        )

    def _close_open(self) -> None:
        if (last := self._open) is not None:
            ids = np.frombuffer(last.kept, "V16")
            group = Place(last.at.file, last.at.group)
            size, line, has_text = np.array([last.size]), np.array([last.at.line]), np.array([last.has_text])
            self._close(_Runs(size, line, ids, has_text, group))

    def _close(self, runs: _Runs) -> None:
        found = self._found
        found.count, found.documents = found.count + len(runs.sizes), found.documents + int(runs.sizes.sum())
        found.sizes.add(Histogram.of(runs.sizes))
        ranks = runs.kept.view("<u8").reshape(-1, 2)[:, 0] / 2**64 + ~runs.has_text
        for number in np.argsort(-runs.sizes, kind="stable")[:_CLUSTERS].tolist():
            each = runs.cluster(number)
            self._largest.append((-each.size, each))
        for number in np.argsort(ranks)[:_CLUSTERS].tolist():
            each = runs.cluster(number)
            self._drawn.append((float(ranks[number]), each))
        self._largest = heapq.nsmallest(_CLUSTERS, self._largest)
        self._drawn = heapq.nsmallest(_CLUSTERS, self._drawn)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Clusters in a row group, as arrays: size, first line, kept document (V16), whether a line has texts."""

    sizes: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]
    kept: npt.NDArray[np.void]
    has_text: npt.NDArray[np.bool_]
    group: Place

    def part(self, first: int, end: int | None) -> _Runs:
        some = slice(first, end)
        return _Runs(self.sizes[some], self.lines[some], self.kept[some], self.has_text[some], self.group)

    def cluster(self, number: int) -> ClusterAt:
        at = Place(self.group.file, self.group.group, int(self.lines[number]))
        return ClusterAt(
            at, int(self.sizes[number]), self.kept[number].tobytes(), bool(self.has_text[number])
        )


def _bin_key(values: _Floats) -> npt.NDArray[np.int64]:
    """Return the bin number of each value; bin numbers have the values' order and sign."""
    bits = np.abs(values).astype(np.float32).view(np.int32).astype(np.int64) >> _MANTISSA_BITS_CUT
    keys: npt.NDArray[np.int64] = np.where(values < 0, -bits - 1, bits)
    return keys


def _bin_value(keys: npt.NDArray[np.int64]) -> _Floats:
    """Return, for each bin number, the bin's value that is nearest to 0."""
    bits = np.where(keys < 0, -keys - 1, keys) << _MANTISSA_BITS_CUT
    magnitude = bits.astype(np.int32).view(np.float32).astype(np.float64)
    values: _Floats = np.where(keys < 0, -magnitude, magnitude)
    return values


def _uniform(document: bytes) -> float:
    """Return a reproducible random number in [0, 1) for a document id; ids are hashes."""
    return int.from_bytes(document[:8], "little") / 2**64
