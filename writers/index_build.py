"""`build_dedup_index`: a recipe's unique documents as an index that later builds are deduplicated against.

    scan -> clean -> duplicates -> index -> index_tables -> publish

`index_part` writes a part of the index for each split, with the keys of its documents as runs; an exchange
brings the keys of all parts into ranges, and `write_tables` writes a table for each range (index.py).

The files of an index in a folder are hard links to the work folder. For an index in a store, each task
uploads its part, under a name that is a digest of its inputs, so that a part never changes; the record is
written last and completes the index. So no machine needs space for the whole index.

The first stages are the same as in a build, so an index that is given the work folder of a build (`work`)
reuses its finished tasks.

For a split of any size, the memory of `index_part` is a chunk of rows, some megabytes of keys, and the
n-grams of some megabytes of text (or of one document).
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardkit.errors import BuildError, RecipeError
from shardkit.files import fsync_path, link_or_copy, load_json, publish_bytes
from shardkit.hashing import digest_of
from shardkit.kernels.text_arrays import text_pieces
from shardkit.progress import make_listener
from shardkit.storage.resilient import connect
from shardkit.storage.store import StorageOptions, StoreError
from shardkit.storage.url import is_remote, local_path
from shardkit.units import format_bytes
from shardkit.version import __version__
from shardkit.writers.dedup.config import MinHashConfig, NearDedupConfig
from shardkit.writers.dedup.exact import KEYS, partition_bounds
from shardkit.writers.dedup.hubs import print_bytes
from shardkit.writers.dedup.index import (
    BANDS_OF_INDEX,
    BLOCKS_FILE,
    FORMAT,
    INDEX_FILE,
    MOST_DOCUMENTS,
    PART_FILES,
    SKETCH,
    TABLE_FILES,
    TABLE_LIMITS,
    WORDS,
    DedupIndex,
    IndexRecord,
    check_indexable,
    index_settings,
    open_index,
)
from shardkit.writers.dedup.outcomes import SplitRemovals, SplitTable
from shardkit.writers.dedup.population import (
    DOCUMENT,
    DOCUMENTS_FILE,
    INDEXED,
    PARTS,
    PRINTS_FILE,
    SIGNATURES_FILE,
    STARTS_FILE,
)
from shardkit.writers.dedup.shingle_store import distinct_sets
from shardkit.writers.dedup.signatures import band_keys, bands_and_rows
from shardkit.writers.dedup.sketches import INDEXED_LIMIT, SketchWriter
from shardkit.writers.dedup.tables import CHUNK_ROWS, RowFile, Rows, RowsWriter
from shardkit.writers.estimate import existing_folder
from shardkit.writers.exchange.exchange import Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, BlockWriter
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit, hash_output
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes, RecipeKey
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.stage import RunTasks, Stage, Task, partition_name
from shardkit.writers.executors import EngineName, Execution, open_runner, place_files, work_of
from shardkit.writers.inputs import scan
from shardkit.writers.inputs.scan import describe_inputs
from shardkit.writers.kernels.shingles import shingle_batch
from shardkit.writers.pipeline import refuse_own_files, with_overrides
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.recipe.steps import SAMPLE, GlobalStep
from shardkit.writers.rows.documents import DOCUMENTS_FILE as TEXTS_FILE
from shardkit.writers.stages.flow import Build, Documents
from shardkit.writers.stages.graph import find_survivors
from shardkit.writers.stages.inputs import BuildInputs
from shardkit.writers.stages.near import NEAR_DUPLICATE
from shardkit.writers.stages.needs import task_memory


@dataclass(frozen=True)
class DedupIndexResult:
    """The result of building an index: its size, documents removed by reason, and seconds by stage."""

    location: str
    documents: int
    bytes: int
    stored_bytes: int
    digest: str
    removed: Mapping[str, int]
    seconds: Mapping[str, float]
    total_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {
            "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            "total_seconds": round(self.total_seconds, 3),
        }


def build_dedup_index(
    recipe: Recipe | str | Path,
    index: str | Path,
    *,
    workers: int | None = None,
    engine: EngineName = "local",
    ray_address: str | None = None,
    overrides: Sequence[str] = (),
    sketch: int = SKETCH,
    replace: bool = False,
    progress: bool | Callable[[StageProgress], None] = True,
    storage: StorageOptions | None = None,
) -> DedupIndexResult:
    """Write an index of the documents that `recipe` keeps after duplicate removal.

    `index` is a folder or URL. The index has the `sketch` smallest hashes of each document's n-grams, or all
    of them if `sketch` is 0. `storage` has the settings of stores. After an interruption, repeat the same
    call to continue. Raises BuildError, or RecipeError, as for a recipe without dedup.near.
    """
    start = time.perf_counter()
    recipe = with_overrides(recipe, overrides)
    config = _indexable(recipe, sketch)
    target = _target_of(index, storage)
    execution = Execution(workers=workers, engine=engine, ray_address=ray_address)
    work = work_of(recipe, recipe.resolve(_default_work(target)), storage, execution)
    splits = scan.scan_inputs(recipe, storage)
    refuse_own_files(splits, work.place, target if isinstance(target, Path) else target.url)
    inputs = BuildInputs.of(recipe, splits, storage)
    with make_listener(progress) as listener, open_runner(recipe, work, execution, listener) as runner:
        inputs = place_files(inputs, runner.journal)
        documents = find_survivors(Build(inputs, runner.run))
        stored = target if isinstance(target, StoreTarget) else None
        made = write_index(runner.run, documents, config, sketch, stored, limits=inputs.limits)
        scan.check_unchanged(inputs.splits, documents.input_hashes)
        facts = {
            "recipe_digest": digest_of(recipe.content()),
            "inputs": describe_inputs(recipe, inputs.splits, documents.input_hashes),
            "against": [other.digest for other in inputs.indexes.values()],
        }
        if recipe.check_disk and isinstance(target, Path):
            _check_disk([*made.parts.values(), *made.tables.values()], target)
        opened = _publish(made, target, facts, index_settings(config), sketch=sketch, replace=replace)
        if recipe.work is None:
            runner.journal.remove()
    return DedupIndexResult(
        str(opened.location),
        opened.documents,
        opened.bytes,
        opened.stored_bytes,
        opened.digest,
        _removed(documents),
        dict(runner.seconds),
        time.perf_counter() - start,
    )


def _target_of(index: str | Path, storage: StorageOptions | None) -> Path | StoreTarget:
    if is_remote(index):
        return StoreTarget(str(index).rstrip("/"), storage)
    target = local_path(str(index)).absolute()
    if not target.name:
        raise RecipeError(f"{target} cannot hold an index; give a folder with a name")
    return target


def _default_work(target: Path | StoreTarget) -> str:
    """Return the default work folder: next to the index, or in the recipe's folder for an index at a URL."""
    if isinstance(target, Path):
        return f"{target}.work"
    return f"{target.url.rpartition('/')[2]}.work"


