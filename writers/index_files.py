"""The tasks that write the files of an index: a part for each split, a table for each range of keys.

`index_part` writes a split's documents, and the keys of these as runs; an exchange brings the keys of all
parts into ranges, and `write_tables` writes a table for each range (dedup/index.py). For an index in a store,
each task uploads what it wrote, under a name that is a digest of its inputs, so that a file never changes.

For a split of any size, the memory of `index_part` is a chunk of rows, some megabytes of keys, and the
n-grams of some megabytes of text (or of one document).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import BuildError
from shardkit.kernels.text_arrays import text_pieces
from shardkit.storage.resilient import connect
from shardkit.storage.store import StorageOptions, StoreError
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.exact import partition_bounds
from shardkit.writers.dedup.index import (
    BANDS_OF_INDEX,
    BLOCKS_FILE,
    MOST_DOCUMENTS,
    PART_FILES,
    TABLE_FILES,
    TABLE_LIMITS,
    WORDS,
)
from shardkit.writers.dedup.outcomes import SplitRemovals, SplitTable
from shardkit.writers.dedup.population import (
    BANDS_FILE,
    DOCUMENT,
    DOCUMENTS_FILE,
    INDEX_PRINTS,
    INDEXED,
    PARTS,
    PRINTS_FILE,
    STARTS_FILE,
)
from shardkit.writers.dedup.shingle_store import distinct_sets
from shardkit.writers.dedup.signatures import EQUAL_KEYS, bands_and_rows
from shardkit.writers.dedup.sketches import INDEXED_LIMIT, SketchWriter
from shardkit.writers.dedup.tables import CHUNK_ROWS, RowFile, Rows, RowsWriter
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, BlockWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit, hash_output
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes, RecipeKey
from shardkit.writers.execution.stage import RunTasks, Stage, Task, partition_name
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.rows.documents import DOCUMENTS_FILE as TEXTS_FILE
from shardkit.writers.stages.flow import Documents
from shardkit.writers.stages.near import NEAR_DUPLICATE
from shardkit.writers.stages.needs import task_memory

_THREADS = 8


@dataclass(frozen=True)
class StoreTarget:
    """The URL of an index in a store, to which tasks upload its parts."""

    url: str
    storage: Annotated[StorageOptions | None, DecidesNoByte("only sets how the store is reached")] = None

    def put(self, name: str, folder: Path, files: Iterable[str]) -> None:
        """Upload files of a folder as the part `name`, and remove them from the folder."""
        try:
            store = connect(self.url, self.storage)
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(lambda file: store.put(f"{name}/{file}", folder / file), files))
        except StoreError as error:
            raise BuildError(
                f"{self.url}: cannot be written: {error}; run the same command again to continue"
            ) from error
        for file in files:
            (folder / file).unlink()


@dataclass(frozen=True)
class IndexFiles:
    """The commits of the tasks that wrote an index, by the names of its folders."""

    parts: Mapping[str, Commit]
    tables: Mapping[str, Commit]


def write_index(
    run: RunTasks,
    documents: Documents,
    config: NearDedupConfig,
    sketch: int,
    target: StoreTarget | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> IndexFiles:
    """Write an index with one task per split and per range of keys. If `target` is set, they upload it."""
    near, memory_bytes = documents.near, task_memory(documents.recipe.memory)
    assert near is not None, "check_indexable"
    tasks: dict[str, Task] = {}
    for split, part, removed in zip(documents.files, near.parts, near.removed, strict=True):
        weight, texts = split.outputs[TEXTS_FILE].bytes, split.file(TEXTS_FILE)
        once = [part.file(name) for name in (BANDS_FILE, PRINTS_FILE, EQUAL_KEYS.file)]
        args = texts, part.files, once, removed, config.minhash, sketch, memory_bytes, target
        named = partial(INDEX.task, split.name, weight, *args)
        name = f"part-{named('').digest}"  # the name is not in the digest
        tasks[name] = named(name)
    [parts] = run(list(tasks.values()))
    tables = index_tables(run, parts, bands_and_rows(config)[0], target, limits=limits)
    return IndexFiles(dict(zip(tasks, parts, strict=True)), tables)


def index_tables(
    run: RunTasks,
    parts: Sequence[Commit],
    bands: int,
    target: StoreTarget | None = None,
    *,
    limits: Limits = DEFAULT_LIMITS,
) -> dict[str, Commit]:
    """Write the tables of an index with these parts. Raises BuildError for too many documents."""
    counts = [INDEX.result(commit).documents for commit in parts]
    if sum(counts) > MOST_DOCUMENTS:
        raise BuildError(
            f"an index has at most {MOST_DOCUMENTS:,} documents, these are {sum(counts):,}; make several"
        )
    named = [(commit.name, count) for commit, count in zip(parts, counts, strict=True)]
    [[numbered]] = run([PARTS.task("parts", 0, named, [])])
    ranges = max(1, -(-sum(counts) * bands * BANDS_OF_INDEX.dtype.itemsize // _TABLE_BYTES))
    moved = [
        exchange(run, INDEX_TABLES, table, parts, readers=ranges, limits=limits)
        for table in (OWN_WORDS, OWN_BANDS)
    ]
    tasks: dict[str, Task] = {}
    for number in range(ranges):
        words, keys = (table.slice(*partition_bounds(number, ranges)) for table in moved)
        args = words, keys, numbered.file(STARTS_FILE), target
        task = partial(INDEX_TABLES.task, partition_name(number, ranges), keys.bytes, *args)
        name = f"table-{task('').digest}"
        tasks[name] = task(name)
    [made] = run(list(tasks.values()))
    return dict(zip(tasks, made, strict=True))


_KEYS_MEMORY_BYTES = 32 << 20  # maximum memory for reading keys; writing them takes as much again

_TABLE_BYTES = 6_000_000  # size of bands.run whose footer takes less than 64 KiB

# Keys of the documents of a part; `row` is a row of the part
OWN_WORDS = Table(
    "own_words.run",
    np.dtype([("key", "<u8"), ("low", "<u8"), ("row", "<u4"), ("part", "<i4")]),
    origin="part",
)
OWN_BANDS = Table("own_bands.run", np.dtype([("key", "<u8"), ("row", "<u4"), ("part", "<i4")]), origin="part")

_PIECE_BYTES = 4 << 20  # maximum size of text whose n-grams are in memory at a time

_NGRAM_BYTES = 24  # maximum memory per byte of text while its set of n-grams is computed


@dataclass(frozen=True, slots=True)
class IndexPart:
    """The content of an index's part: number of documents, bytes of their texts, size and hash of each file.

    `removed` is the number of documents left out, and `sketches` the number of truncated sets of n-grams.
    """

    documents: int
    bytes: int
    removed: int
    sketches: int
    files: Mapping[str, Mapping[str, Any]]


def index_split(
    folder: Path,
    documents: Artifact,
    part: Artifact,
    once: Annotated[Sequence[Artifact], DecidesNoByte("are files of `part`, which counts as a whole")],
    removed: SplitTable,
    minhash: Annotated[MinHashConfig, RecipeKey("dedup.near.minhash")],
    sketch: int,
    memory_bytes: MemoryBytes,
    target: StoreTarget | None,
    name: Annotated[str, DecidesNoByte("is a digest of the other arguments")],
) -> IndexPart:
    """Write a split's part of an index into `folder`; if `target` is set, upload it there as part `name`.

    `once` are files of `part` that are gone if a build was their last reader: then they are made again.
    """
    gone = SplitRemovals({NEAR_DUPLICATE: removed}).load().rows[NEAR_DUPLICATE]
    made = index_part(documents, part, gone, minhash, sketch, folder, memory_bytes=memory_bytes)
    if target is not None:
        target.put(name, folder, made.files)
    return made


INDEX = Stage("index", "write", index_split)


def index_part(
    documents: Artifact,
    part: Artifact,
    removed: npt.NDArray[np.int64],
    minhash: MinHashConfig,
    sketch: int,
    folder: Path,
    *,
    memory_bytes: int = 512 << 20,
) -> IndexPart:
    """Write a split's part of an index into `folder`, and the runs of its keys.

    `documents` is the split's Arrow file, and `part` the output of `sign_documents` for it. `removed` are the
    rows of the Arrow file to leave out, in any order; rows that are not in the part are ignored. The `sketch`
    smallest hashes of each set of n-grams are kept, or all if it is 0.
    """
    removed = np.sort(removed)
    keys_bytes = min(_KEYS_MEMORY_BYTES, memory_bytes // 4)
    gone = _write_signatures(part, removed, folder, memory_bytes)
    _filter_keys(part / EQUAL_KEYS.file, gone, folder / OWN_WORDS.file, keys_bytes)
    piece_bytes = max(1, min(_PIECE_BYTES, memory_bytes // 2 // _NGRAM_BYTES))
    texts = _texts(documents, part, removed, piece_bytes)
    count, text_bytes, sketches = _write_documents(texts, minhash, sketch, folder)
    left_out = len(Rows(part / DOCUMENTS_FILE, DOCUMENT)) - count
    assert left_out == len(gone), part
    return IndexPart(count, text_bytes, left_out, sketches, _described(folder, PART_FILES))


def _described(folder: Path, names: Iterable[str]) -> Mapping[str, Mapping[str, Any]]:
    """Write the hashes of the blocks of some files; return the size and hash of each, and of that file."""
    outputs = {name: hash_output(folder / name) for name in names}
    blocks = {name: {"xxh3_128": one.xxh3_128, "blocks": one.blocks} for name, one in outputs.items()}
    (folder / BLOCKS_FILE).write_text(json.dumps(blocks, indent=1, sort_keys=True) + "\n")
    outputs[BLOCKS_FILE] = hash_output(folder / BLOCKS_FILE)
    return {name: {"bytes": output.bytes, "xxh3_128": output.xxh3_128} for name, output in outputs.items()}


def _write_signatures(
    part: Artifact, removed: npt.NDArray[np.int64], folder: Path, memory_bytes: int
) -> npt.NDArray[np.int64]:
    """Write the prints and band keys of a part without `removed`; return the rows of these in the part."""
    table = Rows(part / DOCUMENTS_FILE, DOCUMENT)
    prints, stored = RowFile(part / PRINTS_FILE), RowFile(part / BANDS_FILE)
    assert len(table) == prints.rows == stored.rows, part
    [width], [bands] = prints.row_shape, stored.row_shape
    row_bytes = 3 * (DOCUMENT.itemsize + width) + 64 * bands
    most = max(1, min(CHUNK_ROWS, memory_bytes // 4 // row_bytes))
    gone, count = [np.zeros(0, np.int64)], 0
    with (
        RowsWriter(folder / INDEX_PRINTS, np.uint8, width=width) as kept,
        RunWriter(folder / OWN_BANDS.file, OWN_BANDS, memory_bytes=memory_bytes // 4) as keys,
    ):
        for start in range(0, len(table), most):
            stays = _stays(table.read(start, min(start + most, len(table)))["row"], removed)
            gone.append(start + np.flatnonzero(~stays))
            some = start + np.flatnonzero(stays)
            kept.write(prints.read(some))
            entries = np.empty(len(some) * bands, OWN_BANDS.dtype)
            entries["key"], entries["part"] = stored.read(some).reshape(-1), -1
            entries["row"] = np.repeat(np.arange(count, count + len(some)), bands)
            keys.write(entries)
            count += len(some)
    return np.concatenate(gone)


def _filter_keys(keys: Artifact, gone: npt.NDArray[np.int64], path: Path, memory_bytes: int) -> None:
    """Write the word keys of a part as OWN_WORDS without the rows `gone`; renumber the other rows."""
    with RunWriter(path, OWN_WORDS, memory_bytes=memory_bytes) as writer:
        for rows, _ in Slice.whole(EQUAL_KEYS, [keys]).stream(memory_bytes):
            rows = rows[_stays(rows["row"], gone)]
            own = np.empty(len(rows), OWN_WORDS.dtype)
            own["key"], own["low"], own["part"] = rows["key"], rows["low"], -1
            own["row"] = rows["row"] - np.searchsorted(gone, rows["row"])
            writer.write(own)


def _write_documents(
    texts: Iterable[tuple[npt.NDArray[np.void], pa.LargeStringArray]],
    minhash: MinHashConfig,
    sketch: int,
    folder: Path,
) -> tuple[int, int, int]:
    """Write the table of a part's documents, and their sketches.

    `texts` has rows of DOCUMENT and their texts. Returns the number of documents, the bytes of their texts,
    and how many have more than `sketch` n-grams.
    """
    text_bytes = sketches = 0
    with (
        RowsWriter(folder / DOCUMENTS_FILE, INDEXED) as table,
        SketchWriter(folder) as writer,
    ):
        for described, some in texts:
            numbers = np.arange(len(some), dtype=np.uint64)
            sets = distinct_sets(numbers, *shingle_batch(some, minhash), sketch or None)
            stored, distinct = np.diff(sets.offsets), sets.rows["distinct"].astype(np.int64)
            rows = np.empty(len(some), INDEXED)
            rows["start"], rows["size"] = writer.write(sets.hashes, sets.offsets, distinct)
            rows["id"], rows["stored"], rows["distinct"] = described["id"], stored, distinct
            rows["bytes"] = np.minimum(described["bytes"], INDEXED_LIMIT)
            rows["total"] = np.minimum(sets.rows["total"], INDEXED_LIMIT)
            table.write(rows)
            text_bytes += int(described["bytes"].sum())
            sketches += int((stored < distinct).sum())
    return table.rows, text_bytes, sketches


def _texts(
    documents: Artifact, part: Artifact, removed: npt.NDArray[np.int64], most_bytes: int
) -> Iterator[tuple[npt.NDArray[np.void], pa.LargeStringArray]]:
    """Yield rows of DOCUMENT and texts of a part except `removed`, in batches of `most_bytes` or one text."""
    table = Rows(part / DOCUMENTS_FILE, DOCUMENT)
    start = at = 0
    with documents.open_arrow() as file:
        reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[4]))
        for batch in range(reader.num_record_batches):
            texts = reader.get_batch(batch).column("text")
            described = table.read(at, min(at + len(texts), len(table)))
            described = described[: np.searchsorted(described["row"], start + len(texts))]
            at += len(described)
            described = described[_stays(described["row"], removed)]
            chosen = texts.take(pa.array(described["row"] - start))
            start += len(texts)
            for first, stop in text_pieces(chosen, most_bytes):
                yield described[first:stop], chosen.slice(first, stop - first)
    assert at == len(table), part


def _stays(rows: npt.NDArray[np.int64], removed: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return bool[n]: whether each of `rows` is not in `removed`; both must be sorted."""
    places = np.searchsorted(removed, rows)
    stays = np.ones(len(rows), np.bool_)
    inside = places < len(removed)
    stays[inside] = removed[places[inside]] != rows[inside]
    return stays


