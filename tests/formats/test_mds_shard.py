from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import ShardError
from shardkit.formats import mds
from shardkit.hashing import HASH_NAMES
from shardkit.manifest import ShardInfo
from support import peers
from support.mds_values import EXAMPLES, write_mds

FIXED = {"a": "uint8", "b": "ndarray:int64:2,1,3", "c": "int", "d": "float16", "e": "ndarray:uint16:7"}
VARIABLE = {
    "b": "bytes",
    "n": "int",
    "s": "str",
    "x": "ndarray",
    "j": "json",
    "d": "str_decimal",
    "f": "float32",
}
TYPES = {"b": bytes, "n": int, "s": str, "x": np.ndarray, "d": Decimal, "f": np.float32}
ARRAYS = {"ndarray": EXAMPLES["ndarray:float16"]}  # smaller than its own


def write(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], **kwargs: Any) -> ShardInfo:
    return write_mds(folder, columns, samples, **kwargs).shards[0]


def make_samples(columns: dict[str, str], count: int) -> list[dict[str, Any]]:
    values = {**EXAMPLES, **ARRAYS}
    return [{name: values[kind][row % 2] for name, kind in columns.items()} for row in range(count)]


@pytest.mark.parametrize("columns", [FIXED, VARIABLE], ids=["fixed", "variable"])
def test_rows_have_numbers_from_0_to_the_last(tmp_path: Path, columns: dict[str, str]) -> None:
    samples = make_samples(columns, 9)
    shard = mds.open_shard(tmp_path, write(tmp_path, columns, samples))
    assert len(shard) == 9
    assert [c.name for c in shard.columns] == sorted(columns)
    for row, sample in enumerate(samples):
        assert peers.comparable(shard.sample(row)) == peers.comparable(sample)
    for row in (-1, 9):
        with pytest.raises(IndexError, match="row"):
            shard.sample(row)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_fixed_columns_are_views_and_never_copies(tmp_path: Path, compression: str | None) -> None:
    samples = make_samples(FIXED, 20)
    shard = mds.open_shard(tmp_path, write(tmp_path, FIXED, samples, compression=compression))
    stride = sum(column.size or 0 for column in shard.columns)
    for name in FIXED:
        view = shard.fixed_rows(name)
        assert view is not None
        expected = np.stack([np.asarray(sample[name]) for sample in samples])
        assert np.array_equal(view, expected)
        assert np.array_equal(view[[3, 0, 3]], expected[[3, 0, 3]])
        assert view.strides[0] == stride
        assert not view.flags.owndata
        assert not view.flags.writeable
        assert np.shares_memory(view, shard._data)


def test_a_shard_of_one_fixed_column_is_one_contiguous_matrix(tmp_path: Path) -> None:
    rows = np.arange(700, dtype=np.uint32).reshape(100, 7)
    info = mds.write_rows_shard(tmp_path, "a.mds", rows)
    view = mds.open_shard(tmp_path, info).fixed_rows("tokens")
    assert view is not None
    assert view.flags.c_contiguous
    assert np.array_equal(view, rows)


def test_a_variable_column_anywhere_means_no_view(tmp_path: Path) -> None:
    shard = mds.open_shard(tmp_path, write(tmp_path, VARIABLE, make_samples(VARIABLE, 3)))
    assert [shard.fixed_rows(name) for name in VARIABLE] == [None] * len(VARIABLE)
    with pytest.raises(KeyError, match="no column 'z'"):
        shard.fixed_rows("z")


def test_an_empty_shard_has_empty_views(tmp_path: Path) -> None:
    info = mds.write_rows_shard(tmp_path, "a.mds", np.zeros((0, 8), np.uint16))
    shard = mds.open_shard(tmp_path, info)
    view = shard.fixed_rows("tokens")
    assert len(shard) == 0
    assert view is not None
    assert view.shape == (0, 8)


def test_pickles_are_refused_unless_allowed(tmp_path: Path) -> None:
    info = write(tmp_path, {"p": "pkl"}, [{"p": {1, 2}}])
    with pytest.raises(ShardError, match="allow_pickle=True"):
        mds.open_shard(tmp_path, info)
    assert mds.open_shard(tmp_path, info, allow_pickle=True).sample(0) == {"p": {1, 2}}


@pytest.mark.parametrize("name", sorted(HASH_NAMES))
@pytest.mark.parametrize("compression", [None, "zstd:1"])
def test_verify_notices_one_changed_bit_with_every_hash(
    tmp_path: Path, name: str, compression: str | None
) -> None:
    info = write(tmp_path, {"b": "bytes"}, [{"b": bytes(99)}], hashes=[name], compression=compression)
    assert len(mds.open_shard(tmp_path, info, verify=True)) == 1
    file = tmp_path / info.stored.basename
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ShardError, match=f"{name} of"):
        mds.open_shard(tmp_path, info, verify=True)


