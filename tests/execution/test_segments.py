"""Finished tasks in a store are read back by few requests, and none is believed that is not there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from shardkit.progress import make_listener
from shardkit.storage.memory import MemoryStore
from shardkit.storage.store import ObjectChangedError, Store
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.engine import InlineEngine
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.work import COMMIT_NAME, Work, run_task
from support.remote_harness import fresh_url
from support.stores import WrappedStore

T = TypeVar("T")


def note(folder: Path, number: int, setting: str) -> dict[str, int]:
    (folder / "file").write_text(str(number))
    return {"number": number}


def make_tasks(count: int) -> list[Task]:
    return [Stage("stage", "stage", note).task(f"t{n:05d}", 0, n, "x" * 500) for n in range(count)]


class CountingStore(WrappedStore):
    """Counts requests by operation and the first part of the key, or "records"; 1,000 keys a listing."""

    def __init__(self, below: Store, requests: Counter[tuple[str, str]]) -> None:
        super().__init__(below)
        self._requests = requests

    def request(self, operation: str, key: str, action: Callable[[], T]) -> T:
        kind = "read" if operation in ("get", "open") else operation
        what = "records" if key.endswith(COMMIT_NAME) else key.partition("/")[0]
        self._requests[kind, what] += 1
        result = action()
        if isinstance(result, list):
            self._requests[kind, what] += len(result) // 1000
        return result


@pytest.fixture
def url() -> str:
    return f"{fresh_url()}/work"


def work_of(url: str, scratch_folder: Path, requests: Counter[tuple[str, str]], records: int = 30) -> Work:
    def around(store: Store) -> Store:
        return CountingStore(store, requests)

    return Work(url, scratch_folder, around=around, segment_records=records)


def run(work: Work, tasks: Sequence[Task], end: int | None = None) -> list[Commit]:
    """Run a stage; with `end`, the driver is killed after so many tasks."""

    class Killed(BaseException):
        pass

    left = [end]

    def run_one(task: Task, digest: str, work: object) -> Commit:
        if left[0] is not None:
            if not left[0]:
                raise Killed
            left[0] -= 1
        return run_task(task, digest, work)  # type: ignore[arg-type]

    with make_listener(False) as listener, Journal(work) as journal:
        try:
            [commits] = Runner(journal, InlineEngine(run_one), listener).run(tasks)
        except Killed:
            return []
        return commits


def test_a_driver_that_starts_again_reads_segments_and_only_what_came_after_them_singly(
    url: str, tmp_path: Path
) -> None:
    tasks, requests = make_tasks(135), Counter[tuple[str, str]]()
    run(work_of(url, tmp_path / "a", requests), tasks, end=105)  # the last 15 are in no segment
    assert requests["put", "segments"] == 3
    requests.clear()
    commits = run(work_of(url, tmp_path / "b", requests), tasks)
    assert [commit.result["number"] for commit in commits] == list(range(135))
    assert sum(commit.reused for commit in commits) == 105
    assert requests["read", "segments"] == 3
    assert requests["read", "records"] == 15 + 30, "15 that no segment has; a look of each worker for its own"
    requests.clear()
    again = run(work_of(url, tmp_path / "c", requests), tasks)
    assert again == [
        Commit(c.stage, c.name, d.folder, c.digest, c.facts, reused=True)
        for c, d in zip(commits, again, strict=True)
    ]
    assert requests["read", "records"] == 0
    assert requests["read", "segments"] == 5
    assert sum(requests.values()) <= 20, "the requests of a build that has nothing to do grew with its tasks"


def test_an_output_or_a_record_that_is_gone_is_noticed_though_a_segment_has_it(
    url: str, tmp_path: Path
) -> None:
    tasks, requests = make_tasks(75), Counter[tuple[str, str]]()
    run(work_of(url, tmp_path / "a", requests), tasks)
    store = MemoryStore(url)
    store.delete(f"{tasks[3].key}/file")
    store.put(f"{tasks[4].key}/file", b"longer than it was")
    store.delete(f"{tasks[5].key}/{COMMIT_NAME}")
    commits = run(work_of(url, tmp_path / "b", requests), tasks)
    assert [n for n, commit in enumerate(commits) if not commit.reused] == [3, 4, 5]
    assert all(commit.reused for commit in run(work_of(url, tmp_path / "c", requests), tasks))
    assert (commits[4].files / "file").read_bytes() == b"4"


@pytest.mark.parametrize("harm", ["remove", "cut", "flip"])
def test_segments_may_be_lost_or_damaged(url: str, tmp_path: Path, harm: str) -> None:
    tasks, requests = make_tasks(75), Counter[tuple[str, str]]()
    made = run(work_of(url, tmp_path / "a", requests), tasks)
    store = MemoryStore(url)
    for info in list(store.list("segments/")):
        data = store.get(info.key)
        if harm == "remove":
            store.delete(info.key)
        else:
            store.put(info.key, data[:-40] if harm == "cut" else data[:90] + b"\0" + data[91:])
    requests.clear()
    found = run(work_of(url, tmp_path / "b", requests), tasks)
    assert [commit.facts for commit in found] == [commit.facts for commit in made]
    assert all(commit.reused for commit in found)
    assert requests["read", "records"] == 75


class RewrittenSegments(WrappedStore):
    """Where each segment is put again, with another version, while it is read."""

    def request(self, operation: str, key: str, action: Callable[[], T]) -> T:
        if operation in ("get", "open") and key.startswith("segments/"):
            raise ObjectChangedError(key, "has version 2, not 1")
        return action()


def test_a_segment_that_is_put_again_while_it_is_read_does_not_end_a_build(url: str, tmp_path: Path) -> None:
    tasks = make_tasks(75)
    made = run(work_of(url, tmp_path / "a", Counter()), tasks)
    work = Work(url, tmp_path / "b", around=RewrittenSegments, segment_records=30)
    found = run(work, tasks)
    assert [commit.facts for commit in found] == [commit.facts for commit in made]
    assert all(commit.reused for commit in found)