@dataclass(frozen=True, slots=True)
class IndexTables:
    """The size and hash of each file of a table."""

    files: Mapping[str, Mapping[str, Any]]


def write_tables(
    folder: Path,
    words: Slice,
    bands: Slice,
    starts: Artifact,
    target: StoreTarget | None,
    name: Annotated[str, DecidesNoByte("is a digest of the other arguments")],
) -> IndexTables:
    """Write a table of an index, for a range of keys; if `target` is set, upload it there as `name`.

    `starts` is the file with the number of each part's first document.
    """
    first = np.load(starts.local(), mmap_mode="r")
    for table, own in ((WORDS, words), (BANDS_OF_INDEX, bands)):
        # Not larger blocks for larger files: a range is small, unless keys are repeated very often.
        with BlockWriter(folder / table.file, table, 0, TABLE_LIMITS) as writer:
            for rows, _ in own.stream(own.limits.read_memory_bytes):
                found = np.empty(len(rows), table.dtype)
                for field in table.dtype.names or ():
                    found[field] = rows[field] if field != "number" else first[rows["part"]] + rows["row"]
                writer.write(found, np.empty(0, np.uint8))
    made = IndexTables(_described(folder, TABLE_FILES))
    if target is not None:
        target.put(name, folder, made.files)
    return made


INDEX_TABLES = Stage("index_tables", "write", write_tables)
