"""Single rows of remote shards: where they are, right despite a bad read, wrong ones found out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.cache.download import FetchTimeoutError
from shardkit.cache.row_bytes import MAX_ROW_BYTES, RowLayout, row_layout
from shardkit.cache.rows import FetchedRows, RowReader
from shardkit.errors import ShardError
from shardkit.formats import mds, tar
from shardkit.formats.tar.shard_list import fixed_size
from shardkit.manifest import Column, FileInfo, Format, Manifest, ShardInfo
from shardkit.storage.memory import MemoryBody
from shardkit.storage.resilient import ResilientStore
from shardkit.storage.store import ObjectChangedError, ObjectNotFoundError
from shardkit.storage.threads import Workers
from support.noted_store import NotedStore

Rows = npt.NDArray[Any]
Corrupt = Callable[[int, bytearray], None]
DTYPES = st.sampled_from([np.uint16, np.uint32])


def harmless(number: int, data: bytearray) -> None:
    """Changes nothing."""


def store_of(corrupt: Corrupt = harmless) -> NotedStore:
    """A store; `corrupt` is given the number and the bytes of each read, and may change them."""

    def hand_out(number: int, body: MemoryBody) -> MemoryBody:
        data = bytearray(body.read())
        corrupt(number, data)
        return MemoryBody(body.info, memoryview(bytes(data)))

    return NotedStore(hand_out=hand_out)


def matrix(count: int, length: int, dtype: type[np.generic] = np.uint16) -> Rows:
    return np.random.default_rng(count * 1000 + length).integers(0, 60_000, (count, length)).astype(dtype)


def write(kind: Format, folder: Path, rows: Rows, **settings: Any) -> ShardInfo:
    if kind == "mds":
        return mds.write_rows_shard(folder, "shard.00000.mds", rows, **settings)
    return tar.write_rows_shard(folder, "shard-00000.tar", rows, key_start=17, **settings)


def written(kind: Format, folder: Path, rows: Rows) -> tuple[ShardInfo, RowLayout]:
    """A shard, and where its rows are."""
    shard = write(kind, folder, rows)
    layout = row_layout(kind, shard)
    assert layout is not None
    return shard, layout


def reader(
    kind: Format, folder: Path, shards: list[ShardInfo], corrupt: Corrupt = harmless, **options: Any
) -> RowReader:
    store = store_of(corrupt)
    for shard in shards:
        store.put(shard.stored.basename, folder / shard.stored.basename)
    return RowReader(ResilientStore(store), Manifest(kind, shards), Workers(16), **options)


def read(rows: RowReader, *wanted: int) -> FetchedRows:
    return rows.read({0: np.array(wanted)})[0]


def raw_of(folder: Path, shard: ShardInfo) -> npt.NDArray[np.uint8]:
    return np.fromfile(folder / shard.raw.basename, dtype=np.uint8)


@pytest.fixture(params=["mds", "tar"])
def kind(request: pytest.FixtureRequest) -> Format:
    kind: Format = request.param
    return kind


# Where rows are.


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["mds", "tar"]), count=st.integers(1, 40), length=st.integers(1, 700), dtype=DTYPES
)
def test_all_rows_are_where_the_layout_says(
    tmp_path_factory: pytest.TempPathFactory, kind: Format, count: int, length: int, dtype: type[np.generic]
) -> None:
    folder, rows = tmp_path_factory.mktemp("shard"), matrix(count, length, dtype)
    shard, layout = written(kind, folder, rows)
    raw = raw_of(folder, shard)
    for row, expected in enumerate(rows):
        start = layout.first + row * layout.stride
        data = raw[start : start + layout.size].tobytes()
        assert all(column.is_in(data) for column in layout.columns)
        assert layout.values(data) == expected.tobytes()
    assert layout.first + count * layout.stride <= len(raw)


def test_rows_of_tars_with_a_loss_mask_are_found(tmp_path: Path) -> None:
    tokens, masks = matrix(60, 333), matrix(60, 333, np.uint8)
    columns = {"tokens": tokens, "loss_mask": masks}
    shard = tar.write_columns_shard(tmp_path, "s.tar", columns, key_start=10**11)
    raw, layout = raw_of(tmp_path, shard), row_layout("tar", shard)
    assert layout is not None
    rows = reader("tar", tmp_path, [shard])
    found = read(rows, 0, 7, 59).data
    np.testing.assert_array_equal(found[:, :333], masks[[0, 7, 59]])
    np.testing.assert_array_equal(found[:, 333:].copy().view(np.uint16), tokens[[0, 7, 59]])
    rows.verify_rows(0, raw)
    assert row_layout("tar", replace(shard, columns=shard.columns[::-1])) is None, "members of unknown order"
    raw[5 * layout.stride + layout.columns[1].at - 128 - 512 + 20] ^= 1  # the second member's name
    (tmp_path / "s.tar").write_bytes(raw.tobytes())
    with pytest.raises(ShardError, match="row 5 is not where the index says"):
        read(reader("tar", tmp_path, [shard]), 5)


def test_rows_of_a_foreign_mds_with_several_fixed_columns_are_found(tmp_path: Path) -> None:
    columns = {"tokens": "ndarray:uint16:5", "mask": "ndarray:uint8:2,3", "weight": "float64", "id": "int32"}
    generator = np.random.default_rng(17)
    samples = [
        {
            "tokens": generator.integers(0, 60_000, 5).astype(np.uint16),
            "mask": generator.integers(0, 2, (2, 3)).astype(np.uint8),
            "weight": float(generator.random()),
            "id": number,
        }
        for number in range(50)
    ]
    with mds.MdsWriter(tmp_path / "out", columns=columns, shard_bytes=700) as writer:
        for sample in samples:
            writer.write(sample)
    manifest = writer.finish()
    assert len(manifest.shards) > 2
    rows = reader("mds", tmp_path / "out", list(manifest.shards))
    before = 0
    for number, shard in enumerate(manifest.shards):
        wanted = np.arange(shard.samples)
        fetched = rows.read({number: wanted})[number]
        for row, data in zip(wanted, fetched.data, strict=True):
            sample = samples[before + row]
            expected = b"".join(
                np.asarray(sample[name], dtype).tobytes()
                for name, dtype in [("id", "<i4"), ("mask", "u1"), ("tokens", "<u2"), ("weight", "<f8")]
            )
            assert data.tobytes() == expected
        before += shard.samples
    assert before == len(samples)


@pytest.mark.parametrize(
    "columns",
    [
        {"text": "str"},
        {"tokens": "ndarray:uint16:4", "text": "str"},
        {"tokens": "ndarray:uint16"},
        {"a": "json"},
    ],
    ids=lambda columns: "-".join(columns.values()),
)
def test_rows_of_variable_size_cannot_be_read_singly(tmp_path: Path, columns: dict[str, str]) -> None:
    values = {"str": "text", "ndarray:uint16:4": np.zeros(4, np.uint16), "json": {}}
    values["ndarray:uint16"] = values["ndarray:uint16:4"]
    with mds.MdsWriter(tmp_path / "out", columns=columns) as writer:
        writer.write({name: values[encoding] for name, encoding in columns.items()})
    assert row_layout("mds", writer.finish().shards[0]) is None


def test_compressed_empty_or_huge_rows_cannot_be_read_singly(tmp_path: Path) -> None:
    rows = matrix(4, 8)
    compressed = mds.write_rows_shard(tmp_path, "c.mds", rows, compression="zstd")
    assert row_layout("mds", compressed) is None
    assert row_layout("mds", mds.write_rows_shard(tmp_path, "e.mds", rows[:0])) is None
    assert row_layout("tar", tar.write_rows_shard(tmp_path, "e.tar", rows[:0], key_start=0)) is None
    large = matrix(1, MAX_ROW_BYTES // 2 + 1)
    assert row_layout("mds", mds.write_rows_shard(tmp_path, "l.mds", large)) is None
    assert row_layout("mds", mds.write_rows_shard(tmp_path, "f.mds", large[:, :-1])) is not None


def test_tars_of_others_cannot_be_read_by_row() -> None:
    def described(*encodings: str, size: int = 10_240, samples: int = 5) -> ShardInfo:
        columns = tuple(Column("tokens.npy", encoding, fixed_size(encoding)) for encoding in encodings)
        return ShardInfo(FileInfo("a.tar", size), samples, columns)

    ours = "ndarray:uint16:8"
    assert row_layout("tar", described(ours)) is not None
    others = [
        described(ours, size=20_480),  # of another stride
        described(ours, size=-1),
        described(ours, size=0, samples=-1),
        described(ours, ours),
        *(
            described(encoding)
            for encoding in ("str", "ndarray:uint16:2,4", "ndarray:uint16:²", "ndarray:nothing:8")
        ),
        described(),
    ]
    assert [row_layout("tar", other) for other in others] == [None] * len(others)


@pytest.mark.parametrize("size", [0, 7, 5 * 16])
def test_an_mds_file_too_small_for_its_rows_has_no_layout(size: int) -> None:
    column = Column("tokens", "ndarray:uint16:8", 16)
    assert row_layout("mds", ShardInfo(FileInfo("a.mds", size), 5, (column,))) is None


# Read.


def test_the_rows_wanted_are_read_by_two_requests_each_and_nothing_else(kind: Format, tmp_path: Path) -> None:
    rows = matrix(30, 50)
    store = store_of()
    shards = []
    for number in range(2):
        shard = write(kind, tmp_path, rows[::-1] if number else rows)
        renamed = replace(shard, raw=replace(shard.raw, basename=f"sub/{number}"))
        store.put(f"sub/{number}", tmp_path / shard.raw.basename)
        shards.append(renamed)
    reading = RowReader(ResilientStore(store), Manifest(kind, shards), Workers(16))
    wanted = {0: np.array([0, 3, 29]), 1: np.array([7])}
    fetched = reading.read(wanted)
    assert fetched.keys() == {0, 1}
    for number, expected in ((0, rows[[0, 3, 29]]), (1, rows[::-1][[7]])):
        np.testing.assert_array_equal(fetched[number].data.view(rows.dtype), expected)
        np.testing.assert_array_equal(fetched[number].rows, wanted[number])
    assert reading.count == 4
    assert len(store.reads) == 8
    layout = reading.layout(0)
    assert layout is not None
    assert all(stop is not None and stop - start == layout.size for _, start, stop, _ in store.reads)


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("at", ["first byte", "head", "columns", "end"])
def test_one_corrupt_read_of_a_row_does_no_harm(kind: Format, tmp_path: Path, bad: int, at: str) -> None:
    rows = matrix(9, 50)
    shard, layout = written(kind, tmp_path, rows)
    place = {
        "first byte": 0,
        "head": layout.columns[0].at - len(layout.columns[0].head),
        "columns": layout.columns[0].at + 3,
        "end": layout.size - 1,
    }

    def corrupt(number: int, data: bytearray) -> None:
        if number == bad:
            data[place[at]] ^= 16

    reading = reader(kind, tmp_path, [shard], corrupt)
    np.testing.assert_array_equal(read(reading, 4).data.view(rows.dtype), rows[[4]])
    reading.verify_rows(0, raw_of(tmp_path, shard))


def test_a_row_that_differs_at_every_read_is_an_error_that_names_it(kind: Format, tmp_path: Path) -> None:
    shard, layout = written(kind, tmp_path, matrix(9, 50))

    def corrupt(number: int, data: bytearray) -> None:
        data[layout.columns[0].at] ^= number + 1

    reading = reader(kind, tmp_path, [shard], corrupt)
    with pytest.raises(
        ShardError, match=r"row 4 was different in each of 5 reads; check the network"
    ) as info:
        read(reading, 4)
    assert info.value.file.endswith(f"/{shard.raw.basename}")


def test_a_tar_row_that_is_not_where_the_index_says_is_an_error_that_names_its_place(tmp_path: Path) -> None:
    shard, layout = written("tar", tmp_path, matrix(9, 50))
    file = tmp_path / shard.raw.basename
    data = bytearray(file.read_bytes())
    start = 4 * layout.stride
    data[start + layout.columns[0].at - 128] ^= 1
    file.write_bytes(data)
    reading = reader("tar", tmp_path, [shard])
    with pytest.raises(ShardError, match="row 4 is not where the index says; run shardkit verify") as info:
        read(reading, 4)
    assert info.value.offset == start
    assert info.value.file.endswith("/shard-00000.tar")


def test_an_object_shorter_than_the_index_says_is_an_error(kind: Format, tmp_path: Path) -> None:
    shard, layout = written(kind, tmp_path, matrix(9, 50))
    with (tmp_path / shard.raw.basename).open("r+b") as handle:
        handle.truncate(layout.first + 4 * layout.stride + layout.size - 1)
    reading = reader(kind, tmp_path, [shard])
    with pytest.raises(ShardError, match=r"the object has [\d,]+ bytes, the index states"):
        read(reading, 4)


def test_rows_that_do_not_come_in_time_are_an_error_that_says_what_did(kind: Format, tmp_path: Path) -> None:
    shard = write(kind, tmp_path, matrix(9, 50))
    go_on = threading.Event()

    def corrupt(number: int, data: bytearray) -> None:
        go_on.wait(60)

    reading = reader(kind, tmp_path, [shard], corrupt)
    try:
        with pytest.raises(
            FetchTimeoutError, match=r"row 4 did not arrive in time; 0 of this batch's 4 reads"
        ) as info:
            reading.read({0: np.array([4, 6])}, 0.05)
        assert shard.raw.basename in str(info.value)
    finally:
        go_on.set()
    assert read(reading, 4).data.shape == (1, 100)


def test_the_stores_error_comes_as_it_is(kind: Format, tmp_path: Path) -> None:
    shard = write(kind, tmp_path, matrix(9, 50))
    reading = RowReader(ResilientStore(store_of()), Manifest(kind, [shard]), Workers(16))
    with pytest.raises(ObjectNotFoundError, match=shard.raw.basename):
        read(reading, 4)


def test_rows_are_of_one_version_of_the_object_until_another_is_proved(kind: Format, tmp_path: Path) -> None:
    rows = matrix(9, 50)
    shard = write(kind, tmp_path, rows)
    store = store_of()
    store.put(shard.raw.basename, tmp_path / shard.raw.basename)
    reading = RowReader(ResilientStore(store), Manifest(kind, [shard]), Workers(16))
    read(reading, 4)
    version = store.put(shard.raw.basename, tmp_path / shard.raw.basename).version
    with pytest.raises(ObjectChangedError):
        read(reading, 5)
    reading.trust(0, version)
    np.testing.assert_array_equal(read(reading, 5).data.view(rows.dtype), rows[[5]])


# Proved.


def test_a_row_corrupt_twice_alike_is_found_out_when_its_shard_has_come(kind: Format, tmp_path: Path) -> None:
    shard, layout = written(kind, tmp_path, matrix(9, 50))

    def corrupt(number: int, data: bytearray) -> None:
        data[layout.columns[0].at + 99] ^= 1

    reading = reader(kind, tmp_path, [shard], corrupt)
    read(reading, 2, 4)
    with pytest.raises(
        ShardError, match=r"row 2 was damaged identically in two.*go back to the last"
    ) as info:
        reading.verify_rows(0, raw_of(tmp_path, shard))
    assert info.value.file.endswith(f"/{shard.raw.basename}")


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(["mds", "tar"]),
    wanted=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True), min_size=1, max_size=3),
    bad=st.integers(0, 8),
    bit=st.integers(0, 99),
)
def test_exactly_the_wrong_rows_that_were_delivered_are_found_out(
    tmp_path_factory: pytest.TempPathFactory, kind: Format, wanted: list[list[int]], bad: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    shard, layout = written(kind, folder, matrix(9, 50))
    reading = reader(kind, folder, [shard])
    for some in wanted:
        read(reading, *sorted(some))
    raw = raw_of(folder, shard)
    raw[layout.first + bad * layout.stride + layout.columns[0].at + bit] ^= (
        128  # it is the proved bytes that count
    )
    if any(bad in some for some in wanted):
        with pytest.raises(ShardError, match=f"row {bad} was damaged"):
            reading.verify_rows(0, raw)
    else:
        reading.verify_rows(0, raw)
    reading.verify_rows(0, raw)  # nothing is left to verify


def test_rows_are_not_kept_for_ever(tmp_path: Path) -> None:
    rows = matrix(9, 50)
    shard = write("mds", tmp_path, rows)
    reading = reader("mds", tmp_path, [shard] * 4, max_unproved=5)
    for number in range(4):
        reading.read({number: np.array([0, 1])})
    wrong = raw_of(tmp_path, shard)
    wrong[-rows.nbytes :] ^= 1
    for number in (0, 1):
        reading.verify_rows(number, wrong)  # forgotten, the oldest first
    for number in (2, 3):
        with pytest.raises(ShardError, match="row 0"):
            reading.verify_rows(number, wrong)
