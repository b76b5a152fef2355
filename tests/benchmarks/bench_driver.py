"""The driver of a build with many tasks on Ray, on a virtual clock: 16,000 workers that take no time here.

    python tests/benchmarks/bench_driver.py [--tasks 10000 100000 1000000] [--workers 16000] [--json]
                                            [--slow 0.005] [--hanging 0.001]

Real: tasks with their digests, `Runner`, its queue, `Journal` with the lease and the segments, `Work`
with its retries, the loop of the Ray engine with its second tries of stragglers, tasks and commits that are
pickled on their way. Each size is a process of its own: it runs one stage of that many tasks, with `--slow`
or `--hanging` also without second tries, then starts again and finds all of them finished.

Assumed: a task takes a minute (lognormal, by its name), writes three files and counts what `clean` does. An
attempt takes ten times as long with probability `--slow`, and with probability `--hanging` it is killed after
`TASK_SECONDS` (6 hours): that is chance of the machine, not of the task. A worker commits by itself; the
store answers at once, has lists of 1,000 keys a request, and is not asked for anything by anybody else. The
virtual clock goes on while the driver computes. Not in it: what Ray itself does to hand a task over. CPU is
that of the driver's process without the simulation's own; memory is the peak of the process, which holds the
workers' bookkeeping too.
"""

from __future__ import annotations

import argparse
import heapq
import json
import pickle
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import xxhash

from figures import Heads, benchmark_parser, give, peak_rss_bytes
from shardkit.files import Closing
from shardkit.progress import make_listener
from shardkit.storage.local import LocalBody, LocalStore
from shardkit.storage.store import BaseStore, ObjectInfo, Store
from shardkit.writers.execution.commit import Commit, Output, facts_of
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.engine import TASK_SECONDS, OnNews
from shardkit.writers.execution.engine_ray import EngineRun, Stragglers
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.ray_node import NodeAnswer, NodeCheck
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import COMMIT_NAME, Work

MEAN_SECONDS = 60.0
MEMORY = 2_000_000_000  # of a task
FILES = ("documents.arrow", "keys.run", "quarantine.jsonl")
PAGE = 1000  # keys that a store lists in a request
Number = Annotated[int, DecidesNoByte("each task has inputs of its own")]
CONFIG = {"filters": [["length", {"min_words": 50}]] * 8, "text": "text", "fields": ["text", "id", "url"]}
HEADS: Heads = {
    "tasks": ("tasks", ",d"),
    "speculates": ("second tries", ""),
    "cpu_us": ("CPU us a task", ",.0f"),
    "requests": ("requests a task", ",.4f"),
    "peak_mb": ("peak MB", ",.0f"),
    "restart_s": ("restart CPU s", ",.1f"),
    "restart_requests": ("its requests a task", ",.4f"),
    "hours": ("virtual hours", ",.2f"),
    "more_attempts": ("attempts more", ",d"),
}


@dataclass
class Figures:
    """What a driver cost."""

    tasks: int
    speculates: str
    cpu_us: float
    requests: float
    peak_mb: float
    restart_s: float
    restart_requests: float
    hours: float
    more_attempts: int


def clean(folder: Path, number: Number, config: dict[str, Any], input: str) -> None:
    """A task that nobody runs."""


CLEAN = Stage("clean", "clean", clean)


def make_tasks(count: int) -> list[Task]:
    return [CLEAN.task(f"part-{n:07d}.jsonl", 1 << 26, n, CONFIG, f"{n:032x}") for n in range(count)]


