"""Tokenize one split: kept documents in, their tokens out, grouped by the partition that will pack them.

A document's partition and its place in the training order come from hash(seed, document id) alone, so that
neither depends on which task read it. The spill of a split is a folder of three files:

    tokens.bin       ids, little endian: runs, each sorted by (partition, hash, document id)
    documents.arrow  one row a document in the same order (SPILL_SCHEMA), one batch a segment
    segments.npy     SEGMENT: where each (run, partition) lies in the two; sorted by (partition, run)

A run holds up to `RUN_TOKENS` tokens and `RUN_DOCUMENTS` documents, so memory is bounded; a segment is the
part of a run that belongs to one partition. Reducers read only their own segments. Each document's tokens end
with the eos id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.card import Histogram
from shardkit.errors import BuildError, ConservationError
from shardkit.writers.documents import keyed_hashes
from shardkit.writers.execution.work_files import open_arrow
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.languages import LanguageLabels
from shardkit.writers.ledger import Count, Ledger
from shardkit.writers.tokenizer import Encoder, EosInTextError, Tokens

__all__ = [
    "SEGMENT",
    "SPILL_SCHEMA",
    "Removed",
    "TokenizeResult",
    "choose_partitions",
    "partition_of",
    "run_tokens_for",
    "tokenize_split",
]

RUN_TOKENS = 32 << 20  # a run is held twice while it is sorted: 128 to 256 MB, less where `memory` is less

RUN_DOCUMENTS = 1 << 18

MAX_PARTITIONS = 10_000  # keys of tar samples have 12 digits, 8 of them for the row within a partition

DOCUMENT_OVERHEAD_BYTES = 400  # what the packer holds for one document beside its tokens

SEGMENT = np.dtype(
    [("partition", "<i4"), ("batch", "<i4"), ("documents", "<i8"), ("token_start", "<i8"), ("tokens", "<i8")]
)

SPILL_SCHEMA = pa.schema(
    [
        pa.field("hash", pa.uint64(), nullable=False),
        pa.field("document_id", pa.binary(16), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),  # with eos
        pa.field("copies", pa.int32(), nullable=False),  # documents it stands for, itself included
        pa.field("source", pa.int32(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("record", pa.int64(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("url", pa.string()),
        pa.field("metadata", pa.string()),
    ]
)

_CARRIED = ("source", "file", "record", "id", "url", "metadata")


@dataclass(slots=True)
class TokenizeResult:
    """Counts of one task: the ledger, tokens with eos, and documents and tokens of each partition.

    `lengths` are the documents' tokens, eos included; `languages` are LanguageCounts as plain data.
    """

    ledger: Ledger
    tokens: int
    partition_documents: list[int] = field(default_factory=list)
    partition_tokens: list[int] = field(default_factory=list)
    lengths: Histogram = field(default_factory=Histogram)
    languages: dict[str, dict[str, int]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for commit records."""
        return {
            "ledger": self.ledger.to_dict(),
            "tokens": self.tokens,
            "partition_documents": self.partition_documents,
            "partition_tokens": self.partition_tokens,
            "lengths": self.lengths.to_dict(),
            "languages": self.languages,
        }


def partition_of(hashes: npt.NDArray[np.uint64], partitions: int) -> npt.NDArray[np.int64]:
    """int64[n]: the partition of each hash: its upper 32 bits scaled to [0, partitions)."""
    scaled = (hashes >> np.uint64(32)) * np.uint64(partitions)
    return (scaled >> np.uint64(32)).astype(np.int64)


