"""Segments: the commits of about 1,000 finished tasks in one object, so that few requests read them all.

    segments/<stage>/<hash>      three lines per commit: digest, name as JSON, counts and outputs as JSON

A driver writes segments while tasks finish. The next driver reads a million finished tasks with about a
thousand requests instead of a million.

A segment is a copy that may be lost. A task is finished if its own record exists: writing the record is the
atomic step, and the record, which also has the hashes of blocks, is kept. So a driver uses a commit in a
segment only if a listing shows the task's record. If a task is in no segment, it reads the record. A segment
is named by the hash of its content; if they do not match, the segment is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash

from shardkit.errors import BuildError
from shardkit.storage.store import ObjectChangedError, ObjectNotFoundError, Store, StoreError
from shardkit.writers.execution.artifacts import RemoteFiles
from shardkit.writers.execution.commit import Commit, task_key

_PREFIX = "segments/"
SEGMENT_RECORDS = 1000
_THREADS = 8
_LINES = 3  # lines per commit


class Segments:
    """Reads and writes the segments of a work folder in `store`, stage by stage, for one process.

    `remote` and `folder` are those of the commits: their files are in `remote`, and in `folder` after they
    were fetched. A segment has `records` commits; with 0, no segment is written.
    """

    def __init__(
        self, store: Store, folder: Path, remote: RemoteFiles | None, *, records: int = SEGMENT_RECORDS
    ) -> None:
        self._store, self._folder, self._remote, self._records = store, folder, remote, records
        self._covered: dict[str, set[str]] = {}  # stage -> digests of tasks in segments that were read
        self._waiting: dict[str, list[Commit]] = {}  # stage -> commits that are in no segment so far

    def read(self, stage: str) -> Iterator[Commit]:
        """Yield the commits in the segments of a stage. Raises BuildError if the store fails."""
        covered = self._covered.setdefault(stage, set())
        with self._explained(), ThreadPoolExecutor(_THREADS) as pool:
            keys = [info.key for info in self._store.list(f"{_PREFIX}{stage}/")]
            for at in range(0, len(keys), _THREADS):  # a few segments at a time, to bound memory
                for data in pool.map(self._fetch, keys[at : at + _THREADS]):
                    for commit in self._commits(stage, data):
                        covered.add(commit.digest)
                        yield commit

    def add(self, commit: Commit) -> None:
        """Queue a commit for a new segment, unless `read` found it in one; call once per commit."""
        if self._records and commit.digest not in self._covered.get(commit.stage, ()):
            self._waiting.setdefault(commit.stage, []).append(commit)

    def write(self, *, rest: bool = False) -> None:
        """Write queued commits as full segments, with `rest` also a smaller one. May raise BuildError."""
        for stage, commits in self._waiting.items():
            while len(commits) >= self._records or (rest and commits):
                data = b"".join(map(_lines, commits[: self._records]))
                key = f"{_PREFIX}{stage}/{xxhash.xxh3_128_hexdigest(data)}"
                with self._explained():
                    self._store.put(key, data)
                del commits[: self._records]

    def end(self, stages: Iterable[str]) -> None:
        """Drop what is in memory for these stages, including queued commits."""
        for stage in stages:
            self._covered.pop(stage, None)
            self._waiting.pop(stage, None)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            problem = f"work folder {self._store.url}: {error}"
            raise BuildError(
                f"{problem}; finished tasks are kept; run the same command again to continue"
            ) from error

    def _fetch(self, key: str) -> bytes:
        try:
            data = self._store.get(key)
        except (ObjectNotFoundError, ObjectChangedError):  # removed, or put again, while it was read
            return b""
        return data if xxhash.xxh3_128_hexdigest(data) == key.rpartition("/")[2] else b""

    def _commits(self, stage: str, data: bytes) -> Iterator[Commit]:
        lines = data.split(b"\n")
        for at in range(0, len(lines) - 1, _LINES):
            digest, name = lines[at].decode(), json.loads(lines[at + 1])
            folder = self._folder / task_key(stage, name, digest)
            yield Commit(stage, name, folder, digest, lines[at + 2], reused=True, remote=self._remote)


def _lines(commit: Commit) -> bytes:
    return b"%s\n%s\n%s\n" % (commit.digest.encode(), json.dumps(commit.name).encode(), commit.facts)