def test_verify_checks_what_decompression_gives_too(tmp_path: Path) -> None:
    info = write(tmp_path, {"b": "bytes"}, [{"b": bytes(99)}], hashes=["sha1"], compression="zstd")
    wrong = replace(info, raw=replace(info.raw, hashes={"sha1": "0" * 40}))
    with pytest.raises(ShardError, match=r"sha1 of shard\.00000\.mds is"):
        mds.open_shard(tmp_path, wrong, verify=True)


def test_a_raw_file_beside_its_compressed_one_is_mapped(tmp_path: Path) -> None:
    raw = mds.write_rows_shard(tmp_path, "a.mds", np.ones((3, 4), np.uint16))
    info = mds.write_rows_shard(tmp_path, "a.mds", np.ones((3, 4), np.uint16), compression="zstd")
    (tmp_path / "a.mds.zstd").unlink()
    different = replace(info, raw=raw.raw)  # the config names the compression, so the size differs
    assert len(mds.open_shard(tmp_path, different)) == 3


def damaged(folder: Path, info: ShardInfo, change: Callable[[bytearray], bytearray | None]) -> ShardInfo:
    """The shard with other bytes, and the entry of an index that goes along with it."""
    data = bytearray((folder / info.raw.basename).read_bytes())
    data = change(data) or data
    (folder / info.raw.basename).write_bytes(data)
    return replace(info, raw=replace(info.raw, bytes=len(data)))


def put(position: int, value: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        struct.pack_into("<I", data, position, value)

    return change


# 5 samples: count at 0, offsets at 4 to 27, config from 28.
@pytest.mark.parametrize(
    ("change", "problem", "offset"),
    [
        (put(0, 4), "has 4 samples, the index states 5", 0),
        (put(0, 2**32 - 1), "4,294,967,295 samples", 0),
        (put(4, 27), "inside the header", 4),
        (put(4, 0), "inside the header", 4),
        (put(4, 2**32 - 1), "ends before it begins", 8),
        (put(12, 30), "sample 1 ends before it begins", 12),
        (put(12, 2**32 - 1), "sample 2 ends before it begins", 16),
        (put(24, 2**32 - 1), "the last sample ends at", 24),
        (put(24, 29), "sample 4 ends before", 24),
        (lambda data: data[:-1], "the last sample ends at", 24),
        (lambda data: data + b"\0", "the last sample ends at", 24),
        (lambda data: data[:27], "cannot hold the offsets", None),
        (lambda data: data[:3], "cannot hold the offsets", None),
        (lambda data: data[:0] or bytearray(b"\0"), "cannot hold the offsets", None),
        (put(28, 0), "config is not JSON", 28),
        (lambda data: data.replace(b'"uint16', b'"uint32').replace(b"[16]", b"[32]"), "size", None),
        (lambda data: data.replace(b'["ndarray:uint16:8"]', b'["ndarray:int16:8" ]'), "other columns", 28),
    ],
)
def test_a_damaged_header_is_refused_with_its_place(
    tmp_path: Path, change: Callable[[bytearray], bytearray | None], problem: str, offset: int | None
) -> None:
    rows = np.arange(40, dtype=np.uint16).reshape(5, 8)
    info = damaged(tmp_path, mds.write_rows_shard(tmp_path, "a.mds", rows), change)
    with pytest.raises(ShardError, match=problem) as caught:
        mds.open_shard(tmp_path, info)
    assert caught.value.offset == offset
    assert caught.value.file == str(tmp_path / "a.mds")


def test_samples_of_fixed_columns_must_lie_a_constant_stride_apart(tmp_path: Path) -> None:
    info = mds.write_rows_shard(tmp_path, "a.mds", np.zeros((5, 8), np.uint16))
    first = struct.unpack_from("<I", (tmp_path / "a.mds").read_bytes(), 12)[0]
    with pytest.raises(ShardError, match="sample 1: has 18 bytes, but its columns take 16"):
        mds.open_shard(tmp_path, damaged(tmp_path, info, put(12, first + 2)))


@pytest.mark.parametrize("word", [0, 1])
@pytest.mark.parametrize("value", [0, 2, 5, 2**31, 2**32 - 1])
def test_sizes_inside_a_sample_that_lie_are_refused(tmp_path: Path, word: int, value: int) -> None:
    info = write(tmp_path, {"a": "bytes", "b": "bytes", "n": "int"}, [{"a": b"xyz", "b": b"1", "n": 4}] * 2)
    begin = info.raw.bytes - (8 + 3 + 1 + 8)
    info = damaged(tmp_path, info, put(begin + 4 * word, value))
    shard = mds.open_shard(tmp_path, info)
    assert shard.sample(0)["a"] == b"xyz"
    with pytest.raises(ShardError, match="sample 1") as caught:
        shard.sample(1)
    assert (caught.value.offset or 0) >= begin


def test_a_sample_too_short_for_its_columns_is_refused(tmp_path: Path) -> None:
    info = write(tmp_path, {"a": "bytes", "n": "int"}, [{"a": b"", "n": 4}] * 2)
    middle = struct.unpack_from("<I", (tmp_path / info.raw.basename).read_bytes(), 8)[0]
    shard = mds.open_shard(tmp_path, damaged(tmp_path, info, put(8, middle - 1)))
    for row in range(2):
        with pytest.raises(ShardError, match=f"sample {row}"):
            shard.sample(row)


def test_a_file_of_another_size_than_the_index_states_is_refused(tmp_path: Path) -> None:
    info = mds.write_rows_shard(tmp_path, "a.mds", np.zeros((5, 8), np.uint16), compression="zstd")
    file = tmp_path / "a.mds.zstd"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ShardError, match="bytes, the index states"):
        mds.open_shard(tmp_path, info)


