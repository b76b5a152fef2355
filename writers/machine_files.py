"""Files of the machine that starts a build, for tasks on machines that do not have them.

The tokenizer and the lists and models of filters are read by many tasks. On one machine, or with a shared
file system, they are where they are. With a work folder in a store they are put there once, as the outputs
of a task that runs where the build was started.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work
from shardkit.writers.execution.work_store import StoreWork
from shardkit.writers.recipe import Recipe

__all__ = ["place_files"]

_TOKENIZER = ".tokenizer"  # a folder of its own, apart from what recipes name


class Place(Protocol):
    """The part of a `Journal` or a `Planner` that is needed."""

    @property
    def work(self) -> Work: ...
    def run_here(self, task: Task) -> Commit: ...


def place_files(
    recipe: Recipe, journal: Place, filter_files: Mapping[str, str], tokenizer_digest: str | None = None
) -> tuple[Recipe, Path]:
    """The recipe that tasks get, with the folder that its filters' files are in, and the tokenizer's path.

    Without its digest the tokenizer stays where it is. Files of filters that the recipe names by absolute
    paths must be on every machine, and all of them must if one lies outside of the recipe's folder ("../…").
    """
    tokenizer = recipe.resolve(recipe.tokenizer.path)
    if not isinstance(journal.work, StoreWork):
        return recipe, tokenizer
    inside = {name: digest for name, digest in filter_files.items() if _is_inside(name)}
    inputs = {"tokenizer": tokenizer_digest, "filter_files": inside}
    names = {name: recipe.resolve(name) for name in inside}
    if tokenizer_digest is not None:
        names[f"{_TOKENIZER}/{tokenizer.name}"] = tokenizer
    config = {"tokenizer": tokenizer.name}  # what the file is called is not in its digest
    task = Task("files", "files", config, _copy, (names,), inputs=inputs)
    commit = journal.run_here(task)
    outside = [name for name in filter_files.keys() - inside.keys() if not PurePosixPath(name).is_absolute()]
    moved = recipe if outside else recipe.in_folder(commit.folder)
    return moved, commit.folder / _TOKENIZER / tokenizer.name


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.parts[0] != _TOKENIZER


def _copy(folder: Path, names: Mapping[str, Path]) -> dict[str, Any]:
    for name, path in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    return {}
