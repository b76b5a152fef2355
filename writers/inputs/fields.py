"""Finds fields of records by name or dotted path: "text", or "meta.url" for field "url" in an object "meta".

A field whose own name contains the dots takes precedence. It is an error if the recipe names a field that no
record of a file has, because a misspelled name would leave a column of nulls. In a table this is detected at
the first row; for other files each split reports the fields it saw, and `check_named_fields` merges the
reports.

The *carried fields* of a document (id, url, metadata) are never a reason to reject its text: `field_text`
accepts any value. Binary values become hexadecimal digits unless they are readable text, and UUIDs become
their canonical form. Values that neither text nor JSON can represent become null: NaN and infinities, halves
of surrogate pairs, and values nested more than `MAX_DEPTH` deep.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.errors import RecipeError, warn_user
from shardkit.writers.inputs.scan import Split
from shardkit.writers.recipe.inputs import InputConfig

MISSING: Any = object()
MAX_DEPTH = 400  # maximum nesting of values; Python allows 1,000 nested calls
_MAX_SEEN = 1000  # maximum number of field names that a split reports
_SHOWN = 40  # maximum number of field names in an error message
_WARNED = 5  # maximum number of warnings about files; the others are only counted


def field_at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value of the field at `path`, a name or dotted path; MISSING if the record lacks it."""
    value = fields.get(path, MISSING)
    if value is not MISSING or "." not in path:
        return value
    value = fields
    for name in path.split("."):
        value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
    return value


def type_at(schema: pa.Schema, path: str) -> pa.DataType | None:
    """Return the type of the column or struct field at `path`; None unless exactly one matches."""
    if schema.get_field_index(path) >= 0:
        return schema.field(path).type
    first, *rest = path.split(".")
    if not rest or schema.get_field_index(first) < 0:
        return None
    kind = schema.field(first).type
    for name in rest:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def column_at(batch: pa.RecordBatch, path: str) -> pa.Array:
    """Return the values at `path`, null where an enclosing struct is null; `type_at` must find the path."""
    if batch.schema.get_field_index(path) >= 0:
        return batch.column(path)
    first, *rest = path.split(".")
    return pc.struct_field(batch.column(first), rest)


def field_text(value: object) -> str | None:
    """Return a value as text, or as JSON if not a string; None for null, MISSING and invalid values."""
    if value is None or value is MISSING:
        return None
    if not isinstance(value, (str, int, float, dict, list, tuple)):
        value = _plain(value)
    if isinstance(value, str):
        return value if _is_unicode(value) else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()
    except orjson.JSONEncodeError:  # an integer of over 64 bits, half a surrogate pair, or deep nesting
        return json.dumps(_sound(value), ensure_ascii=False, separators=(",", ":"))


def json_of(fields: Mapping[str, object]) -> bytes:
    """Return fields as one JSON object in UTF-8, for a reader that treats values as `field_text` does.

    Halves of surrogate pairs stay as escapes, so that the reader finds them. Missing values of pandas are
    null.
    """
    try:
        return orjson.dumps(fields, default=_plain_or_null, option=orjson.OPT_NON_STR_KEYS)
    except orjson.JSONEncodeError:  # as in `field_text`
        return json.dumps(_sound(fields, halves=True), separators=(",", ":")).encode()


def _plain_or_null(value: object) -> object:
    return None if is_null(value) else _plain(value)


def is_null(value: object) -> bool:
    """Return whether a value is None, or NA or NaT of pandas."""
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _plain(value: object) -> object:
    """Convert a value that JSON does not support, such as bytes or a date, to one that it supports."""
    match value:
        case bytes() | bytearray() | memoryview():
            return binary_text(bytes(value))
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case datetime() | date() | time():
            return value.isoformat()
    return str(value)


