"""Arrays are read as NumPy reads them; headers that lie or that could run code are refused."""

from __future__ import annotations

import io
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.formats.tar.values import decode_npy, make_npy_header, parse_npy_header


def npy(array: object, *, allow_pickle: bool = False) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(array), allow_pickle=allow_pickle)
    return stream.getvalue()


def raw(header: bytes, values: bytes = b"", version: bytes = b"\x01\x00") -> memoryview:
    width = 2 if version[0] == 1 else 4
    return memoryview(b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header + values)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(5, dtype="<u2"),
        np.arange(6, dtype=">i8").reshape(2, 3),
        np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        np.float32(1.5),
        np.zeros((0, 7), dtype=np.int32),
        np.array(["ab", "c"]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([True, False]),
    ],
    ids=str,
)
def test_arrays_come_back_as_saved(array: np.ndarray) -> None:  # type: ignore[type-arg]
    found = decode_npy(memoryview(npy(array)))
    assert found.dtype == np.asarray(array).dtype
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable
    assert found.flags.owndata or found.base is not None


def test_newer_header_versions_are_read() -> None:
    header = b"{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }\n"
    for version in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        assert decode_npy(raw(header, b"\x01\x00\x02\x00", version)).tolist() == [1, 2]


def form(descr: str = "'<u2'", order: str = "False", shape: str = "(2,)") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}".encode()


HOSTILE = {
    "no magic": memoryview(b"not an array"),
    "nothing": memoryview(b""),
    "cut in the header": memoryview(npy(np.arange(5))[:40]),
    "version 9": raw(form(), b"1234", b"\x09\x00"),
    "header length beyond the member": memoryview(b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + form()),
    "header beyond its limit": raw(form().ljust(70_000), b"1234", b"\x02\x00"),
    "objects": memoryview(npy(np.array([{}, 1], dtype=object), allow_pickle=True)),
    "objects in a record": raw(form("[('a', '|O')]"), b"1234"),
    "values missing": raw(form(), b"123"),
    "values too many": raw(form(), b"12345"),
    "absurd shape": raw(form(shape="(99999999999999, 99999999999999)"), b"1234"),
    "shape beyond an index": raw(form(shape=f"({1 << 70},)"), b"1234"),
    "absurd shape of nothing": raw(form(shape=f"(0, {1 << 61}, {1 << 61})")),
    "negative shape": raw(form(shape="(-1,)"), b"1234"),
    "bool in the shape": raw(form(shape="(True,)"), b"12"),
    "shape of floats": raw(form(shape="(2.0,)"), b"1234"),
    "shape of 40 dimensions": raw(form(shape="(" + "1," * 40 + ")"), b"12"),
    "unknown type": raw(form("'<q9'"), b"1234"),
    "type of no bytes": raw(form("'<U0'"), b""),
    "type by code": raw(form("__import__('os')"), b"1234"),
    "huge type": raw(form("'|V99999999999999'"), b"1234"),
    "deep literal": raw(form(shape="(" * 9000 + ")" * 9000), b"1234"),
    "deep unary": raw(form(shape="-" * 9000 + "1"), b"1234"),
    "long sum": raw(form(shape="1" + "+1" * 9000), b"1234"),
    "huge number": raw(form(shape="(" + "9" * 9000 + ",)"), b"1234"),
    "no dictionary": raw(b"[1, 2, 3]", b"1234"),
    "keys missing": raw(b"{'descr': '<u2'}", b"1234"),
    "not hashable": raw(b"{[]: 1}", b"1234"),
    "NUL": raw(b"{'descr': '<u2\0'}", b"1234"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_arrays_are_refused(name: str) -> None:
    with pytest.raises(ValueError):
        decode_npy(HOSTILE[name])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flipped_bytes_give_an_array_or_an_error(data: st.DataObject) -> None:
    payload = bytearray(npy(np.arange(8, dtype=np.uint16).reshape(2, 4)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        assert decode_npy(memoryview(payload)).nbytes < len(payload)


@pytest.mark.parametrize(("dtype", "length"), [("<u2", 1), ("<u4", 131_072), ("<u2", 10**15)])
def test_written_headers_are_constant_and_aligned_and_right(dtype: str, length: int) -> None:
    header = make_npy_header(np.dtype(dtype), length)
    assert len(header) == 128
    parsed = parse_npy_header(memoryview(header))
    assert (parsed.dtype.str, parsed.shape, parsed.bytes) == (dtype, (length,), 128)
    stream = io.BytesIO(header)
    assert np.lib.format.read_magic(stream) == (1, 0)  # type: ignore[no-untyped-call]
    found = np.lib.format.read_array_header_1_0(stream)  # type: ignore[no-untyped-call]
    assert found == ((length,), False, np.dtype(dtype))
