"""The exchange: a reader sees the sorted rows of its range, whatever was written, merged or damaged."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.errors import BuildError
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Body, Store
from shardkit.writers.exchange.exchange import Exchanged, Limits, RunWriter, Segment, Slice, Table, exchange
from shardkit.writers.exchange.sorted_runs import DEFAULT_LIMITS, BlockWriter, read_footer
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.commit import Commit, Output, facts_of, hash_output
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.work import COMMIT_NAME, Work, run_task
from support.remote_harness import fresh_url
from support.stores import FaultRule, FaultyStore, WrappedStore


def read_rows(folder: Path) -> None:
    """Stand for what reads what is exchanged."""


ROWS, FEW, MANY = (Stage(name, name, read_rows) for name in ("rows", "few", "many"))
PLAIN = Table("rows.run", np.dtype([("key", "<u8"), ("value", "<u4"), ("map", "<i4")]), origin="map")
FULL = Table("texts.run", np.dtype([("key", "<u8"), ("size", "<i8"), ("value", "<u4")]), payload=True)
SMALL = Limits(
    fan_in=3,
    task_bytes=300,
    least_segments=4,
    segment_bytes=64,
    block_bytes=50,
    read_bytes=120,
    reads_in_flight=3,
    merge_memory_bytes=400,
)


@dataclass
class Folders:
    """Runs tasks at once, each in a folder of its own, as `run_task` does."""

    folder: Path
    tasks: int = 0

    def __call__(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        return [[self.run_one(task) for task in group] for group in groups]

    def run_one(self, task: Task) -> Commit:
        self.tasks += 1
        folder = self.folder / task.key
        folder.mkdir(parents=True, exist_ok=True)
        task.run(folder)
        return commit_of(folder, task.stage, task.name)


def commit_of(folder: Path, stage: str, name: str) -> Commit:
    outputs: dict[str, Output] = {path.name: hash_output(path) for path in folder.iterdir()}
    return Commit(stage, name, folder, "", facts_of({}, outputs))


def rows_of(table: Table, keys: Sequence[int], first_value: int = 0) -> npt.NDArray[np.void]:
    rows = np.zeros(len(keys), table.dtype)
    rows["key"] = keys
    rows["value"] = np.arange(first_value, first_value + len(keys))
    return rows


def payload_of(rows: npt.NDArray[np.void], seed: int) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    rows["size"] = rng.integers(0, 40, len(rows)) * rng.integers(0, 2, len(rows))
    return rng.integers(0, 256, int(rows["size"].sum()), np.uint8).astype(np.uint8)


def write_maps(
    folder: Path, table: Table, maps: Sequence[Sequence[Sequence[int]]], memory_bytes: int = 300
) -> tuple[list[Commit], list[tuple[object, ...]]]:
    """Commits of map tasks that write these keys in these batches; and what a reader must see of them all."""
    commits, expected = [], []
    for number, batches in enumerate(maps):
        task = folder / "maps" / str(number)
        task.mkdir(parents=True)
        value = 0
        with RunWriter(task / table.file, table, memory_bytes=memory_bytes, limits=SMALL) as writer:
            for batch in batches:
                rows = rows_of(table, batch, value)
                value += len(rows)
                payload = payload_of(rows, number * 1000 + value) if table.payload else None
                writer.write(rows, payload)
                ends = np.cumsum(rows["size"]).tolist() if table.payload else [0] * len(rows)
                for row, end in zip(rows, ends, strict=True):
                    text = b"" if payload is None else payload[end - int(row["size"]) : end].tobytes()
                    expected.append((int(row["key"]), number, int(row["value"]), text))
        assert [path.name for path in task.iterdir()] == [table.file]
        commits.append(commit_of(task, "maps", str(number)))
    return commits, sorted(expected)


def seen(
    table: Table, rows: npt.NDArray[np.void], payload: npt.NDArray[np.uint8]
) -> list[tuple[object, ...]]:
    ends = np.cumsum(rows["size"]).tolist() if table.payload else [0] * len(rows)
    assert (ends[-1] if ends else 0) == len(payload)
    found: list[tuple[object, ...]] = []
    for row, end in zip(rows, ends, strict=True):
        text = payload[end - int(row["size"]) : end].tobytes() if table.payload else b""
        found.append((int(row["key"]), int(row["map"]) if table.origin else None, int(row["value"]), text))
    return found


keys = st.one_of(st.integers(0, 20), st.integers(0, 999), st.just(7))
batches = st.lists(st.lists(keys, max_size=40), max_size=4)


@given(
    table=st.sampled_from([PLAIN, FULL]),
    maps=st.lists(batches, max_size=11),
    readers=st.integers(1, 5),
    end=st.sampled_from([1000, 1 << 20]),
    memory_bytes=st.sampled_from([100, 1000, 100_000]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_reader_sees_the_rows_of_its_range_by_key_then_map_then_order_of_writing(
    tmp_path_factory: pytest.TempPathFactory,
    table: Table,
    maps: list[list[list[int]]],
    readers: int,
    end: int,
    memory_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("exchange")
    commits, expected = write_maps(folder, table, maps)
    run = Folders(folder)
    exchanged = exchange(run, ROWS, table, commits, readers=readers, end=end, limits=SMALL)
    assert len(exchanged.runs) <= SMALL.fan_in
    found: list[tuple[object, ...]] = []
    for reader in range(readers):
        part = exchanged.slice(end * reader // readers, end * (reader + 1) // readers)
        whole = seen(table, *part.read())
        assert [row for batch in part.stream(memory_bytes) for row in seen(table, *batch)] == whole
        found += whole
    if not table.origin:  # not stored: the order shows it
        expected = [(key, None, value, text) for key, _, value, text in expected]
    assert found == expected


def test_small_exchanges_do_not_merge_and_large_ones_merge_until_readers_meet_few_runs(
    tmp_path: Path,
) -> None:
    limits = replace(SMALL, least_segments=1000)
    commits, _ = write_maps(tmp_path, PLAIN, [[[n]] for n in range(10)])
    run = Folders(tmp_path)
    assert len(exchange(run, FEW, PLAIN, commits[:3], readers=9, limits=limits).runs) == 3
    assert run.tasks == 0
    merged = exchange(run, MANY, PLAIN, commits, readers=9, end=10, limits=limits)
    assert len(merged.runs) == 2  # 10 runs, then 4, then 2: not above the fan-in
    assert sorted(path.name for path in (tmp_path).glob("many-*")) == [
        "many-rows-merge-1",
        "many-rows-merge-2",
    ]
    one = merged.slice(4, 5)
    assert [len(run) for run in one.runs] == [1, 1]  # a reader opens no files of other ranges
    assert one.read()[0]["map"].tolist() == [4]


def test_requests_of_readers_grow_with_bytes_not_with_maps_times_readers(tmp_path: Path) -> None:
    files = []
    for maps in (6, 48):
        rng = np.random.default_rng(maps)
        lists = [[rng.integers(0, 1 << 63, 10).tolist()] for _ in range(maps)]
        commits, _ = write_maps(tmp_path / str(maps), PLAIN, lists)
        run = Folders(tmp_path / str(maps))
        exchanged = exchange(run, ROWS, PLAIN, commits, readers=maps, limits=SMALL)
        step = (1 << 64) // maps
        files.append(sum(len(r) for n in range(maps) for r in exchanged.slice(n * step, (n + 1) * step).runs))
    assert files[1] < 16 * files[0]  # all pairs: 64 times as many


def test_merge_tasks_are_named_by_content_and_an_added_map_repeats_only_its_group(tmp_path: Path) -> None:
    commits, _ = write_maps(tmp_path, PLAIN, [[[n, n + 500]] for n in range(10)])
    tasks: list[list[str]] = []
    for count in (9, 9, 10):

        def run(*groups: Sequence[Task]) -> list[list[Commit]]:
            tasks[-1].extend(
                task.key for group in groups for task in group if task.stage == "rows-rows-merge-1"
            )
            return Folders(tmp_path)(*groups)

        tasks.append([])
        exchange(run, ROWS, PLAIN, commits[:count], readers=2, end=1000, limits=SMALL)
    assert tasks[0] == tasks[1] == tasks[2][: len(tasks[0])]
    assert len(tasks[2]) > len(tasks[0])


def test_the_content_of_a_slice_follows_its_content_not_its_place(tmp_path: Path) -> None:
    digests = []
    for name, key in (("a", 1), ("b", 1), ("c", 2)):
        commits, _ = write_maps(tmp_path / name, PLAIN, [[[key, 900]]])
        digests.append(exchange(Folders(tmp_path), ROWS, PLAIN, commits, readers=1).slice(0, 1000).content)
    assert digests[0] == digests[1] != digests[2]


def test_a_key_is_divided_between_batches_only_if_it_alone_is_large(tmp_path: Path) -> None:
    maps = [[[5] * 30 + [6] * 4, [7] * 2000] for _ in range(3)]
    commits, expected = write_maps(tmp_path, PLAIN, maps)
    part = exchange(Folders(tmp_path), ROWS, PLAIN, commits, readers=1, limits=SMALL).slice(0, 1 << 64)
    batches = [rows for rows, _ in part.stream(8000)]
    assert [row for rows in batches for row in seen(PLAIN, rows, np.empty(0, np.uint8))] == expected
    for key in (5, 6):
        assert sum((rows["key"] == key).any() for rows in batches) == 1
    assert sum((rows["key"] == 7).any() for rows in batches) > 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("table", [PLAIN, FULL])
@pytest.mark.parametrize("damage", ["empty", "cut", "flip", "other table"])
def test_damaged_files_are_refused(tmp_path: Path, table: Table, damage: str) -> None:
    commits, _ = write_maps(tmp_path, table, [[list(range(100))]])
    file = commits[0].folder / table.file
    data = file.read_bytes()
    exchanged = exchange(Folders(tmp_path), ROWS, table, commits, readers=1, limits=SMALL)
    for at in range(0, len(data), 17):
        if damage == "other table":
            other = replace(table, dtype=np.dtype([*table.dtype.descr, ("more", "<u4")]))
            exchanged = Exchanged(other, exchanged.runs, SMALL)
        else:
            flipped = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            file.write_bytes({"empty": b"", "cut": data[:at], "flip": flipped}[damage])
        with pytest.raises(BuildError, match=r"differ from their hash; run the same command"):
            exchanged.slice(0, 1 << 64).read()


def test_a_row_is_written_once_more_for_each_factor_of_the_fan_in_however_many_spills(tmp_path: Path) -> None:
    limits = Limits(fan_in=2)
    rows = rows_of(PLAIN, np.random.default_rng(1).integers(0, 1 << 40, 300).tolist())
    before = written_bytes()
    with RunWriter(tmp_path / "rows.run", PLAIN, memory_bytes=rows.nbytes, limits=limits) as writer:
        for _ in range(80):  # spills: 2 ** 6 and some
            writer.write(rows)
    assert written_bytes() - before < 12 * 80 * rows.nbytes
    found = Slice.whole(PLAIN, [Artifact(tmp_path / "rows.run")]).read()[0]
    assert found["value"].tolist() == np.repeat(rows[np.argsort(rows["key"])]["value"], 80).tolist()


def written_bytes() -> int:
    """What this process has written to files so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["wchar"])


