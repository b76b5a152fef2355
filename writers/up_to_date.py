"""Whether the output already holds the very dataset that a build would make.

Decided by content, not by times: the card's recipe, tokenizer and version, and the digests of the raw inputs,
which are read again for this (at the disk's speed, much faster than building).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shardkit
from shardkit.errors import BuildError
from shardkit.hashing import digest_of
from shardkit.writers.card import recipe_content
from shardkit.writers.dedup.index import DedupIndex
from shardkit.writers.inputs.scan import Split, describe_inputs, hash_splits
from shardkit.writers.publish import RemoteOutput, find_published, finish_published
from shardkit.writers.recipe import Recipe

__all__ = ["check_output"]


def check_output(
    output: Path | RemoteOutput,
    recipe: Recipe,
    splits: Sequence[Split],
    tokenizer_digest: str,
    indexes: Sequence[DedupIndex],
    filter_files: Mapping[str, str],
    *,
    replace: bool,
) -> dict[str, Any] | None:
    """The card of the dataset at `output` if it is what this build would make; None if there is work to do.

    BuildError if it holds something else and `replace` is not set, or if a store cannot be reached.
    """
    found = find_published(output)
    if found is None or replace:
        return None
    damage = found.problem and f"which is damaged ({found.problem})"
    problem = damage
    if found.contents is not None:
        problem = _difference(found.card, recipe, splits, tokenizer_digest, indexes, filter_files) or damage
    if problem is not None or found.contents is None:
        raise BuildError(
            f"{output}: already holds a dataset, {problem}; choose another output, or use --replace "
            f"to put this one in its place"
        )
    finish_published(output, found.contents)
    return found.card


def _difference(
    card: dict[str, Any] | None,
    recipe: Recipe,
    splits: Sequence[Split],
    tokenizer_digest: str,
    indexes: Sequence[DedupIndex],
    filter_files: Mapping[str, str],
) -> str | None:
    """Why the card is not this build's, or None."""
    if card is None or "recipe_digest" not in card:
        return "which no recipe made"
    try:
        if card["recipe_digest"] != digest_of(recipe_content(recipe)):
            return "made by another recipe"
        if card["shardkit_version"] != shardkit.__version__:
            return f"made by shardkit {card['shardkit_version']}"
        if card["tokenizer"]["digest"] != tokenizer_digest:
            return "made with another tokenizer"
        if recipe.dedup.near and card["dedup"]["near"]["indexes"] != [index.digest for index in indexes]:
            return "made against other indexes"
        if card["filter_files"] != filter_files:
            return "made with other lists or models of its filters"
        names = ("source", "files", "bytes", "digest")
        stated = [{name: entry[name] for name in names} for entry in card["inputs"]]
    except (KeyError, TypeError):
        return "whose card cannot be read"
    if stated != describe_inputs(recipe, splits, hash_splits(splits)):
        return "made from other input files"
    return None
