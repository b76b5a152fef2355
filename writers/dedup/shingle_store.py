"""The n-grams of the documents that occur in candidate pairs: sorted sets of 64-bit hashes.

One task per part sends its documents to the blocks that verify their pairs (blocks.py), with the fields that
verifying and resolving need:

    texts.run     TEXTS: each document in a pair, once for each block that has such a pair; key: the block

The exchange moves texts, which become sets where they are compared; moving sets would cost more. On one
machine texts are not compressed, since compressing would take longer than the rest of verification; through a
store they are compressed. For an index's documents only sketches of the sets are known (sketches.py), and
these are moved as hashes, whose lower bits are zeros. A task reads only its own range of the places, and of a
part of an index only the rows of documents in pairs. It holds a batch of texts, and the blocks of each
document. The texts of a block are in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from shardkit.kernels.numba_support import Int64s, UInt64s
from shardkit.kernels.text_arrays import copy_texts, text_bytes, text_offsets
from shardkit.writers.dedup.blocks import PLACES, places_of
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, Part, priority
from shardkit.writers.dedup.sketches import kept_bits, read_sketches
from shardkit.writers.dedup.tables import Rows
from shardkit.writers.exchange.exchange import RunWriter, Slice, Table
from shardkit.writers.exchange.sorted_runs import Batch, payload_ends
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import MemoryBytes
from shardkit.writers.execution.stage import Stage
from shardkit.writers.kernels.shingles import NgramUnits, shingle_batch
from shardkit.writers.kernels.sorting import distinct_hashes

SET = np.dtype(
    [
        ("number", "<u8"),
        ("distinct", "<i4"),  # distinct n-grams in the whole document; a sketch has fewer
        ("total", "<i8"),  # n-grams with repetitions
    ]
)
_STORED = np.dtype(
    [
        ("key", "<u8"),
        ("size", "<i8"),  # bytes of the payload: hashes, or the text, compressed if `size` < `text`
        ("number", "<u8"),
        ("text", "<i8"),  # bytes of UTF-8 text; negative: the payload is hashes of so many upper bits
        ("total", "<i8"),  # n-grams with repetitions; 0 if the payload is a text
        ("distinct", "<i4"),  # distinct n-grams; 0 if the payload is a text
        ("priority", "<u8", (3,)),  # population.priority
    ]
)
TEXTS = Table("texts.run", _STORED, payload=True)
HASH_BITS = 64
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

    @property
    def bits(self) -> npt.NDArray[np.int64]:
        """How many upper bits of each document's hashes are known, int64[n]; the others are zeros."""
        if "text" not in (self.rows.dtype.names or ()):
            return np.full(len(self.rows), HASH_BITS)
        return np.where(self.rows["text"] < 0, -self.rows["text"], HASH_BITS)

    @classmethod
    def of(cls, rows: npt.NDArray[np.void], payload: npt.NDArray[np.uint8]) -> Self:
        """Make sets from rows of TEXTS whose payloads are hashes."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(rows["size"] // 8, out=offsets[1:])
        return cls(rows, payload.view("<u8"), offsets)


def distinct_sets(numbers: UInt64s, hashes: UInt64s, offsets: Int64s, smallest: int | None = None) -> Sets:
    """Return the sets of the n-grams hashes[offsets[i]:offsets[i + 1]], which may be in any order and repeat.

    `hashes` is overwritten: the sets are a view of it.
    """
    rows = np.empty(len(numbers), SET)
    rows["number"], rows["total"] = numbers, np.diff(offsets)
    stored, distinct = np.empty(len(numbers), np.int64), np.empty(len(numbers), np.int64)
    count = distinct_hashes(hashes, offsets, smallest or np.iinfo(np.int32).max, stored, distinct)
    rows["distinct"] = distinct
    return Sets(rows, hashes[:count], np.concatenate([np.zeros(1, np.int64), np.cumsum(stored)]))


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
        at = 0
        for rows, payload in (
            _indexed(part, in_part) if documents is None else _texts(documents, part, in_part)
        ):
            rows["number"] = runs.numbers[at : at + len(rows)]
            runs.write(rows, payload)
            at += len(rows)
        assert at == len(in_part), f"{documents}: {len(in_part) - at:,} documents of the part are missing"
    return runs.sent


SHINGLES = Stage("shingles", "near-duplicates", write_texts, cost=9)


def _texts(documents: Artifact, part: Part, in_part: Int64s) -> Iterator[Batch]:
    """Yield rows of TEXTS without numbers, with the texts of the rows `in_part` of a split's part."""
    described = Rows(part.folder / DOCUMENTS_FILE, DOCUMENT).read()[in_part]
    in_file = described["row"]
    start = 0
    with documents.open_arrow() as file:
        reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[4]))
        for number in range(reader.num_record_batches):
            texts = reader.get_batch(number).column(0)
            begin, end = np.searchsorted(in_file, [start, start + len(texts)])
            if begin < end:
                chosen = texts.take(pa.array(in_file[begin:end] - start))
                rows, payload = text_rows(chosen, compress=documents.remote is not None)
                rows["priority"] = priority(described[begin:end], part.kind)
                yield rows, payload
            start += len(texts)


def _indexed(part: Part, in_part: Int64s) -> Iterator[Batch]:
    """Yield rows of TEXTS without numbers, with the n-grams of the rows `in_part` of an index's part."""
    for described, hashes in read_sketches(part.folder, in_part):
        rows, payload = indexed_rows(described, hashes)
        rows["priority"] = priority(described, part.kind)
        yield rows, payload


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


def set_rows(sets: Sets) -> Batch:
    """Return rows of TEXTS with whole hashes as payloads, and keys and priorities not set."""
    rows = np.zeros(len(sets.rows), _STORED)
    for name in ("number", "total", "distinct"):
        rows[name] = sets.rows[name]
    rows["size"], rows["text"] = np.diff(sets.offsets) * 8, -HASH_BITS
    return rows, sets.hashes.astype("<u8", copy=False).view(np.uint8)


def indexed_rows(described: npt.NDArray[np.void], hashes: UInt64s) -> Batch:
    """Return rows of TEXTS with n-grams of an index as payloads, and keys, numbers and priorities not set.

    `described` are rows of INDEXED, `hashes` their n-grams, as `read_sketches` returns them.
    """
    stored, distinct = (described[name].astype(np.int64) for name in ("stored", "distinct"))
    rows = np.zeros(len(described), _STORED)
    rows["total"], rows["distinct"] = described["total"], distinct
    rows["size"], rows["text"] = stored * 8, -kept_bits(stored, distinct)
    return rows, hashes.astype("<u8", copy=False).view(np.uint8)


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
