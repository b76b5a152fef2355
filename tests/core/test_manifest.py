"""The manifest: its fingerprint, its names, and large ones as arrays, from index.bin too, nothing unsound."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.repairs import repaired_table
from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.files import open_maps, publish_bytes
from shardkit.formats import mds
from shardkit.formats.mds.index import (
    index_bytes,
    load_table,
    make_columns,
    read_index,
    read_table,
    write_index,
)
from shardkit.loaders import StreamingLoader
from shardkit.loaders.config import Order
from shardkit.manifest import (
    Column,
    FileInfo,
    Files,
    Manifest,
    ShardInfo,
    ShardTable,
    checked_basename,
    merge_columns,
    table_of,
)


def shard(name: str, samples: int, digest: str = "aa", bytes: int = 10) -> ShardInfo:
    return ShardInfo(FileInfo(name, bytes, {"xxh64": digest}), samples)


def test_sample_ids_are_running_numbers_over_the_shards() -> None:
    manifest = Manifest("mds", [shard("a", 3), shard("b", 0), shard("c", 4)])
    assert manifest.shard_starts.tolist() == [0, 3, 3, 7]
    assert manifest.samples == 7


def test_an_empty_dataset_has_no_samples() -> None:
    assert Manifest("tar", []).samples == 0


def test_the_fingerprint_changes_with_every_fact_and_with_the_order() -> None:
    one, two = shard("a", 3), shard("b", 4)
    variants = [
        [one, two],
        [two, one],
        [one],
        [shard("a", 4), two],
        [shard("a", 3, digest="ab"), two],
        [shard("a", 3, bytes=11), two],
        [shard("c", 3), two],
    ]
    prints = [Manifest("mds", shards).fingerprint for shards in variants]
    assert len(set(prints)) == len(variants)
    assert Manifest("mds", [one, two]).fingerprint == prints[0]


def test_the_fingerprint_of_a_dataset_is_pinned() -> None:
    assert Manifest("mds", [shard("shard.00000.mds", 3)]).fingerprint == "941d5026ee817a1ccf6262e217b069cb"


def test_what_was_seen_of_content_without_hashes_is_part_of_the_fingerprint() -> None:
    shards = [ShardInfo(FileInfo("a.tar", 10), 3)]
    prints = [Manifest("tar", shards, seen).fingerprint for seen in ("", "00", "01")]
    assert len(set(prints)) == 3


def test_the_first_hash_of_the_raw_file_by_name_is_part_of_the_fingerprint_or_of_the_stored_one() -> None:
    def of(raw: dict[str, str], stored: dict[str, str]) -> str:
        packed = FileInfo("a.zstd", 5, stored)
        return Manifest("mds", [ShardInfo(FileInfo("a", 10, raw), 3, zip=packed)]).fingerprint

    assert of({"xxh64": "aa", "md5": "bb"}, {"sha1": "cc"}) == of({"md5": "bb"}, {})
    assert of({}, {"sha1": "cc", "xxh64": "dd"}) == of({"sha1": "cc"}, {})
    assert len({of({}, {}), of({"sha1": "cc"}, {}), of({"sha1": "dd"}, {}), of({"md5": "cc"}, {})}) == 4


def test_shards_survive_as_plain_data() -> None:
    for one in (
        shard("a", 3),
        ShardInfo(FileInfo("b", 9), 4, COLUMNS, FileInfo("b.zstd", 5, {"xxh64": "ff"}), "zstd", 1 << 26),
    ):
        assert ShardInfo.from_dict(json.loads(json.dumps(asdict(one)))) == one


def test_columns_of_shards_that_differ_are_merged_by_first_appearance() -> None:
    a, b = Column("a", "ndarray:uint16:8", 16), Column("b", "int", 8)
    longer = Column("a", "ndarray:uint16:9", 18)
    assert merge_columns([(b, a), (b, a), (a,)]) == (b, a)
    assert merge_columns([(a,), (longer, b), (a,)]) == (Column("a", "ndarray"), b)
    assert merge_columns([(a,), (a,), (longer, b)]) == (Column("a", "ndarray"), b)
    assert merge_columns([]) == ()


def test_compression_does_not_change_what_a_dataset_is() -> None:
    plain = shard("shard.00000.mds", 3)
    zipped = ShardInfo(
        plain.raw, 3, zip=FileInfo("shard.00000.mds.zstd", 5, {"xxh64": "ff"}), compression="zstd"
    )
    assert Manifest("mds", [plain]).fingerprint == Manifest("mds", [zipped]).fingerprint


@pytest.mark.parametrize(
    "name",
    [
        *("shard.00000.mds", "part_00/shard.00000.mds", "a b.tar", "ünï.mds", "..a", "x" * 1024),
        *("\ud7ff", "\ue000"),  # beside the surrogates
    ],
)
def test_names_that_stay_in_the_folder_are_taken(name: str) -> None:
    assert checked_basename(name, "index.json") == name


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/etc/passwd", "a/../../x", "a\\b", "c:/x", "./x", ".", "a/."),
        *("", "a\0b", "a\nb", "a\x1fb", "x" * 1025, None, 7, ["a"]),
        *("\ud800", "\udfff", "a\ud800"),
    ],
)
def test_names_that_could_leave_the_folder_are_refused(name: object) -> None:
    with pytest.raises(ShardError, match=r"index\.json"):
        checked_basename(name, "index.json")


# Large ones.

COLUMNS = make_columns({"tokens": "ndarray:uint16:8"})
OTHERS = make_columns({"tokens": "ndarray:uint16:8", "label": "int"})

names = st.from_regex(r"[a-z0-9_-][a-z0-9_.-]{0,9}(/[a-z0-9_-][a-z0-9_.-]{0,5})?", fullmatch=True)
digests = st.binary(min_size=8, max_size=8).map(bytes.hex)


@st.composite
def shard_lists(draw: st.DrawFn) -> list[ShardInfo]:
    count = draw(st.integers(1, 12))
    chosen = draw(st.lists(names, min_size=2 * count, max_size=2 * count, unique=True))
    hashed, packed = draw(st.booleans()), draw(st.booleans())

    def file(name: str) -> FileInfo:
        hashes = {"xxh64": draw(digests), "md5": draw(digests) * 2} if hashed else {}
        return FileInfo(name, draw(st.integers(1000, 1 << 31)), hashes)

    return [
        ShardInfo(
            file(chosen[2 * number]),
            draw(st.integers(0, 200)),
            draw(st.sampled_from([COLUMNS, OTHERS])),
            file(chosen[2 * number + 1]) if packed else None,
            "zstd" if packed else None,
            draw(st.sampled_from([None, 1 << 26])),
        )
        for number in range(count)
    ]


def fingerprint(shards: list[ShardInfo]) -> str:
    return Manifest("mds", shards).fingerprint


@settings(deadline=None, max_examples=60)
@given(shard_lists())
def test_a_table_is_the_list_that_it_was_made_of(shards: list[ShardInfo]) -> None:
    table = table_of(shards, fingerprint(shards))
    assert table is not None
    for one in (table, pickle.loads(pickle.dumps(table))):
        assert list(one) == shards
        assert one == shards
        assert one[-1] == shards[-1]
        assert one[1:5:2] == shards[1:5:2]
        ours, plain = Manifest("mds", one), Manifest("mds", shards)
        assert ours.fingerprint == plain.fingerprint
        assert ours.shard_samples.tolist() == plain.shard_samples.tolist()
        assert ours.raw_bytes.tolist() == plain.raw_bytes.tolist()
        kinds = {(kind.columns, kind.compression, kind.size_limit) for kind in ours.kinds}
        assert kinds == {(kind.columns, kind.compression, kind.size_limit) for kind in plain.kinds}
    with pytest.raises(IndexError):
        table[len(shards)]


DIGEST = {"xxh64": "00" * 8}


@pytest.mark.parametrize(
    ("name", "hashes"),
    [
        # The last is a second file of that name.
        *((name, DIGEST) for name in ("../x", "a//b", "/x", ".x", "x/", "", "é", "a\nb", "first")),
        *(("second", hashes) for hashes in ({}, {"md5": "00" * 16})),
        *(("second", {"xxh64": digest}) for digest in ("AB" * 8, "zz" * 8, "00" * 4)),
    ],
)
def test_what_does_not_fit_stays_a_list(name: str, hashes: dict[str, str]) -> None:
    one = ShardInfo(FileInfo("first", 1000, DIGEST), 5, COLUMNS)
    assert table_of([one], "aa") is not None
    assert table_of([one, ShardInfo(FileInfo(name, 1000, hashes), 5, COLUMNS)], "aa") is None


def test_a_table_has_names_of_any_lengths_up_to_the_limit_and_sizes_from_0_on() -> None:
    first = ShardInfo(FileInfo("first", 1000, DIGEST), 5, COLUMNS)
    for name, size, fits in (("x" * 1024, 0, True), ("x" * 1025, 0, False), ("second", -1, False)):
        shards = [first, ShardInfo(FileInfo(name, size, DIGEST), 5, COLUMNS)]
        for order in (shards, shards[::-1]):
            table = table_of(order, "aa")
            assert (table is not None) == fits
            assert table is None or list(table) == order


@pytest.mark.parametrize("names", [b"", b"a", b"a\nb", b"a\nb\n", b"ab\ncd\n"])
def test_a_table_of_one_shard_has_one_name_with_a_newline_behind_it(names: bytes) -> None:
    assert not Files(np.frombuffer(names, dtype=np.uint8), np.array([5]), (), ()).are_sound()


@pytest.mark.parametrize("names", [b"\na\nb\n", b"a\nb\n\n", b"\n\n\n", b"a\nb\nb\n", b"aa\nb\nb\n"])
def test_names_of_a_table_are_not_empty_and_differ(names: bytes) -> None:
    assert not Files(np.frombuffer(names, dtype=np.uint8), np.array([5, 5, 5]), (), ()).are_sound()


@pytest.mark.parametrize(("names", "is_sound"), [(b"ab\n", True), (b"a\xff\n", False), (b"a\x80\n", False)])
def test_names_of_a_table_are_of_plain_characters(names: bytes, is_sound: bool) -> None:
    files = Files(np.frombuffer(names, dtype=np.uint8), np.array([5]), (), ())
    assert files.are_sound() == is_sound


def test_shards_that_are_compressed_in_part_or_have_odd_digests_stay_a_list() -> None:
    plain = ShardInfo(FileInfo("first", 1000, DIGEST), 5, COLUMNS)
    packed = ShardInfo(FileInfo("second", 1000, DIGEST), 5, COLUMNS, FileInfo("b", 9, DIGEST), "zstd")
    assert table_of([packed], "aa") == [packed]
    assert table_of([plain, packed], "aa") is None
    assert table_of([packed, plain], "aa") is None
    assert table_of([], "aa") is None
    odd = {"xxh64": "abc"}  # two of which are three bytes
    assert table_of([ShardInfo(FileInfo(name, 9, odd), 5, COLUMNS) for name in "ab"], "aa") is None


def test_a_table_differs_from_a_list_in_which_one_shard_differs() -> None:
    table = table_of(many(), "aa")
    assert table == many()
    assert table != many()[:-1]
    assert table != [*many()[:-1], shard("other", 3)]
    assert table != [shard("other", 3), *many()[1:]]
    assert table != dict(enumerate(many()))


def many(count: int = 40) -> list[ShardInfo]:
    return [
        ShardInfo(FileInfo(f"shard.{i:05d}.mds", 2000 + i, {"xxh64": f"{i:016x}"}), 7 + i % 3, COLUMNS)
        for i in range(count)
    ]


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the index of a dataset that counts as large."""
    monkeypatch.setattr("shardkit.formats.mds.index.TABLE_SHARDS", 20)
    write_index(tmp_path, many())
    return tmp_path


