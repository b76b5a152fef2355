"""Work folders on a disk and in a store keep one contract; what comes from a store is what was committed."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pytest

from shardkit.errors import BuildError
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import Store, StoreError
from shardkit.writers.execution import scratch
from shardkit.writers.execution.artifacts import Artifact, read_into
from shardkit.writers.execution.checked_ranges import CACHE_BYTES
from shardkit.writers.execution.commit import BLOCK_BYTES, Commit
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.processes import answer
from shardkit.writers.execution.runner import Journal
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.work import COMMIT_NAME, Work, run_task
from support.remote_harness import fresh_url
from support.stores import FaultRule, FaultyStore

DATA = random.Random(3).randbytes(5 * BLOCK_BYTES + 17)
Works = Callable[[], Work]
_numbers = itertools.count()


def write(folder: Path, data: Annotated[bytes, DecidesNoByte("a test says so")], key: int) -> dict[str, int]:
    (folder / "sub").mkdir()
    (folder / "sub" / "small").write_bytes(data[:100])
    (folder / "large").write_bytes(data)
    (folder / "empty").touch()
    return {"bytes": len(data)}


def make_task(data: bytes = DATA, key: int = 1) -> Task:
    return Stage("stage", "stage", write).task("task", 0, data, key)


TASK = make_task()
RECORD = f"{TASK.key}/{COMMIT_NAME}"


def store_work(tmp_path: Path, url: str, *rules: FaultRule) -> Work:
    """As another machine has it: with a scratch folder of its own."""
    around = partial(FaultyStore, rules=rules) if rules else None
    work = Work(url, tmp_path / f"scratch-{next(_numbers)}", around=around).claimed()
    work.prepare()
    return work


@pytest.fixture
def url() -> str:
    return f"{fresh_url()}/work"


@pytest.fixture(params=["local", "store"])
def works(request: pytest.FixtureRequest, tmp_path: Path, url: str) -> Works:
    """Makes the same work folder as different machines see it."""
    (tmp_path / "work").mkdir()
    return lambda: Work.at(tmp_path / "work") if request.param == "local" else store_work(tmp_path, url)


def run(work: Work, task: Task = TASK) -> Commit:
    return run_task(task, task.digest, work)


def output(work: Work, name: str, task: Task = TASK) -> Artifact:
    return Artifact(work.folder / task.key, work.remote) / name


def read(work: Work, name: str, task: Task = TASK) -> bytes:
    return output(work, name, task).read_bytes()


def objects(url: str, prefix: str) -> list[str]:
    return [info.key for info in MemoryStore(url).list(prefix)]


def damage(url: str, key: str, at: int) -> None:
    store = MemoryStore(url)
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.put(key, bytes(data))


def test_another_machine_finds_and_reads_what_one_committed(works: Works) -> None:
    made = run(works())
    other = works()
    expected = replace(made, folder=other.folder / TASK.key, reused=True)
    assert other.find([TASK, make_task(key=2)]) == [expected, None]
    assert [key for key, _ in other.commits("stage")] == [TASK.key]
    assert list(other.commits("another")) == []
    assert [read(other, name) for name in ("large", "sub/small", "empty")] == [DATA, DATA[:100], b""]
    assert output(other, "sub/small").local().read_bytes() == DATA[:100]
    assert output(other, "large").size() == len(DATA)
    [commit] = other.find([TASK])
    assert commit is not None
    assert other.damaged_output(commit) is None


def test_notes_are_read_by_other_machines_and_replaced_whole(works: Works) -> None:
    works().write_note("inputs", b"first")
    works().write_note("inputs", b"second")
    assert works().read_note("inputs") == b"second"
    assert works().read_note("other") is None
    assert list(works().commits()) == []


def test_what_is_borrowed_is_one_readers_own_and_goes_with_it(works: Works) -> None:
    work = works()
    file = run(work).files / "large"
    with file.borrowed() as one:
        with file.borrowed() as two:
            assert one.read_bytes() == two.read_bytes() == DATA
        assert one.read_bytes() == DATA
    assert one.exists() is (work.remote is None)


def test_a_task_done_by_two_is_the_first_ones(works: Works) -> None:
    run(works())
    assert run(works()).outputs == run(works()).outputs
    with pytest.raises(BuildError, match="two runs of it wrote different bytes"):
        run(works(), make_task(DATA[::-1]))
    assert read(works(), "large") == DATA, "the first one's outputs were written over"


def test_a_forgotten_task_is_gone_and_can_be_made_again(works: Works) -> None:
    work = works()
    work.forget(run(work).key)
    assert works().find([TASK]) == [None]
    run(work)
    assert read(works(), "large") == DATA


def test_a_task_without_its_record_or_an_output_runs_again(tmp_path: Path, url: str) -> None:
    for name in (COMMIT_NAME, "large"):
        run(store_work(tmp_path, url))
        MemoryStore(url).delete(f"{TASK.key}/{name}")
        work = store_work(tmp_path, url)
        assert work.find([TASK]) == [None]
        run(work)
        assert read(store_work(tmp_path, url), "large") == DATA


def test_a_record_that_cannot_be_read_is_written_again(tmp_path: Path, url: str) -> None:
    run(store_work(tmp_path, url))
    MemoryStore(url).put(RECORD, b"{")
    work = store_work(tmp_path, url)
    assert work.find([TASK]) == [None]
    run(work)
    assert store_work(tmp_path, url).find([TASK]) != [None]


@pytest.mark.parametrize("seed", range(3))
def test_any_reads_give_what_a_local_file_gives(tmp_path: Path, url: str, seed: int) -> None:
    work, draw = store_work(tmp_path, url), random.Random(seed)
    file_of_task = run(work).files / "large"
    with file_of_task.open() as file:
        for _ in range(60):
            start, count = draw.randrange(len(DATA) + 5), draw.choice([1, 100, 70_000, 2 * BLOCK_BYTES])
            file.seek(start)
            buffer = memoryview(bytearray(count))
            got = read_into(file, buffer)
            assert bytes(buffer[:got]) == DATA[start : start + count]


class Counted:
    """Notes the ranges that are asked for."""

    def __init__(self, below: Store) -> None:
        self._below = below
        self.ranges: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def open(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> Any:
        if key.startswith("stage/") and not key.endswith(COMMIT_NAME):
            self.ranges.append((start, stop or 0))
        return self._below.open(key, start, stop, version=version)


def test_small_reads_fetch_single_blocks_once(tmp_path: Path, url: str) -> None:
    counted: list[Counted] = []

    def around(store: Store) -> Store:
        counted.append(Counted(store))
        return counted[-1]

    work = Work(url, tmp_path / "scratch", around=around).claimed()
    work.prepare()
    file_of_task = run(work).files / "large"
    for _ in range(3):  # each time another open file
        for start in (10, 3 * BLOCK_BYTES + 7, len(DATA) - 16):
            with file_of_task.open() as file:
                file.seek(start)
                assert file.read(15) == DATA[start : start + 15]
    assert counted[0].ranges == [
        (0, BLOCK_BYTES),
        (3 * BLOCK_BYTES, 4 * BLOCK_BYTES),
        (5 * BLOCK_BYTES, len(DATA)),
    ]
    assert CACHE_BYTES <= 32 << 20, "it comes on top of what a recipe lets a worker use"


def test_a_byte_that_is_flipped_on_the_way_is_read_again(tmp_path: Path, url: str) -> None:
    run(store_work(tmp_path, url))
    flipped = FaultRule(fault="corrupt", operation="read", key="large", count=1, after_bytes=1000)
    small = FaultRule(fault="corrupt", operation="read", key="small", count=2)
    work = store_work(tmp_path, url, flipped, small)
    assert read(work, "large") == DATA
    assert read(work, "sub/small") == DATA[:100]
    assert RECORD in objects(url, "stage/")


@pytest.mark.parametrize("name", ["large", "sub/small"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_damaged_output_is_named_and_its_task_made_again(
    tmp_path: Path, url: str, name: str, harm: str
) -> None:
    run(store_work(tmp_path, url))
    key, store = f"{TASK.key}/{name}", MemoryStore(url)
    if harm == "flip":
        damage(url, key, -1)
    elif harm == "cut":
        store.put(key, store.get(key)[:-20])
    else:
        store.delete(key)
    work = store_work(tmp_path, url)
    with pytest.raises(OSError, match="run the build again to repeat its task"):
        read(work, name)
    assert RECORD not in objects(url, "stage/")
    assert work.find([TASK]) == [None]
    run(work)
    assert read(store_work(tmp_path, url), "large") == DATA


def test_damage_is_told_by_the_task_that_meets_it_and_a_failing_store_is_no_damage(
    tmp_path: Path, url: str
) -> None:
    def reader_in(work: Work) -> Task:
        file = replace(output(work, "large"), content="of a file")
        return Stage("next", "next", read_file).task("reader", 0, file)

    commit = run(store_work(tmp_path, url))
    deny = FaultRule(fault="deny", operation="read", key="/large")
    work = store_work(tmp_path, url, deny)
    with pytest.raises(BuildError, match="AccessDenied"):
        work.damaged_output(replace(commit, folder=work.folder / TASK.key))
    reader = reader_in(work)
    _, error, _ = pickle.loads(answer(reader, reader.digest, work))
    assert "task next/reader" in str(error)
    assert "AccessDenied" in str(error)
    assert RECORD in objects(url, "stage/"), "a task was forgotten for a request that failed"
    damage(url, f"{TASK.key}/large", 5)
    work = store_work(tmp_path, url)
    reader = reader_in(work)
    _, error, _ = pickle.loads(answer(reader, reader.digest, work))
    assert "task next/reader" in str(error)
    assert "bytes 0 to" in str(error)
    assert f"{url}/{TASK.key}/large" in str(error)


def read_file(folder: Path, file: Artifact) -> None:
    file.read_bytes()


@pytest.mark.parametrize("operation", ["put", "read", "list"])
def test_throttling_and_errors_that_pass_are_survived(tmp_path: Path, url: str, operation: str) -> None:
    rules = [FaultRule(fault=f, operation=operation, count=2) for f in ("throttle", "error")]  # type: ignore[arg-type]
    work = store_work(tmp_path, url, *rules)
    commit = run(work)
    assert work.find([TASK]) == [replace(commit, reused=True)]
    assert read(work, "large") == DATA


def test_a_lost_acknowledgement_of_a_commit_is_a_commit(tmp_path: Path, url: str) -> None:
    work = store_work(tmp_path, url, FaultRule(fault="lost_ack", operation="put", key=COMMIT_NAME, count=1))
    assert not run(work).reused
    assert work.find([TASK]) != [None]


def test_a_store_that_fails_for_good_ends_a_task_with_its_name_and_what_to_do(
    tmp_path: Path, url: str
) -> None:
    work = store_work(tmp_path, url, FaultRule(fault="deny", operation="put", key="/large"))
    with pytest.raises(BuildError, match=r"task stage/task: .*AccessDenied.*run the same command again"):
        run(work)
    assert RECORD not in objects(url, "stage/")
    work = store_work(tmp_path, url, FaultRule(fault="deny", operation="list", key="stage/"))
    with pytest.raises(BuildError, match=r"work folder memory://.*AccessDenied"):
        work.find([TASK, make_task(key=2)])


def test_what_a_machine_remembers_of_a_folder_that_was_removed_is_not_believed(
    tmp_path: Path, url: str
) -> None:
    machine = Work(url, tmp_path / "machine")
    with Journal(machine) as journal:
        first = run(journal.work)
        (first.files / "sub/small").local()
    for key in objects(url, ""):
        MemoryStore(url).delete(key)
    os.close(scratch._locks.pop(first.folder.parent.parent))  # as the end of a process does
    run(store_work(tmp_path, url), make_task(DATA[::-1]))
    with Journal(machine) as journal:
        [commit] = journal.find([make_task()])
        assert commit is not None
        assert (commit.files / "sub/small").read_bytes() == DATA[::-1][:100]
        assert not first.folder.exists(), "what nobody can use any more is still on the disk"


def test_a_place_with_other_objects_is_refused_and_untouched(tmp_path: Path, url: str) -> None:
    MemoryStore(url).put("thesis.txt", b"precious")
    with pytest.raises(BuildError, match=r"contains files that no build wrote \(thesis\.txt\)"):
        store_work(tmp_path, url)
    assert objects(url, "") == ["thesis.txt"]


def test_removing_the_work_folder_removes_all_of_it(tmp_path: Path, url: str) -> None:
    with Journal(Work(url, tmp_path / "scratch")) as journal:
        run(journal.work)
        journal.remove()
    assert objects(url, "") == []
    assert list((tmp_path / "scratch").iterdir()) == []


def test_removing_the_work_folder_in_a_bucket_leaves_what_others_put_there_later(
    tmp_path: Path, url: str
) -> None:
    with Journal(Work(url, tmp_path / "scratch")) as journal:
        run(journal.work)
        MemoryStore(url).put("dataset/part.00000.mds", b"precious")
        journal.remove()
    assert objects(url, "") == ["dataset/part.00000.mds"]


def test_a_place_is_empty_until_it_is_claimed(works: Works, tmp_path: Path, url: str) -> None:
    place = works().place
    untouched = Work.at(Path(place)) if works().local else Work(f"{url}-2", tmp_path / "other")
    assert untouched.is_empty()
    assert not untouched.claimed().is_empty()
    assert not untouched.is_empty()


def test_a_marker_without_an_id_is_that_of_an_earlier_version(tmp_path: Path) -> None:
    work = Work.at(tmp_path)
    first = work.claimed()
    marker = tmp_path / "shardkit-work.txt"
    marker.write_bytes(marker.read_bytes().partition(b"id: ")[0])
    assert work.claimed() == replace(first, id="none")
    marker.write_bytes(b"another")
    with pytest.raises(BuildError, match="is not a valid marker"):
        work.claimed()


def test_only_looking_remembers_and_removes_nothing(tmp_path: Path, url: str) -> None:
    run(store_work(tmp_path, url))
    MemoryStore(url).delete(f"{TASK.key}/large")
    looking = Work(url, tmp_path / "looking")
    assert looking.find([TASK]) == [None]
    assert len(list(looking.commits())) == 1
    assert not looking.folder.exists()


def test_it_goes_to_workers_and_is_the_same_there(tmp_path: Path, url: str) -> None:
    work = store_work(tmp_path, url)
    run(work)
    copy = pickle.loads(pickle.dumps(work))
    assert copy == work
    assert copy.find([TASK]) != [None]


def test_scratch_folders_are_private_and_what_killed_tasks_left_goes(tmp_path: Path, url: str) -> None:
    work = store_work(tmp_path, url)
    assert stat.S_IMODE(work.folder.stat().st_mode) == 0o700
    left = work.temporary("stage.task") / "half"
    left.touch()
    work.prepare()
    assert left.exists(), "it is this process's own"
    os.close(scratch._locks.pop(work.folder))  # as the end of a process does
    work.prepare()
    assert not left.exists()


def test_a_scratch_folder_that_others_may_write_is_refused(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = scratch.default_scratch(url)
    folder.parent.mkdir()
    folder.parent.chmod(0o777)
    with pytest.raises(BuildError, match="everybody can write there; remove it"):
        Work(url, folder).claimed().prepare()
    folder.parent.chmod(0o700)
    Work(url, folder).claimed().prepare()


def test_a_store_that_is_not_there_is_named(tmp_path: Path, url: str) -> None:
    def around(store: Store) -> Store:
        return FaultyStore(store, [FaultRule(fault="deny")])

    with pytest.raises(BuildError, match=r"work folder memory://.*AccessDenied") as caught:
        Work(url, tmp_path, around=around).claimed()
    assert isinstance(caught.value.__cause__, StoreError)


READ_ALL = """
import resource, sys
from pathlib import Path
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.stages.tokenize import _texts_of

texts = _texts_of(Artifact(Path(sys.argv[1])))
size = len(next(texts))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size += sum(map(len, texts))
print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_reading_a_file_of_documents_takes_the_memory_of_a_batch(tmp_path: Path) -> None:
    """A map of the file would count all that was read, gigabytes of it."""
    batch = pa.record_batch({"text": [random.Random(7).randbytes(1 << 19).hex()]})
    with pa.ipc.new_file(tmp_path / "documents.arrow", batch.schema) as writer:
        for _ in range(100):
            writer.write(batch)
    command = [sys.executable, "-c", READ_ALL, str(tmp_path / "documents.arrow")]
    size, grown_kib = map(int, subprocess.run(command, check=True, capture_output=True).stdout.split())
    assert size == 100 << 20
    assert grown_kib < 30_000
