from __future__ import annotations

import copy
import json
import os
import time
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


def edit(index: Any, path: tuple[str | int, ...], value: object) -> None:
    for key in path[:-1]:
        index = index[key]
    index[path[-1]] = value


SHARD = ("shards", 1)
RAW, ZIP = (*SHARD, "raw_data"), (*SHARD, "zip_data")
ENTRY = index_of()["shards"][1]
HOSTILE: dict[tuple[str | int, ...], list[object]] = {
    ("version",): [1, True],
    ("shards",): [{}],
    SHARD: [
        None,
        *({key: ENTRY[key] for key in ENTRY if key != missing} for missing in ENTRY),
    ],
    (*SHARD, "version"): [3],
    (*SHARD, "format"): ["csv"],
    (*SHARD, "samples"): [-1, 3.0, True, 101, 10**30],  # its 400 bytes cannot hold 101
    (*SHARD, "size_limit"): [-5, "large", []],
    (*SHARD, "hashes"): ["sha1", ["shake_128"], [["sha1"]]],
    (*SHARD, "compression"): ["zip", "zstd:99", None, ["zstd"]],  # zip_data is there
    (*SHARD, "column_names"): [["n"], ["n", "n"], ["n", 5], [["n"], {}], 5, "ns"],
    (*SHARD, "column_encodings"): [["int", "string"], ["int", None]],
    (*SHARD, "column_sizes"): [[4, None], [8, 3], [None, None], [8.5, None]],
    RAW: [None, []],
    (*RAW, "bytes"): ["400", -400, 1 << 32],
    (*RAW, "hashes"): [None, {"sha1": 5}, {"nope": "00"}],
    (*RAW, "basename"): [
        *("../shard.mds", "/etc/passwd", "a/../../b", "c:\\b", "a\0b", "\ud800", "", None),
        "shard.00000.mds",  # twice
    ],
    (*ZIP, "basename"): ["../x"],
    (*ZIP, "bytes"): [None],
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in HOSTILE.items() for value in values]
)
def test_an_index_that_lies_is_refused_by_name(
    tmp_path: Path, path: tuple[str | int, ...], value: object
) -> None:
    index = index_of()
    assert read(tmp_path, index).samples == 6
    edit(index, path, value)
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
PATHS = [(), ("version",), ("shards",), SHARD, *[(*SHARD, key) for key in ENTRY]]
PATHS += [(*part, key) for part in (RAW, ZIP) for key in ("basename", "bytes", "hashes")]


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_any_value_anywhere_gives_a_manifest_or_a_shard_error(
    tmp_path_factory: pytest.TempPathFactory, path: tuple[str | int, ...], value: object
) -> None:
    index: Any = index_of()
    if path:
        edit(index, path, copy.deepcopy(value))
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
