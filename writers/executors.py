"""Selects the work folder and the engine of a build, and puts files where its tasks find them.

None of this affects output bytes. Many tasks read the tokenizer and the lists and models of filters. On one
machine, or with a shared file system, these files stay in place. If the work folder is in a store, they are
copied there once, as the outputs of a task that runs on the machine of the driver (`place_files`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Protocol, get_args

from shardkit.errors import BuildError
from shardkit.progress import Listener
from shardkit.storage.store import StorageOptions
from shardkit.storage.url import is_remote
from shardkit.writers.execution.commit import Commit
from shardkit.writers.execution.digests import DecidesNoByte
from shardkit.writers.execution.engine import TASK_SECONDS, Engine, LocalEngine, default_workers
from shardkit.writers.execution.engine_ray import RayEngine, Stragglers
from shardkit.writers.execution.lease import LEASE_SECONDS
from shardkit.writers.execution.processes import RESUME
from shardkit.writers.execution.progress import StageProgress
from shardkit.writers.execution.ray_cluster import import_ray
from shardkit.writers.execution.runner import Journal, Runner
from shardkit.writers.execution.scratch import default_scratch
from shardkit.writers.execution.stage import Stage, Task
from shardkit.writers.execution.work import Work
from shardkit.writers.recipe.recipe import Recipe
from shardkit.writers.stages.inputs import BuildInputs

EngineName = Literal["local", "ray"]

_WORKER_TEXT_BYTES = 1 << 21  # least text per worker: filtering less text is faster than starting a process
_MODULES = ("shardkit.writers.stages.graph", "pyarrow.parquet")  # these import the modules of all tasks
_TOKENIZER = ".tokenizer"  # separate folder, so that its name cannot conflict with files of filters


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a build runs. The fields are options of the command line, and their docstrings its help texts."""

    workers: int | None = None
    """Number of worker processes, or of concurrent tasks on a Ray cluster; default: one per core, fewer if
    there is little text or memory."""
    engine: EngineName = "local"
    """The engine that runs tasks: processes on this machine, or a Ray cluster."""
    ray_address: str | None = None
    """The Ray cluster, such as auto or ray://host:10001; default: $RAY_ADDRESS, else a cluster started on
    this machine."""
    task_seconds: float = TASK_SECONDS
    """Kill a task that takes longer and run it once more (with Ray, a few times), then end with an error that
    names it; default: 21600."""
    retry_failed: bool = False
    """Run the tasks of splits again that failed in an earlier build within `max_failed_splits`; default: keep
    leaving these splits out."""
    speculate: bool = True
    """With the engine ray, start a second attempt on an idle worker if a task takes several times as long as
    others, and use the first answer."""
    lease_seconds: float = LEASE_SECONDS
    """Time without a heartbeat after which the driver of a work folder in a store counts as dead."""

    def __post_init__(self) -> None:
        if not self.task_seconds > 0:
            raise BuildError(f"task_seconds is {self.task_seconds}; it must be above 0")
        if self.engine not in get_args(EngineName):
            raise BuildError(
                f"engine {self.engine!r} is unknown; use one of {', '.join(get_args(EngineName))}"
            )
        if self.engine == "ray":
            import_ray()  # raises MissingExtraError now, before a work folder is created

    def for_text(self, text_bytes: int, memory_bytes: int) -> Execution:
        """Return these settings; if `workers` is not set, limit it to what `text_bytes` of text needs."""
        if self.engine != "local" or self.workers is not None:
            return self
        enough = max(1, -(-text_bytes // _WORKER_TEXT_BYTES))
        return replace(self, workers=min(enough, default_workers(memory_bytes)))


def work_of(recipe: Recipe, default: Path, storage: StorageOptions | None, execution: Execution) -> Work:
    """Return the recipe's work folder. Without one, return a folder at `default`, removed after success."""
    if recipe.work is not None and is_remote(recipe.work):
        url = recipe.work.rstrip("/")
        scratch = default_scratch(url) if recipe.scratch is None else recipe.resolve(recipe.scratch)
        return Work(url, scratch.absolute(), storage)
    return Work.at(default if recipe.work is None else recipe.resolve(recipe.work))


@contextmanager
def open_runner(
    recipe: Recipe, work: Work, execution: Execution, listener: Listener[StageProgress]
) -> Iterator[Runner]:
    """Open the work folder and start the engine; both are closed at the end of the `with`."""
    with (
        Journal(work, lease_seconds=execution.lease_seconds) as journal,
        _engine(recipe, execution) as engine,
    ):
        runner = Runner(journal, engine, listener, retry_failed=execution.retry_failed)
        try:
            yield runner
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"tasks finished: {runner.finished:,}")
            raise
        except OSError as error:  # between stages, this process failed to read files of finished tasks
            raise BuildError(f"work folder {work.place}: {error}; {RESUME}") from error


def _engine(recipe: Recipe, execution: Execution) -> Engine:
    if execution.engine == "ray":
        return RayEngine(
            execution.workers,
            address=execution.ray_address,
            memory_bytes=recipe.memory,
            task_seconds=execution.task_seconds,
            stragglers=Stragglers() if execution.speculate else None,
        )
    count = default_workers(recipe.memory) if execution.workers is None else execution.workers
    return LocalEngine(count, task_seconds=execution.task_seconds, modules=_MODULES)


class _Place(Protocol):
    """The methods of `Journal` and `Planner` that `place_files` uses."""

    @property
    def work(self) -> Work: ...
    def run_here(self, task: Task) -> Commit: ...


def place_files(inputs: BuildInputs, journal: _Place) -> BuildInputs:
    """Return the inputs with the tokenizer and the files of filters at paths that all tasks can read.

    If the work folder is on this machine, these are the files themselves, else copies in the work folder.
    Files of filters with absolute paths are not copied and must exist on each machine. If a relative path
    leads outside of the recipe's folder, this applies to all files of filters.
    """
    if journal.work.local is not None:
        return inputs
    tokenizer = inputs.tokenizer
    inside = {name: digest for name, digest in inputs.filter_files.items() if _is_inside(name)}
    places, files = {name: inputs.recipe.resolve(name) for name in inside}, dict(inside)
    if tokenizer is not None:
        name = f"{_TOKENIZER}/{tokenizer.file.path.name}"
        places[name], files[name] = tokenizer.file.path, tokenizer.digest
    commit = journal.run_here(FILES.task("files", 0, files, places))
    others = inputs.filter_files.keys() - inside.keys()
    outside = [name for name in others if not PurePosixPath(name).is_absolute()]
    if tokenizer is not None:
        file = commit.files / _TOKENIZER / tokenizer.file.path.name
        tokenizer = replace(tokenizer, file=replace(file, content=tokenizer.digest))
    return replace(inputs, filter_folder=None if outside else commit.files, tokenizer=tokenizer)


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.parts[0] != _TOKENIZER


def copy_files(
    folder: Path,
    files: Mapping[str, str],
    places: Annotated[Mapping[str, Path], DecidesNoByte("`files` has the digest of each")],
) -> None:
    """Copy each file, by name, from its path in `places` into `folder`. `files` has the files' digests."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(places[name], folder / name)


FILES = Stage("files", "read and filter", copy_files)
