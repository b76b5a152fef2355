"""Locality-sensitive hashing: band keys on disk, and the choice of bands and rows.

Two documents are candidates if they share the key of a band (a 64-bit hash of some rows of the signature).
Band keys are written in sorted runs while signatures are made, and read one range of keys at a time.
A part's `bands.bin` holds one BAND entry for each document and band, in runs sorted by (key, document);
`bands.npy` says where runs begin and end, in entries. The key space is cut into partitions of equal width by
the keys' upper 32 bits, so all entries of a key meet in one partition, and every run holds a partition's
entries in one piece: two binary searches find it, and nothing else of the file is read.

A run is sorted in memory: `RUN_ENTRIES` entries at 36 bytes each are 72 MiB. An entry takes 12 bytes on disk.

Two documents of Jaccard similarity s agree in one MinHash value with probability s, in all `rows` values of
a band with s^rows, and in at least one of `bands` bands with 1 - (1 - s^rows)^bands: the S-curve (Leskovec,
Rajaraman, Ullman: Mining of Massive Datasets, section 3.4). `optimal_parameters` chooses as datasketch's
MinHashLSH does: the least weighted area of false positives (below the threshold) and false negatives (above
it). The areas are of polynomials, so Gauss-Legendre quadrature has them to rounding error without SciPy.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from shardkit.errors import BuildError
from shardkit.writers.dedup.population import BAND, BAND_RUNS_FILE, BANDS_FILE
from shardkit.writers.execution.artifacts import Artifact, read_into
from shardkit.writers.kernels.numba_support import UInt32s, UInt64s, int64, kernel

__all__ = [
    "BandWriter",
    "argsort_keys",
    "curve",
    "find_slices",
    "key_range",
    "optimal_parameters",
    "partitions_for",
    "probability",
    "read_slices",
    "render_curve",
]

RUN_DOCUMENTS = 1 << 18

RUN_ENTRIES = 1 << 21  # fewer documents where there are more than eight bands

MAX_PARTITIONS = 1 << 16

PEAK_BYTES_PER_ENTRY = 48  # of a partition in `shardkit.writers.dedup.candidates`, measured

_CHUNK_ENTRIES = 1 << 16

_KEY = np.dtype("<u8")


class BandWriter:
    """Collects the band keys of one part and writes them in runs; what is left when the block ends, too.

    A block that ends with an error leaves files that do not match: the folder is to be thrown away.
    """

    def __init__(self, folder: Path, *, run_documents: int | None = None) -> None:
        self._folder = folder
        self._most = run_documents
        self._keys: npt.NDArray[np.uint64] | None = None  # [documents of a run, bands]
        self._first = 0
        self._documents = 0
        self._edges = [0]
        self._file: BinaryIO

    def __enter__(self) -> Self:
        self._file = (self._folder / BANDS_FILE).open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is None:
                self._write_run()
                np.save(self._folder / BAND_RUNS_FILE, np.array(self._edges, np.int64), allow_pickle=False)

    def write(self, keys: npt.NDArray[np.uint64], first_document: int) -> None:
        """Take uint64[n, bands], the keys of documents `first_document` and following, which come in order.

        Where runs are cut depends on the documents alone, not on how they are handed over.
        """
        assert first_document == self._first + self._documents, "documents come one after the other"
        if not keys.size:
            self._first += len(keys)  # documents without bands, if any
            return
        if self._keys is None:
            documents = self._most or max(1, min(RUN_DOCUMENTS, RUN_ENTRIES // keys.shape[1]))
            self._keys = np.empty((documents, keys.shape[1]), np.uint64)
        while len(keys):
            taken = min(len(keys), len(self._keys) - self._documents)
            self._keys[self._documents : self._documents + taken] = keys[:taken]
            self._documents += taken
            keys = keys[taken:]
            if self._documents == len(self._keys):
                self._write_run()

    def _write_run(self) -> None:
        if self._keys is None or not self._documents:
            return
        bands = self._keys.shape[1]
        keys, order = argsort_keys(self._keys[: self._documents].reshape(-1))
        chunk = np.empty(_CHUNK_ENTRIES, BAND)
        for start in range(0, len(keys), _CHUNK_ENTRIES):
            rows = chunk[: min(_CHUNK_ENTRIES, len(keys) - start)]
            rows["key"] = keys[start : start + len(rows)]
            rows["document"] = order[start : start + len(rows)] // np.uint32(bands) + np.uint32(self._first)
            self._file.write(rows.data)
        self._edges.append(self._edges[-1] + len(keys))
        self._first += self._documents
        self._documents = 0


def argsort_keys(
    keys: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    """The keys sorted, and the stable order that sorts them: 4 times as fast as numpy's stable sort."""
    assert len(keys) < 1 << 32
    order = np.arange(len(keys), dtype=np.uint32)
    sorted_keys, sorted_order = _radix_sort(keys, order, np.empty_like(keys), np.empty_like(order))
    return sorted_keys, sorted_order


