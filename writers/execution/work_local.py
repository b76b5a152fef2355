"""A work folder of this machine, or on a file system that several machines share.

    work/<stage>/<task>.<digest>/    outputs and commit.json of a finished task
    work/unfinished/<session>/       what running tasks write
    work/lock                        held (flock) by the build that uses the folder, or shared by several
    work/sharing/                    who is at what, while several share it

A finished task appears by one rename. The folder's name has the task's digest in it, so what another recipe
left stays where it is, and going back to that recipe finds it; `shardkit clean` removes what no plan names.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardkit.errors import BuildError
from shardkit.index import publish_bytes
from shardkit.storage.local import LocalStore
from shardkit.writers.execution.task import Commit, Task, parse_commit
from shardkit.writers.execution.work import check_same, fsync_path, hash_output

__all__ = ["COMMIT_NAME", "LocalWork", "lock_folder"]

COMMIT_NAME = "commit.json"
_MARKER = "shardkit-work.txt"
_MARKER_TEXT = b"Intermediate files of `shardkit build`. Delete this folder when no build needs it.\n"
_LOCK = "lock"
_UNFINISHED = "unfinished"
_SHARING = "sharing"
_OURS = frozenset({_MARKER, _LOCK, _UNFINISHED, _SHARING})


@dataclass(frozen=True)
class LocalWork:
    """A folder; `session` names the temporary files of one run of a build."""

    folder: Path
    session: str = "build"

    hashes_blocks = False

    @property
    def place(self) -> str:
        return str(self.folder)

    @property
    def sharing(self) -> LocalStore:
        return LocalStore(self.folder / _SHARING)

    def prepare(self) -> None:
        """Nothing is needed: `Journal` made the folder."""

    def temporary(self, task: Task) -> Path:
        parent = self.folder / _UNFINISHED / self.session
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{task.stage}.{task.name}.", dir=parent))

    def commit(self, task: Task, temporary: Path, commit: Commit, record: bytes) -> Commit:
        publish_bytes(temporary / COMMIT_NAME, record)
        folder = commit.folder
        folder.parent.mkdir(exist_ok=True)
        while True:
            try:
                temporary.rename(folder)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                if theirs := _complete(folder):
                    check_same(commit, theirs)
                    return theirs
                _remove(folder)  # it lost a file, so it has to be made again
                continue
            fsync_path(folder.parent)
            return commit

    def find(self, tasks: Sequence[Task]) -> list[Commit | None]:
        found: list[Commit | None] = []
        for task in tasks:
            commit = _complete(self.folder / task.key)
            found.append(commit if commit is not None and commit.digest == task.digest else None)
        return found

    def commits(self, stage: str | None = None) -> Iterator[tuple[str, Commit]]:
        stages = [stage] if stage is not None else sorted(_names(self.folder) - _OURS)
        for name in stages:
            for folder in sorted(_names(self.folder / name)):
                if commit := _read(self.folder / name / folder):
                    yield f"{name}/{folder}", commit

    def forget(self, commit: Commit) -> None:
        _remove(commit.folder)

    def damaged_output(self, commit: Commit) -> str | None:
        for name, output in commit.outputs.items():
            if hash_output(commit.folder / name) != output:
                return name
        return None

    def free_bytes(self) -> int | None:
        folder = self.folder
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def remove(self) -> None:
        # The marker goes last, so that a crash leaves a folder that is still known as ours.
        for name in sorted(_names(self.folder), key=lambda name: name == _MARKER):
            if name != _LOCK:
                _remove(self.folder / name)
        (self.folder / _LOCK).unlink()
        self.folder.rmdir()

    def clear_unfinished(self) -> None:
        """Remove what builds that were killed left; only while no other one uses the folder."""
        _remove(self.folder / _UNFINISHED)
        (self.folder / _UNFINISHED).mkdir()


def lock_folder(work: LocalWork, *, shared: bool) -> int:
    """Create the folder or take over ours, and lock it; BuildError if that is not possible.

    A descriptor that holds the lock until it is closed or the process ends.
    """
    folder = work.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = {name for name in _names(folder) - {_LOCK} if not name.startswith(".")}
        if names and _MARKER not in names:
            raise BuildError(
                f"{folder}: holds files that no build wrote ({min(names)}); set another `work` folder"
            )
        descriptor = _locked(folder / _LOCK, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            if not (folder / _MARKER).exists():
                publish_bytes(folder / _MARKER, _MARKER_TEXT)
            stack.pop_all()
        return descriptor
    except OSError as error:
        raise BuildError(f"{folder}: cannot be used as work folder: {error.strerror}") from error


def _read(folder: Path) -> Commit | None:
    try:
        return parse_commit((folder / COMMIT_NAME).read_bytes(), folder)
    except OSError:
        return None


def _complete(folder: Path) -> Commit | None:
    """The commit in a folder if all outputs are there with their sizes."""
    commit = _read(folder)
    if commit is None:
        return None
    for name, output in commit.outputs.items():
        try:
            if (folder / name).stat().st_size != output.bytes:
                return None
        except OSError:
            return None
    return replace(commit, reused=True)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _remove(path: Path) -> None:
    """Remove a file or folder; of a task's folder the record first, so that no half of it looks finished."""
    (path / COMMIT_NAME).unlink(missing_ok=True) if path.is_dir() else path.unlink(missing_ok=True)
    if path.is_dir():
        shutil.rmtree(path)


def _locked(path: Path, kind: int) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            try:
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
            except FileNotFoundError:
                pass  # the build that held it removed it: make a new one
        except BlockingIOError:
            os.close(descriptor)
            raise BuildError(
                f"{path.parent}: another build uses this work folder; wait for it, or set `work`; builds "
                f"that are to share one all say --task-slice"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
