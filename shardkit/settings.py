"""Base classes and types of all recipe sections: a strict model, shared types, and shorthands.

A shorthand is another way to write a value. It is replaced by the long form before the value is checked, so
both forms make equal recipes with equal digests. The JSON Schema for editors accepts both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema

from shardkit.files import is_remote, local_path
from shardkit.units import parse_bytes

T = TypeVar("T")

ANNOTATIONS_FOLDER = "annotations"  # subfolder of a dataset that holds every rule's value for every document
TRAIN = "train"  # the part of a split that holds all documents that no other part took
WHITE_SPACE = "whitespace"  # value of the setting `words`: filters split text by `str.split()` (default)
FieldName = Annotated[str, Field(min_length=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class StrictModel(BaseModel):
    """A frozen section of a recipe: unknown keys are errors and values are never converted.

    `not_content` lists keys that do not affect the dataset's bytes; `omitted_at_default` lists keys added
    after version 1, which are left out at their defaults so that older recipes keep their digests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)

    not_content: ClassVar[frozenset[str]] = frozenset()
    omitted_at_default: ClassVar[frozenset[str]] = frozenset()

    def content(self) -> dict[str, Any]:
        """Return all values that affect the dataset's bytes, as plain data in the order of the keys."""
        found: dict[str, Any] = self.model_dump(mode="json", exclude=set(self.not_content))
        for key, info in type(self).model_fields.items():
            value = getattr(self, key)
            if key in self.omitted_at_default and value == info.get_default(call_default_factory=False):
                found.pop(key)
            elif key in found and isinstance(value, StrictModel):
                found[key] = value.content()
            elif key in found and isinstance(value, tuple):
                found[key] = [
                    one.content() if isinstance(one, StrictModel) else plain
                    for one, plain in zip(value, found[key], strict=True)
                ]
        return found


class Bounds(StrictModel):
    """The least and the greatest number that passes, both inclusive."""

    min: float | None = Field(default=None, description="Least number that passes; null: no bound.")
    max: float | None = Field(default=None, description="Greatest number that passes; null: no bound.")

    @model_validator(mode="after")
    def _some_value_passes(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is more than max {self.max:g}: no document can pass both")
        return self

    @property
    def only(self) -> float | None:
        """The bound, if there is exactly one."""
        given = [one for one in (self.min, self.max) if one is not None]
        return given[0] if len(given) == 1 else None

    def fails(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_] | None:
        """Return bool[n], True for values out of bounds (never for NaN), or None if there are no bounds."""
        if self.min is None and self.max is None:
            return None
        low = values < self.min if self.min is not None else np.zeros(len(values), np.bool_)
        return low | (values > self.max) if self.max is not None else low


class _OneOrMany:
    """Annotation for a list type that accepts a single item without brackets as a list of one item."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        def listed(value: object) -> object:
            return value if value is None or isinstance(value, list | tuple) else [value]

        items: Any = handler(source)
        return core_schema.no_info_before_validator_function(listed, items | {"strict": False})

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        many = handler(schema)
        return {"anyOf": [many["items"], many]}


Listed = Annotated[tuple[T, ...], _OneOrMany()]
"""A tuple setting; a single item may be written without brackets."""


def _size(value: object) -> int:
    if not isinstance(value, int | str):
        raise ValueError(f"not a size: {value!r:.80}; give bytes, or text such as 64MiB")
    return parse_bytes(value)


_SIZE_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTPkmgtp]?[iI]?[bB])?\s*$"},
    ]
}

Size = Annotated[int, BeforeValidator(_size), WithJsonSchema(_SIZE_SCHEMA)]
"""A number of bytes; text such as 64MiB is converted."""


@dataclass(frozen=True, slots=True)
class Shorthand:
    """Other ways to write a section, in an `Annotated` type.

    `switch`: true means the section with its defaults, false means null. `number` and `text` name the key to
    which a bare number or text is assigned; `text` may also be a function that makes the section from the
    text.
    """

    switch: bool = False
    number: str | None = None
    text: str | Callable[[str], Mapping[str, object]] | None = None

    def _long_form(self, value: object) -> object:
        match value:
            case bool() if self.switch:
                return {} if value else None
            case int() | float() if self.number is not None and not isinstance(value, bool):
                return {self.number: float(value)}
            case str() if self.text is not None:
                return {self.text: value} if isinstance(self.text, str) else self.text(value)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_before_validator_function(self._long_form, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        forms = {"boolean": self.switch, "number": self.number, "string": self.text}
        return {"anyOf": [{"type": [kind for kind, form in forms.items() if form]}, handler(schema)]}


def _local(path: str) -> str:
    """Return a local path as written; expand it only if it begins with "~" or is a file:// URL."""
    found = local_path(path)
    return str(found) if path[0] == "~" or path[:5].lower() == "file:" else path


def _url_or_path(path: str) -> str:
    if not is_remote(path):
        return _local(path)
    scheme, _, rest = path.partition("://")
    if not scheme.isalnum() or not rest.strip("/") or "\0" in path:
        raise ValueError(f"{path!r} is not a valid URL; write it like s3://bucket/prefix")
    return path


def _place(path: str) -> str:
    """Return a local path, or a URL without trailing slashes."""
    path = _url_or_path(path)
    return path.rstrip("/") if is_url(path) else path


def is_url(path: str) -> bool:
    """Return whether a checked path is a URL; `_url_or_path` has changed file:// URLs to local paths."""
    return "://" in path


LocalPath = Annotated[str, AfterValidator(_local)]
Place = Annotated[str, AfterValidator(_place)]
Source = Annotated[str, AfterValidator(_url_or_path)]