def choose_partitions(
    text_bytes: int, documents: int, memory_bytes: int, *, token_bytes: int = 4, shard_bytes: int = 0
) -> int:
    """How many partitions let one packer stay within `memory_bytes` (a worker's share of all memory).

    Reckons half a token a byte of text, twice what English needs, two shards (one is filled while another one
    is written), and a quarter in hand. Depends on the input and the recipe only, so that the shards do.
    """
    needed = text_bytes * token_bytes // 2 + documents * DOCUMENT_OVERHEAD_BYTES
    for_partition = max(1, memory_bytes // 8, memory_bytes * 3 // 4 - 2 * shard_bytes)
    return min(max(1, -(-needed // for_partition)), MAX_PARTITIONS)


def run_tokens_for(memory_bytes: int) -> int:
    """Tokens of a run that take a quarter of `memory_bytes`, in four bytes each, while they are sorted."""
    return min(RUN_TOKENS, memory_bytes // 32)


@dataclass(frozen=True, slots=True)
class Removed:
    """What duplicate removal says of one split. Row numbers count over all batches of its file.

    `rows` are int64 row numbers, ascending, by the reason they are dropped for; no row has two. `copied` and
    `copies`, int64 each, are the rows that stand for more documents than themselves, ascending, and for how
    many.
    """

    rows: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    copied: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    copies: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        for rows in (*self.rows.values(), self.copied):
            assert (rows[1:] >= rows[:-1]).all(), "`part` would lose rows"

    def part(self, start: int, count: int) -> Removed:
        """Of rows [start, start + count), numbered from 0."""
        here = {reason: _between(rows, start, count) for reason, rows in self.rows.items()}
        rows = {reason: self.rows[reason][part] - start for reason, part in here.items()}
        copied = _between(self.copied, start, count)
        return Removed(rows, self.copied[copied] - start, self.copies[copied])


def _between(ascending: npt.NDArray[np.int64], start: int, count: int) -> slice:
    first, last = np.searchsorted(ascending, [start, start + count])
    return slice(first, last)


def tokenize_split(
    documents: Path,
    removed: Removed,
    encoder: Encoder,
    *,
    seed: int,
    partitions: int,
    folder: Path,
    run_tokens: int = RUN_TOKENS,
    languages: LanguageLabels | None = None,
) -> TokenizeResult:
    """Encode the documents of an Arrow file (DOCUMENT_SCHEMA) but those removed; spill into `folder`.

    Documents without any token are booked as dropped under "empty".
    """
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise BuildError(f"{folder}: {partitions} partitions; between 1 and {MAX_PARTITIONS:,} are possible")
    ledger = Ledger()
    lengths = Histogram()
    counts = None if languages is None else languages.open()
    with (
        open_arrow(documents, mapped=True) as source,
        _SpillWriter(folder, encoder, partitions, run_tokens) as spill,
    ):
        reader = pa.ipc.open_file(source)
        start = 0
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            if counts is not None:
                batch = counts.beside(batch, start)
            part = removed.part(start, batch.num_rows)
            start += batch.num_rows
            kept, tokens = _tokenize_batch(batch, part, encoder, seed, spill, ledger)
            lengths.add(Histogram.of(tokens))
            if counts is not None:
                counts.count(kept, tokens)
        for lost in removed.rows.values():
            if len(lost) and not 0 <= lost.min() <= lost.max() < start:
                raise BuildError(
                    f"{documents}: duplicate row {lost.max()} does not exist; the file has {start} rows"
                )
        segments = spill.finish()
    ledger.check(str(folder))
    result = TokenizeResult(
        ledger,
        int(segments["tokens"].sum()),
        np.bincount(segments["partition"], segments["documents"], partitions).astype(np.int64).tolist(),
        np.bincount(segments["partition"], segments["tokens"], partitions).astype(np.int64).tolist(),
        lengths,
        None if counts is None else counts.to_dict(),
    )
    if result.tokens != spill.tokens or sum(result.partition_documents) != ledger.kept.documents:
        raise ConservationError(
            f"{folder}: {spill.tokens:,} tokens of {ledger.kept.documents:,} documents were encoded, "
            f"{result.tokens:,} of {sum(result.partition_documents):,} spilled; this is a bug in shardkit"
        )
    return result


def _tokenize_batch(
    batch: pa.RecordBatch,
    removed: Removed,
    encoder: Encoder,
    seed: int,
    spill: _SpillWriter,
    ledger: Ledger,
) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """Encode one batch, append eos, book what came in; returns what is left of it, and its lengths."""
    sizes = np.diff(text_offsets(batch.column("text")))
    ledger.read += Count(batch.num_rows, int(sizes.sum()))
    copies = np.ones(batch.num_rows, np.int32)
    copies[removed.copied] = removed.copies
    keep = np.ones(batch.num_rows, np.bool_)
    for reason, losers in removed.rows.items():
        if len(losers):
            ledger.drop(reason, len(losers), int(sizes[losers].sum()))
            keep[losers] = False
    if not keep.all():
        batch, sizes, copies = batch.filter(pa.array(keep)), sizes[keep], copies[keep]
    try:
        ids, lengths = encoder.encode(batch.column("text"))
    except EosInTextError as error:
        file, record = (batch.column(name)[error.row] for name in ("file", "record"))
        raise BuildError(f"{file}: record {record.as_py():,}: {error}") from error
    if (empty := lengths == 0).any():
        ledger.drop("empty", int(empty.sum()), int(sizes[empty].sum()))
        batch, copies = batch.filter(pa.array(~empty)), copies[~empty]
        sizes, lengths = sizes[~empty], lengths[~empty]
    ledger.kept += Count(batch.num_rows, int(sizes.sum()))
    if batch.num_rows:
        hashes = keyed_hashes(batch.column("document_id").to_pylist(), seed, "shuffle")
        spill.add(batch, hashes, _with_eos(ids, lengths, encoder), lengths + 1, copies)
    return batch, lengths + 1


def _with_eos(ids: Tokens, lengths: npt.NDArray[np.int64], encoder: Encoder) -> Tokens:
    ended: Tokens = np.full(len(ids) + len(lengths), encoder.eos_id, encoder.dtype)
    is_text = np.ones(len(ended), np.bool_)
    is_text[np.cumsum(lengths + 1) - 1] = False
    ended[is_text] = ids
    return ended


class _SpillWriter:
    """Collects documents up to a run's worth of tokens, sorts them and appends the run to the files."""

    def __init__(self, folder: Path, encoder: Encoder, partitions: int, run_tokens: int) -> None:
        self.tokens = 0
        self._folder = folder
        self._partitions = partitions
        self._run_tokens = run_tokens
        self._dtype = encoder.dtype
        self._pending: list[tuple[pa.RecordBatch, Tokens]] = []
        self._pending_tokens = 0
        self._pending_documents = 0
        self._segments: list[npt.NDArray[np.void]] = []
        self._written = 0
        self._batches = 0
        self._file: BinaryIO
        self._table: Any

    def __enter__(self) -> _SpillWriter:
        self._file = (self._folder / "tokens.bin").open("wb")
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        self._table = pa.ipc.new_file(self._folder / "documents.arrow", SPILL_SCHEMA, options=options)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._table.close()

    def add(
        self,
        batch: pa.RecordBatch,
        hashes: npt.NDArray[np.uint64],
        tokens: Tokens,
        lengths: npt.NDArray[np.int64],
        copies: npt.NDArray[np.int32],
    ) -> None:
        columns = [pa.array(hashes), batch.column("document_id"), pa.array(lengths), pa.array(copies)]
        columns += [batch.column(name) for name in _CARRIED]
        self._pending.append((pa.RecordBatch.from_arrays(columns, schema=SPILL_SCHEMA), tokens))
        self._pending_tokens += len(tokens)
        self._pending_documents += len(lengths)
        self.tokens += len(tokens)
        if self._pending_tokens >= self._run_tokens or self._pending_documents >= RUN_DOCUMENTS:
            self._write_run()

    def finish(self) -> npt.NDArray[np.void]:
        """Write what is left and the segments; returns them."""
        if self._pending:
            self._write_run()
        segments: npt.NDArray[np.void] = np.concatenate([np.zeros(0, SEGMENT), *self._segments])
        segments = segments[np.lexsort((segments["batch"], segments["partition"]))]
        np.save(self._folder / "segments.npy", segments, allow_pickle=False)
        return segments

    def _write_run(self) -> None:
        table = pa.Table.from_batches([batch for batch, _ in self._pending])
        tokens = np.concatenate([tokens for _, tokens in self._pending])
        self._pending, self._pending_tokens, self._pending_documents = [], 0, 0
        hashes = table.column("hash").to_numpy()
        lengths = table.column("tokens").to_numpy()
        order = shuffled_order(hashes, id_words(table.column("document_id")))
        ends = np.cumsum(lengths)
        parts = partition_of(hashes, self._partitions)[
            order
        ]  # sorted: the hash's upper bits are the partition
        cuts = [0, *(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
        segments = np.zeros(len(cuts) - 1, SEGMENT)
        for i, (start, stop) in enumerate(pairwise(cuts)):
            rows = order[start:stop]
            count = self._write_tokens(tokens, ends[rows] - lengths[rows], lengths[rows])
            segments[i] = (parts[start], self._batches, stop - start, self._written, count)
            self._table.write_batch(table.take(pa.array(rows)).combine_chunks().to_batches()[0])
            self._written += count
            self._batches += 1
        self._segments.append(segments)

    def _write_tokens(
        self, tokens: Tokens, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> int:
        pieces = [tokens[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
        joined = np.concatenate(pieces)
        self._file.write(joined.astype(self._dtype.newbyteorder("<"), copy=False).data)
        return len(joined)


def shuffled_order(hashes: npt.NDArray[np.uint64], ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """int64[n]: the order by (hash, document id); `ids` are `id_words`."""
    order: npt.NDArray[np.int64] = np.lexsort((ids[:, 1], ids[:, 0], hashes))
    return order


def id_words(ids: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """uint64[n, 2]: 16-byte ids as two big-endian words each, which sort as the bytes do."""
    array = pa.concat_arrays(ids.chunks or [pa.array([], pa.binary(16))])
    data = np.frombuffer(array.buffers()[1] or b"", np.uint8)[
        array.offset * 16 : (array.offset + len(array)) * 16
    ]
    return data.view(">u8").astype(np.uint64).reshape(-1, 2)