def _check_disk(made: Sequence[Commit], target: Path) -> None:
    """Raise BuildError if the files to fetch or copy for the index do not fit on their disks."""
    size = sum(commit.bytes for commit in made)
    places = {commit.folder for commit in made if commit.remote is not None}
    devices = {existing_folder(place).stat().st_dev for place in (made[0].folder, target)}
    is_copied = bool(places) or len(devices) > 1
    for place in {*places, *([target] if is_copied else [])}:
        free = shutil.disk_usage(existing_folder(place)).free
        if size > free:
            raise BuildError(
                f"{place}: the index needs {format_bytes(size)} there, but {format_bytes(free)} are free; "
                "free space, put the index into a store or elsewhere, or build anyway with check_disk=false"
            )


def _publish(
    made: IndexFiles,
    target: Path | StoreTarget,
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    sketch: int,
    replace: bool,
) -> DedupIndex:
    """Publish an index at `target`."""
    parts = {name: INDEX.result(commit) for name, commit in made.parts.items()}
    tables = {name: INDEX_TABLES.result(commit) for name, commit in made.tables.items()}
    if isinstance(target, StoreTarget):
        return publish_to_store(parts, tables, target, facts, settings, sketch=sketch, replace=replace)
    files = [
        commit.files / name
        for commits, names in ((made.parts, _PART_FILES), (made.tables, _TABLE_FILES))
        for commit in commits.values()
        for name in names
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(Artifact.local, files))
    folders = [(commit.folder, parts[name]) for name, commit in made.parts.items()]
    others = [(commit.folder, tables[name]) for name, commit in made.tables.items()]
    return publish_index(folders, others, target, facts, settings, sketch=sketch, replace=replace)


