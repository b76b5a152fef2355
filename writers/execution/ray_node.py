"""The side of the Ray engine that runs on a node.

Before a node runs a task, it checks that its shardkit and libraries are those of the driver, which computed
the digests of all tasks, and that it sees the same work folder. Only then does it unpickle the task, which
imports its code. A task that runs leaves the name of its node in Ray's key-value store, so that warnings of
lost and slow tasks can name it.
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
from shardkit.writers.execution.code_version import code_version
from shardkit.writers.execution.digest_cache import worker_variable
from shardkit.writers.execution.engine import TASK_SECONDS
from shardkit.writers.execution.processes import answer, give_back_memory, time_limit
from shardkit.writers.execution.work import Work
from shardkit.writers.kernels.numba_support import CompilationWatch, kernel_cache


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
    if work.local is not None:
        marker = work.temporary("ray.nodes")  # goes with what was not finished
    path = tuple(str(Path(folder).absolute()) for folder in sys.path)  # "" is the current folder
    try:
        marked = None if marker is None else str(marker)
        yield NodeCheck(code_version(), path, work.place, task_seconds, marked)
    finally:
        if marker is not None:
            with suppress(OSError):
                marker.rmdir()


class NodeAnswer(NamedTuple):
    """`data` is what `answer` gave, `seconds` those of the whole task; `node` is "" if it did not fit."""

    data: bytes
    node: str = ""
    compile_seconds: float = 0.0
    seconds: float = 0.0


def run_on_node(check: NodeCheck, pickled: bytes) -> NodeAnswer:
    """Run the (task, digest, work) in `pickled`.

    Everything that a task can raise is in the answer: what Ray sees fail is Ray's or the machine's.
    """
    with _named_node():
        if problem := check.problem():
            error = BuildError(f"node {_node_name()} of the Ray cluster: {problem}")
            return NodeAnswer(pickle.dumps((None, error, "")))
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
            return NodeAnswer(data, _node_name(), sum(seconds), time.monotonic() - began)
        finally:
            give_back_memory()


def _node_name() -> str:
    """The name of this machine or pod, for people."""
    return socket.gethostname()


def node_key(task_id: str) -> str:
    """The key of a node's name in Ray's key-value store, by Ray's number of a task that runs there."""
    return f"shardkit-node-{task_id}"


@contextmanager
def _named_node() -> Iterator[None]:
    """Leave the name of this node where the driver finds it, as long as the block runs."""
    import ray
    from ray.experimental import internal_kv

    if not ray.is_initialized():  # a test calls `run_on_node` by itself
        yield
        return
    key = node_key(str(ray.get_runtime_context().get_task_id()))
    with suppress(Exception):  # the head is busy: a message may lack a name
        internal_kv._internal_kv_put(key, _node_name())
    try:
        yield
    finally:
        with suppress(Exception):
            internal_kv._internal_kv_del(key)


@lru_cache(maxsize=1)
def _watch() -> tuple[CompilationWatch, list[float]]:
    """This process's one watch, and where it writes to."""
    seconds: list[float] = []
    return CompilationWatch(lambda told: None if told is None else seconds.append(told)), seconds
