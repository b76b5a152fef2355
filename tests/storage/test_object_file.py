"""Objects as files: the object's bytes whatever is read in what order, or an OSError."""

from __future__ import annotations

import errno
import io
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.storage.memory import MemoryStore
from shardkit.storage.object_file import open_object
from shardkit.storage.resilient import ResilientStore
from support.remote_harness import fresh_url, quick_policy
from support.stores import FaultRule, FaultyStore

MIB = 1 << 20
DATA = random.Random(5).randbytes(11 * MIB + 17)


class RangesStore(MemoryStore):
    """Notes what is asked for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(fresh_url())
        self.ranges: list[tuple[int, int | None]] = []
        self.info = self.put("a", data)

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        self.ranges.append((start, stop))
        return super().get(key, start, stop, version=version)


@pytest.fixture(scope="module")
def whole() -> RangesStore:
    return RangesStore(DATA)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, 3 * MIB)),
        st.tuples(st.just("seek"), st.integers(0, len(DATA) + 10)),
        st.tuples(st.just("from_end"), st.integers(-MIB, 5)),
        st.tuples(st.just("skip"), st.integers(0, MIB)),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(steps=steps)
def test_any_reads_and_seeks_give_what_a_local_file_gives(
    whole: RangesStore, steps: list[tuple[str, int]]
) -> None:
    expected = io.BytesIO(DATA)
    with open_object(whole, whole.info) as file:
        for step, number in steps:
            if step == "read":
                assert file.read(number) == expected.read(number)
            else:
                whence = {"seek": io.SEEK_SET, "from_end": io.SEEK_END, "skip": io.SEEK_CUR}[step]
                assert file.seek(number, whence) == expected.seek(number, whence)
            assert file.tell() == expected.tell()


@pytest.mark.parametrize("piece", [8 << 10, 1 << 18, 5 * MIB])
def test_reading_straight_on_asks_for_every_byte_once_in_growing_ranges(piece: int) -> None:
    store = RangesStore(DATA)
    with open_object(store, store.info) as file:
        assert b"".join(iter(lambda: file.read(piece), b"")) == DATA
    edges = [0, 1, 3, 7] if piece < MIB else [0, 5]
    assert sorted(store.ranges) == [
        (MIB * a, len(DATA) if b is None else MIB * b) for a, b in zip(edges, [*edges[1:], None], strict=True)
    ]


def test_a_reader_that_jumps_fetches_little_that_it_does_not_read() -> None:
    columns = {"small": [*range(200)], "large": [random.Random(n).randbytes(40_000) for n in range(200)]}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="none", row_group_size=50)
    store = RangesStore(sink.getvalue())
    with open_object(store, store.info) as file:
        assert store.ranges == []
        table = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 16).read(["small"])
    assert table["small"].to_pylist() == columns["small"]
    assert len(store.ranges) <= 6
    assert sum((stop or 0) - start for start, stop in store.ranges) < store.info.bytes * 0.75


def test_an_empty_object_is_an_empty_file() -> None:
    store = RangesStore(b"")
    with open_object(store, store.info) as file:
        assert file.read() == b""
        assert file.seek(0, io.SEEK_END) == 0
    assert store.ranges == []


def test_a_replaced_object_is_a_stale_file_in_every_block() -> None:
    for read_before in (0, MIB, 4 * MIB):
        store = MemoryStore(fresh_url())
        file = open_object(store, store.put("a", DATA))
        with file:
            assert file.read(read_before) == DATA[:read_before]
            store.put("a", DATA[::-1])
            with pytest.raises(OSError, match="the object changed after it was listed") as caught:
                file.read()
            assert caught.value.errno == errno.ESTALE


def test_faults_that_pass_are_not_seen_and_others_are_errors_of_a_disk() -> None:
    store = MemoryStore(fresh_url())
    info = store.put("a", DATA)
    rules = [FaultRule(fault=fault, probability=0.4) for fault in ("error", "throttle", "reset", "truncate")]
    passing = ResilientStore(FaultyStore(store, rules, seed=3), quick_policy())
    with open_object(passing, info) as file:
        assert file.read() == DATA
    assert passing.metrics.snapshot().retries > 2
    denied = FaultyStore(store, [FaultRule(fault="deny", skip=2)])
    with open_object(denied, info) as file:
        with pytest.raises(OSError, match=r"\(status 403\)") as caught:
            file.read()
        assert caught.value.errno == errno.EIO


def test_arrow_hands_errors_of_the_store_on_as_they_are() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"] * 100}), sink)
    store = MemoryStore(fresh_url())
    info = store.put("a", sink.getvalue())
    store.put("a", b"another")
    with open_object(store, info) as file, pytest.raises(OSError, match="the object changed") as caught:
        pq.ParquetFile(file)
    assert caught.value.errno == errno.ESTALE
