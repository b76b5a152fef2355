from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import ShardError
from shardkit.formats.mds.index import config_bytes, make_columns, parse_columns, read_index, write_index
from shardkit.manifest import Column, FileInfo, Manifest, ShardInfo
from support import peers

COLUMNS = make_columns({"tokens": "ndarray:uint16:8", "id": "str"})
SHARDS = [
    ShardInfo(FileInfo("shard.00000.mds", 200, {"sha1": "ab"}), 5, COLUMNS, size_limit=1 << 26),
    ShardInfo(
        FileInfo("part_01/shard.00000.mds", 300, {}),
        0,
        COLUMNS,
        FileInfo("part_01/shard.00000.mds.zstd", 90, {"xxh64": "cd"}),
        "zstd:7",
    ),
]


def index_of(*, samples: int = 3) -> dict[str, Any]:
    return {
        "version": 2,
        "shards": [
            {
                "column_encodings": ["int", "str"],
                "column_names": ["n", "s"],
                "column_sizes": [8, None],
                "compression": "zstd",
                "format": "mds",
                "hashes": ["sha1"],
                "raw_data": {"basename": f"shard.{k:05}.mds", "bytes": 400, "hashes": {"sha1": "00"}},
                "samples": samples,
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": {"basename": f"shard.{k:05}.mds.zstd", "bytes": 90, "hashes": {"sha1": "00"}},
            }
            for k in range(2)
        ],
    }


def read(folder: Path, index: object) -> Manifest:
    (folder / "index.json").write_text(json.dumps(index))
    return read_index(folder)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write_index(tmp_path, SHARDS)
    manifest = read_index(tmp_path)
    assert manifest == Manifest("mds", SHARDS)
    assert read_index(tmp_path / "index.json") == manifest
    assert [file.name for file in tmp_path.iterdir()] == ["index.json"]


def test_numpy_numbers_are_written_as_numbers(tmp_path: Path) -> None:
    info = ShardInfo(FileInfo("a.mds", np.int64(99)), np.int32(4), COLUMNS, size_limit=np.uint16(7))  # type: ignore[arg-type]
    write_index(tmp_path, [info])
    assert read_index(tmp_path).shards == [info]


def test_an_index_merged_by_mosaicml_is_read_with_its_sub_folders(tmp_path: Path) -> None:
    for part in range(2):
        peers.write_with_streaming(tmp_path / f"part_{part:02}", {"n": "int"}, [{"n": part}], hashes=["md5"])
    peers.import_streaming().base.util.merge_index(str(tmp_path), keep_local=True)
    manifest = read_index(tmp_path)
    assert sorted(s.raw.basename for s in manifest.shards) == [
        "part_00/shard.00000.mds",
        "part_01/shard.00000.mds",
    ]
    assert manifest.samples == 2


def test_a_rewritten_index_has_the_bytes_of_mosaicmls(tmp_path: Path) -> None:
    peers.write_with_streaming(
        tmp_path,
        {"s": "str", "n": "int"},
        [{"s": "x", "n": 1}] * 5,
        compression="gz:3",
        hashes=["md5", "xxh64"],
        size_limit=300,
    )
    before = (tmp_path / "index.json").read_bytes()
    write_index(tmp_path, read_index(tmp_path).shards)
    assert (tmp_path / "index.json").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "expected"), [("64mb", 64 << 20), ("2048", 2048), ("100kb", 100 << 10), ("7b", 7)]
)
def test_sizes_in_mosaicmls_words_are_understood(tmp_path: Path, text: str, expected: int) -> None:
    index = index_of()
    index["shards"][0]["size_limit"] = text
    assert read(tmp_path, index).shards[0].size_limit == expected


def edit(*path: str | int, to: object) -> Callable[[dict[str, Any]], None]:
    def change(index: Any) -> None:
        for key in path[:-1]:
            index = index[key]
        index[path[-1]] = to

    return change


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    def change(index: dict[str, Any]) -> None:
        del index["shards"][1][key]

    return change


