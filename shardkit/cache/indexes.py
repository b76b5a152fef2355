"""Indexes in the cache folder: of remote datasets, of tars without an index, and of row files.

One process of a node fetches the index of a dataset, the others read it (`NodeIndexes`):

    FOLDER/shardkit-cache-1/indexes/DIGEST-OF-URL/index.json, dataset.json, ...   as they are in the store
                                                  index.bin    of a large index.json: opens at once
                                                  checked      when they were fetched, their hashes, and the
                                                               names of missing objects
                                                  lock         flocked by the process that fetches

The process that gets the lock first is the leader; the others do not ask the store. Processes of one node
that start together trust what a leader fetched within `trust_seconds`, unless a file was damaged since. A
process that runs alone trusts nothing and always fetches, so it sees when a dataset was replaced. If the
leader dies, the lock is free and the next process becomes the leader.

index.bin is mapped, so all processes of the node share one copy in memory. The leader has checked its
contents; the others compare checksums.

The process that scans a tar stores the result for the others (`TarIndexes`):

    FOLDER/shardkit-cache-1/tars/NAME        one file per tar, see `shardkit.formats.tar.members`
                                 NAME.lock   flocked by the process that scans the tar

What row files say about their groups, such as the footers of Parquet, is stored likewise
(`NodeIndexes.kept`, `shardkit.cache.kept_results`):

    FOLDER/shardkit-cache-1/rows/NAME        the hash of the rest, and compressed what was read
                                 NAME.lock   flocked by the process that reads it

A file is named by the object's URL and version (for a local file: its time, inode and size), so one that is
replaced is read again. Files appear by rename and are checked when they are read; they are not synced,
because damage by a power cut is detected and the file made again. If all files of a kind exceed
`MAX_TAR_BYTES` or `MAX_ROWS_BYTES`, the least recently used are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import BinaryIO, TypeVar

import zstandard

from shardkit.cache.folder import NO_ROOM, SUBFOLDER, explain_errors, make_subfolders
from shardkit.cache.kept_results import WAIT_SECONDS, KeptResults, trim
from shardkit.cache.protocol import CacheFolderError
from shardkit.errors import ShardError
from shardkit.files import load_json, open_regular, publish_bytes
from shardkit.formats.mds.index import TABLE_NAME, parse_index, read_table, table_bytes
from shardkit.formats.tar.members import Scanned, TarIndex, index_file_bytes, read_head, read_index
from shardkit.hashing import hash_bytes, hash_file
from shardkit.locks import FileLock
from shardkit.manifest import Manifest

_STATE_NAME = "checked"
_HASHES = ("xxh3_128",)
TRUST_SECONDS = 60.0  # age up to which an index fetched by another process is used; jobs start within it
MAX_TAR_BYTES = 16 << 30  # maximum size of the indexes of all tars together: 500 million members
MAX_ROWS_BYTES = 4 << 30  # maximum size of what all row files say about their groups, compressed
MAX_INDEX_BYTES = 1 << 30  # of one row file, as it is used

T = TypeVar("T")


class NodeIndexes:
    """The dataset indexes in one cache folder, which the processes of a node share."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        trust_seconds: float,
        wait_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Use the indexes in `folder`.

        `trust_seconds`: maximum age of an index fetched by another process that is used without asking the
        store. `wait_seconds`: maximum wait for a process that fetches, before fetching the index as well.
        """
        self._root = Path(folder).absolute()
        self._trust_seconds, self._wait_seconds, self._clock = trust_seconds, wait_seconds, clock

    def objects(
        self, url: str, names: Sequence[str], fetch: Callable[[], Mapping[str, bytes | None]]
    ) -> Mapping[str, bytes | Path | None]:
        """Return, by name, files with the objects `names` of the dataset at `url`; None for a missing object.

        `fetch` reads them from the store; one process at a time calls it, and its errors are raised here. If
        the disk has no room for the files, returns the fetched bytes instead.
        """
        fetch_once = cache(fetch)
        try:
            return self._objects(url, names, fetch_once)
        except CacheFolderError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_ROOM):
                raise
            return fetch_once()

    def _objects(
        self, url: str, names: Sequence[str], fetch: Callable[[], Mapping[str, bytes | None]]
    ) -> Mapping[str, Path | None]:
        with explain_errors(self._root):
            folder = self._folder(url)
            if (known := self._trusted(folder, names)) is not None:
                return known
            lock = FileLock(folder / "lock", keep=True)
            lock.acquire(self._wait_seconds)
        try:
            with explain_errors(self._root):
                if (known := self._trusted(folder, names)) is not None:
                    return known
            found = fetch()
            with explain_errors(self._root):
                return self._keep(folder, found)
        finally:
            lock.release()

    def index(self, file: Path, where: str) -> Manifest:
        """Read an index.json that `objects` returned, or the faster index.bin next to it, made if missing."""
        with explain_errors(self._root):
            if (table := read_table(file, is_proved=True)) is not None:
                return Manifest("mds", table, blocks=table.blocks)
            text = file.read_bytes()
            try:
                manifest = parse_index(where, text)
            except ShardError:
                # The file may have been damaged in transfer: let the next process ask the store again.
                (file.parent / _STATE_NAME).unlink(missing_ok=True)
                raise
            if (made := table_bytes(manifest.shards, text, manifest.blocks)) is not None:
                try:
                    publish_bytes(file.with_name(TABLE_NAME), made)
                except OSError as error:
                    if error.errno not in NO_ROOM:
                        raise
                    return manifest
                manifest = replace(manifest, shards=read_table(file, is_proved=True) or manifest.shards)
            return manifest

    def kept(self, origins: Sequence[str], make: Callable[[int], bytes], threads: int) -> KeptResults[bytes]:
        """Return what row files say about their groups, made by `make` for a number and kept on this node.

        `origins` are their URLs and versions.
        """
        with explain_errors(self._root):
            make_subfolders(self._root, ["rows"])
        return kept_indexes(
            self._root / SUBFOLDER / "rows", origins, make, threads, wait_seconds=self._wait_seconds
        )

    def _folder(self, url: str) -> Path:
        make_subfolders(self._root, ["indexes"])
        digest = hashlib.blake2b(url.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        folder = self._root / SUBFOLDER / "indexes" / digest
        folder.mkdir(exist_ok=True)
        return folder

    def _trusted(self, folder: Path, names: Sequence[str]) -> Mapping[str, Path | None] | None:
        """Return the files `names` if another process fetched them recently and none is damaged."""
        try:
            checked = load_json((folder / _STATE_NAME).read_bytes())
            age = self._clock() - checked["seconds"]
            there, missing = checked["there"], checked["missing"]
            if not 0 <= age < self._trust_seconds or not {*names} <= {*there, *missing}:
                return None
            found = {name: folder / name if name in there else None for name in names}
            is_whole = all(
                file is None or hash_file(file, _HASHES) == there[name] for name, file in found.items()
            )
            return found if is_whole else None
        except (FileNotFoundError, ShardError, ValueError, LookupError, TypeError, OverflowError):
            return None

    def _keep(self, folder: Path, found: Mapping[str, bytes | None]) -> Mapping[str, Path | None]:
        there = {name: hash_bytes(text, _HASHES) for name, text in found.items() if text is not None}
        for name, text in found.items():
            if text is not None:
                publish_bytes(folder / name, text)
        missing = [name for name in found if name not in there]
        state = {"seconds": self._clock(), "there": there, "missing": missing}
        publish_bytes(folder / _STATE_NAME, json.dumps(state).encode())
        return {name: folder / name if name in there else None for name in found}


@dataclass(frozen=True, slots=True)
class TarIndexes:
    """The indexes of a dataset's tars that are stored in a cache folder, by tar number. May be pickled."""

    folder: Path | None
    origins: Sequence[str]

    @classmethod
    def in_cache(
        cls, cache_folder: str | os.PathLike[str] | None, objects: Sequence[tuple[str, str]]
    ) -> TarIndexes:
        """Use the tar indexes in `cache_folder`, if given; `objects`: (URL, version) of each tar."""
        origins = [f"{url}\n{version}" for url, version in objects]
        if cache_folder is None:
            return cls(None, origins)
        folder = Path(cache_folder).absolute()
        with explain_errors(cache_folder):
            make_subfolders(folder, ["tars"])
        return cls(folder / SUBFOLDER / "tars", origins)

    def scanned(self, number: int) -> Scanned | None:
        """Return the manifest data from the stored scan of a tar; None if no scan of it is stored."""
        return self._read(number, read_head)

    def index(self, number: int) -> TarIndex | None:
        """Return the index of the members of a tar; None if no scan of the tar is stored."""
        found = self._read(number, read_index)
        if found is None:
            return None
        if (file := self._file(number)) is not None:
            with contextlib.suppress(OSError):
                os.utime(file, follow_symlinks=False)  # mark as used, so that `trim` removes it last
        return found[1]

    def _read(self, number: int, read: Callable[[BinaryIO, str], T]) -> T | None:
        """Return the result of `read` on a tar's index file; None if the file is missing or damaged."""
        file = self._file(number)
        if file is None:
            return None
        try:
            with os.fdopen(open_regular(file, follow_links=False), "rb") as handle:
                return read(handle, self.origins[number])
        except (OSError, ValueError, LookupError, TypeError, MemoryError):
            return None

    def keep(self, number: int, scanned: Scanned, index: TarIndex) -> None:
        """Store a tar's scan. Disk errors are ignored: the next process that opens the tar scans it again."""
        file = self._file(number)
        if file is None:
            return
        temporary = file.with_name(f"{file.name}.tmp-{os.getpid()}-{threading.get_ident()}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o664)
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(index_file_bytes(self.origins[number], scanned, index))
            temporary.replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def claim(self, number: int, timeout_seconds: float) -> FileLock | None:
        """Acquire the lock to scan a tar; return None if it is not free within `timeout_seconds`."""
        file = self._file(number)
        assert file is not None, "without a cache folder, no other process shares the scan"
        lock = FileLock(file.with_name(f"{file.name}.lock"))
        try:
            return lock if lock.acquire(timeout_seconds) else None
        except OSError:
            return None

    def trim(self, max_bytes: int = MAX_TAR_BYTES) -> None:
        """Remove the least recently used tar indexes of all datasets until the rest fit `max_bytes`."""
        if self.folder is None:
            return
        trim(self.folder, max_bytes)

    def _file(self, number: int) -> Path | None:
        if self.folder is None:
            return None
        return self.folder / _name_of(self.origins[number])


def kept_indexes(
    folder: Path | None,
    origins: Sequence[str],
    make: Callable[[int], bytes],
    threads: int,
    *,
    wait_seconds: float = WAIT_SECONDS,
) -> KeptResults[bytes]:
    """Return what row files say about their groups, made by `make` and kept in `folder` (None: nowhere).

    `origins` are their URLs and versions.
    """
    return KeptResults(
        folder,
        [_name_of(origin) for origin in origins],
        make,
        zstandard.compress,
        lambda number, data: zstandard.decompress(data, MAX_INDEX_BYTES),
        wait_seconds=wait_seconds,
        threads=threads,
        max_bytes=MAX_ROWS_BYTES,
    )


def _name_of(origin: str) -> str:
    return hashlib.blake2b(origin.encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()
