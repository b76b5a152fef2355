"""Payloads are read where they were written: a reader finds its rows by the addresses of blocks."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Body
from shardkit.writers.exchange.addresses import (
    Addressed,
    Pieces,
    exchange_in_place,
    range_of,
    range_start,
)
from shardkit.writers.exchange.exchange import Exchanged, Limits, RunWriter, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS
from shardkit.writers.execution.artifacts import Artifact, Files
from shardkit.writers.execution.commit import Commit, Output, facts_of, hash_output
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.work import COMMIT_NAME, Work, run_task
from support.remote_harness import fresh_url
from support.stores import FaultRule, FaultyStore, WrappedStore

WHOLE = 1 << 64
TEXTS = Table("texts.run", np.dtype([("key", "<u8"), ("size", "<i8")]), payload=True, in_place=True)
SMALL = Limits(
    fan_in=3, task_bytes=300, least_segments=0, segment_bytes=64, piece_bytes=0, block_bytes=200,
    read_bytes=120, reads_in_flight=3, merge_memory_bytes=400,
)  # fmt: skip


def write_texts(folder: Path, keys: Sequence[int], seed: int) -> None:
    rng = np.random.default_rng([seed, len(keys)])
    rows = np.zeros(len(keys), TEXTS.dtype)
    rows["key"], rows["size"] = keys, rng.integers(0, 90, len(keys)) * rng.integers(0, 2, len(keys))
    with RunWriter(folder / TEXTS.file, TEXTS, memory_bytes=300, limits=SMALL) as writer:
        writer.write(rows, rng.integers(0, 256, int(rows["size"].sum()), np.uint8).astype(np.uint8))


MAPS = Stage("maps", "maps", write_texts)
READ = Stage("read", "read", write_texts)


def run_in(folder: Path, *groups: Sequence[Task]) -> list[list[Commit]]:
    """Run tasks at once, each in a folder of its own."""
    return [[run_one(folder, task) for task in group] for group in groups]


def run_one(folder: Path, task: Task) -> Commit:
    place = folder / task.key
    place.mkdir(parents=True, exist_ok=True)
    task.run(place)
    outputs: dict[str, Output] = {path.name: hash_output(path) for path in place.iterdir()}
    return Commit(task.stage, task.name, place, task.digest, facts_of({}, outputs))


def texts_of(piece: Slice | Pieces) -> list[tuple[int, bytes]]:
    rows, payload = piece.read()
    ends = np.cumsum(rows["size"])
    assert (int(ends[-1]) if len(ends) else 0) == len(payload)
    return sorted(
        (int(row["key"]), payload[end - row["size"] : end].tobytes())
        for row, end in zip(rows, ends, strict=True)
    )


keys = st.one_of(st.integers(0, WHOLE - 1), st.sampled_from([0, 1 << 62, 1 << 63, WHOLE - 1]))


@given(
    maps=st.lists(st.lists(keys, max_size=40), min_size=1, max_size=9),
    ranges=st.integers(1, 9),
    piece_bytes=st.sampled_from([0, 50, 10_000]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_row_is_in_the_piece_of_its_range_and_in_no_other(
    tmp_path_factory: pytest.TempPathFactory, maps: list[list[int]], ranges: int, piece_bytes: int
) -> None:
    folder, limits = tmp_path_factory.mktemp("pieces"), replace(SMALL, piece_bytes=piece_bytes)
    run = partial(run_in, folder)
    [written] = run([MAPS.task(str(number), 0, keys, number) for number, keys in enumerate(maps)])
    runs = exchange(run, READ, TEXTS, written, readers=ranges, limits=limits)
    found = exchange_in_place(run, READ, runs, ranges, memory_bytes=5000, limits=limits)
    assert isinstance(found, Addressed) == any(maps)
    whole = texts_of(Slice.whole(TEXTS, [commit.file(TEXTS.file) for commit in written], SMALL))
    together = []
    for number in range(ranges):
        piece = pickle.loads(
            pickle.dumps(found.slice(range_start(number, ranges), range_start(number + 1, ranges)))
        )
        mine = texts_of(piece)
        together += mine
        assert {*range_of(np.array([key for key, _ in mine], np.uint64), ranges).tolist()} <= {number}
    assert together == whole


class Counted(WrappedStore):
    """Notes the bytes of every range of a file with texts that is asked for."""

    ranges: ClassVar[list[int]] = []

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        if key.endswith(TEXTS.file):
            self.ranges.append((stop or 0) - start)
        return self.below.open(key, start, stop, version=version)


def write_many(folder: Path, seed: int, rows: int, row_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    made = np.zeros(rows, TEXTS.dtype)
    made["key"], made["size"] = rng.integers(0, 1 << 63, rows, np.uint64) * 2, row_bytes
    with RunWriter(folder / TEXTS.file, TEXTS, memory_bytes=1 << 26) as writer:
        writer.write(made, np.zeros(rows * row_bytes, np.uint8))


MANY = Stage("maps", "maps", write_many)
RUNS, RANGES = 70, 2
LIMITS = replace(DEFAULT_LIMITS, piece_bytes=0)


def in_store(tmp_path: Path, work: Work, row_bytes: int = 1000) -> tuple[Addressed, list[Task]]:
    def run(*groups: Sequence[Task]) -> list[list[Commit]]:
        return [[run_task(task, task.digest, work) for task in group] for group in groups]

    tasks = [MANY.task(f"{number:02d}", 0, number, 500, row_bytes) for number in range(RUNS)]
    [written] = run(tasks)
    runs = exchange(run, READ, TEXTS, written, readers=RANGES, limits=LIMITS)
    assert len(runs.runs) == RUNS
    found = exchange_in_place(run, READ, runs, RANGES, memory_bytes=1 << 26, limits=LIMITS)
    assert isinstance(found, Addressed)
    return found, tasks


def work_at(tmp_path: Path, url: str, around: object) -> Work:
    work = Work(url, tmp_path / "scratch", around=around).claimed()  # type: ignore[arg-type]
    work.prepare()
    return work


def test_a_reader_makes_one_request_a_run_and_reads_no_footer(tmp_path: Path) -> None:
    found, _ = in_store(tmp_path, work_at(tmp_path, f"{fresh_url()}/work", Counted))
    Counted.ranges.clear()
    rows, payload = found.slice(0, range_start(1, RANGES)).read()
    assert len(Counted.ranges) == RUNS
    block = LIMITS.block_bytes_in(TEXTS, 0) + 1016
    assert 0 <= sum(Counted.ranges) - rows.nbytes - payload.nbytes <= RUNS * block


def test_damage_on_the_way_is_read_again_and_damage_in_the_store_repeats_the_task(tmp_path: Path) -> None:
    url = f"{fresh_url()}/work"
    flips = FaultRule(fault="corrupt", operation="read", key=TEXTS.file, count=RUNS + 2, after_bytes=9)
    found, tasks = in_store(tmp_path, work_at(tmp_path, url, partial(FaultyStore, rules=(flips,))))
    piece, store, key = found.slice(0, range_start(1, RANGES)), MemoryStore(url), tasks[7].key
    assert len(piece.read()[0]) > RUNS * 200
    data = bytearray(store.get(f"{key}/{TEXTS.file}"))
    data[9] ^= 1
    store.put(f"{key}/{TEXTS.file}", bytes(data))
    with pytest.raises(OSError, match="run the build again to repeat its task"):
        piece.read()
    left = {info.key for info in store.list() if info.key.endswith(COMMIT_NAME)}
    assert {f"{task.key}/{COMMIT_NAME}" for task in tasks} - left == {f"{key}/{COMMIT_NAME}"}


def test_memory_of_a_reader_is_its_rows_and_what_is_on_its_way(tmp_path: Path) -> None:
    limits = replace(LIMITS, read_memory_bytes=1 << 20)
    run = partial(run_in, tmp_path)
    [written] = run([MANY.task(f"{number:03d}", 0, number, 20, 5000) for number in range(200)])
    runs = Exchanged(TEXTS, exchange(run, READ, TEXTS, written, readers=1, limits=LIMITS).runs, limits)
    found = exchange_in_place(run, READ, runs, 1, memory_bytes=1 << 26, limits=limits)
    piece = found.slice(0, WHOLE)
    piece.read()
    tracemalloc.start()
    rows, payload = piece.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 4000
    assert peak < rows.nbytes + payload.nbytes + (2 << 20)  # of 20 MB


def test_a_task_that_reads_very_many_runs_is_sent_as_few_bytes(tmp_path: Path) -> None:
    work = Work("memory://names/work", tmp_path)
    files = [
        Artifact(tmp_path / "tokenize" / f"{n:05d}.{n:016x}" / "tokens.run", work) for n in range(15_000)
    ]
    made = Files.of(files, "content")
    sent = pickle.dumps(made)
    assert len(sent) < 15_000 * 40
    again = pickle.loads(sent)
    assert [again[number] for number in (0, 9, 14_999)] == [files[number] for number in (0, 9, 14_999)]


def test_a_damaged_local_file_is_refused(tmp_path: Path) -> None:
    run = partial(run_in, tmp_path)
    [written] = run([MANY.task(f"{number:02d}", 0, number, 5, 100) for number in range(3)])
    runs = exchange(run, READ, TEXTS, written, readers=1, limits=SMALL)
    piece = exchange_in_place(run, READ, runs, 1, memory_bytes=5000, limits=SMALL).slice(0, WHOLE)
    path = written[1].folder / TEXTS.file
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(BuildError, match="differ from their hash"):
        piece.read()
