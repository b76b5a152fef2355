"""A work folder on this machine, or on a file system that several machines mount.

    work/<stage>/<task>.<digest>/    outputs and commit.json of a finished task
    work/unfinished/                 temporary folders of running tasks
    work/notes/                      about the whole build: where its input files are cut
    work/lock                        held (flock) by the build that uses the folder

One rename publishes a finished task. The name of its folder contains the task's digest, so tasks of another
recipe stay, and going back to that recipe finds them; `shardkit clean` removes tasks that no recipe uses.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardkit.errors import BuildError
from shardkit.files import LACKING, fsync_path, publish_bytes
from shardkit.locks import held_file
from shardkit.writers.execution.task import Commit, Record, Task, parse_record
from shardkit.writers.execution.work import check_same, hash_output

__all__ = ["COMMIT_NAME", "LocalWork", "locked_folder"]

COMMIT_NAME = "commit.json"
_MARKER = "shardkit-work.txt"
_MARKER_TEXT = b"Intermediate files of `shardkit build`. Delete this folder when no build needs it.\n"
_LOCK = "lock"
_UNFINISHED = "unfinished"
_NOTES = "notes"
_OURS = frozenset({_MARKER, _LOCK, _UNFINISHED, _NOTES})


@dataclass(frozen=True)
class LocalWork:
    """A local work folder."""

    folder: Path

    hashes_blocks = False
    remote = None

    @property
    def place(self) -> str:
        return str(self.folder)

    def prepare(self) -> None:
        """Nothing to do: `Journal` has created the folder."""

    def temporary(self, task: Task) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{task.stage}.{task.name}.", dir=self._unfinished()))

    def _unfinished(self) -> Path:
        folder = self.folder / _UNFINISHED
        folder.mkdir(exist_ok=True)
        return folder

    def commit(self, task: Task, temporary: Path, commit: Commit, record: bytes) -> Commit:
        publish_bytes(temporary / COMMIT_NAME, record)
        folder = commit.folder
        if not folder.parent.exists():  # so that a power cut cannot lose the whole folder of the stage
            folder.parent.mkdir(exist_ok=True)
            fsync_path(self.folder)
        while True:
            try:
                temporary.rename(folder)
            except OSError as error:
                is_there = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
                if not is_there and temporary.exists():  # otherwise NFS retried a rename that had succeeded
                    if error.errno in (*LACKING, errno.EXDEV):
                        problem = (
                            f"{error.strerror}: this file system cannot rename folders; set `work` to a "
                        )
                        raise OSError(error.errno, f"{problem}folder on a local disk", str(folder)) from error
                    raise
                if theirs := self._complete(task.key):
                    check_same(commit, theirs)
                    return theirs
                if not is_there:
                    raise
                self._take_away(folder)  # it lost a file, so the task has to be committed again
                continue
            fsync_path(folder.parent)
            return commit

    def _take_away(self, folder: Path) -> None:
        """Remove an incomplete folder; a complete one that another process has put there meanwhile stays."""
        aside = Path(tempfile.mkdtemp(prefix="removed.", dir=self._unfinished()))
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
        record = self._read(aside.relative_to(self.folder).as_posix())
        if record is not None and _is_whole(record, aside):
            with contextlib.suppress(OSError):
                aside.rename(folder)
        if aside.exists():
            shutil.rmtree(aside, ignore_errors=True)

    def find(self, tasks: Sequence[Task]) -> list[Commit | None]:
        # One listing finds missing tasks; on a network file system, checking each would be a request a task.
        present = {stage: _names(self.folder / stage) for stage in {task.stage for task in tasks}}
        found: list[Commit | None] = []
        for task in tasks:
            stage, _, name = task.key.partition("/")
            commit = self._complete(task.key) if name in present[stage] else None
            found.append(commit if commit is not None and commit.digest == task.digest else None)
        return found

    def _read(self, key: str) -> Record | None:
        try:
            return parse_record((self.folder / key / COMMIT_NAME).read_bytes(), self.folder / key)
        except OSError:
            return None

    def _complete(self, key: str) -> Commit | None:
        """The commit of a task, if all outputs exist with their sizes."""
        record = self._read(key)
        return record.commit if record is not None and _is_whole(record, self.folder / key) else None

    def commits(self, stage: str | None = None) -> Iterator[tuple[str, Commit]]:
        stages = [stage] if stage is not None else sorted(_names(self.folder) - _OURS)
        for name in stages:
            for folder in sorted(_names(self.folder / name)):
                if record := self._read(f"{name}/{folder}"):
                    yield f"{name}/{folder}", record.commit

    def records(self, stage: str) -> Iterator[Record]:
        for folder in sorted(_names(self.folder / stage)):
            if record := self._read(f"{stage}/{folder}"):
                yield record

    def forget(self, commit: Commit) -> None:
        _remove(commit.folder)

    def damaged_output(self, commit: Commit) -> str | None:
        folder = commit.folder
        for name, output in commit.outputs.items():
            if hash_output(folder / name) != output:
                return name
        return None

    def read_note(self, name: str) -> bytes | None:
        try:
            return (self.folder / _NOTES / name).read_bytes()
        except FileNotFoundError:
            return None

    def write_note(self, name: str, data: bytes) -> None:
        (self.folder / _NOTES).mkdir(exist_ok=True)
        publish_bytes(self.folder / _NOTES / name, data)

    def free_bytes(self) -> int | None:
        folder = self.folder
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def remove(self) -> None:
        # The marker goes last, so that after a crash the folder is still recognized as ours.
        for name in sorted(_names(self.folder), key=lambda name: name == _MARKER):
            if name != _LOCK:
                _remove(self.folder / name)
        (self.folder / _LOCK).unlink()
        with contextlib.suppress(
            OSError
        ):  # NFS and FUSE keep a file that is open: `locked_folder` tries again
            self.folder.rmdir()

    def clear_unfinished(self) -> None:
        """Remove leftovers of killed builds; only while no other build uses the folder."""
        _remove(self.folder / _UNFINISHED)
        (self.folder / _UNFINISHED).mkdir()


@contextmanager
def locked_folder(work: LocalWork) -> Iterator[None]:
    """Create the folder, or reuse one of ours, and lock it; BuildError if that is not possible.

    Leftovers of killed builds are removed.
    """
    descriptor = _lock(work)
    try:
        yield
    finally:
        os.close(descriptor)
        if not (work.folder / _LOCK).exists():
            with contextlib.suppress(OSError):
                work.folder.rmdir()


def _lock(work: LocalWork) -> int:
    folder = work.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {name for name in _names(folder) - {_LOCK} if not name.startswith(".")}
        if names and not (folder / _MARKER).exists():
            raise BuildError(
                f"{folder}: contains files that no build wrote ({min(names)}); set another `work` folder"
            )
        descriptor = held_file(folder / _LOCK, shared=False)
        if descriptor is None:
            raise BuildError(f"{folder}: another build uses this work folder; wait for it, or set `work`")
        _clear(work, descriptor)
        return descriptor
    except OSError as error:
        problem = f"{folder}: cannot be used as work folder: {error.strerror}; `work` names another"
        raise BuildError(problem) from error


def _clear(work: LocalWork, descriptor: int) -> None:
    try:
        if not (work.folder / _MARKER).exists():
            publish_bytes(work.folder / _MARKER, _MARKER_TEXT)
        work.clear_unfinished()
    except BaseException:
        os.close(descriptor)
        raise


def _is_whole(record: Record, folder: Path) -> bool:
    """Whether all outputs exist in a folder with their sizes."""
    try:
        return all((folder / name).stat().st_size == output.bytes for name, output in record.outputs.items())
    except OSError:
        return False


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _remove(path: Path) -> None:
    """Remove a file or folder; of a task the record first, so that no part of it looks finished."""
    (path / COMMIT_NAME).unlink(missing_ok=True) if path.is_dir() else path.unlink(missing_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
