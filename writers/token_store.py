"""`shardkit pack`: rows of any length from a token store, without raw text or tokenizer.

A token store is a dataset with `output.format: tokens`: whole documents, one per MDS sample with the column
`tokens`, in the order of training, with the provenance and the card of any dataset. Builds with a loss mask
store it in a second column, `loss_mask`. Packing a store repeats only the stage `pack`, so one store gives
datasets of many lengths in minutes:

    card -> the recipe that would have made the dataset -> partitions -> pack -> provenance -> publish

The result has the same bytes as a build from the raw inputs with that recipe: shards, index, provenance, card
and report. The formats of other trainers, such as megatron, are written in the same way. Partitions are
ranges of the documents' hashes and depend on the card only. A task reads the rows of its range from the
store's provenance tables, and the documents of these rows from the store's shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardkit.card import DatasetCard, Histogram
from shardkit.errors import BuildError, RecipeError, ShardError
from shardkit.formats.mds import MdsShard, parse_index, shard_from_raw
from shardkit.formats.mds.index import INDEX_NAME
from shardkit.formats.provenance import PROVENANCE_FOLDER, provenance_name
from shardkit.formats.stored import decompress_shard
from shardkit.formats.trainers import TRAINER_FORMATS
from shardkit.hashing import digest_of, hash_bytes, keyed_hashes
from shardkit.hints import answers_keywords
from shardkit.manifest import LOSS_MASK, Manifest
from shardkit.progress import make_listener
from shardkit.publish.contents import find_only_contents
from shardkit.storage.local import LocalStore
from shardkit.storage.resilient import connect
from shardkit.storage.store import StorageOptions, Store, read_object
from shardkit.storage.url import is_remote, local_path
from shardkit.synonyms import BUILD
from shardkit.writers.card import BuiltDataset, assemble, content_of, file_dtype
from shardkit.writers.exchange.addresses import range_of, range_start
from shardkit.writers.execution.commit import Commit, Output, facts_of
from shardkit.writers.execution.digests import RecipeKey
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.runner import Runner
from shardkit.writers.execution.stage import RunTasks, Stage, Task, partition_name
from shardkit.writers.executors import EngineName, Execution, open_runner, work_of
from shardkit.writers.pipeline import publish_dataset
from shardkit.writers.recipe.outputs import OutputConfig, PackConfig
from shardkit.writers.recipe.recipe import Recipe, recipe_from_mapping
from shardkit.writers.report.result import BuildResult, Ran, StageClock
from shardkit.writers.rows.ledger import Count
from shardkit.writers.stages import provenance
from shardkit.writers.stages.pack import Packed, PackSettings, Partition, pack_documents, sums_of
from shardkit.writers.stages.publish import REPORT_NAME, RemoteOutput
from shardkit.writers.stages.rows import count_partitions
from shardkit.writers.stages.tokenize import SPILL_SCHEMA
from shardkit.yaml_file import apply_override

_SETTINGS = ("pack.", "output.")
_FILES_OF_TASK = 64
_OF_DOCUMENT = ("document_id", "copies", "source", "file", "record", "id", "url", "metadata")


@dataclass(frozen=True)
class StoreFiles:
    """The location of a token store, as an argument of tasks; `content` is a digest of its card."""

    location: str
    storage: StorageOptions | None
    content: str

    def connect(self) -> Store:
        """Return the Store (a folder or a bucket) that has the files of the token store."""
        if is_remote(self.location):
            return connect(self.location, self.storage)
        return LocalStore(Path(self.location))

    def open(self) -> _TokenStore:
        """Return the token store; its index is read once per process."""
        return _open_store(self)


@dataclass(frozen=True)
class _TokenStore:
    """An open token store, which reads shards by number."""

    store: Store
    manifest: Manifest

    def shard(self, number: int) -> MdsShard:
        """Read shard `number`. Raises BuildError if its bytes differ from the hashes in the index."""
        info = self.manifest.shards[number]
        name, where = info.stored.basename, f"{self.store.url}/{info.stored.basename}"
        stored = read_object(self.store, name, info.stored.bytes)
        for kind, digest in hash_bytes(stored.data, info.stored.hashes).items():
            if digest != info.stored.hashes[kind]:
                problem = f"{kind} is {digest}, but {info.stored.hashes[kind]} in the index"
                raise BuildError(f"{where}: {problem}; run shardkit verify")
        raw = decompress_shard("mds", info, stored, where) if info.compression else stored
        return shard_from_raw(where, info, raw)


@lru_cache(maxsize=1)
def _open_store(files: StoreFiles) -> _TokenStore:
    store = files.connect()
    return _TokenStore(store, parse_index(f"{files.location}/{INDEX_NAME}", store.get(INDEX_NAME)))


_RECIPE_KEYS = {
    key: f'a key of a recipe: overrides=["{group}.{key}=…"]'
    for group, keys in (("output", OutputConfig.model_fields), ("pack", PackConfig.model_fields))
    for key in keys
    if key != "path"
}


@answers_keywords({**BUILD, **_RECIPE_KEYS})
def pack_store(
    store: str | Path,
    output: str | Path,
    *,
    overrides: Sequence[str] = (),
    workers: int | None = None,
    engine: EngineName = "local",
    progress: bool | Callable[[StageProgress], None] = True,
    replace: bool = False,
    storage: StorageOptions | None = None,
) -> BuildResult:
    """Pack the documents of a token store (a dataset of `output.format: tokens`) into the dataset `output`.

    `overrides` set keys of a recipe's `pack` and `output`, such as "pack.sequence_length=32768". Both places
    may be URLs. After an interruption, repeat the call to continue. Raises BuildError if `store` is not a
    token store, or if another dataset is at `output` and `replace` is not set; RecipeError for bad settings.
    """
    start = time.perf_counter()
    location = str(store).rstrip("/") if is_remote(str(store)) else str(local_path(store).absolute())
    card = _card_of_store(StoreFiles(location, storage, ""))
    recipe = _recipe_of(card, str(output), overrides)
    target = RemoteOutput(str(output), storage) if is_remote(str(output)) else local_path(output).absolute()
    files = StoreFiles(location, storage, digest_of(card.data))
    execution = Execution(workers=workers, engine=engine)
    beside = Path(f"{target}.work" if isinstance(target, Path) else target.work_name).absolute()
    work = work_of(recipe, beside, None, execution)
    clock = StageClock(make_listener(progress), start)
    with clock as listener, open_runner(recipe, work, execution, listener) as runner:
        built = _build(recipe, card, files, runner)
        publish_dataset(built, target, runner, listener, replace=replace)
        ran = Ran(runner.seconds, runner.tasks, runner.tasks_reused, clock.times(runner.seconds))
        runner.journal.remove()
    return BuildResult.of_card(str(target), built.facts, time.perf_counter() - start, ran)


def _card_of_store(files: StoreFiles) -> DatasetCard:
    """Return the card of a token store. Raises BuildError if there is no token store at its location."""
    contents = find_only_contents(files.connect())
    card = None if contents is None else contents.card
    try:
        kind = card.recipe["output"]["format"] if card is not None else None
    except (ShardError, KeyError, TypeError):
        kind = None
    if card is None or kind != "tokens":
        raise BuildError(
            f"{files.location}: is not a token store; build one with `output: {{format: tokens, …}}`, or as "
            f"one of several `outputs`"
        )
    return card


def _recipe_of(card: DatasetCard, output: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe by which a build from the raw inputs would write the packed dataset."""
    routed = {key: value for key, value in card.recipe["output"].items() if key == "where"}
    content = {**content_of(card), "output": {"path": output} | routed, "pack": {}}
    part = content.pop("part", None)
    for override in overrides:
        if not override.startswith(_SETTINGS) or override.startswith("output.path"):
            raise RecipeError(f"{override}: set only keys of `pack` and `output`, except output.path")
        content = apply_override(content, override)
    recipe = recipe_from_mapping(content, folder=Path.cwd(), name="pack").of_part(part)
    if not (recipe.output.has_rows or recipe.output.is_for_trainer):
        formats = ", ".join(["mds", "wds", *TRAINER_FORMATS])
        raise RecipeError(f"output.format: must be one of {formats}, not {recipe.output.format}")
    return recipe


