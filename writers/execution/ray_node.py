"""The side of the Ray engine that runs on a node.

Before a node runs a task, it checks that its shardkit and libraries have the versions of the driver, which
computed the digests of all tasks, and that it sees the same work folder. Only then does it unpickle the task,
which imports the task's code. While a task runs, the name of its node is in Ray's key-value store, so that
warnings about lost and slow tasks can name the node.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from shardkit.errors import BuildError
from shardkit.kernels.numba_support import CompilationWatch, kernel_cache
from shardkit.writers.execution.code_version import code_version
from shardkit.writers.execution.digest_cache import worker_variable
from shardkit.writers.execution.engine import TASK_SECONDS
from shardkit.writers.execution.processes import answer, give_back_memory, time_limit
from shardkit.writers.execution.work import Work


@dataclass(frozen=True)
class NodeCheck:
    """The version of the driver's code and the place of its work folder, which must be the same on a node."""

    code: str
    python_path: tuple[str, ...]
    work: str
    task_seconds: float
    marker: str | None
    """A folder in a local work folder. A node that does not see it has another file system."""

    def problem(self) -> str | None:
        """Return why this node cannot run tasks of the build, or None if it can."""
        if code_version() != self.code:
            return (
                "its versions of shardkit or of libraries differ from those on the machine that started the "
                "build; install the same versions on all nodes"
            )
        if self.marker is not None and not Path(self.marker).exists():
            return (
                f"it does not see the work folder {self.work}; with several machines, set `work` to a place "
                f"in S3 (s3://…) or on a file system that all of them mount at this path"
            )
        return None


@contextmanager
def check_of(work: Work, task_seconds: float = TASK_SECONDS) -> Iterator[NodeCheck]:
    """Yield the driver's NodeCheck for tasks of up to `task_seconds`; its marker exists during the block."""
    marker = None
    if work.local is not None:
        marker = work.temporary("ray.nodes")  # if the driver is killed, the next build removes it
    path = tuple(str(Path(folder).absolute()) for folder in sys.path)  # "" is the current folder
    try:
        marked = None if marker is None else str(marker)
        yield NodeCheck(code_version(), path, work.place, task_seconds, marked)
    finally:
        if marker is not None:
            with suppress(OSError):
                marker.rmdir()


class NodeAnswer(NamedTuple):
    """A node's answer: `data` is the result of `processes.answer`, `seconds` the duration of the whole task.

    `node` is the name of the node, or "" if it failed the check.
    """

    data: bytes
    node: str = ""
    compile_seconds: float = 0.0
    seconds: float = 0.0


def run_on_node(check: NodeCheck, pickled: bytes) -> NodeAnswer:
    """Run the task in `pickled`, a pickled (task, digest, work), unless the node fails the check.

    Errors of the task are in the answer. So if Ray reports a failure, its cause is Ray or the machine.
    """
    with _named_node():
        if problem := check.problem():
            error = BuildError(f"node {_node_name()} of the Ray cluster: {problem}")
            return NodeAnswer(pickle.dumps((None, error, "")))
        sys.path.extend(folder for folder in check.python_path if folder not in sys.path)
        os.environ.update(kernel_cache() | worker_variable())  # before the task's code imports Numba
        task, digest, work = pickle.loads(pickled)
        watch, seconds = _watch()
        watch.install()
        seconds.clear()
        began = time.monotonic()
        try:
            with time_limit(check.task_seconds):
                data = answer(task, digest, work)
            return NodeAnswer(data, _node_name(), sum(seconds), time.monotonic() - began)
        finally:
            give_back_memory()


def _node_name() -> str:
    """Return the name of this machine or pod, for messages."""
    return socket.gethostname()


def node_key(task_id: str) -> str:
    """Return the key in Ray's key-value store under which the node that runs a task puts its id and name."""
    return f"shardkit-node-{task_id}"


@contextmanager
def _named_node() -> Iterator[None]:
    """Put Ray's id and the name of this node into Ray's key-value store while the block runs."""
    import ray
    from ray.experimental import internal_kv

    if not ray.is_initialized():  # a test calls `run_on_node` by itself
        yield
        return
    context = ray.get_runtime_context()
    key = node_key(str(context.get_task_id()))
    with suppress(Exception):  # if the head is busy, messages go without the name of the node
        internal_kv._internal_kv_put(key, f"{context.get_node_id()} {_node_name()}")
    try:
        yield
    finally:
        with suppress(Exception):
            internal_kv._internal_kv_del(key)


@lru_cache(maxsize=1)
def _watch() -> tuple[CompilationWatch, list[float]]:
    """Return this process's CompilationWatch and the list to which it appends the seconds of compilations."""
    seconds: list[float] = []
    return CompilationWatch(lambda told: None if told is None else seconds.append(told)), seconds
