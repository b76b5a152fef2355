"""Engines that run the tasks of a build on one machine. `engine_ray.py` runs them on a cluster.

`InlineEngine` runs tasks in this process. `LocalEngine` runs them in worker processes on this machine
(processes.py), one task at a time in each. No task depends on its worker, so the number of workers never
changes a byte. The first error stops all workers; committed tasks are kept.

If a task takes longer than `task_seconds`, the kernel's timer kills its process, so that a hang in C code
ends too. The task runs once more, in another process; a second timeout is an error that names the task.

A task with a fallback also runs once more if its process dies. If its second attempt ends in the same way, or
if it raises an error of its own, the engine reports it to the queue as failed instead of ending the build.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from shardkit import limits
from shardkit.errors import BuildError, warn_user
from shardkit.files import Closing
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.processes import ONE_THREAD, RESUME, Processes, WorkerProcess
from shardkit.writers.execution.progress import PULSE, News
from shardkit.writers.execution.stage import Task, TaskFailedError
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work, run_task

__all__ = [
    "MAX_WORKERS",
    "ONE_THREAD",
    "RESUME",
    "TASK_SECONDS",
    "Engine",
    "InlineEngine",
    "LocalEngine",
    "OnNews",
    "WorkerTracebackError",
    "death_of",
    "default_workers",
    "report",
]

MAX_WORKERS = 256
DEFAULT_MAX_WORKERS = 64  # more workers rarely help, because disk and memory bandwidth become the limit
TASK_SECONDS = 6 * 3600.0  # tasks take minutes; a file of 100 GB that cannot be cut takes an hour or two
_TRIES = 2  # attempts of a task that times out or dies: the machine may have hung or run out of memory

OnNews = Callable[[Task, News], None]
"""Called with a running task and a progress report of it."""


class Engine(Protocol):
    """Takes tasks from a queue, runs them here or elsewhere, and reports each commit to the queue."""

    workers: int

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        """Run tasks until the queue is exhausted. The first error ends the run; finished tasks are kept."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class InlineEngine(Closing):
    """Runs tasks one after the other in this process, for library calls and tests.

    `run` runs one task. With the default, errors of tasks are raised as they are; with `run_guarded`, as
    ShardkitError. The compilation of kernels is not reported.
    """

    workers = 1

    def __init__(self, run: Callable[[Task, str, Work], Commit] = run_task) -> None:
        self._run_task = run

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        """Run tasks until the queue is exhausted."""
        try:
            while (task := queue.take()) is not None:
                PULSE.send = None if on_news is None else partial(on_news, task)
                try:
                    commit = self._run_task(task, task.digest, work)
                except TaskFailedError as error:
                    queue.failed(task, error)
                else:
                    queue.done(commit)
        finally:
            PULSE.send = None  # do not report later work of this process as a task of this run

    def close(self) -> None:
        """Do nothing: this engine has no workers."""


