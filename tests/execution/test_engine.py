"""Workers: results in task order, errors as raised, deaths explained, no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from shardkit import limits
from shardkit.errors import BuildError, RecipeError
from shardkit.writers.execution.engine import LocalEngine, default_workers
from shardkit.writers.execution.resources import Resources
from shardkit.writers.execution.runner import Journal
from shardkit.writers.execution.work import Work
from shardkit.writers.executors import Execution
from support.task_runs import FAILURES, check_failure, end_napping, ends, imported_tasks, make_task, run_all

MORE_TASKS = """
def die(folder, number):
    os.kill(os.getpid(), number)
    time.sleep(60)

def hang(folder, place, tries):
    # As C code that waits for ever with the interpreter's lock, so many times.
    import ctypes
    (place / f"try-{os.getpid()}").touch()
    if len(list(place.glob("try-*"))) <= tries:
        ctypes.PyDLL(None).sleep(600)
    return {"tries": tries}

def leave(folder): os._exit(3)

def kill_parent(folder, place):
    while not list(place.glob("napping-*")):
        time.sleep(0.01)
    os.kill(os.getppid(), 9)
    time.sleep(60)

def look(folder, module):
    import sys
    return {"parent": os.getppid(), "imported": module in sys.modules}
def exhaust(folder): raise MemoryError
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[ModuleType]:
    with imported_tasks(tmp_path / "engine_tasks.py", MORE_TASKS) as tasks:
        yield tasks


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    with Journal(Work.at(tmp_path / "work")) as journal:
        yield journal.work


def test_results_come_in_task_order_whatever_the_schedule(tasks: ModuleType, work: Work) -> None:
    planned = [make_task(tasks, "square", n, number=n, weight=n * 7 % 5) for n in range(9)]
    heard: list[str] = []
    with LocalEngine(3) as engine:
        commits = run_all(engine, planned, work, lambda commit: heard.append(commit.name))
        again = run_all(engine, planned[:1], work)
    assert [(c.folder / "square.txt").read_text() for c in commits] == [str(n * n) for n in range(9)]
    assert sorted(heard) == sorted(planned_task.name for planned_task in planned)
    pids = {c.result["pid"] for c in commits}
    assert 1 <= len(pids) <= 3
    assert os.getpid() not in pids
    assert again[0].result["pid"] in pids  # workers are kept
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_heaviest_task_starts_first(tasks: ModuleType, work: Work) -> None:
    planned = [make_task(tasks, "square", n, number=n, weight=n) for n in range(5)]
    heard: list[str] = []
    with LocalEngine(1) as engine:
        run_all(engine, planned, work, lambda commit: heard.append(commit.name))
    assert heard == [f"square-{n}" for n in (4, 3, 2, 1, 0)]


def overlapping(
    tasks: ModuleType,
    work: Work,
    folder: Path,
    resources: Resources,
    *,
    gpus: Sequence[str],
) -> list[dict[str, Any]]:
    """Run six tasks that need these resources; return which GPUs each saw, and with which others it ran."""
    place = folder / f"place-{resources.gpus}-{resources.cpus}"
    place.mkdir()
    planned = [
        replace(make_task(tasks, "overlaps", place, 0.2, number=n), resources=resources) for n in range(6)
    ]
    with LocalEngine(4, gpus=gpus) as engine:
        return [commit.result for commit in run_all(engine, planned, work)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("amount", "at_once", "seen"),
    [(1.0, 2, {"3", "5"}), (0.5, 4, {"3", "5"}), (2.0, 1, {"3,5"}), (0.0, 4, {""})],
)
def test_tasks_see_their_gpus_and_no_more_run_than_these_suffice_for(
    tasks: ModuleType, work: Work, tmp_path: Path, amount: float, at_once: int, seen: set[str]
) -> None:
    results = overlapping(tasks, work, tmp_path, Resources(gpus=amount), gpus=["3", "5"])
    assert max(len(one["seen"]) for one in results) <= at_once
    assert {one["gpus"] for one in results} <= seen
    assert len({one["pid"] for one in results}) <= at_once  # a process keeps its GPUs, and its model


@pytest.mark.parametrize(("resources", "at_once"), [(Resources(cpus=2), 2), (Resources(cpus=9), 1)])
def test_tasks_of_many_cores_run_beside_fewer_others(
    tasks: ModuleType, work: Work, tmp_path: Path, resources: Resources, at_once: int
) -> None:
    results = overlapping(tasks, work, tmp_path, resources, gpus=[])
    assert max(len(one["seen"]) for one in results) <= at_once


