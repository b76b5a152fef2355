"""A task is finished wholly or not at all, skipped only while it is exactly what is asked for, and reported.

Reports say how far each stage is: kept documents, time left by weight, kernels being compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest

from shardkit.errors import BuildError, ConservationError
from shardkit.progress import make_listener
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.engine import InlineEngine, LocalEngine
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.work import COMMIT_NAME, Work, run_task
from shardkit.writers.rows.ledger import Count, Ledger

ONE_DOCUMENT = {"documents": 1, "bytes": 5}


def write_two(
    folder: Path, text: Annotated[str, DecidesNoByte("a test says so")], key: int
) -> dict[str, int]:
    (folder / "sub").mkdir()
    (folder / "a.txt").write_text(text)
    (folder / "sub" / "b.txt").write_text(text * 2)
    return {"letters": 3 * len(text)}


def fail_half_way(folder: Path) -> None:
    (folder / "a.txt").write_text("half")
    raise BuildError("no")


def lose_a_document(folder: Path) -> dict[str, Any]:
    kept = {"documents": 0, "bytes": 0}
    return {"ledger": {"read": ONE_DOCUMENT, "kept": kept, "dropped": {}, "quarantined": {}}}


def make_task(key: int = 1, text: str = "text", weight: int = 0) -> Task:
    return Stage("stage", "stage", write_two).task("task", weight, text, key)


TASK = make_task()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(Work.at(tmp_path / "work")) as journal:
        yield journal


def finish(journal: Journal, task: Task = TASK) -> None:
    run_task(task, task.digest, journal.work)


def find(journal: Journal, task: Task) -> Commit | None:
    [commit] = journal.find([task])
    return commit


def folder_of(journal: Journal, task: Task = TASK) -> Path:
    return journal.work.folder / task.key


def test_a_finished_task_is_found_with_its_counts_and_outputs(journal: Journal) -> None:
    assert find(journal, TASK) is None
    made = run_task(TASK, TASK.digest, journal.work)
    found = find(journal, TASK)
    assert found is not None
    assert found == replace(made, reused=True)
    assert found.result == {"letters": 12}
    assert {name: output.bytes for name, output in found.outputs.items()} == {"a.txt": 4, "sub/b.txt": 8}
    assert (found.folder / "sub" / "b.txt").read_text() == "texttext"
    assert journal.work.damaged_output(found) is None


def test_other_arguments_are_another_task(journal: Journal) -> None:
    finish(journal)
    assert find(journal, make_task(key=2)) is None


def test_other_code_is_another_task(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(journal)
    monkeypatch.setattr("shardkit.writers.execution.stage.code_version", lambda: "newer")
    assert find(journal, replace(TASK)) is None  # a fresh task, as digests are remembered


def test_weight_and_arguments_that_are_marked_do_not_decide(journal: Journal) -> None:
    finish(journal)
    assert find(journal, make_task(text="elsewhere", weight=9)) is not None


@pytest.mark.parametrize("name", ["a.txt", "sub/b.txt", COMMIT_NAME])
@pytest.mark.parametrize("harm", ["remove", "cut"])
def test_a_task_that_lost_something_runs_again(journal: Journal, name: str, harm: str) -> None:
    finish(journal)
    path = folder_of(journal) / name
    path.unlink() if harm == "remove" else path.write_bytes(path.read_bytes()[:-3])
    assert find(journal, TASK) is None
    finish(journal)
    assert find(journal, TASK) is not None


def test_changed_bytes_of_the_same_size_are_noticed_when_asked_for(journal: Journal) -> None:
    finish(journal)
    (folder_of(journal) / "sub" / "b.txt").write_text("texttexT")
    found = find(journal, TASK)
    assert found is not None
    assert journal.work.damaged_output(found) == "sub/b.txt"


def test_a_task_that_fails_leaves_nothing(journal: Journal) -> None:
    task = Stage("stage", "stage", fail_half_way).task("task", 0)
    with pytest.raises(BuildError, match="no"):
        run_task(task, task.digest, journal.work)
    assert [path for path in journal.work.folder.rglob("*.txt") if path.parent != journal.work.folder] == []
    assert find(journal, task) is None


def test_a_task_whose_documents_do_not_add_up_is_not_committed(journal: Journal) -> None:
    task = Stage("stage", "stage", lose_a_document).task("task", 0)
    with pytest.raises(ConservationError, match=r"stage/task: read 1 documents .* accounted for 0"):
        run_task(task, task.digest, journal.work)
    assert find(journal, task) is None


def test_versions_of_a_task_lie_side_by_side(journal: Journal) -> None:
    finish(journal)
    newer = make_task(key=2, text="x")
    finish(journal, newer)
    assert (folder_of(journal) / "a.txt").read_text() == "text"
    assert (folder_of(journal, newer) / "a.txt").read_text() == "x"
    assert [find(journal, task) is None for task in (TASK, newer)] == [False, False]
    assert sorted(record.args["key"] for record in journal.work.records("stage")) == [1, 2]


def test_a_task_done_by_two_is_the_first_ones(journal: Journal) -> None:
    finish(journal)
    file = folder_of(journal) / "a.txt"
    before = file.stat()
    finish(journal)
    assert file.stat().st_ino == before.st_ino
    assert list((journal.work.folder / "unfinished").rglob("*.txt")) == []


def test_two_runs_of_a_task_that_differ_are_an_error(journal: Journal) -> None:
    finish(journal)
    with pytest.raises(
        BuildError, match=r"stage/task: two runs of it wrote different bytes \(a.txt, sub/b.txt\)"
    ):
        finish(journal, make_task(text="other"))
    assert (folder_of(journal) / "a.txt").read_text() == "text"


def test_what_a_killed_build_left_is_cleared(tmp_path: Path) -> None:
    with Journal(Work.at(tmp_path / "work")) as journal:
        (journal.work.folder / "unfinished" / "stage.task.123").mkdir()
        finish(journal)
    with Journal(Work.at(tmp_path / "work")) as journal:
        assert list((journal.work.folder / "unfinished").iterdir()) == []
        assert find(journal, TASK) is not None


def test_two_builds_cannot_share_a_work_folder(tmp_path: Path) -> None:
    with Journal(Work.at(tmp_path / "work")), pytest.raises(BuildError, match="another build uses"):
        Journal(Work.at(tmp_path / "work")).__enter__()
    with Journal(Work.at(tmp_path / "work")):
        pass  # free again


def test_the_lock_of_a_killed_build_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from shardkit.writers.execution.runner import Journal\n"
        "from shardkit.writers.execution.work import Work\n"
        "Journal(Work.at(Path(sys.argv[1]))).__enter__(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "work")], timeout=60)
    assert done.returncode == -9
    with Journal(Work.at(tmp_path / "work")) as journal:
        finish(journal)


def test_a_folder_with_other_files_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(BuildError, match=r"contains files that no build wrote \(thesis\.txt\)"):
        Journal(Work.at(tmp_path)).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_removing_the_work_folder_removes_all_of_it(tmp_path: Path) -> None:
    with Journal(Work.at(tmp_path / "work")) as journal:
        finish(journal)
        journal.remove()
    assert not (tmp_path / "work").exists()


def test_a_work_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match=r"file/work: .*file is not a folder.*set `work` to another place"):
        Journal(Work.at(tmp_path / "file" / "work")).__enter__()
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


KERNEL_TASKS = """
import numba