def _indexable(recipe: Recipe, sketch: int) -> NearDedupConfig:
    """Return the recipe's `dedup.near`. Raises RecipeError if an index cannot be made with the recipe."""
    if recipe.dedup.semantic is not None:
        raise RecipeError(
            "dedup.semantic: an index has the documents that `near` leaves; leave it out, as with "
            "`--set dedup.semantic=null`"
        )
    config, last = check_indexable(recipe.dedup.near, sketch), recipe.moves[-1]
    name = last.name if isinstance(last, GlobalStep) else last[-1][0]
    if name != "near":
        raise RecipeError(
            f"steps: {name} comes after near, but an index has the documents that near leaves; leave it out"
        )
    if any(step.name == SAMPLE and step.settings.tokens is not None for step in recipe.global_steps):
        raise RecipeError("steps: sample.tokens: an index has no tokens; give documents or share")
    return config


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
        settings = config.minhash, *bands_and_rows(config)
        args = texts, part.files, removed, *settings, sketch, memory_bytes, target
        named = partial(INDEX.task, split.name, weight, *args)
        name = f"part-{named('').digest}"  # the name is not in the digest
        tasks[name] = named(name)
    [parts] = run(list(tasks.values()))
    bands, _ = bands_and_rows(config)
    tables = index_tables(run, parts, bands, target, limits=limits)
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


def _removed(documents: Documents) -> dict[str, int]:
    """Return the number of removed documents by reason."""
    removed: dict[str, int] = {}
    for counts in documents.counts:
        for reason, count in counts.ledger.dropped.items():
            removed[reason] = removed.get(reason, 0) + count.documents
    return removed | {
        reason: sum(one.documents for one in losses) for reason, losses in documents.lost.items()
    }


_KEYS_MEMORY_BYTES = 32 << 20  # maximum memory for reading keys; writing them takes as much again