def test_memory_that_a_task_asks_for_is_not_given_twice(
    tasks: ModuleType, work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "memory_bytes", lambda: 10 << 30)
    results = overlapping(tasks, work, tmp_path, Resources(memory=4 << 30), gpus=[])
    assert max(len(one["seen"]) for one in results) <= 2


def test_gpus_are_given_anew_when_a_later_stage_needs_other_shares(
    tasks: ModuleType, work: Work, tmp_path: Path
) -> None:
    found = []
    with LocalEngine(2, gpus=["0", "1"]) as engine:
        for number, amount in enumerate((1.0, 0.0, 2.0, 0.5)):
            one = make_task(tasks, "overlaps", tmp_path, 0, number=number)
            [commit] = run_all(engine, [replace(one, resources=Resources(gpus=amount))], work)
            found.append(commit.result["gpus"])
    assert found[0] == "0"
    assert found[2:] == ["0,1", "0"]


def test_a_machine_without_gpus_says_so(tasks: ModuleType, work: Work, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"needs 1 GPU, but this machine has none.*--engine ray"):
        overlapping(tasks, work, tmp_path, Resources(gpus=0.5), gpus=[])


def test_gpus_are_those_that_the_environment_or_the_machine_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, names in (("2,GPU-8a", ["2", "GPU-8a"]), ("", []), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert limits.gpus() == names
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert limits.gpus(tmp_path) == ["0", "1"]


def test_workers_use_one_thread_and_leave_stdout_alone(
    tasks: ModuleType, work: Work, capfd: pytest.CaptureFixture[str]
) -> None:
    with LocalEngine(1) as engine:
        [commit] = run_all(engine, [make_task(tasks, "environment")], work)
    assert commit.result == {
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    assert capfd.readouterr().out == ""  # stdout is for results


def test_a_script_without_a_main_guard_builds_once(tmp_path: Path, tasks: ModuleType) -> None:
    (tmp_path / "guard.py").write_text(
        "print('once')\n"
        "from pathlib import Path; import engine_tasks\n"
        "from shardkit.writers.execution.engine import LocalEngine\n"
        "from shardkit.writers.execution.runner import Journal\n"
        "from shardkit.writers.execution.stage import Stage\n"
        "from shardkit.writers.execution.task_queue import TaskQueue\n"
        "from shardkit.writers.execution.work import Work\n"
        "with Journal(Work.at(Path('work'))) as journal, LocalEngine(2) as engine:\n"
        "    tasks = [Stage('s', 's', engine_tasks.environment).task(str(n), 0) for n in range(2)]\n"
        "    heard = []\n"
        "    engine.run(TaskQueue(tasks, heard.append), journal.work)\n"
        "    print(len(heard))\n"
    )
    done = subprocess.run(
        [sys.executable, "guard.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "once\n2\n"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        *FAILURES,
        ("exhaust", BuildError, r"task stage/exhaust-0: out of memory; use fewer --workers"),
    ],
)
def test_errors_keep_their_type_and_say_which_task(
    tasks: ModuleType, work: Work, name: str, kind: type[Exception], message: str
) -> None:
    with LocalEngine(1) as engine, pytest.raises(kind, match=message) as caught:
        run_all(engine, [make_task(tasks, name)], work)
    check_failure(caught, name, kind)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, r"stage/die-0: its worker was killed by SIGKILL; if the machine ran out of memory"),
        (signal.SIGSEGV, r"stage/die-0: its worker was killed by SIGSEGV; finished tasks are kept"),
    ],
)
def test_a_killed_worker_is_named_with_its_task_and_signal(
    tasks: ModuleType, work: Work, number: int, message: str
) -> None:
    with LocalEngine(2) as engine, pytest.raises(BuildError, match=message):
        run_all(engine, [make_task(tasks, "die", int(number))], work)


def test_a_task_that_hangs_is_killed_and_runs_again(tasks: ModuleType, work: Work, tmp_path: Path) -> None:
    planned = [make_task(tasks, "hang", tmp_path, 1), make_task(tasks, "square", 3)]
    with LocalEngine(1, task_seconds=1.0) as engine, pytest.warns(RuntimeWarning, match="it runs again"):
        commits = run_all(engine, planned, work)
    assert (commits[0].result["tries"], len(list(tmp_path.glob("try-*")))) == (1, 2)
    assert (commits[1].folder / "square.txt").read_text() == "9"


@pytest.mark.extended
def test_a_task_that_hangs_again_ends_the_build_with_its_name(
    tasks: ModuleType, work: Work, tmp_path: Path
) -> None:
    with (
        LocalEngine(1, task_seconds=0.5) as engine,
        pytest.warns(RuntimeWarning),
        pytest.raises(BuildError, match=r"task stage/hang-0: did not finish within 0.5 s, in 2 attempts"),
    ):
        run_all(engine, [make_task(tasks, "hang", tmp_path, 9)], work)
    assert len(list(tmp_path.glob("try-*"))) == 2


