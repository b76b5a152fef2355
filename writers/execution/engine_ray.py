"""Runs tasks on a Ray cluster, or on a Ray that is started on this machine for the length of the build.

Ray places the tasks. Tasks (some KB) and commits go through Ray; data goes through the work folder only. Each
task requests one CPU and the recipe's `memory`, and tasks are spread over the nodes.

At most twice as many tasks as fit are submitted to Ray, so that a stage of a million tasks needs no more
memory than one of a thousand, and an autoscaling cluster still sees demand. A task that is lost with its
process or node is submitted again, at most `RETRIES` times, with a warning each time; Ray's own retries are
off, because they are silent. An error of the task itself ends the run, as with local processes.

At the end of a stage some workers are idle while a slow disk, a throttled network or a hanging process holds
up the last tasks. A task that takes several times as long as others (`Stragglers`) is then submitted a second
time; the first answer counts and the other process is killed. This is safe because a task is committed once,
whoever runs it. Local processes share one machine, on which a second attempt would be as slow, so only this
engine does it.

Before a node runs a task, it checks that its shardkit and libraries are those of the driver, which computed
the digests of all tasks, and that it sees the same work folder. Only then does it unpickle the task, which
imports its code.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Self

from shardkit.errors import BuildError, MissingExtraError, warn_user
from shardkit.files import Closing
from shardkit.units import format_bytes
from shardkit.writers.execution.engine import TASK_SECONDS, OnNews, death_of, default_workers, report
from shardkit.writers.execution.processes import ONE_THREAD, RESUME, answer, give_back_memory, time_limit
from shardkit.writers.execution.task import Task, code_version
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work
from shardkit.writers.execution.work_local import LocalWork
from shardkit.writers.kernels.numba_support import CompilationWatch, kernel_cache
from shardkit.writers.remembered import worker_variable

__all__ = [
    "RETRIES",
    "EngineRun",
    "NodeCheck",
    "RayEngine",
    "Stragglers",
    "check_of",
    "import_ray",
    "run_on_node",
    "slots_of",
    "start_ray",
]


@dataclass(frozen=True)
class NodeCheck:
    """What a node must have in common with the driver."""

    code: str
    python_path: tuple[str, ...]
    work: str
    task_seconds: float
    marker: str | None
    """A folder in a local work folder: a node that does not see it is another machine with another disk."""

    def problem(self) -> str | None:
        """Why this node does not fit."""
        if code_version() != self.code:
            return (
                "its shardkit or the libraries of it are other versions than where the build was started; "
                "install the same on all nodes"
            )
        if self.marker is not None and not Path(self.marker).exists():
            return (
                f"it does not see the work folder {self.work}; with several machines, set `work` to a place "
                f"in S3 (s3://…) or on a file system that all of them mount at this path"
            )
        return None


@contextmanager
def check_of(work: Work, task_seconds: float = TASK_SECONDS) -> Iterator[NodeCheck]:
    """The driver's, while it runs tasks, of which each may take `task_seconds`."""
    marker = None
    if isinstance(work, LocalWork):
        marker = work.temporary(Task("ray", "nodes", {}, dict))  # goes with what was not finished
    path = tuple(str(Path(folder).absolute()) for folder in sys.path)  # "" is the current folder
    try:
        marked = None if marker is None else str(marker)
        yield NodeCheck(code_version(), path, work.place, task_seconds, marked)
    finally:
        if marker is not None:
            with suppress(OSError):
                marker.rmdir()


def run_on_node(check: NodeCheck, pickled: bytes) -> tuple[bytes, float, float]:
    """Run the (task, digest, work) in `pickled`: what `answer` gives, seconds of compiling kernels, and all.

    Everything that a task can raise is in the answer: what Ray sees fail is Ray's or the machine's.
    """
    if problem := check.problem():
        error = BuildError(f"node {socket.gethostname()} of the Ray cluster: {problem}")
        return pickle.dumps((None, error, "")), 0.0, 0.0
    sys.path.extend(folder for folder in check.python_path if folder not in sys.path)
    os.environ.update(kernel_cache() | worker_variable())  # before the task's imports bring Numba
    task, digest, work = pickle.loads(pickled)
    watch, seconds = _watch()
    watch.install()
    seconds.clear()
    began = time.monotonic()
    try:
        with time_limit(check.task_seconds):
            data = answer(task, digest, work)
        return data, sum(seconds), time.monotonic() - began
    finally:
        give_back_memory()


