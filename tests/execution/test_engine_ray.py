"""Ray: the same results as local processes; lost processes and nodes are replaced and reported."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest

from servers.bucket import RgwBucket
from shardkit.errors import BuildError, MissingExtraError, RecipeError
from shardkit.storage.store import StorageOptions
from shardkit.writers.execution import engine_ray
from shardkit.writers.execution.code_version import code_version
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.engine import death_of
from shardkit.writers.execution.engine_ray import RayEngine, Stragglers
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.ray_cluster import Head, slots_of, start_ray
from shardkit.writers.execution.ray_node import check_of, run_on_node
from shardkit.writers.execution.resources import Resources
from shardkit.writers.execution.runner import Journal
from shardkit.writers.execution.stage import Fallback, Stage, Task
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work
from shardkit.writers.pipeline import build
from support.ray_cluster import NODE_MEMORY, RAY_ENVIRONMENT, RayCluster, can_hide_folders
from support.small_build import RECIPE, make_corpus, tree
from support.task_runs import (
    FAILURES,
    check_failure,
    end_napping,
    ends,
    imported_tasks,
    make_task,
    run_all,
)

pytest_plugins = ["support.s3_rgw"]

MEMORY = 1_000_000_000
MORE_TASKS = """
def die_until(folder, place, count):
    (place / f"death-{time.monotonic_ns()}").touch()
    if len(list(place.glob("death-*"))) <= count:
        os.kill(os.getpid(), 9)
    return {}

def hang_until(folder, place, count):
    # As C code that waits for ever with the interpreter's lock.
    import ctypes
    (place / f"hang-{time.monotonic_ns()}").touch()
    if len(list(place.glob("hang-*"))) <= count:
        ctypes.PyDLL(None).sleep(600)
    return {}

def straggle(folder, place):
    (place / f"attempt-{os.getpid()}").touch()
    if len(list(place.glob("attempt-*"))) == 1:
        time.sleep(600)
    return {"pid": os.getpid()}

def meet(folder, place, number, others):
    (place / f"here-{number}").touch()
    deadline = time.monotonic() + 100
    while len(list(place.glob("here-*"))) < others:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return {}

def overlap(folder, place):
    import ray
    mine = place / f"{ray.get_runtime_context().get_node_id()}.{os.getpid()}"
    mine.touch()
    time.sleep(0.05)
    seen = sorted(path.name for path in place.iterdir())
    mine.unlink()
    return {"seen": seen, "node": mine.name.split(".")[0]}

def refuse_beside(folder, place):
    while not list(place.glob("napping-*")):
        time.sleep(0.02)
    raise RecipeError("pack.length: too long")
"""
extended = pytest.mark.extended


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    with imported_tasks(tmp_path_factory.mktemp("tasks") / "ray_tasks.py", MORE_TASKS) as tasks:
        yield tasks


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    with Journal(Work.at(tmp_path / "work")) as journal:
        yield journal.work


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where tasks tell each other and the test what they are at."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes of two CPUs and a GPU each; whoever kills one adds another."""
    with RayCluster(nodes=2, cpus=2, gpus=1) as cluster:
        yield cluster


@pytest.fixture
def connected(cluster: RayCluster) -> RayCluster:
    """This process is connected, for all tests: each connection has worker processes of its own."""
    import ray

    if not ray.is_initialized():
        start_ray(cluster.address, 1, MEMORY)
    return cluster


def engine(workers: int | None = None, memory_bytes: int = MEMORY) -> RayEngine:
    return RayEngine(workers, address=None, memory_bytes=memory_bytes)


def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_ray, "FIRST_PAUSE_SECONDS", 0.1)


