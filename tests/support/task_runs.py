"""Tasks for tests of engines, and what runs them, as a build does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from shardkit.errors import BuildError, RecipeError, ShardError
from shardkit.writers.execution.engine import Engine
from shardkit.writers.execution.engine_local import WorkerTracebackError
from shardkit.writers.execution.scheduler import OwnQueue
from shardkit.writers.execution.task import Commit, Task
from shardkit.writers.execution.work import Work

__all__ = ["FAILURES", "TASKS", "check_failure", "run_all"]

# Workers import tasks by name, so tests write these into a module of their own, with more of theirs.
TASKS = """
import os, time
from shardkit.errors import RecipeError, ShardError

def square(folder, number):
    (folder / "square.txt").write_text(str(number * number))
    return {"pid": os.getpid()}

def refuse(folder): raise RecipeError("pack.length: too long")
def damage(folder): raise ShardError("shard.mds", "torn", offset=7)
def fill_disk(folder): raise OSError(28, "No space left on device", str(folder / "x"))
def stumble(folder): return {}["missing"]

class Stubborn(RecipeError):
    def __init__(self, a, b): super().__init__(f"{a} {b}")

def unpicklable(folder): raise Stubborn(1, 2)

def environment(folder):
    print("to stdout")
    names = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "NUMBA_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    return {name: os.environ[name] for name in names}
"""
FAILURES: tuple[tuple[str, type[Exception], str], ...] = (
    ("refuse", RecipeError, r"^pack\.length: too long$"),
    ("damage", ShardError, r"^shard\.mds: byte 7: torn$"),
    ("fill_disk", BuildError, r"task stage/fill_disk-0: .*No space left.*the same command continues"),
    ("stumble", BuildError, r"task stage/stumble-0: KeyError: 'missing'; this is a bug"),
    ("unpicklable", BuildError, r"task stage/unpicklable-0: Stubborn: 1 2"),
)
"""Name of a task that fails, with what and which message any engine says so."""


def check_failure(caught: pytest.ExceptionInfo[Exception], name: str, kind: type[Exception]) -> None:
    """It has the type of what the task raised, and leads to the line that did."""
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, WorkerTracebackError)
    assert f"in {name}" in str(caught.value.__cause__)


def run_all(
    engine: Engine, tasks: Sequence[Task], work: Work, hear: Callable[[Commit], object] = lambda commit: None
) -> list[Commit]:
    """Commits in the order of the tasks; `hear` gets each as it is finished."""
    commits: dict[str, Commit] = {}

    def done(commit: Commit) -> None:
        commits[commit.folder.name] = commit
        hear(commit)

    engine.run(OwnQueue(tasks, done), work)
    return [commits[task.key.partition("/")[2]] for task in tasks]
