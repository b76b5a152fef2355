"""Stage `tokenize`: encodes the remaining documents of a split, grouped by the partition that packs them.

Two small tasks belong to it. `tokenizer` runs with stage `clean`: it loads the tokenizer, so that a wrong
file or eos token fails at once, and picks the engine to start with. `parity` runs with `tokenize` and
compares that engine with the reference on a sample of the documents; its result decides which engine is used.

A document's partition and its position in the training order come from hash(seed, document id) alone, so
neither depends on the task that read it. The spill of a split is a folder of three files:

    tokens.bin       ids, little endian: runs, each sorted by (partition, hash, document id)
    documents.arrow  one row a document in the same order (SPILL_SCHEMA), one batch a segment
    segments.npy     SEGMENT: where each (run, partition) is in these; sorted by (partition, run)

A run holds up to `RUN_TOKENS` tokens and `RUN_DOCUMENTS` documents, which bounds memory; a segment is the
part of a run that belongs to one partition. Stage `pack` reads only the segments of its partition. The tokens
of each document end with the eos id.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.card import Histogram
from shardkit.errors import BuildError, ConservationError, MissingExtraError
from shardkit.hashing import digest_of
from shardkit.writers.dedup.lines import ROWS_FILE
from shardkit.writers.dedup.removals import Removed, SplitRemovals
from shardkit.writers.documents import keyed_hashes
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.task import Commit, PlainCounts, Task
from shardkit.writers.inputs.scan import Split
from shardkit.writers.kernels.text_arrays import text_offsets
from shardkit.writers.languages import LANGUAGES_FILE, LanguageLabels
from shardkit.writers.ledger import Count, Ledger
from shardkit.writers.recipe import Recipe
from shardkit.writers.stages.clean import DOCUMENTS_FILE, split_name
from shardkit.writers.tokenizer import (
    Encoder,
    Engine,
    EosInTextError,
    Parity,
    Ranges,
    Tokens,
    check_parity,
    load_encoder,
    tokenizer_digest,
    unlike_characters,
)

__all__ = [
    "SEGMENT",
    "SPILL_SCHEMA",
    "Tokenized",
    "TokenizerFacts",
    "TokenizerFile",
    "choose_partitions",
    "parity_task",
    "partition_of",
    "run_tokens_for",
    "tasks",
    "tokenize_split",
    "tokenizer_task",
]

_FIRST = 1 << 60  # a weight that is scheduled before all others

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
class Tokenized:
    """Result of a split: the ledger, tokens with eos, and documents and tokens of each partition.

    `lengths` are the documents' tokens, eos included; `languages` are LanguageCounts as plain data.
    """

    ledger: Ledger
    tokens: int
    partition_documents: list[int] = field(default_factory=list)
    partition_tokens: list[int] = field(default_factory=list)
    lengths: Histogram = field(default_factory=Histogram)
    languages: dict[str, dict[str, int]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a commit; partitions are described by the spill itself."""
        return {
            "ledger": self.ledger.to_dict(),
            "tokens": self.tokens,
            "lengths": self.lengths.to_dict(),
            "languages": self.languages,
        }

    @classmethod
    def of(cls, commit: Commit) -> Tokenized:
        """What a task of this stage committed."""
        counts = commit.counts
        lengths = Histogram.from_dict(counts["lengths"])
        return cls(commit.ledger(), counts["tokens"], lengths=lengths, languages=counts["languages"])


def partition_of(hashes: npt.NDArray[np.uint64], partitions: int) -> npt.NDArray[np.int64]:
    """int64[n]: the partition of each hash: its upper 32 bits scaled to [0, partitions)."""
    scaled = (hashes >> np.uint64(32)) * np.uint64(partitions)
    return (scaled >> np.uint64(32)).astype(np.int64)