def _build(recipe: Recipe, card: DatasetCard, files: StoreFiles, runner: Runner) -> BuiltDataset:
    def steps() -> BuiltDataset:
        dataset = _packed(recipe, card, files, runner.run)
        runner.require(dataset.links.values())
        return dataset

    return runner.complete(steps)


def _packed(recipe: Recipe, card: DatasetCard, files: StoreFiles, run: RunTasks) -> BuiltDataset:
    kept = card.funnel.kept
    partitions = count_partitions(recipe, Count(kept.documents, kept.bytes))
    [packed] = run(_pack_tasks(recipe, card, files, partitions))
    parts = [PACK_STORED.result(commit) for commit in packed]
    [numbered] = run(provenance.tasks(packed, [len(part.shards) for part in parts]))
    tables = {provenance_name(n): commit for n, commit in enumerate(numbered)}
    tables |= _copied(card, files, run)
    made = [(commit, part.shards) for commit, part in zip(packed, parts, strict=True)]
    return assemble(recipe, made, tables, lambda manifest: _card(card, recipe, manifest, parts))


def _pack_tasks(recipe: Recipe, card: DatasetCard, files: StoreFiles, partitions: int) -> list[Task]:
    tokenizer = card.data["tokenizer"]
    try:
        settings = PackSettings.of(
            recipe,
            partitions,
            eos_id=tokenizer["eos_id"],
            dtype=tokenizer["dtype"],
            vocab_size=tokenizer["vocab_size"],
            bos_id=tokenizer.get("bos_id"),
        )
    except ValueError as error:
        raise RecipeError(f"output.format: {error}") from error
    stored = card.packing["partitions"]
    made = []
    for number in range(partitions):
        bounds = [range_start(number + more, partitions) for more in (0, 1)]
        last = range_of(np.array([bounds[1] - 1], np.uint64), stored)
        first = range_of(np.array([bounds[0]], np.uint64), stored)
        tables = [*range(int(first[0]), int(last[0]) + 1)]
        name, weight = partition_name(number, partitions), card.funnel.kept.bytes // partitions
        made.append(PACK_STORED.task(name, weight, files, tables, bounds, number, settings))
    return made


