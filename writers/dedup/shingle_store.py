"""The n-grams of the documents that occur in candidate pairs: sorted sets of 64-bit hashes.

One task per part sends its documents to the blocks that verify their pairs (blocks.py), with the fields that
verifying and resolving need:

    texts.run     TEXTS: each document in a pair, once for each block that has such a pair; key: the block

The exchange moves texts, which become sets where they are compared; moving sets would cost more. On one
machine texts are not compressed, since compressing would take longer than the rest of verification; through a
store they are compressed. For an index's documents only the sets are known, and these are moved unchanged. A
task reads only its own range of the places. It holds a batch of texts, and the blocks of each document. The
texts of a block are in the order of their numbers.

An index of other documents stores sets in a folder, in ascending order of their numbers:

    sets.npy      SET, one row per document: where its hashes are and how many n-grams it has
    shingles.bin  uint64: each document's distinct hashes, ascending, one document after the other

An index may store only a sketch of each document (`smallest=k`): the k smallest hashes of the set. Then
nothing is known about hashes above the largest stored one.

The writer holds one batch; the reader holds the requested sets, some megabytes of buffers, and the number in
every 4,096th row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from shardkit.errors import BuildError
from shardkit.kernels.numba_support import Int64s, UInt64s, kernel
from shardkit.kernels.text_arrays import copy_texts, text_bytes, text_offsets
from shardkit.writers.dedup.blocks import PLACES, places_of
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, Part, priority
from shardkit.writers.dedup.tables import Rows, RowsWriter
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table
from shardkit.writers.exchange.sorted_runs import Batch, payload_ends
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import MemoryBytes
from shardkit.writers.execution.stage import Stage
from shardkit.writers.kernels.shingles import NgramUnits, shingle_batch
from shardkit.writers.kernels.sorting import distinct_hashes

SETS_FILE = "sets.npy"
SHINGLES_FILE = "shingles.bin"
SET = np.dtype(
    [
        ("number", "<u8"),
        ("start", "<i8"),  # index of the document's first hash in shingles.bin
        ("stored", "<i4"),
        ("distinct", "<i4"),  # distinct n-grams in the whole document; a sketch stores fewer
        ("total", "<i8"),  # n-grams with repetitions
    ]
)
_STORED = np.dtype(
    [
        ("key", "<u8"),
        ("size", "<i8"),  # bytes of the payload: hashes, or the text, compressed if `size` < `text`
        ("number", "<u8"),
        ("text", "<i8"),  # bytes of UTF-8 text; -1: the payload is hashes
        ("total", "<i8"),  # n-grams with repetitions; 0 if the payload is a text
        ("distinct", "<i4"),  # distinct n-grams; 0 if the payload is a text
        ("priority", "<u8", (3,)),  # population.priority
    ]
)
TEXTS = Table("texts.run", _STORED, payload=True)
_FENCE_ROWS = 4096
_GAP_HASHES = 8192  # gaps up to 64 KiB are read and discarded: cheaper than another call
_READ_HASHES = 1 << 19  # maximum number of hashes in one read
_TEXT_LEVEL = 1  # zstd level of texts in the exchange


@dataclass(frozen=True, slots=True)
class Sets:
    """Sets of some documents in memory: hashes[offsets[i]:offsets[i + 1]] belong to row i of `rows`.

    `rows` have the dtype SET, or that of TEXTS; both have `number`, `distinct` and `total`.
    """

    rows: npt.NDArray[np.void]
    hashes: UInt64s
    offsets: Int64s

    @property
    def numbers(self) -> UInt64s:
        """The document numbers, uint64[n], ascending."""
        numbers: UInt64s = self.rows["number"]
        return numbers

    @classmethod
    def of(cls, rows: npt.NDArray[np.void], payload: npt.NDArray[np.uint8]) -> Self:
        """Make sets from rows of TEXTS whose payloads are hashes."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(rows["size"] // 8, out=offsets[1:])
        return cls(rows, payload.view("<u8"), offsets)


