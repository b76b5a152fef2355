"""A stage: one kind of task of a build, declared in one place.

    FIND_EXACT = Stage("exact", "equal texts", find_exact)

    def find_exact(folder: Path, keys: Slice, memory_bytes: MemoryBytes) -> ExactDuplicates:
        ...

    tasks = [FIND_EXACT.task(name, weight, keys=piece, memory_bytes=memory_bytes) for ...]
    [commits] = run(tasks)
    found = [FIND_EXACT.result(commit) for commit in commits]

The work function is pure: it writes files into one empty folder and returns its typed result. Its signature
declares everything else. The digest of a task is computed from its arguments: the outputs depend on each of
them, unless its type is `Annotated` with `DecidesNoByte` and the reason. A file counts by its content, and so
does any object with a `content`, a string that identifies everything that a task reads from the object. The
result in a commit is parsed by the function's return type.

An argument with files may name those that no later stage reads, as `consumed` (`Slice` does): they are
removed when the tasks are finished.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    get_type_hints,
)

from pydantic import TypeAdapter, ValidationError

from shardkit.errors import BuildError
from shardkit.hashing import digest_of
from shardkit.writers.execution.artifacts import Artifact, Files
from shardkit.writers.execution.code_version import code_version
from shardkit.writers.execution.commit import Commit, task_key
from shardkit.writers.execution.digests import deciding, markers_of
from shardkit.writers.execution.resources import USUAL, Resources

P = ParamSpec("P")
R = TypeVar("R")


class TaskFailedError(BuildError):
    """A task with a fallback failed in every attempt: it raised an error, or its process died."""


@dataclass(frozen=True, eq=False)
class Stage(Generic[P, R]):
    """A kind of task. `name` is its folder in a work folder, `title` its step's name for display.

    `work(folder, ...)` is the work function, which must be importable. Stages with the same title are one
    step of a build. `cost` is the cost of the stage relative to others: the CPU seconds that it takes for 0.7
    GB of JSON lines (1.2 million documents) with Gopher's filters. A stage `<name>-<part>` is a part of stage
    `<name>`, such as the merges whose rows its tasks read.
    """

    name: str
    title: str
    work: Callable[Concatenate[Path, P], R]
    cost: float = 0.0

    def __reduce__(self) -> tuple[Any, ...]:
        return Stage, (self.name, self.title, self.work, self.cost)

    def task(self, name: str, weight: int, /, *args: P.args, **kwargs: P.kwargs) -> Task:
        """Create a task. `weight`, usually in bytes: heavy tasks run first and count more in progress."""
        bound = self._signature.bind(Path(), *args, **kwargs)
        bound.apply_defaults()
        return Task(self, name, dict(list(bound.arguments.items())[1:]), weight)

    def result(self, commit: Commit) -> R:
        """Return a task's result from its commit. Raises BuildError if it has another type."""
        try:
            found: R = self._adapter.validate_python(commit.result)
            return found
        except ValidationError as error:
            raise BuildError(
                f"{commit.stage}/{commit.name}: its record has a result of another type: {error}; remove "
                f"{commit.folder} and run again"
            ) from None

    def recorded(self, result: R) -> Any:
        """Convert a result to the plain data that a commit records."""
        return self._adapter.dump_python(result, mode="json")

    def step(self, name: str) -> Stage[P, R]:
        """Return a stage named `<stage>-<name>` with the same work function."""
        return Stage(f"{self.name}-{name}", self.title, self.work)

    def nth(self, number: int) -> Stage[P, R]:
        """Return the stage for the step that runs it the `number`-th time in a build, from 1."""
        return self if number == 1 else replace(self, name=f"{self.name}-{number}")

    @cached_property
    def markers(self) -> Mapping[str, tuple[object, ...]]:
        """The markers of the work function's parameters, by name."""
        return markers_of(self.work)

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.work)

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(get_type_hints(self.work).get("return", Any))


@dataclass(frozen=True, slots=True)
class Fallback:
    """A stage whose tasks replace failed tasks, at most `limit` of them per stage.

    `stage.work(folder, failed, args, error)` gets the digest of the failed task, its arguments and its error
    message, and writes the outputs that later stages need. `setting` is the recipe's key for the limit.
    """

    stage: Stage[..., Any]
    limit: int
    setting: str

    def task(self, failed: Task, error: str = "") -> Task:
        """Return the task that replaces `failed`; `error` is not in its digest, so later builds reuse it."""
        return self.stage.task(failed.name, failed.weight, failed.digest, failed.args, error)


@dataclass(frozen=True, slots=True)
class Task:
    """A call of the work function of a stage (`of`). If it fails and has no `fallback`, the build ends.

    Engines start a task where its `resources` are free.
    """

    of: Stage[..., Any]
    name: str
    args: Mapping[str, Any]
    weight: int = 0
    fallback: Fallback | None = None
    resources: Resources = USUAL
    _digest: str = field(default="", init=False, repr=False, compare=False)

    @property
    def stage(self) -> str:
        """The name of the task's stage."""
        return self.of.name

    @property
    def digest(self) -> str:
        """The digest of all that the outputs depend on; if a commit has it, the task need not run."""
        if not self._digest:
            parts = [self.stage, self.name, self.deciding(), code_version()]
            object.__setattr__(self, "_digest", digest_of(parts))  # safe to cache: arguments never change
        return self._digest

    @property
    def key(self) -> str:
        """`stage/name.digest`, the name of the task's folder in the work folder."""
        return task_key(self.stage, self.name, self.digest)

    @property
    def consumed(self) -> Iterator[Artifact | Files]:
        """The files that only tasks of this stage still read: they go when all of these are finished."""
        for value in self.args.values():
            yield from getattr(value, "consumed", ())

    def deciding(self) -> dict[str, Any]:
        """Return the arguments that affect outputs as plain data, by the recipe's key or their own name."""
        try:
            return deciding(self.args, self.of.markers)
        except TypeError as error:
            raise TypeError(f"task {self}: {error}") from None

    def run(self, folder: Path) -> Any:
        """Call the work function and return its result."""
        return self.of.work(folder, **self.args)

    def __str__(self) -> str:
        return f"{self.stage}/{self.name}"


class RunTasks(Protocol):
    """A function that returns commits of tasks: `Runner.run`, or one that only looks up finished tasks.

    `Runner.run` removes the files that the tasks consume.
    """

    def __call__(self, *groups: Sequence[Task]) -> list[list[Commit]]:
        """Return the commits of each group, in task order. Groups, each a whole stage, run concurrently."""


def base_name(stage: str) -> str:
    """Return `name` for a stage `<name>-<part>`, or the stage's own name if it is not a part of another."""
    return stage.partition("-")[0]


def partition_name(number: int, partitions: int) -> str:
    """Return the name of a stage's task for one partition."""
    return f"{number:05d}-of-{partitions:05d}"
