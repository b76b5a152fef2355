"""Rows of constant size: read where they lie, by one core or several, into memory that is lent again."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
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
    _Choice,
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
    source = FixedRows(Streams([dataset], ["all"]), {"tokens": FixedColumn((name,), (8,), stored, stored)})
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
        by_address = column.reader(shard, row, np.unique(shard), {})
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
    with pytest.raises(IndexError, match="beyond the end"):
        source.open_rows(np.array([0, shard], dtype=np.int32), np.array([0, row], dtype=np.int64))


# Cores.


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As many threads of torch, whatever the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def source(stored: str) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.generic]], int]:
    """(rows at an odd address, that address)."""
    memory = np.zeros(300 * 100 * np.dtype(stored).itemsize + 1, dtype=np.uint8)
    rows = memory[1:].view(stored).reshape(300, 100)
    rows[:] = np.random.default_rng(0).integers(0, 60_000, rows.shape)
    return rows, int(rows.__array_interface__["data"][0])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("delivered", ["stored", "int64"])
@pytest.mark.parametrize("stored", ["uint16", "uint32"])
def test_one_core_and_several_give_the_same_rows(stored: str, delivered: str) -> None:
    rows, address = source(stored)
    to = np.dtype(stored if delivered == "stored" else delivered)
    numbers = np.random.default_rng(1).integers(0, 300, 500)
    gather = Gather((100,), np.dtype(stored), to, shared_bytes=1)
    bound = gather.bind(address, rows.nbytes, [rows])
    for _ in range(10):  # both ways are tried
        for part in (slice(0, 500), slice(3, 4), slice(100, 460)):
            found = bound(numbers[part] * rows.strides[0])
            assert found.dtype == to
            assert np.array_equal(found, rows[numbers[part]])
    assert all(gather._choice._seconds)


@pytest.mark.usefixtures("two_threads")
def test_threads_and_forked_children_leave_torchs_threads_alone() -> None:
    one = Gather((100,), np.dtype("uint16"), np.dtype("int64"))
    assert one._may_share(10_000)
    assert not one._may_share(100), "a small gather ends before a second thread has begun"
    found = []
    thread = threading.Thread(target=lambda: found.append(one._may_share(10_000)))
    thread.start()
    thread.join()
    assert found == [False]
    child = os.fork()
    if child == 0:
        os._exit(int(one._may_share(10_000)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def spend(choice: _Choice, gathers: int, one: float, several: float) -> list[int]:
    ways = []
    for _ in range(gathers):
        ways.append(choice.next())
        choice.took(ways[-1], (one, several)[ways[-1]])
    return ways


def test_the_quicker_way_is_found_and_kept() -> None:
    assert spend(_Choice(), 400, one=2.0, several=1.0)[-300:].count(1) > 290
    assert spend(_Choice(), 400, one=1.0, several=2.0)[-300:].count(0) > 290


def test_a_hopeless_way_costs_one_gather_and_ever_fewer() -> None:
    ways = spend(_Choice(), 10_000, one=1.0, several=100.0)
    assert ways.count(1) <= 12


def test_a_change_is_noticed_at_once_when_the_way_in_use_becomes_slow() -> None:
    choice = _Choice()
    spend(choice, 100, one=2.0, several=1.0)
    assert spend(choice, 40, one=2.0, several=200.0)[-20:].count(0) == 20


def test_a_way_that_has_become_quicker_is_found_again() -> None:
    choice = _Choice()
    spend(choice, 100, one=1.0, several=100.0)
    assert spend(choice, 2000, one=1.0, several=0.5)[-100:].count(1) > 90


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


def test_tiny_and_huge_arrays_are_plain_ones() -> None:
    memory = OutputMemory()
    assert memory.lend((3,), INT64).shape == (3,)
    assert memory.lend((2 << 20,), INT64).nbytes == 16 << 20
    assert memory.lend((0, 5), INT64).shape == (0, 5)
