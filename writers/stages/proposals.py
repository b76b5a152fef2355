"""Finds which documents that are proposed for a part of `split` are similar to any other document.

    propose   a split: its proposed documents with their sets of n-grams            PROPOSED
    tables    a range of keys: n-gram -> the proposed documents that have it         tables.npy …
    probe     a split and a table: families of the table similar to a document of the split    ALIKE

All pairs are compared, not candidates of a hash: the n-grams of the proposed documents are few and fit into
tables, in which every kept document is looked up. Documents of one family are not compared with each other;
without `split.by`, a family is one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.hashing import keyed_id_hashes
from shardkit.kernels.numba_support import Bools, Int32s, Int64s, UInt64s, kernel
from shardkit.kernels.text_arrays import text_offsets
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.outcomes import SplitRemovals, SplitTable
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import Stage
from shardkit.writers.kernels.hash_tables import fill_places, find_matches, table_slots
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.rows.documents import id_bytes
from shardkit.writers.stages.families import CANDIDATES, FITTED, Families, remaining_batches

PROPOSED = Table(
    "proposed.run",
    np.dtype(
        [
            ("key", "<u8"),  # `family`; with `split.by` a hash of the document, as families may be large
            ("size", "<i8"),  # bytes of the payload: the document's distinct n-grams, uint64, ascending
            ("family", "<u8"),
            ("row", "<u4"),
            ("part", "<i4"),
            ("source", "<i4"),
            ("split", "<i4"),
        ]
    ),
    payload=True,
    origin="split",
)
ALIKE = Table("alike.run", np.dtype([("key", "<u8")]))  # keys are families

TABLE_BYTES = 40  # upper estimate of the memory of a table and its inputs, per byte of text
_HASHES, _STARTS, _MEMBERS = "hashes.npy", "starts.npy", "members.npy"
_BITS_PER_KEY = 16
_MEMORY = 64 << 20


@dataclass(frozen=True, slots=True)
class Proposed:
    """Counts of one split: the number of proposed documents, and the size of their texts in bytes."""

    documents: int
    bytes: int


def propose(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    stops: Sequence[int],
    families: Annotated[Families, RecipeKey()],
    ngrams: Annotated[MinHashConfig, RecipeKey("dedup.near.minhash")],
    memory_bytes: MemoryBytes,
    limits: Limits,
    fitting: SplitTable | None = None,
) -> Proposed:
    """Write the proposed documents of a split with their n-grams.

    These are the documents in `fitting`; if it is None, those with a hash below the last of `stops`.
    """
    count = size = 0
    with RunWriter(folder / PROPOSED.file, PROPOSED, memory_bytes=memory_bytes // 2, limits=limits) as run:
        fitted = None if fitting is None else fitting.read(FITTED)
        for start, batch, kept in remaining_batches(documents, removed):
            if fitted is None:
                rows = _below(start, batch, kept, np.array(stops, np.uint64), families)
            else:
                rows = _fitting(start, batch, fitted, families.seed)
            if not len(rows):
                continue
            taken = batch.take(pa.array(rows["row"].astype(np.int64) - start))
            rows["source"] = taken.column("source").to_numpy()
            found = shingle_batch(taken.column("text"), ngrams)
            sets = [np.unique(found.hashes[a:b]) for a, b in pairwise(found.offsets.tolist())]
            rows["size"] = [one.nbytes for one in sets]
            run.write(rows, np.concatenate([np.empty(0, np.uint64), *sets]).view(np.uint8))
            count += len(rows)
            size += int(np.diff(text_offsets(taken.column("text"))).sum())
    return Proposed(count, size)


def _below(
    start: int, batch: pa.RecordBatch, kept: Int64s, ends: UInt64s, families: Families
) -> npt.NDArray[np.void]:
    """Return rows of PROPOSED for the `kept` documents, each its own family, below the last of `ends`."""
    hashes = families.hashes(batch.select(["document_id"]).take(pa.array(kept)))
    parts = np.searchsorted(ends, hashes, side="right")
    drawn = np.flatnonzero(parts < len(ends))
    rows = np.zeros(len(drawn), PROPOSED.dtype)
    rows["key"] = rows["family"] = hashes[drawn]
    rows["part"], rows["row"], rows["split"] = parts[drawn], start + kept[drawn], -1
    return rows


def _fitting(
    start: int, batch: pa.RecordBatch, fitted: npt.NDArray[np.void], seed: int
) -> npt.NDArray[np.void]:
    """Return rows of PROPOSED for the documents of a batch that are in the table `fitted`."""
    first, last = np.searchsorted(fitted["row"], [start, start + batch.num_rows])
    here = fitted[first:last]
    rows = np.zeros(len(here), PROPOSED.dtype)
    ids = id_bytes(batch.column("document_id"))[here["row"].astype(np.int64) - start]
    rows["key"] = keyed_id_hashes(ids, seed, "split n-grams")
    rows["family"], rows["row"] = here["family"], here["row"]
    return rows


SPLIT_PROPOSE = Stage("split_propose", "split", propose, cost=8)


def make_table(folder: Path, piece: Slice) -> None:
    """Write the table of a range of proposed documents: which documents contain each n-gram."""
    rows, payload = piece.read()
    hashes = payload.view("<u8")
    sizes = rows["size"] // 8
    unique, inverse = np.unique(hashes, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    members = np.repeat(np.arange(len(rows), dtype=np.int32), sizes)[order]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(inverse, minlength=len(unique)))])
    described = np.zeros(len(rows), _CANDIDATE)
    for name in ("key", "row", "part", "source", "split"):
        described[name] = rows["family" if name == "key" else name]
    described["ngrams"] = sizes
    files = {CANDIDATES: described, _HASHES: unique, _STARTS: starts, _MEMBERS: members}
    for name, values in files.items():
        np.save(folder / name, values)


SPLIT_TABLES = Stage("split_tables", "split", make_table)


_CANDIDATE = np.dtype(
    [("key", "<u8"), ("row", "<u4"), ("part", "<i4"), ("source", "<i4"), ("split", "<i4"), ("ngrams", "<i8")]
)


@dataclass(frozen=True, slots=True)
class _NgramTable:
    """The proposed documents of a range, and which of them contain each n-gram.

    `keys` are the hashes of their families, ascending; `families` has the place of each document's family
    in `keys`.
    """

    keys: UInt64s
    families: Int64s
    ngrams: Int64s
    bits: UInt64s
    slots: UInt64s
    places: Int64s
    starts: Int64s
    members: Int32s


@lru_cache(maxsize=1)
def _load_table(folder: Path, has_families: bool) -> _NgramTable:
    described, hashes = np.load(folder / CANDIDATES), np.load(folder / _HASHES)
    slots = int(table_slots(2 * len(hashes)))
    bits = np.zeros(max(1, slots * _BITS_PER_KEY // 128), np.uint64)
    keys, places = np.zeros(slots, np.uint64), np.full(slots, -1, np.int64)
    fill_places(hashes, bits, keys, places)
    starts, members = np.load(folder / _STARTS), np.load(folder / _MEMBERS)
    ngrams = np.ascontiguousarray(described["ngrams"])
    names, families = np.ascontiguousarray(described["key"]), np.arange(len(described))
    if has_families:
        names, families = np.unique(names, return_inverse=True)
    return _NgramTable(names, families, ngrams, bits, keys, places, starts, members)


def probe(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    table: Artifact,
    families: Annotated[Families, RecipeKey()],
    ngrams: Annotated[MinHashConfig, RecipeKey("dedup.near.minhash")],
    similarity: Annotated[float, RecipeKey("split.similarity")],
    limits: Limits,
) -> None:
    """Write the families in `table` of which a document is similar to one of this split in no such family."""
    for name in (CANDIDATES, _HASHES, _STARTS, _MEMBERS):
        (table / name).local()
    loaded = _load_table(table.path, families.by is not None)
    alike, last = np.zeros(len(loaded.ngrams), np.bool_), len(loaded.keys) - 1
    for _, batch, kept in remaining_batches(documents, removed, families.labels) if len(alike) else ():
        taken = batch.take(pa.array(kept)) if len(kept) < batch.num_rows else batch
        found = shingle_batch(taken.column("text"), ngrams)
        matches = find_matches(found.hashes, loaded.bits, loaded.slots, loaded.places)
        if not len(matches):
            continue
        keys = families.hashes(taken)
        own = np.searchsorted(loaded.keys, keys)
        own[loaded.keys[np.minimum(own, last)] != keys] = -1
        shared = matches, found.offsets, own, loaded.families, loaded.starts, loaded.members, loaded.ngrams
        _mark_alike(*shared, similarity, alike)
    found_alike = np.unique(loaded.keys[loaded.families[alike]])
    rows = np.zeros(len(found_alike), ALIKE.dtype)
    rows["key"] = found_alike
    with RunWriter(folder / ALIKE.file, ALIKE, memory_bytes=_MEMORY, limits=limits) as run:
        run.write(rows)


SPLIT_PROBE = Stage("split_probe", "split", probe, cost=20)


@kernel
def _mark_alike(
    matches: Int64s,
    offsets: Int64s,
    own: Int64s,
    families: Int64s,
    starts: Int64s,
    members: Int32s,
    ngrams: Int64s,
    similarity: float,
    alike: Bools,
) -> None:
    """Set alike[i] if proposed document i is similar to a text of another family than its own, families[i].

    Text t is in family own[t], or in none of these if it is -1. `matches` are ascending (n-gram index in the
    texts, index in the table); `offsets` are per text.
    """
    distinct = np.zeros(len(ngrams), np.int64)
    positions = np.zeros(len(ngrams), np.int64)
    touched = np.empty(len(ngrams), np.int64)
    seen = np.full(len(starts), -1, np.int64)  # the last text that contained each n-gram
    at = 0
    for text in range(len(offsets) - 1):
        count = 0
        while at < len(matches) and matches[at, 0] < offsets[text + 1]:
            ngram = matches[at, 1]
            new = seen[ngram] != text
            seen[ngram] = text
            for i in range(starts[ngram], starts[ngram + 1]):
                other = members[i]
                if families[other] == own[text]:
                    continue
                if positions[other] == 0:
                    touched[count] = other
                    count += 1
                positions[other] += 1
                distinct[other] += new
            at += 1
        total = offsets[text + 1] - offsets[text]
        for i in range(count):
            other = touched[i]
            if distinct[other] >= similarity * ngrams[other] or positions[other] >= similarity * total:
                alike[other] = True
            distinct[other] = positions[other] = 0
