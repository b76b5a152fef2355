"""What happens on a node of a Ray cluster: it is asked whether it fits the build, then it runs a task.

A node fits if its shardkit and libraries are those of the driver, which computed the digests of all tasks,
and if it sees the same work folder. Only then is the task unpickled, which imports its code.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from shardkit.errors import BuildError
from shardkit.writers.compilation import CompilationWatch
from shardkit.writers.execution.engine_local import answer, give_back_memory
from shardkit.writers.execution.task import Task, code_version
from shardkit.writers.execution.work import Work
from shardkit.writers.execution.work_local import LocalWork
from shardkit.writers.kernel_cache import kernel_cache

__all__ = ["NodeCheck", "check_of", "run_on_node"]


@dataclass(frozen=True)
class NodeCheck:
    """What a node must have in common with the driver."""

    code: str
    python_path: tuple[str, ...]
    work: str
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
def check_of(work: Work) -> Iterator[NodeCheck]:
    """The driver's, while it runs tasks."""
    marker = None
    if isinstance(work, LocalWork):
        marker = work.temporary(Task("ray", "nodes", {}, dict))  # goes with what was not finished
    path = tuple(str(Path(folder).absolute()) for folder in sys.path)  # "" is the current folder
    try:
        yield NodeCheck(code_version(), path, work.place, None if marker is None else str(marker))
    finally:
        if marker is not None:
            with suppress(OSError):
                marker.rmdir()


def run_on_node(check: NodeCheck, pickled: bytes) -> tuple[bytes, float]:
    """Run the (task, digest, work) in `pickled`: what `answer` gives, and seconds of compiling kernels.

    Everything that a task can raise is in the answer: what Ray sees fail is Ray's or the machine's.
    """
    if problem := check.problem():
        error = BuildError(f"node {socket.gethostname()} of the Ray cluster: {problem}")
        return pickle.dumps((None, error, "")), 0.0
    sys.path.extend(folder for folder in check.python_path if folder not in sys.path)
    os.environ.update(kernel_cache())  # before the task's imports bring Numba
    task, digest, work = pickle.loads(pickled)
    watch, seconds = _watch()
    watch.install()
    seconds.clear()
    try:
        return answer(task, digest, work), sum(seconds)
    finally:
        give_back_memory()


@lru_cache(maxsize=1)
def _watch() -> tuple[CompilationWatch, list[float]]:
    """This process's one watch, and where it writes to."""
    seconds: list[float] = []
    return CompilationWatch(lambda told: None if told is None else seconds.append(told)), seconds
