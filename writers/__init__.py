"""Offline builds: raw text to shards with an index, provenance and a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkit.errors import naming_extras

__all__ = ["BuildResult", "DedupIndexResult", "Recipe", "build", "build_dedup_index", "load_recipe"]

if TYPE_CHECKING:
    from shardkit.writers.index_build import DedupIndexResult, build_dedup_index
    from shardkit.writers.pipeline import build
    from shardkit.writers.recipe import Recipe, load_recipe
    from shardkit.writers.result import BuildResult
else:

    def __getattr__(name: str) -> object:
        # Late, so that a module of this package costs only what it imports itself.
        with naming_extras(f"shardkit.writers.{name}"):
            if name == "build":
                from shardkit.writers.pipeline import build

                return build
            if name in ("DedupIndexResult", "build_dedup_index"):
                from shardkit.writers import index_build

                return getattr(index_build, name)
            if name == "BuildResult":
                from shardkit.writers.result import BuildResult

                return BuildResult
            if name in ("Recipe", "load_recipe"):
                from shardkit.writers import recipe

                return getattr(recipe, name)
        raise AttributeError(f"module 'shardkit.writers' has no attribute {name!r}")
