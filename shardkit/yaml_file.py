"""Recipes as plain data: YAML files, and overrides such as "pack.sequence_length=512".

YAML here is the safe subset of PyYAML with two repairs: a repeated key is an error instead of a silent
override, and `1e-3` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from shardkit.errors import RecipeError

_MAX_RECIPE_BYTES = 1 << 20  # recipes are written by hand; a larger file is not a recipe
_MAX_INTEGER_CHARACTERS = 40  # enough for 64-bit numbers; Python refuses to parse over 4,300 digits
_KEY_PART = re.compile(r"([^.\[\]=]+)|\[([0-9]{1,6})\]")
_MAX_SHOWN = 200  # maximum number of characters of an override that an error message quotes
# PyYAML does not wrap Python's errors about invalid dates and bytes (ValueError).
_YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and reads exponents without a decimal point as numbers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = (key_node.tag, key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} appears twice", key_node.start_mark
                )
            if key is not None:
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MAX_INTEGER_CHARACTERS:
            problem = f"a number has {len(node.value):,} characters; the limit is {_MAX_INTEGER_CHARACTERS}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises RecipeError with the line number if it is invalid."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > _MAX_RECIPE_BYTES:
        raise RecipeError(f"{path}: is larger than {_MAX_RECIPE_BYTES:,} bytes, so it is not a recipe")
    try:
        recipe = yaml.load(data.decode("utf-8-sig"), _Loader)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start:,} is not UTF-8") from None
    except _YAML_ERRORS as error:
        raise RecipeError(f"{path}: {_yaml_problem(error)}") from None
    if not isinstance(recipe, dict):
        raise RecipeError(f"{path}: a recipe must be a mapping of keys, but this file is {_kind(recipe)}")
    return recipe


def apply_override(data: dict[str, Any], override: str) -> dict[str, Any]:
    """Return `data` with "key.sub[0].name=value" applied; the value is YAML, missing mappings are created."""
    name, equals, text = override.partition("=")
    parts = _split_key(name.strip())
    if not equals or not parts:
        raise RecipeError(f"override {override!r} is not of the form key.sub=value")
    try:
        value = yaml.load(text, _Loader)
    except _YAML_ERRORS as error:
        raise RecipeError(f"override {override[:_MAX_SHOWN]!r}: {_yaml_problem(error)}") from None
    changed: dict[str, Any] = _with_value(data, parts, value, override)
    return changed


def _split_key(name: str) -> list[str | int]:
    parts: list[str | int] = []
    at = 0
    while at < len(name):
        at += parts != [] and name[at] == "."
        match = _KEY_PART.match(name, at)
        if match is None:
            return []
        parts.append(match[1] if match[2] is None else int(match[2]))
        at = match.end()
    return parts


def _with_value(data: Any, parts: list[str | int], value: object, override: str) -> Any:
    """Return `data` with a new value, copied along the path so that the caller's data is unchanged."""
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if isinstance(data, list) and isinstance(part, str) and re.fullmatch("[0-9]{1,6}", part):
        part = int(part)
    if isinstance(part, int):
        if not isinstance(data, list) or part > len(data):
            length = f"a list of {len(data)}" if isinstance(data, list) else _kind(data)
            raise RecipeError(f"override {override!r}: there is no item {part} in {length}")
        old = data[part] if part < len(data) else None
        return [*data[:part], _with_value(old, rest, value, override), *data[part + 1 :]]
    if data is not None and not isinstance(data, dict):
        raise RecipeError(f"override {override!r}: {part!r} cannot be a key of {_kind(data)}")
    data = data or {}
    return data | {part: _with_value(data.get(part), rest, value, override)}


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    what = "it nests too deeply" if isinstance(error, RecursionError) else getattr(error, "problem", None)
    what = what or (str(error).splitlines() or ["not YAML"])[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}" if mark else what


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", type(None): "empty"}
    return names.get(type(value), type(value).__name__)
