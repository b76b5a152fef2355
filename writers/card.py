"""Makes the dataset card, `dataset.json`, and the other files that are published with it.

The card depends only on the recipe and on counts, and has no times, folder names or number of workers. So the
same build gives the same bytes anywhere. `report.html` (shardkit.writers.report) depends only on the card.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from shardkit.card import (
    CARD_NAME,
    FILES_NAME,
    AmountFacts,
    DatasetCard,
    DedupFacts,
    FilterFacts,
    listed_files,
)
from shardkit.formats.trainers import TRAINER_FORMATS, trainer_dtype
from shardkit.hashing import digest_of, hash_bytes
from shardkit.manifest import BLOCKS_NAME, FileInfo, Format, Manifest, ShardInfo
from shardkit.version import __version__
from shardkit.writers.execution.artifacts import Artifact, DamagedRangeError
from shardkit.writers.execution.commit import Commit, facts_of
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.report import render_report
from shardkit.writers.rows.funnel import Funnel
from shardkit.writers.stages.flow import PartsFound
from shardkit.writers.stages.publish import REPORT_NAME, global_shards

CARD_VERSION = 1
FILE_HASH = "xxh3_128"
_READERS = 16


def content_of(card: DatasetCard) -> dict[str, Any]:
    """Return the recipe in a card without keys that exist only in recipes of earlier versions."""
    content = dict(card.recipe)
    dedup = content.get("dedup") or {}
    if dedup.get("near") is not None:
        near = {key: value for key, value in dedup["near"].items() if key != "measure"}
        content["dedup"] = {**dedup, "near": near}
    return content


def make_card(
    recipe: Recipe,
    manifest: Manifest,
    funnel: Funnel,
    *,
    tokenizer: Mapping[str, Any] | None,
    inputs: Sequence[Mapping[str, Any]],
    partitions: int,
    amounts: Sequence[AmountFacts] = (),
    split: PartsFound | None = None,
    dedup: DedupFacts | None = None,
    filters: FilterFacts | None = None,
    filter_files: Mapping[str, str] | None = None,
    buckets: Mapping[str, Any] | None = None,
) -> DatasetCard:
    """Return the card of a dataset, without its key `files`, which `assemble` adds."""
    content = recipe.content()
    sources = [
        dict(entry)
        | {
            "funnel": funnel.source(number).to_dict(),
            "tokens": funnel.source_tokens[number],
            "languages": None if funnel.source_languages is None else funnel.source_languages[number],
            **({"repeated": asdict(funnel.repeated[number])} if funnel.repeated else {}),
        }
        for number, entry in enumerate(inputs)
    ]
    facts = {
        "card_version": CARD_VERSION,
        "shardkit_version": __version__,
        "fingerprint": manifest.fingerprint,
        "format": manifest.format,
        "shards": len(manifest.shards),
        "samples": manifest.samples,
        "bytes": sum(shard.raw.bytes for shard in manifest.shards),
        "stored_bytes": sum(shard.stored.bytes for shard in manifest.shards),
        "recipe_digest": digest_of(content),
        "recipe": content,
        "inputs": sources,
        "funnel": funnel.to_dict(),
        "dedup": None if dedup is None else _plain(dedup),
        "filters": None if filters is None else _plain(filters),
        "filter_files": dict(filter_files or {}),
    }
    if buckets is not None:
        facts["buckets"] = dict(buckets)
    if tokenizer is not None:
        facts |= (
            _of_tokens(tokenizer, funnel, partitions)
            | _order_of(recipe)
            | {"dtype": file_dtype(recipe, tokenizer)}
        )
    if amounts:
        facts["amounts"] = [_plain(one) for one in amounts]
    if split is not None:
        facts["split"] = _of_split(recipe, split)
    return DatasetCard(facts)


def _of_split(recipe: Recipe, split: PartsFound) -> dict[str, Any]:
    """Return the card's entry on the parts; `by` is left out if the recipe does not set it."""
    assert recipe.split is not None
    found = {
        "part": recipe.part,
        "documents": split.documents,
        "proposed": split.proposed,
        "alike": split.alike,
        "similarity": recipe.split.similarity,
    }
    return found if recipe.split.by is None else found | {"by": recipe.split.by}


_OPTIONAL = frozenset({"earlier_near", "languages", "sample", "semantic"})


def _plain(facts: AmountFacts | DedupFacts | FilterFacts) -> dict[str, Any]:
    """Return facts as plain data; keys of _OPTIONAL are left out if they have nothing."""
    return {key: value for key, value in asdict(facts).items() if key not in _OPTIONAL or value}


def _order_of(recipe: Recipe) -> dict[str, Any]:
    """Return the entry that says if rows are not shuffled; cards of all others have none."""
    return {} if recipe.pack.order == "shuffled" else {"shuffled": False}


def _of_tokens(tokenizer: Mapping[str, Any], funnel: Funnel, partitions: int) -> dict[str, Any]:
    """Return the entries of a card that only datasets of tokens have."""
    packed = funnel.packed
    return {
        "column": "tokens",
        "dtype": tokenizer["dtype"],
        "sequence_length": funnel.sequence_length,
        "tokens": packed["tokens"],
        "padding": packed["padding"],
        **({} if funnel.trained is None else {"trained_tokens": funnel.trained.packed}),
        "tokenizer": dict(tokenizer),
        "packing": {"partitions": partitions, **packed},
        "histograms": {name: histogram.to_dict() for name, histogram in funnel.histograms.items()},
    }


