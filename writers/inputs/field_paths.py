"""Fields by name or by dotted path: "text", or "meta.url" for a field inside an object or a struct column.

A field whose own name has the dots in it comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["MISSING", "column_at", "field_at", "type_at"]

MISSING: Any = object()


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