def commit_of(task: Task) -> Commit:
    """What a worker gives back."""
    drawn = xxhash.xxh3_64_intdigest(task.name.encode())
    documents = 10_000 + drawn % 1000
    counted = {"documents": documents, "bytes": documents * 5000}
    dropped = {f"gopher_quality/rule_{n}": {"documents": 10 + n, "bytes": 50_000} for n in range(3)}
    ledger = {"read": counted, "kept": counted, "dropped": dropped, "quarantined": {}}
    result = {"ledger": ledger, "input": f"{drawn:032x}", "fields": ["id", "text", "url"], "filters": {}}
    counts = {"result": result}
    outputs = {
        name: Output((drawn >> 8 * n) % (1 << 26), f"{drawn + n:032x}") for n, name in enumerate(FILES)
    }
    folder = Path("/scratch/work-0") / task.key
    return Commit(task.stage, task.name, folder, task.digest, facts_of(counts, outputs))


def sizes_of(task: Task) -> dict[str, int]:
    """Bytes of its files."""
    drawn = xxhash.xxh3_64_intdigest(task.name.encode())
    return {name: (drawn >> 8 * n) % (1 << 26) for n, name in enumerate(FILES)}


class SimulatedStore(BaseStore):
    """A store whose records and outputs are computed, and whose other objects lie in `folder`.

    `finished` are the tasks that have a record, by key in the order of keys.
    """

    def __init__(self, folder: Path) -> None:
        self.below = LocalStore(folder)
        self.requests: Counter[str] = Counter()
        self.finished: dict[str, Task] = {}

    @property
    def url(self) -> str:
        return "memory://bench-driver"

    def head(self, key: str) -> ObjectInfo:
        self.requests["head"] += 1
        return self.below.head(key)

    def open(
        self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None
    ) -> LocalBody:
        self.requests["get"] += 1
        return self.below.open(key, start, stop, version=version)

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        if_absent: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> ObjectInfo:
        self.requests["put"] += 1
        return self.below.put(key, data, if_absent=if_absent, metadata=metadata)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for number, info in enumerate(self._listed(prefix)):
            self.requests["list"] += number % PAGE == 0
            yield info
        self.requests["list"] += 1

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix == f"{CLEAN.name}/":
            for key, task in self.finished.items():
                for name, size in sorted([(COMMIT_NAME, 1000), *sizes_of(task).items()]):
                    yield ObjectInfo(f"{key}/{name}", size, "")
        else:
            yield from self.below.list(prefix)

    def delete(self, key: str) -> None:
        self.requests["delete"] += 1
        self.below.delete(key)


@dataclass(frozen=True)
class _Instead:
    """Gives a store for any other; a worker, which has none of it, would get its own."""

    store: Store

    def __call__(self, below: Store) -> Store:
        return self.store

    def __reduce__(self) -> tuple[object, ...]:
        return str, ()


