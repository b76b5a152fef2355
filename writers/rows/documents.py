"""The columnar batch in which documents pass between the stages of a build.

One Arrow record batch holds up to `BATCH_DOCUMENTS` documents or about `BATCH_TEXT_BYTES` of text, so that
kernels run over one UTF-8 buffer and memory is bounded for any corpus. A document's identity is the 128-bit
hash of (file name relative to the recipe, record number). Every random choice for a document is keyed by this
id, so that no result depends on the worker that read it. The choice which of two duplicates stays depends on
their texts (`content_ranks`), so that renaming, splitting or sorting the input files keeps the same texts.

Strings of documents move between splits as payloads of rows: see `pack_strings` and `unpack_strings`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from shardkit.kernels.text_arrays import copy_texts, text_bytes, text_offsets

DOCUMENTS_FILE = "documents.arrow"  # the documents of a split, an output of the task that cleaned the split

BATCH_DOCUMENTS = 4096
BATCH_TEXT_BYTES = 16 << 20  # a batch ends after the document that makes it larger than this

DOCUMENT_SCHEMA = pa.schema(
    [
        pa.field("document_id", pa.binary(16), nullable=False),
        pa.field("source", pa.int32(), nullable=False),  # index into recipe.inputs
        pa.field("file", pa.string(), nullable=False),  # name relative to the recipe, POSIX separators
        pa.field("record", pa.int64(), nullable=False),  # 0-based line or row number within the file
        pa.field("text", pa.large_string(), nullable=False),  # valid UTF-8
        pa.field("id", pa.string()),  # the user's own id, as text
        pa.field("url", pa.string()),
        pa.field("metadata", pa.string()),  # JSON object of the other fields that the recipe keeps
    ]
)

MARKED_SCHEMA = DOCUMENT_SCHEMA.append(pa.field("marks", pa.binary()))  # for builds with a loss mask

# Each document is written once or twice and read three to five times, from a store over a network. zstd 1
# takes three quarters of the bytes of lz4, writes as fast, and reads 1 GB/s per core instead of 2.4.
DOCUMENT_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))


def joined_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the documents of `batches` in fewer, larger batches, each smaller than two full batches."""
    waiting: list[pa.RecordBatch] = []
    documents = size = 0
    for batch in batches:
        waiting.append(batch)
        documents, size = documents + batch.num_rows, size + batch.nbytes
        if documents >= BATCH_DOCUMENTS or size >= BATCH_TEXT_BYTES:
            yield _one_of(waiting)
            waiting, documents, size = [], 0, 0
    if waiting:
        yield _one_of(waiting)


