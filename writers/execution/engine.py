"""Engines: what runs the tasks of a build on one machine. `engine_ray.py` runs them on a cluster.

`InlineEngine` runs tasks in this process. `LocalEngine` runs them in processes on this machine, one task at a
time in each. Its workers are fresh interpreters that import only the modules of their tasks (the caller's
script does not run again) and use one thread each. They die with the process that started them, even on
SIGKILL. No task depends on its worker, so the number of workers never changes a byte. The first error stops
all workers; committed tasks are kept.

A task that takes longer than `task_seconds` has its process killed, by the kernel's timer, so that a hang in
C code ends too. It runs once more, in another process; a second time is an error that names it.

If a task has a fallback, that holds for a process that dies, too, and instead of the second error, or of an
error of its own, the queue is told that the task failed.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol, Self

from shardkit.errors import BuildError, ShardkitError, warn_user
from shardkit.files import Closing
from shardkit.writers.execution.scheduler import TaskQueue
from shardkit.writers.execution.task import Commit, Task, TaskFailedError
from shardkit.writers.execution.work import Work, run_task
from shardkit.writers.kernels.numba_support import CompilationWatch, kernel_cache
from shardkit.writers.progress import PULSE, News
from shardkit.writers.remembered import worker_variable

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
    "answer",
    "death_of",
    "default_workers",
    "give_back_memory",
    "report",
    "run_guarded",
    "serve",
    "time_limit",
]

MAX_WORKERS = 256
DEFAULT_MAX_WORKERS = 64  # beyond this, disk and memory bandwidth of one machine are the limit
ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "NUMBA_NUM_THREADS",
        "RAYON_NUM_THREADS",
        "ARROW_IO_THREADS",
    ),
    "1",
) | {"TOKENIZERS_PARALLELISM": "false"}
_BOOT = (
    "import sys; from multiprocessing.connection import Connection; pipe = Connection(int(sys.argv[1])); "
    "parent, sys.path[:] = pipe.recv(); from shardkit.writers.execution.engine import serve; "
    "serve(pipe, parent)"
)
RESUME = "finished tasks are kept; the same command continues"
TASK_SECONDS = 6 * 3600.0  # tasks take minutes; a file of 100 GB that cannot be cut takes an hour or two
_TRIES = 2  # of a task that takes too long: the first may have met a machine that hangs, or has no memory

OnNews = Callable[[Task, News], None]
"""Called as tasks run, with what they tell."""


class Engine(Protocol):
    """Takes tasks from a queue, runs them anywhere, and reports each commit to the queue."""

    workers: int

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        """Run tasks until the queue is exhausted. The first error ends the run; finished tasks are kept."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class InlineEngine(Closing):
    """Runs tasks one after the other in this process, for library calls and tests.

    Errors are not wrapped (unless `run` is `run_guarded`), and compilation is not told.
    """

    workers = 1

    def __init__(self, run: Callable[[Task, str, Work], Commit] = run_task) -> None:
        self._run_task = run

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        """Run tasks until the queue is exhausted."""
        while not queue.exhausted:
            task = queue.take()
            if task is not None:
                PULSE.send = None if on_news is None else partial(on_news, task)
                try:
                    commit = self._run_task(task, task.digest, work)
                except TaskFailedError as error:
                    queue.failed(task, error)
                else:
                    queue.done(commit)
            elif not queue.exhausted:
                time.sleep(queue.poll_seconds or 0.0)

    def close(self) -> None:
        """Nothing to close."""


