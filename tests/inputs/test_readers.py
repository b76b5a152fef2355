from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lz4.frame
import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.writers.inputs.readers import read_split
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.rows.documents import BATCH_DOCUMENTS, document_ids
from shardkit.writers.rows.ledger import Count, Ledger, Quarantine
from support.read_inputs import data_folder, put, read, recipe


def test_a_document_carries_its_identity_and_the_fields_the_recipe_names(tmp_path: Path) -> None:
    rows = [
        {"text": "one", "id": "a", "url": "http://x", "lang": "de", "n": 1},
        {"text": "two", "id": 7, "url": None, "n": {"deep": [1, 2.5, None]}},
        {"text": "three", "doc": "c"},
    ]
    name = put(tmp_path, "a.jsonl", b"\n".join(map(orjson.dumps, rows)))
    table, bad, _ = read(tmp_path, name, metadata=["n", "lang"])
    assert not bad
    assert table["id"].to_pylist() == ["a", "7", None]
    assert table["url"].to_pylist() == ["http://x", None, None]
    assert table["metadata"].to_pylist() == ['{"n":1,"lang":"de"}', '{"n":{"deep":[1,2.5,null]}}', "{}"]
    assert table["record"].to_pylist() == [0, 1, 2]
    assert table["file"].to_pylist() == ["a.jsonl"] * 3
    assert table["document_id"].to_pylist() == document_ids("a.jsonl", range(3))
    table, _, _ = read(tmp_path, name, id="doc")
    assert table["id"].to_pylist() == [None, None, "c"]
    assert table["metadata"].to_pylist() == [None] * 3


def test_integers_of_any_size_keep_their_digits(tmp_path: Path) -> None:
    ids = [2**63, 2**64 - 1, 2**64, -(2**63) - 1, 123456789012345678901234567890, 10**300]
    lines = [f'{{"text": "t", "id": {id}, "n": {{"deep": [1.5, {id}]}}}}' for id in ids]
    lines += ['{"text": "t", "id": 1e300, "n": 0.5}']
    lines += [f'{{"text": "t", "id": 1e300, "m": {"[" * 1020}{"]" * 1020}}}']
    name = put(tmp_path, "a.jsonl", "\n".join(lines).encode())
    table, bad, _ = read(tmp_path, name, metadata=["n"])
    assert not bad
    assert table["id"].to_pylist() == [*map(str, ids), "1e+300", "1e+300"]
    expected = [f'{{"n":{{"deep":[1.5,{id}]}}}}' for id in ids]
    assert table["metadata"].to_pylist() == [*expected, '{"n":0.5}', "{}"]


def test_fields_may_lie_inside_others(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"doc": {"body": "one", "at": {"url": "u1"}}, "meta": {"n": [1], "x": None}, "doc.id": 5},
        {"doc": {"body": "two", "at": "flat"}, "meta": None},
        {"doc.body": "its own name comes first", "doc": {"body": "not this"}},
        {"doc": {"text": "elsewhere"}},
        {"doc": "flat"},
    ]
    name = put(tmp_path, "a.jsonl", b"\n".join(map(orjson.dumps, rows)))
    fields: dict[str, Any] = {
        "text": "doc.body",
        "url": "doc.at.url",
        "id": "doc.id",
        "metadata": ["meta.n", "meta.x"],
    }
    table, bad, _ = read(tmp_path, name, **fields)
    assert table["text"].to_pylist() == ["one", "two", "its own name comes first"]
    assert table["url"].to_pylist() == ["u1", None, None]
    assert table["id"].to_pylist() == ["5", None, None]
    assert table["metadata"].to_pylist() == ['{"meta.n":[1],"meta.x":null}', "{}", "{}"]
    assert [(entry["record"], entry["reason"]) for entry in bad] == [(3, "no_text"), (4, "no_text")]


