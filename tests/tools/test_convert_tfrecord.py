"""TFRecord files, written here byte by byte, become columns or rows of tokens; damage is located."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from shardkit import open_dataset
from shardkit.errors import MissingExtraError, ShardError
from shardkit.formats.tfrecord import is_tfrecord_name, parse_example
from shardkit.tools.convert import CutOptions, OutputOptions, convert
from support.tfrecords import example, field, floats, ints, record, texts, write


def samples(folder: Path) -> list[dict[str, Any]]:
    """All samples with arrays as lists."""
    plain = []
    for sample in open_dataset(folder):
        plain.append({k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in sample.items()})
    return plain


EXTREMES = [0, 1, -1, 127, 128, 300, 2**63 - 1, -(2**63), 50256]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecords.gz", "a.tfrecord-00000-of-00001"])
def test_each_kind_of_feature_becomes_the_column_that_holds_it(
    name: str, packed: bool, tmp_path: Path
) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (3, 2)).save(stream, format="JPEG")
    jpeg = stream.getvalue()
    written = [
        example(
            label=ints(7 - n, packed=packed),
            score=floats(0.25 + n, packed=packed),
            ids=ints(*EXTREMES[: n + 3], packed=packed),
            box=floats(0, 0.5, 1, 1.5, packed=packed),
            text=texts(f"höhe {n}".encode()),
            raw=texts(b"\xff\x00" + bytes([n])),
            image=texts(jpeg),
            tags=texts(*[b"a", b"b"][:n]),
            **({"maybe": ints(n, packed=packed)} if n % 2 else {}),
        )
        for n in range(7)
    ]
    done = convert(write(tmp_path / name, written), tmp_path / "out", progress=False)
    assert done.source_format == "tfrecord"
    assert done.verified
    assert dict(done.columns) == {
        "box": "ndarray:float32:4", "ids": "ndarray:int64", "image": "jpeg", "label": "int", "maybe": "json",
        "raw": "bytes", "score": "float32", "tags": "json", "text": "str",
    }  # fmt: skip
    with open_dataset(tmp_path / "out") as dataset:
        shard: Any = dataset.shard(0)
        assert [bytes(shard.payloads(n)["image"]) for n in range(7)] == [jpeg] * 7
    plain = ["ids", "label", "maybe", "tags", "text", "raw", "score"]
    convert(tmp_path / name, tmp_path / "plain", columns=plain, progress=False)
    assert samples(tmp_path / "plain") == [
        {
            "ids": EXTREMES[: n + 3], "label": 7 - n, "maybe": [n] if n % 2 else [], "tags": ["a", "b"][:n],
            "text": f"höhe {n}", "raw": b"\xff\x00" + bytes([n]), "score": 0.25 + n,
        }
        for n in range(7)
    ]  # fmt: skip


def test_the_sets_of_a_folder_are_kept_apart_and_must_be_whole(tmp_path: Path) -> None:
    data = tmp_path / "c4"
    data.mkdir()
    for number in range(3):
        write(data / f"c4-train.tfrecord-{number:05d}-of-00003", [example(text=texts(b"%d" % number))] * 2)
    (data / "dataset_info.json").write_text("{}")
    convert(data, tmp_path / "out", progress=False)
    assert [s["text"] for s in samples(tmp_path / "out")] == ["0", "0", "1", "1", "2", "2"]
    card = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert len(card["converted_from"]["files"]) == 3
    other = write(data / "c4-test.tfrecord-00000-of-00001", [example(text=texts(b"t"))])
    with pytest.raises(ShardError, match=r"several sets of files \(c4-test\.tfrecord, c4-train\.tfrecord\)"):
        convert(data, tmp_path / "both", progress=False)
    other.unlink()
    (data / "c4-train.tfrecord-00001-of-00003").unlink()
    with pytest.raises(ShardError, match=r"has 2 of the 3 files .* not number 1"):
        convert(data, tmp_path / "part", progress=False)
    convert(str(data / "c4-train.tfrecord-*"), tmp_path / "chosen", progress=False)
    assert [s["text"] for s in samples(tmp_path / "chosen")] == ["0", "0", "2", "2"]


def test_tokens_are_cut_to_rows(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4, 5, 6, 70_000], [7]]
    file = write(
        tmp_path / "a.tfrecord",
        [example(input_ids=ints(*d), mask=ints(*[1] * len(d)), url=texts(b"u")) for d in documents],
    )
    cut = CutOptions(sequence_length=4, eos=0)
    done = convert(file, tmp_path / "out", cut=cut, progress=False)
    assert [s["tokens"] for s in samples(tmp_path / "out")] == [[1, 2, 3, 0], [4, 5, 6, 70_000], [0, 7, 0, 0]]
    assert list(done.left_out) == ["mask", "url"]
    convert(file, tmp_path / "kept", cut=CutOptions(keep_lengths=True), progress=False)
    assert [s["tokens"] for s in samples(tmp_path / "kept")] == documents
    with pytest.raises(ShardError, match="has no feature 'nope'; its features: input_ids, mask, url"):
        convert(file, tmp_path / "no", cut=cut, columns=["nope"], progress=False)
    with pytest.raises(ShardError, match="'url' holds bytes values, not int64 tokens"):
        convert(file, tmp_path / "no", cut=cut, columns=["url"], progress=False)


def test_the_columns_become_members_of_tars_too(tmp_path: Path) -> None:
    file = write(tmp_path / "a.tfrecord", [example(text=texts(b"x"), ids=ints(1, n)) for n in range(3)])
    convert(file, tmp_path / "tars", output=OutputOptions(format="wds"), progress=False)
    convert(tmp_path / "tars", tmp_path / "back", progress=False)
    assert samples(tmp_path / "back") == [{"text": "x", "ids": [1, n]} for n in range(3)]


WHOLE = record(example(a=ints(1))) + record(example(a=ints(2)))
FIRST = len(WHOLE) // 2


def _flip(place: int) -> bytes:
    return WHOLE[:place] + bytes([WHOLE[place] ^ 4]) + WHOLE[place + 1 :]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (WHOLE[:-1], f"byte {FIRST}: ends inside a record of"),
        (WHOLE[: FIRST + 5], f"byte {FIRST}: ends 5 bytes into the header"),
        (_flip(0), "byte 0: does not begin with a record"),
        (_flip(FIRST), f"byte {FIRST}: has a length with a wrong checksum"),
        (_flip(FIRST + 9), f"byte {FIRST}: has a length with a wrong checksum"),
        (_flip(FIRST + 13), f"byte {FIRST}: has a damaged record"),
        (_flip(len(WHOLE) - 1), f"byte {FIRST}: has a damaged record"),
        (WHOLE + record(b"", 1 << 62), f"byte {2 * FIRST}: states a record of 4,611,686,018,427,387,904"),
        (WHOLE + record(b"", (1 << 31) - 1), f"byte {2 * FIRST}: ends inside a record of 2,147,483,647"),
        (gzip.compress(WHOLE, mtime=0)[:-9], "byte .*damaged or truncated gzip data"),
        (gzip.compress(WHOLE, mtime=0)[:-6] + b"abcdef", "damaged or truncated gzip data: CRC check failed"),
        (gzip.compress(WHOLE[:-3], mtime=0), f"byte {FIRST}: ends inside a record"),
        (b"", "has no records"),
        (WHOLE + record(b"text of another kind"), rf"record 2 at byte {2 * FIRST}: is not a valid tf\.train"),
        (WHOLE + record(example(a=floats(1))), r"'a' holds float values, but int64 ones in .*record 0"),
        (WHOLE + record(example(b=texts(b"\xff", b"x"))), r"'b' has 0 to 2 bytes values a record"),
        (record(example()) * 2, "has 2 records without any feature"),
        (record(example(__key__=ints(1))), "'__key__' has the name of a sample's key"),
    ],
)
def test_damage_is_refused_with_its_place(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.tfrecord"
    file.write_bytes(data)
    with pytest.raises(ShardError, match=message) as raised:
        convert(file, tmp_path / "out", progress=False)
    assert str(file) in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (field(1, b"") + field(2, b""), "SequenceExample"),
        (field(3, b""), "Example has no field 3"),
        (b"\x08\x01", "field 1 of Example has wire type 0"),
        (b"\x0b", "wire type 3"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "behind it"),
        (b"\xff" * 11, "more than 10 bytes"),
        (b"\xff", "cut off"),
        (field(1, field(1, field(1, b"\xff") + field(2, ints(1)))), "not UTF-8"),
        (example(a=field(4, b"")), "Feature has no field 4"),
        (example(a=field(2, field(1, b"123"))), "not a multiple of 4"),
        (example(a=field(3, field(1, b"\x80"))), "cut off"),
        (example(a=field(3, field(1, b"\x80" * 40))), "ends inside a number"),
        (example(a=field(3, field(1, b"\x80" * 40 + b"\x01"))), "more than 10 bytes"),
        (example(a=field(1, field(2, b"x"))), "BytesList has no field 2"),
    ],
)
def test_damaged_messages_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_example(data)


def test_repeated_parts_of_messages_are_merged_as_protobuf_merges_them() -> None:
    many = list(range(-40, 40))
    merged = parse_example(example(a=ints(1)) + example(a=ints(*many) + ints(5, packed=False) + ints(6)))
    assert merged["a"].values.tolist() == [*many, 5, 6]  # type: ignore[union-attr]
    assert parse_example(example(a=ints(1) + texts(b"x")))["a"].values == [b"x"]
    assert parse_example(example(a=b""))["a"].kind is None


def test_no_flipped_byte_of_a_message_raises_another_error() -> None:
    data = example(a=ints(*EXTREMES), b=floats(1, 2), c=texts(b"x", b"y"))
    check: Callable[[bytes], object] = parse_example
    for place in range(len(data)):
        for value in range(256):
            try:
                check(data[:place] + bytes([value]) + data[place + 1 :])
            except ValueError:
                continue


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("a.tfrecord", True), ("a.tfrecords", True), ("c4-train.tfrecord-00000-of-01024", True),
        ("a-00000-of-00002.tfrecord.gz", True), ("a.tfrecord.index", False), ("tfrecord", False),
    ],
)  # fmt: skip
def test_names_of_tfrecord_files(name: str, is_one: bool) -> None:
    assert is_tfrecord_name(name) is is_one


def test_a_missing_library_of_checksums_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.tfrecord", [example(a=ints(1))])
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(MissingExtraError, match=r"reading TFRecord files needs .*shardkit\[tfrecord\]"):
        convert(file, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    "cut",
    [
        CutOptions(dtype="uint16"), CutOptions(keep_lengths=True), CutOptions(sequence_length=2, eos=0),
        CutOptions(sequence_length=2, drop_tail=True, per_file=True),
    ],
)  # fmt: skip
def test_files_without_records_add_nothing(cut: CutOptions, tmp_path: Path) -> None:
    for number, records in enumerate([[], [[1, 0], [2, 0]], [], [[3, 0]], []]):
        write(tmp_path / f"{number}.tfrecord", [example(tokens=ints(*r)) for r in records])
    done = convert(str(tmp_path / "*.tfrecord"), tmp_path / "out", cut=cut, progress=False)
    assert [s["tokens"] for s in samples(tmp_path / "out")] == [[1, 0], [2, 0], [3, 0]]
    assert done.counts["documents"] == 3
