"""A work folder: files of finished tasks in a store, which is a folder or a bucket, and how a task runs.

    shardkit-work.txt                       marker with the folder's random id
    <stage>/<task>.<digest>/<file>          outputs of a task
    <stage>/<task>.<digest>/commit.json     record of the task; it exists only if all outputs exist
    segments/<stage>/<hash>                 in a bucket: copies of about 1,000 records each (segments.py)
    notes/                                  notes on the whole build, such as where its input files are cut
    lock, or lease/                         held by the driver, the process that runs the build (lease.py)
    unfinished/                             in a folder: temporary folders of running tasks

A task writes into a temporary folder of this machine; its outputs are hashed; `Store.put_folder` publishes
them in one atomic step, a rename of the folder or a PUT of the record with If-None-Match. If another process
has already committed the task, its outputs are used: tasks are pure functions, so the bytes must be the same,
and it is an error if they are not. The name of a task's folder contains its digest, so tasks of another
recipe stay, and going back to that recipe finds them; `shardkit clean` removes tasks that no recipe uses.

In a local work folder, files are read in place. A build compares files of earlier builds with their hashes
once before it uses them (runner.py), except sorted runs of the exchange, whose blocks are verified whenever
they are read. For a bucket, every machine has a scratch folder (`scratch.py`) for the files of
running tasks, for records, and for small files that are fetched whole; it may be deleted while no build runs
on the machine. All other files are read by ranges, and each block is compared with its hash
(`CheckedRanges`). Sorted runs of the exchange contain their own hashes and are read by exact ranges
(`Work.read_range`). If an output is damaged, the record of its task is removed, so that the next build runs
the task again.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeVar

from shardkit.errors import BuildError, MissingExtraError, RecipeError, ShardkitError
from shardkit.files import fsync_path, is_remote
from shardkit.storage.local import LocalStore
from shardkit.storage.object_file import open_object
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.store import (
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    Store,
    StoreError,
)
from shardkit.storage.url import open_store
from shardkit.writers.execution import scratch
from shardkit.writers.execution.artifacts import Artifact, DamagedRangeError, may_be_gone
from shardkit.writers.execution.checked_ranges import CheckedRanges, DamagedFileError, get_checked
from shardkit.writers.execution.commit import (
    Commit,
    Output,
    Record,
    check_same,
    facts_of,
    hash_file,
    hash_output,
    parse_record,
    record_of,
)
from shardkit.writers.execution.lease import BEATS, LOCK_NAME, DriverLease, locked_folder, process_name
from shardkit.writers.execution.resources import UnavailableError
from shardkit.writers.execution.segments import SEGMENT_RECORDS, Segments
from shardkit.writers.execution.stage import Task, TaskFailedError

COMMIT_NAME = "commit.json"
_MARKER = "shardkit-work.txt"
_MARKER_TEXT = b"Intermediate files of `shardkit build`. Delete this folder when no build needs it.\n"
_ID_BYTES = 8
_TASK = re.compile(r"[^/]+/[^/]+\.[0-9a-f]{16}/")  # prefix of the keys of a task's files
_OTHERS = ("segments/", "notes/", "lease/", f"{scratch.UNFINISHED}/")
_THREADS = 16  # concurrent requests for records; records are small, so requests only wait
_COPY_BYTES = 4 << 20
_KEPT_RECORDS = 4096  # number of recently read records to cache, each a few kilobytes
T = TypeVar("T")
_RESUME = "finished tasks are kept; run the same command again to continue"


@dataclass(frozen=True)
class Work:
    """A work folder at `place`, a path or URL. It is plain data, so it can be sent to workers anywhere.

    On every machine, the files of a task are in `folder / task.key`, or are fetched to it: `folder` is
    `place` itself if that is a path, otherwise a scratch folder. `around` wraps the store (for tests). Builds
    use the result of `claimed`; an unclaimed work folder removes nothing and caches nothing on this machine.
    """

    place: str
    folder: Path
    storage: StorageOptions | None = None
    around: Callable[[Store], Store] | None = None
    id: str = ""
    segment_records: int = SEGMENT_RECORDS

    @classmethod
    def at(cls, folder: Path) -> Work:
        """Return the work folder at a path. It has no segments: records on a disk are quick to read."""
        return cls(str(folder), folder, segment_records=0)

    @property
    def local(self) -> Path | None:
        """The work folder's path if it is on a file system; None if it is in a store."""
        return None if is_remote(self.place) else self.folder

    @property
    def remote(self) -> Work | None:
        """This work folder if it is in a store, which artifacts are read from; None on a file system."""
        return self if self.local is None else None

    @property
    def store(self) -> Store:
        """The store with the work folder's files. A remote store retries; there is one object per process."""
        if self.local is not None:
            return LocalStore(self.local)
        return _connect(self.place, self.storage, self.around)

    def prepare(self) -> None:
        """Create and lock the scratch folder if the work folder is remote. May raise BuildError."""
        if self.local is None:
            scratch.prepare(self.folder)

    def is_empty(self) -> bool:
        """Return whether the place has no marker of a work folder and no files."""
        with self._explained():
            return self._marker() is None and self._first_key() is None

    def claimed(self) -> Work:
        """Return this work folder with its id; creates the folder if necessary.

        Scratch folders are named after the id, so that files cached from a removed work folder are never used
        for a new one at the same place. Raises BuildError if the place is not a work folder.
        """
        with self._explained(advice=f"{_RESUME}; or set `work` to another place"):
            text, key = self._marker(), None
            if text is None and (key := self._first_key()) is None:
                new = _MARKER_TEXT + b"id: " + os.urandom(_ID_BYTES).hex().encode() + b"\n"
                with suppress(ObjectExistsError):
                    self.store.put(_MARKER, new, if_absent=True)
                    text = new
            if text is None:  # another driver may have written the marker since it was read
                text = self._marker()
            if text is None:
                problem = f"contains files that no build wrote ({key}); set another `work` folder"
                raise BuildError(f"{self.place}: {problem if key else 'was removed meanwhile'}")
        found = text.removeprefix(_MARKER_TEXT).removeprefix(b"id: ").strip().decode(errors="replace")
        id = found or "none"  # markers of earlier versions have no id
        if not text.startswith(_MARKER_TEXT) or not id.isalnum():
            raise BuildError(f"{self.place}/{_MARKER}: is not a valid marker; remove the work folder")
        return replace(self, folder=self.local or scratch.folder_of(self.folder, id), id=id)

    @contextmanager
    def locked(self, lease_seconds: float, *, force: bool = False) -> Iterator[DriverLease | None]:
        """Keep other drivers out while the block runs: by a lock on a file system, by a lease in a store.

        Yields the lease, or None for a lock. With `force`, no lease is acquired. Raises BuildError if another
        driver uses the folder.
        """
        if self.local is not None:
            with locked_folder(self.local):
                self.claimed()  # again: the previous driver may have removed the folder before unlocking it
                shutil.rmtree(self._unfinished, ignore_errors=True)  # leftovers of killed builds
                self._unfinished.mkdir(exist_ok=True)
                yield None
        elif force:
            yield None
        else:
            store = self.store
            urgent = store.urgent if isinstance(store, ResilientStore) else store  # never waits behind others
            beat_seconds = lease_seconds / BEATS
            with DriverLease(
                urgent, name=process_name(), lease_seconds=lease_seconds, beat_seconds=beat_seconds
            ) as lease:
                lease.acquire()
                yield lease

    def temporary(self, name: str) -> Path:
        """Create and return an empty folder on this machine, for the outputs of one task."""
        self._unfinished.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name}.", dir=self._unfinished))

    @property
    def _unfinished(self) -> Path:
        return self.folder / scratch.UNFINISHED

    def commit(self, task: Task, temporary: Path, commit: Commit, record: bytes) -> Commit:
        """Publish a task's outputs atomically; return `commit`, or the commit of a process that was first."""
        with self._explained(f"task {task}: "):
            theirs = self._stored(task.key)
            while theirs is None:
                try:
                    hashes = {name: output.xxh3_128 for name, output in commit.outputs.items()}
                    self.store.put_folder(task.key, temporary, COMMIT_NAME, record, hashes)
                    self._keep(task.key, record)
                    return commit
                except ObjectExistsError:
                    theirs = self._stored(task.key)
                    if theirs is None:  # the record was removed meanwhile, is damaged, or has another format
                        self.store.delete(f"{task.key}/{COMMIT_NAME}")
        check_same(commit, theirs)
        return theirs

    def find(self, tasks: Sequence[Task], segments: Segments | None = None) -> list[Commit | None]:
        """Return the commit of each task, or None if the task must run.

        It must run if it has no commit, or if an output is missing or has another size; but runs of the
        exchange may have been removed after they were read (`Commit.absent`). Commits are read from
        `segments` where possible, else from the tasks' records.
        """
        keys = [task.key for task in tasks]
        wanted, found = frozenset(keys), dict[str, Commit]()
        is_one = len(keys) == 1  # list and read only this task: two small requests
        with self._explained():
            for part in keys if is_one else sorted({task.stage for task in tasks}):
                listed = self._listed(f"{part}/")
                read = [] if is_one else (segments or self.segments()).read(part)
                for key, commit, sizes in self._commits(listed, read, wanted):
                    there = _without_gone(commit, sizes)
                    outputs = there.outputs.items()
                    if all(sizes.get(n) == one.bytes for n, one in outputs if n not in there.absent):
                        found[key] = there
                    else:
                        self._forget_commit(key)
        commits = map(found.get, keys)
        return [
            commit if commit is not None and commit.digest == task.digest else None
            for commit, task in zip(commits, tasks, strict=True)
        ]

    def commits(self, stage: str | None = None) -> Iterator[tuple[str, Commit]]:
        """Yield (task key, commit) of all finished tasks of one stage, or of all stages if it is None."""
        with self._explained():
            listed = self._listed("" if stage is None else f"{stage}/")
            for name, of_stage in groupby(listed, lambda task: task[0].partition("/")[0]):
                read = self._commits(of_stage, self.segments().read(name))
                yield from sorted((key, _without_gone(commit, sizes)) for key, commit, sizes in read)

    def records(self, stage: str) -> Iterator[Record]:
        """Yield the full records of a stage's finished tasks. In a store, each takes one request."""
        with self._explained():
            keys = [key for key, _ in self._listed(f"{stage}/")]
            yield from filter(None, self._each(self.read_record, keys))

    def segments(self) -> Segments:
        """Return the segments of this work folder, for one reader or writer."""
        return Segments(self.store, self.folder, self.remote, records=self.segment_records)

    def _marker(self) -> bytes | None:
        with suppress(ObjectNotFoundError):
            return self.store.get(_MARKER)
        return None

    def _first_key(self) -> str | None:
        """Return the first key at this place except the lock and hidden files; None if there is none."""
        keys = (info.key for info in self.store.list())
        return next((key for key in keys if key != LOCK_NAME and not key.startswith(".")), None)

    def _listed(self, prefix: str) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield (task key, {output name: size}) of each finished task whose key has this prefix."""
        infos = (info for info in self.store.list(prefix) if not info.key.startswith(_OTHERS))
        for key, files in groupby(infos, lambda info: "/".join(info.key.split("/", 2)[:2])):
            sizes = {info.key[len(key) + 1 :]: info.bytes for info in files}
            if sizes.pop(COMMIT_NAME, None) is not None:
                yield key, sizes

    def _commits(
        self,
        listed: Iterator[tuple[str, dict[str, int]]],
        segments: Iterable[Commit],
        wanted: Container[str] | None = None,
    ) -> Iterator[tuple[str, Commit, dict[str, int]]]:
        """Yield (key, commit, {output name: size}) of the `listed` tasks in `wanted`, or of all if None.

        Commits come from `segments`, else from the records. If no task is listed, `segments` are not read.
        """
        if (first := next(listed, None)) is None:
            return
        known = {commit.key: commit for commit in segments if wanted is None or commit.key in wanted}
        unread: dict[str, dict[str, int]] = {}
        for key, sizes in chain([first], listed):
            if (commit := known.pop(key, None)) is not None:
                yield key, commit, sizes
            elif wanted is None or key in wanted:
                unread[key] = sizes
        for key, commit in zip(unread, self._each(self._stored, unread), strict=True):
            if commit is not None:
                yield key, commit, unread[key]

    def forget(self, key: str) -> None:
        """Remove a finished task, its record first."""
        with self._explained():
            self.store.delete(f"{key}/{COMMIT_NAME}")
            self._delete(info.key for info in self.store.list(f"{key}/"))
        shutil.rmtree(self.folder / key, ignore_errors=True)

    def remove_files(self, files: Sequence[Path]) -> None:
        """Remove files of finished tasks, which stay finished; files that are gone already do not matter."""
        with self._explained():
            self._delete(file.relative_to(self.folder).as_posix() for file in files)

    def place_of(self, path: Path) -> tuple[str, str] | None:
        """Return (task key, file name) of a file of a task; None if the path is not in this work folder.

        The name is empty for the folder of a task, and also for the folder of a stage, which is then the key.
        """
        return self._task_file(path) if path.is_relative_to(self.folder) else None

    def forget_damaged(self, error: DamagedRangeError) -> None:
        """Remove the task whose file is damaged, so that the next build runs it again."""
        if (place := self.place_of(error.path)) is not None:
            self.forget(place[0])

    def damaged_output(self, commit: Commit, names: Iterable[str] | None = None) -> str | None:
        """Return the first output, or the first of these `names`, whose bytes differ from the commit."""
        outputs = commit.outputs
        with self._explained():
            for name in outputs if names is None else names:
                output = outputs[name]
                try:
                    with (Artifact(commit.folder, self.remote) / name).open() as file:
                        is_right = hash_file(file) == output
                except OSError as error:
                    if not isinstance(error.__cause__, DamagedFileError):
                        raise
                    is_right = False
                if not is_right:
                    return name
        return None

    def read_note(self, name: str) -> bytes | None:
        """Return a note, a small file about the whole build, or None without one; needs no `prepare`."""
        with self._explained():
            try:
                return self.store.get(f"notes/{name}")
            except ObjectNotFoundError:
                return None

    def write_note(self, name: str, data: bytes) -> None:
        """Write or replace a note atomically."""
        with self._explained():
            self.store.put(f"notes/{name}", data)

    def remove(self) -> None:
        """Remove the work folder: records first, the marker last, so that a second call can complete it."""
        with self._explained():
            keys = [info.key for info in self.store.list()]
            ours = [key for key in keys if _TASK.match(key) or key.startswith(_OTHERS)]
            self._delete(key for key in ours if key.endswith(f"/{COMMIT_NAME}"))
            self._delete(ours)
            self.store.delete(_MARKER)
        shutil.rmtree(self.folder, ignore_errors=True)

    def open(self, path: Path) -> io.BufferedReader:
        """Open a file of a finished task; its bytes are read in verified ranges. May raise OSError."""
        key, name, output = self._output(path)
        ranges = CheckedRanges(self.store, output, partial(self._forget_commit, key))
        return open_object(ranges, ObjectInfo(f"{key}/{name}", output.bytes, ""), first_bytes=1)

    def read_range(self, path: Path, start: int, stop: int, is_right: Callable[[bytes], bool]) -> bytes:
        """Return bytes [start, stop) of a task's file, in one request; `is_right` verifies them."""
        key, name = self._task_file(path)
        damaged = partial(self._forget_commit, key)
        try:
            return get_checked(self.store, f"{key}/{name}", (start, stop), is_right, damaged)
        except StoreError as error:
            raise OSError(errno.EIO, error.problem, error.where) from error

    def fetch(self, path: Path) -> None:
        """Fetch the file of a finished task to `path`, its path in the scratch folder."""
        temporary = self.borrow(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fsync_path(temporary)
        temporary.rename(path)

    def borrow(self, path: Path) -> Path:
        """Fetch the file of a finished task to a temporary path, which the caller removes, and return it."""
        self._unfinished.mkdir(exist_ok=True)
        number, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=self._unfinished)
        try:
            with self.open(path) as source, os.fdopen(number, "wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
        except BaseException:
            Path(name).unlink()
            raise
        return Path(name)

    def content_of(self, path: Path) -> str:
        """Return the xxh3-128 of a file, as recorded in its commit."""
        return self._output(path)[2].xxh3_128

    def key_of(self, path: Path) -> str:
        """Return the key in the store of a file of a finished task."""
        return "/".join(self._task_file(path))

    def _output(self, path: Path) -> tuple[str, str, Output]:
        """Return (task key, file name, committed output) of a file in the folder of a task."""
        key, name = self._task_file(path)
        output = _outputs(self, key).get(name)
        if output is None:
            raise FileNotFoundError(f"{self.place}/{key}/{name}: the task did not write this file")
        return key, name, output

    def _task_file(self, path: Path) -> tuple[str, str]:
        """Return (task key, file name) of a file in the folder of a task."""
        parts = path.relative_to(self.folder).parts
        return "/".join(parts[:2]), "/".join(parts[2:])

    def read_record(self, key: str) -> Record | None:
        """Return the record of a task, or None; a record that was read before is on this machine's disk."""
        folder = self.folder / key
        with suppress(OSError):
            if record := parse_record((folder / COMMIT_NAME).read_bytes(), folder, self.remote):
                return record
        with suppress(ObjectNotFoundError):
            data = self.store.get(f"{key}/{COMMIT_NAME}")
            if record := parse_record(data, folder, self.remote):
                self._keep(key, data)
                return record
        return None

    def _stored(self, key: str) -> Commit | None:
        """Return the commit in a task's record in the store, bypassing the cache, or None."""
        try:
            data = self.store.get(f"{key}/{COMMIT_NAME}")
        except ObjectNotFoundError:
            return None
        record = parse_record(data, self.folder / key, self.remote)
        return None if record is None else record.commit

    def _keep(self, key: str, record: bytes) -> None:
        """Cache a record in the scratch folder. No fsync is needed: a truncated record is fetched again."""
        if self.local is not None or not self.id:
            return
        file = self.folder / key / COMMIT_NAME
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{COMMIT_NAME}.{os.getpid()}-{os.urandom(4).hex()}")
        temporary.write_bytes(record)
        temporary.rename(file)

    def _forget_commit(self, key: str) -> None:
        """Remove the record of a task with damaged outputs, so that the task runs again and replaces them."""
        if self.id:  # an unclaimed work folder is read-only
            self.store.delete(f"{key}/{COMMIT_NAME}")
            (self.folder / key / COMMIT_NAME).unlink(missing_ok=True)

    def _delete(self, keys: Iterable[str]) -> None:
        for _ in self._each(self.store.delete, list(keys)):
            pass

    def _each(self, request: Callable[[str], T], keys: Iterable[str]) -> Iterator[T]:
        """Yield the result of `request` for each key, in order; requests to a store run concurrently."""
        if self.local is not None:
            yield from map(request, keys)
            return
        with ThreadPoolExecutor(_THREADS) as pool:
            yield from pool.map(request, keys)

    @contextmanager
    def _explained(self, what: str = "", *, advice: str = _RESUME) -> Iterator[None]:
        """Convert errors of the store into a BuildError with advice."""
        try:
            yield
        except (StoreError, OSError) as error:
            raise BuildError(f"{what}work folder {self.place}: {error}; {advice}") from error


def _without_gone(commit: Commit, sizes: Mapping[str, int]) -> Commit:
    """Return a commit that says which of its outputs that may be gone are not among these sizes."""
    absent = tuple(sorted(filter(may_be_gone, commit.outputs.keys() - sizes.keys())))
    return replace(commit, absent=absent) if absent else commit


@lru_cache(maxsize=_KEPT_RECORDS)
def _outputs(work: Work, key: str) -> Mapping[str, Output]:
    """Return the outputs of a finished task. Raises FileNotFoundError (not cached) if it has no record."""
    record = work.read_record(key)
    if record is None:
        raise FileNotFoundError(
            f"{work.place}/{key}/{COMMIT_NAME}: does not exist; was the work folder removed?"
        )
    return record.outputs


@lru_cache(maxsize=16)
def _connect(url: str, storage: StorageOptions | None, around: Callable[[Store], Store] | None) -> Store:
    if around is None:
        return connect(url, storage)
    return ResilientStore(around(open_store(url, storage)))


def run_task(task: Task, digest: str, work: Work) -> Commit:
    """Run a task, commit its outputs and return the commit. Workers call it; it needs no lock or lease."""
    work.prepare()
    temporary = work.temporary(f"{task.stage}.{task.name}")
    began = time.process_time()
    try:
        result = task.of.recorded(_call(task, temporary))
        outputs = _outputs_in(temporary)
        facts = facts_of(result, outputs)
        commit = Commit(task.stage, task.name, work.folder / task.key, digest, facts, remote=work.remote)
        if commit.has_ledger:
            commit.ledger().check(str(task))
        made = work.commit(task, temporary, commit, record_of(commit, task.deciding(), outputs))
        return replace(made, cpu_seconds=time.process_time() - began)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _call(task: Task, folder: Path) -> Any:
    """Call the work function of a task. If the task has a fallback, its own errors become TaskFailedError."""
    if task.fallback is None:
        return task.run(folder)
    try:
        return task.run(folder)
    except (OSError, StoreError, RecipeError, MissingExtraError, UnavailableError, DamagedRangeError):
        raise  # errors of the machine, a service or the recipe: other tasks would fail in the same way
    except Exception as error:
        text = str(error) if isinstance(error, ShardkitError) else f"{type(error).__name__}: {error}"
        raise TaskFailedError(f"task {task}: {text}") from error


def with_fallbacks(work: Work, tasks: Sequence[Task], found: Sequence[Commit | None]) -> list[Commit | None]:
    """Return `found`, the commits of `tasks`, plus commits of fallbacks that an earlier build ran instead."""
    commits = list(found)
    waiting = {
        number: task.fallback
        for number, (task, commit) in enumerate(zip(tasks, found, strict=True))
        if commit is None and task.fallback is not None
    }
    stages = sorted({fallback.stage.name for fallback in waiting.values()})
    failed = {(stage, commit.name) for stage in stages for _, commit in work.commits(stage)}
    stand_ins = {
        number: fallback.task(tasks[number])
        for number, fallback in waiting.items()
        if (fallback.stage.name, tasks[number].name) in failed
    }
    if stand_ins:
        for number, commit in zip(stand_ins, work.find(list(stand_ins.values())), strict=True):
            commits[number] = commit
    return commits


def _outputs_in(folder: Path) -> dict[str, Output]:
    """Return sizes and hashes of all files below `folder`, by name."""
    outputs = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            outputs[path.relative_to(folder).as_posix()] = hash_output(path)
    return outputs