@numba.njit
def inner(x):
    return x + 1

@numba.njit
def outer(x):
    return inner(x) * 2

def compile(folder):
    assert outer(3) == 8
    return {}
"""


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "kernel_tasks.py").write_text(KERNEL_TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("kernel_tasks")
    del sys.modules["kernel_tasks"]


def test_compiling_kernels_is_heard_while_it_happens(tmp_path: Path, kernels: ModuleType) -> None:
    heard: list[StageProgress] = []
    with (
        make_listener(heard.append) as listener,
        Journal(Work.at(tmp_path / "work")) as journal,
        LocalEngine(1) as engine,
    ):
        runner = Runner(journal, engine, listener)
        runner.run([Stage("stage", "stage", kernels.compile).task("one", 0)])
        runner.run([Stage("again", "again", kernels.compile).task("one", 0)])
    told = [(report.stage, report.tasks_done, report.compiling) for report in heard]
    # Once, though one kernel is compiled for the other; the second task finds them in the worker's memory.
    assert told == [
        ("stage", 0, 0),
        ("stage", 0, 1),
        ("stage", 0, 0),
        ("stage", 1, 0),
        ("again", 0, 0),
        ("again", 1, 0),
    ]
    assert 0 < heard[3].compile_seconds <= heard[3].seconds
    assert heard[-1].compile_seconds == 0


def keep_a_third(folder: Path, documents: int) -> dict[str, Any]:
    third = documents // 3
    ledger = Ledger(Count(documents, documents * 10), Count(third, third * 10))
    ledger.drop("x/y", documents - third, (documents - third) * 10)
    return {"ledger": ledger.to_dict()}


def test_time_left_follows_the_weights_of_tasks_and_reused_ones_take_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    def plan(count: int) -> list[Task]:
        return [
            Stage("stage", "stage", keep_a_third).task(str(n), 100 * n - 1, 300 * n)
            for n in range(1, count + 1)
        ]

    heard: list[StageProgress] = []
    with make_listener(heard.append) as listener, Journal(Work.at(tmp_path / "work")) as journal:
        Runner(journal, InlineEngine(), listener).run(plan(1))
        heard.clear()
        monkeypatch.setattr(time, "perf_counter", clock)
        Runner(journal, InlineEngine(), listener).run(plan(3))
    assert [(report.tasks_done, report.tasks_reused) for report in heard] == [(1, 1), (2, 1), (3, 1)]
    seconds = heard[1].seconds
    assert [report.seconds_left for report in heard] == [None, pytest.approx(seconds * 200 / 300), None]
    assert [(report.documents, report.documents_kept) for report in heard] == [
        (0, None),
        (900, 300),
        (1500, 500),
    ]