class ShingleWriter:
    """Writes sets.npy and shingles.bin into a folder; numbers must ascend over all calls.

    With `smallest`, only that many of the smallest hashes of every document are stored.
    """

    def __init__(self, folder: Path, *, smallest: int | None = None) -> None:
        assert smallest is None or smallest > 1
        self._smallest = smallest
        self._next_number = self._stored = 0
        self._rows = RowsWriter(folder / SETS_FILE, SET)
        self._shingles = (folder / SHINGLES_FILE).open("wb")

    def write(self, numbers: UInt64s, hashes: UInt64s, offsets: Int64s) -> None:
        """Append documents; hashes[offsets[i]:offsets[i + 1]] are all n-grams of the i-th, in any order."""
        if not len(numbers):
            return
        assert int(numbers[0]) >= self._next_number, "document numbers must ascend"
        assert bool((numbers[1:] > numbers[:-1]).all()), "document numbers must ascend"
        self._next_number = int(numbers[-1]) + 1
        sets = distinct_sets(numbers, hashes, offsets, self._smallest)
        sets.rows["start"] += self._stored
        self._stored += len(sets.hashes)
        self._rows.write(sets.rows)
        self._shingles.write(sets.hashes.astype("<u8", copy=False).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._shingles:
            self._rows.__exit__(kind, error, trace)


def distinct_sets(numbers: UInt64s, hashes: UInt64s, offsets: Int64s, smallest: int | None = None) -> Sets:
    """Return the sets of the n-grams hashes[offsets[i]:offsets[i + 1]], which may be in any order and repeat.

    `hashes` is overwritten: the sets are a view of it.
    """
    rows = np.empty(len(numbers), SET)
    rows["number"], rows["total"] = numbers, np.diff(offsets)
    stored, distinct = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
    count = distinct_hashes(hashes, offsets, smallest or np.iinfo(np.int32).max, stored, distinct)
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(stored)])
    rows["stored"], rows["distinct"], rows["start"] = stored, distinct, edges[:-1]
    return Sets(rows, hashes[:count], edges)


class ShingleReader:
    """Reads sets from folders; the numbers in each folder are greater than those in the folders before."""

    def __init__(self, folders: Sequence[Artifact]) -> None:
        folders_with_sets = [_Folder(folder) for folder in folders]
        self._folders = [folder for folder in folders_with_sets if len(folder.rows)]
        self._firsts = np.array([folder.first for folder in self._folders], np.uint64)
        assert bool((self._firsts[1:] > self._firsts[:-1]).all()), "numbers in folders overlap"

    def find(self, numbers: UInt64s) -> npt.NDArray[np.void]:
        """Return the SET rows of these document numbers, which must ascend."""
        found = [folder.find(part) for folder, part in self._divide(numbers)]
        return np.concatenate(found) if found else np.empty(0, SET)

    def read(self, numbers: UInt64s) -> Sets:
        """Return the sets of these document numbers, which must ascend; memory is not limited."""
        parts = [(folder, folder.find(part)) for folder, part in self._divide(numbers)]
        rows = np.concatenate([rows for _, rows in parts]) if parts else np.empty(0, SET)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(rows["stored"], out=offsets[1:])
        hashes = np.empty(int(offsets[-1]), np.uint64)
        at = 0
        for folder, some in parts:
            at += folder.read_into(hashes[at:], some)
        return Sets(rows, hashes, offsets)

    def chunks(self, numbers: UInt64s, hashes_bytes: int) -> Iterator[Sets]:
        """Yield the sets that `read` returns in pieces of at most `hashes_bytes`, or of one document."""
        for begin in range(0, len(numbers), _FENCE_ROWS):
            some = numbers[begin : begin + _FENCE_ROWS]
            ends = np.cumsum(self.find(some)["stored"], dtype=np.int64) * 8
            at = 0
            while at < len(some):
                before = int(ends[at - 1]) if at else 0
                stop = max(at + 1, int(np.searchsorted(ends, before + hashes_bytes, "right")))
                yield self.read(some[at:stop])
                at = stop

    def tables(self, rows: int = 1 << 16) -> Iterator[npt.NDArray[np.void]]:
        """Yield all SET rows by ascending number, up to `rows` at a time; `start` restarts in each folder."""
        for folder in self._folders:
            for start in range(0, len(folder.rows), rows):
                yield folder.rows.read(start, min(start + rows, len(folder.rows)))

    def _divide(self, numbers: UInt64s) -> Iterator[tuple[_Folder, UInt64s]]:
        cuts = [*np.searchsorted(numbers, self._firsts).tolist(), len(numbers)]
        if cuts[0]:
            where = f"{self._folders[0].rows.artifact}: " if self._folders else ""
            raise BuildError(f"{where}a document has no set of n-grams; make the index again")
        for folder, (begin, end) in zip(self._folders, pairwise(cuts), strict=True):
            if begin < end:
                yield folder, numbers[begin:end]


