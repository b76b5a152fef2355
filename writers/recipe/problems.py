"""Describes problems of a recipe for its author: the key path, what to write there, and what was found.

pydantic reports problems in terms of Python (tuples, patterns, class names). Here each kind of problem gets
one sentence in terms of YAML, with the example that the field of the model declares.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError, WithJsonSchema
from pydantic.fields import FieldInfo

from shardkit.hints import closest, hint
from shardkit.synonyms import RECIPE

_MAX_SHOWN = 80
_MAX_KEYS = 12
_MOST_DEPTH = 2  # levels below an unknown key's own that are searched for it; of lists, one
_MOST_PATHS = 3  # a key that is in more mappings says little
# Items that pydantic adds to a problem's location for the tried member of a union; they are not keys of YAML.
_UNION_MEMBER = re.compile(
    r"constrained-\w+|function-\w+\[.*|(?:dict|tuple|list|union|literal)\[.*|float|int|str|FieldScope"
)

_WANTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping of keys to values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "string_type": "text",
    "tuple_type": "a list",
}
_LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_LENGTHS = {
    "string_too_long": "shorter text (at most {max_length} characters)",
    "string_too_short": "text that is not empty",
    "too_long": "a shorter list (at most {max_length:,} items)",
    "too_short": "a list that is not empty",
}


def describe_problems(name: str, error: ValidationError, model: type[BaseModel]) -> str:
    """Return a message that lists all problems in `error`, one line per key path, for the recipe `name`."""
    problems = error.errors(include_url=False)
    within = {p["loc"][:-1] for p in problems} | {p["loc"][:1] for p in problems if len(p["loc"]) > 1}
    by_path: dict[str, list[str]] = {}
    for problem in problems:
        location = tuple(part for part in problem["loc"] if not _is_union_member(part))
        if problem["type"] == "too_short" and problem["loc"] in within:
            continue  # the list seems too short because pydantic skips invalid items, which are listed anyway
        texts = by_path.setdefault(_key_path(location), [])
        text = _sentence(problem["type"], location, problem.get("ctx", {}), problem["input"], model)
        texts += [text] if text not in texts else []
    lines = [f"{path}: {'; or '.join(texts)}" for path, texts in by_path.items()]
    count = f"{len(lines)} problems" if len(lines) > 1 else "1 problem"
    return f"{name}: {count}\n" + "\n".join(f"  {line}" for line in lines)


def _is_union_member(part: int | str) -> bool:
    return isinstance(part, str) and _UNION_MEMBER.fullmatch(part) is not None


def _key_path(location: Sequence[int | str]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part:.200}" for part in location)
    return path.removeprefix(".") or "(top level)"


def _sentence(
    kind: str, location: Sequence[int | str], ctx: Mapping[str, Any], value: object, model: type[BaseModel]
) -> str:
    """Return a sentence that says what is wrong with the value at a location, and what to write instead.

    `kind`, `location` and `ctx` are the type, location and context of a problem of pydantic.
    """
    owner, field = _find(model, location)
    examples = list(field.examples or ()) if field is not None else []
    if location and isinstance(location[-1], int):  # an item of a list
        examples = [each[0] if isinstance(each, list) else each for each in examples]
    example = f", such as {' or '.join(map(_shown, examples))}" if examples else ""
    if kind == "extra_forbidden":
        place = ".".join(str(part) for part in location[:-1] if not isinstance(part, int))
        return f"unknown key{_suggestion(owner, str(location[-1]), RECIPE.get(place, {}))}"
    if kind == "missing":
        return f"required, but missing{example}"
    if kind == "value_error":
        return str(ctx["error"])
    if kind == "literal_error":
        return f"{_choice(ctx['expected'], value)}, got {_shown(value)}"
    if kind.startswith("model_"):
        inner = _model_in(field.annotation) if field is not None else model
        if not all(isinstance(each, dict) for each in examples):
            return f"should be {example.removeprefix(', such as ')}, got {_shown(value)}"
        return f"should be a mapping{example or _keys_of(inner)}, got {_shown(value)}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        # A field with its own JSON schema is a size in bytes; no other field has one.
        is_size = field is not None and any(isinstance(each, WithJsonSchema) for each in field.metadata)
        return f"should be {words} {_quantity(ctx[name], is_size)}, got {_shown(value)}"
    wanted = _WANTED.get(kind) or _LENGTHS.get(kind, "a value of another type").format_map(ctx)
    return f"should be {wanted}{_unquoted(kind, value) or example}, got {_shown(value)}"


def _find(
    model: type[BaseModel], location: Sequence[int | str]
) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """Return the model that has the last key of a location, and the key's field; list indices are skipped."""
    owner: type[BaseModel] | None = model
    field: FieldInfo | None = None
    for number, part in enumerate(location):
        if isinstance(part, int):
            continue
        field = owner.model_fields.get(part) if owner is not None else None
        if number + 1 < len(location):
            owner = _model_in(field.annotation) if field is not None else None
    return owner, field


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Return the pydantic model X in an annotation such as X, X | None or tuple[X, ...]; None without one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in typing.get_args(annotation) if (m := _model_in(a)) is not None), None)