def test_keys_that_no_reader_could_ask_for_are_an_error(tmp_path: Path) -> None:
    commits, _ = write_maps(tmp_path, PLAIN, [[[3, 10]]])
    exchanged = exchange(Folders(tmp_path), ROWS, PLAIN, commits, readers=1, end=10)
    with pytest.raises(AssertionError, match=r"rows\.run: key 10 is beyond the range"):
        exchanged.slice(0, 5).read()


def test_runs_that_someone_else_made_end_in_an_error_and_not_in_a_loop(tmp_path: Path) -> None:
    path, none = tmp_path / "rows.run", np.empty(0, np.uint8)
    for keys in ([9, 1, 5], [1] * 90 + [0] * 90):
        with BlockWriter(path, PLAIN, 0, SMALL) as writer:
            writer.write(rows_of(PLAIN, keys), none)
        with pytest.raises(BuildError, match=r"rows\.run: its keys are not sorted"):
            Slice.whole(PLAIN, [Artifact(path)], SMALL).read()
    with BlockWriter(path, PLAIN, 0, DEFAULT_LIMITS) as writer:
        writer.write(rows_of(PLAIN, [1, 2]), none)
    data = bytearray(path.read_bytes())
    footer = slice(len(data) - 32 - 40, len(data) - 32)
    data[footer.start + 16 : footer.start + 20] = (1 << 31).to_bytes(4, "little")  # rows
    data[-16:] = xxhash.xxh3_128_digest(data[footer] + PLAIN.layout.encode())
    path.write_bytes(data)
    with pytest.raises(BuildError, match="differ from their hash"):
        Slice.whole(PLAIN, [Artifact(path)]).read()
    data[footer.start + 16 : footer.start + 20] = (3).to_bytes(4, "little")
    data[-16:] = xxhash.xxh3_128_digest(data[footer] + PLAIN.layout.encode())
    path.write_bytes(data)
    with pytest.raises(BuildError, match=r"rows\.run: 31 bytes are not 3 packed rows; run the same"):
        Slice.whole(PLAIN, [Artifact(path)]).read()