def binary_text(value: bytes) -> str:
    """Return binary data as text if it is readable UTF-8, else as hexadecimal digits."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex()
    return text if text.isprintable() or all(c.isprintable() or c in "\t\r\n" for c in text) else value.hex()


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return False
    return True


def _sound(value: object, depth: int = MAX_DEPTH, *, halves: bool = False) -> object:
    """Return the value with null in place of everything that JSON cannot represent.

    With `halves`, text with halves of surrogate pairs stays, because JSON can represent them as escapes.
    """
    if isinstance(value, str):
        return value if halves or _is_unicode(value) else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    if not depth:
        return None
    if isinstance(value, Mapping):
        fields: dict[str, object] = {}
        for name, inner in value.items():
            key = name if isinstance(name, str) else str(_plain(name))
            fields[key.encode("utf-8", "replace").decode()] = _sound(inner, depth - 1, halves=halves)
        return fields
    if isinstance(value, list | tuple):
        items: list[object] = []
        for inner in value:  # not a comprehension, whose calls would count against Python's recursion limit
            items.append(_sound(inner, depth - 1, halves=halves))
        return items
    return _sound(_plain_or_null(value) if halves else _plain(value), depth - 1, halves=halves)


class NamedFields:
    """Tracks which fields named in the recipe have not occurred in any record of a split so far.

    `missing` maps keys of the recipe (`url`, `metadata[0]`) to the paths of these fields; `seen` has the
    names of the fields that occurred while any was missing. For a sample of an input, which may lack a rare
    field, `missing` is empty. `notes` are the reader's warnings about the file (`RecordSink.note`).
    """

    def __init__(self, config: InputConfig) -> None:
        named = {"id": config.id, "url": config.url}
        named |= {f"metadata[{number}]": path for number, path in enumerate(config.metadata)}
        self.missing = {key: path for key, path in named.items() if path and not config.is_sample}
        self.seen: set[str] = set()
        self.records = 0
        self.notes: list[str] = []

    def look(self, fields: Mapping[str, object]) -> None:
        """Count a record, and remove its fields from `missing`."""
        self.records += 1
        if self.missing:
            self.seen.update(fields)
            self.missing = {k: path for k, path in self.missing.items() if field_at(fields, path) is MISSING}

    def check_columns(self, split: Split, columns: Collection[str]) -> None:
        """Raise RecipeError if a field is still missing. For tables, call it after the first `look`."""
        if self.missing:
            raise _missing(split, self.missing, columns)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that a task can commit."""
        seen = sorted(self.seen)[:_MAX_SEEN] if self.missing else []
        return {"records": self.records, "missing": self.missing, "seen": seen, "notes": self.notes}


def check_named_fields(splits: Sequence[Split], found: Iterable[Mapping[str, Any]]) -> None:
    """Raise RecipeError if a file has records, but a field named in the recipe occurs in none of them.

    `found` has the result of `NamedFields.to_dict` for each split.
    """
    files: dict[str, tuple[Split, dict[str, str], set[str]]] = {}
    for split, part in zip(splits, found, strict=True):
        if part["records"]:
            _, missing, seen = files.setdefault(split.file, (split, part["missing"], set()))
            seen.update(part["seen"])
            missing = {key: path for key, path in missing.items() if key in part["missing"]}
            files[split.file] = split, missing, seen
    for split, missing, seen in files.values():
        if missing:
            raise _missing(split, missing, seen)


def warn_of_notes(splits: Sequence[Split], found: Iterable[Mapping[str, Any]]) -> None:
    """Issue the readers' warnings in `found`: the first few in full, then only the number of the others."""
    noted = [(split.file, note) for split, part in zip(splits, found, strict=True) for note in part["notes"]]
    for file, note in noted[:_WARNED]:
        warn_user(f"{file}: {note}")
    if len(noted) > _WARNED:
        warn_user(f"{len(noted) - _WARNED:,} more warnings of this kind, the last about {noted[-1][0]}")


def _missing(split: Split, missing: Mapping[str, str], seen: Collection[str]) -> RecipeError:
    key, path = next(iter(missing.items()))
    names = ", ".join(sorted(seen)[:_SHOWN]).encode("utf-8", "backslashreplace").decode() or "none"
    return RecipeError(
        f"inputs[{split.source}].{key}: no record of {split.file} has a field {path!r}; its fields: {names}; "
        "correct the name, or move files without the field to an input of their own"
    )