class _Folder:
    """The open files sets.npy and shingles.bin of one folder."""

    def __init__(self, folder: Artifact) -> None:
        self.rows = Rows(folder / SETS_FILE, SET)
        self._hashes = Rows(folder / SHINGLES_FILE, "<u8", header=False)

    @property
    def first(self) -> int:
        return int(self.rows.read(0, 1)["number"][0])

    @cached_property
    def _fences(self) -> UInt64s:
        """The document number in every 4,096th row."""
        numbers: UInt64s = self.rows.sample(0, len(self.rows), _FENCE_ROWS)["number"].copy()
        return numbers

    def find(self, numbers: UInt64s) -> npt.NDArray[np.void]:
        """Return the SET rows of ascending document numbers. Raises BuildError for missing or wrong rows."""
        found = np.empty(len(numbers), SET)
        fences = np.maximum(np.searchsorted(self._fences, numbers, "right") - 1, 0)
        for fence in np.unique(fences).tolist():
            begin, end = np.searchsorted(fences, [fence, fence + 1]).tolist()
            start = fence * _FENCE_ROWS
            rows = self.rows.read(start, min(start + _FENCE_ROWS, len(self.rows)))
            at = np.searchsorted(rows["number"], numbers[begin:end])
            found[begin:end] = rows[np.minimum(at, len(rows) - 1)]
        if not np.array_equal(found["number"], numbers):
            raise BuildError(f"{self.rows.artifact}: a document has no set of n-grams; make the index again")
        self._check(found)
        return found

    def _check(self, rows: npt.NDArray[np.void]) -> None:
        """Raise BuildError unless the ranges of hashes are inside the file and ascend without overlap.

        The kernels use these numbers as addresses, so a wrong one would read foreign memory.
        """
        start, stored, distinct = (rows[name].astype(np.int64) for name in ("start", "stored", "distinct"))
        right = (stored >= 0) & (stored <= distinct) & (distinct <= rows["total"])
        right &= (start >= 0) & (start <= len(self._hashes) - stored)
        right[1:] &= start[1:] >= (start + stored)[:-1]
        if not right.all():
            number = int(rows["number"][np.argmin(right)])
            raise BuildError(
                f"{self.rows.artifact}: document {number:,}: its hashes are outside {SHINGLES_FILE}; "
                "make the index again"
            )

    def read_into(self, out: UInt64s, rows: npt.NDArray[np.void]) -> int:
        """Copy the hashes of these rows into `out`, one after the other; return their number."""
        starts = rows["start"].astype(np.int64)
        stops = starts + rows["stored"]
        at = 0
        with self._hashes:
            for begin, end in pairwise(_reads(starts, stops, _GAP_HASHES, _READ_HASHES).tolist()):
                first = int(starts[begin])
                hashes = self._hashes.read(first, int(stops[end - 1]))
                at += _gather(hashes, starts[begin:end], stops[begin:end], first, out[at:])
        return at


@kernel
def _reads(starts: Int64s, stops: Int64s, gap: int, longest: int) -> Int64s:
    """Group documents into reads of up to `longest` hashes, with gaps of up to `gap` hashes.

    Returns int64[reads + 1], the first document of each read.
    """
    edges = np.empty(len(starts) + 1, np.int64)
    edges[0] = 0
    count = 1
    for document in range(1, len(starts)):
        begin = starts[edges[count - 1]]
        if starts[document] - stops[document - 1] > gap or stops[document] - begin > longest:
            edges[count] = document
            count += 1
    edges[count] = len(starts)
    return edges[: count + 1]


@kernel
def _gather(hashes: UInt64s, starts: Int64s, stops: Int64s, first: int, out: UInt64s) -> int:
    at = 0
    for document in range(len(starts)):
        for position in range(starts[document] - first, stops[document] - first):
            out[at] = hashes[position]
            at += 1
    return at


@dataclass(frozen=True, slots=True)
class Sent:
    """The number of documents of a part that are in pairs, and of `texts` sent to blocks."""

    documents: int
    texts: int


