"""A work folder in a store (S3): what machines share that have no file system in common.

    commits/<stage>/<task>.<digest>.json     one PUT with If-None-Match: the atomic step
    data/<stage>/<task>.<digest>/<file>      outputs, put before it
    sharing/                                 who is at what

Every machine has a scratch folder, for what its running tasks write, for records, and for small files that
are read as files; it may be deleted whenever no build runs there. All else is read from the store by ranges
(`open`), each block of which is checked against the hash in the commit: a client does not check ranges.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import xxhash

from shardkit.errors import BuildError
from shardkit.index import publish_bytes
from shardkit.storage.errors import ObjectExistsError, ObjectNotFoundError, StoreError
from shardkit.storage.object_file import open_object
from shardkit.storage.options import StorageOptions
from shardkit.storage.resilient import ResilientStore, connect
from shardkit.storage.store import ObjectInfo, Store
from shardkit.writers.execution import work_files
from shardkit.writers.execution.checked_ranges import CheckedRanges
from shardkit.writers.execution.prefixed_store import PrefixedStore
from shardkit.writers.execution.task import Commit, Output, Task, parse_commit
from shardkit.writers.execution.work import check_same

__all__ = ["StoreWork", "default_scratch"]

_THREADS = 8
_READ_THREADS = 16  # records are small: waiting only
_MARKER = "shardkit-work.txt"
_MARKER_TEXT = b"Intermediate files of `shardkit build`. Delete this folder when no build needs it.\n"
_COPY_BYTES = 4 << 20


def default_scratch(url: str) -> Path:
    """Below the system's temporary folder ($TMPDIR), one for each user and work folder."""
    name = xxhash.xxh3_64_hexdigest(url.rstrip("/"))
    return Path(tempfile.gettempdir()) / f"shardkit-{os.getuid()}" / name


