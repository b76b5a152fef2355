"""Where a build writes: its output, and its work folder where the recipe names none."""

from __future__ import annotations

from pathlib import Path

from shardkit.errors import RecipeError
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote, local_path
from shardkit.writers.publish import RemoteOutput
from shardkit.writers.recipe import Recipe

__all__ = ["default_work", "destination_of"]


def destination_of(
    recipe: Recipe, output: str | Path | None, storage: StorageOptions | None
) -> Path | RemoteOutput:
    """Where a build's dataset goes; RecipeError if it cannot go there."""
    place = recipe.output.path if output is None else str(output)
    if is_remote(place):
        return RemoteOutput(place.rstrip("/"), storage)
    folder = recipe.resolve(place) if output is None else local_path(place).absolute()
    if not folder.name:
        raise RecipeError(f"output.path: {folder} cannot hold a dataset; name a folder")
    return folder


def default_work(target: Path | RemoteOutput) -> str:
    """Beside a folder; for a remote output, in the recipe's folder."""
    return f"{target}.work" if isinstance(target, Path) else target.work_name
