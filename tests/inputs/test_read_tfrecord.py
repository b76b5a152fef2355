"""TFRecord files of tf.train.Example as inputs of a build: features, compression, damage, names, drafts."""

from __future__ import annotations

import gzip
import json
import random
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard

import shardkit as sk
from shardkit.cli.main import main
from shardkit.errors import BuildError, MissingExtraError, RecipeError
from shardkit.writers.input_sample import choose_pieces, put_pieces
from shardkit.writers.inputs.first_bytes import look
from shardkit.writers.inputs.scan import guess_format, scan_inputs
from shardkit.writers.recipe.recipe import Recipe, load_recipe, recipe_from_mapping
from shardkit.writers.rows.ledger import Count
from support.read_inputs import put, read, recipe
from support.s3_moto import s3_server
from support.small_build import EOS, text_of, train_bpe, tree
from support.tfrecords import example, field, floats, ints, record, repaired, texts

TEXTS = ["plain", "größer", "", "line\r\none\0"]


def example_of(number: int, **more: bytes) -> bytes:
    return example(text=texts(TEXTS[number].encode()), n=ints(number), **more)


WHOLE = b"".join(record(example_of(number)) for number in range(4))
ENDS = [len(b"".join(record(example_of(number)) for number in range(count))) for count in range(5)]


def test_features_are_fields_and_one_value_is_no_list(tmp_path: Path) -> None:
    written = example(
        body=texts("höhe".encode()),
        link=texts(b"http://a"),
        key=texts(b"\x00\xff"),
        one=ints(-3),
        many=ints(1, 2**63 - 1, packed=False),
        half=floats(0.5),
        odd=floats(float("nan"), 1.5),
        tags=texts(b"a", b"\xff"),
        empty=texts(),
        kindless=b"",
        image=texts(b"\xff\xd8\xff\xe0"),
    )
    other = example(body=texts(b"b"))
    put(tmp_path, "a.tfrecord", record(written) + record(other))
    names = ["one", "many", "half", "odd", "tags", "empty", "kindless"]
    table, bad, ledger = read(
        tmp_path, "a.tfrecord", text="body", url="link", id="key", metadata=names, allowed=0
    )
    assert (table["text"].to_pylist(), bad) == (["höhe", "b"], [])
    assert table["url"].to_pylist() == ["http://a", None]
    assert table["id"].to_pylist() == ["00ff", None]
    assert table["record"].to_pylist() == [0, 1]
    assert [json.loads(each) for each in table["metadata"].to_pylist()] == [
        {
            "one": -3, "many": [1, 2**63 - 1], "half": 0.5, "odd": [None, 1.5], "tags": ["a", "ff"],
            "empty": None, "kindless": None,
        },
        {},
    ]  # fmt: skip
    assert ledger.read == Count(2, 6)


@pytest.mark.parametrize("own", [b"0123456789abcdef" * 2, bytes.fromhex("0123456789abcdef" * 2)])
def test_document_ids_are_digits_or_the_bytes_themselves(tmp_path: Path, own: bytes) -> None:
    put(tmp_path, "a.tfrecord", record(example(text=texts(b"a"), key=texts(own))))
    table, _, _ = read(tmp_path, "a.tfrecord", document_id="key", allowed=0)
    assert table["document_id"].to_pylist() == [bytes.fromhex("0123456789abcdef" * 2)]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.tfrecord", WHOLE),
        ("a.tfrecords", WHOLE),
        ("c4-train.tfrecord-00000-of-01024", WHOLE),
        ("a-00001-of-00002.tfrecord.gz", gzip.compress(WHOLE)),
        (
            "a.tfrecord-00000-of-00001.gz",
            gzip.compress(WHOLE[: ENDS[1] + 5]) + gzip.compress(WHOLE[ENDS[1] + 5 :]),
        ),
        ("a.tfrecord", gzip.compress(WHOLE)),  # as TensorFlow writes it: the name does not say it
        ("a.tfrecord.gz", WHOLE),  # decompressed in transit
        ("a.tfrecord", zstandard.compress(WHOLE)),
    ],
)
def test_files_are_read_plain_or_compressed_whatever_their_names_say(
    tmp_path: Path, name: str, data: bytes
) -> None:
    table, bad, _ = read(tmp_path, put(tmp_path, name, data), metadata=["n"], allowed=0)
    assert (table["text"].to_pylist(), bad) == (TEXTS, [])
    assert table["metadata"].to_pylist() == [f'{{"n":{number}}}' for number in range(4)]


