"""Packed rows: each comes back as it was, in no more bytes than its numbers need, and damage is an error."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.writers.exchange.packing import pack, unpack

KINDS: list[tuple[Any, ...]] = [
    ("<u8",),
    ("<i8",),
    ("<u4",),
    ("<i4",),
    ("<f4",),
    ("<u2",),
    ("u1",),
    ("u1", (16,)),
    ("u1", (3,)),
    ("<f2", (12,)),
    ("<f2", (3,)),
    ("<u8", (3,)),
]


@st.composite
def tables(draw: st.DrawFn) -> npt.NDArray[np.void]:
    """Rows of any dtype of the exchange; keys ascend, or wrap around as those of a damaged run."""
    others = draw(st.lists(st.sampled_from(KINDS), max_size=4))
    fields = [("key", "<u8"), *((f"f{number}", *kind) for number, kind in enumerate(others))]
    fields = draw(st.permutations(fields))
    rows = np.zeros(draw(st.integers(1, 40)), np.dtype(fields))
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    for name, _ in (rows.dtype.fields or {}).items():
        field = rows[name]
        data = random.integers(0, 256, field.nbytes, np.uint8).view(field.dtype).reshape(field.shape)
        bits = 8 * field.dtype.itemsize - draw(st.integers(0, 8 * field.dtype.itemsize))
        if field.dtype.kind == "u":
            mask = (1 << bits) - 1
            base = draw(st.integers(0, (1 << 8 * field.dtype.itemsize) - 1 - mask))
            data = (data & field.dtype.type(mask)) + field.dtype.type(base)
        rows[name] = data
    if draw(st.booleans()):
        rows["key"].sort()
    return rows


def numbers_of(rows: npt.NDArray[np.void]) -> list[list[int]]:
    """The columns of rows, as plain numbers."""
    columns = []
    for name in rows.dtype.names or ():
        field = rows.dtype[name]
        size = 8 if field.shape and field.itemsize % 8 == 0 else field.base.itemsize
        pieces = [row[name].tobytes() for row in rows]
        for at in range(0, field.itemsize, size):
            column = [int.from_bytes(piece[at : at + size], "little") for piece in pieces]
            if name == "key":
                column = [0, *((b - a) % (1 << 64) for a, b in pairwise(column))]
            columns.append([number - (0 if name == "key" else min(column)) for number in column])
    return columns


@given(rows=tables())
@settings(deadline=None, max_examples=150)
def test_rows_come_back_and_take_what_their_numbers_need(rows: npt.NDArray[np.void]) -> None:
    packed = pack(rows)
    assert unpack(packed, len(rows), rows.dtype).tobytes() == rows.tobytes()
    columns = numbers_of(rows)
    widths = [-(-max(column).bit_length() // 8) for column in columns]
    widths = [
        max(1, width) if name == "key" else width for name, width in zip(_names(rows), widths, strict=True)
    ]
    assert packed[: len(columns)].tolist() == widths
    numbers = b"".join(
        number.to_bytes(width, "little")
        for column, width in zip(columns, widths, strict=True)
        for number in column
    )
    assert packed[9 * len(columns) :].tobytes() == numbers


def _names(rows: npt.NDArray[np.void]) -> list[str]:
    """The name of the field of each column."""
    names = []
    for name in rows.dtype.names or ():
        field = rows.dtype[name]
        size = 8 if field.shape and field.itemsize % 8 == 0 else field.base.itemsize
        names += [name] * (field.itemsize // size)
    return names


PAIR = np.dtype([("key", "<u8"), ("number", "<u8")])


def test_many_rows_of_ascending_keys_take_half_of_their_bytes() -> None:
    rows = np.zeros(16_384, PAIR)
    random = np.random.default_rng(1)
    rows["key"] = np.sort(random.integers(0, 1 << 54, len(rows), np.uint64))
    rows["number"] = random.integers(0, 1 << 24, len(rows))
    assert len(pack(rows)) == 18 + 9 * len(rows)


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda data: data[:-1], 3),
        (lambda data: data, 2),
        (lambda data: data, 4),
        (lambda data: data[:10], 3),
        (lambda data: data[:0], 0),
        (lambda data: np.concatenate([np.array([0, 0], np.uint8), data[2:18]]), 1 << 31),  # rows of no bytes
        (lambda data: np.concatenate([np.array([9], np.uint8), data[1:]]), 3),
        (lambda data: np.concatenate([np.array([255, 255], np.uint8), data[2:]]), 3),
    ],
)
def test_bytes_of_other_rows_are_refused(change: Any, count: int) -> None:
    rows = np.zeros(3, PAIR)
    rows["key"], rows["number"] = [1, 2, 300], [7, 8, 9]
    packed = pack(rows)
    assert unpack(packed, 3, PAIR).tolist() == [(1, 7), (2, 8), (300, 9)]
    with pytest.raises(ValueError, match=f"bytes are not {count:,} packed rows"):
        unpack(change(packed), count, PAIR)


@given(data=st.binary(max_size=200), count=st.integers(0, 20))
@settings(deadline=None, max_examples=200)
def test_any_bytes_give_rows_or_an_error(data: bytes, count: int) -> None:
    try:
        rows = unpack(np.frombuffer(data, np.uint8), count, PAIR)
    except ValueError:
        return
    assert len(rows) == count <= len(data)