class TextRuns:
    """Writes the TEXTS run of a part; `places` are the rows of PLACES of its documents."""

    def __init__(self, folder: Path, places: Slice, *, memory_bytes: int) -> None:
        self._wanted = _wanted(places, memory_bytes // 4)
        self._piece_bytes = memory_bytes // 16
        self._run = RunWriter(folder / TEXTS.file, TEXTS, memory_bytes=memory_bytes // 2)
        self.numbers: UInt64s = np.unique(self._wanted["key"])  # documents in any pair
        self.sent = Sent(len(self.numbers), len(self._wanted))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.__exit__(kind, error, trace)

    def write(self, rows: npt.NDArray[np.void], payload: npt.NDArray[np.uint8]) -> None:
        """Append the next documents of `numbers`, in order; `rows` are rows of TEXTS without keys."""
        if not len(rows):
            return
        numbers = np.ascontiguousarray(rows["number"])
        begin, end = np.searchsorted(self._wanted["key"], [numbers[0], numbers[-1] + np.uint64(1)])
        wanted = self._wanted[begin:end]
        places, blocks = np.searchsorted(numbers, wanted["key"]), wanted["block"]
        if len(places) == len(rows) and payload.nbytes <= self._piece_bytes:  # each text goes to one block
            chosen = rows.copy()
            chosen["key"] = blocks
            self._run.write(chosen, payload)
            return
        starts, sizes = payload_ends(rows, TEXTS)[places], rows["size"][places]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        at = 0
        while at < len(places):
            stop = max(at + 1, int(np.searchsorted(ends, ends[at] + self._piece_bytes, "right")) - 1)
            chosen = rows[places[at:stop]]
            chosen["key"] = blocks[at:stop]
            copied = np.empty(int(ends[stop] - ends[at]), np.uint8)
            copy_texts(payload, starts[at:stop], sizes[at:stop], copied, ends[at:stop] - ends[at])
            self._run.write(chosen, copied)
            at = stop


def _wanted(places: Slice, memory_bytes: int) -> npt.NDArray[np.void]:
    """Return the rows of PLACES by document and block, without repetitions."""
    found = [np.empty(0, PLACES.dtype)]
    for rows, _ in places.stream(memory_bytes):
        found.append(places_of(rows["key"], rows["block"].astype(np.uint64)))
    wanted = np.concatenate(found)
    return places_of(wanted["key"], wanted["block"].astype(np.uint64))


def write_texts(
    folder: Path, part: Part, documents: Artifact | None, places: Slice, memory_bytes: MemoryBytes
) -> Sent:
    """Write the TEXTS run of one part; `places` covers exactly the part's document numbers.

    `documents` is the file with the texts of a split; None for a part of an index.
    """
    with TextRuns(folder, places, memory_bytes=memory_bytes) as runs:
        if not len(runs.numbers):
            return runs.sent
        in_part = (runs.numbers - np.uint64(places.start)).astype(np.int64)
        described = Rows(part.folder / DOCUMENTS_FILE, DOCUMENT).read()[in_part]
        if documents is None:
            found = _stored_sets(part, in_part)
        else:
            found = _texts(documents, described["row"])
        at = 0
        for rows, payload in found:
            here = slice(at, at + len(rows))
            rows["number"] = runs.numbers[here]
            rows["priority"] = priority(described[here], part.kind)
            runs.write(rows, payload)
            at += len(rows)
        assert at == len(in_part), f"{documents}: {len(in_part) - at:,} documents of the part are missing"
    return runs.sent


SHINGLES = Stage("shingles", "near-duplicates", write_texts, cost=9)


def _texts(documents: Artifact, in_file: Int64s) -> Iterator[Batch]:
    """Yield rows of TEXTS with the texts in rows `in_file` of `documents`, in batches."""
    start = 0
    with documents.open_arrow() as file:
        reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[4]))
        for number in range(reader.num_record_batches):
            texts = reader.get_batch(number).column(0)
            begin, end = np.searchsorted(in_file, [start, start + len(texts)])
            if begin < end:
                chosen = texts.take(pa.array(in_file[begin:end] - start))
                yield text_rows(chosen, compress=documents.remote is not None)
            start += len(texts)


def _stored_sets(part: Part, in_part: Int64s) -> Iterator[Batch]:
    """Yield the stored sets of an index's documents."""
    for sets in ShingleReader([part.folder]).chunks(in_part.astype(np.uint64), _READ_HASHES * 8):
        yield stored_rows(sets)