SHARD = ("shards", 1)
HOSTILE: list[Callable[[dict[str, Any]], None]] = [
    edit("version", to=1),
    edit("version", to=True),
    edit("shards", to={}),
    edit(*SHARD, to=None),
    edit(*SHARD, "version", to=3),
    edit(*SHARD, "format", to="csv"),
    edit(*SHARD, "samples", to=-1),
    edit(*SHARD, "samples", to=3.0),
    edit(*SHARD, "samples", to=True),
    edit(*SHARD, "samples", to=101),  # more than 400 bytes can hold
    edit(*SHARD, "samples", to=10**30),
    edit(*SHARD, "size_limit", to=-5),
    edit(*SHARD, "size_limit", to="large"),
    edit(*SHARD, "size_limit", to=[]),
    edit(*SHARD, "hashes", to="sha1"),
    edit(*SHARD, "hashes", to=["shake_128"]),
    edit(*SHARD, "hashes", to=[["sha1"]]),
    edit(*SHARD, "compression", to="zip"),
    edit(*SHARD, "compression", to="zstd:99"),
    edit(*SHARD, "compression", to=None),  # but zip_data is there
    edit(*SHARD, "compression", to=["zstd"]),
    edit(*SHARD, "column_names", to=["n"]),
    edit(*SHARD, "column_names", to=["n", "n"]),
    edit(*SHARD, "column_names", to=["n", 5]),
    edit(*SHARD, "column_names", to=[["n"], {}]),
    edit(*SHARD, "column_names", to=5),
    edit(*SHARD, "column_names", to="ns"),
    edit(*SHARD, "column_encodings", to=["int", "string"]),
    edit(*SHARD, "column_encodings", to=["int", None]),
    edit(*SHARD, "column_sizes", to=[4, None]),
    edit(*SHARD, "column_sizes", to=[8, 3]),
    edit(*SHARD, "column_sizes", to=[None, None]),
    edit(*SHARD, "column_sizes", to=[8.5, None]),
    edit(*SHARD, "raw_data", to=None),
    edit(*SHARD, "raw_data", to=[]),
    edit(*SHARD, "raw_data", "bytes", to="400"),
    edit(*SHARD, "raw_data", "bytes", to=-400),
    edit(*SHARD, "raw_data", "bytes", to=1 << 32),
    edit(*SHARD, "raw_data", "hashes", to=None),
    edit(*SHARD, "raw_data", "hashes", to={"sha1": 5}),
    edit(*SHARD, "raw_data", "hashes", to={"nope": "00"}),
    edit(*SHARD, "raw_data", "basename", to="../shard.mds"),
    edit(*SHARD, "raw_data", "basename", to="/etc/passwd"),
    edit(*SHARD, "raw_data", "basename", to="a/../../b"),
    edit(*SHARD, "raw_data", "basename", to="c:\\b"),
    edit(*SHARD, "raw_data", "basename", to="a\0b"),
    edit(*SHARD, "raw_data", "basename", to="\ud800"),
    edit(*SHARD, "raw_data", "basename", to=""),
    edit(*SHARD, "raw_data", "basename", to=None),
    edit(*SHARD, "raw_data", "basename", to="shard.00000.mds"),  # twice
    edit(*SHARD, "zip_data", "basename", to="../x"),
    edit(*SHARD, "zip_data", "bytes", to=None),
    *[drop(key) for key in index_of()["shards"][0]],
]


@pytest.mark.parametrize("change", HOSTILE, ids=range(len(HOSTILE)))
def test_an_index_that_lies_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    index = index_of()
    assert read(tmp_path, index).samples == 6
    change(index)
    with pytest.raises(ShardError, match=r"index\.json"):
        read(tmp_path, index)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"version": 2}', b"9" * 9_999]
)
def test_what_is_no_index_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "index.json").write_bytes(text)
    with pytest.raises(ShardError, match=r"index\.json"):
        read_index(tmp_path)


def test_a_missing_index_and_a_pipe_in_its_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no such index"):
        read_index(tmp_path)
    os.mkfifo(tmp_path / "index.json")  # reading it would wait for ever
    with pytest.raises(ShardError, match="no such index"):
        read_index(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
PATHS = [(), ("version",), ("shards",), SHARD, *[(*SHARD, key) for key in index_of()["shards"][0]]]
PATHS += [(*SHARD, part, key) for part in ("raw_data", "zip_data") for key in ("basename", "bytes", "hashes")]


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_any_value_anywhere_gives_a_manifest_or_a_shard_error(
    tmp_path_factory: pytest.TempPathFactory, path: tuple[str | int, ...], value: object
) -> None:
    index: Any = index_of()
    if path:
        edit(*path, to=copy.deepcopy(value))(index)
    else:
        index = value
    folder = tmp_path_factory.getbasetemp()
    try:
        manifest = read(folder, index)
    except ShardError:
        return
    assert manifest.samples >= 0
    assert len(manifest.fingerprint) == 32


@pytest.mark.extended
def test_a_large_index_opens_in_time_that_grows_with_the_shards_only(tmp_path: Path) -> None:
    shards = [
        ShardInfo(FileInfo(f"p/shard.{k:07}.mds", 10**6), 99, COLUMNS, size_limit=1 << 26)
        for k in range(30_000)
    ]
    write_index(tmp_path, shards)
    start = time.perf_counter()
    assert read_index(tmp_path).samples == 99 * 30_000
    assert time.perf_counter() - start < 5  # about 0.3 s on an idle core


def test_columns_are_sorted_by_name_and_carry_their_sizes() -> None:
    assert list(COLUMNS) == [Column("id", "str"), Column("tokens", "ndarray:uint16:8", 16)]
    config = json.loads(config_bytes(COLUMNS, None, ["xxh64", "sha1"], None))
    assert parse_columns(Path("f"), config) == COLUMNS
    assert config["hashes"] == ["sha1", "xxh64"]