def test_lines_end_at_newlines_only_and_blank_ones_are_no_records(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b\xc2\x85c"}\r\n\r\n  \n{"text": "d\\u0000"}\n\n{"text": ""}'
    table, bad, _ = read(tmp_path, put(tmp_path, "a.jsonl", data))
    assert not bad
    assert table["text"].to_pylist() == ["a\u2028b\u0085c", "d\0", ""]
    assert table["record"].to_pylist() == [0, 3, 5]


def test_a_bad_record_costs_itself_only_and_is_named_with_its_place(tmp_path: Path) -> None:
    lines = {
        b'{"text": "unterminated': ("bad_json", "not JSON"),
        b'{"body": "x"}': ("no_text", "no field 'text'; its fields: body"),
        b'{"text": null}': ("no_text", "holds null"),
        b'{"text": 12}': ("no_text", "holds number"),
        b'{"text": ["x"]}': ("no_text", "holds array"),
        b"[1]": ("not_an_object", "a JSON array"),
        b'"x"': ("not_an_object", "a JSON string"),
        b'{"text": "\xff"}': ("bad_utf8", "byte 10 of the line"),
        b'{"text": "\\ud800"}': ("bad_json", "surrogate"),
        b'{"text": NaN}': ("bad_json", "not JSON"),
        b"[" * 5000: ("bad_json", "not JSON"),
        b'{"text": "' + b"x" * 3000 + b'"}': ("too_long", "3,012 bytes, more than max_record_bytes 2,900"),
    }
    lines[b"[" * 2800] = lines.pop(b"[" * 5000)
    data = b"".join(b'{"text": "good"}\n' + line + b"\n" for line in lines)
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.jsonl", data), limit=2900)
    assert table["record"].to_pylist() == list(range(0, 2 * len(lines), 2))
    assert [b["record"] for b in bad] == list(range(1, 2 * len(lines), 2))
    for entry, line, (reason, words) in zip(bad, lines, lines.values(), strict=True):
        assert entry["file"] == "a.jsonl"
        assert entry["reason"] == reason
        assert words in entry["error"]
        assert data[entry["byte_offset"] :].startswith(line)
        assert len(entry["snippet"]) <= 200
    assert ledger.quarantined["not_an_object"] == Count(2, 6)


def test_without_allowance_the_first_bad_record_stops_the_build_and_is_named(tmp_path: Path) -> None:
    name = put(tmp_path, "a.jsonl", b'{"text": "good"}\n{"text": 1}\n')
    with pytest.raises(BuildError, match=r"a.jsonl: record 1 \(byte 17\): no_text: .*; repair or remove it"):
        read(tmp_path, name, allowed=0)
    foreign = put(tmp_path, "b.jsonl", b'{"text": "gr\xfc\xdfe"}\n')
    with pytest.raises(BuildError, match=r"bad_utf8: .*; set `on_bad_text: replace`, or .* `encoding`;"):
        read(tmp_path, foreign, allowed=0)


ROWS = [orjson.dumps({"text": f"text number {i} " * (i % 9), "id": i}) for i in range(300)]
JSONL = b"\n".join(ROWS) + b"\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (
            "a.jsonl.gz",
            b"".join(gzip.compress(JSONL[i : i + 700], mtime=0) for i in range(0, len(JSONL), 700)),
        ),
        ("a.jsonl.zst", zstandard.compress(JSONL[:777]) + zstandard.compress(JSONL[777:])),
        ("a.ndjson", JSONL[:-1]),
    ],
)
def test_a_record_may_span_members_frames_and_pieces(tmp_path: Path, name: str, data: bytes) -> None:
    table, bad, _ = read(tmp_path, put(tmp_path, name, data))
    assert not bad
    assert table["text"].to_pylist() == [orjson.loads(row)["text"] for row in ROWS]


def gzip_stored(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=0, mtime=0)


