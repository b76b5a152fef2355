"""Tasks for tests of engines, and what runs them, as a build does."""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import psutil
import pytest

from shardkit.errors import BuildError, RecipeError, ShardError
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.engine import Engine, WorkerTracebackError
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.task_queue import TaskQueue
from shardkit.writers.execution.work import Work

__all__ = [
    "FAILURES",
    "TASKS",
    "check_failure",
    "end_napping",
    "ends",
    "imported_tasks",
    "make_task",
    "run_all",
    "task_of",
]

_SECONDS = 120.0  # far above what anything takes that is waited for

# Workers import tasks by name, so tests write these into a module of their own, with more of theirs.
TASKS = """
import os, time
from pathlib import Path
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

def nap(folder, place, seconds):
    place = Path(place)
    (place / f"napping-{os.getpid()}").touch()
    time.sleep(seconds)
    return {}

def overlaps(folder, place, seconds):
    # Say which GPUs this process sees, and which tasks run meanwhile.
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    mine = Path(place) / f"{os.getpid()}:{own}"
    mine.touch()
    time.sleep(seconds)
    seen = sorted(path.name for path in Path(place).iterdir())
    mine.unlink()
    return {"pid": os.getpid(), "gpus": own, "seen": seen}

def environment(folder):
    print("to stdout")
    names = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "NUMBA_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    return {name: os.environ[name] for name in names}
"""
FAILURES: tuple[tuple[str, type[Exception], str], ...] = (
    ("refuse", RecipeError, r"^pack\.length: too long$"),
    ("damage", ShardError, r"^shard\.mds: byte 7: torn$"),
    ("fill_disk", BuildError, r"task stage/fill_disk-0: .*No space left.*run the same command again"),
    ("stumble", BuildError, r"task stage/stumble-0: KeyError: 'missing'; this is a bug"),
    ("unpicklable", BuildError, r"task stage/unpicklable-0: Stubborn: 1 2"),
)
"""Name of a task that fails, with what and which message any engine says so."""


@contextmanager
def imported_tasks(file: Path, more: str) -> Iterator[ModuleType]:
    """`TASKS` and more of them as a module, in a new file that workers can import."""
    file.write_text(TASKS + more)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(file.parent)
        yield importlib.import_module(file.stem)
    del sys.modules[file.stem]


def make_task(tasks: ModuleType, name: str, *args: object, number: int = 0, weight: int = 0) -> Task:
    texts = [str(arg) for arg in args]
    return task_of("stage", f"{name}-{number}", call, getattr(tasks, name), args, texts, weight=weight)


def call(
    folder: Path,
    function: Annotated[Callable[..., Any], DecidesNoByte("the task is named after it")],
    args: Annotated[Sequence[object], DecidesNoByte("`texts` says what they are")],
    texts: Sequence[str],
) -> Any:
    """The work of tasks that get paths and other things that no digest can be taken of."""
    return function(folder, *args)


def task_of(
    stage: str, name: str, function: Callable[..., object], *args: object, weight: int = 0, **more: object
) -> Task:
    """A task of a stage that only this test has."""
    return Stage(stage, stage, function).task(name, weight, *args, **more)


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

    engine.run(TaskQueue(tasks, done), work)
    return [commits[task.key.partition("/")[2]] for task in tasks]


def end_napping(process: subprocess.Popen[str], place: Path, number: signal.Signals) -> str:
    """Signal a build, two tasks of which nap; they must end with it. Returns what it printed."""
    deadline = time.monotonic() + _SECONDS
    while len(napping := list(place.glob("napping-*"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(number)
    output, errors = process.communicate(timeout=_SECONDS)  # long before the naps end
    assert process.returncode == -number  # Python ends an unhandled KeyboardInterrupt by SIGINT
    assert errors.count("Traceback") == (number == signal.SIGINT)
    assert all(ends(int(path.name.removeprefix("napping-"))) for path in napping)
    return output


def ends(pid: int) -> bool:
    """Whether a process that should end does; a zombie has ended, too: in a container nobody reaps it."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False
