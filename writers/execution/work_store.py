"""A work folder in a store (S3), for machines without a common file system.

    shardkit-work.txt                        marker with the folder's random id
    commits/<stage>/<task>.<digest>.json     one PUT with If-None-Match: the atomic step
    data/<stage>/<task>.<digest>/<file>      outputs, put before the commit
    segments/<stage>/<hash>                  copies of about 1,000 commits each (segments.py)
    notes/                                   about the whole build: where its input files are cut
    lease/                                   the driver's lease

Every machine has a scratch folder (`scratch.py`) for the files of running tasks, for commit records, and for
small files that are fetched whole; it may be deleted whenever no build runs there. Everything else is read
from the store by ranges (`CheckedRanges`): neither HTTP nor S3 clients verify a range, and a flipped byte
would go into the dataset in silence, so each block is compared with its hash in the commit. Runs of the
exchange hold hashes themselves, and are read by exact ranges (`StoreWork.read_range`). A process caches
up to `CACHE_BYTES` of blocks from short reads, because tasks that read a little of many files come back to
their ends and directories. If an output is damaged, the record of its task is removed, so that the next run
makes it again.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path

import xxhash

from shardkit.errors import BuildError
from shardkit.files import fsync_path
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
from shardkit.storage.threads import remake_after_fork
from shardkit.writers.execution import scratch
from shardkit.writers.execution.artifacts import Artifact
from shardkit.writers.execution.segments import PREFIX as SEGMENTS
from shardkit.writers.execution.segments import SEGMENT_RECORDS, Segments
from shardkit.writers.execution.task import (
    BLOCK_BYTES,
    Commit,
    Output,
    Record,
    Task,
    block_hashes,
    parse_record,
)
from shardkit.writers.execution.work import check_same

__all__ = ["CACHE_BYTES", "CheckedRanges", "DamagedFileError", "StoreWork"]

CACHE_BYTES = 16 << 20

_KEPT_AT_ONCE = 2  # blocks; longer reads are sequential and do not come back

_TRIES = 3  # damage in transit goes away, damage in the store stays


class DamagedFileError(StoreError):
    """A file of a finished task is gone, or differs from its commit."""


class CheckedRanges:
    """The `get` of a store for one file, checked; `damaged` is called before a DamagedFileError is raised."""

    def __init__(self, store: Store, output: Output, damaged: Callable[[], None] = lambda: None) -> None:
        self._store, self._output, self._damaged = store, output, damaged
        self._hashes = block_hashes(output)  # empty: one block, whose hash is the file's

    def get(self, key: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> bytes:
        """Bytes from `start` to `stop`, or up to the end of the block that `stop` lies in."""
        size = self._output.bytes
        stop = size if stop is None else min(stop, size)
        if start >= stop:
            return b""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        place = self._store.url, key, self._output.xxh3_128
        if (kept := _cache.get(place, first)) is not None:  # the caller asks for the rest next
            return kept[start - first * BLOCK_BYTES :]
        data = self._fetch(key, first * BLOCK_BYTES, min(last * BLOCK_BYTES, size))
        if last - first <= _KEPT_AT_ONCE:
            for number in range(first, last):
                at = (number - first) * BLOCK_BYTES
                _cache.put(place, number, data[at : at + BLOCK_BYTES])
        return data[start - first * BLOCK_BYTES :]

    def _fetch(self, key: str, start: int, stop: int) -> bytes:
        is_right = partial(self._is_right, start=start)
        return _get_checked(self._store, key, (start, stop), is_right, self._damaged)

    def _is_right(self, data: bytes, start: int) -> bool:
        if not self._hashes:
            return xxhash.xxh3_128_hexdigest(data) == self._output.xxh3_128
        view = memoryview(data)
        return all(
            xxhash.xxh3_64_digest(view[at : at + BLOCK_BYTES]) == self._hashes[(start + at) // BLOCK_BYTES]
            for at in range(0, len(data), BLOCK_BYTES)
        )


def _get_checked(
    store: Store,
    key: str,
    bytes_range: tuple[int, int],
    is_right: Callable[[bytes], bool],
    damaged: Callable[[], None],
) -> bytes:
    """A range of an object; DamagedFileError, after a call of `damaged`, unless it can be read rightly."""
    start, stop = bytes_range
    problem = f"bytes {start:,} to {stop:,} differ from the commit in {_TRIES} attempts"
    for _ in range(_TRIES):
        try:
            data = store.get(key, start, stop)
        except ObjectNotFoundError:
            problem = "is gone"
            break
        except StoreError as error:
            if error.status != 416:  # shorter than committed
                raise
            problem = "is shorter than its commit says"
            break
        if len(data) == stop - start and is_right(data):
            return data
    found = DamagedFileError(f"{store.url}/{key}", f"{problem}; the next run repeats its task")
    try:
        damaged()
    except StoreError as failure:
        found.add_note(f"the task could not be removed: {failure}")
    raise found


_Place = tuple[str, str, str]  # store, key, hash of the whole


class _Cache:
    """The least recently used blocks are dropped first."""

    def __init__(self) -> None:
        self.after_fork()
        remake_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[_Place, int], bytes] = OrderedDict()
        self._bytes = 0

    def get(self, place: _Place, number: int) -> bytes | None:
        with self._lock:
            block = self._blocks.get((place, number))
            if block is not None:
                self._blocks.move_to_end((place, number))
            return block

    def put(self, place: _Place, number: int, block: bytes) -> None:
        with self._lock:
            self._bytes += len(block) - len(self._blocks.pop((place, number), b""))
            self._blocks[place, number] = block
            while self._bytes > CACHE_BYTES:
                self._bytes -= len(self._blocks.popitem(last=False)[1])


_cache = _Cache()


_THREADS = 8

_READ_THREADS = 16  # records are small: latency only

_MARKER = "shardkit-work.txt"

_MARKER_TEXT = b"Intermediate files of `shardkit build`. Delete this folder when no build needs it.\n"

_ID_BYTES = 8

_COPY_BYTES = 4 << 20

_KEPT_RECORDS = 4096  # of recently read tasks: some kilobytes each

_RESUME = "finished tasks are kept; the same command continues"


@dataclass(frozen=True)
class StoreWork:
    """`folder` is in the scratch folder, at the same path on all machines. `around` wraps the store (tests).

    Builds use the result of `claimed`; without it nothing is cached on this machine.
    """

    url: str
    folder: Path
    storage: StorageOptions | None = None
    session: str = "build"
    around: Callable[[Store], Store] | None = None
    id: str = ""
    segment_records: int = SEGMENT_RECORDS

    hashes_blocks = True

    @property
    def place(self) -> str:
        return self.url

    @property
    def remote(self) -> StoreWork:
        return self

    @property
    def store(self) -> Store:
        """The store, with retries; one object for the whole process."""
        return _connect(self.url, self.storage, self.around)

    @property
    def lease_store(self) -> Store:
        """Where the driver keeps its lease: a heartbeat waits for nothing else."""
        store = self.store
        return store.urgent if isinstance(store, ResilientStore) else store

    def prepare(self) -> None:
        scratch.prepare(self.folder)

    def claimed(self, session: str) -> StoreWork:
        """The same with the folder's id, created if necessary; BuildError if it is not a work folder.

        Scratch folders are named after the id, so that what a machine has cached of a removed folder is never
        used for a new one at the same place.
        """
        with self._explained():
            if next(iter(self.store.list()), None) is None:
                text = _MARKER_TEXT + b"id: " + os.urandom(_ID_BYTES).hex().encode() + b"\n"
                with suppress(ObjectExistsError):
                    self.store.put(_MARKER, text, if_absent=True)
            try:
                text = self.store.get(_MARKER)
            except ObjectNotFoundError:
                first = next(iter(self.store.list()), None)
                problem = "was removed meanwhile"
                if first is not None:
                    problem = f"contains objects that no build wrote ({first.key}); set another `work` folder"
                raise BuildError(f"{self.url}: {problem}") from None
        _, is_right, rest = text.partition(b"id: ")
        if not is_right or not (id := rest.strip().decode(errors="replace")).isalnum():
            raise BuildError(f"{self.url}/{_MARKER}: cannot be read; remove the work folder")
        return replace(self, folder=scratch.folder_of(self.folder, id), id=id, session=session)

    def temporary(self, task: Task) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"{task.stage}.{task.name}.", dir=self._unfinished()))

    def _unfinished(self) -> Path:
        folder = scratch.unfinished(self.folder) / self.session
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit(self, task: Task, temporary: Path, commit: Commit, record: bytes) -> Commit:
        with self._explained(f"task {task}: "):
            theirs = self._fetch_commit(task.key)
            if theirs is None:
                prefix = f"data/{task.key}/"
                with ThreadPoolExecutor(_THREADS) as pool:
                    list(
                        pool.map(lambda name: self.store.put(prefix + name, temporary / name), commit.outputs)
                    )
                try:
                    self.store.put(_record_key(task.key), record, if_absent=True)
                except ObjectExistsError:
                    theirs = self._fetch_commit(task.key)
                    if theirs is None:  # gone again, or unreadable: of another version, or truncated
                        self.store.put(_record_key(task.key), record)
                if theirs is None:
                    self._keep(task.key, record)
                    return commit
        check_same(commit, theirs)
        return theirs

    def find(self, tasks: Sequence[Task], segments: Segments | None = None) -> list[Commit | None]:
        """As the contract says; commits come from `segments` as far as these have them."""
        segments = self.segments() if segments is None else segments
        with self._explained():
            if len(tasks) == 1:  # two small requests
                found = self._read([tasks[0].key])
            else:
                found = {}
                for stage in sorted({task.stage for task in tasks}):
                    listed = set(self._keys(f"{stage}/"))
                    present = {task.key for task in tasks if task.key in listed} if listed else listed
                    found |= self._read_stage(stage, present, segments)
            for key in self._incomplete(found):
                del found[key]
                self._disown(key)
        return _of_tasks(tasks, found)

    def commits(self, stage: str | None = None) -> Iterator[tuple[str, Commit]]:
        with self._explained():
            stages: dict[str, set[str]] = {}
            for key in self._keys("" if stage is None else f"{stage}/"):
                stages.setdefault(key.partition("/")[0], set()).add(key)
            for name, present in stages.items():
                yield from sorted(self._read_stage(name, present, self.segments()).items())

    def records(self, stage: str) -> Iterator[Record]:
        with self._explained():
            keys = list(self._keys(f"{stage}/"))
            with ThreadPoolExecutor(_READ_THREADS) as pool:
                yield from filter(None, pool.map(self.read_record, keys))

    def segments(self) -> Segments:
        """The segments of this work folder, for one reader or writer."""
        return Segments(self.store, self.folder, self, records=self.segment_records)

    def _read_stage(self, stage: str, present: set[str], segments: Segments) -> dict[str, Commit]:
        """{key: commit} of tasks that have a record, from segments and, what these lack, from records."""
        if not present:
            return {}
        found = {commit.key: commit for commit in segments.read(stage) if commit.key in present}
        return found | self._read(sorted(present - found.keys()))

    def _read(self, keys: Sequence[str]) -> dict[str, Commit]:
        """{key: commit}, each from its record."""
        if not keys:
            return {}
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            commits = pool.map(self._fetch_commit, keys)
            return {key: commit for key, commit in zip(keys, commits, strict=True) if commit is not None}

    def _incomplete(self, found: Mapping[str, Commit]) -> list[str]:
        """Keys of tasks of which an output is missing or has another size: one listing a stage."""
        parts = {f"{key.partition('/')[0]}/" for key in found} if len(found) > 1 else {f"{k}/" for k in found}
        whole = set()
        for part in sorted(parts):
            listed = ((info.key.split("/", 3), info.bytes) for info in self.store.list(f"data/{part}"))
            for key, files in groupby(listed, lambda entry: "/".join(entry[0][1:3])):
                if key in found:
                    sizes = {names[3]: size for names, size in files}
                    outputs = found[key].outputs
                    if all(sizes.get(name) == output.bytes for name, output in outputs.items()):
                        whole.add(key)
        return [key for key, commit in found.items() if key not in whole and commit.outputs]

    def forget(self, commit: Commit) -> None:
        with self._explained():
            self._disown(commit.key)
            self._delete(info.key for info in self.store.list(f"data/{commit.key}/"))
        shutil.rmtree(commit.folder, ignore_errors=True)

    def damaged_output(self, commit: Commit) -> str | None:
        def read(name: str) -> str | None:
            try:
                with (Artifact(commit.folder, self) / name).open() as file:
                    while file.read(_COPY_BYTES):
                        pass
            except OSError as error:
                if isinstance(error.__cause__, DamagedFileError):
                    return name
                raise
            return None

        with self._explained(), ThreadPoolExecutor(_THREADS) as pool:
            return next((name for name in pool.map(read, commit.outputs) if name), None)

    def read_note(self, name: str) -> bytes | None:
        with self._explained():
            try:
                return self.store.get(f"notes/{name}")
            except ObjectNotFoundError:
                return None

    def write_note(self, name: str, data: bytes) -> None:
        with self._explained():
            self.store.put(f"notes/{name}", data)

    def free_bytes(self) -> int | None:
        return None

    def remove(self) -> None:
        with self._explained():
            for part in ("commits/", "data/", SEGMENTS, "notes/", "lease/", _MARKER):
                self._delete(info.key for info in self.store.list(part))
        shutil.rmtree(self.folder, ignore_errors=True)

    def open(self, path: Path) -> io.BufferedReader:
        """A file of a finished task, read by checked ranges. OSError, also if there is none."""
        key, name, output = self._output(path)
        ranges = CheckedRanges(self.store, output, partial(self._disown, key))
        return open_object(ranges, ObjectInfo(f"data/{key}/{name}", output.bytes, ""), first_bytes=1)

    def read_range(self, path: Path, start: int, stop: int, is_right: Callable[[bytes], bool]) -> bytes:
        """Bytes [start, stop) of a file of a finished task, in one request, checked by the caller's hash."""
        key, name = self._task_file(path)
        damaged = partial(self._disown, key)
        try:
            return _get_checked(self.store, f"data/{key}/{name}", (start, stop), is_right, damaged)
        except StoreError as error:
            raise OSError(errno.EIO, error.problem, error.where) from error

    def fetch(self, path: Path) -> None:
        """Fetch a file of the store to `path` in the scratch folder."""
        temporary = self.borrow(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fsync_path(temporary)
        temporary.rename(path)

    def borrow(self, path: Path) -> Path:
        """Fetch a file to a temporary path, which the caller removes."""
        number, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=self._unfinished())
        try:
            with self.open(path) as source, os.fdopen(number, "wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
        except BaseException:
            Path(name).unlink()
            raise
        return Path(name)

    def content_of(self, path: Path) -> str:
        """The xxh3-128 of a file in its commit."""
        return self._output(path)[2].xxh3_128

    def _output(self, path: Path) -> tuple[str, str, Output]:
        """(task key, file name, committed output) of a file in the folder of a task."""
        key, name = self._task_file(path)
        output = _outputs(self, key).get(name)
        if output is None:
            raise FileNotFoundError(f"{self.url}/data/{key}/{name}: no task wrote such a file")
        return key, name, output

    def _task_file(self, path: Path) -> tuple[str, str]:
        """(task key, file name) of a file in the folder of a task."""
        parts = path.relative_to(self.folder).parts
        return "/".join(parts[:2]), "/".join(parts[2:])

    def _keys(self, start: str) -> Iterator[str]:
        """Keys of the tasks that have a record, of those that start with `start`."""
        for info in self.store.list(f"commits/{start}"):
            yield info.key.removeprefix("commits/").removesuffix(".json")

    def read_record(self, key: str) -> Record | None:
        """The record of a task, from the scratch folder if it was read before."""
        with suppress(OSError):
            if record := parse_record((self.folder / key / _RECORD).read_bytes(), self.folder / key, self):
                return record
        with suppress(ObjectNotFoundError):
            data = self.store.get(_record_key(key))
            if record := parse_record(data, self.folder / key, self):
                self._keep(key, data)
                return record
        return None

    def _fetch_commit(self, key: str) -> Commit | None:
        """The commit in a task's record, as it is in the store now."""
        try:
            record = parse_record(self.store.get(_record_key(key)), self.folder / key, self)
        except ObjectNotFoundError:
            return None
        return None if record is None else record.commit

    def _keep(self, key: str, record: bytes) -> None:
        """Cache a record on this machine. Not synced: a truncated one is fetched again."""
        if not self.id:
            return
        folder = self.folder / key
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{_RECORD}.{os.getpid()}-{os.urandom(4).hex()}"
        temporary.write_bytes(record)
        temporary.rename(folder / _RECORD)

    def _disown(self, key: str) -> None:
        """Remove the record of a task whose outputs differ from it; the next run overwrites them."""
        if not self.id:  # read only
            return
        self.store.delete(_record_key(key))
        (self.folder / key / _RECORD).unlink(missing_ok=True)

    def _delete(self, keys: Iterable[str]) -> None:
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            list(pool.map(self.store.delete, list(keys)))

    @contextmanager
    def _explained(self, what: str = "") -> Iterator[None]:
        """Turn errors of the store into a BuildError that says what to do."""
        try:
            yield
        except (StoreError, OSError) as error:
            raise BuildError(f"{what}work folder {self.url}: {error}; {_RESUME}") from error


_RECORD = "commit.json"


def _record_key(key: str) -> str:
    return f"commits/{key}.json"


@lru_cache(maxsize=_KEPT_RECORDS)
def _outputs(work: StoreWork, key: str) -> Mapping[str, Output]:
    """Outputs of a finished task. FileNotFoundError, which is not cached, if it is not finished."""
    record = work.read_record(key)
    if record is None:
        raise FileNotFoundError(f"{work.url}/{_record_key(key)}: is gone; was the work folder removed?")
    return record.outputs


def _of_tasks(tasks: Sequence[Task], found: Mapping[str, Commit]) -> list[Commit | None]:
    commits = (found.get(task.key) for task in tasks)
    return [
        commit if commit is not None and commit.digest == task.digest else None
        for commit, task in zip(commits, tasks, strict=True)
    ]


@lru_cache(maxsize=16)
def _connect(url: str, storage: StorageOptions | None, around: Callable[[Store], Store] | None) -> Store:
    if around is None:
        return connect(url, storage)
    from shardkit.storage.url import open_store

    return ResilientStore(around(open_store(url, storage)))
