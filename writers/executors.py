"""Selects the work folder and the engine of a build, and puts files where its tasks find them.

Does not affect output bytes. The tokenizer and the lists and models of filters are read by many tasks. On one
machine, or with a shared file system, they stay where they are. With a work folder in a store they are copied
there once, as the outputs of a task that runs where the build was started (`place_files`).
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

_WORKER_TEXT_BYTES = 1 << 21  # filtering less takes no longer than a process takes to start
_MODULES = ("shardkit.writers.stages.graph", "pyarrow.parquet")  # which import those of all tasks
_TOKENIZER = ".tokenizer"  # a folder of its own, apart from what recipes name


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a build runs. Its fields are options of the command line, in these words."""

    workers: int | None = None
    """Worker processes, or tasks at a time on a Ray cluster; default: one per core, fewer for little text or
    memory."""
    engine: EngineName = "local"
    """Where tasks run: processes on this machine, or a Ray cluster."""
    ray_address: str | None = None
    """The Ray cluster, such as auto or ray://host:10001; default: $RAY_ADDRESS, else a cluster started on
    this machine."""
    task_seconds: float = TASK_SECONDS
    """Kill a task that takes longer and run it once more (with Ray, a few times), then end with its name;
    default: 21600."""
    retry_failed: bool = False
    """Run the tasks of splits again that an earlier build gave up, as `max_failed_splits` allowed; default:
    use what is left of those splits, nothing."""
    speculate: bool = True
    """With the engine ray, run a task on a second, idle worker, too, if it takes several times as long as
    others, and take the first answer."""
    lease_seconds: float = LEASE_SECONDS
    """Silence after which the driver of a work folder in a store counts as dead."""

    def __post_init__(self) -> None:
        if not self.task_seconds > 0:
            raise BuildError(f"a limit of {self.task_seconds} s for a task: must be above 0")
        if self.engine not in get_args(EngineName):
            raise BuildError(
                f"engine {self.engine!r} is unknown; use one of {', '.join(get_args(EngineName))}"
            )
        if self.engine == "ray":
            import_ray()  # MissingExtraError now, before there is a work folder

    def for_text(self, text_bytes: int, memory_bytes: int) -> Execution:
        """The same for about so much text: no more processes than pay off, unless their number is given."""
        if self.engine != "local" or self.workers is not None:
            return self
        enough = max(1, -(-text_bytes // _WORKER_TEXT_BYTES))
        return replace(self, workers=min(enough, default_workers(memory_bytes)))


def work_of(recipe: Recipe, default: Path, storage: StorageOptions | None, execution: Execution) -> Work:
    """The recipe's work folder, or that of `default`, which is removed after success."""
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
        except OSError as error:  # while this process reads files of finished tasks between two stages
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
    """The part of `Journal` and of `Planner` that `place_files` needs."""

    @property
    def work(self) -> Work: ...
    def run_here(self, task: Task) -> Commit: ...


def place_files(inputs: BuildInputs, journal: _Place) -> BuildInputs:
    """Return the inputs with files of filters and the tokenizer where tasks find them.

    That is by their paths in the recipe if the work folder is on this machine, else copies of them. Files of
    filters with absolute paths must exist on each machine, and all of them must if one lies outside of the
    recipe's folder.
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
    """Copy files, by the names that they get in `folder`."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(places[name], folder / name)


FILES = Stage("files", "read and filter", copy_files)
