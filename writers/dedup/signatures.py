"""MinHash signatures of texts (Broder 1997), and the keys of their bands (Indyk and Motwani 1998).

Value i of a signature is the least of h_i(x) = a_i * x modulo 2**32 over the text's n-grams, where x is the
upper half of an n-gram's 64-bit hash and a_i is odd. (Hashes are random already: a summand would not make
their orders more independent.) Two signatures agree in a value with a probability near the Jaccard similarity
of the sets of n-grams.

A band is some neighboring values; its key is a 64-bit hash of them, of the band's number, and of the group
(source, language, or value of a field) where documents are compared within their group only. Texts without
any word have no signature: they are similar to nothing. From UTF-8 to signatures takes about 2 ns per byte
with 112 functions on a core with AVX-512.

A part of the population holds the documents of one split that can be near-duplicates, with what is read of
their signatures: the keys of the bands, and a byte of each value (`print_bytes`). It leaves out documents
that were removed before (for example by equal texts), and texts without any word. Its files are described in
`population.py`; rows keep the order of the split's documents. Once it is known which of them lose to equal
words, `write_bands` sorts the band keys of the others. Memory is one batch of documents and the buffers in
which runs are sorted; it does not grow with the split.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from shardkit.kernels.numba_support import Int64s, UInt8s, UInt32s, UInt64s, int64, kernel
from shardkit.kernels.text_arrays import text_bytes, text_offsets
from shardkit.writers.dedup.bands import BANDS, optimal_parameters
from shardkit.writers.dedup.config import FieldScope, MinHashConfig, NearDedupConfig, Scope
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.outcomes import Removed, SplitRemovals
from shardkit.writers.dedup.population import (
    BANDS_FILE,
    DOCUMENT,
    DOCUMENTS_FILE,
    PRINTS_FILE,
    LanguageLabels,
)
from shardkit.writers.dedup.tables import CHUNK_ROWS, RowFile, RowsWriter
from shardkit.writers.exchange.exchange import RunWriter, Slice, StepReader, Table
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage
from shardkit.writers.kernels.shingles import UNITS, make_shingle_scratch, next_shingles
from shardkit.writers.kernels.words import UNSPACED_CLASS, CharacterTables, character_tables, composed
from shardkit.writers.rows.documents import content_ranks, metadata_values, text_digests

EQUAL_KEYS = replace(KEYS, file="equal_keys.run", stays=False)  # as KEYS, of the normalized words

_EMPTY = np.uint32(0xFFFFFFFF)

_MASK = (1 << 64) - 1

_BAND_SEED_64, _BAND_FACTOR_64 = np.uint64(0x452821E638D01377), np.uint64(0x9E3779B97F4A7C15)

_U29, _U32 = np.uint64(29), np.uint64(32)

_GLOBAL = -1

_UNSPACED = re.compile(f"[{UNSPACED_CLASS}]")
_LONG_WORD_BYTES = 15  # only texts with longer words on average are checked for their script
_BEGINNING_CHARACTERS = 400


class Signatures(NamedTuple):
    """The signatures of n texts, the keys of their words, and their numbers of n-grams (`shingles`).

    `keys`, uint8[n, 16], are equal if the normalized words are equal and in the same order. A text without
    words has 0 n-grams.
    """

    values: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.uint8]
    shingles: npt.NDArray[np.int64]


def permutations(count: int, seed: int) -> npt.NDArray[np.uint32]:
    """Return the odd factors a_i, uint32[count], from splitmix64 (Steele, Lea and Flood 2014)."""
    state, numbers = seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        value = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
        numbers.append(value ^ value >> 31)
    return np.array([number >> 32 | 1 for number in numbers], np.uint32)


def sign_batch(texts: pa.LargeStringArray, config: MinHashConfig) -> Signatures:
    """Return the signatures of texts (large_string without nulls)."""
    texts = composed(texts)
    data, edges = text_bytes(texts), text_offsets(texts)
    factors = permutations(config.permutations, config.seed)
    values = np.full((len(texts), len(factors)), _EMPTY)
    keys, shingles = np.zeros((len(texts), 2), np.uint64), np.zeros(len(texts), np.int64)
    unit = UNITS.index(config.unit)
    _sign(data, edges, config.ngram, unit, character_tables(), factors, values, keys, shingles)
    return Signatures(values, keys.astype("<u8").view(np.uint8).reshape(-1, 16), shingles)


def word_keys(texts: pa.LargeStringArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """Return the 128-bit keys of each text's normalized words in order, and which texts have words.

    Shapes: uint8[n, 16] and bool[n].
    """
    _, keys, shingles = sign_batch(
        texts, MinHashConfig.model_construct(unit="words", ngram=1, permutations=0)
    )
    return keys, shingles > 0


def band_keys(
    signatures: npt.NDArray[np.uint32],
    bands: int,
    rows: int,
    groups: npt.NDArray[np.integer[Any]] | None = None,
) -> npt.NDArray[np.uint64]:
    """Return the band keys, uint64[n, bands], of signatures, uint32[n, permutations].

    `groups`, int[n], are hashed into the keys, so that documents of different groups share no key.
    """
    assert bands * rows <= signatures.shape[1]
    keys = np.empty((len(signatures), bands), np.uint64)
    apart = np.full(len(signatures), _GLOBAL) if groups is None else groups.astype(np.int64)
    _hash_bands(signatures, apart, rows, keys)
    return keys


@kernel
def _sign(
    data: UInt8s,
    edges: Int64s,
    ngram: int,
    unit: int,
    tables: CharacterTables,
    factors: UInt32s,
    values: UInt32s,
    keys: UInt64s,
    shingles: Int64s,
) -> None:
    scratch = make_shingle_scratch(ngram)
    hashes = scratch[2]
    some = len(factors) > 0
    for text in range(len(edges) - 1):
        at, stop, state = edges[text], edges[text + 1], (int64(0), int64(0))
        key, lowest = keys[text], values[text]  # outside of the inner loop, since a view is reference-counted
        count = 0
        while at < stop:
            found, at, state = next_shingles(data, at, stop, state, ngram, unit, tables, scratch, key)
            count += found
            if some:
                _lower_values(hashes, found, factors, lowest)
        shingles[text] = count


@kernel
def _lower_values(hashes: UInt64s, count: int, factors: UInt32s, values: UInt32s) -> None:
    """Set values[i] to min(values[i], factors[i] * x) for each x, the upper half of one of hashes[:count].

    Each pass takes eight n-grams, so that factors are loaded an eighth as often; the compiler vectorizes the
    loop over factors.
    """
    at = 0
    while at + 8 <= count:
        x0, x1 = _upper(hashes[at]), _upper(hashes[at + 1])
        x2, x3 = _upper(hashes[at + 2]), _upper(hashes[at + 3])
        x4, x5 = _upper(hashes[at + 4]), _upper(hashes[at + 5])
        x6, x7 = _upper(hashes[at + 6]), _upper(hashes[at + 7])
        for i in range(len(values)):
            factor, least = factors[i], values[i]
            least = min(least, np.uint32(factor * x0))
            least = min(least, np.uint32(factor * x1))
            least = min(least, np.uint32(factor * x2))
            least = min(least, np.uint32(factor * x3))
            least = min(least, np.uint32(factor * x4))
            least = min(least, np.uint32(factor * x5))
            least = min(least, np.uint32(factor * x6))
            values[i] = min(least, np.uint32(factor * x7))
        at += 8
    while at < count:
        x = _upper(hashes[at])
        for i in range(len(values)):
            values[i] = min(values[i], np.uint32(factors[i] * x))
        at += 1


@kernel(inline=True)
def _upper(number: np.uint64) -> np.uint32:
    return np.uint32(number >> _U32)


@kernel
def _hash_bands(signatures: UInt32s, groups: Int64s, rows: int, keys: UInt64s) -> None:
    for text in range(len(keys)):
        for band in range(keys.shape[1]):
            value = _BAND_SEED_64 ^ np.uint64(band)
            value = (value ^ np.uint64(groups[text])) * _BAND_FACTOR_64
            for row in range(band * rows, (band + 1) * rows):
                value ^= value >> _U32
                value = (value ^ np.uint64(signatures[text, row])) * _BAND_FACTOR_64
            value ^= value >> _U32
            value *= _BAND_FACTOR_64
            keys[text, band] = value ^ value >> _U29


def print_bytes(signatures: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    """Return one byte per value of signatures, uint8[n, permutations], as PRINTS_FILE has them."""
    # The product's upper byte depends on all bits of the value, also of small values (Fibonacci hashing).
    return (signatures * np.uint32(0x9E3779B1) >> np.uint32(24)).astype(np.uint8)


LOST = Table("lost.run", np.dtype([("key", "<u8")]))  # key: document_keys(part, row), removed for equal words


def bands_and_rows(config: NearDedupConfig) -> tuple[int, int]:
    """Return the bands and rows of the recipe, or the best ones for its similarity if they are null."""
    if config.bands is not None and config.rows is not None:
        return config.bands, config.rows
    return optimal_parameters(config.similarity, config.minhash.permutations)


def value_groups(values: Sequence[object]) -> npt.NDArray[np.uint64]:
    """Return the hashes of values as JSON, uint64[n]; two values have the same with probability 2^-64."""
    texts = [orjson.dumps(value, option=orjson.OPT_SORT_KEYS) for value in values]
    return np.array([xxhash.xxh3_64_intdigest(text) for text in texts], np.uint64)


def _batch_groups(
    batch: pa.RecordBatch,
    rows: npt.NDArray[np.int64],
    start: int,
    scope: Scope,
    known: npt.NDArray[np.uint64] | None,
) -> npt.NDArray[np.uint64] | None:
    """Return the groups within which `rows` of a batch are compared; None with scope global.

    `start` is the row of the batch's first document. `known` has the groups of all rows, if not None.
    """
    if known is not None:
        own: npt.NDArray[np.uint64] = known[start + rows]
        return own
    if isinstance(scope, FieldScope):
        name = scope.field
        return value_groups(metadata_values(batch.column("metadata").take(pa.array(rows)), name))
    if scope == "language":
        raise ValueError("scope: language: files of documents record no languages; use {field: NAME}")
    if scope == "source":
        sources: npt.NDArray[np.uint64] = batch.column("source").to_numpy()[rows].astype(np.uint64)
        return sources
    return None


@dataclass(frozen=True, slots=True)
class SignedPart:
    """Counts of one part: `documents` with a signature, and `wordless` ones, which have no signature.

    `unspaced` counts documents that begin mostly in a script without spaces while the unit is words, so that
    their "words" are whole sentences.
    """

    documents: int
    wordless: int
    unspaced: int = 0


def sign_split(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    minhash: Annotated[MinHashConfig, RecipeKey("dedup.near.minhash")],
    bands: Annotated[int, RecipeKey("dedup.near.bands")],
    rows: Annotated[int, RecipeKey("dedup.near.rows")],
    scope: Annotated[Scope, RecipeKey("dedup.near.scope")],
    languages: LanguageLabels | None,
    memory_bytes: MemoryBytes,
) -> SignedPart:
    """Write the tables of a split's part into `folder`; `languages` are needed if the scope is language."""
    gone, how = removed.load(), (minhash, (bands, rows), scope)
    groups = None if languages is None else value_groups(languages.labels)[languages.read()]
    return sign_documents(documents, gone, *how, folder, memory_bytes=memory_bytes, groups=groups)


