"""A recipe as plain data, from a YAML file or a mapping, before its keys are checked.

Files that are no recipe are recognized here: who gives data, a dataset or a list of paths to a build is told
the command that takes it, instead of a problem of YAML.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardkit.errors import RecipeError
from shardkit.files import local_path
from shardkit.manifest import DESCRIPTIONS
from shardkit.yaml_file import apply_override, load_yaml

YAML_ENDINGS = (".yaml", ".yml")
_LINE_BYTES = 4096


def plain_recipe(
    recipe: Mapping[str, object] | str | os.PathLike[str], overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], Path, str]:
    """Return a recipe as plain data with overrides, the folder of its relative paths, its name in errors."""
    if isinstance(recipe, (str, os.PathLike)):
        path = local_path(recipe)
        data, folder, name = _read(path), path.absolute().parent, str(path)
    elif isinstance(recipe, Mapping):  # convert to plain data: it may have Paths
        data = json.loads(json.dumps(dict(recipe), default=_as_path))
        folder, name = Path.cwd(), "recipe"
    else:
        raise RecipeError(
            f"a recipe is the path of a YAML file, a mapping or a Recipe, not a {type(recipe).__name__}; "
            'name files in it, {"inputs": [path, …]}; give documents in memory as build(recipe, documents=…)'
        )
    for override in overrides:
        data = apply_override(data, override)
    return data, folder, name


def is_recipe(place: str) -> bool:
    """Return whether a path or URL is a YAML file with inputs, which is a recipe and not text."""
    if not place.lower().endswith(YAML_ENDINGS) or not Path(place).is_file():
        return False
    with suppress(RecipeError):
        return "inputs" in load_yaml(Path(place))
    return False


def _as_path(value: object) -> str:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    raise RecipeError(
        f"recipe: a value of type {type(value).__name__} is no setting; give documents as build(recipe, "
        "documents=…), and name files and functions by text"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        data = load_yaml(path)
    except RecipeError as error:
        raise RecipeError(f"{path}: {found}" if (found := _what_it_is(path)) else str(error)) from error
    if "inputs" not in data and (found := _what_it_is(path)):
        raise RecipeError(f"{path}: {found}")
    return data


def _what_it_is(path: Path) -> str:
    """Return what a path is that is not a recipe, and the command for it; "" if it may be meant as one."""
    named = shlex.quote(str(path))
    if path.is_dir():
        if any((path / name).is_file() for name in DESCRIPTIONS):
            return _is_dataset(path)
        recipes = sorted(one for one in path.iterdir() if one.suffix.lower() in YAML_ENDINGS)
        if recipes:
            return f"is a folder; give the recipe in it: {recipes[0]}"
        return f"is a folder of data, not a recipe: `shardkit init {named}` writes a recipe for it"
    if not path.exists():
        return "there is no such file; `shardkit init DATA` writes a recipe for data"
    if path.name in DESCRIPTIONS:
        return _is_dataset(path.parent)
    if path.suffix.lower() in YAML_ENDINGS:
        return ""
    if _lists_paths(path):
        return (
            f"is a list of paths, not a recipe: an input reads it, `inputs: [{{path: {named}, list: true}}]`"
        )
    return f"is data, not a recipe: `shardkit init {named}` writes a recipe for it"


def _is_dataset(folder: Path) -> str:
    return (
        f"is a dataset, not a recipe: `shardkit info {shlex.quote(str(folder))}` describes it; to build it "
        "again, give the recipe that it was built from"
    )


def _lists_paths(path: Path) -> bool:
    if ".paths" in path.suffixes:
        return True
    with path.open("rb") as file:
        line = file.readline(_LINE_BYTES).decode(errors="replace").strip()
    if "://" in line.split(" ")[0]:
        return True
    with suppress(OSError):  # a line of text may be too long for a name
        return "/" in line and any((folder / line).is_file() for folder in (Path(), path.parent))
    return False
