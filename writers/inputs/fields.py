"""Fields of records by name or by dotted path: "text", or "meta.url" for field "url" inside an object "meta".

A field whose own name has the dots in it comes first. A field that the recipe names and that no record of a
file has is an error, because a misspelt name would leave a column of nulls. A table shows it at its first
row; of other files each split reports what it saw, and `check_named_fields` merges that.

A field that is carried along (id, url, metadata) never costs the text beside it: `field_text` takes whatever
a reader found there. Binary values are hexadecimal digits unless they are readable text, UUIDs have their
canonical form, and what neither text nor JSON can hold is null: NaN and infinities, halves of surrogate
pairs, and values inside more than `MAX_DEPTH` others.
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
from shardkit.writers.recipe.recipe import InputConfig

MISSING: Any = object()
MAX_DEPTH = 400  # of values inside each other; Python's own limit is 1,000 calls
_MAX_SEEN = 1000  # names of fields that a split reports
_SHOWN = 40
_WARNED = 5  # files


def field_at(fields: Mapping[str, Any], path: str) -> Any:
    """The value at `path`, or MISSING."""
    value = fields.get(path, MISSING)
    if value is not MISSING or "." not in path:
        return value
    value = fields
    for name in path.split("."):
        value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
    return value


def type_at(schema: pa.Schema, path: str) -> pa.DataType | None:
    """The type of the column or struct field at `path`; None unless there is exactly one."""
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
    """The values at `path`, which `type_at` knows; null where a struct above is null."""
    if batch.schema.get_field_index(path) >= 0:
        return batch.column(path)
    first, *rest = path.split(".")
    return pc.struct_field(batch.column(first), rest)


def field_text(value: object) -> str | None:
    """Return a field as text: strings as they are, everything else as JSON; None for null and no text."""
    if not isinstance(value, str | int | float | dict | list | tuple):
        value = None if value is MISSING or value is None else _plain(value)
    if isinstance(value, str):
        return value if _is_unicode(value) else None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS).decode()
    except orjson.JSONEncodeError:  # an integer of more than 64 bits, half a surrogate pair, or many levels
        return json.dumps(_sound(value), ensure_ascii=False, separators=(",", ":"))


def _plain(value: object) -> object:
    """Return what stands for a value that JSON does not know."""
    match value:
        case bytes() | bytearray() | memoryview():
            return _binary_text(bytes(value))
        case np.ndarray():
            return value.tolist()
        case np.generic():
            return value.item()
        case datetime() | date() | time():
            return value.isoformat()
    return str(value)


def _binary_text(value: bytes) -> str:
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


def _sound(value: object, depth: int = MAX_DEPTH) -> object:
    """Return the value with null for all in it that JSON cannot hold."""
    if isinstance(value, str):
        return value if _is_unicode(value) else None
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
            fields[key.encode("utf-8", "replace").decode()] = _sound(inner, depth - 1)
        return fields
    if isinstance(value, list | tuple):
        items: list[object] = []
        for inner in value:  # no comprehension: its calls would count against Python's limit
            items.append(_sound(inner, depth - 1))
        return items
    return _sound(_plain(value), depth - 1)


class NamedFields:
    """Which of the fields that the recipe names for an input no record of a split has had so far.

    `missing` has their paths by key of the recipe (`url`, `metadata[0]`), `seen` the names of the fields that
    the records had while any was missing. A sample of the input may lack a rare field, so it names none.
    `notes` are warnings of the reader about the file (`RecordSink.note`).
    """

    def __init__(self, config: InputConfig) -> None:
        named = {"id": config.id, "url": config.url}
        named |= {f"metadata[{number}]": path for number, path in enumerate(config.metadata)}
        self.missing = {key: path for key, path in named.items() if path and not config.is_sample}
        self.seen: set[str] = set()
        self.records = 0
        self.notes: list[str] = []

    def look(self, fields: Mapping[str, object]) -> None:
        """Look at a record."""
        self.records += 1
        if self.missing:
            self.seen.update(fields)
            self.missing = {k: path for k, path in self.missing.items() if field_at(fields, path) is MISSING}

    def check_columns(self, split: Split, columns: Collection[str]) -> None:
        """RecipeError if a table with these columns lacks any, after a `look` at its first record."""
        if self.missing:
            raise _missing(split, self.missing, columns)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a commit."""
        seen = sorted(self.seen)[:_MAX_SEEN] if self.missing else []
        return {"records": self.records, "missing": self.missing, "seen": seen, "notes": self.notes}


def check_named_fields(splits: Sequence[Split], found: Iterable[Mapping[str, Any]]) -> None:
    """RecipeError if a file has records and none has a field that the recipe names.

    `found` is what `NamedFields.to_dict` gave for each split.
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
    """Issue the warnings about files, those of the first few one by one; `found` as above."""
    noted = [(split.file, note) for split, part in zip(splits, found, strict=True) for note in part["notes"]]
    for file, note in noted[:_WARNED]:
        warn_user(f"{file}: {note}")
    if len(noted) > _WARNED:
        warn_user(f"{len(noted) - _WARNED:,} more warnings like these, about files up to {noted[-1][0]}")


def _missing(split: Split, missing: Mapping[str, str], seen: Collection[str]) -> RecipeError:
    key, path = next(iter(missing.items()))
    names = ", ".join(sorted(seen)[:_SHOWN]).encode("utf-8", "backslashreplace").decode() or "none"
    return RecipeError(
        f"inputs[{split.source}].{key}: no record of {split.file} has a field {path!r}; its fields: {names}; "
        "correct the name, or make files without the field an input of their own"
    )