SIGN = Stage("signatures", "near-duplicates", sign_split, cost=14)


def sign_documents(
    documents: Artifact,
    removed: Removed,
    minhash: MinHashConfig,
    banding: tuple[int, int],
    scope: Scope,
    folder: Path,
    *,
    memory_bytes: int = 64 << 20,
    groups: npt.NDArray[np.uint64] | None = None,
) -> SignedPart:
    """Write the tables of the part with these documents (an Arrow file of DOCUMENT_SCHEMA) into `folder`.

    Documents in `removed` are left out; documents that represent them keep their copy counts. `banding` is
    (bands, rows). `groups` are the groups of all rows if they cannot be read from the documents.
    """
    losers = np.sort(np.concatenate([np.zeros(0, np.int64), *removed.rows.values()]))
    start = wordless = unspaced = 0
    with ExitStack() as stack:
        source = stack.enter_context(documents.open_arrow())
        table = stack.enter_context(RowsWriter(folder / DOCUMENTS_FILE, DOCUMENT))
        width = minhash.permutations
        prints = stack.enter_context(RowsWriter(folder / PRINTS_FILE, np.uint8, width=width))
        bands = stack.enter_context(RowsWriter(folder / BANDS_FILE, "<u8", width=banding[0]))
        keys = stack.enter_context(
            RunWriter(folder / EQUAL_KEYS.file, EQUAL_KEYS, memory_bytes=memory_bytes // 2)
        )
        fields = [0, 1, 4, 7] if isinstance(scope, FieldScope) else [0, 1, 4]
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=fields))
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            kept = kept_rows(losers, start, batch.num_rows)
            signed, described, without_spaces = _sign_batch(batch, kept, minhash)
            unspaced += without_spaces
            own = _batch_groups(batch, described["row"], start, scope, groups)
            copies, here = np.ones(batch.num_rows, np.int64), removed.within(start, batch.num_rows)
            copies[here.copied] = here.copies
            described["copies"] = copies[described["row"]]
            described["row"] += start
            start += batch.num_rows
            wordless += len(kept) - len(described)
            keys.write(_key_rows(signed, described, own, table.rows))
            prints.write(print_bytes(signed.values))
            bands.write(band_keys(signed.values, *banding, own).astype("<u8", copy=False))
            table.write(described)
    return SignedPart(table.rows, wordless, unspaced)