class WorkerTracebackError(Exception):
    """Carries the text of a traceback out of a worker, as the cause of the error."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    task: Task | None = None


@dataclass(slots=True)
class LocalEngine(Closing):
    """Up to `workers` processes, started when there is work and kept until the engine is closed."""

    workers: int
    task_seconds: float = TASK_SECONDS
    _started: list[_Worker] = field(default_factory=list)
    _again: list[Task] = field(default_factory=list)  # whose process died
    _deaths: Counter[str] = field(default_factory=Counter)  # by key of a task

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise BuildError(f"{self.workers} workers: between 1 and {MAX_WORKERS} are possible")

    def close(self) -> None:
        """Kill the workers. Unfinished tasks leave a temporary folder that the next build removes."""
        for worker in self._started:
            worker.process.kill()
        for worker in self._started:
            worker.process.wait()
            worker.pipe.close()
        self._started.clear()
        self._again.clear()

    def run(self, queue: TaskQueue, work: Work, on_news: OnNews | None = None) -> None:
        """Run tasks until the queue is exhausted.

        Raises the first task's error with its type and message; BuildError if a worker dies, or if a task
        takes too long twice.
        """
        try:
            while not queue.exhausted:
                has_room = self._start_tasks(queue, work)
                busy = {worker.pipe: worker for worker in self._started if worker.task is not None}
                if not busy:
                    if not queue.exhausted:  # other processes run the rest
                        time.sleep(queue.poll_seconds or 0.0)
                    continue
                for pipe in wait(list(busy), queue.poll_seconds if has_room else None):
                    self._receive(busy[pipe], queue, on_news)  # type: ignore[index]
        except BaseException:
            self.close()
            raise

    def _start_tasks(self, queue: TaskQueue, work: Work) -> bool:
        """Give tasks to idle workers, starting more up to the limit; returns whether one is left idle."""
        while True:
            idle = next((worker for worker in self._started if worker.task is None), None)
            if idle is None and len(self._started) == self.workers:
                return False
            task = self._again.pop() if self._again else queue.take()
            if task is None:
                return True
            if idle is None:
                idle = _start_worker()
                self._started.append(idle)
            self._send(idle, task, work)

    def _send(self, worker: _Worker, task: Task, work: Work) -> None:
        worker.task = task
        try:
            worker.pipe.send((task, task.digest, work, self.task_seconds))
        except OSError:  # it died idle
            raise self._death(worker) from None

    def _receive(self, worker: _Worker, queue: TaskQueue, on_news: OnNews | None) -> None:
        """Hand on what a worker sends: a commit, an error, or news of its task."""
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
        """Have the task of a dead worker run again, or fail; BuildError if it ends the build."""
        task = worker.task
        took_too_long = worker.process.wait() == -signal.SIGALRM
        if task is None or not (took_too_long or task.fallback):
            raise self._death(worker)
        self._deaths[task.key] += 1
        problem = f"task {task}: was not done after {self.task_seconds:,g} s"
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
        self._started.remove(worker)
        worker.pipe.close()

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


def report(queue: TaskQueue, task: Task, commit: Commit | None, error: Exception | None, trace: str) -> None:
    """Hand what `answer` gave to the queue. Raises an error that ends the build."""
    if error is None:
        assert commit is not None
        queue.done(commit)
        return
    error.__cause__ = WorkerTracebackError(trace)
    if not isinstance(error, TaskFailedError):
        raise error
    queue.failed(task, error)


def death_of(task: Task) -> TaskFailedError:
    """The failure of a task whose process died in every attempt: it is published, so all engines say this."""
    return TaskFailedError(f"task {task}: in every attempt its process died or ran past --task-seconds")


def default_workers(memory_bytes: int) -> int:
    """One per core that this process may use, as long as each can have `memory_bytes`."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has not
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(cores, DEFAULT_MAX_WORKERS, pages * 4 // 5 // max(1, memory_bytes)))


def _start_worker() -> _Worker:
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            # -P: a file in the current folder must not stand in for a module of the standard library.
            [sys.executable, "-P", "-c", _BOOT, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # the caller's stdout carries results only
            env=os.environ | ONE_THREAD | kernel_cache() | worker_variable(),
            process_group=0,  # Ctrl-C goes to the caller, which ends the workers
        )
    worker = _Worker(process, ours)
    with suppress(OSError):  # the same error comes again, with its reason, with the first task
        ours.send((os.getpid(), sys.path))
    return worker


def serve(pipe: Connection, parent: int) -> None:
    """Main loop of a worker: run the tasks that come through the pipe until it closes."""
    _die_with(parent)
    watch = CompilationWatch(pipe.send)
    PULSE.send = pipe.send
    try:
        while True:
            task, digest, work, seconds = pipe.recv()  # unpickling imports the task's modules
            watch.install()
            with time_limit(seconds):
                data = answer(task, digest, work)
            pipe.send_bytes(data)
            give_back_memory()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Have the kernel kill this process by SIGALRM if the block takes longer."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def answer(task: Task, digest: str, work: Work) -> bytes:
    """Run a task; pickled (commit, error, traceback), where either commit or error is None."""
    reply: tuple[Any, ...]
    try:
        commit = run_guarded(task, digest, work)
        reply = (replace(commit, remote=None), None, "")  # the runner has it
    except ShardkitError as error:
        trace = traceback.format_exc() if error.__cause__ is None else "".join(_format(error.__cause__))
        reply = (None, error, trace)
    try:
        data = pickle.dumps(reply)
        pickle.loads(data)
        return data
    except Exception:  # an error that does not survive pickling
        problem = f"{type(reply[1]).__name__}: {reply[1]}"
        return pickle.dumps((None, BuildError(f"task {task}: {problem}"), reply[2]))


def _format(error: BaseException) -> list[str]:
    return traceback.format_exception(error)


def run_guarded(task: Task, digest: str, work: Work) -> Commit:
    """`run_task`, with errors of any kind as a ShardkitError that says what to do."""
    try:
        return run_task(task, digest, work)
    except ShardkitError:
        raise
    except OSError as error:
        raise BuildError(f"task {task}: {error}; {RESUME}") from error
    except MemoryError as error:
        problem = "out of memory; use fewer --workers or a smaller `memory`"
        raise BuildError(f"task {task}: {problem}; {RESUME}") from error
    except Exception as error:
        problem = f"{type(error).__name__}: {error}; this is a bug in shardkit, please report it"
        raise BuildError(f"task {task}: {problem}") from error


def give_back_memory() -> None:
    """Return free memory to the system, so that a worker does not keep the peaks of all stages."""
    if pyarrow := sys.modules.get("pyarrow"):
        pyarrow.default_memory_pool().release_unused()
    if sys.platform == "linux":
        import ctypes

        with suppress(AttributeError):  # a C library other than GNU's
            ctypes.CDLL(None).malloc_trim(0)


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, even by SIGKILL (Linux)."""
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the request took effect
