"""Rows of constant size: read where they lie, into memory that is lent again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardkit.datasets.dataset import open_dataset
from shardkit.formats import mds
from shardkit.loaders import StreamingLoader
from shardkit.loaders.gather import (
    FixedColumn,
    FixedRows,
    Gather,
    OutputMemory,
    _MappedColumn,
    _reader_by_shard,
)
from shardkit.loaders.streams import Streams
from support.loader_data import make_dataset, token_rows

# Shards.


@pytest.mark.parametrize("kind", ["mds", "two_columns", "tar"])
def test_shards_are_read_in_place_whatever_lies_between_their_rows(tmp_path: Path, kind: str) -> None:
    rows = token_rows(53)
    if kind == "two_columns":
        columns = {"label": "int", "tokens": "ndarray:uint16:8"}
        with mds.MdsWriter(tmp_path, columns=columns, shard_bytes=500) as writer:
            for number, row in enumerate(rows):
                writer.write({"label": number, "tokens": row})
    else:
        make_dataset(tmp_path, kind)
    dataset = open_dataset(tmp_path)
    name = dataset.token_column
    assert name is not None
    stored = rows.dtype
    column = FixedColumn(name, (8,), stored, stored)
    source = FixedRows(Streams([dataset], ["all"]), {"tokens": column}, OutputMemory())
    shards = np.arange(len(dataset.manifest.shards), dtype=np.int32)
    starts = dataset.manifest.shard_starts[:-1]
    read, _ = source.open_rows(shards, np.zeros(len(shards), dtype=np.int64))
    found = read(0, len(shards))["tokens"]
    assert np.array_equal(np.asarray(found), rows[starts])
    for number, held in source._columns["tokens"]._maps.items():
        in_file = dataset.shard(number).fixed_rows(name)
        assert in_file is not None
        assert np.shares_memory(held, in_file)


@pytest.mark.parametrize("dtype", ["uint16", "int64"])
@pytest.mark.parametrize("kind", ["mds", "mds_zstd", "tar"])
def test_gathering_by_address_and_by_shard_give_the_same_rows(tmp_path: Path, kind: str, dtype: str) -> None:
    loader = StreamingLoader(
        make_dataset(tmp_path, kind, samples=200), batch_size=3, rank=0, world_size=1, dtype=dtype
    )
    source = loader._source.source
    assert isinstance(source, FixedRows)
    (column,) = source._columns.values()
    assert isinstance(column, _MappedColumn)
    rng = np.random.default_rng(1)
    sizes = loader.dataset.manifest.shard_samples
    for _ in range(20):
        shard = rng.integers(0, len(sizes), 70).astype(np.int32)
        row = (rng.random(70) * sizes[shard]).astype(np.int64)
        by_address = column.reader(shard, row, np.unique(shard), {}, {})
        by_shard = _reader_by_shard(dict(column._maps), column._column, shard, row)
        expected = token_rows(200)[loader.dataset.manifest.shard_starts[shard] + row]
        for low, high in ((0, 70), (3, 4), (11, 60), (5, 5)):
            assert np.array_equal(by_address(low, high), expected[low:high])
            assert np.array_equal(by_shard(low, high), expected[low:high])
            assert by_address(low, high).dtype == by_shard(low, high).dtype == np.dtype(dtype)


@pytest.mark.parametrize(("shard", "row"), [(0, -1), (0, 10), (1, 7)])
def test_rows_that_a_shard_does_not_have_are_never_read(tmp_path: Path, shard: int, row: int) -> None:
    """Rows are read by address: one too many would be someone else's memory."""
    rows = token_rows(17, 8)
    parts = enumerate((rows[:10], rows[10:]))
    infos = [mds.write_rows_shard(tmp_path, f"shard.{number}.mds", part) for number, part in parts]
    mds.write_index(tmp_path, infos)
    source = StreamingLoader(tmp_path, batch_size=1, rank=0, world_size=1)._source.source
    assert isinstance(source, FixedRows)
    with pytest.raises(IndexError, match="outside its shard"):
        source.open_rows(np.array([0, shard], dtype=np.int32), np.array([0, row], dtype=np.int64))