class WorkerTracebackError(Exception):
    """Shows the text of a worker's traceback; set as the cause of the error that this process raises."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(slots=True)
class _Worker:
    process: WorkerProcess
    pipe: Connection
    task: Task | None = None
    gpus: Sequence[str] = ()
    """GPUs that the process sees, for all of its life: libraries look for them only once."""
    gpu_share: float = 0.0
    """Share of each of these GPUs that its tasks take."""


@dataclass(slots=True)
class LocalEngine(Closing):
    """Runs tasks in up to `workers` processes, started on demand and kept until the engine is closed.

    `modules` are imported once, before worker processes are forked. `gpus` are the names of the machine's
    GPUs, as in CUDA_VISIBLE_DEVICES.
    """

    workers: int
    task_seconds: float = TASK_SECONDS
    modules: Sequence[str] = ()
    gpus: Sequence[str] = field(default_factory=limits.gpus)
    _processes: Processes = field(init=False)
    _started: list[_Worker] = field(default_factory=list)
    _again: list[Task] = field(default_factory=list)  # tasks to run again because their process died
    _deaths: Counter[str] = field(default_factory=Counter)  # number of died processes, by task key

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise BuildError(f"got {self.workers} workers; give between 1 and {MAX_WORKERS}")
        self._processes = Processes(self.modules)

    def close(self) -> None:
        """Kill the workers. Unfinished tasks leave a temporary folder that the next build removes."""
        for worker in self._started:
            worker.process.kill()
        for worker in self._started:
            worker.process.wait()
            worker.pipe.close()
        self._processes.close()
        self._started.clear()
        self._again.clear()

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        """Run tasks until the queue is exhausted.

        Raises the first error of a task with its type and message, or BuildError if a worker dies or a task
        times out twice.
        """
        try:
            while not queue.exhausted:
                self._start_tasks(queue, work)
                busy = {worker.pipe: worker for worker in self._started if worker.task is not None}
                for pipe in wait(list(busy)):
                    self._receive(busy[pipe], queue, on_news)  # type: ignore[index]
        except BaseException:
            self.close()
            raise

    def _start_tasks(self, queue: TaskQueue, work: Work) -> None:
        """Send a task to each idle worker, and start more workers up to the limit."""
        while True:
            if all(worker.task for worker in self._started) and len(self._started) == self.workers:
                return
            task = self._again.pop() if self._again else queue.take()
            if task is None:
                return
            worker = self._idle_worker(task) if self._has_room(task) else None
            if worker is None:
                self._again.append(task)
                return
            self._send(worker, task, work)

    def _has_room(self, task: Task) -> bool:
        """Return whether the cores and the memory of running tasks leave enough; a task alone has room."""
        running = [worker.task.resources for worker in self._started if worker.task is not None]
        if not running:
            return True
        cpus, memory = (sum(getattr(one, name) for one in running) for name in ("cpus", "memory"))
        needed = task.resources
        has_memory = not needed.memory or memory + needed.memory <= limits.memory_bytes() * 4 // 5
        return has_memory and (needed.cpus == 1 or cpus + needed.cpus <= self.workers)

    def _idle_worker(self, task: Task) -> _Worker | None:
        """Return a worker for the task, started if necessary, with the GPUs it needs; None: it must wait.

        Raises BuildError if the machine has too few GPUs.
        """
        idle = [worker for worker in self._started if worker.task is None]
        number, share = _gpus_of(task)
        if not number:
            idle.sort(key=lambda worker: len(worker.gpus))
            return idle[0] if idle else self._start(())
        if number > len(self.gpus):
            raise BuildError(
                f"task {task}: needs {number} GPU{'s' if number > 1 else ''}, but this machine has "
                f"{len(self.gpus) or 'none'}; make `gpus` of the filter smaller, or build on a Ray "
                f"cluster that has GPUs (--engine ray)"
            )
        for worker in idle:
            if len(worker.gpus) == number and worker.gpu_share == share:
                return worker
        for worker in [one for one in idle if one.gpus]:
            self._retire(worker)  # its GPUs are needed in other shares
        taken = Counter[str]()
        for worker in self._started:
            taken.update(dict.fromkeys(worker.gpus, worker.gpu_share))
        free = [name for name in self.gpus if taken[name] + share <= 1]
        if len(free) < number:
            return None
        if len(self._started) == self.workers:
            self._retire(next(worker for worker in self._started if worker.task is None))
        return self._start(free[:number], share)

    def _start(self, gpus: Sequence[str], share: float = 0.0) -> _Worker:
        worker = _Worker(*self._processes.start(), gpus=gpus, gpu_share=share)
        self._started.append(worker)
        return worker

    def _retire(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.wait()
        worker.pipe.close()
        self._started.remove(worker)

    def _send(self, worker: _Worker, task: Task, work: Work) -> None:
        worker.task = task
        try:
            environment = {limits.GPUS_VARIABLE: ",".join(worker.gpus)} if worker.gpus else {}
            worker.pipe.send((task, task.digest, work, self.task_seconds, environment))
        except OSError:  # the worker died while idle
            raise self._death(worker) from None

    def _receive(self, worker: _Worker, queue: TaskQueue, on_news: OnNews | None) -> None:
        """Receive a worker's message and pass it on: a commit, an error, or progress of its task."""
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            self._bury(worker, queue)
            return
        task = worker.task
        assert task is not None
        if not isinstance(answer, tuple):
            if on_news is not None:
                on_news(task, answer)
            return
        worker.task = None
        report(queue, task, *answer)

    def _bury(self, worker: _Worker, queue: TaskQueue) -> None:
        """Remove a dead worker, and run its task again or report it as failed, or raise BuildError."""
        task = worker.task
        took_too_long = worker.process.wait() == -signal.SIGALRM
        if task is None or not (took_too_long or task.fallback):
            raise self._death(worker)
        self._deaths[task.key] += 1
        problem = f"task {task}: did not finish within {self.task_seconds:,g} s"
        if not took_too_long:
            problem = str(self._death(worker)).removesuffix(f"; {RESUME}")
        if self._deaths[task.key] < _TRIES:
            warn_user(f"{problem}; it runs again")
            self._again.append(task)
        elif task.fallback is not None:
            warn_user(f"{problem}, in {_TRIES} attempts")
            queue.failed(task, death_of(task))
        else:
            raise BuildError(
                f"{problem}, in {_TRIES} attempts. If it hangs, remove its input; if it needs longer, raise "
                f"--task-seconds; {RESUME}"
            )
        self._retire(worker)

    def _death(self, worker: _Worker) -> BuildError:
        code = worker.process.wait()
        if code >= 0:
            return BuildError(f"task {worker.task}: its worker ended with exit status {code}; {RESUME}")
        hint = ""
        if -code == signal.SIGKILL:
            hint = "; if the machine ran out of memory, use fewer --workers or a smaller `memory`"
        return BuildError(
            f"task {worker.task}: its worker was killed by {signal.Signals(-code).name}{hint}; {RESUME}"
        )


def _gpus_of(task: Task) -> tuple[int, float]:
    """Return how many GPUs a task needs, and the share of each that it takes."""
    gpus = task.resources.gpus
    return (ceil(gpus), min(gpus, 1.0))


def report(queue: TaskQueue, task: Task, commit: Commit | None, error: Exception | None, trace: str) -> None:
    """Pass a worker's answer to the queue: a commit or a TaskFailedError. Raise any other `error`."""
    if error is None:
        assert commit is not None
        queue.done(commit)
        return
    error.__cause__ = WorkerTracebackError(trace)
    if not isinstance(error, TaskFailedError):
        raise error
    queue.failed(task, error)


def death_of(task: Task) -> TaskFailedError:
    """Return the failure of a task whose process died in every attempt.

    The text is published with the dataset, so it is the same for all engines.
    """
    return TaskFailedError(f"task {task}: in every attempt its process died or ran past --task-seconds")


def default_workers(memory_bytes: int, system: Path = limits.ROOT) -> int:
    """Return the default number of workers: one per usable core, fewer if memory does not suffice.

    Each worker needs `memory_bytes`. `system` is the root of /proc and /sys with the limits, for tests.
    """
    memory = limits.memory_bytes(system) * 4 // 5
    return max(1, min(limits.usable_cores(system), DEFAULT_MAX_WORKERS, memory // max(1, memory_bytes)))
