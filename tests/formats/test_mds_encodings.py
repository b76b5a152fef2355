"""Every encoding gives the bytes of MosaicML and takes no others; what does not fit or lies is refused."""

from __future__ import annotations

import pickle
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.formats.mds.encodings import encode_value, encoding_of, parse_array_layout
from support import peers
from support.mds_values import EXAMPLES, LOSSY, VALUES

every_encoding = pytest.mark.parametrize("name", VALUES)


def check_value(name: str, value: Any) -> None:
    """Its bytes and size are MosaicML's, and it comes back with type and value."""
    peers.import_streaming()
    from streaming.base.format.mds import encodings as theirs

    encoding = encoding_of(name)
    data = encoding.encode(value)
    assert data == theirs.mds_encode(name, value)
    assert encoding.size == theirs.get_mds_encoded_size(name)
    assert encoding.size in (None, len(data))
    if name in LOSSY:
        return
    back = encoding.decode(memoryview(data))
    assert peers.comparable(back) == peers.comparable(value)
    if isinstance(back, np.ndarray):
        assert back.flags.writeable
        assert back.flags.aligned


@every_encoding
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_value_has_the_bytes_of_mosaicml_and_comes_back(name: str, data: st.DataObject) -> None:
    check_value(name, data.draw(VALUES[name]))


@every_encoding
def test_the_smallest_and_the_largest_values_do_too(name: str) -> None:
    for value in EXAMPLES[name]:
        check_value(name, value)


@settings(max_examples=80, deadline=None)
@given(array=VALUES["ndarray"])
def test_arrays_come_back_from_all_three_layouts(array: npt.NDArray[Any]) -> None:
    shape = ",".join(map(str, array.shape))
    for name in ("ndarray", f"ndarray:{array.dtype.name}", f"ndarray:{array.dtype.name}:{shape}"):
        check_value(name, array)


def test_every_encoding_that_mosaicml_has_is_known() -> None:
    peers.import_streaming()
    from streaming.base.format.mds import encodings as theirs

    assert all(encoding_of(name).name.startswith(name[:4]) for name in theirs.get_mds_encodings())
    assert [n for n in theirs.get_mds_encodings() if not encoding_of(n).safe] == ["pkl"]


@pytest.mark.parametrize(
    "name", ["", "string", "uint128", "str:5", "int:", "list[str]", "list[jpeg]:2", "PIL", "ndarray "]
)
def test_unknown_encodings_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="known: bytes"):
        encoding_of(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("uint8", 256),
        ("uint8", -1),
        ("uint8", 1.5),
        ("int8", np.int64(200)),
        ("int", 2**63),
        ("int", "7"),
        ("int64", 2.0),
        ("float32", "1"),
        ("float64", None),
        ("float64", 10**400),
        ("str", b"bytes".decode),
        ("str", "\ud800"),
        ("str", 5),
        ("bytes", "text"),
        ("str_int", 1.0),
        ("str_float", 1),
        ("str_decimal", 1.0),
        ("json", {1, 2}),
        ("json", object()),
        ("ndarray", [1, 2]),
        ("ndarray:uint16:2", np.zeros(2, np.int16)),
        ("ndarray:uint16:2", np.zeros(3, np.uint16)),
    ],
)
def test_values_that_do_not_fit_their_column_are_refused(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode_value(encoding_of(name), value)


def test_a_value_that_is_not_json_is_answered_with_those_that_are() -> None:
    with pytest.raises(TypeError, match=r"^json takes dict, list, .* None: Object of type object is not"):
        encode_value(encoding_of("json"), {"a": object()})


def test_json_too_deep_to_encode_or_decode_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="deep"):
        encoding_of("json").encode(deep)
    with pytest.raises(ValueError, match="deep"):
        encoding_of("json").decode(memoryview(b"[" * 100_000))
    while deep:  # unwind: the interpreter frees nested lists recursively
        deep = deep[0]


@pytest.mark.parametrize(
    "name", ["str", "str_int", "str_float", "str_decimal", "json", "uint16", "int", "float32", "pkl"]
)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=24))
def test_any_bytes_decode_to_the_right_type_or_a_value_error(name: str, data: bytes) -> None:
    if name == "pkl" and any(opcode in data for opcode in (b"c", b"i", b"\x93", b"R")):
        return  # could import and call anything
    types = {
        "str": str,
        "str_int": int,
        "str_float": float,
        "str_decimal": Decimal,
        "uint16": np.uint16,
        "int": int,
    }
    try:
        value = encoding_of(name).decode(memoryview(data))
    except ValueError:
        return
    assert isinstance(value, types.get(name, object))


