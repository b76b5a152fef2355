"""The columnar batch that documents travel in between the stages of a build.

One Arrow record batch holds up to `BATCH_DOCUMENTS` documents or about `BATCH_TEXT_BYTES` of text, so that
kernels run over one UTF-8 buffer and memory is bounded whatever the corpus. A document's identity is the
128-bit hash of (file name relative to the recipe, record number); everything random about a document is
keyed by it, so that no result depends on which worker read it. Which of two alike documents stays follows
from their texts (`content_ranks`): renaming, splitting or sorting the input files keeps the same texts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from shardkit.writers.kernels.text_arrays import text_offsets

__all__ = [
    "BATCH_DOCUMENTS",
    "BATCH_TEXT_BYTES",
    "DOCUMENT_OPTIONS",
    "DOCUMENT_SCHEMA",
    "content_ranks",
    "document_ids",
    "keyed_hashes",
    "text_digests",
]

BATCH_DOCUMENTS = 4096
BATCH_TEXT_BYTES = 16 << 20  # a batch closes after the document that crosses this

DOCUMENT_SCHEMA = pa.schema(
    [
        pa.field("document_id", pa.binary(16), nullable=False),
        pa.field("source", pa.int32(), nullable=False),  # index into recipe.inputs
        pa.field("file", pa.string(), nullable=False),  # name relative to the recipe, POSIX separators
        pa.field("record", pa.int64(), nullable=False),  # 0-based line or row number within the file
        pa.field("text", pa.large_string(), nullable=False),  # valid UTF-8
        pa.field("id", pa.string()),  # the user's own id, as text
        pa.field("url", pa.string()),
        pa.field("metadata", pa.string()),  # JSON object of the other fields the recipe keeps
    ]
)

# Each document is written once or twice and read three to five times, from a store over a network.
# zstd 1 takes three quarters of the bytes of lz4, writes as fast, and reads 1 GB/s a core instead of 2.4.
DOCUMENT_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))


def document_ids(file: str, records: Iterable[int]) -> list[bytes]:
    """16-byte ids of the documents with these record numbers in `file` (name relative to the recipe).

    blake2b-128 of the file's name, then xxh3-128 of (that, record number): strong against collisions
    between names, cheap per record.
    """
    seed = hashlib.blake2b(file.encode(), digest_size=16, person=b"shardkit-doc-v1").digest()
    return [xxhash.xxh3_128_digest(seed + struct.pack("<q", record)) for record in records]


def keyed_hashes(document_ids: Iterable[bytes], seed: int, purpose: str) -> npt.NDArray[np.uint64]:
    """uint64[n]: hash(seed, purpose, document id), the only randomness that documents may meet."""
    key = hashlib.blake2b(f"{seed}\0{purpose}".encode(), digest_size=8).digest()
    number = int.from_bytes(key, "little")
    return np.fromiter((xxhash.xxh3_64_intdigest(d, number) for d in document_ids), dtype=np.uint64)


def text_digests(texts: pa.LargeStringArray) -> npt.NDArray[np.uint8]:
    """uint8[n, 16]: xxh3-128 of each text's UTF-8."""
    data = texts.buffers()[2]
    text = memoryview(data) if data is not None else memoryview(b"")
    digests = [xxhash.xxh3_128_digest(text[a:b]) for a, b in pairwise(text_offsets(texts).tolist())]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def content_ranks(
    digests: npt.NDArray[np.uint8], document_ids: pa.FixedSizeBinaryArray
) -> npt.NDArray[np.uint8]:
    """uint8[n, 16]: what breaks ties between documents in duplicate removal; the lowest rank stays.

    Half of the text's digest, then half of the document id, which decides among equal texts only.
    """
    ids = np.frombuffer(b"".join(document_ids.to_pylist()), np.uint8).reshape(-1, 16)
    return np.concatenate([digests[:, :8], ids[:, :8]], axis=1)
