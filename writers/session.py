"""What runs a build: its work folder and its engine, from what the user said. Decides no byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from shardkit.errors import BuildError
from shardkit.progress import Listener
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote
from shardkit.writers.execution.engine import Engine
from shardkit.writers.execution.engine_local import RESUME, LocalEngine, default_workers
from shardkit.writers.execution.engine_ray import import_ray
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.scheduler import TaskSlice
from shardkit.writers.execution.scratch import default_scratch
from shardkit.writers.execution.work import Work
from shardkit.writers.execution.work_local import LocalWork
from shardkit.writers.execution.work_store import StoreWork
from shardkit.writers.progress import StageProgress
from shardkit.writers.recipe import Recipe

__all__ = ["EngineName", "Execution", "open_runner", "place_of", "work_of"]

EngineName = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a build is run. `workers`: processes, or tasks at a time on a Ray cluster (None: all there is).

    With `task_slice`, several processes share a local work folder; `ray_address` names a running cluster
    (None: RAY_ADDRESS, else one is started on this machine).
    """

    workers: int | None = None
    engine: EngineName = "local"
    task_slice: TaskSlice | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineName):
            raise BuildError(
                f"engine {self.engine!r} is unknown; use one of {', '.join(get_args(EngineName))}"
            )
        if self.engine == "ray":
            import_ray()  # MissingExtraError now, before there is a work folder


def work_of(recipe: Recipe, default: Path, storage: StorageOptions | None, execution: Execution) -> Work:
    """The recipe's work folder, or that of `default`, which is removed after success unless it is shared."""
    if recipe.work is not None and is_remote(recipe.work):
        url = recipe.work.rstrip("/")
        scratch = default_scratch(url) if recipe.scratch is None else recipe.resolve(recipe.scratch)
        return StoreWork(url, scratch.absolute(), storage)
    return LocalWork(default if recipe.work is None else recipe.resolve(recipe.work))


def place_of(work: Work) -> Path | str:
    """Its folder, or its URL."""
    return work.folder if isinstance(work, LocalWork) else work.place


@contextmanager
def open_runner(
    recipe: Recipe, work: Work, execution: Execution, listener: Listener[StageProgress]
) -> Iterator[Runner]:
    """A runner with its journal and engine, all of which end with the `with`."""
    with Journal(work, slice=execution.task_slice) as journal, _engine(recipe, execution) as engine:
        runner = Runner(journal, engine, listener)
        with runner.guarding():
            try:
                yield runner
            except OSError as error:  # of a file of finished tasks, read between two stages
                raise BuildError(f"work folder {work.place}: {error}; {RESUME}") from error


def _engine(recipe: Recipe, execution: Execution) -> Engine:
    if execution.engine == "ray":
        from shardkit.writers.execution.engine_ray import RayEngine

        return RayEngine(execution.workers, address=execution.ray_address, memory_bytes=recipe.memory)
    count = default_workers(recipe.memory) if execution.workers is None else execution.workers
    return LocalEngine(count)
