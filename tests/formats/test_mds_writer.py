from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import ShardError
from shardkit.formats import mds
from shardkit.formats.compression import decompress
from shardkit.formats.mds.index import make_columns
from shardkit.formats.mds.writer import _ShardFile
from shardkit.manifest import BLOCKS_NAME
from support import peers
from support.default_cases import cases
from support.mds_values import write_mds

MIXED = {"id": "str", "n": "int", "b": "bytes", "x": "ndarray", "f": "float32", "y": "ndarray:int16:2"}


def mixed_samples(count: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(count)
    for i in range(count):
        x = rng.integers(0, 99, (1 + i % 4, 3)).astype(np.uint8)
        y = np.array([i, -i], np.int16)
        yield {"id": f"é{i}" * (i % 3), "n": i, "b": rng.bytes(i % 50), "x": x, "f": i / 3, "y": y}


def tokens(rows: int, length: int, dtype: str = "uint16") -> npt.NDArray[Any]:
    return np.random.default_rng(5).integers(0, 60_000, (rows, length)).astype(dtype)


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


# A limit below one sample: MosaicML cuts an empty shard first.
@pytest.mark.parametrize("limit", [10, 700, 1_000, 5_000, 1 << 26, None])
@pytest.mark.parametrize("hashes", [[], ["sha1", "xxh64"]])
def test_files_are_mosaicmls_byte_for_byte(tmp_path: Path, limit: int | None, hashes: list[str]) -> None:
    samples = list(mixed_samples(60))
    manifest = write_mds(tmp_path / "ours", MIXED, samples, hashes=hashes, shard_bytes=limit)
    peers.write_with_streaming(tmp_path / "theirs", MIXED, samples, hashes=hashes, size_limit=limit)
    ours, theirs = files(tmp_path / "ours"), files(tmp_path / "theirs")
    assert ours.pop(BLOCKS_NAME), "which MosaicML does not have"
    assert ours["index.json"] == mds.index_files(manifest.shards, manifest.blocks)["index.json"]
    ours |= mds.index_files(manifest.shards)
    assert ours == theirs


def test_mosaicml_reads_a_dataset_whose_index_states_block_checksums(tmp_path: Path) -> None:
    samples = list(mixed_samples(60))
    write_mds(tmp_path / "ours", MIXED, samples, shard_bytes=700)
    assert b'"blocks"' in (tmp_path / "ours" / "index.json").read_bytes()
    for ours, theirs in zip(samples, peers.read_with_streaming(tmp_path / "ours"), strict=True):
        assert ours.keys() == theirs.keys()
        assert (ours["id"], ours["n"]) == (theirs["id"], theirs["n"])


def test_datasets_of_equal_sizes_have_their_own_fingerprints_by_default(tmp_path: Path) -> None:
    """So that a loader refuses the state of the other one."""
    ours, other, again = (
        write_mds(tmp_path / name, {"n": "int"}, [{"n": number}])
        for name, number in (("ours", 1), ("other", 2), ("again", 1))
    )
    assert ours.fingerprint == again.fingerprint != other.fingerprint
    assert list(ours.shards[0].raw.hashes) == ["xxh64"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "compression", cases(["zstd", "zstd:9", "br:3", "bz2", "gz:6", "snappy"], ["zstd:9", "bz2", "snappy"])
)
def test_compressed_shards_hold_what_mosaicmls_hold(tmp_path: Path, compression: str) -> None:
    samples = list(mixed_samples(40))
    common: dict[str, Any] = {"compression": compression, "hashes": ["xxh3_64"]}
    written = write_mds(tmp_path / "ours", MIXED, samples, shard_bytes=2_000, **common)
    peers.write_with_streaming(tmp_path / "theirs", MIXED, samples, size_limit=2_000, **common)
    ours, theirs = (json.loads((tmp_path / who / "index.json").read_text()) for who in ("ours", "theirs"))
    for one, other, info in zip(ours["shards"], theirs["shards"], written.shards, strict=True):
        packed = info.stored.basename
        raws = [
            decompress(
                compression, (tmp_path / who / packed).read_bytes(), raw_bytes=info.raw.bytes, file=who
            )
            for who in ("ours", "theirs")
        ]
        assert raws[0].tobytes() == raws[1].tobytes()
        zips = [entry.pop("zip_data") for entry in (one, other)]
        assert one == other
        assert zips[0]["basename"] == zips[1]["basename"] == packed
    assert files(tmp_path / "ours").keys() == files(tmp_path / "theirs").keys()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_shard_from_an_array_is_the_one_mosaicml_writes(tmp_path: Path, dtype: str) -> None:
    rows = tokens(50, 16, dtype)
    ours, encoding = tmp_path / "ours", f"ndarray:{dtype}:16"
    ours.mkdir()
    info = mds.write_rows_shard(ours, "shard.00000.mds", rows, hashes=["xxh64", "sha1"])
    mds.write_index(ours, [info])
    samples = [{"tokens": row} for row in rows]
    theirs = peers.write_with_streaming(
        tmp_path / "theirs", {"tokens": encoding}, samples, hashes=["sha1", "xxh64"]
    )
    assert files(ours) == files(theirs)
    assert mds.read_index(ours).shards == [info]


@settings(max_examples=40, deadline=None)
@given(
    limit=st.none() | st.integers(1, 1_200),
    parts=st.lists(st.tuples(st.booleans(), st.integers(0, 25)), max_size=6),
    length=st.integers(1, 40),
)
def test_arrays_and_single_rows_give_the_same_files(
    tmp_path_factory: pytest.TempPathFactory, limit: int | None, parts: list[tuple[bool, int]], length: int
) -> None:
    folders, columns = [tmp_path_factory.mktemp(who) for who in ("rows", "mixed")], f"ndarray:uint16:{length}"
    writers = [mds.MdsWriter(folder, columns={"t": columns}, shard_bytes=limit) for folder in folders]
    for at_once, count in parts:
        block = tokens(count, length)
        for row in block:
            writers[0].write({"t": row})
        if at_once:
            writers[1].write_rows(block)
            block[:] = 0  # what was handed over is safe from the caller
        else:
            for row in block:
                writers[1].write({"t": row})
    assert writers[0].finish().samples == sum(count for _, count in parts) == writers[1].finish().samples
    assert files(folders[0]) == files(folders[1])


@pytest.mark.parametrize("names", [["tokens"], ["tokens", "loss_mask"]])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_shard_of_arrays_of_any_lengths_is_the_one_mosaicml_writes(
    tmp_path: Path, names: list[str], dtype: str
) -> None:
    lengths = np.array([1, 2, 255, 256, 3000, 65_535, 65_536, 7])
    columns = {
        name: [tokens(1, size, dtype if name == "tokens" else "uint8")[0] for size in lengths.tolist()]
        for name in names
    }
    (tmp_path / "ours").mkdir()
    settings: dict[str, Any] = {"hashes": ["xxh64"], "size_limit": 1 << 26}
    info = mds.write_arrays_shard(tmp_path / "ours", "shard.00000.mds", columns, **settings)
    mds.write_index(tmp_path / "ours", [info])
    encodings = {name: f"ndarray:{arrays[0].dtype.name}" for name, arrays in columns.items()}
    samples = [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    peers.write_with_streaming(tmp_path / "theirs", encodings, samples, **settings)
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")
    sizes = mds.array_bytes(lengths, *(arrays[0].dtype for arrays in columns.values()))
    header = len((tmp_path / "ours" / "shard.00000.mds").read_bytes()) - sizes.sum()
    with mds.MdsWriter(tmp_path / "none", columns=encodings, hashes=["xxh64"]) as writer:
        assert header == 8 + len(writer._file.config)


@pytest.mark.parametrize("shape", [(7,), (7, 2, 3)])
def test_numbers_and_higher_arrays_can_be_written_at_once(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rows = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    encoding = "int32" if len(shape) == 1 else "ndarray:int32:2,3"
    with mds.MdsWriter(tmp_path, columns={"x": encoding}) as writer:
        writer.write_rows(rows)
    shard = mds.open_shard(tmp_path, writer.finish().shards[0])
    assert peers.comparable(shard.fixed_rows("x")) == peers.comparable(rows)


@pytest.mark.parametrize("compression", [None, "zstd", "gz", "snappy"])
def test_the_same_rows_give_the_same_bytes_from_any_memory_layout(
    tmp_path: Path, compression: str | None
) -> None:
    rows = tokens(64, 32)
    wide = np.zeros((64, 64), np.uint16)
    wide[:, ::2] = rows
    variants = [rows, np.asfortranarray(rows), rows.astype(">u2"), wide[:, ::2]]
    written = []
    for number, variant in enumerate(variants):
        (tmp_path / str(number)).mkdir()
        mds.write_rows_shard(tmp_path / str(number), "a.mds", variant, compression=compression)
        written.append(files(tmp_path / str(number)))
    assert all(one == written[0] for one in written)


def write_until_it_fails(folder: Path) -> None:
    with mds.MdsWriter(folder, columns={"n": "int"}) as writer:
        writer.write({"n": 1})
        raise RuntimeError("stop")


def test_the_index_comes_last_and_only_after_success(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"):
        write_until_it_fails(tmp_path)
    assert not (tmp_path / "index.json").exists()


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        mds.write_rows_shard(tmp_path, "a.mds", tokens(3, 4))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    with pytest.raises(ShardError, match="not empty"):
        mds.MdsWriter(tmp_path, columns={"n": "int"})


@pytest.mark.parametrize(
    "settings_",
    [
        {"columns": {}},
        {"columns": {"a": "nonsense"}},
        {"columns": {"a": "int"}, "compression": "zip"},
        {"columns": {"a": "int"}, "hashes": ["crc32"]},
        {"columns": {"a": "int"}, "shard_bytes": 0},
        {"columns": {"a": "int"}, "shard_bytes": 1 << 32},
        {"columns": {"a": "int"}, "shard_bytes": "lots"},
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(
    tmp_path: Path, settings_: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):
        mds.MdsWriter(tmp_path / "d", **settings_)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "sample",
    [
        {},
        {"n": 1},
        {"n": 1, "s": "", "more": 2},
        {"n": "1", "s": ""},
        {"n": 2**63, "s": "a"},
        {"n": 1, "s": "\ud800"},
    ],
)
def test_a_bad_sample_is_refused_by_name_and_the_dataset_goes_on(
    tmp_path: Path, sample: dict[str, Any]
) -> None:
    with mds.MdsWriter(tmp_path, columns={"n": "int", "s": "str"}) as writer:
        writer.write({"n": 1, "s": "a"})
        with pytest.raises((TypeError, ValueError), match="column"):
            writer.write(sample)
        writer.write({"n": 2, "s": "b"})
    shard = mds.open_shard(tmp_path, writer.finish().shards[0])
    assert [shard.sample(row) for row in range(2)] == [{"n": 1, "s": "a"}, {"n": 2, "s": "b"}]


def test_rows_of_another_kind_than_the_column_are_refused(tmp_path: Path) -> None:
    writer = mds.MdsWriter(tmp_path / "a", columns={"t": "ndarray:uint16:4"})
    for rows in (tokens(2, 5), tokens(2, 4, "uint32"), tokens(2, 4)[0]):
        with pytest.raises(ValueError, match="column 't'"):
            writer.write_rows(rows)
    with pytest.raises(ValueError, match="one fixed-size column"):
        mds.MdsWriter(tmp_path / "b", columns={"t": "ndarray:uint16"}).write_rows(tokens(2, 4))
    with pytest.raises(ValueError, match="matrix"):
        mds.write_rows_shard(tmp_path, "c.mds", tokens(2, 4)[0])


def test_a_finished_dataset_takes_no_more_samples(tmp_path: Path) -> None:
    writer = mds.MdsWriter(tmp_path, columns={"n": "int"})
    writer.write({"n": 1})
    assert writer.finish() is writer.finish()
    with pytest.raises(ValueError, match="finished"):
        writer.write({"n": 2})


def test_more_than_the_format_can_address_is_refused_before_writing(tmp_path: Path) -> None:
    shard = _ShardFile(tmp_path, make_columns({"t": "bytes"}), None, (), None)
    with pytest.raises(ValueError, match="4 GiB"):
        shard.write("a.mds", np.full(1 << 12, 1 << 20), [], sync=False)
    assert list(tmp_path.iterdir()) == []
