"""Runs tasks on a Ray cluster, or on a Ray that is started on this machine for the length of the build.

Ray places the tasks. Tasks (some KB) and commits go through Ray; data goes through the work folder only. Each
task requests one CPU and the recipe's `memory`, and tasks are spread over the nodes.

Beyond the tasks that fit, `WAITING_TASKS` are submitted to Ray: an autoscaling cluster sees the demand of the
stage, and one of a million tasks needs no more memory than one of some thousand. A task that is lost with its
process or node is submitted again, at most `RETRIES` times, with a warning each time; Ray's own retries are
off, because they are silent. An error of the task itself ends the run, as with local processes.

ray_cluster.py connects to a cluster and watches its head; ray_node.py is what runs on a node.

At the end of a stage some workers are idle while a slow disk, a throttled network or a hanging process holds
up the last tasks. A task that takes several times as long as others (`Stragglers`) is then submitted a second
time; the first answer counts and the other process is killed. This is safe because a task is committed once,
whoever runs it. Local processes share one machine, on which a second attempt would be as slow, so only this
engine does it.
"""

from __future__ import annotations

import math
import pickle
import re
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Self

from shardkit.errors import BuildError, warn_user
from shardkit.files import Closing
from shardkit.units import format_bytes
from shardkit.writers.execution.engine import TASK_SECONDS, OnNews, death_of, default_workers, report
from shardkit.writers.execution.processes import ONE_THREAD, RESUME
from shardkit.writers.execution.ray_cluster import (
    Head,
    connected_head,
    described,
    import_ray,
    slots_of,
    start_ray,
)
from shardkit.writers.execution.ray_node import NodeAnswer, NodeCheck, check_of, run_on_node
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work

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

WAITING_TASKS = 2000  # beyond those that fit: demand for a cluster that grows


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
            run = EngineRun(
                ray,
                queue,
                work,
                check,
                self._bound,
                self._memory_bytes,
                self._stragglers,
                head=connected_head(),
            )
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
    head: Head = field(default_factory=partial(Head, ""))
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
                        if self.stragglers is not None:
                            self.stragglers.finished(tried.task.stage, answered.seconds)
                        self._stop(tried)
                        if on_news is not None and answered.compile_seconds:
                            on_news(tried.task, answered.compile_seconds)
                        self._moved = self.clock()
                        commit, failure, trace = pickle.loads(answered.data)
                        if failure is not None and answered.node:
                            failure.add_note(f"it ran on node {answered.node} of the Ray cluster")
                        report(self.queue, tried.task, commit, failure, trace)
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
        if not self.head.check():
            return
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
                f"{described(nodes)}); add nodes, or make the recipe's `memory` smaller; {RESUME}"
            )

    def _hand_in(self) -> None:
        """Hand tasks to Ray as long as there is room: lost ones first."""
        room = (self.bound or self._slots + WAITING_TASKS) - len(self._flying)
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
                place = "".join(f" on node {name}" for name in self.head.nodes_of(tried.refs))
                warn_user(
                    f"task {tried.task}: has run for {running:,.0f} s{place}; it is run a second time, too"
                )
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

    def _answer(self, ref: Any, tried: _Try) -> NodeAnswer | None:
        """Return the answer of `run_on_node` for a task; None if it was lost, BuildError if it failed."""
        exceptions = self.ray.exceptions
        try:
            answered: NodeAnswer = self.ray.get(ref, timeout=_FETCH_SECONDS)
        except exceptions.RayTaskError as error:
            problem = f"{_first_line(error.cause)}; is shardkit, with what the recipe needs, on all nodes?"
            raise BuildError(f"task {tried.task}: {problem}") from error
        except exceptions.TaskCancelledError as error:
            raise BuildError(f"task {tried.task}: was cancelled in the Ray cluster; {RESUME}") from error
        except exceptions.RayError as error:
            self._lose(tried, error, next(iter(self.head.nodes_of([ref])), ""))
            return None
        return answered

    def _lose(self, tried: _Try, error: Exception, node: str) -> None:
        """Have a task run again that no answer came from; it failed if it was lost too often. BuildError."""
        if tried.refs:
            return  # the other attempt runs
        tried.losses += 1
        problem = f"task {tried.task}: {self._reason(error, node)}"
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

    def _reason(self, error: Exception, node: str) -> str:
        exceptions = self.ray.exceptions
        if not node and (address := re.search(r"Node IP: ([^\s,]+)", str(error))):
            node = address[1]
        if isinstance(error, exceptions.OutOfMemoryError):
            return f"Ray ended its process because {f'node {node}' if node else 'its node'} was out of memory"
        if isinstance(error, exceptions.NodeDiedError | exceptions.LocalRayletDiedError):
            return f"its node{f' {node}' if node else ''} died"
        if isinstance(error, exceptions.WorkerCrashedError):
            limit, place = f"{self.check.task_seconds:,.0f} s", f" on node {node}" if node else ""
            return f"its process{place} died (killed, out of memory, or at it for over {limit}?)"
        return f"Ray lost it ({_first_line(error)})"

    def _cancel(self) -> None:
        """End what runs; what it had committed is kept."""
        refs = list(self._flying)
        self._flying.clear()
        if not self.head.is_there():  # Ray would wait for it
            return
        with suppress(Exception):
            for ref in refs:
                self.ray.cancel(ref, force=True)
            if refs:
                self.ray.wait(refs, num_returns=len(refs), timeout=_CANCEL_SECONDS, fetch_local=False)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
