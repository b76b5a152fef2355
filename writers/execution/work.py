"""The contract of a work folder, local or in a store, and the one way in which a task runs.

A task writes into a temporary folder of this machine; its outputs are hashed and synced; `commit` publishes
them in one atomic step. A process that finds the task committed by another one takes those outputs: tasks are
pure functions, so the bytes must be the same, and it is an error if they are not.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import xxhash

from shardkit.errors import BuildError, MissingExtraError, RecipeError, ShardkitError
from shardkit.files import fsync_path
from shardkit.storage.store import StoreError
from shardkit.writers.execution.artifacts import RemoteFiles
from shardkit.writers.execution.task import (
    BLOCK_BYTES,
    Commit,
    Output,
    Record,
    Task,
    TaskFailedError,
    facts_of,
    record_of,
)
from shardkit.writers.ledger import Ledger

__all__ = ["Work", "check_same", "run_task", "with_fallbacks"]


class Work(Protocol):
    """A work folder. Plain data: sent to workers, also on other machines."""

    @property
    def place(self) -> str:
        """Path or URL, for messages."""

    @property
    def folder(self) -> Path:
        """The folder of a commit is `folder / task.key` on every machine."""

    @property
    def hashes_blocks(self) -> bool:
        """Whether commits need `Output.blocks`."""

    @property
    def remote(self) -> RemoteFiles | None:
        """What commits' artifacts are read from; None if they are files of this machine."""

    def prepare(self) -> None:
        """Make the folder usable in this process; BuildError if that fails. Cheap to call again."""

    def temporary(self, task: Task) -> Path:
        """A new empty folder of this machine."""

    def commit(self, task: Task, temporary: Path, commit: Commit, record: bytes) -> Commit:
        """Publish the outputs atomically. Returns the commit that counts: ours, or an earlier one."""

    def find(self, tasks: Sequence[Task]) -> list[Commit | None]:
        """Commits of tasks whose outputs all exist at their sizes; None for tasks that have to run."""

    def commits(self, stage: str | None = None) -> Iterator[tuple[str, Commit]]:
        """(task key, commit) of all finished tasks, of one stage or of all stages."""

    def records(self, stage: str) -> Iterator[Record]:
        """The whole records of a stage's finished tasks: a request each in a store."""

    def forget(self, commit: Commit) -> None:
        """Remove a finished task, its record first."""

    def damaged_output(self, commit: Commit) -> str | None:
        """Name of the first output whose bytes differ from the commit. Reads all outputs."""

    def read_note(self, name: str) -> bytes | None:
        """A small file about the whole build, or None; it may be read before `prepare`."""

    def write_note(self, name: str, data: bytes) -> None:
        """Write or replace it, whole or not at all."""

    def free_bytes(self) -> int | None:
        """Free space in bytes; None where there is no bound."""

    def remove(self) -> None:
        """Remove the whole work folder."""


def run_task(task: Task, digest: str, work: Work) -> Commit:
    """Run a task and commit it. Called in worker processes, which hold no lock."""
    work.prepare()
    temporary = work.temporary(task)
    try:
        counted = _call(task, temporary)
        counts = counted if isinstance(counted, Mapping) else counted.to_dict()
        if "ledger" in counts:
            Ledger.from_dict(counts["ledger"]).check(str(task))
        outputs = _sealed(temporary, with_blocks=work.hashes_blocks)
        return _commit(task, digest, work, temporary, counts, outputs)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _call(task: Task, folder: Path) -> Any:
    """What the task's function returns. With a fallback, TaskFailedError for errors of this task alone."""
    if task.fallback is None:
        return task.function(folder, *task.args)
    try:
        return task.function(folder, *task.args)
    except (OSError, StoreError, RecipeError, MissingExtraError):
        raise  # of the machine, the store or the recipe: other tasks fail in the same way
    except Exception as error:
        text = str(error) if isinstance(error, ShardkitError) else f"{type(error).__name__}: {error}"
        raise TaskFailedError(f"task {task}: {text}") from error


def with_fallbacks(work: Work, tasks: Sequence[Task], found: Sequence[Commit | None]) -> list[Commit | None]:
    """`found`, the commits of `tasks`, with what an earlier build ran in place of tasks that failed."""
    commits = list(found)
    waiting = {
        number: task.fallback
        for number, (task, commit) in enumerate(zip(tasks, found, strict=True))
        if commit is None and task.fallback is not None
    }
    stages = sorted({fallback.stage for fallback in waiting.values()})
    failed = {(stage, commit.name) for stage in stages for _, commit in work.commits(stage)}
    stand_ins = {
        number: fallback.task(tasks[number])
        for number, fallback in waiting.items()
        if (fallback.stage, tasks[number].name) in failed
    }
    if stand_ins:
        for number, commit in zip(stand_ins, work.find(list(stand_ins.values())), strict=True):
            commits[number] = commit
    return commits


def _commit(
    task: Task,
    digest: str,
    work: Work,
    temporary: Path,
    counts: Mapping[str, Any],
    outputs: Mapping[str, Output],
) -> Commit:
    facts = facts_of(counts, outputs)
    commit = Commit(task.stage, task.name, work.folder / task.key, digest, facts, remote=work.remote)
    return work.commit(task, temporary, commit, record_of(task, digest, counts, outputs))


def check_same(ours: Commit, theirs: Commit) -> None:
    """BuildError if two runs of one task gave different bytes."""
    one, two = ours.outputs, theirs.outputs
    if one == two:
        return
    names = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    raise BuildError(
        f"task {ours.stage}/{ours.name}: two runs of it gave different bytes ({', '.join(names)}); are "
        f"shardkit, its libraries and the input files the same on all machines?"
    )


def _sealed(folder: Path, *, with_blocks: bool) -> dict[str, Output]:
    """Sync all files below `folder`; their sizes and hashes by name."""
    outputs = {}
    for path in sorted(folder.rglob("*")):
        fsync_path(path)
        if path.is_file():
            outputs[path.relative_to(folder).as_posix()] = hash_output(path, with_blocks=with_blocks)
    return outputs


def hash_output(path: Path, *, with_blocks: bool = False) -> Output:
    """Size and hashes of a file; a file of one block has no block hashes."""
    whole, blocks, size = xxhash.xxh3_128(), bytearray(), 0
    with path.open("rb", buffering=0) as file:
        while data := _read_block(file):
            whole.update(data)
            size += len(data)
            if with_blocks:
                blocks += xxhash.xxh3_64_digest(data)
    text = base64.b64encode(blocks).decode() if size > BLOCK_BYTES else ""
    return Output(size, whole.hexdigest(), text)


def _read_block(file: Any) -> bytes:
    pieces = []
    left = BLOCK_BYTES
    while left and (piece := file.read(left)):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
