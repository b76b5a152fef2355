"""The node's cache: one folder that all processes of a machine share, and nothing else between them.

    FOLDER/shardkit-cache-1/shards/NAME          an entry: whole, synced, sealed (see `shardkit.cache.entry`)
                            filling/NAME~PID~N   being filled, flocked by its writer
                            leases/NAME          flocked by whoever fetches the entry
                            damaged/…            the last few entries that failed their seal or their hashes
                            lock                 flocked while room is made

An entry appears by rename, after its bytes are synced. Readers map it and check its seal at their first use
of that file; a map stays readable after the entry is evicted. A file in filling/ whose flock is free belongs
to a process that died: it is removed. Whatever is killed, and whenever, leaves nothing that would be trusted
wrongly. Nothing outside of the sub-folder is ever read or removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardkit.cache.contract import Contents, Held
from shardkit.cache.entry import SEAL_BYTES, is_sealed, seal, sealed_size
from shardkit.cache.locks import FileLock
from shardkit.errors import ShardkitError

__all__ = ["CacheFolder", "CacheFolderError"]

Bytes = npt.NDArray[np.uint8]

SUBFOLDER = "shardkit-cache-1"
_KEPT_DAMAGED = 4
_LOCK_SECONDS = 10.0  # making room takes milliseconds: who holds the lock for longer has been stopped
_MIN_FREE_BYTES, _MIN_FREE_SHARE = 2 << 30, 0.02  # of the disk: full disks break other programs, too
_numbers = itertools.count()


class CacheFolderError(ShardkitError):
    """The cache folder cannot be used; the message says which and why."""


class CacheFolder:
    """Entries in a folder of a local disk, at most `capacity` bytes; None: all but a reserve of the disk."""

    def __init__(self, folder: str | os.PathLike[str], capacity: int | None = None) -> None:
        self._root = Path(folder).absolute() / SUBFOLDER
        self._seen: dict[str, tuple[int, int, int]] = {}  # entries whose seal this process has checked
        self._counters: Counter[str] = Counter()
        self._mutex = threading.Lock()
        self._listing: tuple[int, dict[str, tuple[int, float]]] = (0, {})
        try:
            for name in ("shards", "filling", "leases", "damaged"):
                (self._root / name).mkdir(parents=True, exist_ok=True)
            usage = shutil.disk_usage(self._root)
            self._min_free = min(_MIN_FREE_BYTES, int(usage.total * _MIN_FREE_SHARE))
            self._remove_abandoned()
        except OSError as error:
            problem = f"the cache folder cannot be used: {error.strerror or error}"
            raise CacheFolderError(f"{folder}: {problem}; give another cache_dir") from error
        held = sum(entry.bytes for entry in self.contents().values())
        self._capacity = max(0, usage.free - self._min_free + held) if capacity is None else capacity

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def capacity(self) -> int:
        return self._capacity

    def find(self, name: str) -> Bytes | None:
        file = self._root / "shards" / name
        try:
            with file.open("rb") as handle:
                status = os.fstat(handle.fileno())
                if status.st_size < SEAL_BYTES:
                    self._quarantine(file)
                    return None
                data = _map(handle.fileno(), status.st_size, mmap.ACCESS_READ)
                identity = (status.st_ino, status.st_size, status.st_mtime_ns)
                if self._seen.get(name) != identity:
                    if not is_sealed(data, name):
                        self._quarantine(file)
                        return None
                    self._seen[name] = identity
                with contextlib.suppress(OSError):  # another user's file: then it only looks older than it is
                    os.utime(handle.fileno(), ns=(time.time_ns(), status.st_mtime_ns))
        except FileNotFoundError:
            return None
        return data[:-SEAL_BYTES]

    def has(self, name: str) -> bool:
        return (self._root / "shards" / name).exists()

    def contents(self) -> Contents:
        now = time.time()
        entries = {name: Held(size, now - used) for name, (size, used) in self._list_shards().items()}
        for file in _files(self._root / "filling"):
            with contextlib.suppress(FileNotFoundError):
                entries[file.name.partition("~")[0]] = Held(file.stat().st_size, 0.0, filling=True)
        return entries

    def reserve(
        self, name: str, raw_bytes: int, victims: Callable[[Contents], Iterable[str]]
    ) -> FolderSlot | None:
        needed = sealed_size(raw_bytes)
        lock = FileLock(self._root / "lock", keep=True)
        try:
            if needed > self._capacity or not lock.acquire(_LOCK_SECONDS):
                return None
            try:
                if not self._make_room(needed, victims):
                    return None
                return FolderSlot(self, name, self._root / "filling", needed)
            finally:
                lock.release()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return None
            raise CacheFolderError(
                f"{self._root}: {error.strerror or error}; give another cache_dir"
            ) from error

    def lease(self, name: str, timeout_seconds: float = 0.0) -> FileLock | None:
        lock = FileLock(self._root / "leases" / name)
        return lock if lock.acquire(timeout_seconds) else None

    def counters(self) -> dict[str, int]:
        return {key: self._counters[key] for key in ("evictions", "evicted_bytes", "quarantined")}

    def free_disk_bytes(self) -> int | None:
        try:
            return shutil.disk_usage(self._root).free
        except OSError:
            return None

    def __getstate__(self) -> tuple[Path, int]:
        return self._root.parent, self._capacity

    def __setstate__(self, state: tuple[Path, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def enter(self, name: str, file: Path, data: Bytes, descriptor: int) -> None:
        """Make a filled file an entry; what a slot ends with."""
        target = self._root / "shards" / name
        file.rename(target)
        status = os.fstat(descriptor)
        self._seen[name] = (status.st_ino, status.st_size, status.st_mtime_ns)

    def set_aside(self, file: Path) -> None:
        """Keep what is damaged, the last few, for whoever wants to know how."""
        self._counters["quarantined"] += 1
        folder = self._root / "damaged"
        with contextlib.suppress(FileNotFoundError):
            file.rename(folder / f"{file.name.partition('~')[0]}~{time.time_ns()}")
        kept = sorted(_files(folder), key=lambda f: f.name.rpartition("~")[2])
        for old in kept[:-_KEPT_DAMAGED]:
            old.unlink(missing_ok=True)

    def _quarantine(self, file: Path) -> None:
        # Under the lease, so that an entry which another process has just fetched again is left alone.
        lease = self.lease(file.name, _LOCK_SECONDS)
        try:
            with contextlib.suppress(FileNotFoundError), file.open("rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                if size >= SEAL_BYTES and is_sealed(_map(handle.fileno(), size, mmap.ACCESS_READ), file.name):
                    return
                self.set_aside(file)
        finally:
            if lease is not None:
                lease.release()

    def _make_room(self, needed: int, victims: Callable[[Contents], Iterable[str]]) -> bool:
        """Evict until `needed` bytes fit; the folder's lock is held by the caller."""
        contents = self.contents()
        used = sum(entry.bytes for entry in contents.values())
        if self._fits(used, needed):
            return True
        self._remove_abandoned()
        contents = self.contents()
        used = sum(entry.bytes for entry in contents.values())
        for victim in victims(contents):
            if self._fits(used, needed):
                return True
            entry = contents.get(victim)
            if entry is None or entry.filling:
                continue
            try:
                (self._root / "shards" / victim).unlink()
            except FileNotFoundError:
                continue
            self._seen.pop(victim, None)
            used -= entry.bytes
            self._counters["evictions"] += 1
            self._counters["evicted_bytes"] += entry.bytes
        return self._fits(used, needed)

    def _fits(self, used: int, needed: int) -> bool:
        return (
            used + needed <= self._capacity and shutil.disk_usage(self._root).free - needed >= self._min_free
        )

    def _list_shards(self) -> dict[str, tuple[int, float]]:
        """{name: (bytes, time of last use)}; listed again only if an entry has come or gone."""
        folder = self._root / "shards"
        with self._mutex:
            changed = folder.stat().st_mtime_ns
            if changed != self._listing[0] or time.time_ns() - changed < 100_000_000:  # the clock is coarse
                listed = {}
                with os.scandir(folder) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat()
                            listed[entry.name] = (status.st_size, status.st_atime)
                self._listing = (changed, listed)
            return self._listing[1]

    def _remove_abandoned(self) -> None:
        for file in _files(self._root / "filling"):
            with contextlib.suppress(OSError), file.open("rb") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its writer lives
                file.unlink(missing_ok=True)


class FolderSlot:
    """Room in a `CacheFolder`: a file of its final size, mapped."""

    def __init__(self, cache: CacheFolder, name: str, folder: Path, size: int) -> None:
        self._cache, self._name = cache, name
        self._file, self._descriptor = _create_locked(folder, name)
        try:
            os.posix_fallocate(self._descriptor, 0, size)  # a full disk is an error here, not a SIGBUS later
            self._entry: Bytes | None = _map(self._descriptor, size, mmap.ACCESS_WRITE)
        except BaseException:
            self._end(keep=False)
            raise

    @property
    def data(self) -> Bytes:
        assert self._entry is not None
        return self._entry[:-SEAL_BYTES]

    def commit(self) -> Bytes:
        assert self._entry is not None
        size = len(self._entry)
        try:
            seal(self._entry, self._name)
            os.fsync(self._descriptor)
            self._entry = None
            data = _map(self._descriptor, size, mmap.ACCESS_READ)
            self._cache.enter(self._name, self._file, data, self._descriptor)
        except OSError as error:
            self._end(keep=False)
            problem = f"cannot be written: {error.strerror or error}; the disk may be failing"
            raise CacheFolderError(f"{self._file}: {problem}") from error
        self._end(keep=True)
        return data[:-SEAL_BYTES]

    def discard(self, *, damaged: bool = False) -> None:
        if damaged and self._descriptor >= 0:
            self._cache.set_aside(self._file)
        self._end(keep=damaged)

    def _end(self, *, keep: bool) -> None:
        if self._descriptor >= 0:
            if not keep:
                self._file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
        self._entry = None


def _create_locked(folder: Path, name: str) -> tuple[Path, int]:
    """A new file that nobody else can have, flocked."""
    while True:
        file = folder / f"{name}~{os.getpid()}~{next(_numbers)}~{time.time_ns()}"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return file, descriptor
        except BlockingIOError:
            pass  # taken for abandoned between these two calls
        os.close(descriptor)


def _map(descriptor: int, size: int, access: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, size, access=access), dtype=np.uint8)


def _files(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        for entry in entries:
            yield folder / entry.name
