from __future__ import annotations

import json
import pickle
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.formats.mds.encodings import encode_value, encoding_of
from support import peers

VALUES: list[tuple[str, Any]] = [
    ("bytes", b""),
    ("bytes", b"\0\xff"),
    ("str", ""),
    ("str", "naïve \u2028 \U0001f600"),
    ("int", -(2**63)),
    ("int", 7),
    ("uint8", np.uint8(255)),
    ("uint16", np.uint16(65_535)),
    ("uint32", np.uint32(2**32 - 1)),
    ("uint64", np.uint64(2**64 - 1)),
    ("int8", np.int8(-128)),
    ("int16", np.int16(-2)),
    ("int32", np.int32(-(2**31))),
    ("int64", np.int64(2**63 - 1)),
    ("float16", np.float16(1.5)),
    ("float32", np.float32(-0.1)),
    ("float64", np.float64("inf")),
    ("str_int", 10**80),
    ("str_float", 1e-300),
    ("str_decimal", Decimal("-12345678901234567890.0100")),
    ("json", {"a": [1, None, "é", 1.5], "b": {}}),
    ("pkl", {"a": {1, 2}}),
    ("ndarray", np.arange(6, dtype=np.float16).reshape(2, 3)),
    ("ndarray:int32", np.arange(300, dtype=np.int32)),
    ("ndarray:uint16:3,4", np.arange(12, dtype=np.uint16).reshape(3, 4)),
]


@pytest.mark.parametrize(("name", "value"), VALUES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(VALUES)])
def test_values_come_back_with_type_and_value(name: str, value: Any) -> None:
    encoding = encoding_of(name)
    data = encoding.encode(value)
    assert encoding.size in (None, len(data))
    assert peers.comparable(encoding.decode(memoryview(data))) == peers.comparable(value)


@pytest.mark.parametrize(("name", "value"), VALUES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(VALUES)])
def test_bytes_and_sizes_are_those_of_mosaicml(name: str, value: Any) -> None:
    peers.import_streaming()
    from streaming.base.format.mds import encodings as theirs

    ours = encoding_of(name)
    assert ours.encode(value) == theirs.mds_encode(name, value)
    assert ours.size == theirs.get_mds_encoded_size(name)


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


@settings(max_examples=100, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=8
    )
)
def test_json_round_trips(value: Any) -> None:
    encoding = encoding_of("json")
    assert encoding.decode(memoryview(encoding.encode(value))) == json.loads(json.dumps(value))
