"""Summarizes the tables of removed documents in one pass: values by rule, and clusters of duplicates.

The pass runs in the background when the first page needs it. Only the columns that are counted are read, so
that a pass over 10^8 documents takes tens of seconds, and its result a few megabytes. The bins of values are
float32 numbers truncated to 7 bits of mantissa: 128 bins per power of two, with exact counts, and without
knowing the range in advance. Texts are read from at most `_TEXT_FILES` files, evenly spaced.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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


class Summary:
    """Counts the values of rules and the clusters of duplicates in the tables of removed documents."""

    def __init__(self, dropped: ParquetFolder, duplicates: ParquetFolder) -> None:
        self._dropped, self._duplicates = dropped, duplicates
        self.rules: dict[str, RuleValues] = {}
        self.clusters = Clusters()

    def count(self, report: Callable[[float], None]) -> Summary:
        """Count both tables and return self; `report` is called with the share of work done."""
        files = len(self._dropped.names) + len(self._duplicates.names)
        for file in range(len(self._dropped.names)):
            self._count_dropped(file)
            report((file + 1) / files)
        runs = _ClusterRuns(self.clusters)
        for file in range(len(self._duplicates.names)):
            self._count_duplicates(file, runs)
            report((len(self._dropped.names) + file + 1) / files)
        runs.finish()
        return self

    def _count_dropped(self, file: int) -> None:
        footer, _ = self._dropped.footer(file)
        with_texts = file % -(-len(self._dropped.names) // _TEXT_FILES) == 0
        for group in range(footer.num_row_groups):
            columns = ["rule", "value", "label", "bound", *(["text", "document_id"] if with_texts else [])]
            with self._dropped.open(file) as opened:
                table = opened.read_row_group(group, columns=columns, use_threads=False)
            names = table.column("rule").combine_chunks().dictionary_encode()
            codes = names.indices.to_numpy(zero_copy_only=False)
            for code, name in enumerate(names.dictionary.to_pylist()):
                lines = np.flatnonzero(codes == code)
                rule = self.rules.setdefault(name, RuleValues())
                _count_rule(rule, table.take(pa.array(lines)), lines, Place(file, group))

    def _count_duplicates(self, file: int, runs: _ClusterRuns) -> None:
        footer, _ = self._duplicates.footer(file)
        with_texts = file % -(-len(self._duplicates.names) // _TEXT_FILES) == 0
        for group in range(footer.num_row_groups):
            with self._duplicates.open(file) as opened:
                columns = ["kept_document_id", "reason", *(["text", "kept_text"] if with_texts else [])]
                table = opened.read_row_group(group, columns=columns, use_threads=False)
            reasons = table.column("reason").value_counts()
            for entry in reasons.to_pylist():
                self.clusters.reasons[entry["values"]] += entry["counts"]
            has_text = np.zeros(table.num_rows, np.bool_)
            if with_texts:
                has_text = np.logical_and(*(table.column(name).is_valid() for name in ("text", "kept_text")))
            runs.add(table.column("kept_document_id"), has_text, Place(file, group))


def _count_rule(rule: RuleValues, table: pa.Table, lines: npt.NDArray[np.int64], group: Place) -> None:
    values = table.column("value").to_numpy().astype(np.float64)
    bounds = table.column("bound").to_numpy().astype(np.float64)
    rule.add(values)
    rule.bounds = sorted({*rule.bounds, *np.unique(bounds[np.isfinite(bounds)]).tolist()})[:_BOUNDS]
    for entry in table.column("label").drop_null().value_counts().to_pylist():
        rule.labels[entry["values"]] += entry["counts"]
    if "text" not in table.column_names:
        return
    has_text = np.flatnonzero(table.column("text").is_valid().to_numpy())
    ids = table.column("document_id").take(pa.array(has_text)).to_pylist()
    places = [Place(group.file, group.group, line) for line in lines[has_text].tolist()]
    distances = np.abs(values[has_text] - bounds[has_text]).tolist()
    ranked = [(d, place) for d, place in zip(distances, places, strict=True) if np.isfinite(d)]
    rule.near = heapq.nsmallest(_TEXTS_OF_RULE, [*rule.near, *ranked])
    rule.far = heapq.nsmallest(_TEXTS_OF_RULE, [*rule.far, *((-d, place) for d, place in ranked)])
    drawn = [(_uniform(one), place) for one, place in zip(ids, places, strict=True)]
    rule.drawn = heapq.nsmallest(_TEXTS_OF_RULE, [*rule.drawn, *drawn])


class _ClusterRuns:
    """Finds clusters of duplicates: consecutive lines, which may continue in the next row group."""

    def __init__(self, found: Clusters) -> None:
        self._found = found
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
        """End the last cluster, and store the largest clusters and the random sample in the results."""
        self._close_open()
        self._found.largest = [each for _, each in self._largest]
        self._found.drawn = [each for _, each in self._drawn]

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
