"""Runs tasks in processes on this machine, one task at a time in each.

Workers are fresh interpreters that import only what their tasks name (the caller's script is not run again)
and use one thread each. They die with the process that started them, whatever kills it. Results come in the
order of the tasks, not of completion, and nothing about a task depends on the worker, so the number of
workers never changes a byte. The first error stops all: what was committed is kept.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from shardkit.closing import Closing
from shardkit.errors import BuildError, ShardkitError
from shardkit.writers.compilation import CompilationWatch
from shardkit.writers.journal import Commit, Task, run_task
from shardkit.writers.kernel_cache import kernel_cache

__all__ = ["MAX_WORKERS", "Engine", "LocalEngine", "default_workers", "serve"]

MAX_WORKERS = 256
DEFAULT_MAX_WORKERS = 64  # beyond that one machine's disk and memory bandwidth are the limit
_ONE_THREAD = dict.fromkeys(
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
    "parent, sys.path[:] = pipe.recv(); from shardkit.writers.engine_local import serve; serve(pipe, parent)"
)
_RESUME = "what is finished is kept; the same command continues"


class Engine(Protocol):
    """What can run a build's tasks.

    `compiling`, if set, hears of Numba compiling kernels for a task: None as it starts, then its seconds.
    """

    workers: int
    compiling: Callable[[Task, float | None], None] | None

    def run(self, tasks: Sequence[Task], work: Path, done: Callable[[Commit], None]) -> list[Commit]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class WorkerTracebackError(Exception):
    """Carries the text of a traceback out of a worker, as the cause of the error."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection
    task: Task | None = None
    number: int = 0


@dataclass(slots=True)
class LocalEngine(Closing):
    """Up to `workers` processes, started when there is work and kept until the engine is closed."""

    workers: int
    compiling: Callable[[Task, float | None], None] | None = None
    _started: list[_Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_WORKERS:
            raise BuildError(f"{self.workers} workers: between 1 and {MAX_WORKERS} are possible")

    def close(self) -> None:
        """End the workers at once. Unfinished tasks leave a temporary folder that the next build removes."""
        for worker in self._started:
            worker.process.kill()
        for worker in self._started:
            worker.process.wait()
            worker.pipe.close()
        self._started.clear()

    def run(self, tasks: Sequence[Task], work: Path, done: Callable[[Commit], None]) -> list[Commit]:
        """Run all tasks, heavy ones first; `done` hears of each as it finishes. Commits in task order.

        Raises the first task's error with its type and message; BuildError if a worker dies.
        """
        commits: dict[int, Commit] = {}
        waiting = sorted(range(len(tasks)), key=lambda number: tasks[number].weight)  # the heaviest is last
        try:
            while len(commits) < len(tasks):
                for worker in self._idle(len(waiting)):
                    worker.number = waiting.pop()
                    self._send(worker, tasks[worker.number], work)
                busy = {worker.pipe: worker for worker in self._started if worker.task is not None}
                for pipe in wait(list(busy)):
                    worker = busy[pipe]  # type: ignore[index]
                    commit = self._receive(worker)
                    if commit is not None:
                        commits[worker.number] = commit
                        done(commit)
        except BaseException:
            self.close()
            raise
        return [commits[number] for number in range(len(tasks))]

    def _idle(self, needed: int) -> list[_Worker]:
        """Workers without a task, at most `needed`, new ones among them if there may be more."""
        idle = [worker for worker in self._started if worker.task is None][:needed]
        while len(idle) < needed and len(self._started) < self.workers:
            worker = _start_worker()
            self._started.append(worker)
            idle.append(worker)
        return idle

    def _send(self, worker: _Worker, task: Task, work: Path) -> None:
        worker.task = task
        try:
            worker.pipe.send((task, task.digest, work))
        except OSError:  # it died idle
            raise self._death(worker) from None

    def _receive(self, worker: _Worker) -> Commit | None:
        """What a worker's task came to; None if it only tells that kernels are compiled."""
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            raise self._death(worker) from None
        if not isinstance(answer, tuple):
            if self.compiling is not None and worker.task is not None:
                self.compiling(worker.task, answer)
            return None
        commit, error, trace = answer
        worker.task = None
        if error is not None:
            raise error from WorkerTracebackError(trace)
        assert isinstance(commit, Commit)
        return commit

    def _death(self, worker: _Worker) -> BuildError:
        code = worker.process.wait()
        if code >= 0:
            return BuildError(f"task {worker.task}: its worker ended with exit status {code}; {_RESUME}")
        hint = ""
        if -code == signal.SIGKILL:
            hint = "; if the machine ran out of memory, use fewer --workers or a smaller `memory`"
        return BuildError(
            f"task {worker.task}: its worker was killed by {signal.Signals(-code).name}{hint}; {_RESUME}"
        )


def default_workers(memory_bytes: int) -> int:
    """One a core this process may use, as long as each can have `memory_bytes`."""
    cores = len(os.sched_getaffinity(0))
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
            env=os.environ | _ONE_THREAD | kernel_cache(),
            process_group=0,  # Ctrl-C goes to the caller, which ends the workers
        )
    worker = _Worker(process, ours)
    with suppress(OSError):  # met again, with its reason, when the worker gets its first task
        ours.send((os.getpid(), sys.path))
    return worker


def serve(pipe: Connection, parent: int) -> None:
    """The life of a worker: run what comes through the pipe, until it closes."""
    _die_with(parent)
    watch = CompilationWatch(pipe.send)
    try:
        while True:
            task, digest, work = pipe.recv()  # imports what the task needs
            watch.install()
            pipe.send_bytes(_answer(task, digest, work))
            _give_back_memory()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _answer(task: Task, digest: str, work: Path) -> bytes:
    """Pickled (commit, error, traceback), one of commit and error being None."""
    reply: tuple[Any, ...]
    try:
        reply = (run_task(task, digest, work), None, "")
    except ShardkitError as error:
        reply = (None, error, traceback.format_exc())
    except OSError as error:
        reply = (None, BuildError(f"task {task}: {error}; {_RESUME}"), traceback.format_exc())
    except MemoryError:
        problem = "out of memory; use fewer --workers or a smaller `memory`"
        reply = (None, BuildError(f"task {task}: {problem}; {_RESUME}"), traceback.format_exc())
    except Exception as error:
        problem = f"{type(error).__name__}: {error}; this is a bug in shardkit, please report it"
        reply = (None, BuildError(f"task {task}: {problem}"), traceback.format_exc())
    try:
        data = pickle.dumps(reply)
        pickle.loads(data)
        return data
    except Exception:  # an error that does not survive pickling
        problem = f"{type(reply[1]).__name__}: {reply[1]}"
        return pickle.dumps((None, BuildError(f"task {task}: {problem}"), reply[2]))


def _give_back_memory() -> None:
    """Return what the task's arrays held: a worker must not grow to the sum of all stages' largest tasks."""
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
        os._exit(1)  # it ended before the kernel knew
