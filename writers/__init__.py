"""Offline builds: raw text to shards with an index, provenance and a report."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shardkit.errors import naming_extras

__all__ = [
    "BuildResult",
    "DedupIndexResult",
    "Recipe",
    "build",
    "build_dedup_index",
    "load_recipe",
    "pack_store",
]

_MODULES = {
    "BuildResult": "report.result",
    "DedupIndexResult": "index_build",
    "Recipe": "recipe.recipe",
    "build": "pipeline",
    "build_dedup_index": "index_build",
    "load_recipe": "recipe.recipe",
    "pack_store": "token_store",
}

if TYPE_CHECKING:
    from shardkit.writers.index_build import DedupIndexResult, build_dedup_index
    from shardkit.writers.pipeline import build
    from shardkit.writers.recipe.recipe import Recipe, load_recipe
    from shardkit.writers.report.result import BuildResult
    from shardkit.writers.token_store import pack_store
else:

    def __getattr__(name: str) -> object:
        # Import lazily, so that importing one module of this package does not import all others.
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with naming_extras(f"{__name__}.{name}"):
            return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