@pytest.mark.extended
def test_memory_is_bounded_whatever_is_written_and_streamed(tmp_path: Path) -> None:
    limits = Limits(fan_in=8, block_bytes=1 << 14, read_bytes=1 << 15)
    rng = np.random.default_rng(1)

    def write_and_stream(batches: int) -> int:
        segments = []
        for number in range(2):
            path = tmp_path / str(number)
            with RunWriter(path, FULL, memory_bytes=1 << 20, limits=limits) as writer:
                for _ in range(batches):
                    rows = np.zeros(100, FULL.dtype)
                    rows["key"], rows["size"] = rng.integers(0, 1 << 60, 100), 1000
                    writer.write(rows, np.zeros(100_000, np.uint8))
            segments.append((Segment(Artifact(path), path.stat().st_size, "", 0, 1 << 64),))
        both = Slice(FULL, tuple(segments), 0, 1 << 64, limits)
        return sum(len(rows) for rows, _ in both.stream(1 << 20))

    write_and_stream(8)  # compiles
    tracemalloc.start()
    count = write_and_stream(80)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 2 * 80 * 100
    assert peak < 1.5 * (1 << 20)  # of 16 MB


def test_rows_of_some_keys_are_found_without_reading_the_blocks_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, random = replace(DEFAULT_LIMITS, block_bytes=4096), np.random.default_rng(3)
    runs = []
    for number in range(2):
        keys = np.sort(random.integers(0, 1 << 64, 100_000, dtype=np.uint64, endpoint=False))
        keys[5000:5600] = keys[5000]  # more than a block
        rows = rows_of(PLAIN, keys.tolist(), 100_000 * number)
        with BlockWriter(tmp_path / f"{number}.run", PLAIN, rows.nbytes, limits) as writer:
            writer.write(rows, np.empty(0, np.uint8))
        runs.append(rows)
    piece = Slice.whole(PLAIN, [Artifact(tmp_path / f"{number}.run") for number in range(2)], limits)
    found = [
        0,
        *runs[0]["key"][[0, 5000, 70_000, -1]].tolist(),
        *runs[1]["key"][[17, 99_000]].tolist(),
        1 << 63,
    ]
    wanted = np.unique(np.array(found, np.uint64))
    read = list[int]()
    read_range = Artifact.read_range

    def counted(
        self: Artifact, start: int, stop: int, is_right: Callable[..., bool]
    ) -> npt.NDArray[np.uint8]:
        read.append(stop - start)
        return read_range(self, start, stop, is_right)

    monkeypatch.setattr(Artifact, "read_range", counted)
    rows = piece.matching(wanted)
    both = np.concatenate(runs)
    both = both[np.argsort(both["key"], kind="stable")]
    assert rows["value"].tolist() == both["value"][np.isin(both["key"], wanted)].tolist()
    assert sum(read) < 2 * (65_536 + 8192) + (2 * len(wanted) + 4) * 4200 < (100_000 * 16 * 2) / 8
    assert not len(piece.matching(np.array([], np.uint64)))