def pack_stored(
    folder: Path,
    files: StoreFiles,
    tables: Sequence[int],
    bounds: Sequence[int],
    partition: int,
    settings: Annotated[PackSettings, RecipeKey()],
) -> Packed:
    """Pack the documents of a token store with hashes in [bounds[0], bounds[1]) into shards in `folder`.

    `tables` are the numbers of the store's provenance tables that have these documents.
    """
    store = files.open()
    parts = [_documents(store, number, bounds, settings.seed) for number in tables]
    documents = pa.concat_tables(parts).combine_chunks()
    types = {"tokens": np.dtype(settings.dtype)}
    types |= {LOSS_MASK: np.dtype(np.uint8)} if settings.masked else {}
    columns, starts = _columns(store, documents, types)
    table = documents.select(SPILL_SCHEMA.names).cast(SPILL_SCHEMA)
    lengths = table.column("tokens").to_numpy()
    masks = (columns[LOSS_MASK], starts) if settings.masked else (None, None)
    part = Partition(columns["tokens"], starts, lengths, table, *masks)
    return pack_documents(folder, part, partition, settings)


PACK_STORED = Stage("pack", "shuffle and pack", pack_stored)


def _documents(store: _TokenStore, number: int, bounds: Sequence[int], seed: int) -> pa.Table:
    """Read the rows of a provenance table with hashes in `bounds`: SPILL_SCHEMA plus `shard` and `row`."""
    name = provenance_name(number)
    try:
        table = pq.read_table(pa.BufferReader(pa.py_buffer(read_object(store.store, name))))
    except pa.ArrowException as error:
        raise BuildError(f"{store.store.url}/{name}: {error}; run shardkit verify") from error
    hashes = keyed_hashes(table.column("document_id").to_pylist(), seed, "shuffle")
    inside = (hashes >= np.uint64(bounds[0])) & (hashes <= np.uint64(bounds[1] - 1))
    sizes = table.column("token_end").to_numpy().astype(np.int64)
    columns = {name: table.column(name) for name in ("shard", "row", *_OF_DOCUMENT)}
    found = pa.table({"hash": pa.array(hashes), "tokens": pa.array(sizes), **columns})
    return found.filter(pa.array(inside))


