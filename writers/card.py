"""Makes the dataset card, `dataset.json`.

A function of the recipe and of counts: no times, no folder names, no number of workers, so the same build
gives the same bytes anywhere. `report.html` (shardkit.writers.report) is a function of the card alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import shardkit
from shardkit.card import DatasetCard, DedupFacts, FilterFacts
from shardkit.hashing import digest_of, hash_bytes
from shardkit.manifest import Manifest
from shardkit.writers.funnel import Funnel
from shardkit.writers.recipe import Recipe

__all__ = ["describe_file", "make_card", "recipe_content"]

CARD_VERSION = 1
FILE_HASH = "xxh3_128"


def recipe_content(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data, without keys that decide no byte, such as the places of output and work.

    Profiles are written out as the filters they stand for.
    """
    content: dict[str, Any] = recipe.model_dump(
        mode="json",
        exclude={
            "work": True,
            "scratch": True,
            "check_disk": True,
            "max_failed_splits": True,  # the ledger says which failed
            "output": {"path"},
        },
    )
    if recipe.output.prefixes is None:
        del content["output"]["prefixes"]  # as in the recipes of older versions
    if recipe.limit is None:
        del content["limit"]
    for entry in content["inputs"]:
        if not entry["exclude"]:
            del entry["exclude"]
        if entry["on_bad_text"] == "quarantine":
            del entry["on_bad_text"]
        if entry["path_fields"] is None:
            del entry["path_fields"]
    content["filters"] = [{name: config.model_dump(mode="json")} for name, config in recipe.filter_chain()]
    return content


def make_card(
    recipe: Recipe,
    manifest: Manifest,
    funnel: Funnel,
    *,
    tokenizer: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    partitions: int,
    dedup: DedupFacts | None = None,
    filters: FilterFacts | None = None,
    filter_files: Mapping[str, str] | None = None,
) -> DatasetCard:
    """The card of a dataset, without its `files`."""
    content = recipe_content(recipe)
    sources = [
        dict(entry)
        | {
            "funnel": funnel.source(number).to_dict(),
            "tokens": funnel.source_tokens[number],
            "languages": None if funnel.source_languages is None else funnel.source_languages[number],
        }
        for number, entry in enumerate(inputs)
    ]
    packed = funnel.packed
    facts = {
        "card_version": CARD_VERSION,
        "shardkit_version": shardkit.__version__,
        "fingerprint": manifest.fingerprint,
        "format": manifest.format,
        "shards": len(manifest.shards),
        "samples": manifest.samples,
        "bytes": sum(shard.raw.bytes for shard in manifest.shards),
        "stored_bytes": sum(shard.stored.bytes for shard in manifest.shards),
        "column": "tokens",
        "dtype": tokenizer["dtype"],
        "sequence_length": recipe.pack.sequence_length,
        "tokens": packed["tokens"],
        "padding": packed["padding"],
        "tokenizer": dict(tokenizer),
        "recipe_digest": digest_of(content),
        "recipe": content,
        "inputs": sources,
        "funnel": funnel.to_dict(),
        "dedup": None if dedup is None else asdict(dedup),
        "filters": None if filters is None else asdict(filters),
        "filter_files": dict(filter_files or {}),
        "packing": {"partitions": partitions, **packed},
        "histograms": {name: histogram.to_dict() for name, histogram in funnel.histograms.items()},
    }
    return DatasetCard(facts)


def describe_file(data: bytes) -> dict[str, Any]:
    """The card's entry of a file beside the shards."""
    return {"bytes": len(data), **hash_bytes(data, [FILE_HASH])}