def test_as_many_tasks_fit_as_cpus_and_memory_of_each_living_node_allow() -> None:
    def node(cpus: float, memory: float, alive: bool = True) -> dict[str, Any]:
        return {"Alive": alive, "Resources": {"CPU": cpus, "memory": memory, "object_store_memory": 1e9}}

    usual, with_gpu = Resources(memory=1_000_000_000), Resources(cpus=2, gpus=0.5, memory=1_000_000_000)
    gpus = node(8, 9e9)
    gpus["Resources"]["GPU"] = 1
    assert slots_of([node(4, 8e9), gpus], with_gpu) == 2
    assert slots_of([node(4, 8e9), node(4, 3.5e9), node(8, 9e9, alive=False)], usual) == 4 + 3
    assert slots_of([node(4, 9e8), {"Alive": True, "Resources": {"object_store_memory": 1e9}}], usual) == 0
    assert slots_of([], usual) == 0


def test_a_straggler_takes_three_times_the_median_of_its_stage_and_a_minute() -> None:
    stragglers = Stragglers()
    assert stragglers.limit_seconds("pack") == math.inf  # nothing to compare with
    for seconds in (10.0, 30.0, 500.0):
        stragglers.finished("pack", seconds)
        stragglers.finished("clean", seconds / 10)
    assert stragglers.limit_seconds("pack") == 90.0
    assert stragglers.limit_seconds("clean") == 60.0
    for _ in range(2000):
        stragglers.finished("pack", 100.0)  # of old tasks, nothing is left
    assert stragglers.limit_seconds("pack") == 300.0


def test_a_missing_ray_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_corpus(tmp_path / "corpus", 20)
    monkeypatch.setitem(sys.modules, "ray", None)
    before = tree(tmp_path)
    with pytest.raises(MissingExtraError, match=r"pip install 'shardkit\[ray\]'"):
        build(recipe, engine="ray", progress=False)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_cluster_that_is_not_there_is_said_at_once(scheme: str) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BuildError, match=rf"^the Ray cluster at {address} cannot be reached .*refused"):
            RayEngine(1, address=address, memory_bytes=MEMORY).__enter__()


@pytest.mark.parametrize("workers", [0, -1, 100_001])
def test_impossible_numbers_of_workers_are_refused(workers: int) -> None:
    with pytest.raises(BuildError, match=f"{workers} workers; give between 1 and 100,000"):
        RayEngine(workers, address=None, memory_bytes=MEMORY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"code": "0" * 32}, "differ from those on the machine that started the build; install the same"),
        (
            {"marker": "/nowhere/marker"},
            r"does not see the work folder .*work; .* set `work` to a place in S3",
        ),
    ],
)
def test_a_node_that_does_not_fit_says_why_before_it_runs_anything(
    work: Work, change: dict[str, Any], message: str
) -> None:
    with check_of(work) as check:
        answer, *_ = run_on_node(replace(check, **change), b"not even a pickle")
    commit, error, _ = pickle.loads(answer)
    assert commit is None
    with pytest.raises(BuildError, match=f"^node {socket.gethostname()} of the Ray cluster: .*{message}"):
        raise error


def test_a_node_that_fits_runs_the_task_and_the_check_leaves_nothing(tasks: ModuleType, work: Work) -> None:
    planned = make_task(tasks, "square", 7)
    with check_of(work) as check:
        assert check.code == code_version()
        answer, *_ = run_on_node(check, pickle.dumps((planned, planned.digest, work)))
    commit, error, _ = pickle.loads(answer)
    assert error is None
    assert (commit.folder / "square.txt").read_text() == "49"
    assert not list((work.folder / "unfinished").rglob("ray.*"))


