"""MDS shards and WebDataset tars as inputs: their samples as documents, and what damage costs."""

from __future__ import annotations

import gzip
import json
import random
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError, RecipeError, ShardError
from shardkit.formats.mds import MdsWriter
from shardkit.writers.inputs.fields import NamedFields, check_named_fields
from shardkit.writers.inputs.read_shards import first_samples
from shardkit.writers.inputs.readers import read_split
from shardkit.writers.inputs.scan import scan_inputs
from shardkit.writers.rows.ledger import Ledger, Quarantine
from support.foreign_tars import make_tar
from support.read_inputs import put, read, recipe

TEXTS = [f"text {i} é\u2028" * (i % 5) for i in range(40)]


def write_mds(
    folder: Path, columns: dict[str, str], rows: list[dict[str, Any]], **settings: Any
) -> list[str]:
    """The shards of a dataset in `folder`/mds, by name below `folder`."""
    with MdsWriter(folder / "mds", columns=columns, **settings) as writer:
        for row in rows:
            writer.write(row)
    return sorted(f"mds/{path.name}" for path in (folder / "mds").iterdir() if ".mds" in path.name)


def texts_mds(folder: Path, **settings: Any) -> bytes:
    """One shard of TEXTS."""
    (name,) = write_mds(
        folder, {"text": "str", "n": "int"}, [{"text": t, "n": i} for i, t in enumerate(TEXTS)]
    )
    return (folder / name).read_bytes()