class VirtualRay:
    """What the engine uses of Ray, for `workers` CPUs and the tasks of one stage.

    `now` is its time, `own_seconds` the CPU that simulating took.
    """

    class exceptions:  # noqa: N801 - as Ray calls its module
        RayError = type("RayError", (Exception,), {})
        RayTaskError = type("RayTaskError", (RayError,), {})
        TaskCancelledError = type("TaskCancelledError", (RayError,), {})
        OutOfMemoryError = type("OutOfMemoryError", (RayError,), {})
        NodeDiedError = type("NodeDiedError", (RayError,), {})
        LocalRayletDiedError = type("LocalRayletDiedError", (RayError,), {})
        WorkerCrashedError = type("WorkerCrashedError", (RayError,), {})

    def __init__(self, workers: int, chances: Chances) -> None:
        self.now = self.own_seconds = 0.0
        self.attempts = 0
        self.workers, self._chances = workers, chances
        self._tasks: Sequence[Task] = ()
        self._attempt_of: Counter[str] = Counter()
        self._name_of: dict[int, str] = {}  # of what neither ended nor was canceled
        self._waiting: deque[int] = deque()
        self._running: dict[int, float] = {}  # since when
        self._ends: list[tuple[float, int, bool]] = []  # (time, reference, whether it is killed)
        self._ready: dict[int, tuple[float, bool]] = {}  # (seconds that it took, whether it was killed)
        self._seen = time.process_time()

    def expect(self, tasks: Sequence[Task]) -> None:
        """Tasks that will be handed in, as `make_tasks` gives them."""
        self._tasks = tasks

    def _task(self, name: str) -> Task:
        return self._tasks[int(name.rpartition("-")[2].removesuffix(".jsonl"))]

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self.workers, "memory": self.workers * MEMORY}}]

    def remote(self, function: object) -> _Remote:
        return _Remote(self)

    def submit(self, name: str) -> int:
        began = time.process_time()
        self.attempts += 1
        reference = self.attempts
        self._name_of[reference] = name
        self._waiting.append(reference)
        self._start()
        self.own_seconds += time.process_time() - began
        return reference

    def wait(
        self, references: Sequence[int], *, num_returns: int, timeout: float, fetch_local: bool
    ) -> tuple[list[int], list[int]]:
        began = time.process_time()
        self.now += began - self._seen  # the driver was at work
        last = self.now + timeout
        self._end_until(self.now)
        while len(self._ready) < num_returns and self._ends and self._ends[0][0] <= last:
            self._end_until(self._ends[0][0])
        if len(self._ready) < num_returns:
            self._end_until(last)
        found = list(self._ready)
        self._seen = time.process_time()
        self.own_seconds += self._seen - began
        return found, []

    def get(self, reference: int, *, timeout: float) -> NodeAnswer:
        began = time.process_time()
        try:
            seconds, is_killed = self._ready.pop(reference)
            name = self._name_of.pop(reference)
            if is_killed:
                raise self.exceptions.WorkerCrashedError("killed")
            del self._attempt_of[name]
            return NodeAnswer(pickle.dumps((commit_of(self._task(name)), None, "")), seconds=seconds)
        finally:
            self.own_seconds += time.process_time() - began

    def cancel(self, reference: int, *, force: bool) -> None:
        del self._name_of[reference]
        self._ready.pop(reference, None)
        self._running.pop(reference, None)
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self.workers:
            reference = self._waiting.popleft()
            if (name := self._name_of.get(reference)) is None:
                continue
            self._attempt_of[name] += 1
            seconds, is_killed = self._chances.seconds(self._task(name), self._attempt_of[name])
            self._running[reference] = self.now
            heapq.heappush(self._ends, (self.now + seconds, reference, is_killed))

    def _end_until(self, when: float) -> None:
        while self._ends and self._ends[0][0] <= when:
            self.now, reference, is_killed = heapq.heappop(self._ends)
            if (since := self._running.pop(reference, None)) is not None:
                self._ready[reference] = self.now - since, is_killed
                self._start()
        self.now = max(self.now, when)


@dataclass(frozen=True)
class _Remote:
    """A remote function with its options."""

    ray: VirtualRay
    name: str = ""

    def options(self, *, name: str, **others: object) -> _Remote:
        return replace(self, name=name)

    def remote(self, check: object, data: bytes) -> int:
        return self.ray.submit(self.name)


@dataclass(frozen=True)
class Chances:
    """Shares of attempts that take ten times as long, and that hang."""

    slow: float = 0.0
    hanging: float = 0.0

    def seconds(self, task: Task, attempt: int) -> tuple[float, bool]:
        """(what an attempt takes, whether it is killed then)."""
        drawn = xxhash.xxh3_64_intdigest(f"{task.name}/{attempt}".encode()) / (1 << 64)
        if drawn < self.hanging:
            return TASK_SECONDS, True
        return seconds_of(task) * (10 if drawn < self.hanging + self.slow else 1), False


@dataclass
class VirtualEngine(Closing):
    """The Ray engine's loop on a virtual cluster."""

    ray: VirtualRay
    stragglers: Stragglers | None = None

    def __post_init__(self) -> None:
        self.workers = self.ray.workers

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        check = NodeCheck("", (), "", TASK_SECONDS, None)
        run = EngineRun(
            self.ray, queue, work, check, None, MEMORY, self.stragglers, self.ray.clock, self.ray.sleep
        )
        run.until_exhausted(on_news)

    def close(self) -> None:
        """Nothing to close."""


