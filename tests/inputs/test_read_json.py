"""JSON arrays as inputs: values that are cut out of a stream, and what damage costs."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.writers.inputs.read_json import Values
from support.read_inputs import put, read

_TEXT = st.text(st.sampled_from('ab"\\[]{},:\n\u2028é😀'), max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)
_BLANKS = st.sampled_from(["", " ", "\n", "\r\n\t "])


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    """The data in pieces of 1 to 9 bytes."""
    pieces, at = [], 0
    while at < len(data):
        size = rng.randrange(1, 10) if at else 3
        pieces.append(data[at : at + size])
        at += size
    return pieces


@given(st.lists(_VALUES, max_size=6), st.data(), st.booleans(), st.booleans(), st.integers())
def test_values_of_arrays_are_cut_out_wherever_the_pieces_end(
    values: list[Any], data: st.DataObject, ascii: bool, bare: bool, seed: int
) -> None:
    parts = [
        data.draw(_BLANKS) + json.dumps(value, ensure_ascii=ascii) + data.draw(_BLANKS) for value in values
    ]
    if bare:  # only arrays hold values that are not told apart by brackets
        text = "\n".join(f"[{part}]" for part in parts)
    else:
        text = f"[{','.join(parts)}]"
    stored = text.encode()
    reader = Values(iter(cut(stored, random.Random(seed))), max_value_bytes=1 << 20)
    found = list(reader)
    assert [json.loads(line) for _, _, line, _ in found] == values
    assert [(stored[offset : offset + length], whole) for offset, length, _, whole in found] == [
        (line, True) for _, _, line, _ in found
    ]
    assert reader.problem == ""


@given(
    st.lists(
        st.sampled_from(["[", "]", "{", "}", '"', "\\", "a", "1", ",", " ", "{}", '{"a":1}']), max_size=30
    )
)
def test_any_bytes_are_read_to_their_end_and_pieces_do_not_matter(parts: list[str]) -> None:
    data = "".join(parts).encode()
    results = []
    for seed in range(3):
        pieces = cut(data, random.Random(seed)) if seed else [data] * bool(data)
        reader = Values(iter(pieces), max_value_bytes=8)
        results.append((list(reader), reader.problem, reader.unfinished, reader.offset))
    assert results[0] == results[1] == results[2]
    found, problem, unfinished, _ = results[0]
    at = 0
    for offset, length, _, _ in found:
        assert offset >= at
        assert not data[at:offset].strip(b" ,[]")
        at = offset + length
    rest = data[at:] if not problem else data[at:unfinished]
    assert not rest.strip(b" ,[]")


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_objects_gives_a_document_each(tmp_path: Path, suffix: str, indent: int | None) -> None:
    rows = [{"text": f'text {i} "]}}\\ é\u2028', "id": i, "m": {"n": 1 << 70}} for i in range(2000)]
    data = json.dumps(rows, indent=indent, ensure_ascii=False).encode()
    name = put(tmp_path, f"a.json{suffix}", gzip.compress(data) if suffix else data)
    table, bad, _ = read(tmp_path, name, format="json", metadata="m")
    assert not bad
    assert table["text"].to_pylist() == [row["text"] for row in rows]
    assert table["id"][7].as_py() == "7"
    assert json.loads(table["metadata"][7].as_py()) == {"m": {"n": 1 << 70}}
    printed = "\n".join(json.dumps(row, indent=4) for row in rows).encode()
    again, bad, _ = read(tmp_path, put(tmp_path, "a.json", b"\xef\xbb\xbf" + printed), format="json")
    assert (again["text"].to_pylist(), bad) == (table["text"].to_pylist(), [])


def test_a_value_that_is_no_object_with_text_costs_itself(tmp_path: Path) -> None:
    parts = [
        '{"text": "good"}',
        '{"text": "a", }',
        "12",
        '"text"',
        '{"text": "' + "x" * 5000 + '"}',
        '{"text": 1}',
        '[{"text": "inside another array"}]',
        '{"text": "\\ud800"}',
        '{"text": "fine"}',
    ]
    data = b"[" + ",\n".join(parts).encode() + b', {"text": "bad \xff"}]'
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.json", data), format="json", limit=3000)
    assert table["text"].to_pylist() == ["good", "fine"]
    assert table["record"].to_pylist() == [0, 8]
    reasons = [entry["reason"] for entry in bad]
    assert reasons == [
        *("bad_json", "not_an_object", "not_an_object", "too_long", "no_text", "not_an_object", "bad_json"),
        "bad_utf8",
    ]
    assert [data[entry["byte_offset"] :][:2] for entry in bad[:3]] == [b'{"', b"12", b'"t']
    assert ledger.quarantined["too_long"].bytes == len(parts[4])


@pytest.mark.parametrize("length", range(0, 60, 3))
def test_an_array_that_is_cut_short_gives_the_values_before_and_is_damaged(
    tmp_path: Path, length: int
) -> None:
    data = json.dumps([{"text": str(i)} for i in range(9)]).encode()
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.json", data[:length]), format="json")
    texts = table["text"].to_pylist()
    assert texts == [str(i) for i in range(len(texts))]
    assert len(texts) == (length + 1) // 15
    assert [entry["reason"] for entry in bad] == ["damaged_file"] * bool(length)
    if bad:
        assert "the file ends inside" in bad[0]["error"]
        assert ledger.quarantined["damaged_file"].bytes <= 15


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize(
    "text", ['[{"text": "a"}]', '[\n{"text": "a"}]', '{\n  "text": "a"\n}\n', '{"n": [\n 1],\n "text": "a"}']
)
def test_arrays_and_objects_of_several_lines_are_read_under_the_names_of_json_lines(
    tmp_path: Path, text: str, name: str
) -> None:
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    for split_bytes in (4, 1 << 26):  # large ones are not cut at their newlines
        table, bad, _ = read(tmp_path, put(tmp_path, name, data), allowed=0, split_bytes=split_bytes)
        assert (table["text"].to_pylist(), table["record"].to_pylist(), bad) == (["a"], [0], [])


def test_an_object_whose_first_line_is_long_says_what_to_set(tmp_path: Path) -> None:
    data = b'{"text": "%s",\n "n": 1}' % (b"x" * 5000)
    with pytest.raises(BuildError, match=r"has objects of several lines, set inputs\[0\].format: json"):
        read(tmp_path, put(tmp_path, "a.json", data), allowed=0)


def test_deep_and_long_values_take_no_stack_and_little_memory() -> None:
    deep = b"[" * 100_000
    reader = Values(iter([deep]), max_value_bytes=1000)
    assert list(reader) == []
    assert reader.problem == "the file ends inside a value"
    long = [b'[{"text": "', *[b"x" * 100_000] * 50, b'"}]']
    ((offset, length, head, whole),) = Values(iter(long), max_value_bytes=1000)
    assert (offset, length, whole, len(head)) == (1, 5_000_012, False, 256)


def _deep(levels: int, inner: str = "1") -> str:
    return '{"a":[' * (levels // 2) + inner + "]}" * (levels // 2)


SOUND: list[tuple[str, Any]] = [
    # a value of another field as it is written, and what metadata has
    ("NaN", None),
    ("Infinity", None),
    ("-Infinity", None),
    ("1e400", None),
    ("-1e400", None),
    ("9" * 400, int("9" * 400)),
    ("-" + "9" * 5000, None),
    ("1" * 30, int("1" * 30)),
    ("0.1e-999", 0.0),
    ('"\\ud800"', None),
    ('"\\udc00 half"', None),
    ('"\\ud83d\\ude00"', "\U0001f600"),
    ('{"x": [NaN, 1, {"y": Infinity}]}', {"x": [None, 1, {"y": None}]}),
    ('{"\\ud800": 1}', {"?": 1}),
    ('{"k": "\\ud800", "j": 2}', {"k": None, "j": 2}),
    ('[1e400, "a", null]', [None, "a", None]),
    ('1, "m": 2', 2),  # a name that comes twice: the last one counts
    ("true", True),
    ('""', ""),
]


@pytest.mark.parametrize(("written", "held"), SOUND)
@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_values_that_json_does_not_know_cost_no_text_in_other_fields(
    tmp_path: Path, written: str, held: Any, form: str
) -> None:
    record = f'{{"text": "caf\u00e9 \u2028", "id": 7, "m": {written}}}'
    data = f"[{record}]" if form == "json" else f"{record}\n"
    name = put(tmp_path, f"a.{form}", data.encode())
    table, bad, _ = read(tmp_path, name, format=form, metadata="m")
    assert (table["text"].to_pylist(), table["id"].to_pylist(), bad) == (["caf\u00e9 \u2028"], ["7"], [])
    assert json.loads(table["metadata"][0].as_py()) == {"m": held}


@pytest.mark.parametrize("written", ["NaN", "-Infinity", "1e400", '"\\ud800"'])
def test_what_is_no_value_is_a_null_id_and_url(tmp_path: Path, written: str) -> None:
    data = f'{{"text": "a", "id": {written}, "url": {written}}}'
    table, bad, _ = read(tmp_path, put(tmp_path, "a.jsonl", data.encode()))
    assert (table["id"].to_pylist(), table["url"].to_pylist(), bad) == ([None], [None], [])


@pytest.mark.parametrize("levels", [250, 256, 300, 390, 600, 990, 1000, 1024, 1026, 3000, 100_000])
@pytest.mark.parametrize("on_bad_text", ["quarantine", "replace"])
def test_deeply_nested_metadata_is_kept_or_cut_and_costs_no_text(
    tmp_path: Path, levels: int, on_bad_text: str
) -> None:
    lines = [
        f'{{"text": "]}} a", "m": {_deep(levels)}, "n": "x"}}',
        '{{"m": {}, "n": "x", "text": "]}} a"}}'.format(_deep(levels, '"\\"]}[", NaN')),
    ]
    name = put(tmp_path, "a.jsonl", "\n".join(lines).encode())
    table, bad, _ = read(tmp_path, name, metadata=["m", "n"], on_bad_text=on_bad_text)
    assert (table["text"].to_pylist(), bad) == (["]} a"] * 2, [])
    assert [json.loads(held)["n"] for held in table["metadata"].to_pylist()] == ["x"] * 2
    if levels < 400:
        assert table["metadata"][0].as_py() == f'{{"m":{_deep(levels)},"n":"x"}}'


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a", "m": nan}',
        '{"text": "a", "m": NaN',
        '{"text": "\\ud800", "m": NaN}',
        '{"text": NaN}',
        '{"text": "a", "m": 01}',
        '{"text": "a\tb", "m": NaN}',
        '{"text": "a", "m": ' + "[" * 5000 + "}",
        '{"text": "a", "m": ' + "[" * 5000 + "]" * 5000 + ", }",
        "[" * 5000 + "]" * 5000,
    ],
)
def test_what_is_no_json_and_texts_that_are_none_stay_bad_records(tmp_path: Path, line: str) -> None:
    table, (entry,), _ = read(tmp_path, put(tmp_path, "a.jsonl", line.encode()), metadata="m")
    assert table.num_rows == 0
    assert entry["reason"] in ("bad_json", "no_text", "not_an_object")