def test_footers_stay_below_64_kib(tmp_path: Path) -> None:
    path = tmp_path / "rows.run"
    limits = Limits(block_bytes=64)
    with RunWriter(path, PLAIN, memory_bytes=1 << 20, limits=limits) as writer:
        for start in range(0, 100_000, 10_000):
            writer.write(rows_of(PLAIN, range(start, start + 10_000)))
    segment = Segment(Artifact(path), path.stat().st_size, "", 0, 1 << 64, 0)
    blocks = read_footer(segment, PLAIN, limits).blocks
    assert len(blocks) > 64
    assert blocks.nbytes < 64 << 10
    part = Slice(PLAIN, ((segment,),), 70_000, 70_003, limits)
    assert part.read()[0]["key"].tolist() == [70_000, 70_001, 70_002]


def write_numbers(folder: Path, first: int, count: int) -> dict[str, int]:
    with RunWriter(folder / PLAIN.file, PLAIN, memory_bytes=1 << 20) as writer:
        writer.write(rows_of(PLAIN, range(first, first + count)))
    return {"rows": count}


MAPS = Stage("maps", "maps", write_numbers)


class Counted(WrappedStore):
    """Notes the bytes of every range of a run that is asked for."""

    ranges: ClassVar[list[int]] = []

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Body:
        if key.endswith(PLAIN.file):
            self.ranges.append((stop or 0) - start)
        return self.below.open(key, start, stop, version=version)


