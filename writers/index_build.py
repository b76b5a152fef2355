"""`build_dedup_index`: a recipe's unique documents as an index that later builds are deduplicated against.

    scan -> clean -> duplicates -> index -> publish

The files of an index in a folder are hard links to the work folder. For an index in a store, each task
uploads its part, under a name that is a digest of its inputs, so that a part never changes; the record is
written last and completes the index. So no machine needs space for the whole index.

The first stages are the same as in a build, so an index that is given the work folder of a build (`work`)
reuses its finished tasks.

`index_part` writes a part in the order of documents. For a split of any size, its memory is a chunk of rows,
some megabytes of keys, and the n-grams of some megabytes of text (or of one document).
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from shardkit.writers.dedup.exact import KEYS
from shardkit.writers.dedup.index import (
    BLOCKS_FILE,
    FORMAT,
    INDEX_FILE,
    INDEX_PART_FILES,
    SKETCH,
    DedupIndex,
    IndexRecord,
    check_indexable,
    index_settings,
    open_index,
)
from shardkit.writers.dedup.outcomes import SplitRemovals, SplitTable
from shardkit.writers.dedup.population import DOCUMENT, DOCUMENTS_FILE, SIGNATURES_FILE
from shardkit.writers.dedup.shingle_store import ShingleReader, ShingleWriter
from shardkit.writers.dedup.tables import CHUNK_ROWS, RowFile, Rows, RowsWriter
from shardkit.writers.estimate import existing_folder
from shardkit.writers.exchange.exchange import RunWriter, Slice
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit, hash_output
from shardkit.writers.execution.digests import DecidesNoByte, MemoryBytes, RecipeKey
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.stage import Stage, Task
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
        tasks = index_tasks(documents, config, sketch, stored)
        [made] = runner.run(list(tasks.values()))
        scan.check_unchanged(inputs.splits, documents.input_hashes)
        facts = {
            "recipe_digest": digest_of(recipe.content()),
            "inputs": describe_inputs(recipe, inputs.splits, documents.input_hashes),
            "against": [other.digest for other in inputs.indexes.values()],
        }
        if recipe.check_disk and isinstance(target, Path):
            _check_disk(made, target)
        named, settings = dict(zip(tasks, made, strict=True)), index_settings(config)
        opened = _publish(named, target, facts, settings, sketch=sketch, replace=replace)
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
    made: Mapping[str, Commit],
    target: Path | StoreTarget,
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    sketch: int,
    replace: bool,
) -> DedupIndex:
    """Publish an index at `target`. `made` has the commits of the tasks by the names of their parts."""
    parts = {name: INDEX.result(commit) for name, commit in made.items()}
    if isinstance(target, StoreTarget):
        return publish_to_store(parts, target, facts, settings, sketch=sketch, replace=replace)
    files = [commit.files / name for commit in made.values() for name in commit.outputs]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(Artifact.local, files))
    folders = [(commit.folder, parts[name]) for name, commit in made.items()]
    return publish_index(folders, target, facts, settings, sketch=sketch, replace=replace)


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


def index_tasks(
    documents: Documents,
    config: NearDedupConfig,
    sketch: int,
    target: StoreTarget | None = None,
) -> dict[str, Task]:
    """Return one task per split by the name of its part. If `target` is set, the task uploads the part."""
    tasks: dict[str, Task] = {}
    near, memory_bytes = documents.near, task_memory(documents.recipe.memory)
    assert near is not None, "check_indexable"
    for split, part, removed in zip(documents.files, near.parts, near.removed, strict=True):
        weight, texts = split.outputs[TEXTS_FILE].bytes, split.file(TEXTS_FILE)
        args = texts, part.files, removed, config.minhash, sketch, memory_bytes, target
        named = partial(INDEX.task, split.name, weight, *args)
        name = f"part-{named('').digest}"  # the name is not in the digest
        tasks[name] = named(name)
    return tasks


def _removed(documents: Documents) -> dict[str, int]:
    """Return the number of removed documents by reason."""
    removed: dict[str, int] = {}
    for ledger in documents.written[0].ledgers:
        for reason, count in ledger.dropped.items():
            removed[reason] = removed.get(reason, 0) + count.documents
    return removed | {
        reason: sum(one.documents for one in losses) for reason, losses in documents.lost.items()
    }


_KEYS_MEMORY_BYTES = 32 << 20  # maximum memory for reading keys; writing them takes as much again

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
    sketch: int,
    memory_bytes: MemoryBytes,
    target: StoreTarget | None,
    name: Annotated[str, DecidesNoByte("is a digest of the other arguments")],
) -> IndexPart:
    """Write a split's part of an index into `folder`; if `target` is set, upload it there as part `name`."""
    rows = SplitRemovals({NEAR_DUPLICATE: removed}).load().rows[NEAR_DUPLICATE]
    made = index_part(documents, part, rows, minhash, sketch, folder, memory_bytes=memory_bytes)
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
    memory_bytes: int = 512 << 20,
) -> IndexPart:
    """Write a split's part of an index into `folder`.

    `documents` is the split's Arrow file, and `part` the output of `sign_documents` for it. `removed` are the
    rows of the Arrow file to leave out, in any order; rows that are not in the part are ignored. The `sketch`
    smallest hashes of each set of n-grams are kept, or all if it is 0.
    """
    removed = np.sort(removed)
    count, text_bytes = _filter_tables(part, removed, minhash.permutations, folder, memory_bytes)
    piece_bytes = max(1, min(_PIECE_BYTES, memory_bytes // 2 // _NGRAM_BYTES))
    texts = _texts(documents, part, removed, piece_bytes)
    sketches = _write_sketches(texts, minhash, sketch, folder)
    outputs = {name: hash_output(folder / name) for name in INDEX_PART_FILES}
    blocks = {name: {"xxh3_128": one.xxh3_128, "blocks": one.blocks} for name, one in outputs.items()}
    (folder / BLOCKS_FILE).write_text(json.dumps(blocks, indent=1, sort_keys=True) + "\n")
    outputs[BLOCKS_FILE] = hash_output(folder / BLOCKS_FILE)
    files = {name: {"bytes": output.bytes, "xxh3_128": output.xxh3_128} for name, output in outputs.items()}
    left_out = len(Rows(part / DOCUMENTS_FILE, DOCUMENT)) - count
    return IndexPart(count, text_bytes, left_out, sketches, files)


def _filter_tables(
    part: Artifact, removed: npt.NDArray[np.int64], width: int, folder: Path, memory_bytes: int
) -> tuple[int, int]:
    """Write all files of a part except the sets of n-grams, without the documents `removed`.

    Returns the number of documents and the bytes of their texts.
    """
    row_bytes = 3 * (DOCUMENT.itemsize + 4 * width)
    most = max(1, min(CHUNK_ROWS, memory_bytes // 2 // row_bytes))
    table, values = Rows(part / DOCUMENTS_FILE, DOCUMENT), RowFile(part / SIGNATURES_FILE)
    text_bytes, gone = 0, [np.zeros(0, np.int64)]
    with ExitStack() as stack:
        to_table = stack.enter_context(RowsWriter(folder / DOCUMENTS_FILE, DOCUMENT))
        to_values = stack.enter_context(RowsWriter(folder / SIGNATURES_FILE, "<u4", width=width))
        for start in range(0, len(table), most):
            described = table.read(start, min(start + most, len(table)))
            stays = _stays(described["row"], removed)
            gone.append(start + np.flatnonzero(~stays))
            described = described[stays]
            described["row"] = np.arange(to_table.rows, to_table.rows + len(described))
            to_values.write(values.read(start + np.flatnonzero(stays)))
            to_table.write(described)
            text_bytes += int(described["bytes"].sum())
    assert len(table) == values.rows, part
    keys_bytes = min(_KEYS_MEMORY_BYTES, memory_bytes // 4)
    _filter_keys(part / KEYS.file, np.concatenate(gone), folder / KEYS.file, keys_bytes)
    return to_table.rows, text_bytes


def _filter_keys(keys: Artifact, gone: npt.NDArray[np.int64], path: Path, memory_bytes: int) -> None:
    """Copy a run of word keys to `path` without the keys of the rows `gone`, and renumber the other rows."""
    with RunWriter(path, KEYS, memory_bytes=memory_bytes) as writer:
        for rows, _ in Slice.whole(KEYS, [keys]).stream(memory_bytes):
            rows = rows[_stays(rows["row"], gone)]
            rows["row"] -= np.searchsorted(gone, rows["row"]).astype(np.uint32)
            writer.write(rows)


def _write_sketches(
    texts: Iterable[pa.LargeStringArray], minhash: MinHashConfig, sketch: int, folder: Path
) -> int:
    """Write the set of n-grams of each text; return how many sets are cut to the `sketch` smallest hashes."""
    number = sketches = 0
    with ShingleWriter(folder, smallest=sketch or None) as sets:
        for some in texts:
            numbers = np.arange(number, number + len(some), dtype=np.uint64)
            sets.write(numbers, *shingle_batch(some, minhash))
            number += len(some)
    if sketch:
        for rows in ShingleReader([Artifact(folder)]).tables():
            sketches += int((rows["stored"] < rows["distinct"]).sum())
    return sketches


def _texts(
    documents: Artifact, part: Artifact, removed: npt.NDArray[np.int64], most_bytes: int
) -> Iterator[pa.LargeStringArray]:
    """Yield the texts of the part's documents except `removed`, in batches of `most_bytes` or one text."""
    table = Rows(part / DOCUMENTS_FILE, DOCUMENT)
    start = at = 0
    with documents.open_arrow() as file:
        reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[4]))
        for batch in range(reader.num_record_batches):
            texts = reader.get_batch(batch).column("text")
            rows = table.read(at, min(at + len(texts), len(table)))["row"]
            rows = rows[: np.searchsorted(rows, start + len(texts))]
            at += len(rows)
            stay = rows[_stays(rows, removed)] - start
            start += len(texts)
            texts = texts.take(pa.array(stay))
            for first, stop in text_pieces(texts, most_bytes):
                yield texts.slice(first, stop - first)
    assert at == len(table), part


def _stays(rows: npt.NDArray[np.int64], removed: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return bool[n]: whether each of `rows` is not in `removed`; both must be sorted."""
    places = np.searchsorted(removed, rows)
    stays = np.ones(len(rows), np.bool_)
    inside = places < len(removed)
    stays[inside] = removed[places[inside]] != rows[inside]
    return stays


_PART_FILES = (*INDEX_PART_FILES, BLOCKS_FILE)

_OWN = re.compile(rf"part-[0-9a-f]+/({'|'.join(map(re.escape, _PART_FILES))})")

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
    parts: Mapping[str, IndexPart], made_from: Mapping[str, Any], settings: Mapping[str, Any], sketch: int
) -> IndexRecord:
    """Return the record of an index; `parts` has its parts by the names of their folders."""
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
    }
    return IndexRecord.model_validate(load_json(json.dumps(data)))


def _text_of(record: IndexRecord) -> bytes:
    data = record.model_dump(mode="json")
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def publish_to_store(
    parts: Mapping[str, IndexPart],
    target: StoreTarget,
    made_from: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    sketch: int = SKETCH,
    replace: bool = False,
) -> DedupIndex:
    """Complete the index at a URL by writing its record; tasks have uploaded `parts` under their names.

    Parts that only a replaced index has are removed. Raises BuildError if the URL has another index and
    `replace` is not set, if it has other files, or if a part is missing.
    """
    record = _record_of(parts, made_from, settings, sketch)
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
            wanted = {f"{part.folder}/{name}" for part in record.parts for name in part.files}
            if gone := sorted(wanted - present):
                raise BuildError(
                    f"{target.url}/{gone[0]}: is missing, as are {len(gone) - 1:,} others; remove the work "
                    "folder and build again"
                )
            store.put(INDEX_FILE, _text_of(record))
            replaced = () if old is None else old.parts
            for key in sorted({f"{part.folder}/{name}" for part in replaced for name in part.files} - wanted):
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
    target: Path,
    made_from: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    sketch: int = SKETCH,
    replace: bool = False,
) -> DedupIndex:
    """Publish an index in the folder `target`. `parts` are the folders and results of `index_part`.

    `settings` are the settings of all parts. `made_from` is plain data on the recipe and inputs, for display.
    If the same index is already there, nothing is done. Raises BuildError if the target has another index and
    `replace` is not set, or if it has other files.
    """
    named = {f"part-{number:05d}": part for number, (_, part) in enumerate(parts)}
    record = _record_of(named, made_from, settings, sketch)
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
        for part, (folder, _) in zip(record.parts, parts, strict=True):
            _fill(unfinished / part.folder, folder)
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
            names |= {f"{path.name}/{name}" for path in target.glob("part-*") for name in _PART_FILES}
        else:
            if old.record == record:
                return True
            if not replace:
                raise BuildError(f"{target}: holds another index; use --replace to replace it")
            names |= {f"{part.folder}/{name}" for part in old.record.parts for name in part.files}
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


def _fill(folder: Path, source: Path) -> None:
    folder.mkdir()
    for name in _PART_FILES:
        link_or_copy(source / name, folder / name)
    fsync_path(folder)


def _remove(*folders: Path) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)
