"""Documents whose words an index has already: they go before anything else is done for them.

    word_keys      split -> WORD_KEYS: the hash of each document's normalized words
    known          range of these keys, with the WORDS of indexes -> the documents that have the same words
    known_removed  these by split

A crawl that repeats an indexed corpus costs little more than hashing its words: these documents get neither
signatures nor bands, and take part in no comparison. This changes no decision, since a document of an index
stays, and what has equal words is a duplicate of it; and a removed document removes no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.kernels.text_arrays import text_offsets
from shardkit.writers.dedup.config import MinHashConfig
from shardkit.writers.dedup.exact import partition_bounds
from shardkit.writers.dedup.index import WORDS, DedupIndex, IndexedKeys, keys_of
from shardkit.writers.dedup.outcomes import (
    OUTCOMES,
    SplitRemovals,
    by_split,
    document_keys,
    outcomes,
    write_tables,
)
from shardkit.writers.dedup.population import SplitDocuments
from shardkit.writers.dedup.resolve import LOSERS_FILE, NEAR_LOSER, Resolved, kept_in_index
from shardkit.writers.dedup.signatures import kept_rows, sign_batch
from shardkit.writers.dedup.tables import RowsWriter
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import RunTasks, Stage, partition_name

WORD_KEYS = Table(
    "word_keys.run",
    np.dtype(
        [
            *(("key", "<u8"), ("low", "<u8")),  # the halves of the hash, as in WORDS
            ("bytes", "<i8"),
            ("row", "<u4"),  # row in documents.arrow
            ("copies", "<i4"),  # number of documents with exactly this text, this one included
            ("source", "<i4"),
            ("split", "<i4"),
        ]
    ),
    origin="split",
)

_KNOWN = "known"  # reason of these documents until the end of near-duplicate removal

_ROWS_AT_ONCE = 1 << 16  # documents that are looked up at a time


@dataclass(frozen=True, slots=True)
class KnownCounts:
    """Removed documents, their bytes and exact copies, and (documents, bytes) by source number as text."""

    losers: int = 0
    bytes: int = 0
    copies: int = 0
    sources: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Known:
    """The documents that an index has already.

    `removals` are the earlier removals of each split together with these documents. `commits` have OUTCOMES.
    """

    removals: Sequence[SplitRemovals]
    commits: Sequence[Commit]
    counts: KnownCounts

    def rows(self) -> npt.NDArray[np.void]:
        """Return the documents, rows of NEAR_LOSER; `kept` is the number over all indexes."""
        return np.concatenate([np.load(commit.folder / LOSERS_FILE) for commit in self.commits])

    def added_to(self, decided: Resolved) -> Resolved:
        """Return the totals of near-duplicate removal with these documents."""
        counts = self.counts
        sources = {source: dict(one) for source, one in decided.sources.items()}
        for source, (documents, size) in counts.sources.items():
            one = sources.setdefault(source, {"documents": 0, "losers": 0, "bytes": 0})
            one["documents"] += documents
            one["losers"] += documents
            one["bytes"] += size
        return replace(
            decided,
            equal=decided.equal + counts.losers,
            losers=decided.losers + counts.losers,
            bytes=decided.bytes + counts.bytes,
            copies=decided.copies + counts.copies,
            kept_by_index=decided.kept_by_index + counts.losers,
            sources={source: sources[source] for source in sorted(sources, key=int)},
        )


def find_known(
    run: RunTasks,
    splits: Sequence[SplitDocuments],
    removals: Sequence[SplitRemovals],
    minhash: MinHashConfig,
    indexes: Sequence[DedupIndex],
    memory_bytes: int,
    limits: Limits,
) -> Known:
    """Run the stages; without indexes none."""
    if not indexes:
        return Known(removals, (), KnownCounts())
    tasks = []
    for split, gone in zip(splits, removals, strict=True):
        args = split.documents, gone, minhash, memory_bytes
        tasks.append(HASH_WORDS.task(split.name, split.bytes, *args))
    [hashed] = run(tasks)
    partitions = limits.partitions(sum(map(HASH_WORDS.result, hashed)), WORD_KEYS.dtype)
    keys = exchange(run, FIND_KNOWN, WORD_KEYS, hashed, readers=partitions, limits=limits)
    tasks = []
    for number in range(partitions):
        bounds = partition_bounds(number, partitions)
        piece, words = keys.slice(*bounds), keys_of(indexes, WORDS, 0, *bounds)
        name = partition_name(number, partitions)
        tasks.append(FIND_KNOWN.task(name, piece.bytes, piece, words, memory_bytes))
    [found] = run(tasks)
    tables = by_split(run, KNOWN_REMOVED, OUTCOMES, found, len(splits), limits=limits, consumed=False)
    also = [gone.also(_KNOWN, table) for gone, table in zip(removals, tables, strict=True)]
    return Known(also, found, _sum([FIND_KNOWN.result(commit) for commit in found]))


def _sum(counts: Sequence[KnownCounts]) -> KnownCounts:
    sources: dict[str, tuple[int, int]] = {}
    for one in counts:
        for source, (documents, size) in one.sources.items():
            before = sources.get(source, (0, 0))
            sources[source] = before[0] + documents, before[1] + size
    losers, size, copies = (
        sum(getattr(one, name) for one in counts) for name in ("losers", "bytes", "copies")
    )
    return KnownCounts(losers, size, copies, sources)


def hash_words(
    folder: Path,
    documents: Artifact,
    removed: SplitRemovals,
    minhash: Annotated[MinHashConfig, RecipeKey("dedup.near.minhash")],
    memory_bytes: MemoryBytes,
) -> int:
    """Write the WORD_KEYS of the remaining documents of a split that have words; return their number."""
    gone, start, count = removed.load(), 0, 0
    losers = np.sort(np.concatenate([np.zeros(0, np.int64), *gone.rows.values()]))
    words = minhash.model_copy(update={"permutations": 0})
    with (
        documents.open_arrow() as source,
        RunWriter(folder / WORD_KEYS.file, WORD_KEYS, memory_bytes=memory_bytes // 2) as writer,
    ):
        reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[1, 4]))
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            kept = kept_rows(losers, start, batch.num_rows)
            copies, here = np.ones(batch.num_rows, np.int64), gone.within(start, batch.num_rows)
            copies[here.copied] = here.copies
            if len(kept) < batch.num_rows:
                batch = batch.take(pa.array(kept))
            signed = sign_batch(batch.column("text"), words)
            some = np.flatnonzero(signed.shingles)
            rows = np.empty(len(some), WORD_KEYS.dtype)
            rows["key"], rows["low"] = signed.keys[some].view(">u8").T
            rows["bytes"] = np.diff(text_offsets(batch.column("text")))[some]
            rows["row"], rows["copies"] = start + kept[some], copies[kept[some]]
            rows["source"], rows["split"] = batch.column("source").to_numpy()[some], -1
            writer.write(rows)
            start, count = start + len(copies), count + len(rows)
    return count


HASH_WORDS = Stage("word_keys", "near-duplicates", hash_words, cost=4)


def write_known(
    folder: Path, keys: Slice, words: tuple[IndexedKeys, ...], memory_bytes: MemoryBytes
) -> KnownCounts:
    """Write the documents of a range of keys that have the words of a document of an index."""
    counts = KnownCounts()
    with (
        RunWriter(folder / OUTCOMES.file, OUTCOMES, memory_bytes=memory_bytes // 4) as writer,
        RowsWriter(folder / LOSERS_FILE, NEAR_LOSER) as table,
    ):
        for batch, _ in keys.stream(memory_bytes // 4):
            for start in range(0, len(batch), _ROWS_AT_ONCE):
                rows = batch[start : start + _ROWS_AT_ONCE]
                found = _in_indexes(rows, words)
                rows, kept = rows[found >= 0], found[found >= 0].astype(np.uint64)
                places = document_keys(rows["split"], rows["row"])
                writer.write(outcomes(places, bytes=rows["bytes"], kept=kept_in_index(kept), similarity=1.0))
                losers = np.empty(len(rows), NEAR_LOSER)
                losers["kept"] = kept
                for name in ("split", "row", "bytes", "copies"):
                    losers[name] = rows[name]
                table.write(losers)
                counts = _sum([counts, _counted(rows)])
    return counts


FIND_KNOWN = Stage("known", "near-duplicates", write_known, cost=1)

KNOWN_REMOVED = Stage("known_removed", "near-duplicates", write_tables)


def _counted(rows: npt.NDArray[np.void]) -> KnownCounts:
    sources = {}
    for source in np.unique(rows["source"]).tolist():
        own = rows["bytes"][rows["source"] == source]
        sources[str(source)] = len(own), int(own.sum())
    return KnownCounts(len(rows), int(rows["bytes"].sum()), int(rows["copies"].sum(dtype=np.int64)), sources)


def _in_indexes(rows: npt.NDArray[np.void], words: Sequence[IndexedKeys]) -> npt.NDArray[np.int64]:
    """Return the number over all indexes of the first document with these words, int64[n]; -1: none.

    `rows` are rows of WORD_KEYS in the order of their keys.
    """
    numbers = np.full(len(rows), -1, np.int64)
    keys = np.ascontiguousarray(rows["key"])
    wanted = keys[np.append(np.ones(1, np.bool_), keys[1:] != keys[:-1])[: len(keys)]]
    for index in reversed(words):  # the first index wins
        found = index.matching(wanted)
        begin, end = (np.searchsorted(found["key"], keys, side) for side in ("left", "right"))
        for nth in range(int((end - begin).max(initial=0)) - 1, -1, -1):  # almost always one
            places = np.minimum(begin + nth, len(found) - 1)
            same = (begin + nth < end) & (found["low"][places] == rows["low"])
            numbers[same] = index.first + found["number"][places[same]].astype(np.int64)
    return numbers