@pytest.mark.parametrize("delivered", ["stored", "int64"])
@pytest.mark.parametrize("stored", ["uint16", "uint32"])
@pytest.mark.parametrize("length", [100, 40_000])
def test_rows_at_any_address_are_delivered_once_and_never_written_again(
    length: int, stored: str, delivered: str
) -> None:
    """Of 40,000 tokens, rows are gathered in several pieces into memory that is lent."""
    kind = np.dtype(stored)
    to = kind if delivered == "stored" else np.dtype(delivered)
    memory = np.random.default_rng(0).integers(0, 256, 30 * length * kind.itemsize + 1, dtype=np.uint8)
    rows = memory[1:].view(kind).reshape(30, length)  # at an odd address
    read = Gather((length,), kind, to, OutputMemory()).bind(address(rows), rows.nbytes, [memory])
    parts = [np.random.default_rng(n).integers(0, 30, n) for n in (1, 0, 9, 12, 12)]
    held = [read(part * rows.strides[0]) for part in parts]
    for part, found in zip(parts, held, strict=True):
        assert found.dtype == to
        assert np.array_equal(found, rows[part])


# Memory.

SHAPE, INT64 = (4, 8192), np.dtype(np.int64)


SHOWN: list[Callable[[Any], object]] = [
    lambda a: a,
    lambda a: a[1:3, ::2],
    lambda a: a.view(np.uint8)[0].T,
    lambda a: torch.from_numpy(a),
    lambda a: torch.from_numpy(a[2]).view(torch.int32)[::2],
    lambda a: torch.from_numpy(a).reshape(2, -1).unbind(0)[1],
    lambda a: memoryview(a[1]),
]


def address(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_lent_again_after_its_array_has_died() -> None:
    memory = OutputMemory()
    first = memory.lend(SHAPE, INT64)
    where = address(first)
    del first
    assert address(memory.lend(SHAPE, INT64)) == where


def test_whatever_shows_the_memory_keeps_it_from_being_lent_again() -> None:
    memory = OutputMemory()
    rng = np.random.default_rng(0)
    held: list[tuple[object, int]] = []
    for number in range(300):
        array = memory.lend(SHAPE, INT64)
        array[:] = number
        shown = SHOWN[number % len(SHOWN)](array)
        held.append((shown, number))
        del array, shown
        if len(held) > 12:
            del held[int(rng.integers(len(held)))]
        gc.collect(0)
        for other, value in held:
            seen = np.asarray(other).reshape(-1)[:1]
            assert int(seen[0]) == (value if seen.dtype != np.uint8 else value % 256)


def test_a_larger_piece_than_those_kept_is_new() -> None:
    memory = OutputMemory()
    del (small := [memory.lend((1, 8192), INT64)])[0]
    assert not small
    large = memory.lend(SHAPE, INT64)
    large[:] = 5
    assert large.shape == SHAPE
    other = memory.lend(SHAPE, INT64)
    other[:] = 6
    assert (large == 5).all()


def test_arrays_are_plain_ones_when_all_memory_is_lent() -> None:
    memory = OutputMemory()
    memory._arena = memory._arena[: 2 * 262_144]
    arrays = [memory.lend(SHAPE, INT64) for _ in range(4)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert [int(array[-1, -1]) for array in arrays] == [0, 1, 2, 3]


def test_tiny_and_huge_arrays_are_plain_ones() -> None:
    memory = OutputMemory()
    assert memory.lend((3,), INT64).shape == (3,)
    assert memory.lend((2 << 20,), INT64).nbytes == 16 << 20
    assert memory.lend((0, 5), INT64).shape == (0, 5)