def _columns(
    store: _TokenStore, documents: pa.Table, types: Mapping[str, np.dtype[Any]]
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.int64]]:
    """Return the concatenated values of documents per column in `types`, and the offset of each document."""
    lengths = documents.column("tokens").to_numpy()
    ends = np.cumsum(lengths)
    columns = {name: np.empty(int(ends[-1]) if len(ends) else 0, dtype) for name, dtype in types.items()}
    starts = ends - lengths
    for at, sample in enumerate(_samples(store, documents)):
        for name, column in columns.items():
            values = sample.get(name, ())
            assert isinstance(values, Sized)
            if len(values) != lengths[at]:
                raise BuildError(
                    f"{store.store.url}: document {documents.column('document_id')[at].as_py().hex()} has "
                    f"{len(values):,} values in {name}, but {lengths[at]:,} tokens in its provenance table; "
                    "run shardkit verify"
                )
            column[starts[at] : ends[at]] = values
    return columns, starts


def _samples(store: _TokenStore, documents: pa.Table) -> Iterator[dict[str, object]]:
    places = zip(documents.column("shard").to_pylist(), documents.column("row").to_pylist(), strict=True)
    for number, rows in groupby(places, key=lambda place: place[0]):
        shard = store.shard(number)
        for _, row in rows:
            yield shard.sample(row)


def _copied(card: DatasetCard, files: StoreFiles, run: RunTasks) -> dict[str, Commit]:
    """Copy the store's files about documents, such as annotations; files about rows are written anew."""
    of_rows = (REPORT_NAME, f"{PROVENANCE_FOLDER}/")
    names = [name for name in card.file_names if not name.startswith(of_rows)]
    tasks = []
    for at in range(0, len(names), _FILES_OF_TASK):
        group = names[at : at + _FILES_OF_TASK]
        tasks.append(COPIED.task(f"{at:07d}", 0, files, group))
    [commits] = run(tasks)
    found = {}
    for commit in commits:
        for name, output in commit.outputs.items():
            found[name] = replace(commit, facts=facts_of({}, {name: Output(output.bytes, output.xxh3_128)}))
    return found


def copy_files(folder: Path, files: StoreFiles, names: Sequence[str]) -> None:
    """Copy files of the token store into `folder`."""
    store = files.open()
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(read_object(store.store, name).tobytes())


COPIED = Stage("side_files", "write", copy_files)


def _card(card: DatasetCard, recipe: Recipe, manifest: Manifest, parts: Sequence[Packed]) -> DatasetCard:
    """Return the card that a build from the raw inputs would write; facts on documents are the store's."""
    content = recipe.content()
    packed = sums_of(parts)
    tokens = packed["tokens"] + packed.get("cropped", 0)
    if (packed["documents"], tokens) != (card.funnel.kept.documents, card.tokens):
        raise BuildError(
            f"packed {packed['documents']:,} documents with {tokens:,} tokens in total, but the store has "
            f"{card.funnel.kept.documents:,} documents with {card.tokens:,} tokens; run shardkit verify"
        )
    trained = sum(part.trained for part in parts)
    booked = trained + sum(part.cropped_trained for part in parts) + packed.get("repeated", 0)
    stored = card.data["trained_tokens"] if recipe.is_masked else card.tokens
    if recipe.has_masked_rows and booked != stored:
        raise BuildError(
            f"{booked:,} tokens to train on were packed, cropped or masked, but the store has {stored:,}; "
            "run shardkit verify"
        )
    histograms = {"row_padding": Histogram(), "row_pieces": Histogram()}
    for part in parts:
        histograms["row_padding"].add(part.row_padding)
        histograms["row_pieces"].add(part.row_pieces)
    facts = {
        **card.data,
        "fingerprint": manifest.fingerprint,
        "format": manifest.format,
        "shards": len(manifest.shards),
        "samples": manifest.samples,
        "bytes": sum(shard.raw.bytes for shard in manifest.shards),
        "stored_bytes": sum(shard.stored.bytes for shard in manifest.shards),
        "dtype": file_dtype(recipe, card.data["tokenizer"]),
        "sequence_length": recipe.pack.sequence_length if recipe.output.has_rows else None,
        "tokens": packed["tokens"],
        "padding": packed["padding"],
        **({"trained_tokens": trained} if recipe.has_masked_rows else {}),
        "recipe_digest": digest_of(content),
        "recipe": content,
        "packing": {"partitions": len(parts), **packed},
        "histograms": {
            **card.data["histograms"],
            **{name: histogram.to_dict() for name, histogram in histograms.items()},
        },
    }
    del facts["files"]
    return DatasetCard(facts)