def _one_of(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    [batch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch


def document_ids(file: str, records: Iterable[int]) -> list[bytes]:
    """Return the 16-byte ids of documents by record number in `file` (a name relative to the recipe).

    An id is the xxh3-128 of (blake2b-128 of the file's name, record number). The strong hash of the name
    prevents collisions between files; the fast hash keeps the cost per record low.
    """
    seed = hashlib.blake2b(file.encode(), digest_size=16, person=b"shardkit-doc-v1").digest()
    return [xxhash.xxh3_128_digest(seed + struct.pack("<q", record)) for record in records]


def id_bytes(document_ids: pa.FixedSizeBinaryArray) -> npt.NDArray[np.uint8]:
    """Return uint8[n, 16], a view of the document ids as bytes."""
    start = 16 * document_ids.offset
    data = np.frombuffer(document_ids.buffers()[1] or b"", np.uint8)
    return data[start : start + 16 * len(document_ids)].reshape(-1, 16)


def text_digests(texts: pa.LargeStringArray) -> npt.NDArray[np.uint8]:
    """Return uint8[n, 16], the xxh3-128 of the UTF-8 bytes of each text."""
    data = texts.buffers()[2]
    text = memoryview(data) if data is not None else memoryview(b"")
    digests = [xxhash.xxh3_128_digest(text[a:b]) for a, b in pairwise(text_offsets(texts).tolist())]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def content_ranks(
    digests: npt.NDArray[np.uint8], document_ids: pa.FixedSizeBinaryArray
) -> npt.NDArray[np.uint8]:
    """Return uint8[n, 16], ranks that break ties in duplicate removal; the lowest-ranked document stays.

    A rank is half of the text's digest, then half of the document id, which only decides between equal texts.
    """
    return np.concatenate([digests[:, :8], id_bytes(document_ids)[:, :8]], axis=1)


def pack_strings(
    documents: pa.RecordBatch | pa.Table,
    names: Sequence[str],
    rows: npt.NDArray[np.void],
    *,
    first: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]] = (),
    align: int = 1,
) -> npt.NDArray[np.uint8]:
    """Concatenate the strings of each document in the columns `names`; return the bytes of all documents.

    `rows` has one row per document. Sets its fields `names` to the sizes of the strings in bytes (-1 for
    null), and `size` to the document's total bytes, rounded up to a multiple of `align`. Each entry of
    `first` has bytes of all documents and int64[n], the number of these bytes per document, to put before the
    strings.
    """
    pieces = list(first)
    for name in names:
        column = documents.column(name)
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        texts = column.fill_null("").cast(pa.large_string())
        sizes = np.diff(text_offsets(texts))
        rows[name] = np.where(column.is_valid().to_numpy(zero_copy_only=False), sizes, -1)
        pieces.append((text_bytes(texts)[text_offsets(texts)[0] :], sizes))
    rows["size"] = -(-sum(sizes for _, sizes in pieces) // align) * align
    ends = np.cumsum(rows["size"])
    payload, places = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8), ends - rows["size"]
    for source, sizes in pieces:
        copy_texts(source, np.cumsum(sizes) - sizes, sizes, payload, places)
        places = places + sizes
    return payload


def unpack_strings(
    rows: npt.NDArray[np.void],
    payload: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    names: Sequence[str],
) -> dict[str, pa.Array]:
    """Return the strings that `pack_strings` put into a payload, by name; `starts` has one offset per row."""
    columns: dict[str, Any] = {}
    places = starts
    for name in names:
        sizes = np.maximum(rows[name], 0).astype(np.int64)
        ends = np.cumsum(sizes)
        texts = np.empty(int(sizes.sum()), np.uint8)
        copy_texts(payload, places, sizes, texts, ends - sizes)
        offsets, valid = np.append(0, ends), np.packbits(rows[name] >= 0, bitorder="little")
        buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(texts)]
        columns[name] = pa.Array.from_buffers(pa.large_string(), len(rows), buffers).cast(pa.string())
        places = places + sizes
    return columns


def metadata_values(metadata: pa.Array | pa.ChunkedArray, name: str) -> list[Any]:
    """Return the field `name` of each document's metadata; None if a document does not have it."""
    return [None if row is None else orjson.loads(row).get(name) for row in metadata.to_pylist()]


def numbers_of(values: Iterable[object]) -> npt.NDArray[np.float64]:
    """Return the values as float64[n], NaN for a value that is not a number."""
    numbers = (
        one if isinstance(one, int | float) and not isinstance(one, bool) else np.nan for one in values
    )
    return np.array([*numbers], np.float64)


def with_metadata(
    documents: pa.RecordBatch, names: Sequence[str], added: Sequence[str | None]
) -> pa.RecordBatch:
    """Return the documents with fields added to their metadata: those `names` in a JSON object for each.

    None adds nothing. The other bytes of the metadata stay the same, unless it has a field of that name.
    """
    texts, keys = [], [f"{orjson.dumps(name).decode()}:" for name in names]
    for one, more in zip(documents.column("metadata").to_pylist(), added, strict=True):
        if one is None or more is None or more == "{}":
            texts.append(one if more in (None, "{}") else more)
        elif any(key in one for key in keys):
            whole = json.loads(one) | json.loads(more)
            texts.append(json.dumps(whole, ensure_ascii=False, separators=(",", ":")))
        else:
            texts.append(more if one == "{}" else f"{one[:-1]},{more[1:]}")
    number = documents.schema.get_field_index("metadata")
    return documents.set_column(number, documents.schema.field(number), pa.array(texts, pa.string()))
