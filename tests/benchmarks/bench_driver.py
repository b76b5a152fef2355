"""The driver of a build with many tasks, on a virtual clock: 16,000 workers that take no time here.

    python tests/benchmarks/bench_driver.py [--tasks 10000 100000 1000000] [--workers 16000] [--json]

Real: tasks with their digests, `Runner`, its queue, `Journal` with the lease and the segments, `StoreWork`
with its retries, commits that arrive pickled as from a worker. Each size is a process of its own: it runs one
stage of that many tasks, then starts again and finds all of them finished.

Assumed: a task takes a minute (lognormal, by its name), writes three files and counts what `clean` does; a
worker commits by itself; the store answers at once, has lists of 1,000 keys a request, and is not asked for
anything by anybody else. Not in it: what Ray does to hand a task over. CPU is that of the driver's process
without the simulation's own; memory is the peak of the process, which holds the workers' bookkeeping too.
"""

from __future__ import annotations

import heapq
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from figures import Heads, benchmark_parser, give, peak_rss_bytes
from shardkit.files import Closing
from shardkit.progress import make_listener
from shardkit.storage.local import LocalBody, LocalStore
from shardkit.storage.store import BaseStore, ObjectInfo
from shardkit.writers.execution.engine import OnCompile
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.scheduler import TaskQueue
from shardkit.writers.execution.task import Commit, Output, Task, facts_of
from shardkit.writers.execution.work import Work
from shardkit.writers.execution.work_store import StoreWork
from shardkit.writers.progress import StageProgress

MEAN_SECONDS = 60.0
FILES = ("documents.arrow", "keys.run", "quarantine.jsonl")
PAGE = 1000  # keys that a store lists in a request
CONFIG = {"filters": [["length", {"min_words": 50}]] * 8, "text": "text", "fields": ["text", "id", "url"]}
HEADS: Heads = {
    "tasks": ("tasks", ",d"),
    "cpu_us": ("CPU us a task", ",.0f"),
    "requests": ("requests a task", ",.4f"),
    "peak_mb": ("peak MB", ",.0f"),
    "restart_s": ("restart CPU s", ",.1f"),
    "restart_requests": ("its requests a task", ",.4f"),
    "hours": ("virtual hours", ",.2f"),
}


@dataclass
class Figures:
    """What a driver cost."""

    tasks: int
    cpu_us: float
    requests: float
    peak_mb: float
    restart_s: float
    restart_requests: float
    hours: float


def make_tasks(count: int) -> list[Task]:
    return [
        Task("clean", f"part-{n:07d}.jsonl", CONFIG, dict, (n,), 1 << 26, {"input": f"{n:032x}"})
        for n in range(count)
    ]


def commit_of(task: Task) -> Commit:
    """What a worker gives back."""
    drawn = xxhash.xxh3_64_intdigest(task.name)
    documents = 10_000 + drawn % 1000
    counted = {"documents": documents, "bytes": documents * 5000}
    dropped = {f"gopher_quality/rule_{n}": {"documents": 10 + n, "bytes": 50_000} for n in range(3)}
    ledger = {"read": counted, "kept": counted, "dropped": dropped, "quarantined": {}}
    counts = {"ledger": ledger, "input": f"{drawn:032x}", "fields": ["id", "text", "url"], "filters": {}}
    outputs = {
        name: Output((drawn >> 8 * n) % (1 << 26), f"{drawn + n:032x}") for n, name in enumerate(FILES)
    }
    folder = Path("/scratch/work-0") / task.key
    return Commit(task.stage, task.name, folder, task.digest, facts_of(counts, outputs))


def sizes_of(task: Task) -> dict[str, int]:
    """Bytes of its files."""
    drawn = xxhash.xxh3_64_intdigest(task.name)
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
        if prefix.startswith("commits/"):
            yield from (ObjectInfo(f"commits/{key}.json", 1000, "") for key in self.finished)
        elif prefix.startswith("data/"):
            for key, task in self.finished.items():
                for name, size in sizes_of(task).items():
                    yield ObjectInfo(f"data/{key}/{name}", size, "")
        else:
            yield from self.below.list(prefix)

    def delete(self, key: str) -> None:
        self.requests["delete"] += 1
        self.below.delete(key)