def seconds_of(task: Task) -> float:
    """Between a quarter of the mean and four times as much."""
    return float(MEAN_SECONDS * 2.0 ** ((xxhash.xxh3_64_intdigest(task.name.encode()) % 401) / 100 - 2))


def drive(count: int, workers: int, chances: Chances, *, speculate: bool, scratch: Path) -> Figures:
    """Run a stage of so many tasks, then start again."""
    start = time.process_time()
    tasks = make_tasks(count)
    store = SimulatedStore(scratch / "store")
    work = Work("memory://bench-driver", scratch / "scratch", around=_Instead(store))
    ray = VirtualRay(workers, chances)
    ray.expect(tasks)
    commits = run_once(tasks, work, VirtualEngine(ray, Stragglers() if speculate else None))
    cpu = time.process_time() - start - ray.own_seconds
    requests = sum(store.requests.values())
    peak = peak_rss_bytes()
    del commits

    store.requests.clear()
    store.finished = {task.key: task for task in sorted(tasks, key=lambda task: task.key)}
    tasks = [replace(task) for task in tasks]  # without their digests
    simulation = simulation_seconds(store)
    start = time.process_time()
    again = run_once(tasks, work, VirtualEngine(VirtualRay(workers, chances)))
    restart = time.process_time() - start - simulation
    assert all(commit.reused for commit in again)
    return Figures(
        count,
        "yes" if speculate else "no",
        cpu / count * 1e6,
        requests / count,
        peak / 1e6,
        restart,
        sum(store.requests.values()) / count,
        ray.now / 3600,
        ray.attempts - count,
    )


def simulation_seconds(store: SimulatedStore) -> float:
    """CPU that making the listings takes."""
    start = time.process_time()
    for _ in store.list(f"{CLEAN.name}/"):
        pass
    store.requests.clear()
    return time.process_time() - start


def _ignore(progress: StageProgress) -> None:
    """A listener that costs nothing."""


def run_once(tasks: Sequence[Task], work: Work, engine: VirtualEngine) -> list[Commit]:
    with make_listener(_ignore) as listener, Journal(work) as journal:
        [commits] = Runner(journal, engine, listener).run(tasks)
        return commits


def measured(count: int, options: argparse.Namespace, *, speculate: bool) -> dict[str, Any]:
    """`drive` in a process of its own."""
    command = [sys.executable, __file__, "--one", str(count), "--workers", str(options.workers)]
    command += ["--slow", str(options.slow), "--hanging", str(options.hanging)]
    command += [] if speculate else ["--no-speculate"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(answer.stdout)
    return figures


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--workers", type=int, default=16_000)
    parser.add_argument(
        "--slow", type=float, default=0.0, help="share of attempts that take ten times as long"
    )
    parser.add_argument("--hanging", type=float, default=0.0, help="share of attempts that hang")
    parser.add_argument("--no-speculate", action="store_true", help="run no task a second time")
    parser.add_argument("--one", type=int, help="run one size in this process and print its figures")
    options = parser.parse_args()
    if options.one is not None:
        warnings.simplefilter("ignore", RuntimeWarning)  # of each straggler
        chances = Chances(options.slow, options.hanging)
        with tempfile.TemporaryDirectory() as scratch:
            speculate = not options.no_speculate
            figures = drive(options.one, options.workers, chances, speculate=speculate, scratch=Path(scratch))
        print(json.dumps(asdict(figures)))
        return
    ways = (False, True) if (options.slow or options.hanging) and not options.no_speculate else (True,)
    ways = (False,) if options.no_speculate else ways
    give(
        options,
        [measured(count, options, speculate=way) for count in options.tasks for way in ways],
        HEADS,
    )


if __name__ == "__main__":
    main()