def test_a_format_that_is_set_reads_files_of_any_name(tmp_path: Path) -> None:
    put(tmp_path, "part-00000-of-00001", gzip.compress(WHOLE))
    with pytest.raises(RecipeError, match="does not tell its format"):
        read(tmp_path, "part-00000-of-00001")
    table, _, _ = read(tmp_path, "part-00000-of-00001", format="tfrecord", allowed=0)
    assert table["text"].to_pylist() == TEXTS
    for name, data in (("a.txt", WHOLE), ("b.jsonl", gzip.compress(WHOLE))):
        _, (entry,), _ = read(tmp_path, put(tmp_path, name, data))
        assert entry["reason"] == "other_format"
        assert "name it .tfrecord or set inputs[0].format: tfrecord" in entry["error"]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.tfrecord", ("tfrecord", None)), ("a.TFRecord", ("tfrecord", None)),
        ("c4.tfrecord-00000-of-01024", ("tfrecord", None)), ("a.tfrecords.gz", ("tfrecord", "gzip")),
        ("a.tfrecord-1-of-2.gz", ("tfrecord", "gzip")), ("a.tfrecord.index", None), ("a.tfrecord-1", None),
    ],
)  # fmt: skip
def test_names_tell_the_format(name: str, format: tuple[str, str | None] | None) -> None:
    assert guess_format(name) == format


@pytest.mark.parametrize("length", [0xFEFF, 0x88B1F, 0xBFBBEF, 0x1F8B, 0x4D2204, 0x2FB528])
def test_no_length_is_taken_for_the_mark_of_an_encoding_or_compression(tmp_path: Path, length: int) -> None:
    assert look(record(b"", length)).kind == "tfrecord"
    if length < 1 << 17:
        filler = length - len(example(text=texts(b"a"), filler=texts(bytes(length - 60)))) + length - 60
        data = record(example(text=texts(b"a"), filler=texts(bytes(filler))))
        assert int.from_bytes(data[:8], "little") == length
        table, _, _ = read(tmp_path, put(tmp_path, "a.tfrecord", data), allowed=0)
        assert table["text"].to_pylist() == ["a"]


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


SEQUENCE = field(1, field(1, b"")) + field(2, b"")


@pytest.mark.parametrize(
    ("middle", "reason", "words"),
    [
        (flipped(record(example_of(1)), 20), "bad_record", "wrong checksum"),
        (record(example_of(1))[:-1] + b"?", "bad_record", "wrong checksum"),
        (record(SEQUENCE), "bad_record", "holds a SequenceExample"),
        (record(b"no message"), "bad_record", "no tf.train.Example"),
        (
            record(example(n=ints(1), m=b"")),
            "no_text",
            "no feature 'text'; its features: m (empty), n (int64)",
        ),
        (record(example()), "no_text", "its features: none"),
        (record(example(m=field(4, b""))), "bad_record", "Feature has no field 4"),
        (record(example(text=ints(1, 2))), "no_text", "feature 'text' holds int64 values, not text"),
        (record(example(text=texts(b"a", b"b"))), "no_text", "feature 'text' has 2 values, not one text"),
        (record(example(text=texts())), "no_text", "feature 'text' has 0 values, not one text"),
        (record(example(text=b"")), "no_text", "feature 'text' has 0 values, not one text"),
        (record(example(text=texts(b"ab\xff"))), "bad_utf8", "byte 2 of feature 'text' is not UTF-8"),
        (record(example(text=texts(b"x" * 300))), "too_long", "more than max_record_bytes 200"),
    ],
)
def test_a_bad_record_costs_itself_only_and_is_named_with_its_place(
    tmp_path: Path, middle: bytes, reason: str, words: str
) -> None:
    data = WHOLE[: ENDS[2]] + middle + WHOLE[ENDS[2] :]
    for name, stored in (("a.tfrecord", data), ("b.tfrecord.gz", gzip.compress(data))):
        table, (entry,), _ = read(tmp_path, put(tmp_path, name, stored), limit=200)
        assert table["text"].to_pylist() == TEXTS
        assert table["record"].to_pylist() == [0, 1, 3, 4]
        assert (entry["record"], entry["byte_offset"], entry["reason"]) == (2, ENDS[2], reason)
        assert words in entry["error"]
        with pytest.raises(BuildError, match=rf"{name}: record 2 \(byte {ENDS[2]}\): {reason}"):
            read(tmp_path, name, limit=200, allowed=0)


