"""Written tars are plain, constant, reproducible, and read by every stock reader."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import webdataset

from shardkit.formats import tar
from shardkit.formats.tar.members import group_members, walk_members
from shardkit.formats.tar.stride import index_constant_stride
from shardkit.hashing import hash_file
from shardkit.manifest import Column

PINNED = "7a58dd0173f3cb2c7557831e675a96f4fd64b2eb05c13e30ef28d19fae1c2fef"


def make_rows(count: int, length: int, dtype: str = "uint16") -> npt.NDArray[np.uint16]:
    return np.random.default_rng(7).integers(0, 60_000, (count, length)).astype(dtype)


def test_the_bytes_of_a_shard_are_pinned(tmp_path: Path) -> None:
    rows = np.arange(0, 64_040, 1601, dtype=np.uint16).reshape(5, 8)
    info = tar.write_rows_shard(tmp_path, "s.tar", rows, key_start=123_456_789_012 - 5)
    data = (tmp_path / "s.tar").read_bytes()
    assert hashlib.sha256(data).hexdigest() == PINNED
    assert info.raw.bytes == len(data) == 10_240


def test_keys_of_many_partitions_have_more_digits(tmp_path: Path) -> None:
    tar.write_rows_shard(tmp_path, "s.tar", make_rows(3, 8), key_start=10**14 - 3, key_digits=14)
    with tarfile.open(tmp_path / "s.tar") as archive:
        names = [member.name for member in archive]
    assert names == [f"{10**14 - 3 + number}.tokens.npy" for number in range(3)]


@pytest.mark.parametrize(
    ("count", "length", "dtype"), [(1, 1, "uint16"), (9, 64, "uint32"), (300, 2048, "uint16")]
)
def test_tarfile_and_gnu_tar_read_every_row(tmp_path: Path, count: int, length: int, dtype: str) -> None:
    rows = make_rows(count, length, dtype)
    tar.write_rows_shard(tmp_path, "s.tar", rows, key_start=10**8)
    path = tmp_path / "s.tar"
    keys = [f"{10**8 + i:012d}" for i in range(count)]

    with tarfile.open(path) as archive:
        members = archive.getmembers()
        for member, row in zip(members, rows, strict=True):
            file = archive.extractfile(member)
            assert file is not None
            np.testing.assert_array_equal(np.load(io.BytesIO(file.read())), row)
    assert {(m.mtime, m.uid, m.gid, m.mode, m.uname, m.type) for m in members} == {(0, 0, 0, 0o644, "", b"0")}

    listed = subprocess.run(["tar", "tvf", path], capture_output=True, text=True, check=True, timeout=60)
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == [f"{k}.tokens.npy" for k in keys]
    assert listed.stderr == ""
    out = subprocess.run(["tar", "xOf", path], capture_output=True, check=True, timeout=60).stdout
    np.testing.assert_array_equal(
        np.frombuffer(out, dtype).reshape(count, -1)[:, 128 // rows.itemsize :], rows
    )


@pytest.mark.parametrize(("count", "length"), [(1, 1), (70, 385), (300, 2048)])
def test_several_columns_are_members_that_every_reader_finds(tmp_path: Path, count: int, length: int) -> None:
    rows = make_rows(count, length)
    columns: dict[str, npt.NDArray[Any]] = {"tokens": rows, "loss_mask": (rows % 2).astype(np.uint8)}
    info = tar.write_columns_shard(tmp_path, "s.tar", columns, key_start=9 * 10**7, hashes=["xxh64"])
    assert [column.name for column in info.columns] == ["loss_mask.npy", "tokens.npy"]
    shard = tar.open_shard(tmp_path, info, verify=True)
    for name, values in columns.items():
        view = shard.fixed_rows(name)
        assert view is not None
        np.testing.assert_array_equal(view, values)
        assert view.ctypes.data % 64 == 0
    found = list(webdataset.WebDataset(str(tmp_path / "s.tar"), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in found] == [f"{9 * 10**7 + i:012d}" for i in range(count)]
    for name, values in columns.items():
        np.testing.assert_array_equal([sample[f"{name}.npy"] for sample in found], values)
    data = np.fromfile(tmp_path / "s.tar", np.uint8)
    walked = group_members(walk_members(data.data, "s.tar"), "s.tar")
    at_once = index_constant_stride(data, "s.tar")
    assert (at_once is None) == (count < 8)
    if at_once is not None:
        for name in ("starts", "offsets", "sizes", "kinds", "extensions"):
            np.testing.assert_array_equal(getattr(at_once, name), getattr(walked, name))
    listed = subprocess.run(["tar", "tf", tmp_path / "s.tar"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 2 * count
    short = {"loss_mask": make_rows(2, 8), "tokens": make_rows(1, 8)}
    with pytest.raises(ValueError, match="column 'tokens' has 1 rows, but others have 2"):
        tar.write_columns_shard(tmp_path, "t.tar", short, key_start=0)


def test_headers_are_those_of_tarfile(tmp_path: Path) -> None:
    tar.write_rows_shard(tmp_path, "s.tar", make_rows(3, 100), key_start=7, column="input_ids")
    info = tarfile.TarInfo("000000000009.input_ids.npy")
    info.size = 328
    header = (tmp_path / "s.tar").read_bytes()[2 * 1024 :][:512]
    assert header == info.tobuf(tarfile.USTAR_FORMAT)


def test_payloads_start_on_64_bytes_and_repeat_with_one_stride(tmp_path: Path) -> None:
    rows = make_rows(50, 333)
    info = tar.write_rows_shard(tmp_path, "s.tar", rows, key_start=0)
    view = tar.open_shard(tmp_path, info).fixed_rows("tokens")
    assert view is not None
    assert view.strides == (512 + 1024, 2)
    assert (view.ctypes.data - 512 - 128) % 4096 == 0
    np.testing.assert_array_equal(view, rows)


def test_shards_larger_than_a_chunk_are_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(1000, 50)
    whole = tar.write_rows_shard(tmp_path, "a.tar", rows, key_start=1, hashes=["xxh64", "sha256"])
    monkeypatch.setattr(tar.writer, "CHUNK_BYTES", 30_000)
    pieces = tar.write_rows_shard(tmp_path, "b.tar", rows[:, ::1], key_start=1, hashes=["xxh64", "sha256"])
    assert whole.raw.hashes == pieces.raw.hashes == hash_file(tmp_path / "b.tar", ["xxh64", "sha256"])
    assert whole.columns == (Column("tokens.npy", "ndarray:uint16:50", 100),)


def test_rows_in_any_memory_layout_give_the_same_bytes(tmp_path: Path) -> None:
    rows = make_rows(20, 30)
    wide = np.zeros((40, 60), dtype=np.uint16)
    wide[::2, ::2] = rows
    layouts = [rows, np.asfortranarray(rows), wide[::2, ::2], rows.astype(">u2")]
    digests = {
        tar.write_rows_shard(tmp_path, "s.tar", r, key_start=0, hashes=["xxh64"]).raw.hashes["xxh64"]
        for r in layouts
    }
    assert len(digests) == 1


def test_no_rows_make_an_empty_tar(tmp_path: Path) -> None:
    info = tar.write_rows_shard(tmp_path, "s.tar", make_rows(0, 8), key_start=0)
    assert len(tar.open_shard(tmp_path, info)) == info.samples == 0


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        (np.zeros((2, 2), dtype=np.int64), {}, "uint16 or uint32"),
        (np.zeros(2, dtype=np.uint16), {}, "matrix"),
        (np.zeros((2, 0), dtype=np.uint16), {}, "matrix"),
        (np.zeros((2, 2), dtype=np.uint16), {"column": "Tokens"}, "lower-case"),
        (np.zeros((2, 2), dtype=np.uint16), {"column": "a/b"}, "lower-case"),
        (np.zeros((2, 2), dtype=np.uint16), {"key_start": 10**12 - 1}, "12 digits"),
        (np.zeros((2, 2), dtype=np.uint16), {"key_start": 10**14 - 1, "key_digits": 14}, "14 digits"),
        (np.zeros((2, 2), dtype=np.uint16), {"key_start": -1}, "12 digits"),
        (np.zeros((2, 2), dtype=np.uint16), {"hashes": ["xxh65"]}, "unknown hash"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_writing(
    tmp_path: Path, rows: npt.NDArray[np.uint16], options: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        tar.write_rows_shard(tmp_path, "s.tar", rows, **{"key_start": 0, **options})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
