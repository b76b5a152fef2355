"""Recipes as text: YAML in, overrides on top, problems out with key paths.

YAML here is the safe subset of PyYAML with two repairs: a repeated key is an error instead of a silent
override, and `1e-3` is a number.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from shardkit.errors import RecipeError

__all__ = ["apply_override", "describe_problems", "load_yaml"]

_MAX_RECIPE_BYTES = 1 << 20  # a recipe is written by people; anything larger is some other file
_MODEL = re.compile(r"valid dictionary or instance of \w+")
_KEY_PART = re.compile(r"([^.\[\]=]+)|\[(\d+)\]")


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and knows exponents without a point."""

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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; RecipeError with the line number when it is not one."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > _MAX_RECIPE_BYTES:
        raise RecipeError(f"{path}: larger than {_MAX_RECIPE_BYTES:,} bytes; this is not a recipe")
    try:
        recipe = yaml.load(data.decode("utf-8-sig"), _Loader)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: byte {error.start:,} is not UTF-8") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{path}: {_yaml_problem(error)}") from None
    if not isinstance(recipe, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys, this is {_kind(recipe)}")
    return recipe


def apply_override(data: dict[str, Any], override: str) -> dict[str, Any]:
    """`data` with "key.sub[0].name=value" applied; the value is read as YAML, missing mappings are made."""
    name, equals, text = override.partition("=")
    parts = _split_key(name.strip())
    if not equals or not parts:
        raise RecipeError(f"override {override!r}: write key.sub=value")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: {_yaml_problem(error)}") from None
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
    """A copy of `data` along the path, so that the caller's mapping stays as it was."""
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if isinstance(data, list) and isinstance(part, str) and part.isdecimal():
        part = int(part)
    if isinstance(part, int):
        if not isinstance(data, list) or part > len(data):
            length = f"a list of {len(data)}" if isinstance(data, list) else _kind(data)
            raise RecipeError(f"override {override!r}: no place for number {part} in {length}")
        old = data[part] if part < len(data) else None
        return [*data[:part], _with_value(old, rest, value, override), *data[part + 1 :]]
    if data is not None and not isinstance(data, dict):
        raise RecipeError(f"override {override!r}: {part!r} would be a key in {_kind(data)}")
    data = data or {}
    return data | {part: _with_value(data.get(part), rest, value, override)}


def describe_problems(name: str, error: ValidationError, model: type[BaseModel]) -> str:
    """All problems of one validation, a line each: key path, what is wrong, what was found."""
    lines = []
    problems = error.errors(include_url=False)
    within = {p["loc"][:-1] for p in problems} | {p["loc"][:1] for p in problems if len(p["loc"]) > 1}
    for problem in problems:
        location, kind = problem["loc"], problem["type"]
        if kind == "too_short" and location in within:
            continue  # pydantic counts only the items without problems
        path = _key_path(location)
        if kind == "extra_forbidden":
            lines.append(f"{path}: unknown key{_suggestion(model, location)}")
        elif kind == "missing":
            lines.append(f"{path}: required, but missing")
        elif kind == "value_error":
            lines.append(f"{path}: {problem['ctx']['error']}")
        else:
            lines.append(f"{path}: {_plain(problem['msg'])}, got {_shown(problem['input'])}")
    count = f"{len(lines)} problems" if len(lines) > 1 else "1 problem"
    return f"{name}: {count}\n" + "\n".join(f"  {line}" for line in lines)


def _key_path(location: tuple[int | str, ...]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".") or "(top level)"


def _suggestion(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    owner: type[BaseModel] | None = model
    for part in location[:-1]:
        if owner is not None and isinstance(part, str):
            field = owner.model_fields.get(part)
            owner = _model_in(field.annotation) if field else None
    if owner is None:
        return ""
    known = sorted(owner.model_fields)
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known) or 'none'}"


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model inside X, X | None or tuple[X, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in typing.get_args(annotation) if (m := _model_in(a)) is not None), None)


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or (str(error).splitlines() or ["not YAML"])[0]
    return f"line {mark.line + 1}, column {mark.column + 1}: {what}" if mark else what


def _plain(message: str) -> str:
    message = _MODEL.sub("mapping", message.removeprefix("Input ")).replace("valid tuple", "list")
    return message[:1].lower() + message[1:]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _kind(value: object) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", type(None): "empty"}
    return names.get(type(value), type(value).__name__)
