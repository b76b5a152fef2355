"""Offline builds: raw text to shards with an index, provenance and a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["BuildResult", "Recipe", "build", "load_recipe"]

if TYPE_CHECKING:
    from shardkit.writers.pipeline import BuildResult, build
    from shardkit.writers.recipe import Recipe, load_recipe
else:

    def __getattr__(name: str) -> object:
        # Late, so that a module of this package costs only what it imports itself.
        if name in ("BuildResult", "build"):
            from shardkit.writers import pipeline

            return getattr(pipeline, name)
        if name in ("Recipe", "load_recipe"):
            from shardkit.writers import recipe

            return getattr(recipe, name)
        raise AttributeError(f"module 'shardkit.writers' has no attribute {name!r}")
