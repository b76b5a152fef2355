"""`download`: a dataset from a store, or another folder, into a folder.

A file is hashed while it arrives under a temporary name, synced, and renamed once its hash is the one that
index, card or the object's metadata state; bytes that are wrong are fetched again a few times. Files that are
there with the right hash are not fetched. The index comes last, and one download at a time fills a folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardkit.errors import ShardError
from shardkit.hashing import hash_file, new_hash
from shardkit.index import FileInfo
from shardkit.storage.local import LocalStore
from shardkit.storage.store import ObjectInfo, StorageOptions, Store, StoreError
from shardkit.storage.url import is_remote, local_path
from shardkit.units import format_bytes
from shardkit.upload.contents import (
    CONTENT_HASH,
    MAX_TRIES,
    METADATA_NAME,
    Contents,
    check_files,
    checkable_hash,
    find_contents,
)
from shardkit.upload.progress import Listener, listen
from shardkit.upload.publication import Publication, Settings
from shardkit.upload.report import TransferReport, make_report
from shardkit.upload.stores import transfer_store

__all__ = ["download"]

SPARE_BYTES = 64 << 20  # of the disk, for the index and for others
_READ_BYTES = 1 << 20
_PART = ".shardkit-part"
_LEFTOVERS = (f".*{_PART}", ".shardkit-put-*")  # of a killed download, and of a killed `LocalStore.put`


def download(
    source: str | os.PathLike[str] | Store,
    folder: str | os.PathLike[str],
    *,
    storage: StorageOptions | None = None,
    threads: int = 8,
    replace: bool = False,
    dry_run: bool = False,
    progress: bool | Listener = True,
) -> TransferReport:
    """Fetch the dataset at a URL or in a store into `folder`, which then holds the same files.

    Every file is compared with the hash that its index states. `threads` files travel at a time. A folder
    that holds another dataset, or other files of the same names, is refused unless `replace`; `dry_run` only
    tells what would be done. Raises ShardError, StoreError, TransferError; the same call goes on.
    """
    if is_remote(folder):
        raise StoreError(str(folder), "is not on this machine: shardkit download fills a local folder")
    start = time.monotonic()
    path = local_path(folder)
    if path.exists() and not path.is_dir():
        raise StoreError(str(path), "is not a folder; choose another")
    with transfer_store(source, storage) as store, listen(progress) as listener:
        contents, listing = check_files(store, _contents_of(store))
        settings = Settings(threads, replace=replace, dry_run=dry_run)
        target = LocalStore(path)
        with _locked(path, make=not dry_run):
            _check_space(path, target, contents)
            if not dry_run:
                _clear_leftovers(path)
            receiver = _Receiver(store, target, path, contents)
            outcome = Publication(target, contents, receiver, settings, listener).run()
        return make_report(
            contents, listing, outcome, settings, target=str(path), seconds=time.monotonic() - start
        )


class _Receiver:
    """Objects of a store into a folder."""

    def __init__(self, source: Store, target: LocalStore, folder: Path, contents: Contents) -> None:
        self._source, self._target, self._folder = source, target, folder
        self._contents = contents

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        """Whether the file has the stated hash. Without any, nobody can tell: it is fetched again."""
        expected = self._expected(file)
        if expected is None:
            return False
        name, digest = expected
        return hash_file(self._folder / file.basename, [name]) == {name: digest}

    def place(self, file: FileInfo) -> ObjectInfo:
        """Fetch a file; ShardError if its bytes are wrong again and again."""
        path = self._folder / file.basename
        temporary = path.with_name(f".{path.name}{_PART}")
        where = f"{self._source.url}/{file.basename}"
        expected = self._expected(file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(MAX_TRIES):
                got = self._fetch(file, temporary, CONTENT_HASH if expected is None else expected[0])
                if expected is None or got == expected[1]:
                    temporary.rename(path)
                    return self._target.head(file.basename)
            stated = "{} {}".format(*expected or ())
            raise ShardError(
                where, f"has {got}, stated is {stated}; it was fetched {MAX_TRIES} times: upload it again"
            )
        except OSError as error:
            raise StoreError(str(path), f"cannot be written: {error.strerror or error}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def read_back(self, file: FileInfo) -> None:
        """All bytes were hashed when they arrived."""

    def finish(self) -> None:
        """Make the names durable before the index is."""
        names = {self._folder / file.basename for file in self._contents.files}
        folders = {parent for name in names for parent in name.parents if parent.is_relative_to(self._folder)}
        for folder in sorted(folders):
            _sync(folder)

    def _fetch(self, file: FileInfo, temporary: Path, hash_name: str) -> str:
        hasher, buffer = new_hash(hash_name), memoryview(bytearray(_READ_BYTES))
        with self._source.open(file.basename) as body, temporary.open("wb") as handle:
            if body.info.bytes != file.bytes:
                where = f"{self._source.url}/{file.basename}"
                raise ShardError(where, "was replaced during the download; run it again")
            while count := body.readinto(buffer):
                hasher.update(buffer[:count])
                handle.write(buffer[:count])
            handle.flush()
            os.fsync(handle.fileno())
        return hasher.hexdigest()

    def _expected(self, file: FileInfo) -> tuple[str, str] | None:
        """(name, digest) of the quickest hash that index, card or the object itself states."""
        if name := checkable_hash(file):
            return name, file.hashes[name]
        digest = self._source.head(file.basename).metadata.get(METADATA_NAME)
        return None if digest is None else (CONTENT_HASH, digest)


def _contents_of(store: Store) -> Contents:
    found = find_contents(store)
    if len(found) > 1:
        raise ShardError(store.url, "has both index.json and shards.json; remove the one that is not meant")
    if not found:
        problem = "holds no complete dataset: there is neither index.json nor shards.json; name its folder"
        raise ShardError(store.url, problem)
    return found[0]


def _clear_leftovers(folder: Path) -> None:
    for pattern in _LEFTOVERS:
        for path in [*folder.rglob(pattern)]:
            path.unlink(missing_ok=True)


def _check_space(folder: Path, target: LocalStore, contents: Contents) -> None:
    """StoreError before anything is fetched that the disk cannot hold."""
    there = {info.key: info.bytes for info in target.list()}
    needed = sum(max(0, file.bytes - there.get(file.basename, 0)) for file in contents.files)
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed + SPARE_BYTES > free:
        problem = f"{format_bytes(needed)} are to come, and the disk has {format_bytes(free)} free"
        raise StoreError(str(folder), f"{problem}; choose another folder")


@contextmanager
def _locked(folder: Path, *, make: bool) -> Iterator[None]:
    """One download at a time: a lock on the folder itself, which ends with the process and leaves no file."""
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    elif not folder.exists():
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(str(folder), "another download is filling this folder; wait for it") from None
        except OSError:
            pass  # some network file systems cannot lock a folder
        yield
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
