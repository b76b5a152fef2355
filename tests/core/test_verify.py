"""Verification finds any changed byte and any false word of a card; test_locate has it in every store."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.datasets.verify import VerifyReport, verify
from shardkit.errors import ShardError
from shardkit.formats import mds, tar
from shardkit.formats.mds.index import TABLE_SHARDS
from shardkit.manifest import ShardInfo

ROWS = np.arange(40 * 16, dtype=np.uint16).reshape(40, 16)
FORMATS = ["mds", "mds.zstd", "tar"]


def write_dataset(folder: Path, format: str, hashes: tuple[str, ...] = ("xxh64",)) -> Path:
    folder.mkdir()
    shards: list[ShardInfo] = []
    for number in range(4):
        rows = ROWS[number * 10 : number * 10 + 10]
        if format == "tar":
            name = f"shard-{number:05d}.tar"
            shards.append(tar.write_rows_shard(folder, name, rows, key_start=number * 10, hashes=hashes))
        else:
            compression = "zstd" if format == "mds.zstd" else None
            name = f"shard.{number:05d}.mds"
            shards.append(mds.write_rows_shard(folder, name, rows, compression=compression, hashes=hashes))
    (tar.write_shard_list if format == "tar" else mds.write_index)(folder, shards)
    return folder


def second_shard(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if "00001" in path.name)


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_bit_anywhere_is_found_and_its_shard_named(tmp_path: Path, format: str) -> None:
    folder = write_dataset(tmp_path / "d", format)
    shard = second_shard(folder)
    whole = shard.read_bytes()
    for place in np.linspace(0, len(whole) - 1, 25).astype(int).tolist():
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        report = verify(folder)
        assert [problem.file for problem in report.problems] == [shard.name], place
        assert not report.ok
    shard.write_bytes(whole)
    assert verify(folder).ok


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("quick", [False, True])
def test_a_folder_in_the_place_of_a_shard_is_named(tmp_path: Path, format: str, quick: bool) -> None:
    folder = write_dataset(tmp_path / "d", format)
    shard = second_shard(folder)
    shard.unlink()
    shard.mkdir()
    report = verify(folder, quick=quick, threads=1)
    assert [problem.file for problem in report.problems] == [shard.name]


def test_without_hashes_damaged_samples_are_found_by_reading_them(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    with mds.MdsWriter(folder, columns={"name": "str", "n": "int"}, hashes=()) as writer:
        for n in range(20):
            writer.write({"name": "a" * n, "n": n})
    mds.write_index(folder, writer.finish().shards)  # without checksums of blocks, as others write it
    assert verify(folder).ok
    shard = next(folder.glob("*.mds"))
    data = bytearray(shard.read_bytes())
    position = data.rindex(b"aaa")
    data[position] = 0xFF  # not UTF-8 any more
    shard.write_bytes(data)
    report = verify(folder)
    assert [problem.file for problem in report.problems] == [shard.name]
    assert "name" in report.problems[0].problem
    assert verify(folder, quick=True).ok  # it says that it reads no sample


def card_of(folder: Path) -> dict[str, Any]:
    report = verify(folder)
    return {"fingerprint": report.fingerprint, "samples": 40, "shards": 4, "format": "mds", "dtype": "uint16",
            "sequence_length": 16, "tokens": 630, "padding": 10}  # fmt: skip


def with_card(folder: Path, card: dict[str, Any]) -> VerifyReport:
    (folder / "dataset.json").write_text(json.dumps(card))
    return verify(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": "00"}, "fingerprint is '00'"),
        ({"samples": 41}, "samples is 41, but the shards have 40"),
        ({"shards": 5}, "shards is 5, but the shards have 4"),
        ({"sequence_length": 8}, "sequence_length is 8, but the shards have 16"),
        ({"dtype": "uint32"}, "dtype is 'uint32'"),
        ({"tokens": 631}, "631 tokens and 10 of padding, but the rows hold 640"),
        ({"files": ["x"]}, "`files` must map"),
        ({"files": {"report.html": {"bytes": 3}}}, "cannot be read: there is no such file"),
        ({"files": {"../d/index.json": {"bytes": 3}}}, "leaves the dataset's folder"),
        ({"files": {"index.json": {"bytes": 3}}}, "the card states 3"),
        ({"files": {"index.json": 7}}, "has a malformed entry in the card"),
    ],
)
def test_a_card_that_is_not_the_shards_own_is_found(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = write_dataset(tmp_path / "d", "mds")
    card = card_of(folder)
    assert with_card(folder, card).ok
    [problem] = with_card(folder, card | change).problems
    assert message in problem.problem


def test_a_shard_listed_twice_is_a_problem(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", "tar")
    index = json.loads((folder / "shards.json").read_text())
    index["shardlist"].append(index["shardlist"][0])
    (folder / "shards.json").write_text(json.dumps(index))
    assert "twice" in verify(folder).problems[0].problem


def test_no_dataset_at_all_raises(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="holds no dataset"):
        verify(tmp_path)
    with pytest.raises(ShardError, match="no such file"):
        verify(tmp_path / "nowhere")


@pytest.mark.extended
@pytest.mark.parametrize("false", ["fingerprint", "samples"])
def test_an_index_bin_that_says_other_things_than_the_index_is_found(tmp_path: Path, false: str) -> None:
    shard = mds.write_rows_shard(tmp_path, "one", ROWS, hashes=["xxh64"])
    names = [f"shard.{number:05d}.mds" for number in range(TABLE_SHARDS)]
    for name in names:
        (tmp_path / name).hardlink_to(tmp_path / "one")
    (tmp_path / "one").unlink()
    mds.write_index(tmp_path, [replace(shard, raw=replace(shard.raw, basename=name)) for name in names])
    assert verify(tmp_path, quick=True).ok
    with np.load(tmp_path / "index.bin") as table:
        arrays = dict(table)
    if false == "fingerprint":
        header = json.loads(arrays["header"].tobytes()) | {"fingerprint": "0" * 32}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    else:
        arrays["samples"] = np.append(arrays["samples"][:-1], np.int64(7))
    with (tmp_path / "index.bin").open("wb") as file:
        np.savez(file, **arrays)
    assert "index.bin" in {problem.file for problem in verify(tmp_path, quick=True).problems}