def test_index_bin_is_read_in_place_of_the_index(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (large / "index.json").read_bytes() == index_bytes(many())
    with monkeypatch.context() as patch:
        patch.setattr("shardkit.formats.mds.index.parse_index", None)
        manifest = read_index(large)
    assert isinstance(manifest.shards, ShardTable)
    assert manifest.shards == many()
    assert manifest.fingerprint == fingerprint(many())


def test_the_same_shards_give_the_same_file(large: Path, tmp_path: Path) -> None:
    first = (large / "index.bin").read_bytes()
    write_index(large, read_index(large).shards)
    assert (large / "index.bin").read_bytes() == first


def test_without_it_a_large_index_becomes_a_table_too(large: Path) -> None:
    (large / "index.bin").unlink()
    assert isinstance(read_index(large).shards, ShardTable)
    assert read_index(large).shards == many()


def test_it_goes_with_a_dataset_that_is_not_large_any_more(large: Path) -> None:
    write_index(large, many(5))
    assert not (large / "index.bin").exists()
    assert list(read_index(large).shards) == many(5)


def test_it_counts_only_for_the_index_that_it_was_made_of(large: Path) -> None:
    other = many()
    other[3] = ShardInfo(FileInfo("shard.00003.mds", 2003, {"xxh64": "f" * 16}), 7, COLUMNS)
    (large / "index.json").write_bytes(index_bytes(other))
    assert list(read_index(large).shards) == other


def changed(
    header: Callable[[dict[str, Any]], object] | None = None, **arrays: Any
) -> Callable[[bytes], bytes]:
    """A file like index.bin with other contents."""

    def change(data: bytes) -> bytes:
        with np.load(io.BytesIO(data)) as loaded:
            found = dict(loaded)
        if header is not None:
            text = json.loads(found["header"].tobytes())
            header(text)
            found["header"] = np.frombuffer(json.dumps(text).encode(), dtype=np.uint8)
        for name, change_array in arrays.items():
            found[name] = change_array(found[name])
        buffer = io.BytesIO()
        np.savez(buffer, **found)
        return buffer.getvalue()

    return change


def named(name: bytes) -> Callable[[Any], Any]:
    """The first shard called otherwise, in as many bytes."""
    return lambda names: np.concatenate([np.frombuffer(name, dtype=np.uint8), names[len(name) :]])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-30],
        lambda data: b"PK" + b"\0" * 100,
        lambda data: data[:900] + bytes([data[900] ^ 1]) + data[901:],
        changed(lambda header: header.update(version=2)),
        changed(lambda header: header.update(kinds=[])),
        changed(lambda header: header.update(kinds=[{"format": "mds"}])),
        changed(lambda header: header.update(hashes={"raw": ["crc"]})),
        changed(lambda header: header.update(fingerprint=5)),
        changed(samples=lambda a: a * 1000),
        changed(samples=lambda a: -a),
        changed(samples=lambda a: a[:-1]),
        changed(samples=lambda a: a.astype(float)),
        changed(kind=lambda a: a + 1),
        changed(kind=lambda a: a - 1),
        changed(raw_sizes=lambda a: a - 5000),
        changed(raw_sizes=lambda a: a + (1 << 40)),
        changed(raw_xxh64=lambda a: a[:-1]),
        changed(raw_names=lambda a: a[:-1]),
        changed(raw_names=named(b"../")),
        changed(raw_names=named(b"/x")),
        changed(raw_names=named(b"shard.00001.mds")),
        changed(raw_names=lambda a: np.array([object()] * len(a))),
        lambda data: repaired_table(data.replace(b"'shape': (", b"'shape': [")),
        lambda data: repaired_table(data.replace(b"'descr': '", b"'descr': (")),
        lambda data: repaired_table(data.replace(b", }", b"(((")),
    ],
)
def test_a_damaged_or_hostile_one_is_passed_over(large: Path, damage: Callable[[bytes], bytes]) -> None:
    file = large / "index.bin"
    file.write_bytes(damage(file.read_bytes()))
    found = read_table(large / "index.json")
    assert found is None or found == many(), "what is not sound must not be used"
    assert list(read_index(large).shards) == many()


