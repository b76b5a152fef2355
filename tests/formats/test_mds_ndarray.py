from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shardkit.formats.mds.encodings import ARRAY_DTYPES, parse_array_layout
from support import peers

ARRAYS = st.sampled_from(sorted(ARRAY_DTYPES.values())).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(max_dims=5, max_side=6))
)


@settings(max_examples=80, deadline=None)
@given(array=ARRAYS)
def test_arrays_come_back_from_all_three_layouts(array: npt.NDArray[Any]) -> None:
    shape = ",".join(map(str, array.shape))
    for details in ("", array.dtype.name, f"{array.dtype.name}:{shape}"):
        layout = parse_array_layout(details)
        back = layout.decode(memoryview(layout.encode(array)))
        assert peers.comparable(back) == peers.comparable(array)
        assert back.flags.writeable
        assert back.flags.aligned


@settings(max_examples=80, deadline=None)
@given(array=ARRAYS)
def test_headers_are_those_of_mosaicml(array: npt.NDArray[Any]) -> None:
    peers.import_streaming()
    from streaming.base.format.mds.encodings import mds_encode

    shape = ",".join(map(str, array.shape))
    for details in ("", f":{array.dtype.name}", f":{array.dtype.name}:{shape}"):
        assert parse_array_layout(details[1:]).encode(array) == mds_encode(f"ndarray{details}", array)


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