def test_bytes_count_as_encoded_already_and_are_checked() -> None:
    assert encode_value(encoding_of("json"), b'{"a": 1}') == b'{"a": 1}'
    assert encode_value(encoding_of("pkl"), pickle.dumps(5)) == pickle.dumps(5)
    for name, data in [("json", b"{"), ("uint16", b"abc"), ("str", b"\xff"), ("ndarray:uint16:2", b"abc")]:
        with pytest.raises(ValueError):
            encode_value(encoding_of(name), data)


@pytest.mark.parametrize("length", [255, 256, 65_535, 65_536])
def test_dimensions_take_the_smallest_word_that_holds_them(length: int) -> None:
    layout = parse_array_layout("uint8")
    data = layout.encode(np.zeros(length, np.uint8))
    assert len(data) - length == 1 + (1 if length < 256 else 2 if length < 65_536 else 4)
    assert layout.decode(memoryview(data)).shape == (length,)


def test_order_and_byte_order_of_the_memory_do_not_matter() -> None:
    array = np.arange(12, dtype=np.uint16).reshape(3, 4)
    layout = parse_array_layout("")
    assert (
        layout.encode(np.asfortranarray(array)) == layout.encode(array.astype(">u2")) == layout.encode(array)
    )


@pytest.mark.parametrize(
    ("details", "data"),
    [
        ("", b""),
        ("", b"\x07\x04\x01\x00"),  # no such dtype
        ("", b"\x08"),  # no shape
        ("", bytes([8, 63 << 2 | 3])),  # 63 axes of u64, none there
        ("", bytes([8, 63 << 2]) + b"\1" * 64),  # more axes than NumPy has
        ("", bytes([8, 2 << 2 | 3]) + struct.pack("<QQ", 2**63, 2)),  # overflows 64 bits to 0
        ("", bytes([66, 1 << 2 | 3]) + struct.pack("<Q", 2**61) + bytes(8)),
        ("", bytes([8, 2 << 2 | 2]) + struct.pack("<II", 2**31, 2**31)),
        ("", bytes([16, 1 << 2, 3]) + bytes(5)),  # a byte short
        ("", bytes([16, 1 << 2, 3]) + bytes(7)),  # a byte over
        ("uint16", b""),
        ("uint16", bytes([1 << 2, 0]) + b"x"),
        ("uint16:4", bytes(7)),
        ("uint16:4", bytes(9)),
    ],
)
def test_headers_that_lie_are_refused(details: str, data: bytes) -> None:
    with pytest.raises(ValueError):
        parse_array_layout(details).decode(memoryview(data))


@settings(max_examples=300, deadline=None)
@given(details=st.sampled_from(["", "uint8", "float64", "int16:2,2"]), data=st.binary(max_size=40))
def test_any_bytes_give_an_array_of_exactly_them_or_a_value_error(details: str, data: bytes) -> None:
    try:
        array = parse_array_layout(details).decode(memoryview(data))
    except ValueError:
        return
    assert array.nbytes <= len(data)
    assert data.endswith(array.tobytes())


@pytest.mark.parametrize(
    "array",
    [np.zeros(0, np.uint8), np.zeros((), np.uint8), np.zeros(3, bool), np.zeros(3, complex), np.array(["a"])],
)
def test_arrays_the_format_cannot_hold_are_refused(array: npt.NDArray[Any]) -> None:
    with pytest.raises(ValueError):
        parse_array_layout("").encode(array)


@pytest.mark.parametrize(
    "details",
    [
        ":3",
        "uint16:",
        "uint16:0",
        "uint16:-1",
        "uint16:3,,4",
        "uint16: 3",
        "uint16:3:4",
        "bool",
        "uint16:²",
        "u2",
        "uint16:99999999999",
        "uint8:65536,65536",
        "uint8:" + ",".join(["1"] * 33),
    ],
)
def test_layouts_without_sense_are_refused(details: str) -> None:
    with pytest.raises(ValueError, match="ndarray:"):
        parse_array_layout(details)
