"""`build_dedup_index`: a recipe's unique documents as an index that later builds are deduplicated against.

    scan -> clean -> duplicates -> index -> index_tables -> publish

The files of an index in a folder are hard links to the work folder. For an index in a store, each task
uploads its part, under a name that is a digest of its inputs, so that a part never changes; the record is
written last and completes the index. So no machine needs space for the whole index.

The first stages are the same as in a build, so an index that is given the work folder of a build (`work`)
reuses its finished tasks.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import BuildError, RecipeError
from shardkit.files import fsync_path, link_or_copy, load_json, publish_bytes
from shardkit.hashing import digest_of
from shardkit.progress import make_listener
from shardkit.storage.resilient import connect
from shardkit.storage.store import StorageOptions, StoreError
from shardkit.storage.url import is_remote, local_path
from shardkit.units import format_bytes
from shardkit.version import __version__
from shardkit.writers.dedup.config import NearDedupConfig
from shardkit.writers.dedup.index import (
    BLOCKS_FILE,
    FORMAT,
    INDEX_FILE,
    PART_FILES,
    SKETCH,
    TABLE_FILES,
    DedupIndex,
    IndexRecord,
    check_indexable,
    index_settings,
    open_index,
)
from shardkit.writers.estimate import existing_folder
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.executors import EngineName, Execution, open_runner, place_files, work_of
from shardkit.writers.index_files import (
    INDEX,
    INDEX_TABLES,
    IndexFiles,
    IndexPart,
    IndexTables,
    StoreTarget,
    write_index,
)
from shardkit.writers.inputs import scan
from shardkit.writers.inputs.scan import describe_inputs
from shardkit.writers.pipeline import refuse_own_files
from shardkit.writers.recipe.recipe import Recipe, load_recipe
from shardkit.writers.recipe.steps import SAMPLE, GlobalStep
from shardkit.writers.stages.flow import Build, Documents
from shardkit.writers.stages.graph import find_survivors
from shardkit.writers.stages.inputs import BuildInputs


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
    recipe = load_recipe(recipe, overrides)
    config = _indexable(recipe, sketch)
    target = _target_of(index, storage)
    execution = Execution(workers=workers, engine=engine, ray_address=ray_address)
    work = work_of(recipe, recipe.resolve(_default_work(target)), storage, execution)
    splits = scan.scan_inputs(recipe, storage)
    refuse_own_files(splits, work.place, target if isinstance(target, Path) else target.url)
    inputs = BuildInputs.of(recipe, splits, storage)
    with make_listener(progress) as listener, open_runner(recipe, work, execution, listener) as runner:
        inputs = place_files(inputs, runner.journal)
        stored = target if isinstance(target, StoreTarget) else None

        def steps() -> tuple[Documents, IndexFiles]:
            documents = find_survivors(Build(inputs, runner.run, to_index=True))
            made = write_index(runner.run, documents, config, sketch, stored, limits=inputs.limits)
            if stored is None:
                runner.require(_files(made))
            return documents, made

        documents, made = runner.complete(steps)
        scan.check_unchanged(inputs.splits, documents.input_hashes)
        described = describe_inputs(recipe, inputs.splits, documents.input_hashes)
        others = [other.digest for other in inputs.indexes.values()]
        facts = {"recipe_digest": digest_of(recipe.content()), "inputs": described, "against": others}
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


def _files(made: IndexFiles) -> list[Artifact]:
    """Return the files of an index in the work folder."""
    return [
        commit.files / name
        for commits, names in ((made.parts, _PART_FILES), (made.tables, _TABLE_FILES))
        for commit in commits.values()
        for name in names
    ]


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
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(Artifact.local, _files(made)))
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


def _removed(documents: Documents) -> dict[str, int]:
    """Return the number of removed documents by reason."""
    removed: dict[str, int] = {}
    for ledger in documents.written[0].ledgers:
        for reason, count in ledger.dropped.items():
            removed[reason] = removed.get(reason, 0) + count.documents
    return removed | {
        reason: sum(one.documents for one in losses) for reason, losses in documents.lost.items()
    }


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