@kernel
def _radix_sort(
    keys: UInt64s, order: UInt32s, to_keys: UInt64s, to_order: UInt32s
) -> tuple[UInt64s, UInt32s]:
    """Eight passes over bytes, lowest first; `keys` is left as it was, the others are work space."""
    counts = np.zeros((8, 256), np.int64)
    for i in range(len(keys)):
        for byte in range(8):
            counts[byte, int64(keys[i] >> np.uint64(8 * byte) & np.uint64(255))] += 1
    source_keys, source_order = keys, order
    spare_keys, spare_order = np.empty_like(keys), np.empty_like(order)
    for byte in range(8):
        places = np.cumsum(counts[byte]) - counts[byte]
        for i in range(len(keys)):
            key = source_keys[i]
            digit = int64(key >> np.uint64(8 * byte) & np.uint64(255))
            place = places[digit]
            places[digit] = place + 1
            to_keys[place] = key
            to_order[place] = source_order[i]
        source_keys, source_order = to_keys, to_order
        to_keys, spare_keys = spare_keys, to_keys
        to_order, spare_order = spare_order, to_order
    return source_keys, source_order


def partitions_for(entries: int, memory_bytes: int) -> int:
    """Partitions of this many entries of all parts that keep one within half of a memory budget."""
    return min(max(1, -(-entries * PEAK_BYTES_PER_ENTRY * 2 // memory_bytes)), MAX_PARTITIONS)


def key_range(partition: int, partitions: int) -> tuple[int, int]:
    """The keys of a partition: from the first to before the second (at most 2^64).

    The partition of a key is its upper 32 bits scaled to [0, partitions), as in
    `shardkit.writers.stages.tokenize`.
    """
    if not 0 <= partition < partitions <= MAX_PARTITIONS:
        raise ValueError(f"partition {partition} of {partitions}: at most {MAX_PARTITIONS:,} partitions")
    low, high = (-(-(p << 32) // partitions) << 32 for p in (partition, partition + 1))
    return low, high


def find_slices(
    folder: Artifact, low: int, high: int, *, within: Sequence[tuple[int, int]] | None = None
) -> list[tuple[int, int]]:
    """(start, stop) in entries of bands.bin, one a run that has keys in [low, high).

    `within`: slices of a range of keys that contains this one. BuildError where the files are not whole.
    """
    entries = folder / BANDS_FILE
    if within is None:
        edges = _read_edges(folder / BAND_RUNS_FILE)
        size = entries.size()
        if size != edges[-1] * BAND.itemsize:
            raise BuildError(
                f"{entries}: {size:,} bytes, {edges[-1]:,} entries expected; remove the work folder and "
                f"build again"
            )
        within = list(pairwise(edges))
    slices: list[tuple[int, int]] = []
    if not within:
        return slices
    with entries.open() as file:

        def key_of(entry: int) -> int:
            file.seek(entry * BAND.itemsize)
            return int.from_bytes(file.read(_KEY.itemsize), "little")

        for begin, end in within:
            start = bisect_left(range(end), low, begin, end, key=key_of)
            stop = bisect_left(range(end), high, start, end, key=key_of)
            if start < stop:
                slices.append((start, stop))
    return slices


def _read_edges(runs: Artifact) -> list[int]:
    edges = np.load(io.BytesIO(runs.read_bytes()), allow_pickle=False)
    is_list = edges.dtype == np.int64 and edges.ndim == 1 and len(edges) > 0
    if not is_list or edges[0] != 0 or (edges[1:] < edges[:-1]).any():
        raise BuildError(f"{runs}: not the ends of runs; remove the work folder and build again")
    found: list[int] = edges.tolist()
    return found


def read_slices(folder: Artifact, slices: Sequence[tuple[int, int]]) -> Iterator[npt.NDArray[np.void]]:
    """BAND entries of the slices, some at a time; each is overwritten by the next."""
    entries = folder / BANDS_FILE
    buffer = np.empty(_CHUNK_ENTRIES, BAND)
    with entries.open() as file:
        for begin, stop in slices:
            file.seek(begin * BAND.itemsize)
            for start in range(begin, stop, _CHUNK_ENTRIES):
                rows = buffer[: min(_CHUNK_ENTRIES, stop - start)]
                if read_into(file, rows.data.cast("B")) != rows.nbytes:
                    raise BuildError(f"{entries}: ends early; remove the work folder and build again")
                yield rows


Floats = npt.NDArray[np.float64]

CURVE_START = 0.5

CURVE_STEP = 0.025  # 21 lines: with the heading, one screen of 24

BAR_WIDTH = 40

SAME = 1 + 1e-12  # a ratio of areas that is due to rounding: there are ties, such as 1 x 1 and 1 x 2 at 0.5


def probability(similarity: float, bands: int, rows: int) -> float:
    """That a pair of this Jaccard similarity shares at least one band."""
    return float(1.0 - (1.0 - similarity**rows) ** bands)


def curve(bands: int, rows: int) -> list[tuple[float, float]]:
    """(similarity, probability) from 0.5 to 1.0."""
    steps = round((1.0 - CURVE_START) / CURVE_STEP)
    similarities = [round(CURVE_START + CURVE_STEP * step, 6) for step in range(steps + 1)]
    return [(similarity, probability(similarity, bands, rows)) for similarity in similarities]


def render_curve(bands: int, rows: int, *, threshold: float | None = None) -> str:
    """The S-curve as a table with bars, for a terminal; the line of the threshold is marked."""
    points = curve(bands, rows)
    if threshold is not None and threshold not in dict(points):
        points = sorted([*points, (threshold, probability(threshold, bands, rows))])
    lines = [
        f"{bands} bands x {rows} rows: pairs that become candidates, by Jaccard similarity",
        "similarity  candidates",
    ]
    for similarity, found in points:
        bar = "#" * round(found * BAR_WIDTH)
        mark = "  < threshold" if similarity == threshold else ""
        lines.append(f"{similarity:10.3f}  {100 * found:8.2f} %  {bar}{mark}")
    return "\n".join(lines)


def optimal_parameters(
    threshold: float,
    permutations: int,
    false_positive_weight: float = 0.5,
    false_negative_weight: float = 0.5,
) -> tuple[int, int]:
    """(bands, rows) with bands x rows <= permutations, as datasketch's MinHashLSH would choose.

    The first of equals counts, in ascending order of bands, then rows. ValueError: a threshold outside
    0..1, no permutation, or a negative weight.
    """
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold {threshold} is not between 0 and 1")
    if permutations < 1:
        raise ValueError(f"{permutations} permutations: at least one is needed")
    if min(false_positive_weight, false_negative_weight) < 0:
        raise ValueError(f"weights {false_positive_weight} and {false_negative_weight}: one is below 0")
    best, least = (0, 0), float("inf")
    for bands in range(1, permutations + 1):
        positive, negative = _areas(threshold, bands, permutations)
        errors = positive * false_positive_weight + negative * false_negative_weight
        rows = int(np.argmax(errors <= errors.min() * SAME))
        if errors[rows] * SAME < least:
            best, least = (bands, rows + 1), float(errors[rows])
    return best


def _areas(threshold: float, bands: int, permutations: int) -> tuple[Floats, Floats]:
    """The areas of false positives and of false negatives for each number of rows, 1 first."""
    nodes, weights = _quadrature(permutations)
    rows = np.arange(1, permutations // bands + 1)[:, None]

    def missed(start: float, stop: float) -> Floats:
        points = start + (stop - start) * nodes
        values: Floats = (1.0 - points[None, :] ** rows) ** bands
        return (stop - start) * (values @ weights)

    return threshold - missed(0.0, threshold), missed(threshold, 1.0)


@cache
def _quadrature(permutations: int) -> tuple[Floats, Floats]:
    """Gauss-Legendre on 0..1: n points are exact up to degree 2n - 1, and bands x rows is the degree."""
    nodes, weights = np.polynomial.legendre.leggauss(permutations // 2 + 1)
    return (nodes + 1.0) / 2.0, weights / 2.0