@pytest.mark.parametrize("members", [1, 3])
def test_records_behind_a_failed_checksum_are_quarantined(tmp_path: Path, members: int) -> None:
    """A flipped byte in a stored block is valid data: only the checksum at the member's end shows it."""
    parts = [b"".join(b'{"text": "record %d of %d"}\n' % (n, m) for n in range(200)) for m in range(members)]
    packed = [gzip_stored(part) for part in parts]
    packed[-1] = packed[-1].replace(b"record 100 ", b"record 900 ")
    name = put(tmp_path, "a.jsonl.gz", b"".join(packed))
    table, (entry,), ledger = read(tmp_path, name)
    sound = 200 * (members - 1)
    assert table["record"].to_pylist() == list(range(sound))
    assert not any("900" in text for text in table["text"].to_pylist())
    assert (entry["record"], entry["reason"]) == (sound, "damaged_file")
    assert f"bad checksum in gzip member {members}" in entry["error"]
    assert "200 records from the damaged part are not trusted" in entry["error"]
    lost = ledger.quarantined["damaged_file"]
    assert lost.documents == 200
    assert len(parts[-1]) <= lost.bytes < len(parts[-1]) + 100
    with pytest.raises(BuildError, match="bad checksum in gzip member"):
        read(tmp_path, name, allowed=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz", ".lz4"])
def test_half_a_member_counts_as_lost_by_records_and_bytes(tmp_path: Path, suffix: str) -> None:
    pack: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip_stored,
        ".zst": zstandard.compress,
        ".bz2": bz2.compress,
        ".xz": partial(lzma.compress, preset=0),
    }
    digests = (hashlib.sha256(b"%d" % n).hexdigest().encode() for n in range(40_000))
    text = b"".join(b'{"text": "%s"}\n' % digest for digest in digests)
    whole = pack.get(suffix, lz4.frame.compress)(text)
    table, (entry,), ledger = read(tmp_path, put(tmp_path, f"a.jsonl{suffix}", whole[: len(whole) // 2]))
    assert table.num_rows == 0
    assert "truncated" in entry["error"]
    assert ledger.quarantined["damaged_file"].documents > 5_000
    assert ledger.quarantined["damaged_file"].bytes > len(text) // 4


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damage_keeps_what_came_before_and_books_the_rest(tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    half = b"\n".join(ROWS[:150]) + b"\n"
    rest = pack(JSONL[len(half) :])
    name = put(tmp_path, f"a.jsonl{suffix}", pack(half) + rest[: len(rest) // 2])
    table, bad, ledger = read(tmp_path, name)
    assert table["text"].to_pylist() == [orjson.loads(row)["text"] for row in ROWS[:150]]
    (entry,) = bad
    assert (entry["record"], entry["reason"]) == (150, "damaged_file")
    assert "truncated" in entry["error"]
    assert "150 records were read before" in entry["error"]
    assert 1 <= ledger.quarantined["damaged_file"].documents < 150
    with pytest.raises(BuildError, match="truncated"):
        read(tmp_path, name, allowed=0)


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(
        st.one_of(
            st.text(max_size=30).map(lambda t: orjson.dumps({"text": t})),
            st.sampled_from([b"", b" ", b"{", b'{"text": 3}', b"\xff", b"[]"]),
        ),
        max_size=40,
    ),
    split_bytes=st.integers(1, 200),
)
def test_splits_change_nothing_and_every_record_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes], split_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("read")
    records = [b'{"text": "a record a line"}', *records]  # else a first "{" may begin one of several lines
    name = put(folder, "a.jsonl", b"\n".join(records))
    whole, bad, ledger = read(folder, name)
    cut, bad_cut, ledger_cut = read(folder, name, split_bytes=split_bytes)
    assert cut.to_pylist() == whole.to_pylist()
    assert bad_cut == bad
    assert ledger_cut == ledger
    assert ledger.read.documents == sum(bool(record.strip()) for record in records)


def test_batches_are_bounded(tmp_path: Path) -> None:
    name = put(tmp_path, "a.jsonl", b'{"text": "x"}\n' * (2 * BATCH_DOCUMENTS + 5))
    table, _, _ = read(tmp_path, name)
    assert max(len(chunk) for chunk in table["text"].chunks) == BATCH_DOCUMENTS
    name = put(tmp_path, "b.jsonl", b'{"text": "' + b"x" * 9_000_000 + b'"}\n')
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() * 5)
    table, _, _ = read(tmp_path, name)
    assert [len(chunk) for chunk in table["text"].chunks] == [2, 2, 1]


def test_a_text_file_is_one_document_or_one_for_each_line(tmp_path: Path) -> None:
    data = "\ufeffone\r\n\r\ntwo\u2028\x0bé\n".encode()
    for name, content in {
        "a.txt": data,
        "a.txt.gz": gzip.compress(data),
        "a.txt.zst": zstandard.compress(data),
    }.items():
        put(tmp_path, name, content)
        table, bad, _ = read(tmp_path, name)
        assert table["text"].to_pylist() == ["one\r\n\r\ntwo\u2028\x0bé\n"]
        lined, _, _ = read(tmp_path, name, lines=True)
        assert lined["text"].to_pylist() == ["one", "two\u2028\x0bé"]
        assert lined["record"].to_pylist() == [0, 2]
        assert not bad


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.txt", b"good \xff bad", "bad_utf8"),
        ("a.txt", b"x" * 2000, "too_long"),
        ("a.txt.gz", gzip.compress(b"x" * 500, mtime=0)[:-9], "damaged_file"),
    ],
)
def test_a_bad_text_file_is_quarantined_whole(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    table, bad, _ = read(tmp_path, put(tmp_path, name, data), limit=1024)
    assert table.num_rows == 0
    assert [entry["reason"] for entry in bad] == [reason]


def test_a_file_that_vanished_or_shrank_is_an_error_not_an_empty_input(tmp_path: Path) -> None:
    made = recipe(tmp_path, put(tmp_path, "a.jsonl", JSONL))
    (split,) = scan_inputs(made)
    os.truncate(tmp_path / "a.jsonl", 100)
    with pytest.raises(BuildError, match="the file became shorter"):
        list(read_split(split, made.inputs[0], Ledger(), Quarantine()))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(BuildError, match=r"a.jsonl: cannot be read: No such file"):
        list(read_split(split, made.inputs[0], Ledger(), Quarantine()))


@pytest.mark.data
def test_the_corpus_reads_whole() -> None:
    manifest = json.loads((data_folder() / "corpus/MANIFEST.json").read_text())
    for entry in manifest["files"]:
        _, _, ledger = read(data_folder() / "corpus", entry["file"], allowed=0)
        assert ledger.read == Count(entry["docs"], entry["text_bytes"]), entry["file"]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "texts", "reasons"),
    [
        ("bad_crc.jsonl.gz", 0, ["damaged_file"]),
        ("bom_crlf.jsonl", 5, []),
        ("empty.jsonl", 0, []),
        (
            "mixed.jsonl",
            7,
            ["bad_json"] + ["no_text"] * 3 + ["not_an_object"] * 2 + ["bad_utf8"] + ["bad_json"] * 2,
        ),
        ("no_trailing_newline.jsonl", 5, []),
        ("only_newlines.jsonl", 0, []),
        ("skippable_frame.jsonl.zst", 5, []),
        ("trailing_garbage.jsonl.gz", 5, ["damaged_file"]),
        ("truncated.jsonl.gz", 0, ["damaged_file"]),
        ("truncated.jsonl.zst", 0, ["damaged_file"]),
        ("u2028_in_text.jsonl", 1, []),
    ],
)
def test_dirty_samples_give_up_exactly_what_is_broken(name: str, texts: int, reasons: list[str]) -> None:
    table, bad, _ = read(data_folder() / "samples/dirty", name)
    assert table.num_rows == texts
    assert [entry["reason"] for entry in bad] == reasons


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"one\ntwo\n\nthree\n", ["one\ntwo", "three"]),
        (b"\n\n \t\none\r\ntwo\r\n\r\n\r\nthree", ["one\ntwo", "three"]),
        (b"\xef\xbb\xbfone\n\n\n\n", ["one"]),
        ("  indented\u2028x\n  poem\n \nend ".encode(), ["  indented\u2028x\n  poem", "end "]),
        (b"", []),
        (b"\n \n", []),
        (b"long\n" * 600 + b"\nshort\n", ["short"]),
        (b"x" * 3000 + b"\n\nshort\n", ["short"]),
        (b"bad \xff\nline\n\ngood", ["good"]),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_runs_of_lines_between_blank_ones_are_documents(
    tmp_path: Path, content: bytes, texts: list[str], suffix: str
) -> None:
    name = put(tmp_path, f"a.txt{suffix}", gzip.compress(content) if suffix else content)
    table, bad, ledger = read(tmp_path, name, lines="paragraphs", limit=2000, split_bytes=16)
    assert table["text"].to_pylist() == texts
    assert table["record"].to_pylist() == list(range(len(bad), len(bad) + len(texts)))
    assert len(bad) == (b"\xff" in content) + (len(content) > 2000)
    assert ledger.read.documents == len(texts) + len(bad)