@extended
def test_ray_places_tasks_where_their_gpus_are(
    tasks: ModuleType, work: Work, place: Path, connected: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(gpus: float) -> list[Task]:
        made = [make_task(tasks, "overlaps", place, 0.3, number=n) for n in range(6)]
        return [replace(one, resources=Resources(gpus=gpus)) for one in made]

    with engine() as ray:
        results = [commit.result for commit in run_all(ray, planned(1.0), work)]
    assert {one["gpus"] for one in results} == {"0"}
    assert max(len(one["seen"]) for one in results) <= 2  # one on each node
    monkeypatch.setattr(engine_ray, "NO_NODE_SECONDS", 1.0)
    monkeypatch.setattr(engine_ray, "LOOK_SECONDS", 0.2)
    none = r"no node of the Ray cluster had a CPU, 2 GPUs and .*largest nodes: 2 CPUs with .* and 1 GPU\)"
    with (
        Journal(Work.at(place / "other")) as other,
        engine() as ray,
        pytest.warns(RuntimeWarning),
        pytest.raises(BuildError, match=none),
    ):
        run_all(ray, planned(2.0), other.work)


@extended
def test_results_come_in_task_order_from_all_nodes(
    tasks: ModuleType, work: Work, place: Path, connected: RayCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    with engine() as ray:
        run_all(
            ray, [make_task(tasks, "meet", place, n, 4, number=n) for n in range(4)], work
        )  # 2 nodes of 2
        commits = run_all(ray, [make_task(tasks, "square", n, number=n) for n in range(9)], work)
        [commit] = run_all(ray, [make_task(tasks, "environment")], work)
    assert [(c.folder / "square.txt").read_text() for c in commits] == [str(n * n) for n in range(9)]
    assert set(commit.result.values()) == {"1", "false"}  # one thread each
    assert capfd.readouterr() == ("", "")


@extended
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "kind", "message"), FAILURES)
def test_errors_keep_their_type_and_say_which_task(
    tasks: ModuleType, work: Work, connected: RayCluster, name: str, kind: type[Exception], message: str
) -> None:
    with engine() as ray, pytest.raises(kind) as caught:
        run_all(ray, [make_task(tasks, name)], work)  # at once: another try would be a warning
    assert re.search(message, str(caught.value))
    check_failure(caught, name, kind)
    assert caught.value.__notes__ == [f"it ran on node {socket.gethostname()} of the Ray cluster"]


@extended
def test_the_first_error_ends_what_runs(
    tasks: ModuleType, work: Work, place: Path, connected: RayCluster
) -> None:
    planned = [make_task(tasks, "nap", place, 600), make_task(tasks, "refuse_beside", place)]
    with engine() as ray, pytest.raises(RecipeError):
        run_all(ray, planned, work)
    [napping] = place.iterdir()
    assert ends(int(napping.name.removeprefix("napping-")))