def store_work(tmp_path: Path, url: str, around: Callable[[Store], Store]) -> Work:
    work = Work(url, tmp_path / f"scratch-{len(list(tmp_path.iterdir()))}", around=around)
    work = work.claimed()
    work.prepare()
    return work


def test_a_slice_in_a_store_takes_one_request_a_small_file_and_two_of_a_large_one(tmp_path: Path) -> None:
    url, count = f"{fresh_url()}/work", 500_000
    work = store_work(tmp_path, url, Counted)
    sizes = (1000, 2000, count)
    tasks = [MAPS.task(str(n), 0, n, rows) for n, rows in enumerate(sizes)]
    commits = [run_task(task, task.digest, work) for task in tasks]
    exchanged = exchange(Folders(tmp_path), ROWS, PLAIN, commits, readers=1)
    Counted.ranges.clear()
    assert len(exchanged.slice(0, 1 << 64).read()[0]) == sum(sizes)
    whole = sum(commit.outputs[PLAIN.file].bytes for commit in commits)
    assert whole <= sum(Counted.ranges) <= whole + 4096
    request_bytes = DEFAULT_LIMITS.chunk_bytes(DEFAULT_LIMITS.read_memory_bytes, len(sizes))
    assert len(Counted.ranges) <= 3 + -(-count * PLAIN.dtype.itemsize // request_bytes)
    Counted.ranges.clear()
    part = exchanged.slice(100_000, 100_010)
    assert part.read()[0]["key"].tolist() == [*range(100_000, 100_010)]
    assert len(Counted.ranges) == 4  # two small files, of the large one its footer and a block
    assert sum(Counted.ranges) < 1.3 * DEFAULT_LIMITS.block_bytes + 3000 * PLAIN.dtype.itemsize


@pytest.mark.parametrize("rows", [1000, 500_000])
def test_a_byte_flipped_on_the_way_is_read_again_and_one_flipped_in_the_store_repeats_the_task(
    tmp_path: Path, rows: int
) -> None:
    url = f"{fresh_url()}/work"
    flips = FaultRule(fault="corrupt", operation="read", key=PLAIN.file, count=2, after_bytes=9)
    work = store_work(tmp_path, url, partial(FaultyStore, rules=(flips,)))
    task = MAPS.task("0", 0, 0, rows)
    commit = run_task(task, task.digest, work)
    part = exchange(Folders(tmp_path), ROWS, PLAIN, [commit], readers=1).slice(0, 1 << 64)
    assert part.read()[0]["key"].tolist() == [*range(rows)]
    store = MemoryStore(url)
    assert any(info.key.endswith(COMMIT_NAME) for info in store.list())
    data = bytearray(store.get(f"{task.key}/{PLAIN.file}"))
    data[len(data) // 2] ^= 1
    store.put(f"{task.key}/{PLAIN.file}", bytes(data))
    with pytest.raises(OSError, match="run the build again to repeat its task"):
        part.read()
    assert not any(info.key.endswith(COMMIT_NAME) for info in store.list())


def test_divided_limits_treat_small_data_as_limits_treat_large(tmp_path: Path) -> None:
    small = DEFAULT_LIMITS.divided(256)
    assert (small.block_bytes, small.read_bytes, small.task_bytes) == (1 << 10, 1 << 16, 1 << 22)
    assert (small.fan_in, small.reads_in_flight) == (DEFAULT_LIMITS.fan_in, DEFAULT_LIMITS.reads_in_flight)
    for runs, size, readers in ((65, 1 << 40, 1), (64, 1 << 30, 5), (64, 1 << 30, 100), (2, 1 << 20, 500)):
        assert small.merges(runs, size // 256, readers) == DEFAULT_LIMITS.merges(runs, size, readers)
