"""Converts the arguments of a task that affect its outputs to plain data, which its digest is computed from.

Every argument counts unless its type is `Annotated` with `DecidesNoByte` and the reason. A file counts by its
content, and so does any object with a `content`: a string that identifies everything that a task reads of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

import numpy as np
import xxhash
from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class DecidesNoByte:
    """Marks, in `Annotated`, a parameter or field that does not affect outputs, and says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """Marks a parameter or field whose value is a recipe's `key`, so that `shardkit explain` names that key.

    With an empty `key`, the fields of the value are treated as separate parameters under their own names.
    """

    key: str = ""


MemoryBytes = Annotated[int, DecidesNoByte("bounds what a task holds at a time")]


def plain(value: object) -> Any:
    """Convert the parts of a value that affect outputs to plain data; files become their contents' hashes.

    Raises TypeError for a value that does not identify its content: a path, an open file, or a file whose
    content is not known.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(content := getattr(value, "content", None), str) and not isinstance(value, BaseModel):
        if not content:
            raise TypeError(f"{value}: its content is not known")
        return {"content": content}
    if isinstance(value, BaseModel):
        kind = type(value)
        return deciding({name: getattr(value, name) for name in kind.model_fields}, _model_markers(kind))
    if is_dataclass(value) and not isinstance(value, type):
        return deciding(
            {one.name: getattr(value, one.name) for one in fields(value)}, markers_of(type(value))
        )
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, AbstractSet):
        return sorted(plain(one) for one in value)
    return _plain_array(value)


def _plain_array(value: object) -> Any:
    if isinstance(value, bytes):
        return {"content": xxhash.xxh3_128_hexdigest(value)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.dtype):
        return str(value.descr)
    if isinstance(value, np.ndarray):
        data = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).data)
        return {"content": data, "dtype": str(value.dtype.descr), "shape": list(value.shape)}
    raise TypeError(f"{type(value).__name__} {value!r}: cannot be part of a digest")


def deciding(values: Mapping[str, object], markers: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
    """Return the values that affect outputs, given their markers, as plain data by recipe key or name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = name
        for marker in markers.get(name, ()):
            if isinstance(marker, DecidesNoByte):
                break
            key = marker.key if isinstance(marker, RecipeKey) else key
        else:
            named = {key: plain(value)} if key else plain(value)
            assert not found.keys() & named.keys(), f"{key}: two values have one name"
            found |= named
    return found


@cache
def markers_of(of: Callable[..., Any] | type) -> Mapping[str, tuple[object, ...]]:
    """Return the markers in the annotations of a function's parameters, or of a dataclass's fields."""
    hints = get_type_hints(of, include_extras=True)
    return {
        name: found for name, hint in hints.items() if (found := _ours(getattr(hint, "__metadata__", ())))
    }


@cache
def _model_markers(model: type[BaseModel]) -> Mapping[str, tuple[object, ...]]:
    found = {name: _ours(info.metadata) for name, info in model.model_fields.items()}
    return {name: markers for name, markers in found.items() if markers}


def _ours(metadata: Sequence[object]) -> tuple[object, ...]:
    return tuple(one for one in metadata if isinstance(one, DecidesNoByte | RecipeKey))