def write_bands(folder: Path, keys: Artifact, first: int, lost: Slice, memory_bytes: MemoryBytes) -> None:
    """Write the band keys of a part whose first document has number `first`, without documents in LOST.

    `keys` is the part's BANDS_FILE.
    """
    stored, gone = RowFile(keys), StepReader(lost, memory_bytes // 8)
    [bands] = stored.row_shape
    # A chunk is held as keys, and twice as entries, within a quarter of the memory.
    most = max(1, min(CHUNK_ROWS, memory_bytes // 4 // ((8 + 2 * BANDS.dtype.itemsize) * bands)))
    with RunWriter(folder / BANDS.file, BANDS, memory_bytes=memory_bytes // 2) as run:
        for start in range(0, stored.rows, most):
            stop = min(start + most, stored.rows)
            losers = (gone.before(lost.start + stop)["key"] - np.uint64(lost.start)).astype(np.int64)
            kept = start + kept_rows(losers, start, stop - start)
            entries = np.empty(len(kept) * bands, BANDS.dtype)
            entries["key"], entries["number"] = stored.read(kept).reshape(-1), np.repeat(first + kept, bands)
            run.write(entries)


MAKE_BANDS = Stage("bands", "near-duplicates", write_bands, cost=5)


def kept_rows(losers: npt.NDArray[np.int64], start: int, count: int) -> npt.NDArray[np.int64]:
    first, last = np.searchsorted(losers, [start, start + count])
    return np.delete(np.arange(count), losers[first:last] - start)


def _sign_batch(
    batch: pa.RecordBatch, kept: npt.NDArray[np.int64], minhash: MinHashConfig
) -> tuple[Signatures, npt.NDArray[np.void], int]:
    """Return signatures and DOCUMENT rows (`row` within the batch) of the rows `kept` that have words.

    Also returns the number of texts whose words are whole sentences (`SignedPart.unspaced`).
    """
    if len(kept) < batch.num_rows:
        batch = batch.take(pa.array(kept))
    signed = sign_batch(batch.column("text"), minhash)
    unspaced = _count_unspaced(batch.column("text"), signed.shingles) if minhash.unit == "words" else 0
    some = np.flatnonzero(signed.shingles)
    described = np.empty(len(kept), DOCUMENT)
    described["id"] = content_ranks(text_digests(batch.column("text")), batch.column("document_id"))
    described["row"] = kept
    described["bytes"] = np.diff(text_offsets(batch.column("text")))
    described["source"] = batch.column("source").to_numpy()
    described["copies"] = 1
    if len(some) < len(kept):
        signed = Signatures(signed.values[some], signed.keys[some], signed.shingles[some])
        described = described[some]
    return signed, described, unspaced


def _count_unspaced(texts: pa.LargeStringArray, shingles: npt.NDArray[np.int64]) -> int:
    """Count texts with few n-grams for their size whose beginning is in a script without spaces."""
    few = np.flatnonzero(np.diff(text_offsets(texts)) > _LONG_WORD_BYTES * (shingles + 1))
    beginnings = (texts[int(row)].as_py()[:_BEGINNING_CHARACTERS] for row in few)
    return sum(2 * len(_UNSPACED.findall(one)) > len(one) for one in beginnings)


def _key_rows(
    signed: Signatures,
    described: npt.NDArray[np.void],
    groups: npt.NDArray[np.uint64] | None,
    first_row: int,
) -> npt.NDArray[np.void]:
    rows = np.empty(len(described), EQUAL_KEYS.dtype)
    rows["key"], rows["low"] = signed.keys.view(">u8").T
    if groups is not None:  # the same words must get different keys in different groups
        rows["key"] ^= (groups + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    rows["id"] = np.ascontiguousarray(described["id"]).view(">u8")
    rows["split"] = -1  # set by the exchange when it reads the run
    rows["row"] = np.arange(first_row, first_row + len(rows))
    rows["bytes"] = described["bytes"]
    rows["source"] = described["source"]
    return rows
