"""Read the minimum and maximum values of Parquet row groups from files that may be damaged or hostile.

pyarrow has these values in `FileMetaData.row_group(n).column(m)`, but does not catch the C++ exceptions that
Parquet throws if column metadata are contradictory (26.0: sizes of levels, numbers of columns, types). They
end the process. No other call in shardkit has this problem: reading 130,000 damaged files did not end a
process. So the footer is parsed here, and no other code uses pyarrow's column metadata. (pyarrow's
`write_metadata_file` can end the process, too.)

A footer is a struct of Thrift's compact protocol; parquet.thrift numbers the fields:

    FileMetaData    2 schema: [SchemaElement]   4 row_groups: [RowGroup]
    SchemaElement   1 type   4 name   5 num_children   6 converted_type   10 logicalType
    RowGroup        1 columns: [ColumnChunk]
    ColumnChunk     3 meta_data: 1 type   3 path_in_schema   12 statistics
    Statistics      5 max_value   6 min_value   7 is_max_value_exact   8 is_min_value_exact
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Mapping
from functools import cached_property
from typing import Any, BinaryIO

Limits = Mapping[str, tuple[Any, Any]]
"""Maps the dotted path of a column of integers, strings or bytes to its (minimum, maximum)."""

_MAGIC = b"PAR1"
_TAIL_BYTES = 1 << 16  # size of the first read, which includes most footers
_MAX_FOOTER_BYTES = 1 << 25  # limit for parsing, which takes up to 100 times this; ours have kilobytes
_MAX_DEPTH = 16  # the structs of a valid footer nest eight deep
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)  # types of 16, 32 and 64 bits, which are encoded equally
_INT32, _INT64, _BYTE_ARRAY, _FIXED = 1, 2, 6, 7  # physical types
_UTF8, _UNSIGNED, _SIGNED = 0, range(11, 15), range(15, 19)  # converted types
_STRING, _INTEGER = 1, 10  # logical types


class Footer:
    """The footer of a Parquet file: pyarrow's `metadata`, and the `limits` of each row group."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the footer of an open file. Raises ValueError, OSError or pyarrow's errors if it has none."""
        import pyarrow.parquet as pq

        data = _footer_bytes(file)
        self.metadata = pq.read_metadata(io.BytesIO(_MAGIC + data + len(data).to_bytes(4, "little") + _MAGIC))
        self._data = data

    @cached_property
    def limits(self) -> tuple[Limits, ...]:
        """One mapping per row group, from each integer, string or bytes column to its known limits."""
        nothing: tuple[Limits, ...] = ({},) * self.metadata.num_row_groups
        if len(self._data) > _MAX_FOOTER_BYTES:
            return nothing
        try:
            footer = CompactThrift(self._data).struct()
            leaves = [element for element in footer[2] if element.get(5) is None]
            groups = tuple(_limits(group[1], leaves) for group in footer[4])
        except (IndexError, KeyError, TypeError, AttributeError, ValueError, struct.error):
            return nothing  # pyarrow could read the file, so it is usable, only without limits
        return groups if len(groups) == len(nothing) else nothing


def _footer_bytes(file: BinaryIO) -> bytes:
    size = file.seek(0, os.SEEK_END)
    start = max(size - _TAIL_BYTES, 0)
    file.seek(start)
    tail = file.read(size - start)
    length = int.from_bytes(tail[-8:-4], "little")
    if tail[-4:] != _MAGIC or length > size - 12:
        raise ValueError("the file does not end like a Parquet file")
    if length + 8 > len(tail):
        file.seek(size - 8 - length)
        tail = file.read(length) + tail[-8:]
    return tail[-8 - length : -8]


def _limits(chunks: list[Any], leaves: list[Any]) -> Limits:
    if len(chunks) != len(leaves):
        return {}
    found: dict[str, tuple[Any, Any]] = {}
    for chunk, leaf in zip(chunks, leaves, strict=True):
        facts = chunk.get(3, {})
        stated = facts.get(12, {})
        if facts.get(1) != leaf.get(1) or stated.get(5) is None or stated.get(6) is None:
            continue
        if stated.get(7) is False or stated.get(8) is False:
            continue  # the recorded limit is only a prefix of the value
        low, high = _value(stated[6], leaf), _value(stated[5], leaf)
        if low is not None and high is not None:
            found[".".join(part.decode() for part in facts[3])] = (low, high)
    return found


def _value(data: bytes, leaf: Mapping[int, Any]) -> Any:
    """Decode the bytes of a statistic; return None if they are invalid or of another type, such as a date."""
    physical, converted, logical = leaf.get(1), leaf.get(6), leaf.get(10, {})
    if physical in (_INT32, _INT64):
        is_plain = (converted is None and not logical) or _INTEGER in logical
        if not (is_plain or converted in _UNSIGNED or converted in _SIGNED):
            return None
        is_unsigned = converted in _UNSIGNED or logical.get(_INTEGER, {}).get(2) is False
        if len(data) != (4 if physical == _INT32 else 8):
            return None
        return int.from_bytes(data, "little", signed=not is_unsigned)
    if physical == _BYTE_ARRAY and (converted == _UTF8 or _STRING in logical):
        try:
            return data.decode()
        except UnicodeDecodeError:
            return None
    return data if physical in (_BYTE_ARRAY, _FIXED) and converted is None and not logical else None


class CompactThrift:
    """Parses Thrift's compact protocol into plain data: structs become {field: value}, strings bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0
        """The offset of the next byte to parse."""

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Parse the struct at the current position. Raises ValueError or IndexError if it is malformed."""
        if depth > _MAX_DEPTH:
            raise ValueError("structs nest too deeply")
        fields: dict[int, Any] = {}
        data, at, number = self._data, self.at, 0
        while head := data[at]:  # with few calls, because a footer may have a million fields
            at += 1
            step, kind = head >> 4, head & 15
            if step:
                number += step
            else:
                self.at = at
                number = self.integer()
                at = self.at
            if kind in (_TRUE, _FALSE):
                fields[number] = kind == _TRUE
            elif kind in _INTEGERS and (byte := data[at]) < 128:
                fields[number] = byte >> 1 ^ -(byte & 1)
                at += 1
            elif kind == _BINARY and (byte := data[at]) < 128 and at + byte < len(data):
                fields[number] = data[at + 1 : at + 1 + byte]
                at += 1 + byte
            else:
                self.at = at
                fields[number] = self.value(kind, depth)
                at = self.at
        self.at = at + 1
        return fields

    def value(self, kind: int, depth: int) -> Any:
        """Parse a value of a type of the protocol. Raises ValueError or IndexError if it is malformed."""
        if kind in _INTEGERS:
            return self.integer()
        if kind in (_TRUE, _FALSE):  # in a list, each boolean takes a byte
            return self.byte() == _TRUE
        if kind == _BYTE:
            return self.byte()
        if kind == _DOUBLE:
            return struct.unpack("<d", self.take(8))[0]
        if kind == _BINARY:
            return self.take(self.varint())
        if kind in (_LIST, _SET):
            head = self.byte()
            count = self.varint() if head >> 4 == 15 else head >> 4
            if count > len(self._data) - self.at:
                raise ValueError("a list is longer than the footer")
            return [
                self.struct(depth + 1) if head & 15 == _STRUCT else self.value(head & 15, depth + 1)
                for _ in range(count)
            ]
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"the footer has a value of the unknown type {kind}")

    def byte(self) -> int:
        """Return the next byte."""
        self.at += 1
        return self._data[self.at - 1]

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        data = self._data[self.at : self.at + count]
        if len(data) < count:
            raise ValueError("the footer ends early")
        self.at += count
        return data

    def varint(self) -> int:
        """Parse an unsigned number."""
        data, at, value = self._data, self.at, 0
        for shift in range(0, 70, 7):
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                self.at = at
                return value
        raise ValueError("a number in the footer has more than 64 bits")

    def integer(self) -> int:
        """Parse a signed number."""
        value = self.varint()
        return value >> 1 ^ -(value & 1)