@dataclass
class VirtualEngine(Closing):
    """Runs tasks on a clock of its own: `now` is its time, `own_seconds` the CPU that simulating took."""

    workers: int
    now: float = 0.0
    own_seconds: float = 0.0

    def run(self, queue: TaskQueue, work: Work, on_compile: OnCompile | None = None) -> None:
        running: list[tuple[float, str, Task]] = []  # no answers: a worker has its own until it is done
        while not queue.exhausted:
            while len(running) < self.workers and (task := queue.take()) is not None:
                start = time.process_time()
                heapq.heappush(running, (self.now + seconds_of(task), task.name, task))
                self.own_seconds += time.process_time() - start
            start = time.process_time()
            self.now, _, task = heapq.heappop(running)
            answer = pickle.dumps((commit_of(task), None, ""))
            self.own_seconds += time.process_time() - start
            queue.done(pickle.loads(answer)[0])

    def close(self) -> None:
        """Nothing to close."""


def seconds_of(task: Task) -> float:
    """Between a quarter of the mean and four times as much."""
    return float(MEAN_SECONDS * 2.0 ** ((xxhash.xxh3_64_intdigest(task.name) % 401) / 100 - 2))


def drive(count: int, workers: int, scratch: Path) -> Figures:
    """Run a stage of so many tasks, then start again."""
    start = time.process_time()
    tasks = make_tasks(count)
    store = SimulatedStore(scratch / "store")
    work = StoreWork("memory://bench-driver", scratch / "scratch", around=lambda below: store)
    engine = VirtualEngine(workers)
    commits = run_once(tasks, work, engine)
    cpu = time.process_time() - start - engine.own_seconds
    requests = sum(store.requests.values())
    peak = peak_rss_bytes()
    del commits

    store.requests.clear()
    store.finished = {task.key: task for task in sorted(tasks, key=lambda task: task.key)}
    tasks = [replace(task) for task in tasks]  # without their digests
    simulation = simulation_seconds(store)
    start = time.process_time()
    again = run_once(tasks, work, VirtualEngine(workers))
    restart = time.process_time() - start - simulation
    assert all(commit.reused for commit in again)
    return Figures(
        count,
        cpu / count * 1e6,
        requests / count,
        peak / 1e6,
        restart,
        sum(store.requests.values()) / count,
        engine.now / 3600,
    )


def simulation_seconds(store: SimulatedStore) -> float:
    """CPU that making the listings takes."""
    start = time.process_time()
    for _ in store.list("data/"):
        pass
    store.requests.clear()
    return time.process_time() - start


def _ignore(progress: StageProgress) -> None:
    """A listener that costs nothing."""


def run_once(tasks: Sequence[Task], work: StoreWork, engine: VirtualEngine) -> list[Commit]:
    with make_listener(_ignore) as listener, Journal(work) as journal:
        [commits] = Runner(journal, engine, listener).run(tasks)
        return commits


def measured(count: int, workers: int) -> dict[str, Any]:
    """`drive` in a process of its own."""
    command = [sys.executable, __file__, "--one", str(count), "--workers", str(workers)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(answer.stdout)
    return figures


def main() -> None:
    parser = benchmark_parser(__doc__, compares=True)
    parser.add_argument("--tasks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--workers", type=int, default=16_000)
    parser.add_argument("--one", type=int, help="run one size in this process and print its figures")
    arguments = parser.parse_args()
    if arguments.one is not None:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(asdict(drive(arguments.one, arguments.workers, Path(scratch)))))
        return
    give(arguments, [measured(count, arguments.workers) for count in arguments.tasks], HEADS)


if __name__ == "__main__":
    main()