@lru_cache(maxsize=1)
def _watch() -> tuple[CompilationWatch, list[float]]:
    """This process's one watch, and where it writes to."""
    seconds: list[float] = []
    return CompilationWatch(lambda told: None if told is None else seconds.append(told)), seconds


OBJECT_STORE_BYTES = 100_000_000  # records of finished tasks pass through it, nothing else

_CONNECT_SECONDS = 10.0

_LOCAL = "local"


def import_ray() -> Any:
    """The module; MissingExtraError if it is not installed."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise MissingExtraError("ray", "ray", "the engine ray") from error
    return ray


def start_ray(address: str | None, workers: int, memory_bytes: int) -> None:
    """Connect to the cluster at `address`, else at $RAY_ADDRESS, else start one here for `workers` tasks.

    Says nothing on stdout or stderr. BuildError if that is not possible.
    """
    ray = import_ray()
    address = address or os.environ.get("RAY_ADDRESS") or _LOCAL
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == _LOCAL:
        settings |= {
            "num_cpus": workers,
            "_memory": workers * memory_bytes,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }
    else:
        _check_reachable(address)
    try:
        with _no_usage_statistics():
            ray.init(address, **settings)
    except (ray.exceptions.RayError, ImportError, OSError, RuntimeError, TimeoutError, ValueError) as error:
        what = "Ray cannot be started here" if address == _LOCAL else f"the Ray cluster at {address}"
        problem = str(error).strip().rpartition("\n")[2]  # of a traceback of the other side, the error
        raise BuildError(f"{what}: {problem}") from error
    # What raylets report of lost processes would be printed on stdout, which is for results; the engine tells
    # of lost tasks. There is no public switch for it.
    ray._private.worker._worker_logs_enabled = False


def _check_reachable(address: str) -> None:
    """Ray itself waits for a minute and more, and then ends this process."""
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto", or another scheme
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        problem = f"cannot be reached ({error}); is it running, and is this its address?"
        raise BuildError(f"the Ray cluster at {address} {problem}") from error


@contextmanager
def _no_usage_statistics() -> Iterator[None]:
    name = "RAY_USAGE_STATS_ENABLED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


RETRIES = 4

MAX_WORKERS = 100_000

NO_NODE_SECONDS = 600.0  # clusters take minutes to start a machine

WAIT_SECONDS = 6 * 3600.0  # without any task finished: a process hangs, or a task is far too big

LOOK_SECONDS = 5.0  # how often nodes are counted

_TICK_SECONDS = 1.0

_ANSWERED_SHARE = 1000  # a thousandth of what is in flight is waited for: every wait looks at all of it

_FETCH_SECONDS = 60.0

_CANCEL_SECONDS = 10.0

FIRST_PAUSE_SECONDS = 1.0  # before a lost task is handed in again; doubled each time

_REMEMBERED_TASKS = 1000  # of a stage, enough for a median

_FIRST_TASKS = 4  # handed in where there is no node yet: demand for a cluster that grows


class RayEngine(Closing):
    """Up to `workers` tasks at a time on a Ray cluster (None: as many as fit).

    `address` is that of a cluster ("auto", "host:6379", "ray://host:10001"; None: $RAY_ADDRESS, else a start
    on this machine). A Ray that this process is connected to already is used and left running.
    """

    def __init__(
        self,
        workers: int | None,
        *,
        address: str | None,
        memory_bytes: int,
        task_seconds: float = TASK_SECONDS,
        stragglers: Stragglers | None = None,
    ) -> None:
        import_ray()
        if workers is not None and not 1 <= workers <= MAX_WORKERS:
            raise BuildError(f"{workers} workers: between 1 and {MAX_WORKERS:,} are possible")
        self.workers = default_workers(memory_bytes) if workers is None else workers
        self._bound, self._address, self._memory_bytes = workers, address, memory_bytes
        self._task_seconds, self._stragglers = task_seconds, stragglers
        self._is_ours = False

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        """Run tasks until the queue is exhausted.

        Raises the first task's error with its type and message; BuildError if Ray or a machine fails more
        often than is bearable, or if no node has what a task needs.
        """
        ray = self._connect()
        with check_of(work, self._task_seconds) as check:
            run = EngineRun(ray, queue, work, check, self._bound, self._memory_bytes, self._stragglers)
            run.until_exhausted(on_news)

    def __enter__(self) -> Self:
        self._connect()  # now, so that no stage's time has it
        return self

    def _connect(self) -> Any:
        """The module ray, connected."""
        ray = import_ray()
        if not ray.is_initialized():
            start_ray(self._address, self.workers, self._memory_bytes)
            self._is_ours = True
        elif not self._is_ours and self._address not in (None, "auto"):
            raise BuildError(
                f"this process is connected to a Ray cluster already; leave out the address "
                f"{self._address}, or call ray.shutdown() first"
            )
        return ray

    def close(self) -> None:
        """End the Ray that was started, or the connection that was made, if any."""
        if self._is_ours:
            self._is_ours = False
            import_ray().shutdown()


@dataclass(slots=True)
class Stragglers:
    """Says how long a task may run before another machine runs it, too, if it has nothing else to do.

    That is `factor` times the median of the tasks of its stage that finished last, and `least_seconds`.
    """

    least_seconds: float = 60.0
    factor: float = 3.0
    _seconds: dict[str, deque[float]] = field(default_factory=dict)  # by stage

    def finished(self, stage: str, seconds: float) -> None:
        """Note how long a task ran."""
        self._seconds.setdefault(stage, deque(maxlen=_REMEMBERED_TASKS)).append(seconds)

    def limit_seconds(self, stage: str) -> float:
        """Infinite as long as no task of the stage has finished."""
        seconds = self._seconds.get(stage)
        return max(self.least_seconds, self.factor * median(seconds)) if seconds else math.inf


@dataclass(slots=True)
class _Try:
    """A task that was handed to Ray, at the time `since`, or is to be. A straggler has two references."""

    task: Task
    losses: int = 0
    not_before: float = 0.0
    since: float = 0.0
    refs: set[Any] = field(default_factory=set)


@dataclass(slots=True)
class EngineRun:
    """One call of `RayEngine.run`."""

    ray: Any
    queue: TaskQueue
    work: Work
    check: NodeCheck
    bound: int | None
    memory_bytes: int
    stragglers: Stragglers | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _function: Any = None
    _flying: dict[Any, _Try] = field(default_factory=dict)  # by Ray's reference
    _lost: list[_Try] = field(default_factory=list)
    _slots: int = 0
    _full: float = 0.0  # when tasks last had to wait for a slot
    _looked: float = float("-inf")
    _searched: float = float("-inf")  # for stragglers
    _moved: float = 0.0  # when something was last finished, or a node was last there
    _told_no_node: bool = False

    def __post_init__(self) -> None:
        self._function = self.ray.remote(run_on_node)

    def until_exhausted(self, on_news: OnNews | None) -> None:
        try:
            self._moved = self.clock()
            while not self.queue.exhausted:
                self._look()
                self._hand_in()
                self._hand_in_stragglers()
                if not self._flying:
                    if not self.queue.exhausted:  # a lost task has to pause
                        self.sleep(_TICK_SECONDS)
                    continue
                for ref in self._finished():
                    tried = self._flying.pop(ref, None)
                    if tried is None:
                        continue  # the other attempt was faster
                    tried.refs.discard(ref)
                    answered = self._answer(ref, tried)
                    if answered is not None:
                        pickled, compile_seconds, seconds = answered
                        if self.stragglers is not None:
                            self.stragglers.finished(tried.task.stage, seconds)
                        self._stop(tried)
                        if on_news is not None and compile_seconds:
                            on_news(tried.task, compile_seconds)
                        self._moved = self.clock()
                        report(self.queue, tried.task, *pickle.loads(pickled))
        except (self.ray.exceptions.RayError, ConnectionError) as error:
            self._cancel()
            raise BuildError(
                f"the Ray cluster cannot be reached any more: {_first_line(error)}; {RESUME}"
            ) from error
        except BaseException:
            self._cancel()
            raise

    def _look(self) -> None:
        """Count what fits, every few seconds: nodes come and go. BuildError if there is nothing for long."""
        now = self.clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        nodes = self.ray.nodes()
        self._slots = slots_of(nodes, self.memory_bytes)
        if self._slots:
            self._told_no_node = False
            if now - self._moved > WAIT_SECONDS:
                raise BuildError(
                    f"no task was finished in {WAIT_SECONDS / 3600:.0f} hours; does something else use the "
                    f"whole Ray cluster, or does a task hang? {RESUME}"
                )
            return
        needs = f"a CPU and {format_bytes(self.memory_bytes)} of memory, which a task needs"
        if not self._told_no_node:
            self._told_no_node = True
            self._moved = now
            warn_user(f"no node of the Ray cluster has {needs}: waiting for one")
        elif now - self._moved > NO_NODE_SECONDS:
            raise BuildError(
                f"for {NO_NODE_SECONDS / 60:.0f} minutes no node of the Ray cluster had {needs} (there is "
                f"{_described(nodes)}); add nodes, or make the recipe's `memory` smaller; {RESUME}"
            )

    def _hand_in(self) -> None:
        """Hand tasks to Ray as long as there is room: lost ones first."""
        room = (self.bound or max(2 * self._slots, _FIRST_TASKS)) - len(self._flying)
        now = self.clock()
        for tried in [tried for tried in self._lost if tried.not_before <= now][: max(room, 0)]:
            self._lost.remove(tried)
            self._submit(tried)
            room -= 1
        while room > 0 and (task := self.queue.take()) is not None:
            self._submit(_Try(task))
            room -= 1

    def _hand_in_stragglers(self) -> None:
        """Hand tasks that take long to Ray once more, as far as there are idle slots."""
        now = self.clock()
        idle = min(self._slots, self.bound or self._slots) - len(self._flying)
        if idle <= 0:
            self._full = now
        if idle <= 0 or self.stragglers is None or self._lost or now - self._searched < _TICK_SECONDS:
            return
        self._searched = now  # not each time that a task ends: there are as many in flight as workers
        stages = {tried.task.stage for tried in self._flying.values()}
        limits = {stage: self.stragglers.limit_seconds(stage) for stage in stages}
        for tried in list(self._flying.values()):
            running = now - max(tried.since, self._full)  # at least
            if idle and len(tried.refs) == 1 and running > limits[tried.task.stage]:
                warn_user(f"task {tried.task}: has run for {running:,.0f} s; it is run a second time, too")
                self._submit(tried)
                idle -= 1

    def _stop(self, tried: _Try) -> None:
        """Kill what still runs of a finished task."""
        for ref in tried.refs:
            del self._flying[ref]
            with suppress(Exception):  # it may have ended by itself
                self.ray.cancel(ref, force=True)
        tried.refs.clear()

    def _submit(self, tried: _Try) -> None:
        data = pickle.dumps((tried.task, tried.task.digest, self.work))
        remote = self._function.options(
            name=str(tried.task),  # what Ray's tools show
            num_cpus=1,
            memory=self.memory_bytes,
            max_retries=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": ONE_THREAD},
        )
        ref = remote.remote(self.check, data)
        if not tried.refs:
            tried.since = self.clock()
        tried.refs.add(ref)
        self._flying[ref] = tried

    def _finished(self) -> list[Any]:
        """References that are done, after a moment's wait."""
        flying = list(self._flying)
        some = 1 + len(flying) // _ANSWERED_SHARE
        ready, _ = self.ray.wait(flying, num_returns=some, timeout=_TICK_SECONDS, fetch_local=False)
        if ready:
            ready, _ = self.ray.wait(flying, num_returns=len(flying), timeout=0, fetch_local=False)
        return list(ready)

    def _answer(self, ref: Any, tried: _Try) -> tuple[bytes, float, float] | None:
        """What `run_on_node` gave for a task; None if it was lost."""
        exceptions = self.ray.exceptions
        try:
            answered: tuple[bytes, float, float] = self.ray.get(ref, timeout=_FETCH_SECONDS)
        except exceptions.RayTaskError as error:
            problem = f"{_first_line(error.cause)}; is shardkit, with what the recipe needs, on all nodes?"
            raise BuildError(f"task {tried.task}: {problem}") from error
        except exceptions.TaskCancelledError as error:
            raise BuildError(f"task {tried.task}: was cancelled in the Ray cluster; {RESUME}") from error
        except exceptions.RayError as error:
            self._lose(tried, error)
            return None
        return answered

    def _lose(self, tried: _Try, error: Exception) -> None:
        """Have a task run again that no answer came from; it failed if it was lost too often. BuildError."""
        if tried.refs:
            return  # the other attempt runs
        tried.losses += 1
        problem = f"task {tried.task}: {self._reason(error)}"
        if tried.losses > RETRIES and tried.task.fallback is not None:
            warn_user(f"{problem}, {tried.losses} times by now")
            self.queue.failed(tried.task, death_of(tried.task))
            return
        if tried.losses > RETRIES:
            raise BuildError(
                f"{problem}, {tried.losses} times by now; if nodes run out of memory, make the recipe's "
                f"`memory` larger, so that fewer tasks run side by side; {RESUME}"
            ) from error
        tried.not_before = self.clock() + FIRST_PAUSE_SECONDS * 2 ** (tried.losses - 1)
        self._lost.append(tried)
        warn_user(f"{problem}; it runs again (retry {tried.losses} of {RETRIES})")

    def _reason(self, error: Exception) -> str:
        exceptions = self.ray.exceptions
        if isinstance(error, exceptions.OutOfMemoryError):
            return "Ray ended its process because the node was out of memory"
        if isinstance(error, exceptions.NodeDiedError | exceptions.LocalRayletDiedError):
            return "its node died"
        if isinstance(error, exceptions.WorkerCrashedError):
            limit = f"{self.check.task_seconds:,.0f} s"
            return f"its process died (killed, out of memory, or at it for over {limit}?)"
        return f"Ray lost it ({_first_line(error)})"

    def _cancel(self) -> None:
        """End what runs; what it had committed is kept."""
        refs = list(self._flying)
        self._flying.clear()
        with suppress(Exception):
            for ref in refs:
                self.ray.cancel(ref, force=True)
            if refs:
                self.ray.wait(refs, num_returns=len(refs), timeout=_CANCEL_SECONDS, fetch_local=False)


def slots_of(nodes: Sequence[dict[str, Any]], memory_bytes: int) -> int:
    """How many tasks of one CPU and `memory_bytes` fit on the living nodes (as `ray.nodes()` gives them)."""
    return sum(
        min(int(resources.get("CPU", 0)), int(resources.get("memory", 0)) // memory_bytes)
        for resources in (node["Resources"] for node in nodes if node["Alive"])
    )


def _described(nodes: Sequence[dict[str, Any]]) -> str:
    """The largest nodes, for people."""
    living = [node["Resources"] for node in nodes if node["Alive"]]
    sizes = sorted({(int(r.get("CPU", 0)), int(r.get("memory", 0))) for r in living}, reverse=True)
    texts = [f"{cpus} CPUs with {format_bytes(memory)}" for cpus, memory in sizes[:3] if cpus]
    return ", ".join(texts) if texts else "none with a CPU"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