def test_features_that_the_recipe_does_not_name_are_not_decoded(tmp_path: Path) -> None:
    data = record(example(text=texts(b"a"), odd=field(2, field(1, b"123")), n=ints(1)))
    table, _, _ = read(tmp_path, put(tmp_path, "a.tfrecord", data), metadata=["n"], allowed=0)
    assert table["metadata"].to_pylist() == ['{"n":1}']
    _, (entry,), _ = read(tmp_path, "a.tfrecord", metadata=["odd"])
    assert "a FloatList has 3 bytes" in entry["error"]


def test_the_first_record_says_what_to_do(tmp_path: Path) -> None:
    for data, words in (
        (record(SEQUENCE), "inputs[0].reader takes a function"),
        (record(example(body=texts(b"a"))), "set inputs[0].text to the one with the text"),
    ):
        _, (first, second), _ = read(tmp_path, put(tmp_path, "a.tfrecord", data * 2))
        assert words in first["error"]
        assert words not in second["error"]


@pytest.mark.parametrize(
    ("data", "kept", "words"),
    [
        (WHOLE[:-1], 3, "truncated: the file ends inside a record of"),
        (WHOLE[: ENDS[3] + 5], 3, "truncated: the file ends 5 bytes into the header"),
        (WHOLE[: ENDS[3] + 12], 3, "truncated: the file ends inside a record of"),
        (flipped(WHOLE, ENDS[2]), 2, "the length of a record is damaged"),
        (flipped(WHOLE, ENDS[2] + 9), 2, "the length of a record is damaged"),
        (flipped(WHOLE, 0), 0, "it does not begin with a record: it is damaged, or no TFRecord file"),
        (b"short", 0, "truncated: the file ends 5 bytes into the header"),
        (b"some text, which is none", 0, "it does not begin with a record"),
        (zlib.compress(WHOLE), 0, "as zlib data does; compress it by gzip instead"),
        (WHOLE + record(b"", 1 << 62), 4, "inside a record of 4,611,686,018,427,387,904 bytes"),
        (WHOLE + record(b"", 1 << 25), 4, "inside a record of 33,554,432 bytes"),
        (b"\xff\xfe" + bytes(30), 0, "it does not begin with a record"),
    ],
)
def test_behind_damage_that_hides_where_records_begin_the_rest_is_lost(
    tmp_path: Path, data: bytes, kept: int, words: str
) -> None:
    for name, stored in (("a.tfrecord", data), ("b.tfrecord.gz", gzip.compress(data))):
        table, (entry,), ledger = read(tmp_path, put(tmp_path, name, stored))
        assert table["text"].to_pylist() == TEXTS[:kept]
        assert (entry["record"], entry["byte_offset"]) == (kept, ENDS[kept])
        assert entry["reason"] == "damaged_file"
        assert words in entry["error"]
        assert f"{kept} records were read before that" in entry["error"]
        assert ledger.quarantined["damaged_file"] == Count(1, len(data) - ENDS[kept])


def test_an_empty_file_has_no_records(tmp_path: Path) -> None:
    for name, data in (("a.tfrecord", b""), ("a.tfrecord.gz", gzip.compress(b""))):
        table, bad, _ = read(tmp_path, put(tmp_path, name, data), allowed=0)
        assert (table.num_rows, bad) == (0, [])


