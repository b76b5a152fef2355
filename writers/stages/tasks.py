"""The stages of a build as tasks: what each depends on, and the functions that workers run.

A task's config and inputs name all that decides its outputs and nothing else, so that a changed recipe
redoes what depends on the change: for example, a new sequence length packs again, a new file is cleaned
and tokenized alone, and one more duplicate costs the split that loses it. Tasks are named after their files'
names and cuts, or after their partition, never after a worker.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardkit.errors import MissingExtraError, RecipeError
from shardkit.hashing import digest_of, hash_file
from shardkit.manifest import Column, FileInfo, ShardInfo
from shardkit.writers.dedup.exact import find_losers, find_winners
from shardkit.writers.dedup.lines import ROWS_FILE
from shardkit.writers.dedup.removals import LOSERS_FILE, WINNERS_FILE, Removals, count_groups
from shardkit.writers.execution.task import Commit, Task, contents, partition_name
from shardkit.writers.execution.work_files import local
from shardkit.writers.inputs.scan import Split, hash_split
from shardkit.writers.kernels.words import normalization_version
from shardkit.writers.languages import LANGUAGES_FILE, LanguageLabels
from shardkit.writers.recipe import OutputConfig, PackConfig, Recipe
from shardkit.writers.stages.clean import DOCUMENTS_FILE, KEYS_FILE, clean_split
from shardkit.writers.stages.provenance import renumber
from shardkit.writers.stages.shards import PROVENANCE_NAME, pack_partition
from shardkit.writers.stages.tokenize import run_tokens_for, tokenize_split
from shardkit.writers.tokenizer import Encoder, Engine, Ranges, check_parity, load_encoder, unlike_characters

__all__ = [
    "clean_tasks",
    "exact_tasks",
    "filter_files",
    "pack_tasks",
    "parity_task",
    "provenance_tasks",
    "shards_of",
    "tokenize_tasks",
    "tokenizer_task",
]

_FIRST = 1 << 60  # a weight that starts before all others

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def tokenizer_task(path: Path, eos: str, digest: str) -> Task:
    """Load the tokenizer before hours go by: wrong files and eos tokens fail here."""
    config, inputs = {"tokenizer.eos": eos}, {"tokenizer": digest}
    return Task("tokenizer", "tokenizer", config, _check_tokenizer, (path, eos), _FIRST, inputs)


def _check_tokenizer(folder: Path, path: Path, eos: str) -> dict[str, Any]:
    path = local(path)
    encoder = Encoder(path, eos, engine="tokenizers")
    facts = {"eos_id": encoder.eos_id, "vocab_size": encoder.vocab_size, "dtype": encoder.dtype.name}
    try:  # the engine to start with; the parity check decides
        fast = Encoder(path, eos, engine="gigatoken")
        unlike = unlike_characters(fast, encoder)
    except MissingExtraError:
        raise
    except Exception:  # a tokenizer whose parts gigatoken does not know: any exception of its own
        return facts | {"engine": "tokenizers", "unlike": []}
    return facts | {"engine": "gigatoken", "unlike": unlike}


def clean_tasks(recipe: Recipe, splits: Sequence[Split], files: Mapping[str, str]) -> list[Task]:
    """One task a split; `files` are `filter_files`."""
    filters = [[name, config.model_dump(mode="json")] for name, config in recipe.filter_chain()]
    exact = recipe.dedup.exact
    keys = normalization_version() if exact is not None and exact.text == "normalized" else "raw"
    shared = {
        "filters": filters,
        "annotate": recipe.annotate,
        "dedup.exact.text": keys,
        "max_bad_fraction": recipe.max_bad_fraction,
        "max_record_bytes": recipe.max_record_bytes,
    }
    tasks = []
    for split in splits:
        place = asdict(split) | {"file": split.file}
        del place["index"], place["input"]
        state = [split.input.bytes, split.input.version]
        fields = recipe.inputs[split.source].model_dump(
            mode="json", exclude={"path", "base", "source", "format"}
        )
        inputs = {"file": state, "filter_files": dict(files)}
        config = shared | {"split": place, "inputs": fields}
        tasks.append(Task("clean", _split_name(split), config, _clean, (split, recipe), split.bytes, inputs))
    return tasks


def filter_files(recipe: Recipe) -> dict[str, str]:
    """xxh3-128 of files that filters read, by path in the recipe; RecipeError if one cannot be read."""
    digests = {}
    for name, config in recipe.filter_chain():
        for path in config.files():
            try:
                digests[path] = hash_file(recipe.resolve(path), ["xxh3_128"])["xxh3_128"]
            except OSError as error:
                raise RecipeError(f"filters: {name}: {path}: {error.strerror or error}") from None
    return digests


def _clean(folder: Path, split: Split, recipe: Recipe) -> dict[str, Any]:
    for _, config in recipe.filter_chain():
        for name in config.files():
            local(recipe.resolve(name))
    cleaned = clean_split(split, recipe, folder)
    counts = {"ledger": cleaned.ledger.to_dict(), "filters": cleaned.filters.to_dict()}
    return counts | {"languages": cleaned.languages, "fields": cleaned.fields, "input": hash_split(split)}


def exact_tasks(cleaned: Sequence[Commit], partitions: int) -> list[Task]:
    """One task a partition of keys."""
    paths = tuple(commit.folder / KEYS_FILE for commit in cleaned)
    keys = digest_of([commit.outputs[KEYS_FILE].xxh3_128 for commit in cleaned])
    return [
        Task(
            "exact",
            partition_name(p, partitions),
            {"partition": p, "partitions": partitions},
            _find_exact,
            (paths, p, partitions),
            inputs={"keys": keys},
        )
        for p in range(partitions)
    ]


def _find_exact(folder: Path, paths: Sequence[Path], partition: int, partitions: int) -> dict[str, Any]:
    losers = find_losers(paths, partition, partitions)
    winners = find_winners(losers)
    np.save(folder / LOSERS_FILE, losers, allow_pickle=False)
    np.save(folder / WINNERS_FILE, winners, allow_pickle=False)
    documents = np.bincount(losers["split"])
    sizes = np.bincount(losers["split"], losers["bytes"]).astype(np.int64)
    splits = {str(n): [int(documents[n]), int(sizes[n])] for n in np.flatnonzero(documents).tolist()}
    return {
        "losers": len(losers),
        "bytes": int(losers["bytes"].sum()),
        "splits": splits,
        "groups": count_groups(winners["copies"]),
        "largest_group": int(winners["copies"].max(initial=1)),
    }


def parity_task(cleaned: Sequence[Commit], path: Path, eos: str, digest: str, unlike: Ranges) -> Task:
    """Compare the fast tokenizer with the right one on a sample of the documents."""
    documents = tuple(commit.folder / DOCUMENTS_FILE for commit in cleaned)
    contents = digest_of([commit.outputs[DOCUMENTS_FILE].xxh3_128 for commit in cleaned])
    inputs = {"documents": contents, "tokenizer": digest}
    args = (documents, path, eos, unlike)
    config = {"tokenizer.eos": eos, "unlike": digest_of(unlike)}
    return Task("parity", "parity", config, _check_parity, args, _FIRST, inputs)


def _check_parity(
    folder: Path, documents: Sequence[Path], path: Path, eos: str, unlike: Ranges
) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the build says it, also when this task is skipped
        return check_parity(documents, local(path), eos, unlike).to_dict()


def tokenize_tasks(
    recipe: Recipe,
    splits: Sequence[Split],
    cleaned: Sequence[Commit],
    removals: Removals,
    *,
    labelled: Sequence[Commit],
    tokenizer_path: Path,
    tokenizer_digest: str,
    engine: Engine,
    unlike: Ranges,
    partitions: int,
) -> list[Task]:
    """One task a split: what survived, tokenized and divided among `partitions`.

    `labelled` are the tasks that read the documents; `cleaned` are those, or the ones that cut lines out.
    """
    config = {
        "tokenizer.eos": recipe.tokenizer.eos,
        "engine": engine,
        "unlike": digest_of(unlike),
        "seed": recipe.seed,
        "partitions": partitions,
        "run_tokens": run_tokens_for(recipe.memory),
    }
    encoder = (tokenizer_path, recipe.tokenizer.eos, engine, unlike)
    tasks = []
    for split, commit, first in zip(splits, cleaned, labelled, strict=True):
        languages, named = _languages(first, commit)
        removed = removals.digest(split.index)
        documents = commit.outputs[DOCUMENTS_FILE].xxh3_128
        inputs = {"documents": documents, "removed": removed, "tokenizer": tokenizer_digest} | named
        args = (
            *(commit.folder / DOCUMENTS_FILE, removals, split.index),
            *(encoder, recipe.seed, partitions, languages, config["run_tokens"]),
        )
        weight = commit.ledger().kept.bytes
        tasks.append(Task("tokenize", _split_name(split), config, _tokenize, args, weight, inputs))
    return tasks


def _languages(labelled: Commit, documents: Commit) -> tuple[LanguageLabels | None, dict[str, Any]]:
    """What the documents of a split were found to be, and what a task that reads it names as its inputs."""
    labels = labelled.counts["languages"]
    if labels is None:
        return None, {}
    commits, rows = {LANGUAGES_FILE: labelled}, None
    if documents is not labelled:  # lines were cut: some documents may have gone
        commits[ROWS_FILE], rows = documents, documents.folder / ROWS_FILE
    named = {name: commit.outputs[name].xxh3_128 for name, commit in commits.items()}
    found = LanguageLabels(labelled.folder / LANGUAGES_FILE, tuple(labels), rows)
    return found, {"languages": labels, **named}


def _tokenize(
    folder: Path,
    documents: Path,
    removals: Removals,
    split: int,
    encoder: tuple[Path, str, Engine, Ranges],
    seed: int,
    partitions: int,
    languages: LanguageLabels | None,
    run_tokens: int,
) -> dict[str, Any]:
    path, eos, engine, unlike = encoder
    result = tokenize_split(
        documents,
        removals.of_split(split),
        load_encoder(local(path), eos, engine, unlike),
        seed=seed,
        partitions=partitions,
        folder=folder,
        languages=languages,
        run_tokens=run_tokens,
    )
    counts = result.to_dict()
    return {name: counts[name] for name in ("ledger", "tokens", "lengths", "languages")}


def pack_tasks(
    recipe: Recipe, spilled: Sequence[Commit], *, partitions: int, tokenizer: Commit
) -> list[Task]:
    """One task a partition."""
    spills = tuple(commit.folder for commit in spilled)
    output = recipe.output.model_dump(mode="json", exclude={"path"})
    eos_id, dtype = tokenizer.counts["eos_id"], tokenizer.counts["dtype"]
    inputs = {"spills": contents(spilled)}
    shared = {
        "pack": recipe.pack.model_dump(mode="json"),
        "output": output,
        "seed": recipe.seed,
        "eos_id": eos_id,
        "dtype": dtype,
        "partitions": partitions,
    }
    tasks = []
    for p in range(partitions):
        args = (spills, p, recipe.pack, recipe.output, recipe.seed, eos_id, dtype)
        name, config = partition_name(p, partitions), shared | {"partition": p}
        tasks.append(Task("pack", name, config, _pack, args, inputs=inputs))
    return tasks


def _pack(
    folder: Path,
    spills: Sequence[Path],
    partition: int,
    pack: PackConfig,
    output: OutputConfig,
    seed: int,
    eos_id: int,
    dtype: str,
) -> dict[str, Any]:
    result = pack_partition(
        spills,
        partition,
        pack=pack,
        output=output,
        seed=seed,
        eos_id=eos_id,
        dtype=np.dtype(dtype),
        folder=folder,
    )
    shards = [asdict(shard) for shard in result.shards]
    return {"packed": result.counts(), "histograms": result.histograms(), "shards": shards}


def shards_of(packed: Commit) -> list[ShardInfo]:
    """The shards of a partition, with the names they have in its folder."""
    shards = []
    for entry in packed.counts["shards"]:
        zipped = None if entry["zip"] is None else FileInfo(**entry["zip"])
        columns = tuple(Column(**column) for column in entry["columns"])
        rest = {name: entry[name] for name in ("samples", "compression", "size_limit")}
        shards.append(ShardInfo(FileInfo(**entry["raw"]), columns=columns, zip=zipped, **rest))
    return shards


def provenance_tasks(packed: Sequence[Commit]) -> list[Task]:
    """One task a partition: its provenance table with the dataset's shard numbers."""
    tasks = []
    first_shard = 0
    for commit in packed:
        inputs = {"table": commit.outputs[PROVENANCE_NAME].xxh3_128}
        config = {"first_shard": first_shard}
        args = (commit.folder / PROVENANCE_NAME, first_shard)
        weight = commit.outputs[PROVENANCE_NAME].bytes
        tasks.append(Task("provenance", commit.name, config, _renumber, args, weight, inputs))
        first_shard += commit.counts["packed"]["shards"]
    return tasks


def _renumber(folder: Path, table: Path, first_shard: int) -> dict[str, Any]:
    renumber(table, folder / PROVENANCE_NAME, first_shard)
    return {}


def _split_name(split: Split) -> str:
    """Readable, and unique and constant for (file, start)."""
    readable = _UNSAFE.sub("_", Path(split.file).name)[:40].strip(".") or "file"
    return f"{readable}-{digest_of([split.file, split.start])[:16]}"