@extended
def test_a_killed_worker_costs_only_its_task_which_runs_again_and_is_told(
    tasks: ModuleType,
    work: Work,
    place: Path,
    connected: RayCluster,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick_retries(monkeypatch)
    planned = [
        make_task(tasks, "die_until", place, 2),
        *(make_task(tasks, "square", n, number=n) for n in range(5)),
    ]
    with engine() as ray, pytest.warns(RuntimeWarning) as told:
        commits = run_all(ray, planned, work)
    assert len(commits) == 6
    node = socket.gethostname()
    problem = f"task stage/die_until-0: its process on node {node} died (was it killed, out of memory,"
    problem += " or running for over 21,600 s?)"
    expected = [f"{problem}; it runs again (retry {n} of 4)" for n in (1, 2)]
    assert [str(warning.message) for warning in told] == expected
    assert capfd.readouterr().out == ""


def call_instead(
    folder: Path,
    failed: str,
    args: Annotated[Mapping[str, object], DecidesNoByte("`failed` is the digest of what they decide")],
    error: Annotated[str, DecidesNoByte("a later build finds the task without it")],
) -> None:
    (folder / "error.txt").write_text(error)


@extended
@pytest.mark.filterwarnings("ignore:task stage/die_until")
def test_a_task_that_kills_every_worker_ends_the_run(
    tasks: ModuleType, work: Work, place: Path, connected: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_retries(monkeypatch)
    monkeypatch.setattr(engine_ray, "RETRIES", 1)
    with (
        engine() as ray,
        pytest.raises(BuildError, match=r"stage/die_until-0: its process on node .* died .* 2 times"),
    ):
        run_all(ray, [make_task(tasks, "die_until", place, 100)], work)
    assert len(list(place.iterdir())) == 2


@extended
@pytest.mark.filterwarnings("ignore:task stage/die_until")
def test_a_task_that_kills_every_worker_gives_way_to_its_fallback(
    tasks: ModuleType, work: Work, place: Path, connected: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_retries(monkeypatch)
    monkeypatch.setattr(engine_ray, "RETRIES", 1)
    fallback = Fallback(Stage("failed", "failed", call_instead), 1, "max_failed")
    poison = replace(make_task(tasks, "die_until", place, 100), fallback=fallback)
    commits: list[Commit] = []
    with engine() as ray:
        ray.run(TaskQueue([poison, make_task(tasks, "square", 3)], commits.append), work)
    assert len(list(place.iterdir())) == 2
    assert [commit.stage for commit in commits] == ["stage", "failed"]
    assert (commits[1].folder / "error.txt").read_text() == str(death_of(poison))


@extended
def test_a_straggler_runs_a_second_time_on_an_idle_worker_and_the_first_attempt_is_killed(
    tasks: ModuleType, work: Work, place: Path, connected: RayCluster
) -> None:
    planned = [
        make_task(tasks, "straggle", place, weight=9),
        *(make_task(tasks, "square", n, number=n) for n in range(5)),
    ]
    stragglers = Stragglers(least_seconds=0.5)
    begin = time.monotonic()
    with RayEngine(None, address=None, memory_bytes=MEMORY, stragglers=stragglers) as ray:
        with pytest.warns(
            RuntimeWarning,
            match=r"straggle-0: has run for \d+ s( on node \S+)?; a second attempt starts now",
        ):
            commits = run_all(ray, planned, work)
        assert time.monotonic() - begin < 60
        attempts = {int(path.name.removeprefix("attempt-")) for path in place.iterdir()}
        [killed] = attempts - {commits[0].result["pid"]}
        assert len(commits) == 6
        assert ends(killed)


@extended
def test_a_task_that_hangs_is_killed_and_runs_again(
    tasks: ModuleType, work: Work, place: Path, connected: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_retries(monkeypatch)
    limited = RayEngine(None, address=None, memory_bytes=MEMORY, task_seconds=2.0)
    with limited as ray, pytest.warns(RuntimeWarning, match="running for over 2 s"):
        run_all(ray, [make_task(tasks, "hang_until", place, 1)], work)
    assert len(list(place.iterdir())) == 2


class CountingQueue(TaskQueue):
    """Knows how many tasks were out at a time."""

    out = most = 0

    def take(self) -> Task | None:
        task = super().take()
        self.out += task is not None
        self.most = max(self.most, self.out)
        return task

    def done(self, commit: Commit) -> None:
        self.out -= 1
        super().done(commit)


@extended
@pytest.mark.parametrize(("workers", "most"), [(1, 1), (3, 3), (None, 20)])
def test_tasks_in_flight_are_bounded(
    tasks: ModuleType, work: Work, place: Path, connected: RayCluster, workers: int | None, most: int
) -> None:
    commits: list[Commit] = []
    queue = CountingQueue([make_task(tasks, "overlap", place, number=n) for n in range(20)], commits.append)
    with engine(workers) as ray:
        ray.run(queue, work)
    assert queue.most == most  # all, so that a cluster that grows sees them, or what was said
    assert max(len(commit.result["seen"]) for commit in commits) <= min(most, 4)


@extended
def test_tasks_ask_for_the_memory_of_the_recipe(
    tasks: ModuleType, work: Work, place: Path, connected: RayCluster
) -> None:
    with engine(memory_bytes=NODE_MEMORY * 3 // 4) as ray:  # so one fits on a node, with its two CPUs
        commits = run_all(ray, [make_task(tasks, "overlap", place, number=n) for n in range(10)], work)
    for counts in (commit.result for commit in commits):
        assert len([name for name in counts["seen"] if name.startswith(counts["node"])]) == 1


@extended
def test_what_fits_on_no_node_is_waited_for_and_then_said(
    tasks: ModuleType, work: Work, connected: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_ray, "NO_NODE_SECONDS", 0.5)
    monkeypatch.setattr(engine_ray, "LOOK_SECONDS", 0.1)
    message = r"no node .* had a CPU and 4 GB .*largest nodes: 2 CPUs with 4 GB and 1 GPU\).*`memory` smaller"
    with (
        engine(memory_bytes=NODE_MEMORY + 1) as ray,
        pytest.warns(RuntimeWarning, match="waiting for one"),
        pytest.raises(BuildError, match=message),
    ):
        run_all(ray, [make_task(tasks, "square", 2)], work)


@extended
def test_a_second_cluster_is_refused_while_connected(connected: RayCluster) -> None:
    with pytest.raises(BuildError, match=r"already connected to a Ray cluster; .*127\.0\.0\.1:1"):
        RayEngine(1, address="127.0.0.1:1", memory_bytes=MEMORY).__enter__()


@extended
@pytest.mark.parametrize("fate", ["kill", "suspend"])
def test_a_node_that_is_killed_or_falls_silent_costs_only_its_tasks(
    tasks: ModuleType,
    work: Work,
    place: Path,
    connected: RayCluster,
    monkeypatch: pytest.MonkeyPatch,
    fate: str,
) -> None:
    quick_retries(monkeypatch)
    number = connected.add()
    planned = [
        make_task(tasks, "meet", place, n, 7, number=n) for n in range(7)
    ]  # six run at once, one waits

    def end() -> None:
        getattr(connected, fate)(number)
        (place / "here-ended").touch()

    thread = _when(lambda: len(list(place.glob("here-*"))) == 6, end)
    told = pytest.warns(RuntimeWarning, match=r"its node \S+ died; it runs again \(retry 1 of 4\)")
    with engine() as ray, told:
        commits = run_all(ray, planned, work)
    thread.join()
    if fate == "suspend":
        connected.kill(number)
    assert len(commits) == 7


BUILD = RECIPE.replace("dedup: {exact: {}}", "dedup: {exact: {}, near: {}}\nmemory: 512MB")
BUILD += "split: {validation: 9, by: number}\n"


@extended
def test_a_build_whose_node_is_killed_gives_the_bytes_of_processes_here(
    tmp_path: Path, connected: RayCluster, inline_builds: None
) -> None:
    recipe = make_corpus(tmp_path / "corpus", 200, BUILD)
    build(recipe, output=tmp_path / "expected", progress=False)
    number = connected.add()
    heard: list[StageProgress] = []
    thread = _when(lambda: bool(connected.running(number, "clean/")), lambda: connected.kill(number))
    with pytest.warns(RuntimeWarning, match=r"task clean/.* its node \S+ died; it runs again"):
        build(recipe, output=tmp_path / "made", engine="ray", progress=heard.append)
    thread.join()
    assert tree(tmp_path / "made") == tree(tmp_path / "expected")
    last = {progress.stage: progress for progress in heard}
    assert all(progress.finished for progress in last.values())
    assert {"clean", "exact", "signatures", "near", "split_fit", "tokenize", "pack"} <= set(last)


@extended
@pytest.mark.skipif(not can_hide_folders(), reason="this user may not mount")
def test_another_machine_needs_a_work_folder_that_it_sees(
    tmp_path: Path, cluster: RayCluster, rgw_bucket: RgwBucket, inline_builds: None
) -> None:
    """The one node has folders of its own where the driver has its scratch and its local work folder."""
    import ray

    ray.shutdown()
    (tmp_path / "own").mkdir()
    recipe = make_corpus(tmp_path / "corpus", 100, BUILD)
    build(recipe, output=tmp_path / "expected", progress=False)
    local = [f"work={tmp_path}/own/work"]
    remote = [f"work={rgw_bucket.url}/work", f"scratch={tmp_path}/own/scratch"]
    with RayCluster(nodes=0, cpus=2) as machines:
        machines.add_machine(tmp_path / "own")
        arguments: dict[str, Any] = {"engine": "ray", "ray_address": machines.address, "progress": False}
        with pytest.raises(BuildError, match=r"does not see the work folder .*own/work; .*S3 \(s3://"):
            build(recipe, output=tmp_path / "made", overrides=local, **arguments)
        storage = StorageOptions(endpoint_url=rgw_bucket.endpoint_url)
        build(recipe, output=tmp_path / "made", overrides=remote, storage=storage, **arguments)
    assert tree(tmp_path / "made") == tree(tmp_path / "expected")


SLEEPER = """
import sys
from pathlib import Path; import ray_tasks
from shardkit.writers.execution.engine_ray import RayEngine
from shardkit.writers.execution.runner import Journal
from shardkit.writers.execution.stage import Stage
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work
address, place = sys.argv[1] or None, Path(sys.argv[2])
work = Work.at(Path("work").absolute())
with Journal(work) as journal, RayEngine(2, address=address, memory_bytes=10**9) as engine:
    nap = Stage("s", "s", ray_tasks.nap)
    tasks = [nap.task(str(n), 0, str(place), 600) for n in range(2)]
    engine.run(TaskQueue(tasks, lambda commit: None), journal.work)
"""


@extended
@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_tasks_end_with_the_build(
    tmp_path: Path, tasks: ModuleType, place: Path, cluster: RayCluster, number: signal.Signals
) -> None:
    folders = [str(Path(str(tasks.__file__)).parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, cluster.address, place],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )
    assert end_napping(process, place, number) == ""


def test_a_head_that_is_silent_for_long_is_said_with_what_to_do() -> None:
    now = 100.0
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        head = Head(address, lambda: now)
        assert head.check()
    now += 29
    assert not head.check()
    assert head.nodes_of([object()]) == []
    now += 2
    with pytest.raises(
        BuildError, match=rf"the head of the Ray cluster \({address}\) has not answered for 31 s"
    ):
        head.check()


@extended
def test_a_build_whose_head_dies_ends_soon_with_what_to_do(
    tmp_path: Path, tasks: ModuleType, place: Path
) -> None:
    folders = [str(Path(str(tasks.__file__)).parent), os.environ.get("PYTHONPATH", "")]
    quick = "from shardkit.writers.execution import ray_cluster; ray_cluster.HEAD_SECONDS = 5.0"
    with RayCluster(nodes=1, cpus=2) as cluster:
        process = subprocess.Popen(
            [sys.executable, "-c", quick + SLEEPER, cluster.address, place],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        )
        deadline = time.monotonic() + 100
        while len(list(place.glob("napping-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        cluster.kill_head()
        begin = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - begin < 40
    assert "start the cluster again, then run the same command: finished tasks are kept" in errors
    assert process.returncode == 1


@extended
def test_the_command_starts_ray_here_and_ends_it(tmp_path: Path, inline_builds: None) -> None:
    recipe = make_corpus(tmp_path / "corpus", 100)
    build(recipe, output=tmp_path / "expected", progress=False)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    options = ["--engine", "ray", "--workers", "2", "--quiet", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "shardkit", "build", recipe, "--output", tmp_path / "made", *options],
        env=environment | RAY_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout)["output"] == str(tmp_path / "made")
    assert tree(tmp_path / "made") == tree(tmp_path / "expected")


def _when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """A thread that acts as soon as something holds."""

    def watch() -> None:
        deadline = time.monotonic() + 120
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread
