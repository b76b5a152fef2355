"""Transport of a dataset's files: sent to a store, received from one, or placed in a folder.

A `Sender` reads each file and compares it with the hash in index or card before sending it, so damaged files
are not sent; a file that changes meanwhile is an error. Each object has the xxh3-128 of its bytes in its
metadata: the next run compares that instead of sending again. If a store keeps no metadata, the object is
read instead. Memory: at most 64 MiB (four parts) per file that is being sent to S3, half a gigabyte with 8
threads.

A `CommitSender` sends to a store that writes in commits (the Hugging Face Hub), a thousand files per commit.
Existing files are recognized by their version, which is a hash of the content, so nothing is read back.

A `Receiver` hashes each file while it arrives under a temporary name, syncs it, and renames it if the hash is
the one in index, card or the object's metadata; files with a wrong hash are fetched again a few times. A
`Placer` gives files of this machine their names in a folder, by hard links, copies or renames. Only one
process at a time writes a dataset into a folder (`locked_folder`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from errno import ENOLCK, ENOSYS, ENOTSUP
from pathlib import Path
from typing import Protocol

from shardkit.errors import ShardError
from shardkit.files import PART_SUFFIX, link_or_copy, make_folder, part_of
from shardkit.hashing import hash_bytes, hash_file, new_hash
from shardkit.locks import held_file
from shardkit.manifest import FileInfo
from shardkit.publish.contents import (
    CONTENT_HASH,
    INDEX_NAMES,
    LOCK_NAME,
    MARKER_NAME,
    MAX_TRIES,
    checkable_hash,
)
from shardkit.publish.publication import RefusedError, run_all
from shardkit.storage.hub import content_version
from shardkit.storage.local import LocalStore
from shardkit.storage.resilient import connect
from shardkit.storage.store import (
    METADATA_NAME,
    CommitStore,
    ObjectInfo,
    ObjectNotFoundError,
    StorageOptions,
    Store,
    StoreError,
    commits_of,
    hash_object,
)
from shardkit.storage.url import is_remote, open_store

COMMIT_FILES = 1000  # files per commit: the maximum that the Hub recommends; it limits commits per hour
_COMMIT_THREADS = 8  # maximum number of files of a commit that are hashed in parallel
_STAGED_BYTES = 16 << 30  # maximum bytes of a commit's fetched files on the local disk
_READ_BYTES = 1 << 20
_LEFTOVERS = (f".*{PART_SUFFIX}", ".shardkit-put-*")  # temporary files of transports and `LocalStore.put`


class StagedFile(Protocol):
    """A file that an earlier stage made, on this machine or in a store."""

    def borrowed(self) -> AbstractContextManager[Path]:
        """Context manager: fetch the file if necessary, and yield a local path. Raises OSError on failure."""

    def committed_hash(self) -> str | None:
        """Return the xxh3-128 of the file's bytes if it is known without reading them, else None."""


class LocalFiles:
    """The files of a dataset by name: local paths, bytes, or `StagedFile`s that may be in a store."""

    def __init__(self, data: Mapping[str, Path | bytes | StagedFile]) -> None:
        self._data = data

    @contextmanager
    def open(self, name: str) -> Iterator[Path | bytes]:
        """Yield the file's bytes, or a local path that is valid inside the `with` block.

        Raises ShardError if the file cannot be fetched.
        """
        data = self._data[name]
        if isinstance(data, bytes | Path):
            yield data
            return
        with ExitStack() as stack:
            try:
                path = stack.enter_context(data.borrowed())
            except OSError as error:
                where = error.filename or data  # the object's URL if the file is in a store
                raise ShardError(str(where), f"cannot be read: {error.strerror or error}") from error
            yield path

    def is_staged(self, name: str) -> bool:
        """Return whether a file may have to be fetched before it can be read."""
        return not isinstance(self._data[name], bytes | Path)

    def known_digest(self, name: str) -> str | None:
        """Return the xxh3-128 of a file if it is known without reading it, else None."""
        data = self._data[name]
        return None if isinstance(data, bytes | Path) else data.committed_hash()


class Sender:
    """Sends files of this machine to a store."""

    def __init__(self, target: Store, files: LocalFiles) -> None:
        self._target, self._files = target, files
        self._digests: dict[str, str] = {}

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        """Return whether the target's object has the file's xxh3-128, by its metadata or else its bytes."""
        if known := self._files.known_digest(file.basename):
            self._digests.setdefault(file.basename, known)  # a fetched file is verified when it is fetched
        digest = self._digest(file)
        try:
            info = self._target.head(file.basename)
            if info.bytes != file.bytes or info.version != found.version:
                return False
            kept = info.metadata.get(METADATA_NAME)
            return (self._hash_of_object(file) if kept is None else kept) == digest
        except ObjectNotFoundError:
            return False

    def place_together(self, files: Sequence[FileInfo]) -> Iterable[Mapping[str, ObjectInfo]]:
        return ()

    def place(self, file: FileInfo) -> ObjectInfo:
        """Send a file. Raises ShardError if it is damaged, or changes while it is sent."""
        name = file.basename
        with self._files.open(name) as data:
            before = _state(data)
            if name not in self._digests:
                known = self._files.known_digest(name)  # if known, the file was verified when it was fetched
                self._digests[name] = known or _checked_digest(file, data)
            info = self._target.put(name, data, metadata={METADATA_NAME: self._digests[name]})
            if _state(data) != before:
                self._target.delete(name)
                raise ShardError(str(data), "changed while it was sent; run the upload again")
        return info

    def read_back(self, file: FileInfo) -> None:
        """Compare the hash of the object's bytes with the file's. Raises ShardError if they differ."""
        if (got := self._hash_of_object(file)) != (digest := self._digest(file)):
            where = f"{self._target.url}/{file.basename}"
            raise ShardError(where, f"has {CONTENT_HASH} {got}, but {digest} was sent; run the upload again")

    def _digest(self, file: FileInfo) -> str:
        if file.basename not in self._digests:
            with self._files.open(file.basename) as data:
                self._digests[file.basename] = _checked_digest(file, data)
        return self._digests[file.basename]

    def _hash_of_object(self, file: FileInfo) -> str:
        return hash_object(self._target, file.basename, [CONTENT_HASH])[CONTENT_HASH]


class CommitSender(Sender):
    """Sends files of this machine to a store that writes in commits, up to `COMMIT_FILES` files per commit.

    An interrupted commit leaves nothing visible, and contents that it sent need not be sent again.
    """

    def __init__(self, target: CommitStore, files: LocalFiles) -> None:
        super().__init__(target, files)
        self._commits = target

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        """Return whether the object's version matches the file. Raises ShardError if the file is damaged."""
        self._digest(file)
        with self._files.open(file.basename) as data:
            return content_version(data, len(found.version)) == found.version

    def place_together(self, files: Sequence[FileInfo]) -> Iterable[Mapping[str, ObjectInfo]]:
        """Send missing files in commits. Raises ShardError if one is damaged or changes while it is sent."""
        listed = {info.key: info for info in self._target.list()}
        lock = threading.Lock()
        missing: set[str] = set()

        def look(file: FileInfo) -> None:
            found = listed.get(file.basename)
            if found is None or found.bytes != file.bytes or not self.is_there(file, found):
                with lock:
                    missing.add(file.basename)

        if errors := run_all(files, look, _COMMIT_THREADS):
            raise errors[0][1]
        for group in self._groups([file for file in files if file.basename in missing]):
            yield self._place_group(group)

    def _place_group(self, group: Sequence[FileInfo]) -> Mapping[str, ObjectInfo]:
        with ExitStack() as stack:
            data = {file.basename: stack.enter_context(self._files.open(file.basename)) for file in group}
            before = {name: _state(each) for name, each in data.items()}

            def check(file: FileInfo) -> None:
                if self._files.known_digest(file.basename) is None:
                    self._digests[file.basename] = _checked_digest(file, data[file.basename])

            if errors := run_all(group, check, _COMMIT_THREADS):
                raise errors[0][1]
            placed = self._commits.commit(data)
            changed = [name for name, state in before.items() if _state(data[name]) != state]
            if changed:
                self._commits.commit({}, changed)
                raise ShardError(str(data[changed[0]]), "changed while it was sent; run the upload again")
        return placed

    def _groups(self, files: Iterable[FileInfo]) -> Iterator[list[FileInfo]]:
        """Yield groups of up to `COMMIT_FILES` files; a group ends when `_STAGED_BYTES` are to be fetched."""
        group: list[FileInfo] = []
        staged = 0
        for file in files:
            group.append(file)
            staged += file.bytes if self._files.is_staged(file.basename) else 0
            if len(group) == COMMIT_FILES or staged >= _STAGED_BYTES:
                yield group
                group, staged = [], 0
        if group:
            yield group


def sender_to(target: Store, files: LocalFiles) -> Sender:
    """Return a sender of files to a store: a `CommitSender` if the store writes in commits."""
    commits = commits_of(target)
    return Sender(target, files) if commits is None else CommitSender(commits, files)


class Receiver:
    """Fetches objects of a store into a folder."""

    def __init__(self, source: Store, folder: Path) -> None:
        self._source, self._folder, self._target = source, folder, LocalStore(folder)

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        """Return whether the file has the expected hash; if none is known, False, so that it is fetched."""
        expected = self._expected(file)
        if expected is None:
            return False
        name, digest = expected
        return hash_file(self._folder / file.basename, [name]) == {name: digest}

    def place_together(self, files: Sequence[FileInfo]) -> Iterable[Mapping[str, ObjectInfo]]:
        return ()

    def place(self, file: FileInfo) -> ObjectInfo:
        """Fetch a file. Raises ShardError if its hash is wrong in `MAX_TRIES` fetches."""
        path = self._folder / file.basename
        temporary = part_of(path)
        where = f"{self._source.url}/{file.basename}"
        expected = self._expected(file)
        try:
            make_folder(path.parent)
            for _ in range(MAX_TRIES):
                got = self._fetch(file, temporary, CONTENT_HASH if expected is None else expected[0])
                if expected is None or got == expected[1]:
                    temporary.rename(path)
                    return self._target.head(file.basename)
            stated = "{} {}".format(*expected or ())
            raise ShardError(
                where, f"has {got}, expected {stated}; it was fetched {MAX_TRIES} times: upload it again"
            )
        except OSError as error:
            raise StoreError(str(path), f"cannot be written: {error.strerror or error}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def read_back(self, file: FileInfo) -> None:
        """Do nothing: all bytes were hashed when they arrived."""

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
        """Return (hash name, digest) from index, card or the object's metadata, or None if none is known."""
        if name := checkable_hash(file):
            return name, file.hashes[name]
        digest = self._source.head(file.basename).metadata.get(METADATA_NAME)
        return None if digest is None else (CONTENT_HASH, digest)


class Placer:
    """Places files of this machine in a folder: `place(source, target)` atomically creates a durable file."""

    def __init__(
        self, folder: Path, files: LocalFiles, place: Callable[[Path, Path], None] = link_or_copy
    ) -> None:
        self._folder, self._files, self._place = folder, files, place
        self._target = LocalStore(folder)

    def is_there(self, file: FileInfo, found: ObjectInfo) -> bool:
        """Return whether the folder's file has the known digest, else the same bytes or the same inode."""
        path = self._folder / file.basename
        if digest := self._files.known_digest(file.basename):
            return hash_file(path, [CONTENT_HASH]) == {CONTENT_HASH: digest}
        with self._files.open(file.basename) as data:
            return path.read_bytes() == data if isinstance(data, bytes) else path.samefile(data)

    def place_together(self, files: Sequence[FileInfo]) -> Iterable[Mapping[str, ObjectInfo]]:
        return ()

    def place(self, file: FileInfo) -> ObjectInfo:
        """Place a file under its name. Raises StoreError if the folder cannot be written."""
        path = self._folder / file.basename
        with self._files.open(file.basename) as data:
            if isinstance(data, bytes):
                return self._target.put(file.basename, data)
            try:
                make_folder(path.parent)
                self._place(data, path)
            except OSError as error:
                raise StoreError(str(path), f"cannot be written: {error.strerror or error}") from error
        return self._target.head(file.basename)

    def read_back(self, file: FileInfo) -> None:
        """Do nothing: the process that made the files has verified them."""


@contextmanager
def transfer_store(
    place: str | os.PathLike[str] | Store, storage: StorageOptions | None = None
) -> Iterator[Store]:
    """Yield the store at a URL, with retries for a remote one, and close it at the end.

    A `Store` object is yielded as it is and left open.
    """
    if not isinstance(place, str | os.PathLike):
        yield place
        return
    store: Store = connect(place, storage) if is_remote(place) else open_store(place)
    try:
        yield store
    finally:
        store.close()


def holds_dataset(folder: Path) -> bool:
    """Return whether a folder has an index. Raises RefusedError if it has files, but no index or marker."""
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise RefusedError(str(folder), "is not a folder; choose another")
    names = {path.name for path in folder.iterdir()}
    if names.isdisjoint({*INDEX_NAMES, MARKER_NAME}):
        others = sorted(name for name in names if not name.startswith("."))
        if others:
            problem = f"holds files that are not a dataset (first: {others[0]}); choose another, or empty it"
            raise RefusedError(str(folder), problem)
    return not names.isdisjoint(INDEX_NAMES)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder and lock it for writing a dataset. Raises RefusedError if another process holds the
    lock.

    The lock is a file in the folder, because machines may have only this folder in common. A folder that was
    created here and is empty at the end is removed.
    """
    lock, descriptor = folder / LOCK_NAME, None
    try:
        is_new = make_folder(folder)
        try:
            descriptor = held_file(lock, shared=False)
        except OSError as error:
            if error.errno not in (ENOLCK, ENOSYS, ENOTSUP):  # some network file systems have no locks
                raise
        else:
            if descriptor is None:
                problem = "another process is writing a dataset into this folder; wait for it, or end it"
                raise RefusedError(str(folder), problem)
    except OSError as error:
        raise StoreError(str(folder), f"cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        try:
            lock.unlink(missing_ok=True)
            if is_new:
                with suppress(OSError):  # keep a folder that has files by now
                    folder.rmdir()
        finally:
            if descriptor is not None:
                os.close(descriptor)


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary files and the lock that a killed process left in a folder."""
    found = [path for pattern in (*_LEFTOVERS, LOCK_NAME) for path in folder.rglob(pattern)]
    return sorted(found)


def clear_leftovers(folder: Path) -> None:
    """Delete the temporary files of a killed process. The folder must be locked."""
    for path in leftovers(folder):
        if path.name != LOCK_NAME:
            path.unlink(missing_ok=True)


def _checked_digest(file: FileInfo, data: Path | bytes) -> str:
    """Return the file's xxh3-128. Raises ShardError if the file does not have its hash from index or card."""
    stated = checkable_hash(file)
    names = {CONTENT_HASH, *([stated] if stated else ())}
    hashes = hash_bytes(data, names) if isinstance(data, bytes) else hash_file(data, names)
    if stated and hashes[stated] != file.hashes[stated]:
        raise ShardError(
            file.basename if isinstance(data, bytes) else data,
            f"is damaged, and was not sent: {stated} is {hashes[stated]}, expected {file.hashes[stated]}",
        )
    return hashes[CONTENT_HASH]


def _state(data: Path | bytes) -> tuple[int, int, int] | None:
    """Return (inode, bytes, mtime in ns) of a file, to detect changes; None for bytes in memory."""
    if isinstance(data, bytes):
        return None
    try:
        status = data.stat()
    except OSError as error:
        raise ShardError(data, f"cannot be read: {error.strerror or error}") from error
    return status.st_ino, status.st_size, status.st_mtime_ns