def test_damaged_gzip_costs_its_member_unless_the_recipe_salvages(tmp_path: Path) -> None:
    numbers = range(40, 80)
    more = b"".join(
        record(example(text=texts(random.Random(n).randbytes(300).hex().encode()))) for n in numbers
    )
    packed = gzip.compress(more)
    put(tmp_path, "a.tfrecord.gz", gzip.compress(WHOLE) + packed[: len(packed) // 2])
    table, (entry,), _ = read(tmp_path, "a.tfrecord.gz")
    assert table["text"].to_pylist() == TEXTS
    assert (entry["record"], entry["reason"]) == (4, "damaged_file")
    assert "truncated" in entry["error"]
    with pytest.raises(BuildError, match=r"a\.tfrecord\.gz: record \d+ .*truncated"):
        read(tmp_path, "a.tfrecord.gz", allowed=0)
    notes: list[str] = []
    table, bad, ledger = read(tmp_path, "a.tfrecord.gz", allowed=0, salvage=True, notes=notes)
    assert 10 < table.num_rows - len(TEXTS) < 30
    assert not bad
    assert "salvage keeps" in notes[0]
    assert ledger.dropped["salvage/lost"].documents == 1


def test_bad_text_is_replaced_and_html_extracted_where_the_recipe_says_so(tmp_path: Path) -> None:
    put(tmp_path, "a.tfrecord", record(example(text=texts(b"a\xffb"))))
    table, _, ledger = read(tmp_path, "a.tfrecord", on_bad_text="replace", allowed=0)
    assert table["text"].to_pylist() == ["a\ufffdb"]
    assert ledger.dropped["text/replaced"].bytes == 1
    page = "<html><meta charset=iso-8859-1><body><p>Größe</p></body></html>".encode("latin-1")
    put(tmp_path, "b.tfrecord", record(example(text=texts(page))))
    table, _, _ = read(tmp_path, "b.tfrecord", extract={"resiliparse": {"main_content": False}}, allowed=0)
    assert table["text"].to_pylist() == ["Größe"]


def test_truncated_and_flipped_files_never_raise_anything_else(tmp_path: Path) -> None:
    rng = random.Random(0)
    whole = b"".join(
        record(example_of(number, s=floats(0.5, number), t=texts(b"a", b"b"))) for number in range(4)
    )
    for number in range(400):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        kept = bytes(data if number % 4 else data[: rng.randrange(len(data))])
        kept = repaired(kept) if number % 2 else kept
        read(tmp_path, put(tmp_path, "a.tfrecord", kept), metadata=["n", "s", "t"], limit=4096)


def test_a_field_that_no_record_has_is_an_error(tmp_path: Path, inline_builds: None) -> None:
    build_data(tmp_path, 20)
    with pytest.raises(RecipeError, match=r"metadata\[0\]: no record of .* has a field 'nope'.*number, text"):
        sk.build(build_recipe(tmp_path, metadata=["nope"]), progress=False)


@pytest.mark.parametrize("packed", [False, True])
def test_a_rehearsal_reads_the_beginning_of_a_file(tmp_path: Path, packed: bool) -> None:
    one = record(example(text=texts(random.Random(0).randbytes(30_000).hex().encode())))
    put(tmp_path, "a.tfrecord", gzip.compress(one * 40) if packed else one * 40)
    made = recipe(tmp_path, "a.tfrecord")
    [piece] = choose_pieces(scan_inputs(made), 1 << 16)
    [sample], stored = put_pieces(made, [piece], tmp_path / "sample", cut_anywhere=True)
    assert 0 < stored[0] < (tmp_path / "a.tfrecord").stat().st_size
    [file] = (tmp_path / "sample/0").iterdir()
    table, _, _ = read(file.parent, file.name)
    assert 0 < table.num_rows < 40
    assert sample.is_sample


def test_conversations_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a.tfrecord", WHOLE)
    with pytest.raises(RecipeError, match="this key needs JSON or Parquet"):
        read(tmp_path, "a.tfrecord", messages="text")


def test_a_missing_library_of_checksums_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a.tfrecord", WHOLE)
    put(tmp_path, "a.txt", WHOLE)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(MissingExtraError, match=r"reading TFRecord files needs .*shardkit\[tfrecord\]"):
        read(tmp_path, "a.tfrecord")
    _, (entry,), _ = read(tmp_path, "a.txt")  # recognizing a file needs no library
    assert "it is a TFRecord file" in entry["error"]


def build_data(folder: Path, documents: int) -> None:
    """The same documents as TFRecord files, plain and compressed, and as JSON lines."""
    (folder / "data").mkdir(parents=True)
    train_bpe(map(text_of, range(50))).save(str(folder / "tokenizer.json"))
    for part in range(3):
        numbers = range(part * documents // 3, (part + 1) * documents // 3)
        data = b"".join(record(example(text=texts(text_of(n).encode()), number=ints(n))) for n in numbers)
        (folder / f"data/a.tfrecord-{part:05d}-of-00003").write_bytes(gzip.compress(data) if part else data)
        lines = [json.dumps({"text": text_of(n), "number": n}) + "\n" for n in numbers]
        (folder / f"data/a.jsonl-{part:05d}").write_text("".join(lines))


def build_recipe(folder: Path, output: Any = "out", **inputs: Any) -> Recipe:
    made = {
        "inputs": {"path": "data/*.tfrecord*", "metadata": ["number"]} | inputs,
        "filters": [{"length": {"min_words": 3}}],
        "tokenizer": {"path": "tokenizer.json", "eos": EOS},
        "pack": {"sequence_length": 64},
        "output": output,
    }
    if output != "out":
        del made["tokenizer"], made["pack"]
    return recipe_from_mapping(made, folder=folder)


def texts_of(folder: Path) -> list[tuple[str, str]]:
    return sorted((str(row["text"]), str(row["metadata"])) for row in sk.open(folder))


def test_a_build_reads_what_it_would_read_from_json_lines_and_from_a_store(
    tmp_path: Path, inline_builds: None
) -> None:
    build_data(tmp_path, 90)
    from_records, from_lines = (
        sk.build(build_recipe(tmp_path, output={"path": name, "format": "jsonl"}, **inputs), progress=False)
        for name, inputs in (("records", {}), ("lines", {"path": "data/*.jsonl-*", "format": "jsonl"}))
    )
    assert texts_of(from_records.output) == texts_of(from_lines.output)
    assert len(texts_of(from_records.output)) == 81
    expected = tree(sk.build(build_recipe(tmp_path), progress=False).output)
    with s3_server() as server:
        bucket = server.new_bucket()
        for path in sorted((tmp_path / "data").glob("*.tfrecord*")):
            server.client().put_object(Bucket=bucket, Key=f"data/{path.name}", Body=path.read_bytes())
        remote = build_recipe(tmp_path, path=f"s3://{bucket}/data/*.tfrecord*", base=f"s3://{bucket}")
        stored = tree(sk.build(remote, progress=False, output=tmp_path / "remote").output)
    different = {name for name in expected if stored.get(name) != expected[name]}
    assert different <= {"dataset.json", "report.html"}  # these name the place of the inputs


def test_init_drafts_sets_of_any_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    inline_builds: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    train_bpe(map(text_of, range(50))).save("tokenizer.json")
    pixels = texts(b"\xff\xd8\xff" * 500)
    for folder, name in (("a", "c4-train.tfrecord-{:05d}-of-00003"), ("b", "part-{:05d}-of-00003")):
        for part in range(3):
            rows = [
                example(body=texts(text_of(n).encode() * 9), link=texts(b"http://a/%d" % n), image=pixels)
                for n in range(part * 30, part * 30 + 30)
            ]
            data = b"".join(map(record, rows))
            file = tmp_path / folder / name.format(part)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(gzip.compress(data) if part else data)
    (tmp_path / "a/c4-validation.tfrecord-00000-of-00001").write_bytes(record(example(body=texts(b"x" * 99))))
    assert main(["init", "a", "b", "--output", "r.yaml"]) == 0
    assert "3 files (.tfrecord-*-of-*)" in (tmp_path / "r.yaml").read_text()
    first, second = load_recipe("r.yaml").inputs
    assert (first.path, first.text, first.url, first.format) == ("a", "body", "link", None)
    assert first.exclude == ("c*-validation.tfrecord-*-of-*",)
    assert (second.path, second.text, second.url, second.format) == ("b", "body", "link", "tfrecord")
    capsys.readouterr()
    assert main(["build", "r.yaml", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["funnel"]["read"]["documents"] == 180