@dataclass(frozen=True)
class StoreWork:
    """`folder` is the scratch folder, at the same path on all machines. `around` wraps the store (tests)."""

    url: str
    folder: Path
    storage: StorageOptions | None = None
    session: str = "build"
    around: Callable[[Store], Store] | None = None

    hashes_blocks = True

    @property
    def place(self) -> str:
        return self.url

    @property
    def store(self) -> Store:
        """Retries what may pass; shared by all of this process."""
        return _connect(self.url, self.storage, self.around)

    @property
    def sharing(self) -> Store:
        return PrefixedStore(self.store, "sharing/")

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        work_files.mount(self)

    def claim_place(self) -> None:
        """See that the store can be written and holds nothing else; BuildError."""
        try:
            first = next(iter(self.store.list()), None)
            if first is None:
                self.store.put(_MARKER, _MARKER_TEXT)
            elif not any(info.key == _MARKER for info in self.store.list(_MARKER)):
                problem = f"holds objects that no build wrote ({first.key}); set another `work` folder"
                raise BuildError(f"{self.url}: {problem}")
        except StoreError as error:
            raise BuildError(f"{self.url}: cannot be used as work folder: {error}") from error

    def temporary(self, task: Task) -> Path:
        parent = self.folder / "unfinished" / self.session
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{task.stage}.{task.name}.", dir=parent))

    def commit(self, task: Task, temporary: Path, commit: Commit, record: bytes) -> Commit:
        prefix = f"data/{task.key}/"
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda name: self.store.put(prefix + name, temporary / name), commit.outputs))
        try:
            self.store.put(_record_key(task.key), record, if_absent=True)
        except ObjectExistsError:
            theirs = self._fetch_commit(task.key)
            if theirs is None:
                raise BuildError(f"{self.url}/{_record_key(task.key)}: cannot be read; remove it") from None
            check_same(commit, theirs)
            commit = replace(theirs, reused=False)
        self._keep(task.key, record)
        return commit

    def find(self, tasks: Sequence[Task]) -> list[Commit | None]:
        wanted = {task.key: task for task in tasks}
        found: dict[str, Commit] = {}
        single = len(wanted) == 1  # then two small requests do
        for part in sorted({task.key if single else f"{task.stage}/" for task in tasks}):
            present = sorted(key for key in self._keys(part) if key in wanted)
            sizes = {info.key: info.bytes for info in self.store.list(f"data/{part}")} if present else {}
            for key, commit in zip(present, self._read(present), strict=True):
                if commit is None or commit.digest != wanted[key].digest:
                    continue
                if all(sizes.get(f"data/{key}/{name}") == o.bytes for name, o in commit.outputs.items()):
                    found[key] = commit
                else:
                    self.forget(commit)
        return [found.get(task.key) for task in tasks]

    def commits(self, stage: str | None = None) -> Iterator[tuple[str, Commit]]:
        keys = list(self._keys("" if stage is None else f"{stage}/"))
        for key, commit in zip(keys, self._read(keys), strict=True):
            if commit is not None:
                yield key, commit

    def forget(self, commit: Commit) -> None:
        key = commit.folder.relative_to(self.folder).as_posix()
        self.store.delete(_record_key(key))
        shutil.rmtree(commit.folder, ignore_errors=True)
        self._delete(info.key for info in self.store.list(f"data/{key}/"))

    def damaged_output(self, commit: Commit) -> str | None:
        def read(name: str) -> str | None:
            try:
                with work_files.open_file(commit.folder / name) as file:
                    while file.read(_COPY_BYTES):
                        pass
                return None
            except OSError:  # its blocks are checked as they are read
                return name

        with ThreadPoolExecutor(_THREADS) as pool:
            return next((name for name in pool.map(read, commit.outputs) if name), None)

    def free_bytes(self) -> int | None:
        return None

    def remove(self) -> None:
        for part in ("commits/", "data/", "sharing/", _MARKER):
            self._delete(info.key for info in self.store.list(part))
        shutil.rmtree(self.folder, ignore_errors=True)

    def open(self, path: Path) -> io.BufferedReader:
        """A file of a finished task, read by ranges and checked. OSError, also where there is none."""
        key, output = self._output(path)
        info = ObjectInfo(key, output.bytes, "")
        return open_object(CheckedRanges(self.store, output), info)

    def fetch(self, path: Path) -> None:
        """Make a file of the store one of this machine, at `path` in the scratch folder."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.open(path) as source, temporary.open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _output(self, path: Path) -> tuple[str, Output]:
        """(key, what was committed) of a file in the folder of a task."""
        parts = path.relative_to(self.folder).parts
        key, name = "/".join(parts[:2]), "/".join(parts[2:])
        commit = _committed(self, key)
        if commit is None or name not in commit.outputs:
            raise FileNotFoundError(
                f"{self.url}/data/{key}/{name}: is not there; was the work folder removed?"
            )
        return f"data/{key}/{name}", commit.outputs[name]

    def _keys(self, start: str) -> Iterator[str]:
        """Keys of the tasks that have a record, of those that start so."""
        for info in self.store.list(f"commits/{start}"):
            yield info.key.removeprefix("commits/").removesuffix(".json")

    def _read(self, keys: Sequence[str]) -> list[Commit | None]:
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            return list(pool.map(self.read_commit, keys))

    def read_commit(self, key: str) -> Commit | None:
        """The record of a task, from the scratch folder if it was read before."""
        folder = self.folder / key
        try:
            return parse_commit((folder / "commit.json").read_bytes(), folder)
        except OSError:
            return self._fetch_commit(key)

    def _fetch_commit(self, key: str) -> Commit | None:
        try:
            record = self.store.get(_record_key(key))
        except ObjectNotFoundError:
            return None
        self._keep(key, record)
        return parse_commit(record, self.folder / key)

    def _keep(self, key: str, record: bytes) -> None:
        folder = self.folder / key
        folder.mkdir(parents=True, exist_ok=True)
        publish_bytes(folder / "commit.json", record)

    def _delete(self, keys: Iterable[str]) -> None:
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            list(pool.map(self.store.delete, list(keys)))


def _record_key(key: str) -> str:
    return f"commits/{key}.json"


@lru_cache(maxsize=1 << 16)
def _committed(work: StoreWork, key: str) -> Commit | None:
    """Records do not change once they are there."""
    return work.read_commit(key)


@lru_cache(maxsize=16)
def _connect(url: str, storage: StorageOptions | None, around: Callable[[Store], Store] | None) -> Store:
    if around is None:
        return connect(url, storage)
    from shardkit.storage.url import open_store

    return ResilientStore(around(open_store(url, storage)))