@pytest.mark.parametrize("compression", [None, "zstd:3", "gz", "bz2"])
def test_columns_of_mds_shards_are_fields_and_only_the_named_ones_are_decoded(
    tmp_path: Path, compression: str | None
) -> None:
    columns = {"body": "str", "meta": "json", "raw": "bytes", "k": "uint64", "tokens": "ndarray", "o": "pkl"}
    rows = []
    for i, text in enumerate(TEXTS):
        meta = {"url": f"http://a/{i}", "deep": {"n": [i, 1 << 70]}, "text": f"inner {i}"}
        row = {"body": text, "meta": meta, "raw": f"raw {i}".encode(), "k": np.uint64(i), "o": {1, 2}}
        rows.append(row | {"tokens": np.arange(3)})
    (name,) = write_mds(tmp_path, columns, rows, compression=compression)
    named: dict[str, Any] = {"id": "k", "url": "meta.url", "metadata": ["meta.deep", "k"]}
    table, bad, _ = read(tmp_path, name, text="body", **named)
    assert not bad
    assert table["text"].to_pylist() == TEXTS
    assert table["id"].to_pylist() == [str(i) for i in range(40)]
    assert table["url"].to_pylist() == [f"http://a/{i}" for i in range(40)]
    assert json.loads(table["metadata"][3].as_py()) == {"meta.deep": {"n": [3, 1 << 70]}, "k": 3}
    assert table["record"].to_pylist() == list(range(40))
    for text, expected in (("meta.text", "inner 7"), ("raw", "raw 7")):
        table, bad, _ = read(tmp_path, name, text=text)
        assert (table["text"][7].as_py(), bad) == (expected, [])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no column 'text'; its columns: body, o, tokens"),
        ({"text": "tokens"}, "column 'tokens' holds ndarray, not text"),
        ({"text": "o"}, "column 'o' holds pkl, not text"),
        ({"text": "body.inner"}, "no column 'body.inner'"),
    ],
)
def test_an_mds_shard_without_the_text_column_says_which_it_has(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    rows = [{"body": text, "tokens": np.arange(3), "o": 1} for text in TEXTS]
    (name,) = write_mds(tmp_path, {"body": "str", "tokens": "ndarray", "o": "pkl"}, rows)
    _, (entry,), ledger = read(tmp_path, name, **config)
    assert words in entry["error"]
    assert "set inputs[0].text" in entry["error"]
    assert ledger.quarantined["no_column"].documents == len(TEXTS)
    with pytest.raises(RecipeError, match="column 'o' holds pkl, not text, JSON or numbers"):
        read(tmp_path, name, text="body", metadata=["o"])


def test_a_damaged_sample_of_an_mds_shard_costs_itself(tmp_path: Path) -> None:
    data = bytearray(texts_mds(tmp_path))
    offsets = struct.unpack_from("<41I", data, 4)
    struct.pack_into("<I", data, offsets[3], 1 << 31)  # the size of the text
    data[offsets[6] + 4 + 8] = 0xFF  # a byte of it: the number comes first
    table, bad, ledger = read(tmp_path, put(tmp_path, "a.mds", bytes(data)), metadata=["n"])
    assert [(entry["record"], entry["reason"], entry["byte_offset"]) for entry in bad] == [
        (3, "bad_record", offsets[3]),
        (6, "bad_utf8", offsets[6]),
    ]
    assert "column 'text' states 2,147,483,648 bytes, which exceed the sample" in bad[0]["error"]
    assert table["record"].to_pylist() == [i for i in range(40) if i not in (3, 6)]
    assert ledger.quarantined["bad_record"].bytes == offsets[4] - offsets[3]
    with pytest.raises(BuildError, match=r"a.mds: record 3 .*bad_record"):
        read(tmp_path, "a.mds", allowed=0)


def test_long_values_cost_their_sample_and_what_is_not_named_may_be_long(tmp_path: Path) -> None:
    sizes = (10, 9000, 20)
    rows = [{"text": "x" * size, "raw": bytes(90_000)} for size in sizes]
    (name,) = write_mds(tmp_path, {"text": "str", "raw": "bytes"}, rows)
    table, (entry,), _ = read(tmp_path, name, limit=5000)
    assert table["record"].to_pylist() == [0, 2]
    assert (entry["record"], entry["reason"]) == (1, "too_long")
    tar = make_tar(
        [
            (f"{i}.{kind}", data)
            for i in range(3)
            for kind, data in (("txt", b"x" * sizes[i]), ("jpg", bytes(90_000)))
        ]
    )
    table, (entry,), _ = read(tmp_path, put(tmp_path, "a.tar", tar), text="txt", limit=5000)
    assert table["record"].to_pylist() == [0, 2]
    assert (entry["record"], entry["reason"]) == (1, "too_long")


@pytest.mark.parametrize("length", [0, 3, 100, 500, 900, -1])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_shard_that_is_cut_short_gives_the_samples_before_and_counts_the_rest(
    tmp_path: Path, length: int, compression: str | None
) -> None:
    rows = [{"text": text} for text in TEXTS]
    (name,) = write_mds(tmp_path, {"text": "str"}, rows, compression=compression)
    data = (tmp_path / name).read_bytes()
    data = data[: min(length, len(data) - 1)]
    table, bad, ledger = read(tmp_path, put(tmp_path, f"a.mds{'.zstd' if compression else ''}", data))
    count = table.num_rows
    assert table["text"].to_pylist() == TEXTS[:count]
    assert [entry["reason"] for entry in bad] == ["damaged_file"]
    if count and compression is None:
        assert ledger.read.documents == len(TEXTS)
    if compression is None and length in (900, -1):
        assert count > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: struct.pack("<I", 1 << 31) + d[4:], "is not an MDS shard of 0 to 16,777,216 samples"),
        (lambda d: struct.pack("<I", 1 << 20) + d[4:], "ends inside the offsets"),
        (lambda d: d[:8] + d[4:8] + d[12:], None),  # an empty first sample: it is too short
        (lambda d: d[:8] + struct.pack("<I", 1) + d[12:], "sample 0 ends before it begins"),
        (lambda d: d[:4] + struct.pack("<I", 9) + d[8:], "inside the header"),
        (lambda d: d.replace(b'"str"', b'"stx"', 1), "unknown"),
        (lambda d: d.replace(b"column_names", b"column_nomes", 1), "must be lists"),
        (lambda d: d + b"more", "4 bytes follow the last sample"),
        (lambda d: b'{"text": "a"}\n' * 9, "is not an MDS shard"),
    ],
)
def test_hostile_headers_of_mds_are_refused_with_a_reason(
    tmp_path: Path, change: Any, words: str | None
) -> None:
    _, bad, _ = read(tmp_path, put(tmp_path, "a.mds", change(texts_mds(tmp_path))))
    assert bad
    assert words is None or words in bad[-1]["error"]