def file_dtype(recipe: Recipe, tokenizer: Mapping[str, Any]) -> str:
    """Return the dtype of the ids in a dataset's files; `tokenizer` is the tokenizer's entry in its card."""
    if not recipe.output.is_for_trainer:
        return str(tokenizer["dtype"])
    return trainer_dtype(recipe.output.format, tokenizer["vocab_size"]).name


@dataclass(frozen=True)
class BuiltDataset:
    """A dataset to publish. `links` has files of the work folder by their names in the dataset.

    `commits` are those of the tasks that wrote the shards. `tables` has the commits of the other links, by
    name, each with one output. `texts` has the content of further files by name. `facts` is the card without
    its key `files`.
    """

    manifest: Manifest
    facts: DatasetCard
    links: Mapping[str, Artifact]
    commits: Sequence[Commit]
    tables: Mapping[str, Commit]
    texts: Mapping[str, bytes]

    @property
    def card(self) -> bytes:
        """The bytes of dataset.json."""
        return self.texts[CARD_NAME]


_FORMATS: Mapping[str, Format] = {
    "mds": "mds", "wds": "tar", "tokens": "mds", "parquet": "parquet", "jsonl": "jsonl",
    "megatron": "megatron", "olmo": "olmo", "nanogpt": "nanogpt", "llmc": "llmc", "datatrove": "datatrove",
}  # fmt: skip


def assemble(
    recipe: Recipe,
    made: Sequence[tuple[Commit, Sequence[ShardInfo]]],
    tables: Mapping[str, Commit],
    describe: Callable[[Manifest], DatasetCard],
) -> BuiltDataset:
    """Return a dataset to publish: number the shards of all tasks, and create the report and the card.

    `made` has each commit with its shards, `tables` has commits by the name of their only file in the
    dataset, and `describe` returns the card without `files`.
    """
    parts = [(commit.files, shards) for commit, shards in made]
    shards = global_shards(parts, prefixes=recipe.output.prefixes)
    manifest = Manifest(_FORMATS[recipe.output.format], [shard for _, shard in shards])
    card = describe(manifest)
    links = {shard.stored.basename: file for file, shard in shards}
    files: dict[str, Any] = {}
    tables = {**tables, **_beside(recipe, made)}
    for name, commit in tables.items():
        [(file, table)] = commit.outputs.items()
        links[name] = commit.files / file
        files[name] = {"bytes": table.bytes, "xxh3_128": table.xxh3_128}
    texts = {REPORT_NAME: render_report(card)}
    if all(BLOCKS_NAME in commit.outputs for commit, _ in made):
        # These are a few KiB per shard. Reads are concurrent, because the files may be in a store.
        with ThreadPoolExecutor(_READERS) as pool:
            data = b"".join(pool.map(_read_blocks, (commit for commit, _ in made)))
        texts[BLOCKS_NAME] = data
        stated = FileInfo(BLOCKS_NAME, len(data), hash_bytes(data, [FILE_HASH]))
        manifest = replace(manifest, blocks=stated)
    files |= {name: describe_file(text) for name, text in texts.items()}
    listed, of_many = listed_files(files)
    texts |= {} if of_many is None else {FILES_NAME: of_many}
    texts[CARD_NAME] = DatasetCard({**card.data, "files": listed}).to_bytes()
    return BuiltDataset(manifest, card, links, [commit for commit, _ in made], tables, texts)


def _beside(recipe: Recipe, made: Sequence[tuple[Commit, Sequence[ShardInfo]]]) -> dict[str, Commit]:
    """Return a commit for each file that another trainer's format has beside those with ids, by its name."""
    if not recipe.output.is_for_trainer:
        return {}
    kind, numbers, found = TRAINER_FORMATS[recipe.output.format], count(), {}
    _, *endings = kind.endings(masked=recipe.is_masked)
    for commit, shards in made:
        outputs = commit.outputs
        for shard in shards:
            number, stem = next(numbers), ".".join(shard.raw.basename.split(".", 2)[:2])
            for ending in endings:
                own = {f"{stem}.{ending}": outputs[f"{stem}.{ending}"]}
                found[kind.names[ending].format(f"{number:05d}")] = replace(commit, facts=facts_of({}, own))
    return found


def _read_blocks(commit: Commit) -> bytes:
    """Read the block checksums of a task's shards; raises DamagedRangeError if they are not as committed."""
    file, stated = commit.files / BLOCKS_NAME, commit.outputs[BLOCKS_NAME]
    data = file.read_bytes()
    if describe_file(data) != {"bytes": stated.bytes, FILE_HASH: stated.xxh3_128}:
        raise DamagedRangeError(f"{file}: differs from its hash; {file.remedy}", file.path)
    return data


def describe_file(data: bytes) -> dict[str, Any]:
    """Return the card's entry for a file next to the shards."""
    return {"bytes": len(data), **hash_bytes(data, [FILE_HASH])}
