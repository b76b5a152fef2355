"""Read the few tables of Arrow's IPC metadata that say where the values of each column are.

Arrow describes schemas, record batches and footers as flatbuffers. pyarrow reads them, but does not tell the
places of buffers, and only together with the values. All positions are checked: IndexError means damage.

    table     i32 backward offset of its vtable, then fields
    vtable    u16 its size, u16 size of the table, u16 place of each field in the table (0: absent)
    vector    u32 count, items
"""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Table:
    """A table at the byte `at` of a flatbuffer."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> Table:
        """Return the root table of a flatbuffer."""
        return cls(data, _number("<I", data, 0))

    def number(self, field: int, format: str, default: int = 0) -> int:
        """Return a number, which `struct` unpacks with `format`."""
        place = self._place(field)
        return default if place is None else _number(format, self.data, place)

    def table(self, field: int) -> Table | None:
        """Return a table, or None if it is absent."""
        place = self._place(field)
        return None if place is None else Table(self.data, place + _number("<I", self.data, place))

    def structs(self, field: int, format: str) -> list[tuple[int, ...]]:
        """Return the items of a vector of structs, which `struct` unpacks with `format`."""
        place = self._place(field)
        if place is None:
            return []
        place += _number("<I", self.data, place)
        size = _number("<I", self.data, place) * struct.calcsize(format)
        if size > len(self.data) - place - 4:
            raise IndexError(f"a vector of {size:,} bytes ends after its metadata")
        return list(struct.iter_unpack(format, self.data[place + 4 : place + 4 + size]))

    def _place(self, field: int) -> int | None:
        vtable = self.at - _number("<i", self.data, self.at)
        if 4 + 2 * field >= _number("<H", self.data, vtable):
            return None
        offset = _number("<H", self.data, vtable + 4 + 2 * field)
        return self.at + offset if offset else None


def _number(format: str, data: bytes, at: int) -> int:
    if at < 0 or at + struct.calcsize(format) > len(data):
        raise IndexError(f"its metadata refer to byte {at:,} of {len(data):,}")
    found: int = struct.unpack_from(format, data, at)[0]
    return found