def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    info = mds.write_rows_shard(tmp_path, "a.mds", np.zeros((5, 8), np.uint16))
    (tmp_path / "a.mds").unlink()
    with pytest.raises(ShardError, match="cannot be opened"):
        mds.open_shard(tmp_path, info)
    os.mkfifo(tmp_path / "a.mds")
    with pytest.raises(ShardError, match="not a regular file"):
        mds.open_shard(tmp_path, info)


def test_a_config_may_be_missing_but_not_contradict(tmp_path: Path) -> None:
    rows = np.arange(10, dtype=np.uint16).reshape(2, 5)
    info = mds.write_rows_shard(tmp_path, "a.mds", rows)
    bare = struct.pack("<IIII", 2, 16, 26, 36) + rows.tobytes()
    (tmp_path / "a.mds").write_bytes(bare)
    shard = mds.open_shard(tmp_path, replace(info, raw=replace(info.raw, bytes=len(bare))))
    assert np.array_equal(shard.fixed_rows("tokens"), rows)  # type: ignore[arg-type]


CORPUS: dict[tuple[str, str | None], tuple[ShardInfo, bytes]] = {}


def valid(folder: Path, kind: str, compression: str | None) -> tuple[ShardInfo, bytes]:
    """A small valid shard and its bytes, made once."""
    if (kind, compression) not in CORPUS:
        target = folder / f"valid-{kind}-{compression}"
        columns = FIXED if kind == "fixed" else VARIABLE
        info = write(target, columns, make_samples(columns, 6), compression=compression, hashes=["xxh64"])
        CORPUS[kind, compression] = info, (target / info.stored.basename).read_bytes()
    return CORPUS[kind, compression]


def read_all(shard: mds.MdsShard) -> list[dict[str, object]]:
    for column in shard.columns:
        view: npt.NDArray[Any] | None = shard.fixed_rows(column.name)
        assert view is None or view.tobytes() is not None  # touches every byte of the column
    return [shard.sample(row) for row in range(len(shard))]


@settings(max_examples=500, deadline=None)
@given(
    kind=st.sampled_from(["fixed", "variable"]),
    compression=st.sampled_from([None, None, "zstd", "gz", "snappy"]),
    flips=st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 255)), max_size=3),
    keep=st.none() | st.integers(0, 2**20),
    index_agrees=st.booleans(),
)
def test_damaged_shards_give_values_of_the_right_type_or_a_shard_error(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    compression: str | None,
    flips: list[tuple[int, int]],
    keep: int | None,
    index_agrees: bool,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    info, data = valid(folder, kind, compression)
    hurt = bytearray(data)
    for position, value in flips:
        hurt[position % min(len(hurt), 400 if value % 2 else len(hurt))] ^= (
            value  # half of them in the header
        )
    if keep is not None:
        del hurt[keep % len(hurt) :]
    (folder / info.stored.basename).write_bytes(hurt)
    if index_agrees:
        stored = replace(info.stored, bytes=len(hurt), hashes={})
        info = replace(info, raw=stored) if info.zip is None else replace(info, zip=stored)
    else:
        info = replace(info, raw=replace(info.raw, hashes={}))
    try:
        samples = read_all(mds.open_shard(folder, info))
    except ShardError:
        return
    for sample in samples if kind == "variable" else []:
        assert all(isinstance(sample[name], kind_) for name, kind_ in TYPES.items())


@settings(max_examples=100, deadline=None)
@given(
    compression=st.sampled_from([None, "zstd", "gz", "snappy"]),
    position=st.integers(0, 2**20),
    value=st.integers(1, 255),
)
def test_with_hashes_no_flipped_bit_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, compression: str | None, position: int, value: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    info, data = valid(folder, "variable", compression)
    hurt = bytearray(data)
    hurt[position % len(hurt)] ^= value
    (folder / info.stored.basename).write_bytes(hurt)
    with pytest.raises(ShardError):
        mds.open_shard(folder, info, verify=True)