def choose_partitions(
    text_bytes: int, documents: int, memory_bytes: int, *, token_bytes: int = 4, shard_bytes: int = 0
) -> int:
    """How many partitions let one packer stay within `memory_bytes` (a worker's share of all memory).

    Assumes half a token a byte of text, twice what English needs, two shards (one is filled while another one
    is written), and a reserve of a quarter. Depends on input and recipe only, so that the shards do, too.
    """
    needed = text_bytes * token_bytes // 2 + documents * DOCUMENT_OVERHEAD_BYTES
    for_partition = max(1, memory_bytes // 8, memory_bytes * 3 // 4 - 2 * shard_bytes)
    return min(max(1, -(-needed // for_partition)), MAX_PARTITIONS)


def run_tokens_for(memory_bytes: int) -> int:
    """Tokens of a run that take a quarter of `memory_bytes` while they are sorted, at four bytes each."""
    return min(RUN_TOKENS, memory_bytes // 32)


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """The tokenizer of a build: its file, the digest of its bytes, and the token that ends texts."""

    file: Artifact
    digest: str
    eos: str

    @classmethod
    def of(cls, recipe: Recipe) -> TokenizerFile:
        """The recipe's tokenizer, on this machine."""
        path = recipe.resolve(recipe.tokenizer.path)
        return cls(Artifact(path), tokenizer_digest(path), recipe.tokenizer.eos)


@dataclass(frozen=True, slots=True)
class TokenizerFacts(PlainCounts):
    """Result of task `tokenizer`: the engine to start with, and characters that it must not encode."""

    eos_id: int
    vocab_size: int
    dtype: str
    engine: Engine
    unlike: Ranges = ()

    @classmethod
    def of(cls, commit: Commit) -> Self:
        """What the task committed."""
        unlike = tuple((first, last) for first, last in commit.counts["unlike"])
        return cls(**{**commit.counts, "unlike": unlike})


def tokenizer_task(tokenizer: TokenizerFile) -> Task:
    """The task that loads the tokenizer early, so that wrong files and eos tokens fail at once."""
    config, inputs = {"tokenizer.eos": tokenizer.eos}, {"tokenizer": tokenizer.digest}
    args = (tokenizer.file, tokenizer.eos)
    return Task("tokenizer", "tokenizer", config, check_tokenizer, args, _FIRST, inputs)


def check_tokenizer(folder: Path, file: Artifact, eos: str) -> TokenizerFacts:
    """Load the tokenizer with the reference engine, and with the fast one if it supports the file."""
    path = file.local()
    encoder = Encoder(path, eos, engine="tokenizers")
    facts = encoder.eos_id, encoder.vocab_size, encoder.dtype.name
    try:  # choose the engine to start with; the parity check decides
        fast = Encoder(path, eos, engine="gigatoken")
        unlike = unlike_characters(fast, encoder)
    except MissingExtraError:
        raise
    except Exception:  # gigatoken raises exceptions of its own for tokenizers that it does not support
        return TokenizerFacts(*facts, "tokenizers")
    return TokenizerFacts(*facts, "gigatoken", unlike)


def parity_task(documents: Sequence[Commit], tokenizer: TokenizerFile, unlike: Ranges) -> Task:
    """Compare the fast tokenizer with the reference on a sample of the documents."""
    paths = tuple(commit.files / DOCUMENTS_FILE for commit in documents)
    contents = digest_of([commit.outputs[DOCUMENTS_FILE].xxh3_128 for commit in documents])
    inputs = {"documents": contents, "tokenizer": tokenizer.digest}
    config = {"tokenizer.eos": tokenizer.eos, "unlike": digest_of(unlike)}
    args = (paths, tokenizer.file, tokenizer.eos, unlike)
    return Task("parity", "parity", config, compare_engines, args, _FIRST, inputs)


def compare_engines(
    folder: Path, documents: Sequence[Artifact], tokenizer: Artifact, eos: str, unlike: Ranges
) -> Parity:
    """`check_parity` without its warning, which the build issues even if this task is skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return check_parity(documents, tokenizer.local(), eos, unlike)


def tasks(
    recipe: Recipe,
    splits: Sequence[Split],
    documents: Sequence[Commit],
    removals: Sequence[SplitRemovals],
    *,
    cleaned: Sequence[Commit],
    tokenizer: TokenizerFile,
    engine: Engine,
    unlike: Ranges,
    partitions: int,
) -> list[Task]:
    """One task a split: its remaining documents, tokenized and divided among `partitions`.

    `documents` are the commits with each split's documents.arrow: `cleaned`, or those that cut lines out.
    """
    run_tokens = run_tokens_for(recipe.memory)
    config = {
        "tokenizer.eos": recipe.tokenizer.eos,
        "engine": engine,
        "unlike": digest_of(unlike),
        "seed": recipe.seed,
        "partitions": partitions,
        "run_tokens": run_tokens,
    }
    encoder = (tokenizer.file, tokenizer.eos, engine, unlike)
    made = []
    for split, commit, removed, first in zip(splits, documents, removals, cleaned, strict=True):
        languages, named = _languages(first, commit)
        inputs = {
            "documents": commit.outputs[DOCUMENTS_FILE].xxh3_128,
            "removed": removed.digest,
            "tokenizer": tokenizer.digest,
        }
        args = (
            *(commit.files / DOCUMENTS_FILE, removed),
            *(encoder, recipe.seed, partitions, run_tokens, languages),
        )
        weight = commit.ledger().kept.bytes
        made.append(Task("tokenize", split_name(split), config, _tokenize, args, weight, inputs | named))
    return made


def _languages(cleaned: Commit, documents: Commit) -> tuple[LanguageLabels | None, dict[str, Any]]:
    """The languages of a split's documents, and the inputs that a task depends on if it reads them."""
    labels = cleaned.counts["languages"]
    if labels is None:
        return None, {}
    commits, rows = {LANGUAGES_FILE: cleaned}, None
    if documents is not cleaned:  # lines were cut, so some documents may be gone
        commits[ROWS_FILE], rows = documents, documents.files / ROWS_FILE
    named = {name: commit.outputs[name].xxh3_128 for name, commit in commits.items()}
    found = LanguageLabels(cleaned.files / LANGUAGES_FILE, tuple(labels), rows)
    return found, {"languages": labels, **named}


def _tokenize(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    encoder: tuple[Artifact, str, Engine, Ranges],
    seed: int,
    partitions: int,
    run_tokens: int,
    languages: LanguageLabels | None,
) -> Tokenized:
    """Load the encoder, which the process caches, and the removed rows; then `tokenize_split`."""
    file, eos, engine, unlike = encoder
    return tokenize_split(
        documents,
        removed.load(),
        load_encoder(file.local(), eos, engine, unlike),
        seed=seed,
        partitions=partitions,
        folder=folder,
        run_tokens=run_tokens,
        languages=languages,
    )


def tokenize_split(
    documents: Artifact,
    removed: Removed,
    encoder: Encoder,
    *,
    seed: int,
    partitions: int,
    folder: Path,
    run_tokens: int = RUN_TOKENS,
    languages: LanguageLabels | None = None,
) -> Tokenized:
    """Encode the documents of an Arrow file (DOCUMENT_SCHEMA) except removed ones; spill into `folder`.

    Documents without any token are booked as dropped under "empty".
    """
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise BuildError(f"{folder}: {partitions} partitions; between 1 and {MAX_PARTITIONS:,} are possible")
    ledger = Ledger()
    lengths = Histogram()
    counts = None if languages is None else languages.open()
    with (
        documents.open_arrow(mapped=True) as source,
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
    result = Tokenized(
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
    """Encode one batch, append eos, and book it; returns the encoded documents and their lengths."""
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
    """Collects documents up to a run, sorts them and appends the run to the files."""

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
        """Write the last run and the segments; returns the segments."""
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
