"""Tars made by anyone are read as webdataset reads them; what an index states is held against the file."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import webdataset
import zstandard

from shardkit.datasets.dataset import open_dataset
from shardkit.errors import ShardError
from shardkit.formats import tar
from shardkit.formats.tar.shard_list import describe_tar
from shardkit.manifest import Column, FileInfo
from support.foreign_tars import make_tar, npy


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.write_bytes(make_tar(members))
    return path


def open_tar(path: Path, *, decode: bool = True) -> tar.TarShard:
    return tar.open_shard(path.parent, describe_tar(path.name), decode=decode)


@pytest.mark.parametrize("mtime", [0, 1700000000.123456])
def test_fixed_rows_of_webdatasets_writer_are_a_view_of_the_file(tmp_path: Path, mtime: float) -> None:
    rows = np.random.default_rng(1).integers(0, 1 << 31, (50, 96)).astype(np.int32)
    path = tmp_path / "a.tar"
    with webdataset.TarWriter(str(path), mtime=mtime) as writer:
        for i, row in enumerate(rows):
            writer.write({"__key__": str(i), "cls": i, "tokens.npy": row})
    shard = open_tar(path)
    view = shard.fixed_rows("tokens")
    assert view is not None
    np.testing.assert_array_equal(view, rows)
    np.testing.assert_array_equal(view[[49, 0, 7]], rows[[49, 0, 7]])
    assert not view.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    assert shard.columns == (Column("cls", "int"), Column("tokens.npy", "ndarray:int32:96", 384))
    assert shard.fixed_rows("tokens.npy") is not None
    assert shard.fixed_rows("cls") is shard.fixed_rows("absent") is None


def test_equal_arrays_at_any_offsets_are_gathered_too(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).integers(0, 60_000, (40, 10)).astype(np.uint16)
    members = [
        (f"{i}.{e}", d) for i, r in enumerate(rows) for e, d in (("txt", b"x" * i * 99), ("npy", npy(r)))
    ]
    shard = open_tar(write_tar(tmp_path / "a.tar", members))
    assert shard.fixed_rows("npy") is None
    found = shard.offset_rows("npy")
    assert found is not None
    view, index = found
    np.testing.assert_array_equal(view[index], rows)
    np.testing.assert_array_equal(view[index[[3, 39, 0]]], rows[[3, 39, 0]])
    assert shard.columns[1] == Column("npy", "ndarray:uint16")
    assert shard.offset_rows("txt") is None


UNLIKE = {
    "another shape of the same size": (np.zeros((2, 4), "u2"), np.zeros((4, 2), "u2")),
    "another type of the same size": (np.zeros(4, "u2"), np.zeros(4, "i2")),
    "another length": (np.zeros(4, "u2"), np.zeros(5, "u2")),
    "Fortran order": (np.asfortranarray(np.ones((2, 3))), np.asfortranarray(np.ones((2, 3)))),
    "nothing in them": (np.zeros(0), np.zeros(0)),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_arrays_that_differ_in_any_header_are_no_fixed_rows(tmp_path: Path, name: str) -> None:
    first, other = UNLIKE[name]
    members = [(f"{i:03d}.npy", npy(other if i == 37 else first)) for i in range(50)]
    shard = open_tar(write_tar(tmp_path / "a.tar", members))
    assert shard.fixed_rows("npy") is None
    assert shard.offset_rows("npy") is None
    np.testing.assert_array_equal(shard.sample(37)["npy"], other)


def test_a_column_that_some_samples_lack_is_no_fixed_column(tmp_path: Path) -> None:
    members = [(f"{i:03d}.npy", npy([i])) for i in range(20)] + [("z.txt", b"z")]
    shard = open_tar(write_tar(tmp_path / "a.tar", members))
    assert shard.fixed_rows("npy") is None
    assert [c.name for c in shard.columns] == ["npy", "txt"]


def test_records_and_texts_in_arrays_are_fixed_rows_without_a_fixed_encoding(tmp_path: Path) -> None:
    members = [(f"{i:03d}.npy", npy(np.array([str(i)] * 3, dtype="<U4"))) for i in range(20)]
    shard = open_tar(write_tar(tmp_path / "a.tar", members))
    view = shard.fixed_rows("npy")
    assert view is not None
    assert view[7].tolist() == ["7", "7", "7"]
    assert shard.columns == (Column("npy", "ndarray"),)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar.zst"])
def test_compressed_tars_give_the_same_samples(tmp_path: Path, suffix: str) -> None:
    rows = np.arange(3000, dtype=np.uint16).reshape(30, 100)
    plain = tar.write_rows_shard(tmp_path, "a.tar", rows, key_start=0)
    data = (tmp_path / "a.tar").read_bytes()
    stored = zstandard.compress(data) if suffix.endswith("zst") else gzip.compress(data)
    (tmp_path / f"b{suffix}").write_bytes(stored)
    (info,) = tar.scan_folder(tmp_path, [f"b{suffix}"])
    assert (info.samples, info.raw, info.columns) == (30, FileInfo("b.tar", len(data)), plain.columns)
    assert info.zip == FileInfo(f"b{suffix}", len(stored))
    view = tar.open_shard(tmp_path, info).fixed_rows("tokens")
    np.testing.assert_array_equal(view, rows)
    for wrong in (len(data) - 1, len(data) + 1):
        with pytest.raises(ShardError, match="bytes"):
            tar.open_shard(tmp_path, replace(info, raw=FileInfo("b.tar", wrong)))


def test_what_the_index_states_is_held_against_the_file(tmp_path: Path) -> None:
    info = tar.write_rows_shard(tmp_path, "a.tar", np.ones((9, 8), np.uint16), key_start=0, hashes=["xxh64"])
    assert len(tar.open_shard(tmp_path, info, verify=True)) == 9
    lies = [
        (replace(info, samples=8), "samples"),
        (replace(info, raw=replace(info.raw, bytes=1)), "bytes"),
        (replace(info, columns=(Column("tokens.npy", "ndarray:uint16:9", 18),)), "columns"),
        (replace(info, raw=replace(info.raw, basename="absent.tar")), "cannot be opened"),
    ]
    for lie, words in lies:
        with pytest.raises(ShardError, match=words):
            tar.open_shard(tmp_path, lie)
    data = bytearray((tmp_path / "a.tar").read_bytes())
    data[700] ^= 1
    (tmp_path / "a.tar").write_bytes(data)
    assert len(tar.open_shard(tmp_path, info)) == 9
    with pytest.raises(ShardError, match="xxh64"):
        tar.open_shard(tmp_path, info, verify=True)
    with pytest.raises(ShardError, match="cannot be checked"):
        tar.open_shard(tmp_path, replace(info, raw=replace(info.raw, hashes={"rot13": "0"})), verify=True)


def test_a_member_that_cannot_be_decoded_is_named_with_its_place(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.json", b"{}"), ("b.json", b"{"), ("b.pkl", b"x")])
    shard = open_tar(path)
    assert (shard.key(0), shard.sample(0)) == ("a", {"__key__": "a", "json": {}})
    assert open_tar(path, decode=False).sample(0)["json"] == b"{}"
    with pytest.raises(
        ShardError, match=r"a\.tar: byte 1,536: sample 1 \('b'\), \.json: Expecting"
    ) as caught:
        shard.sample(1)
    assert caught.value.offset == 1536
    for row in (-1, 2):
        with pytest.raises(IndexError):
            shard.sample(row)


def test_scanning_describes_every_tar_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.tar", "a.tar", "c.tar"):
        write_tar(tmp_path / name, [(f"{name}{i}/k.txt", b"") for i in range(ord(name[0]) - 96)])
    write_tar(tmp_path / "d.tar", [])
    (tmp_path / "notes.txt").write_text("no tar")
    infos = tar.scan_folder(tmp_path)
    assert [(i.raw.basename, i.samples) for i in infos] == [
        ("a.tar", 1),
        ("b.tar", 2),
        ("c.tar", 3),
        ("d.tar", 0),
    ]
    tar.write_shard_list(tmp_path, infos)
    assert list(open_dataset(tmp_path).manifest.shards) == infos


DATA = Path(os.environ.get("SHARDKIT_TEST_DATA", "/nonexistent")) / "goldens"


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="SHARDKIT_TEST_DATA is not set")
@pytest.mark.parametrize("folder", ["webdataset", "webdataset_gen"])
def test_real_tars_are_read_as_webdataset_reads_them(folder: str) -> None:
    files = json.loads((DATA / folder / "expected.json").read_text())["files"]
    assert files
    for name, expected in files.items():
        # Of samples whose members do not follow each other, webdataset makes several of one name.
        keys = [sample["__key__"] for sample in expected.get("samples", ())]
        if "reference_error" in expected or len(set(keys)) < len(keys):
            with pytest.raises(ShardError, match=name):
                open_tar(DATA / folder / name)
            continue
        shard = open_tar(DATA / folder / name, decode=False)
        found = []
        for row in range(len(shard)):
            sample = shard.sample(row)
            digests = {k: hashlib.sha256(v).hexdigest() for k, v in sample.items() if isinstance(v, bytes)}
            found.append({"__key__": sample["__key__"], **digests})
        wanted = [
            {k: v if isinstance(v, str) else v["sha256"] for k, v in sample.items()}
            for sample in expected["samples"]
        ]
        assert found == wanted, name
