"""What the raw inputs of a dataset were, byte for byte, and whether they still are.

Each split's stored bytes are hashed while they are in memory from being read; an input's digest goes over its
files' names, cuts and hashes. No times are kept, so a copied corpus has the same digests, and a changed byte
in any file gives another one. Of a file in a store its size and version (of S3 the ETag) stand for its bytes,
so that nothing is downloaded to find that there is nothing to do; a copied bucket may then be built again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash

from shardkit.errors import BuildError
from shardkit.hashing import digest_of
from shardkit.writers.inputs.input_files import open_input
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe import Recipe

__all__ = ["describe_inputs", "hash_split", "hash_splits"]

_READ_BYTES = 1 << 20
_THREADS = 8


def hash_split(split: Split) -> str:
    """xxh3-128 of a split's stored bytes. Parquet is cut by row groups: a file's first split has it whole.

    Of a file in a store: of its size and version.
    """
    if split.input.is_remote:
        return digest_of([split.input.bytes, split.input.version])
    whole = split.format == "parquet"
    if whole and split.start:
        return ""
    state = xxhash.xxh3_128()
    try:
        with open_input(split.input) as file:
            file.seek(0 if whole else split.start)
            left = None if whole else split.end - split.start
            while piece := file.read(_READ_BYTES if left is None else min(left, _READ_BYTES)):
                state.update(piece)
                left = None if left is None else left - len(piece)
    except OSError as error:
        raise BuildError(f"{split.path}: cannot be read: {error.strerror or error}") from error
    return state.hexdigest()


def hash_splits(splits: Sequence[Split]) -> list[str]:
    """`hash_split` of all, in threads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(hash_split, splits))


def describe_inputs(recipe: Recipe, splits: Sequence[Split], hashes: Sequence[str]) -> list[dict[str, Any]]:
    """For each input of the recipe its label, number of files, stored bytes and digest."""
    cuts: list[list[list[Any]]] = [[] for _ in recipe.inputs]
    files: list[set[str]] = [set() for _ in recipe.inputs]
    sizes = [0] * len(recipe.inputs)
    for split, content in zip(splits, hashes, strict=True):
        cuts[split.source].append([split.file, split.start, split.end, content])
        files[split.source].add(split.file)
        sizes[split.source] += split.bytes
    return [
        {
            "source": label,
            "files": len(files[source]),
            "bytes": sizes[source],
            "digest": digest_of(cuts[source]),
        }
        for source, label in enumerate(recipe.sources)
    ]