def test_one_with_a_header_beyond_reason_is_passed_over(large: Path) -> None:
    file = large / "index.bin"
    file.write_bytes(changed(lambda header: header.update(more="x" * (1 << 24)))(file.read_bytes()))
    assert read_table(large / "index.json") is None
    assert list(read_index(large).shards) == many()


def test_a_table_of_a_file_is_a_map_of_it_which_is_compared_with_its_checksums(large: Path) -> None:
    file = large / "index.bin"
    before = open_maps()
    table = load_table(file, is_proved=True)
    assert table is not None
    assert open_maps() == before + 1
    arrays: list[Any] = [table.samples, table.kind, table.raw.names, table.raw.sizes, *table.raw.digests]
    assert not any(array.flags.owndata or array.flags.writeable for array in arrays)
    assert table == many()
    del table, arrays
    assert open_maps() == before
    data = bytearray(file.read_bytes())
    with ZipFile(file) as members:
        begins = [member.header_offset + 200 for member in members.infolist()]
    for begin in begins:
        file.write_bytes(data[:begin] + bytes([data[begin] ^ 1]) + data[begin + 1 :])
        assert load_table(file, is_proved=True) is None


def test_a_loader_reads_a_large_dataset_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(8 * 60, dtype=np.uint16).reshape(60, 8)
    infos = [mds.write_rows_shard(tmp_path, f"shard.{i:05d}.mds", rows[2 * i : 2 * i + 2]) for i in range(30)]

    def run() -> list[list[list[int]]]:
        loader = StreamingLoader(
            open_dataset(tmp_path), batch_size=6, rank=0, world_size=1, order=Order(window=4)
        )
        return [batch["tokens"].tolist() for batch in loader]

    mds.write_index(tmp_path, infos)
    assert not (tmp_path / "index.bin").exists()
    expected = run()
    monkeypatch.setattr("shardkit.formats.mds.index.TABLE_SHARDS", 20)
    mds.write_index(tmp_path, infos)
    assert (tmp_path / "index.bin").exists()
    assert isinstance(open_dataset(tmp_path).manifest.shards, ShardTable)
    assert run() == expected


def test_publishing_replaces_a_file_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    publish_bytes(tmp_path / "index.json", b"one")
    publish_bytes(tmp_path / "index.json", b"two")
    assert (tmp_path / "index.json").read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["index.json"]


def test_several_may_publish_a_file_at_once(tmp_path: Path) -> None:
    texts = [bytes([number]) * 100_000 for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: publish_bytes(tmp_path / "index.json", text), texts))
    assert (tmp_path / "index.json").read_bytes() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["index.json"]