def test_flipped_bits_of_shards_never_raise_anything_else(tmp_path: Path) -> None:
    tar = make_tar([(f"{i}.{kind}", TEXTS[i].encode()) for i in range(9) for kind in ("txt", "bin")])
    rng = random.Random(3)
    for name, data in (("b.mds", texts_mds(tmp_path)), ("b.tar", tar)):
        for _ in range(40):
            flipped = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            read(tmp_path, put(tmp_path, name, bytes(flipped)), text="text" if name == "b.mds" else "txt")


def test_members_of_webdataset_samples_are_fields_by_extension(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for i, text in enumerate(TEXTS):
            meta = {"text": f"inner {i}", "url": f"http://a/{i}", "deep": {"n": 1 << 70}}
            row = {"__key__": f"part.x/{i:05d}", "txt": text, "json": meta, "cls": i, "jpg": b"\xff\xd8"}
            writer.write(row | {"meta.json": {"lang": "de"}})
    named: dict[str, Any] = {"url": "json.url", "metadata": ["cls", "__key__", "meta.json.lang"]}
    table, bad, _ = read(tmp_path, "a.tar", text="txt", **named)
    assert not bad
    assert table["text"].to_pylist() == TEXTS
    assert table["id"].to_pylist() == [f"part.x/{i:05d}" for i in range(40)]
    assert table["url"][3].as_py() == "http://a/3"
    assert json.loads(table["metadata"][3].as_py()) == {
        "cls": 3,
        "__key__": "part.x/00003",
        "meta.json.lang": "de",
    }
    table, bad, _ = read(tmp_path, "a.tar", text="json.text", id="json.deep.n")
    assert (table["text"].to_pylist(), table["id"][0].as_py()) == (
        [f"inner {i}" for i in range(40)],
        str(1 << 70),
    )
    table, (first, *_), _ = read(tmp_path, "a.tar")
    members = "cls, jpg, json, meta.json, txt"
    expected = f"no member .text; its members: {members}; set inputs[0].text to the one with the text"
    assert (table.num_rows, first["reason"]) == (0, "no_text")
    assert expected in first["error"]
    with pytest.raises(
        RecipeError, match=r"metadata\[0\]: no record of a.tar has a field 'nope'; its fields: __key__, cls"
    ):
        checked(tmp_path, "a.tar", text="txt", metadata=["nope"])


def checked(folder: Path, name: str, **config: Any) -> None:
    """Read as a build does, with the check that named fields are there."""
    made = recipe(folder, {"path": name, **config})
    (split,) = scan_inputs(made)
    fields = NamedFields(made.inputs[0])
    with Quarantine(folder / "q.jsonl", max_bad_fraction=1) as quarantine:
        list(read_split(split, made.inputs[0], Ledger(), quarantine, fields=fields))
    check_named_fields([split], [fields.to_dict()])


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_tar_gives_the_samples_of_the_plain_one_unless_it_is_damaged(
    tmp_path: Path, suffix: str
) -> None:
    members = [
        (f"{i}.{kind}", TEXTS[i % 40].encode()) for i in range(300) for kind in ("txt", "jpg", "json.x")
    ]
    plain = make_tar(members)
    packed = (gzip.compress if suffix == ".gz" else zstandard.compress)(plain)
    whole, bad, _ = read(tmp_path, put(tmp_path, "a.tar", plain), text="txt")
    table, bad, _ = read(tmp_path, put(tmp_path, f"a.tar{suffix}", packed), text="txt")
    assert (table["text"].to_pylist(), bad) == (whole["text"].to_pylist(), [])
    assert table["id"].to_pylist() == [str(i) for i in range(300)]
    (split,) = scan_inputs(recipe(tmp_path, f"a.tar{suffix}"))
    assert first_samples(split.input, split.format, split.compression, 2) == [{"txt": t} for t in TEXTS[:2]]
    assert len(first_samples(split.input, split.format, split.compression, 1000)) == 300
    two = gzip.compress(plain[: len(plain) // 2]) + packed[:-9] if suffix == ".gz" else packed[:-9]
    table, (entry,), _ = read(tmp_path, put(tmp_path, f"a.tar{suffix}", two), text="txt")
    assert entry["reason"] == "damaged_file"
    assert "truncated: the file ends inside" in entry["error"]
    assert table["text"].to_pylist() == whole["text"].to_pylist()[: table.num_rows]
    assert (table.num_rows > 100) == (suffix == ".gz")  # nothing that a checksum does not confirm


def test_a_sample_of_a_tar_that_cannot_be_used_costs_itself(tmp_path: Path) -> None:
    members = [
        ("0.txt", b"good"),
        ("1.txt", b"bad \xff"),
        ("2.json", b"{"),
        ("2.txt", b"text beside bad JSON"),
        ("3.txt", b"one"),
        ("3.txt", b"two"),
        ("4.pkl", b"cos\nsystem\n(S'exit 1'\ntR."),
        ("4.txt", b"text beside a pickle"),
        ("5.jpg", b"no text"),
        ("6.txt", b"good too"),
    ]
    name = put(tmp_path, "a.tar", make_tar(members))
    table, bad, _ = read(tmp_path, name, text="txt", metadata=["json"])
    assert table["text"].to_pylist() == ["good", "text beside bad JSON", "text beside a pickle", "good too"]
    assert table["metadata"].to_pylist()[1] == '{"json":null}'
    assert [(entry["record"], entry["reason"]) for entry in bad] == [
        (1, "bad_utf8"),
        (3, "bad_record"),
        (5, "no_text"),
    ]
    assert bad[0]["byte_offset"] == 1024
    table, _, _ = read(tmp_path, name, text="txt", metadata=["pkl"])
    found = dict(zip(table["record"].to_pylist(), table["metadata"].to_pylist(), strict=True))
    assert found[4] == '{"pkl":"cos\\nsystem\\n(S\'exit 1\'\\ntR."}'  # never loaded


def test_text_that_utf8_cannot_hold_is_quarantined_and_other_values_are_null(tmp_path: Path) -> None:
    lone: list[dict[str, Any]] = [{"text": "\ud800"}, {"text": "fine", "url": "\ud800"}]
    lone += [{"text": "ok", "m": {"\udc00": [1]}}, {"text": "ok"}]
    tar = make_tar([(f"{i}.json", json.dumps(row).encode()) for i, row in enumerate(lone)])
    config: dict[str, Any] = {"url": "json.url", "metadata": ["json.m"], "text": "json.text"}
    table, bad, _ = read(tmp_path, put(tmp_path, "a.tar", tar), **config)
    assert table["record"].to_pylist() == [1, 2, 3]
    assert table["url"].to_pylist() == [None] * 3
    assert table["metadata"].to_pylist() == ["{}", '{"json.m":{"?":[1]}}', "{}"]
    assert [entry["reason"] for entry in bad] == ["bad_utf8"]


def test_binary_members_and_columns_are_ids_and_metadata_in_hexadecimal(tmp_path: Path) -> None:
    digest = bytes(range(240, 256))
    members = [
        ("0.txt", b"a"),
        ("0.md5", digest),
        ("0.json", b'{"n": NaN, "x": ' + b"[" * 900 + b"]" * 900 + b"}"),
    ]
    name = put(tmp_path, "a.tar", make_tar(members))
    table, _, _ = read(tmp_path, name, text="txt", id="md5", metadata=["md5", "json.n"], allowed=0)
    assert table["id"].to_pylist() == [digest.hex()]
    assert json.loads(table["metadata"][0].as_py()) == {"md5": digest.hex(), "json.n": None}
    rows = [{"text": "a", "id": digest, "n": np.float32("nan"), "j": {"x": [1e999]}}]
    (name,) = write_mds(tmp_path, {"text": "str", "id": "bytes", "n": "float32", "j": "json"}, rows)
    table, _, _ = read(tmp_path, name, metadata=["n", "j"], allowed=0)
    assert table["id"].to_pylist() == [digest.hex()]
    assert json.loads(table["metadata"][0].as_py()) == {"n": None, "j": {"x": [None]}}


@pytest.mark.parametrize("levels", [300, 900, 5000])
def test_deep_json_beside_the_text_of_a_sample_costs_no_text(tmp_path: Path, levels: int) -> None:
    deep = b'{"x": ' + b"[" * levels + b"]" * levels + b"}"
    name = put(tmp_path, "a.tar", make_tar([("0.txt", b"a"), ("0.json", deep)]))
    table, _, _ = read(tmp_path, name, text="txt", metadata=["json"], allowed=0)
    assert table["text"].to_pylist() == ["a"]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 20_480), form=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT]))
