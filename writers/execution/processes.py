"""Worker processes of this machine: how they start, what they do, and how they end.

Workers import only the modules of their tasks (the caller's script does not run again) and use one thread
each. On Linux they are forks of one process, which has imported these modules and started Numba: that takes
two CPU seconds once instead of in each worker, and all workers share the memory. This process is a fresh
interpreter, not the caller, whose threads may hold locks; it must have no other threads, which it checks
before each fork. If it has any, and on other systems, each worker is a fresh interpreter.

Workers die with the process that started them, even on SIGKILL: the kernel kills each fork when its parent
ends, and the parent when the caller ends. Workers receive tasks and send results through a pipe.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Protocol

from shardkit.errors import BuildError, ShardkitError
from shardkit.files import Closing
from shardkit.kernels.numba_support import CompilationWatch, kernel_cache, start_numba
from shardkit.lazy import collector_paused
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digest_cache import worker_variable
from shardkit.writers.execution.progress import PULSE
from shardkit.writers.execution.stage import Task
from shardkit.writers.execution.work import Work, run_task

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
) | {
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a setting of jemalloc, which is part of Arrow
}
RESUME = "finished tasks are kept; run the same command again to continue"
_BOOT = (
    "import sys; from multiprocessing.connection import Connection; pipe = Connection(int(sys.argv[1])); "
    "parent, sys.path[:], more = pipe.recv(); from shardkit.writers.execution.processes import {0}; "
    "{0}(pipe, parent, *more)"
)


class WorkerProcess(Protocol):
    """The methods of `subprocess.Popen` that engines use."""

    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Processes(Closing):
    """Starts worker processes; `modules` are imported before workers are forked."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = modules
        self._forks: _Forks | None = None

    def start(self) -> tuple[WorkerProcess, Connection]:
        """Start a worker; return it and our end of its pipe."""
        ours, theirs = Pipe()
        with theirs:
            worker = self._fork(theirs) if sys.platform == "linux" else None
            return worker or _run_python("serve", ours, theirs), ours

    def close(self) -> None:
        """End the process that forked the workers; the caller must end the workers before."""
        if self._forks is not None:
            self._forks.close()
            self._forks = None

    def _fork(self, theirs: Connection) -> WorkerProcess | None:
        if self._forks is None:
            self._forks = _Forks(self._modules)
        return self._forks.start(theirs)


def _run_python(function: str, ours: Connection, theirs: Connection, *more: object) -> WorkerProcess:
    """Start a fresh interpreter that calls this module's `function` with `theirs`, its end of a pipe."""
    process = subprocess.Popen(
        # -P: a file in the current folder must not stand in for a module of the standard library.
        [sys.executable, "-P", "-c", _BOOT.format(function), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # the caller's stdout carries results only
        env=os.environ | ONE_THREAD | kernel_cache() | worker_variable(),
        process_group=0,  # Ctrl-C goes to the caller, which ends the workers
    )
    with suppress(OSError):  # if the process has died, sending the first task fails and reports the reason
        ours.send((os.getpid(), sys.path, more))
    return process


class _Forks(Closing):
    """The process that forks workers (`fork_workers`), as seen by the caller: forks and waits for workers."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            self._process = _run_python("fork_workers", self._pipe, theirs, list(modules))

    def start(self, theirs: Connection) -> _Fork | None:
        """Fork a worker that serves the pipe end `theirs`, and return it; None if it cannot be forked."""
        with suppress(OSError, EOFError):
            self._pipe.send(None)
            send_handle(self._pipe, theirs.fileno(), 0)
            if number := self._pipe.recv():
                return _Fork(number, self)
        return None

    def wait(self, number: int) -> int:
        """Wait for a worker to end and return its return code, as `Popen.wait` does."""
        with suppress(OSError, EOFError):
            self._pipe.send(number)
            return int(self._pipe.recv())
        return -signal.SIGKILL  # the forking process has died, so the kernel has killed its workers

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()


class _Fork:
    """A forked worker. Its process id is not reused before the first `wait`, so `kill` is safe until then."""

    def __init__(self, number: int, forks: _Forks) -> None:
        self._number, self._forks = number, forks
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):
                os.kill(self._number, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = self._forks.wait(self._number)
        return self._code


def fork_workers(pipe: Connection, parent: int, modules: Sequence[str]) -> None:
    """Run the main loop of the process that forks workers, until the pipe closes.

    When it receives None and then the descriptor of a worker's pipe, it forks a worker and sends the worker's
    process id, or 0 if it cannot fork. When it receives a process id, it waits for that worker to end and
    sends its return code.
    """
    die_with(parent)
    with collector_paused():
        for module in modules:
            importlib.import_module(module)
        if pyarrow := sys.modules.get("pyarrow"):
            pyarrow.array([])  # the first array imports pandas, if installed: do that once, before the forks
        if "numba" in sys.modules:
            start_numba()
    gc.freeze()  # otherwise garbage collection in a worker writes to, and so copies, every shared page
    own = os.getpid()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            number = pipe.recv()
            if number is not None:
                pipe.send(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
                continue
            theirs = Connection(recv_handle(pipe))
            number = os.fork() if _has_one_thread() else None
            if number == 0:
                break
            theirs.close()
            pipe.send(number or 0)
    if number == 0:
        pipe.close()
        serve(theirs, own)


def _has_one_thread() -> bool:
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


def serve(pipe: Connection, parent: int) -> None:
    """Run the main loop of a worker: receive tasks from the pipe and run them, until the pipe closes."""
    die_with(parent)
    watch = CompilationWatch(pipe.send)
    PULSE.send = pipe.send
    try:
        while True:
            task, digest, work, seconds, environment = pipe.recv()  # unpickling imports the task's modules
            os.environ.update(environment)
            watch.install()
            with time_limit(seconds):
                data = answer(task, digest, work)
            pipe.send_bytes(data)
            give_back_memory()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Have the kernel kill this process by SIGALRM if the block takes longer than `seconds`."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def answer(task: Task, digest: str, work: Work) -> bytes:
    """Run a task and return pickled (commit, error, traceback); either the commit or the error is None."""
    reply: tuple[Any, ...]
    try:
        commit = run_guarded(task, digest, work)
        reply = (replace(commit, remote=None), None, "")  # the runner sets `remote` again
    except ShardkitError as error:
        trace = traceback.format_exc() if error.__cause__ is None else "".join(_format(error.__cause__))
        reply = (None, error, trace)
    try:
        data = pickle.dumps(reply)
        pickle.loads(data)
        return data
    except Exception:  # the task's error cannot be pickled: send its text instead
        problem = f"{type(reply[1]).__name__}: {reply[1]}"
        return pickle.dumps((None, BuildError(f"task {task}: {problem}"), reply[2]))


def _format(error: BaseException) -> list[str]:
    return traceback.format_exception(error)


def run_guarded(task: Task, digest: str, work: Work) -> Commit:
    """Run a task with `run_task`; convert errors of any kind into a ShardkitError with advice."""
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
    """Return free memory to the system, so that a worker does not keep the peak memory of earlier tasks."""
    if pyarrow := sys.modules.get("pyarrow"):
        pyarrow.default_memory_pool().release_unused()
    if sys.platform == "linux":
        import ctypes

        with suppress(AttributeError):  # only the GNU C library has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


def die_with(parent: int) -> None:
    """Have the kernel (Linux) kill this process when the process `parent` ends; exit now if it has ended."""
    if sys.platform == "linux":
        import ctypes

        set_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the request took effect