_TABLE_BYTES = 6_000_000  # size of bands.run up to which it has blocks of 4 KiB

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
    removed: SplitTable,
    minhash: Annotated[MinHashConfig, RecipeKey("dedup.near.minhash")],
    bands: Annotated[int, RecipeKey("dedup.near.bands")],
    rows: Annotated[int, RecipeKey("dedup.near.rows")],
    sketch: int,
    memory_bytes: MemoryBytes,
    target: StoreTarget | None,
    name: Annotated[str, DecidesNoByte("is a digest of the other arguments")],
) -> IndexPart:
    """Write a split's part of an index into `folder`; if `target` is set, upload it there as part `name`."""
    gone = SplitRemovals({NEAR_DUPLICATE: removed}).load().rows[NEAR_DUPLICATE]
    made = index_part(
        documents, part, gone, minhash, sketch, folder, banding=(bands, rows), memory_bytes=memory_bytes
    )
    if target is not None:
        target.put(name, folder, _PART_FILES)
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
    banding: tuple[int, int],
    memory_bytes: int = 512 << 20,
) -> IndexPart:
    """Write a split's part of an index into `folder`, and the runs of its keys.

    `documents` is the split's Arrow file, and `part` the output of `sign_documents` for it. `removed` are the
    rows of the Arrow file to leave out, in any order; rows that are not in the part are ignored. The `sketch`
    smallest hashes of each set of n-grams are kept, or all if it is 0. `banding` is (bands, rows).
    """
    removed = np.sort(removed)
    keys_bytes = min(_KEYS_MEMORY_BYTES, memory_bytes // 4)
    gone = _write_signatures(part, removed, minhash.permutations, banding, folder, memory_bytes)
    _filter_keys(part / KEYS.file, gone, folder / OWN_WORDS.file, keys_bytes)
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
    part: Artifact,
    removed: npt.NDArray[np.int64],
    width: int,
    banding: tuple[int, int],
    folder: Path,
    memory_bytes: int,
) -> npt.NDArray[np.int64]:
    """Write the prints and band keys of a part without `removed`; return the rows of these in the part."""
    bands, rows = banding
    row_bytes = 3 * (DOCUMENT.itemsize + 4 * width) + 64 * bands
    most = max(1, min(CHUNK_ROWS, memory_bytes // 4 // row_bytes))
    table, values = Rows(part / DOCUMENTS_FILE, DOCUMENT), RowFile(part / SIGNATURES_FILE)
    assert len(table) == values.rows, part
    gone, count = [np.zeros(0, np.int64)], 0
    with (
        RowsWriter(folder / PRINTS_FILE, np.uint8, width=width) as prints,
        RunWriter(folder / OWN_BANDS.file, OWN_BANDS, memory_bytes=memory_bytes // 4) as keys,
    ):
        for start in range(0, len(table), most):
            stays = _stays(table.read(start, min(start + most, len(table)))["row"], removed)
            gone.append(start + np.flatnonzero(~stays))
            signatures = values.read(start + np.flatnonzero(stays))
            prints.write(print_bytes(signatures))
            found = band_keys(signatures, bands, rows)
            entries = np.empty(found.size, OWN_BANDS.dtype)
            entries["key"], entries["part"] = found.reshape(-1), -1
            entries["row"] = np.repeat(np.arange(count, count + len(found)), bands)
            keys.write(entries)
            count += len(found)
    return np.concatenate(gone)


def _filter_keys(keys: Artifact, gone: npt.NDArray[np.int64], path: Path, memory_bytes: int) -> None:
    """Write the word keys of a part as OWN_WORDS without the rows `gone`; renumber the other rows."""
    with RunWriter(path, OWN_WORDS, memory_bytes=memory_bytes) as writer:
        for rows, _ in Slice.whole(KEYS, [keys]).stream(memory_bytes):
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
        with BlockWriter(folder / table.file, table, own.bytes, TABLE_LIMITS) as writer:
            for rows, _ in own.stream(own.limits.read_memory_bytes):
                found = np.empty(len(rows), table.dtype)
                for field in table.dtype.names or ():
                    found[field] = rows[field] if field != "number" else first[rows["part"]] + rows["row"]
                writer.write(found, np.empty(0, np.uint8))
    made = IndexTables(_described(folder, TABLE_FILES))
    if target is not None:
        target.put(name, folder, _TABLE_FILES)
    return made


INDEX_TABLES = Stage("index_tables", "write", write_tables)

_PART_FILES = (*PART_FILES, BLOCKS_FILE)

_TABLE_FILES = (*TABLE_FILES, BLOCKS_FILE)

# Files of parts in indexes of former formats, which can be replaced
_FORMER = ("signatures.npy", "keys.npy", "keys.run", "sets.npy", "shingles.bin", "bands.bin", "bands.npy")

_OWN = re.compile(
    "|".join(
        rf"{kind}-[0-9a-f]+/({'|'.join(map(re.escape, names))})"
        for kind, names in (("part", (*_PART_FILES, *_FORMER)), ("table", _TABLE_FILES))
    )
)

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


def _record_of(
    parts: Mapping[str, IndexPart],
    tables: Mapping[str, IndexTables],
    made_from: Mapping[str, Any],
    settings: Mapping[str, Any],
    sketch: int,
) -> IndexRecord:
    """Return the record of an index; `parts` and `tables` are by the names of their folders."""
    listed = [
        {"folder": folder, "documents": part.documents, "bytes": part.bytes, "files": part.files}
        for folder, part in parts.items()
    ]
    data = {
        "format": FORMAT,
        "shardkit_version": __version__,
        "settings": dict(settings),
        "sketch": sketch,
        "documents": sum(part.documents for part in parts.values()),
        "bytes": sum(part.bytes for part in parts.values()),
        "made_from": dict(made_from),
        "parts": listed,
        "tables": [{"folder": folder, "files": table.files} for folder, table in tables.items()],
    }
    return IndexRecord.model_validate(load_json(json.dumps(data)))


def _text_of(record: IndexRecord) -> bytes:
    data = record.model_dump(mode="json")
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def publish_to_store(
    parts: Mapping[str, IndexPart],
    tables: Mapping[str, IndexTables],
    target: StoreTarget,
    made_from: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    sketch: int = SKETCH,
    replace: bool = False,
) -> DedupIndex:
    """Complete the index at a URL by writing its record; tasks have uploaded all folders under their names.

    Folders that only a replaced index has are removed. Raises BuildError if the URL has another index and
    `replace` is not set, if it has other files, or if a part is missing.
    """
    record = _record_of(parts, tables, made_from, settings, sketch)
    try:
        store = connect(target.url, target.storage)
        present = {info.key for info in store.list()}
        old = _old_record(target, replace=replace) if INDEX_FILE in present else None
        if old != record:
            if old is not None and not replace:
                raise BuildError(f"{target.url}: holds another index; use --replace to replace it")
            if foreign := sorted(key for key in present if key != INDEX_FILE and not _OWN.fullmatch(key)):
                raise BuildError(
                    f"{target.url}: holds objects that are not part of an index (first: {foreign[0]}); "
                    f"choose another URL"
                )
            wanted = {f"{one.folder}/{name}" for one in record.folders for name in one.files}
            if gone := sorted(wanted - present):
                raise BuildError(
                    f"{target.url}/{gone[0]}: is missing, as are {len(gone) - 1:,} others; remove the work "
                    "folder and build again"
                )
            store.put(INDEX_FILE, _text_of(record))
            replaced = present if INDEX_FILE in present else set()
            for key in sorted(key for key in replaced - wanted if _OWN.fullmatch(key)):
                store.delete(key)
    except StoreError as error:
        raise BuildError(
            f"{target.url}: cannot be written: {error}; run the same command again to continue"
        ) from error
    return open_index(target.url, target.storage)


def _old_record(target: StoreTarget, *, replace: bool) -> IndexRecord | None:
    try:
        return open_index(target.url, target.storage).record
    except BuildError as error:
        if not replace:
            raise BuildError(f"{error}, with --replace") from None
        return None


def publish_index(
    parts: Sequence[tuple[Path, IndexPart]],
    tables: Sequence[tuple[Path, IndexTables]],
    target: Path,
    made_from: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    sketch: int = SKETCH,
    replace: bool = False,
) -> DedupIndex:
    """Publish an index in the folder `target`.

    `parts` are the folders and results of `index_part`, `tables` those of `write_tables`.

    `settings` are the settings of all parts. `made_from` is plain data on the recipe and inputs, for display.
    If the same index is already there, nothing is done. Raises BuildError if the target has another index and
    `replace` is not set, or if it has other files.
    """
    named = {f"part-{number:05d}": part for number, (_, part) in enumerate(parts)}
    keyed = {f"table-{number:05d}": table for number, (_, table) in enumerate(tables)}
    record = _record_of(named, keyed, made_from, settings, sketch)
    target = target.resolve()
    unfinished, replaced = (
        target.with_name(f".{target.name}.{state}") for state in ("unfinished", "replaced")
    )
    try:
        if _is_published(target, record, replace=replace):
            _remove(unfinished, replaced)
            return open_index(target)
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        for listed, (folder, _) in zip(record.folders, [*parts, *tables], strict=True):
            _fill(unfinished / listed.folder, folder, listed.files)
        publish_bytes(unfinished / INDEX_FILE, _text_of(record))
        # A crash between the two renames leaves no index at `target`; repeating the command completes it.
        if target.exists():
            _remove(replaced)
            target.rename(replaced)
        unfinished.rename(target)
        fsync_path(target.parent)
        _remove(replaced)
    except OSError as error:
        raise BuildError(
            f"{target}: cannot be written: {error}; run the same command again to continue"
        ) from error
    return open_index(target)


def _is_published(target: Path, record: IndexRecord, *, replace: bool) -> bool:
    """Return whether the target has exactly this index; raises BuildError if its content must be kept."""
    if not target.exists():
        return False
    names = {INDEX_FILE}
    if (target / INDEX_FILE).exists():
        try:
            old = open_index(target)
        except BuildError as error:
            if not replace:
                raise BuildError(f"{error}, with --replace") from None
            names |= {name for name in _file_names(target) if _OWN.fullmatch(name)}
        else:
            if old.record == record:
                return True
            if not replace:
                raise BuildError(f"{target}: holds another index; use --replace to replace it")
            names |= {f"{one.folder}/{name}" for one in old.record.folders for name in one.files}
    if not target.is_dir():
        raise BuildError(f"{target}: is not a folder; choose another place")
    if foreign := sorted(set(_file_names(target)) - names):
        raise BuildError(
            f"{target}: holds files that are not part of an index (first: {foreign[0]}); choose another "
            f"folder, or empty it"
        )
    return False


def _file_names(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _fill(folder: Path, source: Path, names: Iterable[str]) -> None:
    folder.mkdir()
    for name in names:
        link_or_copy(source / name, folder / name)
    fsync_path(folder)


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)