def test_a_task_in_time_is_left_alone_and_so_is_an_idle_worker(tasks: ModuleType, work: Work) -> None:
    with LocalEngine(1, task_seconds=1.0) as engine:
        [first] = run_all(engine, [make_task(tasks, "square", 1)], work)
        time.sleep(1.5)
        [second] = run_all(engine, [make_task(tasks, "square", 2, number=1)], work)
    assert first.result["pid"] == second.result["pid"]


def test_a_worker_that_exits_is_named_with_its_status(tasks: ModuleType, work: Work) -> None:
    with LocalEngine(1) as engine, pytest.raises(BuildError, match=r"stage/leave-0: .* exit status 3"):
        run_all(engine, [make_task(tasks, "leave")], work)


FORKS = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@FORKS
def test_workers_are_forks_of_one_process_that_has_their_modules(tasks: ModuleType, work: Work) -> None:
    planned = [make_task(tasks, "look", "colorsys", number=n) for n in range(6)]
    with LocalEngine(2, modules=["colorsys"]) as engine:
        counts = [commit.result for commit in run_all(engine, planned, work)]
        [parent] = {count["parent"] for count in counts}
        assert psutil.Process(parent).ppid() == os.getpid()
    assert all(count["imported"] for count in counts)
    assert not psutil.pid_exists(parent)


def test_a_module_that_starts_a_thread_is_not_forked(tasks: ModuleType, work: Work, tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with LocalEngine(2, modules=["threaded"]) as engine:
        commits = run_all(engine, [make_task(tasks, "look", "threaded", number=n) for n in range(4)], work)
    assert {commit.result["parent"] for commit in commits} == {os.getpid()}
    assert not any(commit.result["imported"] for commit in commits)


@FORKS
def test_workers_die_with_the_process_that_forked_them(tasks: ModuleType, work: Work, tmp_path: Path) -> None:
    planned = [make_task(tasks, "kill_parent", tmp_path), make_task(tasks, "nap", tmp_path, 600)]
    with (
        LocalEngine(2) as engine,
        pytest.raises(BuildError, match=r"stage/(nap|kill_parent)-0: its worker was killed by SIGKILL"),
    ):
        run_all(engine, planned, work)
    [napping] = tmp_path.glob("napping-*")
    assert ends(int(napping.name.removeprefix("napping-")))


def test_the_first_error_stops_the_others_at_once(tasks: ModuleType, work: Work, tmp_path: Path) -> None:
    start = time.monotonic()
    planned = [make_task(tasks, "nap", tmp_path, 600, weight=2), make_task(tasks, "refuse")]
    with LocalEngine(2) as engine, pytest.raises(RecipeError):
        run_all(engine, planned, work)
    assert time.monotonic() - start < 300  # long before the nap ends
    assert not [p for p in psutil.Process().children() if "execution.processes" in " ".join(p.cmdline())]


SLEEPER = (
    "from pathlib import Path; import engine_tasks\n"
    "from shardkit.writers.execution.engine import LocalEngine\n"
    "from shardkit.writers.execution.runner import Journal\n"
    "from shardkit.writers.execution.stage import Stage\n"
    "from shardkit.writers.execution.task_queue import TaskQueue\n"
    "from shardkit.writers.execution.work import Work\n"
    "with Journal(Work.at(Path('work'))) as journal, LocalEngine(2) as engine:\n"
    "    nap = Stage('s', 's', engine_tasks.nap)\n"
    "    tasks = [nap.task(str(n), 0, str(Path.cwd()), 600) for n in range(2)]\n"
    "    engine.run(TaskQueue(tasks, lambda commit: None), journal.work)\n"
)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_build(tmp_path: Path, tasks: ModuleType, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    end_napping(process, tmp_path, number)


@pytest.mark.parametrize("workers", [0, -1, 1000])
def test_impossible_numbers_of_workers_are_refused(workers: int) -> None:
    with pytest.raises(BuildError, match=f"{workers} workers; give between 1 and 256"):
        LocalEngine(workers)


def test_the_default_is_bounded_by_cores_and_memory() -> None:
    assert default_workers(1) == min(64, len(os.sched_getaffinity(0)))
    assert default_workers(1 << 60) == 1


def test_little_text_starts_few_processes_unless_their_number_is_given() -> None:
    most, given = default_workers(1), Execution(workers=7)
    assert Execution().for_text(100_000, 1).workers == 1
    assert Execution().for_text(1 << 40, 1).workers == most
    assert Execution().for_text(1 << 40, 1 << 60).workers == 1
    assert given.for_text(100_000, 1) == given