def text_rows(texts: pa.LargeStringArray, *, compress: bool) -> Batch:
    """Return rows of TEXTS with texts as payloads, and keys, numbers and priorities not set."""
    data, edges = text_bytes(texts), text_offsets(texts)
    rows = np.zeros(len(texts), _STORED)
    rows["text"] = rows["size"] = np.diff(edges)
    if not compress:
        return rows, data[edges[0] : edges[-1]]
    compressor, pieces = zstandard.ZstdCompressor(level=_TEXT_LEVEL), []
    for start, stop in pairwise(edges.tolist()):
        text = data[start:stop]
        piece = compressor.compress(text.data)
        pieces.append(piece if len(piece) < len(text) else text.tobytes())
    rows["size"] = [len(piece) for piece in pieces]
    return rows, np.frombuffer(b"".join(pieces), np.uint8)


def stored_rows(sets: Sets) -> Batch:
    """Return rows of TEXTS with sets as payloads, and keys and priorities not set."""
    rows = np.zeros(len(sets.rows), _STORED)
    for name in ("number", "total", "distinct"):
        rows[name] = sets.rows[name]
    rows["size"], rows["text"] = np.diff(sets.offsets) * 8, -1
    return rows, sets.hashes.astype("<u8", copy=False).view(np.uint8)


def read_sets(
    source: Slice, ngrams: NgramUnits, memory_bytes: int, wanted: UInt64s | None = None
) -> Iterator[Sets]:
    """Yield the sets of the documents of a run in batches of about `memory_bytes`, or of one document.

    With `wanted`, ascending document numbers, others are left out. Within a batch, sets of an index's
    documents may come after those of later documents.
    """
    text_bytes = memory_bytes // 32  # each byte may start an n-gram, whose 8-byte hash is held twice
    for batch in source.stream(memory_bytes // 2):
        rows, payload = batch if wanted is None else _chosen(*batch, wanted)
        ends, texts = payload_ends(rows, source.table), np.cumsum(np.maximum(rows["text"], 0))
        begin = 0
        while begin < len(rows):
            before = int(texts[begin - 1]) if begin else 0
            stop = max(begin + 1, int(np.searchsorted(texts, before + text_bytes, "right")))
            yield from _decoded(rows[begin:stop], payload[ends[begin] : ends[stop]], ngrams)
            begin = stop


def _chosen(rows: npt.NDArray[np.void], payload: npt.NDArray[np.uint8], wanted: UInt64s) -> Batch:
    """Return the rows whose numbers are in `wanted`, with their payloads."""
    numbers = np.ascontiguousarray(rows["number"])
    places = np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)
    chosen = np.flatnonzero(wanted[places] == numbers)
    if len(chosen) == len(rows):
        return rows, payload
    starts, found = payload_ends(rows, TEXTS)[chosen], rows[chosen]
    ends = payload_ends(found, TEXTS)
    copied = np.empty(int(ends[-1]), np.uint8)
    copy_texts(payload, starts, np.ascontiguousarray(found["size"]), copied, ends[:-1])
    return found, copied


def _decoded(
    rows: npt.NDArray[np.void], payload: npt.NDArray[np.uint8], ngrams: NgramUnits
) -> Iterator[Sets]:
    is_text = rows["text"] >= 0
    if not is_text.any():
        yield Sets.of(rows, payload)
        return
    texts = rows[is_text]
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(texts["text"])])
    data = payload if (rows["size"] == rows["text"]).all() else _decompressed(rows, payload)
    array = pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(edges), pa.py_buffer(data))
    sets = distinct_sets(np.ascontiguousarray(texts["number"]), *shingle_batch(array, ngrams))
    texts["total"], texts["distinct"] = sets.rows["total"], sets.rows["distinct"]
    yield Sets(texts, sets.hashes, sets.offsets)
    if not is_text.all():
        is_stored = np.repeat(~is_text, rows["size"])
        yield Sets.of(rows[~is_text], payload[is_stored])


def _decompressed(rows: npt.NDArray[np.void], payload: npt.NDArray[np.uint8]) -> bytes:
    """Return the texts among the payloads, decompressed and concatenated."""
    decompress, data = zstandard.ZstdDecompressor().decompress, payload.data
    spans = pairwise(payload_ends(rows, TEXTS).tolist())
    pieces = []
    for size, (start, stop) in zip(rows["text"].tolist(), spans, strict=True):
        if size >= 0:
            pieces.append(data[start:stop] if stop - start == size else decompress(data[start:stop]))
    return b"".join(pieces)
