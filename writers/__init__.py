"""Offline builds: raw text to shards with an index, provenance and a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.lazy import imported

__all__ = [
    "BuildResult",
    "DedupIndexResult",
    "Recipe",
    "build",
    "build_dedup_index",
    "load_recipe",
    "pack_store",
]

_PLACES = {
    "BuildResult": "shardkit.writers.report.result",
    "DedupIndexResult": "shardkit.writers.index_build",
    "Recipe": "shardkit.writers.recipe.recipe",
    "build": "shardkit.writers.pipeline",
    "build_dedup_index": "shardkit.writers.index_build",
    "load_recipe": "shardkit.writers.recipe.recipe",
    "pack_store": "shardkit.writers.token_store",
}

if TYPE_CHECKING:
    from shardkit.writers.index_build import DedupIndexResult, build_dedup_index
    from shardkit.writers.pipeline import build
    from shardkit.writers.recipe.recipe import Recipe, load_recipe
    from shardkit.writers.report.result import BuildResult
    from shardkit.writers.token_store import pack_store
else:

    def __getattr__(name: str) -> object:
        return imported(__name__, name, _PLACES)


def __dir__() -> list[str]:
    return __all__
