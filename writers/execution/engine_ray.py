"""Runs tasks on a Ray cluster, or on a Ray that is started on this machine for the length of the build.

Ray places the tasks. Tasks (some KB) and commits go through Ray; data goes through the work folder only. Each
task requests one CPU and the recipe's `memory`, or more if a filter needs more (`Task.resources`), and tasks
are spread over the nodes.

`WAITING_TASKS` more tasks than fit are submitted to Ray. So an autoscaling cluster sees the demand of the
stage, and a stage of a million tasks needs no more memory than one of a few thousand. A task that is lost
with its process or node is submitted again, at most `RETRIES` times, with a warning each time; Ray's own
retries are off, because they are silent. An error of the task itself ends the run, as with local processes.

ray_cluster.py connects to a cluster and watches its head; ray_node.py is what runs on a node.

At the end of a stage some workers are idle while a slow disk, a throttled network or a hanging process holds
up the last tasks. A task that takes several times as long as others (`Stragglers`) is then submitted a second
time; the first answer counts and the other process is killed. This is safe because a task is committed only
once, whichever process runs it. Local processes share one machine, on which a second attempt would be as
slow, so only this engine does it.
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
from functools import partial, reduce
from operator import or_
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
from shardkit.writers.execution.resources import Resources
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work

RETRIES = 4

MAX_WORKERS = 100_000

NO_NODE_SECONDS = 600.0  # clusters take minutes to start a machine

WAIT_SECONDS = 6 * 3600.0  # if no task finishes for this long, a process hangs or a task is far too big

LOOK_SECONDS = 5.0  # interval between counts of the cluster's nodes

_TICK_SECONDS = 1.0

# Each call of `ray.wait` scans all submitted tasks, so it waits until 1/1000 of them have finished.
_ANSWERED_SHARE = 1000

_FETCH_SECONDS = 60.0

_CANCEL_SECONDS = 10.0

FIRST_PAUSE_SECONDS = 1.0  # pause before a lost task is submitted again, doubled each time

_REMEMBERED_TASKS = 1000  # number of task durations kept per stage; their median needs no more

WAITING_TASKS = 2000  # tasks submitted in addition to those that fit, so that an autoscaler sees demand


@dataclass(slots=True)
class Stragglers:
    """Computes how long a task may run before a second attempt starts on an idle slot of the cluster.

    The limit is `factor` times the median duration of the last finished tasks of its stage, and at least
    `least_seconds`.
    """

    least_seconds: float = 60.0
    factor: float = 3.0
    _seconds: dict[str, deque[float]] = field(default_factory=dict)  # durations of finished tasks, by stage

    def finished(self, stage: str, seconds: float) -> None:
        """Record how long a task of a stage ran."""
        self._seconds.setdefault(stage, deque(maxlen=_REMEMBERED_TASKS)).append(seconds)

    def limit_seconds(self, stage: str) -> float:
        """Return the limit in seconds for a task of a stage; infinite until one has finished."""
        seconds = self._seconds.get(stage)
        return max(self.least_seconds, self.factor * median(seconds)) if seconds else math.inf


class RayEngine(Closing):
    """Runs up to `workers` tasks at a time on a Ray cluster; None means as many as fit.

    `address` is the address of the cluster: "auto", "host:6379" or "ray://host:10001". If it is None,
    $RAY_ADDRESS is used; if that is not set, Ray is started on this machine. If this process is already
    connected to Ray, that connection is used and left open.
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
            raise BuildError(f"got {workers} workers; give between 1 and {MAX_WORKERS:,}")
        self.workers = default_workers(memory_bytes) if workers is None else workers
        self._bound, self._address, self._memory_bytes = workers, address, memory_bytes
        self._task_seconds, self._stragglers = task_seconds, stragglers
        self._is_ours = False

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        """Run tasks until the queue is exhausted.

        Raises the first error of a task with its type and message, or BuildError if the cluster cannot be
        reached, if a task is lost more than `RETRIES` times, or if no node has the resources of a task.
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
        self._connect()  # connect now, so that the time it takes is not measured as part of the first stage
        return self

    def _connect(self) -> Any:
        """Return the module `ray`, connected to a cluster."""
        ray = import_ray()
        if not ray.is_initialized():
            start_ray(self._address, self.workers, self._memory_bytes)
            self._is_ours = True
        elif not self._is_ours and self._address not in (None, "auto"):
            raise BuildError(
                f"this process is already connected to a Ray cluster; leave out the address "
                f"{self._address}, or call ray.shutdown() first"
            )
        return ray

    def close(self) -> None:
        """Shut down Ray, or disconnect from it, if this engine started it or connected to it."""
        if self._is_ours:
            self._is_ours = False
            import_ray().shutdown()


@dataclass(slots=True)
class _Try:
    """A task that was submitted to Ray at the time `since`, or was lost and waits until `not_before`.

    `refs` are Ray's references of its running attempts; a straggler has two.
    """

    task: Task
    losses: int = 0
    not_before: float = 0.0
    since: float = 0.0
    refs: set[Any] = field(default_factory=set)


@dataclass(slots=True)
class EngineRun:
    """The state and the main loop of one call of `RayEngine.run`."""

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
    _flying: dict[Any, _Try] = field(default_factory=dict)  # submitted tasks, by Ray's reference
    _lost: list[_Try] = field(default_factory=list)
    _slots: int = 0
    _full: float = 0.0  # time at which tasks last had to wait for a slot
    _looked: float = float("-inf")  # time at which nodes were last counted
    _searched: float = float("-inf")  # time of the last search for stragglers
    _moved: float = 0.0  # time at which a task last finished, or the last fitting node went away
    _told_no_node: bool = False
    _dead: set[str] = field(default_factory=set)  # Ray's ids of nodes that have died

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
                    if not self.queue.exhausted:  # a lost task is in its pause before the next attempt
                        self.sleep(_TICK_SECONDS)
                    continue
                for ref in self._finished():
                    tried = self._flying.pop(ref, None)
                    if tried is None:
                        continue  # the task's other attempt finished first, so this one was dropped
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
        """Count how many tasks fit on the cluster's nodes, at most once per `LOOK_SECONDS`.

        Raises BuildError if for too long no node has the resources of a task, or no task finishes.
        """
        now = self.clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if not self.head.check():
            return
        nodes = self.ray.nodes()
        self._give_up_on({node["NodeID"] for node in nodes if not node["Alive"]})
        needed = reduce(or_, (self._needs(tried.task) for tried in self._flying.values()), self._usual)
        self._slots = slots_of(nodes, needed)
        if self._slots:
            self._told_no_node = False
            if now - self._moved > WAIT_SECONDS:
                raise BuildError(
                    f"no task has finished in {WAIT_SECONDS / 3600:.0f} hours; does something else use the "
                    f"whole Ray cluster, or does a task hang? {RESUME}"
                )
            return
        gpus = f", {needed.gpus:g} GPUs" if needed.gpus else ""
        cpus = "a CPU" if needed.cpus == 1 else f"{needed.cpus} CPUs"
        needs = f"{cpus}{gpus} and {format_bytes(needed.memory)} of memory, which a task needs"
        if not self._told_no_node:
            self._told_no_node = True
            self._moved = now
            warn_user(f"no node of the Ray cluster has {needs}: waiting for one")
        elif now - self._moved > NO_NODE_SECONDS:
            raise BuildError(
                f"for {NO_NODE_SECONDS / 60:.0f} minutes no node of the Ray cluster had {needs} (largest "
                f"nodes: {described(nodes)}); add nodes, or make the recipe's `memory` smaller; {RESUME}"
            )

    def _give_up_on(self, dead: set[str]) -> None:
        """Lose the attempts that run on nodes which have died since the last look.

        Ray itself reports an attempt only when the connection to its process breaks, which takes minutes if a
        machine has lost power or its link.
        """
        if dead <= self._dead:
            return
        self._dead |= dead
        for ref, tried in list(self._flying.items()):
            for node, name in self.head.nodes_of([ref]):
                if node in dead:
                    del self._flying[ref]
                    tried.refs.discard(ref)
                    self._lose(tried, self.ray.exceptions.NodeDiedError(f"Node ID: {node}"), name)

    def _hand_in(self) -> None:
        """Submit tasks to Ray up to the limit, lost tasks first."""
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
        """Submit a second attempt of each task that runs for too long, while there are idle slots."""
        now = self.clock()
        idle = min(self._slots, self.bound or self._slots) - len(self._flying)
        if idle <= 0:
            self._full = now
        if idle <= 0 or self.stragglers is None or self._lost or now - self._searched < _TICK_SECONDS:
            return
        self._searched = now  # a search visits every task in flight: do not repeat it whenever a task ends
        stages = {tried.task.stage for tried in self._flying.values()}
        limits = {stage: self.stragglers.limit_seconds(stage) for stage in stages}
        for tried in list(self._flying.values()):
            # This is a lower bound: while all slots were busy, the task may have waited for one.
            running = now - max(tried.since, self._full)
            if idle and len(tried.refs) == 1 and running > limits[tried.task.stage]:
                place = "".join(f" on node {name}" for _, name in self.head.nodes_of(tried.refs))
                warn_user(
                    f"task {tried.task}: has run for {running:,.0f} s{place}; a second attempt starts now"
                )
                self._submit(tried)
                idle -= 1

    def _stop(self, tried: _Try) -> None:
        """Kill the second attempt of a task whose other attempt has finished, if there is one."""
        for ref in tried.refs:
            del self._flying[ref]
            with suppress(Exception):  # the attempt may have ended by itself
                self.ray.cancel(ref, force=True)
        tried.refs.clear()

    @property
    def _usual(self) -> Resources:
        return Resources(memory=self.memory_bytes)

    def _needs(self, task: Task) -> Resources:
        return self._usual | task.resources

    def _submit(self, tried: _Try) -> None:
        data, needed = pickle.dumps((tried.task, tried.task.digest, self.work)), self._needs(tried.task)
        remote = self._function.options(
            name=str(tried.task),  # shown by Ray's tools
            num_cpus=needed.cpus,
            num_gpus=needed.gpus,
            memory=needed.memory,
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
        """Wait up to `_TICK_SECONDS` for tasks to finish; return Ray's references of all finished tasks."""
        flying = list(self._flying)
        some = 1 + len(flying) // _ANSWERED_SHARE
        ready, _ = self.ray.wait(flying, num_returns=some, timeout=_TICK_SECONDS, fetch_local=False)
        if ready:
            ready, _ = self.ray.wait(flying, num_returns=len(flying), timeout=0, fetch_local=False)
        return list(ready)

    def _answer(self, ref: Any, tried: _Try) -> NodeAnswer | None:
        """Return the answer of `run_on_node`, or None if the task was lost. Raises BuildError on failure."""
        exceptions = self.ray.exceptions
        try:
            answered: NodeAnswer = self.ray.get(ref, timeout=_FETCH_SECONDS)
        except exceptions.RayTaskError as error:
            problem = (
                f"{_first_line(error.cause)}; are shardkit and all extras that the recipe needs installed on "
                f"all nodes?"
            )
            raise BuildError(f"task {tried.task}: {problem}") from error
        except exceptions.TaskCancelledError as error:
            raise BuildError(f"task {tried.task}: was cancelled in the Ray cluster; {RESUME}") from error
        except exceptions.RayError as error:
            self._lose(tried, error, next((name for _, name in self.head.nodes_of([ref])), ""))
            return None
        return answered

    def _lose(self, tried: _Try, error: Exception, node: str) -> None:
        """Queue a lost task for a new attempt. After too many, run its fallback, or raise BuildError."""
        if tried.refs:
            return  # the other attempt still runs
        tried.losses += 1
        problem = f"task {tried.task}: {self._reason(error, node)}"
        if tried.losses > RETRIES and tried.task.fallback is not None:
            warn_user(f"{problem}, {tried.losses} times so far")
            self.queue.failed(tried.task, death_of(tried.task))
            return
        if tried.losses > RETRIES:
            raise BuildError(
                f"{problem}, {tried.losses} times so far; if nodes run out of memory, make the recipe's "
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
            return f"its process{place} died (was it killed, out of memory, or running for over {limit}?)"
        return f"Ray lost it ({_first_line(error)})"

    def _cancel(self) -> None:
        """Kill all running tasks; committed tasks are kept."""
        refs = list(self._flying)
        self._flying.clear()
        if not self.head.is_there():  # Ray would block until the head answers
            return
        with suppress(Exception):
            for ref in refs:
                self.ray.cancel(ref, force=True)
            if refs:
                self.ray.wait(refs, num_returns=len(refs), timeout=_CANCEL_SECONDS, fetch_local=False)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