def test_a_tar_cut_anywhere_gives_whole_samples_and_hides_nothing(
    tmp_path: Path, cut: int, form: int
) -> None:
    members = [(f"{i}.{kind}", b"text %d" % i) for i in range(9) for kind in ("bin", "txt")]
    data = make_tar(members, form)
    ends = [start + 1024 for start in range(1024, 18 * 1024, 2048)]  # of samples: a header and a block each
    assert not any(data[ends[-1] :])
    table, bad, _ = read(tmp_path, put(tmp_path, "a.tar", data[:cut]), text="txt")
    whole = sum(end <= cut for end in ends)
    count = table.num_rows  # without the one before damage, which might have had more members
    assert table["text"].to_pylist() == [f"text {i}" for i in range(count)]
    assert count == whole or (count == whole - 1 and bad)
    assert bad or cut in ends or cut > ends[-1]


def test_a_repeated_extension_or_thousands_of_members_are_no_sample(tmp_path: Path) -> None:
    many = [(f"0.{i}", b"") for i in range(4200)] + [("0.txt", b"lost"), ("1.txt", b"kept")]
    table, (entry,), _ = read(tmp_path, put(tmp_path, "a.tar", make_tar(many)), text="txt")
    assert table["text"].to_pylist() == ["kept"]
    assert "more than 4,096 members" in entry["error"]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_first_samples_show_text_and_what_is_small_beside_it(
    tmp_path: Path, compression: str | None
) -> None:
    columns = {"body": "str", "meta": "json", "tokens": "ndarray", "o": "pkl"}
    rows = [{"body": t, "meta": {"n": 1}, "tokens": np.arange(3), "o": 1} for t in TEXTS]
    (name,) = write_mds(tmp_path, columns, rows, compression=compression)
    (split,) = scan_inputs(recipe(tmp_path, name))
    found = first_samples(split.input, split.format, split.compression, 3)
    assert found == [{"body": text, "meta": {"n": 1}} for text in TEXTS[:3]]
    data = make_tar([(f"{i}.{kind}", b"text") for i in range(5) for kind in ("txt", "jpg", "pkl")])
    (split,) = scan_inputs(recipe(tmp_path, put(tmp_path, "a.tar", data)))
    assert first_samples(split.input, split.format, None, 2) == [{"txt": "text"}] * 2
    put(tmp_path, "a.tar", b"no tar")
    (split,) = scan_inputs(recipe(tmp_path, "a.tar"))
    with pytest.raises(ShardError):
        first_samples(split.input, split.format, None, 2)
