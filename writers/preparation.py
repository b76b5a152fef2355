"""The first stages of anything that is made from documents: read and clean them, remove duplicates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import BuildError, RecipeError
from shardkit.writers.dedup.index import DedupIndex, open_index
from shardkit.writers.duplicates import Deduplicated, remove_duplicates
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work_files import read_bytes
from shardkit.writers.inputs import scan
from shardkit.writers.inputs.fields import check_named_fields
from shardkit.writers.ledger import Count, Ledger, check_bad_fraction, first_of
from shardkit.writers.recipe import Recipe, load_recipe, recipe_from_mapping
from shardkit.writers.recipe_text import apply_override
from shardkit.writers.stages import tasks as stages
from shardkit.writers.stages.clean import QUARANTINE_FILE

__all__ = ["Prepared", "open_indexes", "prepare", "refuse_own_files", "with_overrides"]


@dataclass(frozen=True)
class Prepared:
    """Cleaned splits, what they kept in all, their unique documents, and the commits of tasks run beside."""

    cleaned: Sequence[Commit]
    kept: Count
    unique: Deduplicated
    beside: Sequence[Commit]


def prepare(
    recipe: Recipe,
    splits: Sequence[scan.Split],
    run: Callable[..., list[list[Commit]]],
    indexes: Sequence[DedupIndex],
    files: Mapping[str, str],
    beside: Sequence[Task] = (),
) -> Prepared:
    """Run the stages. `files` are `stages.filter_files`; `beside` are tasks that need nothing of them.

    RecipeError if no record of a file has a field that the recipe names. BuildError if too much is
    unreadable, if nothing is left, or if an input is mostly duplicates.
    """
    others, cleaned = run(beside, stages.clean_tasks(recipe, splits, files))
    total = Ledger()
    for commit in cleaned:
        total.merge(commit.ledger())
    check_named_fields(splits, [commit.counts["fields"] for commit in cleaned])
    check_bad_fraction("all inputs", total, recipe.max_bad_fraction)
    if not total.kept.documents:
        raise BuildError(_nothing_left(total, cleaned))
    unique = remove_duplicates(recipe, splits, cleaned, run, indexes)
    return Prepared(cleaned, total.kept, unique, others)


def _nothing_left(total: Ledger, cleaned: Sequence[Commit]) -> str:
    message = f"no document is left of {total.read.documents:,} that were read"
    for fate, reasons in (("dropped", total.dropped), ("quarantined", total.quarantined)):
        lost = [f"{reason} {count.documents:,}" for reason, count in sorted(reasons.items())]
        message += f"; {fate}: {', '.join(lost)}" if lost else ""
    quarantines = (c.folder / QUARANTINE_FILE for c in cleaned if c.outputs[QUARANTINE_FILE].bytes)
    first = next((first_of(read_bytes(path)) for path in quarantines), None)
    return f"{message} (first: {first})" if first else message


def open_indexes(recipe: Recipe) -> list[DedupIndex]:
    """The indexes of other corpora that the recipe names; RecipeError if one does not fit to its settings."""
    near = recipe.dedup.near
    opened = []
    for number, path in enumerate(near.against if near is not None else ()):
        assert near is not None
        key = f"dedup.near.against[{number}]"
        try:
            index = open_index(recipe.resolve(path))
        except BuildError as error:
            raise RecipeError(f"{key}: {error}") from None
        index.check(near, key)
        opened.append(index)
    return opened


def with_overrides(recipe: Recipe | str | Path, overrides: Sequence[str]) -> Recipe:
    """The recipe, or the one in a YAML file, with keys replaced."""
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, list(overrides))
    if not overrides:
        return recipe
    data: Any = recipe.model_dump(mode="json")
    for override in overrides:
        data = apply_override(data, override)
    return recipe_from_mapping(data, folder=recipe.folder)


def refuse_own_files(splits: Sequence[scan.Split], *places: Path | str) -> None:
    """RecipeError if an input lies where a build writes: a second one would read what the first one wrote.

    `places` are folders, and URLs as str.
    """
    roots = [str(place.resolve() if isinstance(place, Path) else place).rstrip("/") for place in places]
    for split in splits:
        identity = split.input.identity
        for root in roots:
            if identity.startswith(root + "/"):
                raise RecipeError(
                    f"inputs[{split.source}].path: {split.file} lies in {root}, where this build writes; "
                    f"keep inputs, output and work apart"
                )