def _keys_of(model: type[BaseModel] | None) -> str:
    if model is None:
        return ""
    names = list(model.model_fields)
    return f" with the keys {', '.join(names[:_MAX_KEYS])}{', …' if len(names) > _MAX_KEYS else ''}"


def _suggestion(owner: type[BaseModel] | None, key: str, table: Mapping[str, str]) -> str:
    """Return "; did you mean …?" for an unknown key: a word of another tool, a key below, or a known key."""
    if owner is None:
        return ""
    known = sorted(owner.model_fields)
    below = [] if key in table else paths_below(owner, key)
    if below:
        return f"; did you mean {' or '.join(map(repr, below))}?"
    said = hint(key, known, table, {name: repr(name) for name in known})
    return f"; {said}" if said else f"; known keys: {', '.join(known) or 'none'}"


def paths_below(owner: type[BaseModel], key: str) -> list[str]:
    """Return the paths of a key in the mappings of a model, up to `_MOST_PATHS` of the least depth."""
    models: list[tuple[str, type[BaseModel]]] = [("", owner)]
    for _ in range(_MOST_DEPTH):
        inner = [
            (f"{path}{name}" + ("[]." if is_list else "."), model)
            for path, outer in models
            for name, field in outer.model_fields.items()
            if (model := _model_in(field.annotation)) is not None
            for is_list in ["tuple" in str(field.annotation)]
        ]
        if found := [f"{path}{key}" for path, model in inner if key in model.model_fields]:
            return found if len(found) <= _MOST_PATHS else []
        models = [(path, model) for path, model in inner if "[]" not in path]
    return []


def _choice(expected: str, value: object) -> str:
    """Return "should be 'a', 'b' or 'c'", followed by a suggestion if the value is similar to a choice."""
    close = closest(str(value), re.findall(r"'([^']*)'", expected))
    return f"should be {expected}" + (f" (did you mean {close[0]!r}?)" if close else "")


def _quantity(value: float, is_size: bool) -> str:
    """Format a number, or a size such as "268,435,456 (256 MiB)"."""
    mebibytes, rest = divmod(value, 1 << 20)
    return f"{value:,}" + (f" ({mebibytes:,} MiB)" if is_size and mebibytes and not rest else "")


def _unquoted(kind: str, value: object) -> str:
    """Return advice for a number that was given as text, such as " without quotes: write 5"; else ""."""
    if not isinstance(value, str) or len(value) > _MAX_SHOWN or kind not in ("int_type", "float_type"):
        return ""
    number = value.strip().replace(",", "").replace("_", "")
    percent = number.endswith("%")
    try:
        parsed = float(number.rstrip("%"))
    except ValueError:
        return ""
    if percent:
        return f": write {parsed / 100:g} for {value}"
    return f" without quotes: write {number}" if kind == "float_type" or number.isdecimal() else ""


def _shown(value: object) -> str:
    """Format a value as YAML on one line, cut at `_MAX_SHOWN` characters."""
    if isinstance(value, str):
        text = repr(value)
    else:
        try:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
        except yaml.YAMLError:  # a value from Python code
            text = repr(value)
        except (ValueError, RecursionError):  # an integer of thousands of digits, or very deep nesting
            text = f"{type(value).__name__} that is too long to show"
        text = text.removesuffix("...\n").strip()
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}…"
